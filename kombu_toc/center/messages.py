"""Looks messages up by id, changes those that it finds, and reads them in order.

A message is looked for in every slot that could have it, of one topic or of all, in pipelined
round trips: each slot costs O(log n), whatever waits in it. That is the slot that the id picks;
of a topic that was given a slot basis, or that an older release has declared, it is every slot.

Several messages may have an id: a retry has the id of the task that is still running, and a
sender that gives another slot basis puts its message into another slot. All of them are found.
"""

from __future__ import annotations

import base64
import heapq
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ..errors import ConfigurationError, PartialError
from ..metrics import count_first
from ..model import results, scores
from ..model.delivery import is_receipt, name_in, origin_in
from ..model.limits import MAX_SLOTS
from ..model.results import STATES, WAITING, Begin, Cancelled, Found, Page, Position, Rescheduled
from ..model.topic import Slot, Topic, base_of
from ..scripts.call import Countdown, ScriptCall, load, microseconds, parts_of, rows, text, when_of
from .calls import Context, batches_within
from .core import CenterPart, Core
from .runner import Away
from .schedules import Recurring
from .upkeep import carry_on

T = TypeVar("T", Found, Cancelled, Rescheduled)

#: Ids that one call looks for, in one slot.
IDS_PER_CALL = 100

#: Calls that leave together.
CALLS_TOGETHER = 500


# -- the calls: arguments in, a :class:`ScriptCall` out
#
# As in :mod:`.calls`, nothing here asks a server or reads a clock, and ``parse`` of a call counts
# what it did.


class Place(NamedTuple):
    """A slot, and the ids to look for there."""

    topic: Topic
    slot: Slot
    ids: Sequence[str]


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


def get_call(places: Sequence[Place]) -> ScriptCall:
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


def cancel_call(
    context: Context, place: Place, states: Collection[str], *, copies: bool, bodies: bool
) -> ScriptCall:
    """Delete messages that are in one of these states. Result: :class:`CancelReply`.

    copies: also the copies that share the ids
    bodies: read what is deleted; then a call looks at fewer ids if the bodies are large
    """
    topic, slot, ids = place
    counts = context.counts(topic)

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
    return context.announcing(
        topic,
        "cancel",
        (*slot.script_keys, slot.claims, slot.log, *keys),
        (
            len(slot.stores),
            slot.number,
            *(int(state in states) for state in results.STATES.values()),
            int(copies),
            context.pop_bytes if bodies else 0,
            topic.declaration.logs,
            *ids,
        ),
        parse,
        limited=slot if topic.declaration.lanes else None,
    )


def reschedule_call(
    context: Context, place: Place, when: str | Countdown, *, copies: bool
) -> ScriptCall:
    """Give the one message of a place another action time. Result: a list of :class:`Rescheduled`.

    when: as :func:`.scripts.call.when_of` makes it
    copies: also the copies that share the id
    """
    topic, slot, [id] = place
    counts = context.counts(topic)

    def parse(raw: list[Any]) -> list[results.Rescheduled]:
        rescheduled = []
        for id, state, score in rows(raw[0], 3):
            moved = state == 1
            counts.rescheduled += moved
            what = (results.STATES[state], moved, scores.action_time(score) if moved else 0)
            rescheduled.append(results.Rescheduled(topic.name, text(id), *what))
        return rescheduled

    return context.announcing(
        topic,
        "reschedule",
        (*slot.script_keys, slot.copies(id), slot.log),
        (len(slot.stores), slot.number, id, when, int(copies), topic.declaration.logs),
        parse,
    )


def requeue_call(context: Context, place: Place) -> ScriptCall:
    """Take messages out of DeadQueue and have them delivered now. Result: how many."""
    topic, slot, ids = place
    return context.announcing(
        topic,
        "requeue",
        (*slot.script_keys, slot.claims, slot.log),
        (
            *(len(slot.stores), slot.number, topic.declaration.retries),
            *(topic.declaration.logs, *ids),
        ),
        partial(count_first, context.counts(topic), "requeued"),
    )


def scan_call(
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


# -- messages by id, by state and time

#: Messages that one call of scan reads from a slot, at most.
SCAN_STEP = 200

#: No score is higher: it is a whole number in a double.
_HIGHEST = 2**53


class Messages(CenterPart):
    """Finds messages by id, changes them, and reads them by state and time. In all of it, `topic`
    is the name of the topic to look at; without it, all declared topics are."""

    def __init__(self, core: Core, recurring: Recurring) -> None:
        super().__init__(core)
        self._recurring = recurring

    # -- looks them up by id

    def get(
        self,
        id: str | Iterable[str],
        *,
        topic: str | None = None,
        basis: str | None = None,
        far: bool = True,
    ) -> list[Found]:
        """Look messages up by id, and the copies that share it; an empty list if there is none.

        id: one, or several
        basis: slot basis, if the sender gave one: then only the slots are asked that it picks
        far: also those that are too far ahead to be in Redis; then databases are asked

        Raises PartialError while a node of a Cluster is away that may have one of the ids, and no
        other node has a message of that id.
        """
        ids = ids_of(id)
        library = self._far_of(topic) if far else None
        # Before Redis is asked: what is put there meanwhile is found there.
        ahead = library.get(ids, topic) if library is not None else []
        once: dict[Any, Found] = {}
        away = Away()
        for one in self.looked(partial(self._get, away=away), ids, topic, basis, away):
            known = self._registry.known(one.topic)
            # A reshard may move the message meanwhile: then it is seen in its old slot and again
            # in its new one.
            moves = known is not None and bool(known.declaration.draining_counts)
            once.setdefault(one._replace(slot=-1) if moves else one, one)
        messages = list(once.values())
        if ahead:
            there = {(one.topic, one.body, name_in(one.token)) for one in messages}
            messages += [
                one for one in ahead if (one.topic, one.body, name_in(one.token)) not in there
            ]
        return self.checked(ids, messages, away)

    def looked(
        self,
        look: Callable[[Iterator[Place]], list[T]],
        ids: Collection[str],
        topic: str | None,
        basis: str | None,
        away: Away,
    ) -> list[T]:
        """What a function finds at the places of these ids. It looks once more for what it has not
        found: a reshard may have had that between two nodes of a Cluster, and has it no more."""
        found = look(self.places(ids, topic, basis))
        if not self._runner.clustered or away or {base_of(one.id) for one in found}.issuperset(ids):
            return found
        drain = [one for one in self._registry.select(topic) if one.declaration.draining_counts]
        for one in drain:
            carry_on(self._runner, self._context, one)
        return found + look(self.places(ids, topic, basis)) if drain else found

    @staticmethod
    def checked(ids: str | Iterable[str], found: list[T], away: Away) -> list[T]:
        """What was found of some ids. Raises PartialError if one was not, and may be on a node that
        is away."""
        names = {base_of(one.id) for one in found} | {one.id for one in found}
        if away and not names.issuperset([ids] if isinstance(ids, str) else ids):
            return away.checked(found)
        return found

    def places(
        self, id: str | Iterable[str], topic: str | None, basis: str | None
    ) -> Iterator[Place]:
        """Where messages of these ids may be. Without `topic`, replies and the like are not looked
        through: nobody knows their ids."""
        ids = list(dict.fromkeys(ids_of(id)))
        for one in self._registry.select(topic):
            if topic is None and one.declaration.expires and one.declaration.named is False:
                continue
            for slot, named in one.places_of(ids, basis):
                yield from (Place(one, slot, part) for part in parts_of(named, IDS_PER_CALL))

    def run_at(
        self, places: Iterator[Place], command: Callable[[Place], ScriptCall], away: Away
    ) -> Iterator[tuple[Place, Any]]:
        """Run a command at each place; the place and the result, where there is one. A bounded
        number of calls leave together."""
        while together := list(itertools.islice(places, CALLS_TOGETHER)):
            replies = self._runner.run_there([command(place) for place in together], away)
            pairs = zip(together, replies, strict=True)
            yield from (pair for pair in pairs if pair[1] is not None)
        self._runner.send_counters()

    def run_for(
        self, found: Iterable[Found], command: Callable[[Place], ScriptCall], away: Away
    ) -> Iterator[tuple[Place, Any]]:
        """Run a command for these messages, a bounded number at a time; the place and the result
        of each call.

        away: notes the slots of nodes that are away
        """
        found = iter(found)
        while batch := list(itertools.islice(found, IDS_PER_CALL)):
            by_slot: dict[tuple[str, int], list[str]] = defaultdict(list)
            for message in batch:
                by_slot[message.topic, message.slot].append(message.id)
            places = []
            for (name, number), ids in by_slot.items():
                topic = self._registry.standing(name)
                places.append(Place(topic, topic.slot(number), ids))
            yield from self.run_at(iter(places), command, away)

    def _get(self, places: Iterator[Place], away: Away) -> list[Found]:
        # What lies on one server is asked for by one call: most places have nothing, and a call
        # costs more than to look into some.
        ids_per_call = 1 if self._runner.clustered else IDS_PER_CALL
        batches = batches_within(places, (ids_per_call,), lambda place: (len(place.ids),))
        calls = map(get_call, batches)
        messages: list[Found] = []
        while together := list(itertools.islice(calls, CALLS_TOGETHER)):
            for part in self._runner.run_there(together, away):
                messages += part or ()
        self._runner.send_counters()
        return messages

    # -- reads them in the order of their times, page by page

    def scan(
        self,
        topic: str | None = None,
        *,
        state: str | Collection[str] | None = None,
        since: float | None = None,
        until: float | None = None,
        where: Callable[[Found], Any] | None = None,
        limit: int = 100,
        after: str | None = None,
        size: int | None = None,
    ) -> Page:
        """Read messages in the order of their times, of one topic or of all together.

        state: WAITING, IN_FLIGHT or DEAD, or several of these; all unless given
        since, until: seconds since the epoch; only messages whose time (when they are due, when
            their lease ends, when they died) is not before `since`, and before `until`
        where: only messages for which this is true
        limit: how many at most
        after: where to go on: `after` of the page before this one
        size: bytes of bodies from which on the page ends, behind its first message; any number
            unless given

        Reads in small steps that each take the server O(log n). A message that is moved meanwhile
        may be seen twice, or not at all; one that stays is seen once. Raises ValueError for an
        unknown state, and for an `after` that no page has; PartialError, with the page of the
        others, while nodes of a Cluster are away, or another program has written a slot's key.
        """
        if type(limit) is not int or limit < 1:
            raise ValueError(f"limit must be a whole number from 1 up, not {limit!r}")
        step = SCAN_STEP if where else min(SCAN_STEP, limit + 1)
        messages: list[Found] = []
        held = 0
        cursor = _read_cursor(after)
        away = Away()
        for message, position in self.read(
            topic, state, since=since, until=until, cursor=cursor, step=step, away=away
        ):
            if len(messages) == limit or (messages and size is not None and held >= size):
                return away.checked(Page(messages, _write_cursor(cursor)))
            cursor = position
            if where is None or where(message):
                messages.append(message)
                held += len(message.body)
        return away.checked(Page(messages, None))

    def count(
        self,
        topic: str | None = None,
        *,
        state: str | Collection[str] | None = None,
        since: float | None = None,
        until: float | None = None,
        where: Callable[[Found], Any] | None = None,
    ) -> int:
        """How many messages :meth:`scan` would read, page by page: it looks at each. Raises
        PartialError as that does, with the number of the others."""
        away = Away()
        far = where is not None or since is not None or until is not None
        messages = self.read(
            topic, state, since=since, until=until, bodies=where is not None, far=far, away=away
        )
        number = sum(1 for one, _ in messages if where is None or where(one))
        if not far and self.far is not None and WAITING in _checked_states(state):
            number += sum(self.far.count(one.name) for one in self._registry.far(topic))
        return away.checked(number)

    def away(self) -> Away:
        """What :meth:`read` notes the slots in that nobody answers for."""
        return Away()

    def read(
        self,
        topic: str | Sequence[Topic] | None,
        state: str | Collection[str] | None,
        *,
        since: float | None = None,
        until: float | None = None,
        cursor: Position | None = None,
        step: int = SCAN_STEP,
        bodies: bool = True,
        slots: Collection[int] | None = None,
        far: bool = True,
        away: Away | None = None,
    ) -> Iterator[tuple[Found, Position]]:
        """Each message, and its position; as :meth:`scan`.

        topic: also several, as they are declared now
        cursor: read what comes after it
        step: how many messages are read at first, of all slots together
        bodies: read their bodies, too
        slots: only these; all unless given
        far: also what is too far ahead to be in Redis
        away: notes the slots of nodes that are away, and the others are read; without it, such a
            node is an error
        """
        states = _checked_states(state)
        topics = self._registry.select(topic) if isinstance(topic, str | None) else topic
        since_us, until_us = microseconds(since), microseconds(until)
        ahead: list[Iterator[tuple[Found, Position]]] = []
        if far and self.far is not None and WAITING in states:
            for one in topics:
                if one.declaration.far:
                    score, id, *_ = cursor.within(one.name) if cursor else (0, b"")
                    ahead.append(self.far.read(one, (score, id), since_us, until_us, step))
        places = [
            (one, slot)
            for one in topics
            for slot in one.all_slots()
            if slots is None or slot.number in slots
        ]
        span = len(places)
        # At first about twice as many as are asked for, of all slots together; more of a slot that
        # is read on.
        step = max(min(step, 2 * step // max(span, 1) + (8 if span <= 64 else 1)), 1)
        call = partial(
            scan_call,
            since_us=since_us,
            until_us=until_us,
            bodies=bodies,
            budget=self._context.pop_bytes // max(span, 1),  # a page of each slot is held at a time
        )
        run = self._runner.run_all
        if away is not None:
            run = partial(self._runner.run_there, away=away, misused=True)
        calls = [
            call(one, slot, states, cursor and cursor.within(one.name), step)
            for one, slot in places
        ]
        pages: list[SlotPage | None] = []
        for some in parts_of(calls, CALLS_TOGETHER):
            pages += run(some)

        def entries(
            one: Topic, slot: Slot, page: SlotPage | None
        ) -> Iterator[tuple[Found, Position]]:
            wanted = step
            while page is not None:
                yield from page
                if len(page) < wanted and not page.cut:
                    return
                last = page[-1][1]
                wanted = min(4 * wanted, SCAN_STEP)
                begin = (last.score, last.id, last.slot, last.kind)
                [page] = run([call(one, slot, states, begin, wanted)])

        for found, position in heapq.merge(
            *(entries(*each, page) for each, page in zip(places, pages, strict=True)),
            *ahead,
            key=lambda entry: entry[1],
        ):
            if since_us is not None and found.time_us < since_us:
                continue
            if until_us is not None and found.time_us >= until_us:
                continue
            yield found, position

    # -- changes them by id: cancel, reschedule

    def cancel(
        self,
        id: str | results.Found | Iterable[str | results.Found],
        *,
        topic: str | None = None,
        basis: str | None = None,
        in_flight: bool = False,
        dead: bool = True,
        revoked: bool = False,
    ) -> list[results.Cancelled]:
        """Delete messages by id, and the copies that share it.

        id: one, or several; a receipt of a delivery, and what :meth:`get` or :meth:`scan` has
            found, stand for just that message. One that has changed its state since is deleted if
            messages of that state are
        in_flight: also delete those that a consumer has taken; it is not told
        dead: also delete those that were given up on
        revoked: whether a task library is to have them as revoked, not as cancelled

        Returns what there was and whether it is deleted: a message that is in flight was cancelled
        too late. An empty list if there was none. Raises PartialError as :meth:`get`: what the
        other nodes have is deleted.
        """
        how = {"in_flight": in_flight, "dead": dead, "revoked": revoked}
        named, meant = _named(id)
        if receipts := [one for one in named if is_receipt(one)]:
            meant += [one for receipt in receipts for one in self._delivered_by(receipt)]
            named = [one for one in named if one not in receipts]
        if meant or not named:
            gone = self._cancel_found(meant, **how)
            return gone + (self.cancel(named, topic=topic, basis=basis, **how) if named else [])
        states = _states_to_cancel(in_flight, dead)

        command = partial(cancel_call, self._context, states=states, copies=True, bodies=True)
        far = self._far_of(topic)
        ahead = far.cancel(named, topic, revoked) if far is not None else []
        away = Away()

        def cancel(places: Iterator[Place]) -> list[results.Cancelled]:
            return self._all_cancelled(self.run_at(places, command, away), command)

        found = self.looked(cancel, named, topic, basis, away)
        if self._core.recorder is not None:
            known = named
            if away:  # of the others nothing is known
                there = {base_of(one.id) for one in found} | {one.id for one in found}
                known = [one for one in named if one in there]
            found += self._core.recorder.cancelled(known, found, topic, revoked)
        return self.checked(named, _with(ahead, found), away)

    def _delivered_by(self, receipt: str) -> list[results.Found]:
        """The message of a receipt, if it is still there."""
        delivery = results.Delivery.of_receipt(receipt)
        origin = origin_in(delivery.birth, delivery.slot)
        return [
            one
            for one in self.get(delivery.id, topic=delivery.topic)
            if one.id == delivery.id and origin_in(one.own_token, one.slot) == origin
        ]

    def _cancel_found(
        self, found: Sequence[results.Found], *, in_flight: bool, dead: bool, revoked: bool
    ) -> list[results.Cancelled]:
        states = _states_to_cancel(in_flight, dead)

        command = partial(cancel_call, self._context, states=states, copies=False, bodies=True)
        far = [one for one in found if one.far]
        ahead = [] if self.far is None else self.far.cancel(far, None, revoked)
        away = Away()
        cancelled = self._all_cancelled(self.run_for(found, command, away), command)
        if self._core.recorder is not None:
            self._core.recorder.deleted(cancelled, revoked)
        return away.checked(_with(ahead, cancelled))

    def _all_cancelled(
        self, replies: Iterable[tuple[Place, CancelReply]], command: Callable[[Place], ScriptCall]
    ) -> list[results.Cancelled]:
        """What was cancelled; asks again for ids that a call has not looked at."""
        cancelled: list[results.Cancelled] = []
        asked = list(replies)
        for place, reply in asked:  # it grows
            cancelled += reply.cancelled
            if reply.done < len(place.ids):
                left = place._replace(ids=place.ids[reply.done :])
                asked.append((left, self._runner.run(command(left))))
        firings: dict[str, list[str]] = defaultdict(list)
        for one in cancelled:
            if one.deleted and "@" in one.id:
                firings[one.topic].append(one.id)
        gone = {
            (topic, name)
            for topic, ids in firings.items()
            for name in self._recurring.recheck(topic, ids)
        }
        if not gone:
            return cancelled
        named = ((one, one.id.rpartition("@")[0]) for one in cancelled)
        return [
            one._replace(schedule=name) if one.deleted and (one.topic, name) in gone else one
            for one, name in named
        ]

    def reschedule(
        self,
        id: str | results.Found | Iterable[str | results.Found],
        *,
        at: float | None = None,
        delay: float | None = None,
        topic: str | None = None,
        basis: str | None = None,
    ) -> list[results.Rescheduled]:
        """Give a waiting message, and waiting copies of it, another action time; neither `at`
        nor `delay` means now.

        id: one or several; what :meth:`get` or :meth:`scan` has found stands for just these
            messages
        at: seconds since the epoch
        delay: seconds from now by Redis's clock

        Returns what there was and whether it is moved: only what is waiting can be. An empty
        list if there was none. Raises ActionTimeError beyond the year 2255, PartialError as
        :meth:`cancel`.
        """
        named, meant = _named(id)
        if meant or len(named) != 1:
            moved = self._reschedule_found(meant, at=at, delay=delay)
            for one in named:
                moved += self.reschedule(one, at=at, delay=delay, topic=topic, basis=basis)
            return moved
        times = microseconds(at), microseconds(delay)
        when, away = when_of(*times), Away()
        far = self._far_of(topic)
        ahead = far.reschedule(named, topic, *times) if far is not None else []

        move = partial(self._moved, when=when, away=away, copies=True)
        moved = self.looked(move, named, topic, basis, away)
        if self._core.recorder is not None and (moved or not away):
            moved += self._core.recorder.rescheduled(named, moved, topic, *times)
        return self.checked(named, _with(ahead, moved), away)

    def _reschedule_found(
        self, found: Sequence[results.Found], *, at: float | None, delay: float | None
    ) -> list[results.Rescheduled]:
        times = microseconds(at), microseconds(delay)
        when = when_of(*times)
        far = [one for one in found if one.far]
        ahead = [] if self.far is None else self.far.reschedule(far, None, *times)
        away, pairs = Away(), ((self._registry.resolved(one.topic), one) for one in found)
        places = (Place(topic, topic.slot(one.slot), [one.id]) for topic, one in pairs)
        moved = self._moved(places, when, away, copies=False)
        if self._core.recorder is not None:
            self._core.recorder.moved(moved, found)
        return away.checked(_with(ahead, moved))

    def _moved(
        self, places: Iterator[Place], when: str | Countdown, away: Away, *, copies: bool
    ) -> list[results.Rescheduled]:
        command = partial(reschedule_call, self._context, when=when, copies=copies)
        return [one for _, part in self.run_at(places, command, away) for one in part]

    def run_now(
        self, id: str, *, topic: str | None = None, basis: str | None = None
    ) -> list[results.Rescheduled]:
        """Make a waiting message due now; as :meth:`reschedule`."""
        return self.reschedule(id, topic=topic, basis=basis)


def ids_of(id: str | Iterable[str]) -> list[str]:
    """Ids that a caller names. Raises ConfigurationError for what is none."""
    if isinstance(id, str):
        return [id]
    try:
        ids = list(id)
    except TypeError:
        raise ConfigurationError(f"id must be a str, or several of them, not {id!r:.100}") from None
    for one in ids:
        if not isinstance(one, str):
            raise ConfigurationError(f"id must be a str, or several of them, not {one!r:.100}")
    return ids


def _write_cursor(position: Position | None) -> str | None:
    if position is None:
        return None
    score, topic, id, slot, kind = position
    fields = [topic, score, base64.b64encode(id).decode(), slot, kind]
    return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()


def _read_cursor(after: str | None) -> Position | None:
    if after is None:
        return None
    try:
        topic, score, id, slot, kind = json.loads(base64.urlsafe_b64decode(after))
        position = Position(score, topic, base64.b64decode(id, validate=True), slot, kind)
    except (ValueError, TypeError, RecursionError):
        pass
    else:
        # Anybody may have made it: no other number reaches the server.
        numbers = ((score, _HIGHEST), (slot, MAX_SLOTS), (kind, MAX_SLOTS))
        if isinstance(topic, str) and all(
            type(one) is int and -1 <= one <= most for one, most in numbers
        ):
            return position
    raise ValueError(f"no page goes on after {after!r:.100}") from None


def _checked_states(state: str | Collection[str] | None) -> Sequence[str]:
    if state is None:
        return tuple(STATES.values())
    states = (state,) if isinstance(state, str) else tuple(state)
    for one in states:
        if one not in STATES.values():
            raise ValueError(f"{one!r} is no state; there are {', '.join(STATES.values())}")
    return states


def _with(ahead: list[T], found: list[T]) -> list[T]:
    """What was found in the task library and in Redis: each once."""
    there = {one[:2] for one in found}
    return found + [one for one in ahead if one[:2] not in there]


def _named(
    given: str | results.Found | Iterable[str | results.Found],
) -> tuple[list[str], list[results.Found]]:
    """Ids and messages that a caller names. Raises ConfigurationError for what is neither."""
    if isinstance(given, results.Found):
        return [], [given]
    if isinstance(given, str) or not isinstance(given, Iterable):
        return ids_of(given), []
    given = list(given)
    messages = [one for one in given if isinstance(one, results.Found)]
    return ids_of([one for one in given if not isinstance(one, results.Found)]), messages


def _states_to_cancel(in_flight: bool, dead: bool) -> Collection[str]:
    return (results.WAITING, *[results.IN_FLIGHT] * in_flight, *[results.DEAD] * dead)


# -- dead messages


class Dead(CenterPart):
    """Dead messages: those that were given up on. `topic` is the name of the topic to look at;
    without it, all declared topics are."""

    def __init__(self, core: Core, messages: Messages) -> None:
        super().__init__(core)
        self._messages = messages

    def requeue(
        self,
        topic: str | None = None,
        *,
        ids: Iterable[str] | None = None,
        where: Callable[[results.Found], Any] | None = None,
        on_progress: results.OnProgress = results.tell_nobody,
    ) -> int:
        """Take messages out of DeadQueue and have them delivered now, with all their retries.

        ids: only these, and the copies that share them
        where: only messages for which this is true

        Returns how many. In bounded steps; what dies meanwhile stays dead. Raises PartialError,
        with the number of the others, while nodes of a Cluster are away.
        """
        recorder, total, away = self._core.recorder, 0, Away()
        dead = self._dead(topic, ids, where, away, bodies=recorder is not None)
        requeue = partial(requeue_call, self._context)
        while batch := list(itertools.islice(dead, IDS_PER_CALL)):
            if recorder is not None:
                recorder.requeuing(batch)
            for place, number in self._messages.run_for(batch, requeue, away):
                if number and recorder is not None:
                    recorder.requeued([(place.topic.name, id) for id in place.ids])
                total += number
            on_progress(total, 0)
        return away.checked(total)

    def purge(
        self,
        topic: str | None = None,
        *,
        ids: Iterable[str] | None = None,
        where: Callable[[results.Found], Any] | None = None,
        on_progress: results.OnProgress = results.tell_nobody,
    ) -> int:
        """Delete dead messages; return how many. Otherwise as :meth:`requeue`."""

        states, away = (results.DEAD,), Away()
        command = partial(cancel_call, self._context, states=states, copies=False, bodies=False)
        replies = self._messages.run_for(self._dead(topic, ids, where, away), command, away)
        deleted: list[results.Cancelled] = []
        for _, reply in replies:
            deleted += [one for one in reply.cancelled if one.deleted]
            on_progress(len(deleted), 0)
        if self._core.recorder is not None:
            self._core.recorder.purged_dead([(one.topic, one.id) for one in deleted])
        return away.checked(len(deleted))

    def _dead(
        self,
        topic: str | None,
        ids: Iterable[str] | None,
        where: Callable[[results.Found], Any] | None,
        away: Away,
        *,
        bodies: bool = False,
    ) -> Iterator[results.Found]:
        """The dead messages, but not those that die from now on.

        away: notes the slots of nodes that are away
        """
        if ids is None:
            seconds, us = self._runner.client.time()
            until = seconds + us / 1e6
            bodies = bodies or where is not None
            pairs = self._messages.read(topic, results.DEAD, until=until, bodies=bodies, away=away)
            dead: Iterator[results.Found] = (one for one, _ in pairs)
        else:
            try:
                known = self._messages.get(ids, topic=topic)
            except PartialError as exc:
                known = exc.results
                away.add(exc.missing)
            dead = (one for one in known if one.state == results.DEAD)
        return dead if where is None else filter(where, dead)
