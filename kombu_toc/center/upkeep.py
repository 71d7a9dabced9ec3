"""Upkeep: keeps every topic in order, whether anybody consumes it or not."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from hashlib import sha256
from operator import itemgetter
from typing import Any, NamedTuple
from uuid import uuid4

from redis.exceptions import NoPermissionError, RedisError, ResponseError

from ..client.connection import pipelined
from ..errors import NotPermittedError
from ..model import results, scores
from ..model.message import FOR_A_TIME, Claim, decode_key
from ..model.results import OTHER_TYPE, Fault
from ..model.topic import Slot, Topic, base_of
from ..scripts.call import (
    PageSize,
    ScriptCall,
    as_bytes,
    literal_pattern,
    load,
    parts_of,
    rows,
    text,
    texts,
)
from .calls import RECOVER, Context, batches_within, terms_of
from .clock import MAY, MAY_NOT, Watch
from .core import CenterPart, Core
from .registry import MAX_KNOWN, Registry
from .runner import BROKEN, Away, Runner, misused
from .waiting import sleep_of

# -- finds inconsistencies in a topic's keys, and mends them

#: Ids that one call of check looks at, about.
CHECK_STEP = 200


def check_call(
    context: Context,
    topic: Topic,
    slot: Slot,
    other_steps: Sequence[int],
    part: int,
    cursor: str,
    *,
    step: int,
    repair: bool,
) -> ScriptCall:
    """Look for inconsistencies in one part of a slot. Result: a list of
    :class:`Fault`, where to go on (``0``: this part of the slot is done), and how many bytes were
    looked at.

    other_steps: priority steps that the topic lacks and that messages may wait under
    part: number of the key that is looked through: one of the slot's `script_keys`, or one
        of the stores of `other_steps` behind them; from 1
    step: about how many ids the call looks at
    repair: mend each fault at once
    """
    keys = (*slot.script_keys, *map(slot.store, other_steps))

    def parse(raw: list[Any]) -> tuple[list[Fault], str, int]:
        cursor, flat, size, *_ = raw
        faults = []
        for kind, id, places in rows(flat, 3):
            what = (results.FAULT_KINDS[kind], text(id), tuple(keys[at - 1] for at in places))
            faults.append(results.Fault(topic.name, slot.number, *what))
        return faults, cursor.decode(), size

    return context.announcing(
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


def recount_call(
    context: Context, topic: Topic, slots: Sequence[Slot], *, repair: bool
) -> ScriptCall:
    """Compare what runs of a topic that is limited with what is counted. Result: a list of
    :class:`Fault`."""
    keys = [key for slot in slots for key in (slot.prepare, slot.tokens, slot.busy)]
    gate = context.gate_of(topic, slots[0])

    def parse(raw: list[Any]) -> list[results.Fault]:
        faults = []
        for at, key, _, _ in rows(raw, 4):
            busy = slots[at].busy if key else gate.busy
            what = (results.MISCOUNTED, decode_key(text(key)), (busy,))
            faults.append(results.Fault(topic.name, slots[at].number, *what))
        return faults

    return ScriptCall(load("recount"), (*keys, gate.busy), (int(repair),), parse)


def check_copies_call(topic: Topic, slot: Slot, key: str, *, repair: bool) -> ScriptCall:
    """Look for names of messages that are gone in a copies set. Result: a list of
    :class:`Fault`."""

    def parse(raw: list[bytes]) -> list[results.Fault]:
        return [
            results.Fault(topic.name, slot.number, results.STRAY_COPY, id, (key,))
            for id in texts(raw)
        ]

    return ScriptCall(load("check_copies"), (key, slot.body), (int(repair),), parse)


class Admin(CenterPart):
    """Checks and repairs topics, which may be in use meanwhile."""

    def check(self, topic: str, *, step: int = CHECK_STEP) -> list[Fault]:
        """Look for inconsistencies; return what was found.

        That is: an id that is not in exactly one of store, prepare and dead with its body, a
        body or a reason without an id, a message under a priority step that the topic lacks,
        and a slot whose next time is not announced. (What a consumer that died had claimed is no
        fault: the others read all slots every second.)

        step: about how many ids one call to the server looks at; the topic may be live

        Raises PartialError, with what was found on the others, while nodes of a Cluster are away.
        """
        return self._check(topic, step, repair=False)

    def repair(self, topic: str, *, step: int = CHECK_STEP) -> list[Fault]:
        """Check, and mend each fault at the moment it is found; return what was mended.

        How: see NO_BODY and the others. A body without an id goes to DeadQueue.
        """
        return self._check(topic, step, repair=True)

    def _check(self, topic: str, step: int, *, repair: bool) -> list[Fault]:
        declared = self._registry.standing(topic)
        found: list[Fault] = []
        away = Away()
        stores, copies = self._other_keys(declared, step, away)
        for slot in declared.all_slots():
            wrong = self._wrong_types(declared, slot, stores[slot.number], repair, away)
            if wrong is None:
                continue
            found += wrong
            if repair or not wrong:  # scripts can do nothing with it as it is
                found += self._check_slot(declared, slot, stores[slot.number], step, repair, away)
        if any(fault.kind == OTHER_TYPE for fault in found) and not repair:
            return away.checked(list(dict.fromkeys(found)))
        rest = []
        if declared.declaration.lanes:
            for slots in self._context.groups(declared.all_slots()):
                rest.append(recount_call(self._context, declared, slots, repair=repair))
        for slot, key in copies:
            rest.append(check_copies_call(declared, slot, key, repair=repair))
        for call in rest:
            [faults] = self._runner.run_there([call], away)
            found += faults or ()
        return away.checked(list(dict.fromkeys(found)))

    def _wrong_types(
        self, topic: Topic, slot: Slot, in_use: set[int], repair: bool, away: Away
    ) -> list[Fault] | None:
        """What :meth:`_check_types` finds; None if the slot's node of a Cluster is away."""
        place = self._runner.executor.place_of(slot.body)
        error = self._runner.not_reached(place)
        if error is None:
            try:
                return list(self._check_types(topic, slot, in_use, repair))
            except BROKEN as exc:
                if not self._runner.clustered:
                    raise
                self._runner.lost(place, exc)
                error = exc
        away.note(slot.body, place, error)
        return None

    def _check_types(
        self, topic: Topic, slot: Slot, in_use: set[int], repair: bool
    ) -> Iterator[Fault]:
        """Keys that another program has written. Each is renamed, and stays on its node."""
        client = self._runner.client
        keys = self._context.keys
        shared: list[str] = []
        if slot.number == 0:
            shared += (keys.wake(topic.name), keys.paused)
            shared += (keys.passed_on(topic.name, n) for n in range(topic.slot_span))
            hub = client.client_for() if self._runner.clustered else client
            for stem in (keys.fanout(""), keys.part("", "").removesuffix(":")):
                shared += map(text, hub.scan_iter(f"{literal_pattern(stem)}*", count=1000))
        for key in misused(client, [*slot.all(), *map(slot.store, sorted(in_use)), *shared]):
            stem, _, rest = key.partition("}:")
            aside = f"{stem}}}:aside:{time.time_ns()}:{rest}"
            if repair:
                client.renamenx(as_bytes(key), as_bytes(aside))
            yield Fault(topic.name, slot.number, OTHER_TYPE, key, (aside,))

    def _check_slot(
        self, topic: Topic, slot: Slot, in_use: set[int], step: int, repair: bool, away: Away
    ) -> Iterator[Fault]:
        """in_use: priority steps that the topic lacks and that messages wait under."""
        others = sorted({*topic.other_steps(), *in_use} - {*topic.steps})
        own = len(slot.script_keys)
        parts = [
            *range(1, own + 1),
            *(own + at for at, other in enumerate(others, 1) if other in in_use),
        ]
        for part in parts:
            cursor = "0"
            # Redis reads the bodies with their ids.
            page_size = PageSize(step, self._context.pop_bytes)
            while True:
                call = check_call(
                    self._context,
                    topic,
                    slot,
                    others,
                    part,
                    cursor,
                    step=page_size.next,
                    repair=repair,
                )
                [checked] = self._runner.run_there([call], away)
                if checked is None:
                    return
                faults, cursor, size = checked
                page_size.read(size)
                yield from faults
                if cursor == "0":
                    break

    def _other_keys(
        self, topic: Topic, step: int, away: Away
    ) -> tuple[dict[int, set[int]], list[tuple[Slot, str]]]:
        """Keys that only a look at all keys finds.

        Per slot, the priority steps that the topic lacks and that messages wait under; and the
        copies sets, each with its slot.
        """
        slots = {slot.stem: slot for slot in topic.all_slots()}
        stores: dict[int, set[int]] = defaultdict(set)
        copies = []
        prefix = literal_pattern(topic.slot(0).stem.rpartition("0")[0])
        for raw in self._every_key(topic, prefix + "*", step, away):
            key = text(raw)
            stem, brace, rest = key.partition("}:")
            slot = slots.get(stem + brace)
            if slot is None:  # of a topic with a longer name
                continue
            if rest.startswith("copies:"):
                copies.append((slot, key))
            elif rest.startswith("store:"):
                stores[slot.number].add(int(rest.removeprefix("store:")))
        return stores, copies

    def _every_key(self, topic: Topic, pattern: str, step: int, away: Away) -> Iterator[bytes]:
        """The keys of all nodes that can be reached."""
        client = self._runner.client
        if not self._runner.clustered:
            yield from client.scan_iter(pattern, count=step)
            return
        for place in client.places():
            error = self._runner.not_reached(place)
            if error is None:
                try:
                    yield from client.client_at(place).scan_iter(pattern, count=step)
                except BROKEN as exc:
                    self._runner.lost(place, exc)
                    error = exc
            if error is not None:
                for slot in topic.all_slots():
                    if client.place_of(slot.body) == place:
                        away.note(slot.body, place, error)


# -- claims of unique keys

#: Claims that one call looks at.
LOOK = 100

#: Slots that one pass looks at, in turn.
SLOTS_PER_PASS = 64

#: Seconds between two passes.
INTERVAL = 10.0


def home_of(runner: Runner, context: Context, topic: Topic, claim: Claim, basis: str) -> Topic:
    """The topic with the slot count by which a message is to be put: while it is resharded, a
    message that has the key may lie where a former count has put it."""
    here = topic.slot_for(basis).number
    for count in topic.declaration.draining_counts:
        former = replace(topic, declaration=replace(topic.declaration, slots=count))
        slot = former.slot_for(basis)
        if slot.number != here:
            call = ScriptCall(load("claimed"), _keys(slot), (claim.name,), bool)
            if runner.run(call):
                return former
    carry_on(runner, context, topic)  # or it is on its way between two nodes
    return topic


def sweep_call(slot: Slot) -> ScriptCall:
    """The call that removes claims of a slot that hold no longer. Result: how many it has looked
    at, and how many it has removed."""
    return ScriptCall(load("sweep_claims"), _keys(slot), (LOOK,), tuple)


def move_claims(client: Any, topic: Topic) -> None:
    """Move the claims whose messages are done, and that hold for a time, from the slots of former
    counts; remove the others there: no message lies there any more."""
    for number in range(topic.slot_span):
        source = topic.slot(number).claims
        for name, value in client.hscan_iter(source, count=LOOK):
            mode, _, _, checksum, _ = value.split(b",", 4)
            target = topic.slot(int(checksum) % topic.slots).claims
            if target == source:
                continue
            if int(mode) == FOR_A_TIME:
                client.hsetnx(target, name, value)
            client.hdel(source, name)


# -- messages that are moved from node to node
#
# One script takes a batch out of its slot and keeps it there as one value. Another puts it into its
# new slot and remembers it; then the value is deleted. So a batch is never in none of these places,
# and whoever finds it left behind may repeat what follows.

#: Seconds for which a slot remembers a batch that has arrived: who took it may be suspended.
REMEMBER_BATCH = 86_400


def depart_call(
    context: Context, topic: Topic, source: Slot, target: Slot, ids: Sequence[str]
) -> ScriptCall:
    """Take messages out of a slot. Result: how many it took, how many it looked at, and what
    :func:`arrive` needs."""
    bases = [base_of(id) for id in ids]
    keys = [*source.script_keys, *map(source.copies, bases), source.log, source.claims]
    name = json.dumps([target.number, uuid4().hex, ids])
    args: list[str | int] = [len(topic.steps), source.number, context.pop_bytes, name]
    for pair in zip(ids, bases, strict=True):
        args += pair
    keys += (*source.lane_keys, source.leaving)
    return context.announcing(topic, "depart", keys, args, lambda raw: tuple(raw[:4]))


def arrive(
    runner: Runner, context: Context, topic: Topic, source: Slot, batch: bytes, records: bytes
) -> int:
    """Put a batch into its slot, unless it is there; return how many messages it had if not."""
    number, _, ids = json.loads(batch[batch.index(b"[") :])
    target = topic.slot(number)
    keys = list(target.script_keys)
    for id in ids:
        keys += (target.copies(base_of(id)), target.copies(id))
    keys += (target.log, target.claims, target.pace, target.holders)
    keys.append(target.sent(f"={sha256(batch).hexdigest()}"))
    logs = topic.declaration.logs
    args = (len(topic.steps), number, logs, records, REMEMBER_BATCH, len(ids))
    call = context.announcing(topic, "arrive", keys, args, itemgetter(0))
    [arrived] = runner.run_puts([call])
    runner.client.hdel(source.leaving, batch)
    return int(arrived)


def carry_on(runner: Runner, context: Context, topic: Topic) -> int:
    """Put the batches that somebody has taken out of slots of a topic into their new ones; return
    how many messages have arrived. Nothing is under way unless a topic is being resharded."""
    if not (context.clustered and topic.declaration.draining_counts):
        return 0
    arrived = 0
    slots = topic.all_slots()
    replies = pipelined(runner.client, [("HKEYS", slot.leaving) for slot in slots])
    for slot, batches in zip(slots, replies, strict=True):
        for batch in batches:
            records = runner.client.hget(slot.leaving, batch)
            if records is not None:
                arrived += arrive(runner, context, topic, slot, batch, records)
    return arrived


def _keys(slot: Slot) -> tuple[str, ...]:
    return (slot.claims, slot.body, slot.dead, slot.tokens, *slot.stores)


class ClaimSweep:
    """Sweeps the claims of all topics that have any, some of them at a time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._next_at, self._turn = 0.0, 0
        #: topic and number of slots where most of what was looked at was removed
        self._again: set[tuple[str, int]] = set()

    def run(self, topics: Iterable[Topic], now: float) -> None:
        """Sweep, if it is time or if there is much to sweep.

        now: monotonic seconds
        """
        if now < self._next_at and not self._again:
            return
        unique = (topic for topic in topics if topic.declaration.unique)
        slots = [(topic, number) for topic in unique for number in range(topic.slot_span)]
        if now >= self._next_at:
            at = self._turn % len(slots) if slots else 0
            chosen = (slots[at:] + slots[:at])[:SLOTS_PER_PASS]
            self._turn, self._next_at = at + len(chosen), now + INTERVAL
        else:
            chosen = [s for s in slots if (s[0].name, s[1]) in self._again][:SLOTS_PER_PASS]
        calls = [sweep_call(topic.slot(number)) for topic, number in chosen]
        self._again = {
            (topic.name, number)
            for (topic, number), reply in zip(chosen, self._runner.run_each(calls), strict=True)
            if isinstance(reply, tuple) and reply[1] > reply[0] / 2 and reply[0] == LOOK
        }


# -- upkeep
#
# Upkeep rolls back leases that have ended, drops old messages from DeadQueue, and announces due
# messages whose announcement was lost. One process does it for all topics of a server and prefix,
# with a pass about once a second. The processes elect it by a short lease in Redis.

#: Leases and dead messages that one call deals with at most: in all, and of one slot.
MAX_PER_CALL = 500
MAX_PER_SLOT = 100

#: Slots that one call keeps in order.
SLOTS_PER_CALL = 64

#: How often a pass repeats a call that had more to do than one call may.
MAX_REPEATS = 20

#: Slots that were empty when last looked at, and that one pass looks at, in turn.
MAX_EMPTY = 1024

#: Seconds between two readings of all declarations. If a reading takes long, the next one waits
#: for this many times as long.
REREAD = 2.0
REREAD_TIMES = 50

#: Seconds between looks for messages that somebody who died has left between two nodes.
CARRY = 5.0

#: Seconds for which a node of a Cluster that cannot be reached is left alone.
REST = 5.0

#: Numbers of events in the script's reply: 1 rolled back, 2 died, 3 dropped, 4 expired, 5 ended
#: because it had been acknowledged while it ran.
_DROPPED, _EXPIRED, _ENDED = 3, 4, 5


class Event(NamedTuple):
    """What a look has done to a topic's messages."""

    topic: str
    rolled_back: list[str]
    died: list[str]
    dropped: list[str]
    expired: list[str]
    #: whether what has expired went to DeadQueue; else it is deleted
    to_dead: bool = True


class Kept(NamedTuple):
    """What one call of ``upkeep`` did."""

    now_us: int  #: Redis's clock
    more: bool  #: there is more to do at once
    holding: list[int]  #: the indexes of the parts that hold messages
    events: list[Event]
    #: (key, member) of copies sets whose message is gone; the caller removes them
    stray: list[tuple[str, str]]


class Part(NamedTuple):
    """Some slots of a topic."""

    topic: Topic
    numbers: tuple[int, ...]


def keep(
    context: Context,
    parts: Sequence[tuple[Part, int]],
    *,
    grace: float | None = None,
    most: int = MAX_PER_CALL,
    each: int = MAX_PER_SLOT,
) -> ScriptCall:
    """The call that keeps slots in order. Result: :class:`Kept`.

    parts: each with whether leases that have ended may be rolled back there (:meth:`Watch.may`)
    grace: seconds for which a slot must have been watched; None for what suits each lease
    most, each: how many leases and dead messages the call deals with, in all and of one slot

    On a Cluster, a call can name one slot only.
    """
    keys: list[str] = []
    args: list[Any] = [len(parts), most, each, int(not context.clustered)]
    for (topic, numbers), may in parts:
        limits = topic.declaration.limits(context.limits)
        share = -(-limits.dead_limit // topic.slots)
        for number in numbers:
            slot = topic.slot(number)
            keys += (*slot.script_keys, slot.watch)
            if topic.declaration.lanes:
                keys += slot.lane_keys
        gate = context.gate_of(topic, topic.slot(numbers[0]))
        if topic.declaration.lanes:
            keys += (gate.announced_times, gate.pace, gate.busy)
        if not context.clustered:
            keys.append(context.keys.wake(topic.name))
        args += (
            len(numbers),
            len(topic.steps),
            int(limits.visibility * 1000),
            may if grace is None or may == MAY_NOT else int(grace * 1000),
            int(limits.retry_backoff * 1000),
            int(limits.retry_backoff_max * 1000),
            topic.declaration.retries,
            int(limits.dead_age * 1000),
            share,
            terms_of(limits),
            topic.gates if topic.declaration.lanes else "-",
            gate.number,
            *numbers,
        )
    topics = [part.topic for part, _ in parts]
    to_dead = [topic.declaration.limits(context.limits).dead_expired for topic in topics]

    def parse(raw: list[Any]) -> Kept:
        now, more, holding, flat, *_ = raw
        by_index: dict[int, Event] = {}
        stray = []
        for at, raw_number, what, raw_id in rows(flat, 4):
            number, id = int(raw_number), text(raw_id)
            event = by_index.setdefault(at, Event(topics[at].name, [], [], [], [], to_dead[at]))
            if what != _ENDED:
                (event.rolled_back, event.died, event.dropped, event.expired)[what - 1].append(id)
            gone = what in (_DROPPED, _ENDED) or (what == _EXPIRED and not to_dead[at])
            if gone and "#" in id:
                slot = topics[at].slot(number)
                stray.append((slot.copies(id.rpartition("#")[0]), id))
        return Kept(int(now), bool(more), holding, list(by_index.values()), stray)

    if context.clustered:
        [topic] = topics
        wake = (context.keys.wake(topic.name), topic.declaration.keys_ms)
        return ScriptCall(load("upkeep"), keys, args, parse, wake=wake)
    return ScriptCall(load("upkeep"), keys, args, parse)


def elect(name: str, seconds: float, duties: Sequence[str]) -> ScriptCall:
    """The call by which a process is elected to do duties for all topics.

    seconds: how long the election holds; 0 ends it
    duties: their keys

    Result: Redis's clock in microseconds, and for each duty whether this process is elected, and
    for how many seconds a process is; 0: none is.
    """
    return ScriptCall(
        load("elect"),
        tuple(duties),
        (name, int(seconds * 1000)),
        lambda raw: (int(raw[0]), [(mine == 1, ms / 1000) for mine, ms in rows(raw[1:], 2)]),
    )


@dataclass(eq=False)
class Upkeep:
    """Keeps all topics of one server and prefix in order.

    watches: what has been seen of the server, or of each node
    in_time: whether the leases that this process holds in a topic's slots have not ended; if they
        may have, nothing is rolled back there
    tell: called with each event
    on_step: called with the seconds by which a server's clock was set forward
    clock: monotonic seconds
    """

    _runner: Runner
    _registry: Registry
    _context: Context
    _watches: dict[Hashable, Watch]
    _: KW_ONLY
    in_time: Callable[[str, Collection[int]], bool]
    tell: Callable[[Event], None]
    on_step: Callable[[float], None]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._read_at = self._carried_at = 0.0
        #: topic -> its declaration as it was read, and its parts
        self._topics: dict[str, tuple[bytes, list[Part]]] = {}
        #: (topic, first slot) of parts that held something when they were last looked at
        self._holding: set[tuple[str, int]] = set()
        self._turn = 0
        #: node that cannot be reached -> monotonic seconds until which it is left alone
        self._resting: dict[Hashable, float] = {}
        #: whether a topic goes to the second: then somebody sweeps after each pass
        self.expires = False
        self._claims = ClaimSweep(self._runner)
        #: topic -> what the latest pass was refused there
        self.refused: dict[str, RedisError] = {}

    def run(self, goes_on: Callable[[], bool]) -> None:
        """One pass: look at every topic that holds messages, and at some of the others.

        goes_on: asked now and then; the pass ends if it returns False

        Raises redis-py's error if the server cannot be reached.
        """
        now = self.clock()
        self.refused = {}
        if now >= self._read_at:
            self._read_topics(now)
        # By one call on one server; on a Cluster, by one call each, all nodes side by side.
        for parts in batches_within(
            self._due(), (SLOTS_PER_CALL,), lambda part: (len(part.numbers),)
        ):
            if not goes_on():
                return
            for _ in range(MAX_REPEATS):
                if not self._keep(parts):
                    break
        self._claims.run((parts[0].topic for _, parts in self._topics.values()), now)
        if now >= self._carried_at:
            self._carried_at = now + CARRY
            self._carry_on(now)

    def _carry_on(self, now: float) -> None:
        """Have arrive what a reshard that was killed has left between two nodes."""
        for name, (_, parts) in self._topics.items():
            if any(rests > now for rests in self._resting.values()):
                return  # a node is away: each question to it would take seconds
            try:
                carry_on(self._runner, self._context, parts[0].topic)
            except ResponseError as exc:
                self.refused[name] = exc

    def _read_topics(self, now: float) -> None:
        raws = self._runner.client.hgetall(self._context.keys.topics)
        topics = {}
        for key, raw in raws.items():
            name = text(key)
            known = self._topics.get(name)
            if known is not None and known[0] == raw:
                topics[name] = known
                continue
            topic = self._registry.learn(name, raw)
            if topic is not None:
                topics[name] = (raw, self._parts_of(topic))
        self._topics = topics
        declarations = (parts[0].topic.declaration for _, parts in topics.values())
        self.expires = any(declaration.kept for declaration in declarations)
        self._holding = {key for key in self._holding if key[0] in topics}
        took = self.clock() - now
        self._read_at = now + max(REREAD, REREAD_TIMES * took)

    def _parts_of(self, topic: Topic) -> list[Part]:
        size = 1 if self._context.clustered else SLOTS_PER_CALL
        return [Part(topic, tuple(some)) for some in parts_of(range(topic.slot_span), size)]

    def _due(self) -> list[Part]:
        """What this pass looks at."""
        due: list[Part] = []
        rest: list[Part] = []
        for _, parts in self._topics.values():
            for part in parts:
                key = part.topic.name, part.numbers[0]
                (due if key in self._holding else rest).append(part)
        slots = 0
        for at in range(len(rest)):
            if slots >= MAX_EMPTY:
                self._turn = (self._turn + at) % len(rest)
                break
            part = rest[(self._turn + at) % len(rest)]
            slots += len(part.numbers)
            due.append(part)
        return due

    def _keep(self, parts: list[Part]) -> bool:
        """Keep these parts in order; return whether there is more to do at once."""
        if not self._context.clustered:
            return self._ask([parts])
        now = self.clock()
        return self._ask([[p] for p in parts if self._resting.get(self._place(p), 0.0) <= now])

    def _ask(self, groups: list[list[Part]]) -> bool:
        calls = [keep(self._context, [(p, self._may(p)) for p in group]) for group in groups]
        sent = self.clock()
        try:
            results = self._runner.run_each(calls)
        except BROKEN:
            for group in groups:
                self._watch(self._place(group[0])).missed()
            raise
        received = self.clock()
        more = False
        broken: dict[Hashable, RedisError] = {}
        for group, result in zip(groups, results, strict=True):
            place = self._place(group[0])
            if isinstance(result, Kept):
                step = self._watch(place).sample(result.now_us, sent, received)
                if step > 0:
                    self.on_step(step)
                more = self._take(group, result) or more
            elif isinstance(result, ResponseError):
                self._apart(group, result)
            else:
                broken[place] = result
                self._watch(place).missed()
                self._resting[place] = received + REST
        if len(broken) == len({self._place(group[0]) for group in groups}) and broken:
            raise next(iter(broken.values()))
        return more

    def _take(self, parts: list[Part], kept: Kept) -> bool:
        holding = set(kept.holding)
        for at, part in enumerate(parts):
            key = part.topic.name, part.numbers[0]
            (self._holding.add if at in holding else self._holding.discard)(key)
        for event in kept.events:
            self.tell(event)
        for copies, member in kept.stray:
            self._runner.client.hdel(as_bytes(copies), as_bytes(member))
        return kept.more

    def _apart(self, parts: list[Part], error: ResponseError) -> None:
        """A call was refused: ask for each slot alone, so that a broken one delays no other."""
        if len(parts) > 1:
            self._ask([[part] for part in parts])
        elif len(parts[0].numbers) > 1:
            self._ask([[Part(parts[0].topic, (number,))] for number in parts[0].numbers])
        else:
            self.refused[parts[0].topic.name] = error

    def _may(self, part: Part) -> int:
        """Whether leases that have ended may be rolled back there."""
        topic = part.topic
        if not self.in_time(topic.name, part.numbers):
            return MAY_NOT
        visibility = topic.declaration.limits(self._context.limits).visibility
        return self._watch(self._place(part)).may(self.clock(), visibility)

    def _place(self, part: Part) -> Hashable:
        return self._runner.executor.place_of(part.topic.slot(part.numbers[0]).announced_times)

    def _watch(self, place: Hashable) -> Watch:
        return self._watches.setdefault(place, Watch())


# -- looks at leases, and rolls back those that have ended
#
# Scripts decide which (``upkeep.lua``): they keep on the server since when a slot has been
# looked at, so it does not matter who looks.


#: Seconds for which a center does not look again at the leases of a topic.
LOOK_AGAIN = 0.5

#: Seconds after which it is known whether a lease that had ended is renewed, unless the server was
#: restarted just now.
DECIDED = 2.75


class Leases(CenterPart):
    """Looks at leases for a center, and knows what it has seen of the servers' clocks.

    grace: seconds for which a slot must have been watched; None for what suits each lease; 0:
        leases are rolled back at once, by pops
    """

    def __init__(self, core: Core, *, grace: float | None) -> None:
        super().__init__(core)
        self._place_of = core.runner.executor.place_of
        self._sleep = sleep_of(core.runner.client)
        self.grace = grace
        #: server -> what has been seen of it
        self._watches: dict[Hashable, Watch] = {}
        #: topic, and slots if not all -> monotonic seconds when their leases were last looked at
        self._looked: dict[Hashable, float] = {}

    def sample(self, topic: Topic, slot: int, now_us: int, sent: float) -> None:
        """Learn that the server of a slot showed this time at some moment since `sent`, in
        monotonic seconds."""
        self._watch(topic, slot).sample(now_us, sent, time.monotonic())

    def look_calls(
        self, topic: Topic, slots: Sequence[int], recover: int = RECOVER
    ) -> list[ScriptCall]:
        """The calls that look at leases. Result of each: :class:`Kept`."""
        visibility = topic.declaration.limits(self._context.limits).visibility
        counts = self._context.counts(topic)

        def counted(parse: Callable[[Any], Kept], slot: int, sent: float) -> Callable[[Any], Kept]:
            def parsed(raw: Any) -> Kept:
                kept = parse(raw)
                self.sample(topic, slot, kept.now_us, sent)
                for event in kept.events:
                    counts.kept(len(event.rolled_back), len(event.died), len(event.dropped))
                    counts.expire(len(event.expired), event.to_dead)
                return kept

            return parsed

        now = time.monotonic()
        calls = []
        for group in self._context.groups(slots):
            may = MAY if self.grace == 0 else self._watch(topic, group[0]).may(now, visibility)
            call = keep(
                self._context,
                [(Part(topic, tuple(group)), may)],
                grace=self.grace,
                most=recover * len(group),
                each=recover,
            )
            calls.append(call._replace(parse=counted(call.parse, group[0], now)))
        return calls

    def look(
        self, topic: Topic, slots: Sequence[int], recover: int = RECOVER, what: Hashable = None
    ) -> list[Kept]:
        """Look at leases, unless that was done just now.

        what: names these slots, if they are not all that pops ask for
        """
        now, what = time.monotonic(), (topic.name, what)
        if not slots or now < self._looked.get(what, float("-inf")) + LOOK_AGAIN:
            return []
        if len(self._looked) > MAX_KNOWN:
            self._looked.clear()
        self._looked[what] = now
        calls = self.look_calls(topic, slots, recover)
        try:
            results = self._runner.run_each(calls)
        except BROKEN:
            self._watch(topic, slots[0]).missed()
            raise
        for group, kept in zip(self._context.groups(slots), results, strict=True):
            if isinstance(kept, Kept):
                continue
            if not self._runner.clustered:
                raise kept
            # What one node cannot do keeps nobody from the others: a pop of its slots will tell.
            self._watch(topic, group[0]).missed()
        return [kept for kept in results if isinstance(kept, Kept)]

    def free(self, topic: Topic, slot: int, id: str) -> bool:
        """Look at the leases of a slot, because a delivered message there keeps another one from
        being put. If its lease has ended, wait until it is known whether its holder lives.

        id: the one that it is kept under

        Returns whether to try again: a message was rolled back, or this one is settled. A user who
        may not leaves it to upkeep.
        """
        until = time.monotonic() + DECIDED
        try:
            while not any(kept.events for kept in self.look(topic, [slot], what=slot)):
                score = self._runner.client.zscore(topic.slot(slot).prepare, id)
                if score is None:
                    return True
                now = time.monotonic()
                if now >= until or score > self._watch(topic, slot).server_us(now):
                    return False
                self._sleep(LOOK_AGAIN / 2)
        except (NotPermittedError, NoPermissionError):
            return False
        return True

    def _watch(self, topic: Topic, slot: int) -> Watch:
        place = self._place_of(topic.slot(slot).announced_times)
        watch = self._watches.get(place)
        return watch or self._watches.setdefault(place, Watch())
