"""The script calls of people and tools: arguments in, a :class:`ScriptCall` out.

As in :mod:`.calls`, nothing here asks a server or reads a clock, and ``parse`` of a call counts
what it did.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..metrics import count_first
from ..model import results, scores
from ..model.keys import Slot
from ..model.message import decode_key
from ..model.topic import Topic, base_of
from ..scripts.call import Countdown, ScriptCall, load, rows, text, texts
from .calls import Context

#: Messages that one call of purge deletes per slot.
PURGE_STEP = 1000


class Place(NamedTuple):
    """A slot, and the ids to look for there."""

    topic: Topic
    slot: Slot
    ids: Sequence[str]


#: Where reading of a slot begins: behind this score and id there, or in a later slot and place.
Begin = tuple[int, bytes, int, int]


class Position(NamedTuple):
    """Where a scan is. A scan reads in the order of its positions, which is total."""

    score: int
    topic: str
    id: bytes
    slot: int
    kind: int

    def within(self, topic: str) -> Begin:
        """Where reading of a topic's slots begins."""
        if topic == self.topic:
            return self.score, self.id, self.slot, self.kind
        # Of those with the same score, the ones of earlier topics have been read.
        return self.score + (topic < self.topic), b"", -1, -1


class SlotPage(list[tuple[results.Found, Position]]):
    """What one call has read of a slot. cut: there is more, but it would have had too many
    bytes."""

    def __init__(self, read: Iterable[tuple[results.Found, Position]], cut: bool) -> None:
        super().__init__(read)
        self.cut = cut


class CancelReply(NamedTuple):
    """What one call of cancel did."""

    cancelled: list[results.Cancelled]
    done: int  #: how many of the ids it looked at: it ends early if the bodies are large


class CheckReply(NamedTuple):
    """What one call of check found."""

    faults: list[results.Fault]
    cursor: str  #: where to go on; ``0``: this part of the slot is done
    size: int  #: bytes that were looked at


class AdminCommands:
    """Makes the calls of people and tools."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._announcing = context.announcing
        self._counts = context.counts

    # -- by id

    def get(self, places: Sequence[Place]) -> ScriptCall:
        """Look messages up by id, and copies that share it. Result: a list of :class:`Found`."""
        keys: list[str] = []
        args: list[Any] = [len(places)]
        for _, slot, ids in places:
            keys += (slot.prepare, slot.dead, slot.reasons, slot.body, slot.tokens, *slot.stores)
            keys += map(slot.copies, ids)
            args += (len(slot.stores), len(ids), *ids)

        def parse(raw: list[Any]) -> list[results.Found]:
            messages = []
            for at, id, state, step, score, body, note, token in rows(raw, 8):
                place, told = places[at], _reason_and_error(note)
                what = (text(id), results.STATES[state], step, score, body)
                messages.append(
                    results.Found(place.topic.name, place.slot.number, *what, *told, text(token))
                )
            return messages

        return ScriptCall(load("get"), keys, args, parse)

    def cancel(
        self, place: Place, states: Collection[str], *, copies: bool, bodies: bool
    ) -> ScriptCall:
        """Delete messages that are in one of these states. Result: :class:`CancelReply`.

        copies: also the copies that share the ids
        bodies: read what is deleted; then a call looks at fewer ids if the bodies are large
        """
        topic, slot, ids = place
        counts = self._counts(topic)

        def parse(raw: list[Any]) -> CancelReply:
            cancelled = []
            for id, state, deleted, tried, body, token in rows(raw[0], 6):
                what = (results.STATES[state], bool(deleted), bool(tried), body, text(token))
                cancelled.append(results.Cancelled(topic.name, text(id), *what))
            dead = sum(one.deleted for one in cancelled if one.state == results.DEAD)
            counts.purged += dead
            counts.cancelled += sum(one.deleted for one in cancelled) - dead
            return CancelReply(cancelled, raw[1])

        keys = [key for id in ids for key in (slot.copies(id), slot.copies(base_of(id)))]
        return self._announcing(
            topic,
            "cancel",
            (*slot.script_keys, slot.claims, slot.log, *keys),
            (
                len(slot.stores),
                slot.number,
                *(int(state in states) for state in results.STATES.values()),
                int(copies),
                self._context.pop_bytes if bodies else 0,
                topic.declaration.logs,
                *ids,
            ),
            parse,
            limited=slot if topic.declaration.lanes else None,
        )

    def reschedule(
        self, topic: Topic, slot: Slot, id: str, when: str | Countdown, *, copies: bool
    ) -> ScriptCall:
        """Give one message another action time. Result: a list of :class:`Rescheduled`.

        when: as :func:`.scripts.call.when_of` makes it
        copies: also the copies that share the id
        """
        counts = self._counts(topic)

        def parse(raw: list[Any]) -> list[results.Rescheduled]:
            rescheduled = []
            for id, state, score in rows(raw[0], 3):
                moved = state == 1
                counts.rescheduled += moved
                what = (results.STATES[state], moved, scores.action_time(score) if moved else 0)
                rescheduled.append(results.Rescheduled(topic.name, text(id), *what))
            return rescheduled

        return self._announcing(
            topic,
            "reschedule",
            (*slot.script_keys, slot.copies(id), slot.log),
            (len(slot.stores), slot.number, id, when, int(copies), topic.declaration.logs),
            parse,
        )

    def requeue(self, place: Place) -> ScriptCall:
        """Take messages out of DeadQueue and have them delivered now. Result: how many."""
        topic, slot, ids = place
        return self._announcing(
            topic,
            "requeue",
            (*slot.script_keys, slot.claims, slot.log),
            (
                *(len(slot.stores), slot.number, topic.declaration.retries),
                *(topic.declaration.logs, *ids),
            ),
            partial(count_first, self._counts(topic), "requeued"),
        )

    # -- whole slots

    def purge(self, topic: Topic, slot: Slot) -> ScriptCall:
        """Delete waiting messages, at most PURGE_STEP. Result: how many, and the ids of copies
        that are to be removed from their copies sets."""
        counted = partial(count_first, self._counts(topic), "purged")

        return self._announcing(
            topic,
            "purge",
            (slot.announced_times, slot.body, slot.reasons, slot.tokens, *slot.stores, slot.claims),
            (len(slot.stores), slot.number, PURGE_STEP),
            lambda raw: (counted(raw), texts(raw[1])),
            limited=slot if topic.declaration.lanes else None,
        )

    def check(
        self,
        topic: Topic,
        slot: Slot,
        other_steps: Sequence[int],
        part: int,
        cursor: str,
        *,
        step: int,
        repair: bool,
    ) -> ScriptCall:
        """Look for inconsistencies in one part of a slot. Result: :class:`CheckReply`.

        other_steps: priority steps that the topic lacks and that messages may wait under
        part: number of the key that is looked through: one of the slot's `script_keys`, or one
            of the stores of `other_steps` behind them; from 1
        step: about how many ids the call looks at
        repair: mend each fault at once
        """
        keys = (*slot.script_keys, *map(slot.store, other_steps))

        def parse(raw: list[Any]) -> CheckReply:
            cursor, flat, size, *_ = raw
            faults = []
            for kind, id, places in rows(flat, 3):
                what = (results.FAULT_KINDS[kind], text(id), tuple(keys[at - 1] for at in places))
                faults.append(results.Fault(topic.name, slot.number, *what))
            return CheckReply(faults, cursor.decode(), size)

        return self._announcing(
            topic,
            "check",
            keys,
            (
                len(slot.stores),
                slot.number,
                part,
                cursor,
                step,
                int(repair),
                scores.lease(0, 0, topic.declaration.retries),
                *(topic.step_index(other) for other in other_steps),
            ),
            parse,
            limited=slot if topic.declaration.lanes else None,
        )

    def recount(self, topic: Topic, slots: Sequence[Slot], *, repair: bool) -> ScriptCall:
        """Compare what runs of a topic that is limited with what is counted. Result: a list of
        :class:`Fault`."""
        keys = [key for slot in slots for key in (slot.prepare, slot.tokens, slot.busy)]
        gate = self._context.gate_of(topic, slots[0])

        def parse(raw: list[Any]) -> list[results.Fault]:
            faults = []
            for at, key, _, _ in rows(raw, 4):
                busy = slots[at].busy if key else gate.busy
                what = (results.MISCOUNTED, decode_key(text(key)), (busy,))
                faults.append(results.Fault(topic.name, slots[at].number, *what))
            return faults

        return ScriptCall(load("recount"), (*keys, gate.busy), (int(repair),), parse)

    def check_copies(self, topic: Topic, slot: Slot, key: str, *, repair: bool) -> ScriptCall:
        """Look for names of messages that are gone in a copies set. Result: a list of
        :class:`Fault`."""

        def parse(raw: list[bytes]) -> list[results.Fault]:
            return [
                results.Fault(topic.name, slot.number, results.STRAY_COPY, id, (key,))
                for id in texts(raw)
            ]

        return ScriptCall(load("check_copies"), (key, slot.body), (int(repair),), parse)

    def vacate(self, topic: Topic, slot: Slot) -> ScriptCall:
        """Delete what is left of a slot without messages. Result: False if it has any."""
        kept = {slot.body, slot.leaving, *slot.of_schedules()} - {slot.schedule_names}
        others = [key for key in slot.all() if key not in kept]
        return ScriptCall(
            load("vacate"), (slot.body, *others, *map(slot.store, topic.other_steps())), (), bool
        )

    # -- reading

    def counts(self, topic: Topic, slots: Sequence[Slot]) -> ScriptCall:
        """Count messages. Result: a list of :class:`Counts`, one a slot."""
        keys: list[str] = []
        for slot in slots:
            keys += (slot.prepare, slot.dead, *slot.stores)
        return ScriptCall(
            load("counts"),
            keys,
            (len(slots), len(topic.steps), 0),
            lambda raw: [results.Counts(*counts[:4]) for counts in rows(raw, 5)],
        )

    def coming(self, slot: Slot, times_us: Sequence[int]) -> ScriptCall:
        """Count waiting messages that are due by each of some times, microseconds from now.
        Result: a list of numbers."""
        return ScriptCall(load("coming"), slot.stores, times_us, list)

    def summary(self, slot: Slot) -> ScriptCall:
        """Result: :class:`Counts`, and for how many microseconds the oldest due message has been
        due."""
        return ScriptCall(
            load("counts"),
            (slot.prepare, slot.dead, *slot.stores),
            (1, len(slot.stores), 1),
            lambda raw: (results.Counts(*raw[:4]), raw[4]),
        )

    def usage(self, slot: Slot) -> ScriptCall:
        """Tell what is used of a topic's limits in a slot. Result: :class:`SlotUsage`."""
        _, turns, waits, pace, _, busy, _ = slot.lane_keys
        return ScriptCall(
            load("usage"),
            (turns, waits, pace, busy, slot.put_pace, *slot.stores),
            (),
            lambda raw: results.SlotUsage(*raw),
        )

    def scan(
        self,
        topic: Topic,
        slot: Slot,
        states: Collection[str],
        begin: Begin | None,
        step: int,
        *,
        since_us: int | None,
        until_us: int | None,
        bodies: bool,
        budget: int,
    ) -> ScriptCall:
        """Read messages of a slot in the order of their scores. Result: :class:`SlotPage`.

        begin: where to begin; at the first message if None
        step: how many at most
        since_us, until_us: bounds of their times, microseconds since the epoch
        bodies: read their bodies, too
        budget: bytes that the bodies may have together
        """
        lanes = topic.declaration.lanes
        # Below 0 is what waits in lanes: it is read apart, in its order.
        low = "0" if lanes else "-inf"
        if since_us is not None:
            low = str(max(since_us, 0) // 1000 * 1000)
        high = "+inf" if until_us is None else str(max(until_us, 0) // 1000 * 1000 + 999)
        steps = len(slot.stores)
        kinds = [
            *((results.WAITING, key, at) for at, key in enumerate(slot.stores)),
            (results.IN_FLIGHT, slot.prepare, steps),
            (results.DEAD, slot.dead, steps + 1),
        ]
        if lanes:
            kinds += [(results.WAITING, key, steps + 2 + at) for at, key in enumerate(slot.stores)]
        kinds = [kind for kind in kinds if kind[0] in states]

        def parse(raw: list[Any]) -> SlotPage:
            read = []
            for kind, id, score, body, note, token in rows(raw, 6):
                state, _, number = kinds[kind]
                at = scores.read_lease(score).step
                if state == results.WAITING:
                    at = number if number < steps else number - steps - 2
                what = (text(id), state, at, score, body)
                told = _reason_and_error(note)
                found = results.Found(topic.name, slot.number, *what, *told, text(token))
                read.append((found, Position(score, topic.name, id, slot.number, number)))
            return SlotPage(read, len(raw) % 6 > 0)

        where: tuple[Any, ...] = ("", "")
        if begin is not None:
            score, id, *here = begin
            later = [int([slot.number, number] > here) for _, _, number in kinds]
            where = (score, id)
        else:
            later = [0] * len(kinds)
        return ScriptCall(
            load("scan"),
            (slot.body, slot.reasons, slot.tokens, *(key for _, key, _ in kinds)),
            (
                *(step, low, high, int(bodies), budget, *where),
                *(
                    flag + 2 * (number >= steps + 2)
                    for flag, (_, _, number) in zip(later, kinds, strict=True)
                ),
            ),
            parse,
        )


def _reason_and_error(raw: bytes) -> tuple[str, str]:
    """(reason, last error) as the scripts keep them."""
    reason, _, error = raw.decode("utf-8", "replace").partition("\n")
    return reason, error
