"""What people and tools do with a timeout center: look messages up, cancel, move and replay them.

By id, a message is looked for in every slot that could have it, of one topic or of all, in
pipelined round trips: each slot costs O(log n), whatever waits in it. That is the slot that the id
picks, and every slot of a topic that has been given a slot basis, or that an older release has
declared. More than one message may have an id: a retry has that of the task that is still running,
and whoever gives another slot basis puts his into another slot. All of them are found.
"""

from __future__ import annotations

import base64
import heapq
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..metrics.counters import count_first
from ..model import scores
from ..model.topic import Slot, Topic, base_of
from ..scripts.call import ScriptCall, microseconds, text, when_of
from ..scripts.loader import load

#: Ids that one call looks for, in one slot.
IDS_PER_CALL = 100

#: Calls that leave together.
CALLS_TOGETHER = 500

#: Ids that one call remembers or reads as cancelled.
REMEMBERED_PER_CALL = 500

#: Messages that one call of scan reads from a slot, at most.
SCAN_STEP = 200

#: Bytes of a body, and characters of a text, that the repr of a result shows.
MAX_SHOWN = 60

WAITING, IN_FLIGHT, DEAD = "waiting", "in flight", "dead"
_STATES = {1: WAITING, 2: IN_FLIGHT, 3: DEAD}


def _shown(one: Any) -> str:
    """The repr of a named tuple that may hold a body: of what is long, only how it begins."""

    def shown(value: Any) -> str:
        if not isinstance(value, (bytes, str)) or len(value) <= MAX_SHOWN:
            return repr(value)
        unit = "bytes" if isinstance(value, bytes) else "characters"
        return f"{value[:MAX_SHOWN]!r}... ({len(value)} {unit})"

    fields = (f"{name}={shown(getattr(one, name))}" for name in one._fields)
    return f"{type(one).__name__}({', '.join(fields)})"


class Found(NamedTuple):
    """A message as it was found."""

    topic: str
    slot: int
    id: str
    state: str  #: WAITING, IN_FLIGHT or DEAD
    step: int
    score: int
    body: bytes
    reason: str  #: of a dead message
    error: str = ""  #: the last one that a consumer told of it

    __repr__ = _shown

    @property
    def time_us(self) -> int:
        """When it is due, when its lease ends, or when it died; 0: it was rolled back and is due
        at once."""
        if self.state == WAITING:
            return scores.action_time(self.score)
        return scores.read_lease(self.score).ms * 1000

    @property
    def retries_left(self) -> int | None:
        """How often it may still come back; None if it has not been delivered yet."""
        if self.state == WAITING:
            return scores.retries_left(self.score)
        return scores.read_lease(self.score).retries


class Cancelled(NamedTuple):
    """What cancel did about one message."""

    topic: str
    id: str
    state: str  #: what it was
    deleted: bool
    tried: bool = False  #: it was delivered before, to a consumer that perhaps still has it
    body: bytes = b""  #: of what is deleted

    __repr__ = _shown


class Rescheduled(NamedTuple):
    """What reschedule did about one message."""

    topic: str
    id: str
    state: str  #: what it is
    moved: bool
    time_us: int = 0  #: when it is due now, if it was moved


class Page(NamedTuple):
    """What a scan has found so far."""

    messages: list[Found]
    after: str | None  #: where the next page begins; None: that was all


class Counts(NamedTuple):
    """How many messages a topic or a slot holds."""

    ready: int  #: due
    scheduled: int  #: waiting for their action time
    in_flight: int
    dead: int

    @property
    def waiting(self) -> int:
        return self.ready + self.scheduled


class Summary(NamedTuple):
    """How a topic stands."""

    topic: str
    slots: int
    counts: Counts
    #: for how long the message that has been due for longest has been so; 0 if none is due. One
    #: that was rolled back and is due at once does not count: its time is not known any more.
    oldest_us: int


class Operating:
    """The part of :class:`kombu_toc.TimeoutCenter` that is for people and tools.

    In all of it, `topic` is the name of the one to look at; without it, all declared topics are.
    """

    # -- by id

    def get(
        self, id: str | Iterable[str], *, topic: str | None = None, basis: str | None = None
    ) -> list[Found]:
        """Look messages up by id, and the copies that share it; an empty list if there is none.

        id: one, or several
        basis: slot basis, if the sender gave one: then only the slots are asked that it picks
        """

        once: dict[Any, Found] = {}
        for one in self._looked_up(self._places(id, topic, basis)):
            known = self.known(one.topic)
            # What a reshard moves in this moment is seen where it was, and again where it is.
            moves = known is not None and bool(known.declaration.draining_counts)
            once.setdefault(one._replace(slot=-1) if moves else one, one)
        return list(once.values())

    def cancel(
        self,
        id: str | Iterable[str],
        *,
        topic: str | None = None,
        basis: str | None = None,
        in_flight: bool = False,
        dead: bool = True,
    ) -> list[Cancelled]:
        """Delete messages by id, and the copies that share it.

        id: one, or several
        in_flight: delete those too that a consumer has taken; it is not told
        dead: delete those too that were given up on

        Returns what there was and whether it is deleted: one that is in flight was cancelled
        too late. An empty list if there was none.
        """
        states = (WAITING, *[IN_FLIGHT] * in_flight, *[DEAD] * dead)
        left: list[tuple[Topic, Slot, Sequence[str]]] = []

        def call(topic: Topic, slot: Slot, ids: Sequence[str]) -> ScriptCall:
            return self._cancelling(topic, slot, ids, states, left)

        found = self._by_id(id, topic, basis, call)
        while left:
            found += self.run(call(*left.pop()))
        return found

    def cancel_found(
        self, found: Iterable[Found], *, in_flight: bool = False, dead: bool = True
    ) -> list[Cancelled]:
        """Delete just these messages, and none that share their ids; otherwise as :meth:`cancel`.

        One that has gone to another state meanwhile is deleted if those of that state are.
        """
        states = (WAITING, *[IN_FLIGHT] * in_flight, *[DEAD] * dead)

        left: list[tuple[Topic, Slot, Sequence[str]]] = []

        def call(topic: Topic, slot: Slot, ids: Sequence[str]) -> ScriptCall:
            return self._cancelling(topic, slot, ids, states, left, copies=False)

        cancelled = [one for part in self._each(found, call) for one in part]
        while left:
            cancelled += self.run(call(*left.pop()))
        return cancelled

    def _cancelling(
        self,
        topic: Topic,
        slot: Slot,
        ids: Sequence[str],
        states: Collection[str],
        left: list[tuple[Topic, Slot, Sequence[str]]] | None,
        *,
        copies: bool = True,
    ) -> ScriptCall:
        """The call that deletes messages that are in one of these states.

        left: is given what remains to be done, because of the bytes that were deleted; None: what
            is deleted is not read
        """
        counts = self.metrics.counts(topic)

        def parse(raw: list[Any]) -> list[Cancelled]:
            flat = raw[0]
            found = [
                Cancelled(
                    topic.name,
                    text(flat[i]),
                    _STATES[flat[i + 1]],
                    bool(flat[i + 2]),
                    bool(flat[i + 3]),
                    flat[i + 4],
                )
                for i in range(0, len(flat), 5)
            ]
            if left is not None and raw[1] < len(ids):
                left.append((topic, slot, ids[raw[1] :]))
            dead = sum(one.deleted for one in found if one.state == DEAD)
            counts.purged += dead
            counts.cancelled += sum(one.deleted for one in found) - dead
            return found

        keys = [key for id in ids for key in (slot.copies(id), slot.copies(base_of(id)))]
        return self._announcing(
            topic,
            "cancel",
            (
                slot.announced_times,
                slot.prepare,
                slot.dead,
                slot.reasons,
                slot.body,
                slot.tokens,
                *slot.stores,
                *keys,
            ),
            (
                len(slot.stores),
                slot.number,
                *(int(state in states) for state in _STATES.values()),
                int(copies),
                0 if left is None else self.pop_bytes,
                *ids,
            ),
            parse,
        )

    def reschedule(
        self,
        id: str,
        *,
        at: float | None = None,
        delay: float | None = None,
        topic: str | None = None,
        basis: str | None = None,
    ) -> list[Rescheduled]:
        """Give a waiting message, and waiting copies of it, another action time; neither `at`
        nor `delay` means now.

        at: seconds since the epoch
        delay: seconds from now by Redis's clock

        Returns what there was and whether it is moved: only what is waiting can be. An empty
        list if there was none. Raises ActionTimeError beyond the year 2255.
        """
        when = when_of(microseconds(at), microseconds(delay))
        return self._by_id(id, topic, basis, partial(self._rescheduling, when))

    def reschedule_found(
        self, found: Iterable[Found], *, at: float | None = None, delay: float | None = None
    ) -> list[Rescheduled]:
        """Give just these messages another action time, and none that share their ids;
        otherwise as :meth:`reschedule`."""
        when = when_of(microseconds(at), microseconds(delay))
        calls = []
        for one in found:
            topic = self.known(one.topic) or self._standing(one.topic)
            calls.append(self._rescheduling(when, topic, topic.slot(one.slot), [one.id], copies=0))
        done: list[Rescheduled] = []
        for start in range(0, len(calls), CALLS_TOGETHER):
            for part in self.run_all(calls[start : start + CALLS_TOGETHER]):
                done += part
        self.metrics.pass_by(self)
        return done

    def _rescheduling(
        self, when: str, topic: Topic, slot: Slot, ids: Sequence[str], *, copies: int = 1
    ) -> ScriptCall:
        """The call that gives one message, and its copies, another action time."""
        counts = self.metrics.counts(topic)
        [id] = ids

        def parse(raw: list[Any]) -> list[Rescheduled]:
            flat = raw[0]
            counts.rescheduled += flat[1::3].count(1)
            return [
                Rescheduled(
                    topic.name,
                    text(flat[i]),
                    _STATES[flat[i + 1]],
                    flat[i + 1] == 1,
                    scores.action_time(flat[i + 2]) if flat[i + 1] == 1 else 0,
                )
                for i in range(0, len(flat), 3)
            ]

        return self._announcing(
            topic,
            "reschedule",
            (slot.announced_times, slot.prepare, slot.dead, slot.copies(id), *slot.stores),
            (len(slot.stores), slot.number, id, when, copies),
            parse,
        )

    def run_now(
        self, id: str, *, topic: str | None = None, basis: str | None = None
    ) -> list[Rescheduled]:
        """Make a waiting message due now; as :meth:`reschedule`."""
        return Operating.reschedule(self, id, topic=topic, basis=basis)

    def ensure(
        self,
        topic: str,
        id: str,
        body: bytes,
        *,
        at: float | None = None,
        delay: float | None = None,
        basis: str | None = None,
        priority: int = 0,
    ) -> bool:
        """Add a message as :meth:`put` does, unless the topic has one of this id, in any state.

        Returns whether it was added. Of several that try at the same time with the same slot
        basis, or with none, one is.
        """
        if Operating.get(self, id, topic=topic):
            return False  # perhaps in another slot, because of another basis
        made = self.put(
            topic, id, body, at=at, delay=delay, basis=basis, priority=priority, ensure=True
        )
        return made is not None

    def _places(
        self, id: str | Iterable[str], topic: str | None, basis: str | None
    ) -> Iterator[_Place]:
        """Where messages of these ids may be. Replies and the like are not looked through: nobody
        knows their ids."""
        ids = [id] if isinstance(id, str) else list(dict.fromkeys(id))
        for one in self._asked(topic):
            if topic is None and one.declaration.expires and one.declaration.named is False:
                continue
            for slot, some in one.places_of(ids, basis):
                for start in range(0, len(some), IDS_PER_CALL):
                    yield _Place(one, slot, some[start : start + IDS_PER_CALL])

    def _looked_up(self, places: Iterator[_Place]) -> list[Found]:
        """What is in these places."""
        # What lies on one server is asked for by one call: most places have nothing, and a call
        # costs more than to look into some.
        most = 1 if self.clustered else IDS_PER_CALL

        def calls() -> Iterator[ScriptCall]:
            some: list[_Place] = []
            number = 0
            for place in places:
                number += len(place.ids)
                if some and number > most:
                    yield self._looking_up(some)
                    some, number = [], len(place.ids)
                some.append(place)
            if some:
                yield self._looking_up(some)

        return self._run_parts(calls())

    def _looking_up(self, places: Sequence[_Place]) -> ScriptCall:
        keys: list[str] = []
        args: list[Any] = [len(places)]
        for _, slot, ids in places:
            keys += (slot.prepare, slot.dead, slot.reasons, slot.body, *slot.stores)
            keys += map(slot.copies, ids)
            args += (len(slot.stores), len(ids), *ids)

        def parse(raw: list[Any]) -> list[Found]:
            return [
                Found(
                    places[raw[i]].topic.name,
                    places[raw[i]].slot.number,
                    text(raw[i + 1]),
                    _STATES[raw[i + 2]],
                    raw[i + 3],
                    raw[i + 4],
                    raw[i + 5],
                    *_note(raw[i + 6]),
                )
                for i in range(0, len(raw), 7)
            ]

        return ScriptCall(load("get"), keys, args, parse)

    def _by_id(
        self,
        id: str | Iterable[str],
        topic: str | None,
        basis: str | None,
        call: Callable[[Topic, Slot, Sequence[str]], ScriptCall],
    ) -> list[Any]:
        return self._run_parts(call(*place) for place in self._places(id, topic, basis))

    def _run_parts(self, calls: Iterator[ScriptCall]) -> list[Any]:
        """What calls found, each some; a bounded number of calls at a time."""
        found = []
        while together := list(itertools.islice(calls, CALLS_TOGETHER)):
            for part in self.run_all(together):
                found += part
        self.metrics.pass_by(self)
        return found

    def _asked(self, topic: str | None) -> list[Topic]:
        """The topic of that name, or all, as they are declared at this moment."""
        if topic is not None:
            self.forget(topic)
            return [self._standing(topic)]
        declared = self.client.hgetall(self.keys.topics)
        return sorted(
            (self._remember(text(name), raw) for name, raw in declared.items()),
            key=lambda topic: topic.name,
        )

    def remember_cancelled(self, ids: Iterable[str], *, most: int, seconds: float) -> None:
        """Note ids for :meth:`cancelled_lately`; it changes nothing for messages that have them.

        most: how many are remembered, the latest, whoever has noted them
        seconds: for how long
        """
        every = list(dict.fromkeys(ids))
        calls = [
            ScriptCall(
                load("cancelled"),
                (self.keys.cancelled,),
                (most, int(seconds * 1000), *every[start : start + REMEMBERED_PER_CALL]),
                int,
            )
            for start in range(0, len(every), REMEMBERED_PER_CALL)
        ]
        self.run_all(calls)

    def cancelled_lately(self, seconds: float) -> list[str]:
        """The ids that were noted as cancelled within so many seconds, the oldest first."""
        now, rest = self.client.time()
        since = now * 1000 + rest // 1000 - int(seconds * 1000)
        found: dict[str, None] = {}
        while True:
            page = self.client.zrangebyscore(
                self.keys.cancelled,
                f"({since}",
                "+inf",
                start=len(found),
                num=REMEMBERED_PER_CALL * 10,
            )
            found.update(dict.fromkeys(map(text, page)))
            if len(page) < REMEMBERED_PER_CALL * 10:
                return list(found)

    def speaks_for(self, topics: Iterable[str], name: str, seconds: float) -> list[str]:
        """The topics for which this process is to answer where one of many does.

        name: the process's; who was the first to ask has it for so many seconds, and again with
            each call
        """
        names = list(topics)
        if not names:
            return []
        keys = [self.keys.speaker(one) for one in names]
        answers = self.run(ScriptCall(load("speak"), keys, (name, int(seconds * 1000)), list))
        return [one for one, mine in zip(names, answers, strict=True) if mine]

    # -- by what they are

    def scan(
        self,
        topic: str | None = None,
        *,
        state: str | Collection[str] | None = None,
        since: float | None = None,
        until: float | None = None,
        where: Callable[[Any], Any] | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Page:
        """Read messages in the order of their times, of one topic or of all together.

        state: WAITING, IN_FLIGHT or DEAD, or several of these; all unless given
        since, until: seconds since the epoch; only those whose time (when they are due, when
            their lease ends, when they died) is not before the one and before the other
        where: only those for which this is true
        limit: how many at most
        after: where to go on: what the page before this one says

        Reads in small steps that each take the server O(log n). What is moved meanwhile may be
        seen twice, or not at all; what stays is seen once. Raises ValueError for a state that
        there is not, and for an `after` that no page has said.
        """
        if limit < 1:
            raise ValueError(f"limit must be at least 1, not {limit!r}")
        step = SCAN_STEP if where else min(SCAN_STEP, limit + 1)
        messages: list[Found] = []
        cursor = _read_cursor(after)
        for found, position in self._read(topic, state, since, until, cursor, step):
            if len(messages) == limit:
                return Page(messages, _write_cursor(cursor))
            cursor = position
            if where is None or where(self._shown(found)):
                messages.append(found)
        return Page(messages, None)

    def count(
        self,
        topic: str | None = None,
        *,
        state: str | Collection[str] | None = None,
        since: float | None = None,
        until: float | None = None,
        where: Callable[[Any], Any] | None = None,
    ) -> int:
        """How many messages :meth:`scan` would read, page by page: it looks at each."""
        bodies = where is not None
        found = self._read(topic, state, since, until, None, SCAN_STEP, bodies)
        return sum(1 for one, _ in found if where is None or where(self._shown(one)))

    def _shown(self, found: Found) -> Any:
        """What `where` is asked about."""
        return found

    def _read(
        self,
        topic: str | None,
        state: str | Collection[str] | None,
        since: float | None,
        until: float | None,
        cursor: _Position | None,
        step: int,
        bodies: bool = True,
    ) -> Iterator[tuple[Found, _Position]]:
        states = _checked_states(state)
        since_us, until_us = microseconds(since), microseconds(until)
        topics = self._asked(topic)
        slots = sum(one.slot_span for one in topics)
        # At first about twice of what is asked for, of all slots together; more where it is read.
        step = max(min(step, 2 * step // max(slots, 1) + (8 if slots <= 64 else 1)), 1)
        calls, readers = [], []
        budget = self.pop_bytes // max(slots, 1)  # a page of each is held at a time
        for one in topics:
            begin = None if cursor is None else cursor.within(one.name)
            reader = self._reader(one, states, since_us, until_us, bodies, budget)
            for slot in one.all_slots():
                calls.append(reader(slot, begin, step))
                readers.append((reader, slot))
        pages: list[Any] = []
        for at in range(0, len(calls), CALLS_TOGETHER):
            pages += self.run_all(calls[at : at + CALLS_TOGETHER])

        def entries(reader: Any, slot: Slot, page: _Read) -> Iterator[tuple[Found, _Position]]:
            wanted = step
            while True:
                yield from page
                if len(page) < wanted and not page.cut:
                    return
                last = page[-1][1]
                wanted = min(4 * wanted, SCAN_STEP)
                page = self.run(reader(slot, (last.score, last.id, last.slot, last.kind), wanted))

        for found, position in heapq.merge(
            *(entries(*each, page) for each, page in zip(readers, pages, strict=True)),
            key=lambda entry: entry[1],
        ):
            if since_us is not None and found.time_us < since_us:
                continue
            if until_us is not None and found.time_us >= until_us:
                continue
            yield found, position

    def _reader(
        self,
        topic: Topic,
        states: Collection[str],
        since_us: int | None,
        until_us: int | None,
        bodies: bool,
        budget: int,
    ) -> Callable[[Slot, _Begin | None, int], ScriptCall]:
        """What makes the calls that read a slot of a topic: from where, and how many."""
        low = "-inf" if since_us is None else str(max(since_us, 0) // 1000 * 1000)
        high = "+inf" if until_us is None else str(max(until_us, 0) // 1000 * 1000 + 999)

        def call(slot: Slot, begin: _Begin | None, step: int) -> ScriptCall:
            kinds = [
                *[(WAITING, key, at) for at, key in enumerate(slot.stores)],
                (IN_FLIGHT, slot.prepare, len(slot.stores)),
                (DEAD, slot.dead, len(slot.stores) + 1),
            ]
            kinds = [kind for kind in kinds if kind[0] in states]

            def parse(raw: list[Any]) -> _Read:
                read = []
                for i in range(0, len(raw) - len(raw) % 5, 5):
                    state, _, number = kinds[raw[i]]
                    id, score = raw[i + 1], raw[i + 2]
                    at = number if state == WAITING else scores.read_lease(score).step
                    found = Found(
                        topic.name,
                        slot.number,
                        text(id),
                        state,
                        at,
                        score,
                        raw[i + 3],
                        *_note(raw[i + 4]),
                    )
                    read.append((found, _Position(score, topic.name, id, slot.number, number)))
                return _Read(read, len(raw) % 5 > 0)

            where: tuple[Any, ...] = ("", "")
            if begin is not None:
                score, id, *here = begin
                later = (int([slot.number, number] > here) for _, _, number in kinds)
                where = (score, id, *later)
            return ScriptCall(
                load("scan"),
                (slot.body, slot.reasons, *(key for _, key, _ in kinds)),
                (step, low, high, int(bodies), budget, *where),
                parse,
            )

        return call

    # -- dead messages

    def requeue_dead(
        self,
        topic: str | None = None,
        *,
        ids: Iterable[str] | None = None,
        where: Callable[[Any], Any] | None = None,
    ) -> int:
        """Take messages out of DeadQueue and have them delivered now, with all their retries.

        ids: only these, and the copies that share them
        where: only those for which this is true

        Returns how many. In bounded steps; what dies meanwhile stays dead.
        """

        def call(topic: Topic, slot: Slot, some: list[str]) -> ScriptCall:
            return self._announcing(
                topic,
                "requeue",
                (slot.announced_times, slot.dead, slot.reasons, *slot.stores),
                (len(slot.stores), slot.number, topic.declaration.retries, *some),
                partial(count_first, self.metrics.counts(topic), "requeued"),
            )

        return self._with_the_dead(topic, ids, where, call)

    def purge_dead(
        self,
        topic: str | None = None,
        *,
        ids: Iterable[str] | None = None,
        where: Callable[[Any], Any] | None = None,
    ) -> int:
        """Delete dead messages; return how many. Otherwise as :meth:`requeue_dead`."""

        def call(topic: Topic, slot: Slot, some: list[str]) -> ScriptCall:
            made = self._cancelling(topic, slot, some, (DEAD,), None, copies=False)
            return made._replace(parse=lambda raw: sum(one.deleted for one in made.parse(raw)))

        return self._with_the_dead(topic, ids, where, call)

    def _with_the_dead(
        self,
        topic: str | None,
        ids: Iterable[str] | None,
        where: Callable[[Any], Any] | None,
        call: Callable[[Topic, Slot, list[str]], ScriptCall],
    ) -> int:
        if ids is None:
            seconds, rest = self.client.time()
            found = (
                one
                for one, _ in self._read(
                    topic, DEAD, None, seconds + rest / 1e6, None, SCAN_STEP, where is not None
                )
            )
        else:
            found = (one for one in Operating.get(self, ids, topic=topic) if one.state == DEAD)
        if where is not None:
            found = (one for one in found if where(self._shown(one)))
        return sum(self._each(found, call))

    def _each(
        self, found: Iterable[Found], call: Callable[[Topic, Slot, list[str]], ScriptCall]
    ) -> Iterator[Any]:
        """Run calls for these messages, a bounded number at a time; what each found."""
        found = iter(found)
        while batch := list(itertools.islice(found, IDS_PER_CALL)):
            by_slot: dict[tuple[str, int], list[str]] = defaultdict(list)
            for one in batch:
                by_slot[one.topic, one.slot].append(one.id)
            calls = []
            for (name, number), some in by_slot.items():
                declared = self._standing(name)
                calls.append(call(declared, declared.slot(number), some))
            yield from self.run_all(calls)
        self.metrics.pass_by(self)

    # -- how topics stand

    def counts_by_slot(self, topic: str, *, reachable: bool = False) -> list[Counts]:
        """How many messages each slot holds, by slot number.

        reachable: without the slots on nodes of a Cluster that cannot be reached
        """
        declared = self._standing(topic)
        slots = declared.all_slots()
        calls = [
            self._counting(declared, some)
            for some in ([[slot] for slot in slots] if self.clustered else [slots])
        ]
        if not (reachable and self.clustered):
            return [counts for part in self.run_all(calls) for counts in part]
        replies, _ = self._replies_of_nodes(calls)
        return [
            counts
            for call, reply in zip(calls, replies, strict=True)
            if not isinstance(reply, Exception)
            for counts in call.parse(reply)
        ]

    def counts(self, topic: str) -> Counts:
        """How many messages a topic holds."""
        return _sum(self.counts_by_slot(topic))

    def _counting(self, topic: Topic, slots: Sequence[Slot]) -> ScriptCall:
        keys: list[str] = []
        for slot in slots:
            keys += (slot.prepare, slot.dead, *slot.stores)
        return ScriptCall(
            load("counts"),
            keys,
            (len(slots), len(topic.steps)),
            lambda raw: [Counts(*raw[i : i + 4]) for i in range(0, len(raw), 4)],
        )

    def coming(self, topic: str, seconds: Sequence[float]) -> list[int]:
        """How many waiting messages are due by each of some times.

        seconds: the times, from now by Redis's clock; 0 counts what is due already
        """
        times = [microseconds(time) for time in seconds]
        slots = self._standing(topic).all_slots()
        by_slot = self.run_all(
            [ScriptCall(load("coming"), slot.stores, times, list) for slot in slots]
        )
        return [sum(column) for column in zip(*by_slot, strict=True)]

    def summary(self, topic: str | None = None) -> list[Summary]:
        """How many messages topics hold, and for how long the oldest that is due has been so."""
        topics = self._asked(topic)
        calls = [
            ScriptCall(
                load("summary"),
                (slot.prepare, slot.dead, *slot.stores),
                (),
                lambda raw: (Counts(*raw[:4]), raw[4]),
            )
            for one in topics
            for slot in one.all_slots()
        ]
        found = iter(self.run_all(calls))
        made = []
        for one in topics:
            by_slot = list(itertools.islice(found, one.slot_span))
            made.append(
                Summary(
                    one.name,
                    one.slots,
                    _sum(counts for counts, _ in by_slot),
                    max(oldest for _, oldest in by_slot),
                )
            )
        return made


class _Place(NamedTuple):
    """A slot, and what to look for there."""

    topic: Topic
    slot: Slot
    ids: Sequence[str]


#: Where a slot is read from: what follows this score and id there, or in a later slot and place.
_Begin = tuple[int, bytes, int, int]


class _Read(list[tuple[Found, "_Position"]]):
    """What one call has read. cut: there is more, but it would have had too many bytes"""

    def __init__(self, read: Iterable[tuple[Found, _Position]], cut: bool) -> None:
        super().__init__(read)
        self.cut = cut


class _Position(NamedTuple):
    """Where a scan is: in this order, which is total, it reads."""

    score: int
    topic: str
    id: bytes
    slot: int
    kind: int

    def within(self, topic: str) -> _Begin:
        """Where a topic's slots are read from."""
        if topic == self.topic:
            return self.score, self.id, self.slot, self.kind
        # Of those with the same score, the ones of earlier topics have been read.
        return self.score + (topic < self.topic), b"", -1, -1


def _write_cursor(position: _Position | None) -> str | None:
    if position is None:
        return None
    score, topic, id, slot, kind = position
    fields = [topic, score, base64.b64encode(id).decode(), slot, kind]
    return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()


def _read_cursor(after: str | None) -> _Position | None:
    if after is None:
        return None
    try:
        topic, score, id, slot, kind = json.loads(base64.urlsafe_b64decode(after))
        return _Position(int(score), str(topic), base64.b64decode(id), int(slot), int(kind))
    except (ValueError, TypeError):
        raise ValueError(f"no page goes on after {after!r}") from None


def _checked_states(state: str | Collection[str] | None) -> Collection[str]:
    if state is None:
        return tuple(_STATES.values())
    states = (state,) if isinstance(state, str) else tuple(state)
    for one in states:
        if one not in _STATES.values():
            raise ValueError(f"{one!r} is no state; there are {', '.join(_STATES.values())}")
    return states


def _sum(counts: Iterable[Counts]) -> Counts:
    return Counts(*(sum(column) for column in zip(*counts, strict=True)))


def _note(raw: bytes) -> tuple[str, str]:
    """(reason, last error) as the scripts keep them."""
    reason, _, error = raw.decode("utf-8", "replace").partition("\n")
    return reason, error
