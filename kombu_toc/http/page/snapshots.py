"""What the views work with, and what all viewers of a process are shown: one look for all of them,
at the queues, at what was given up on and at what filters find.

If a look takes long, the next one comes later, so that looking never takes more than a share of the
time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from ...aio.center import AsyncTimeoutCenter
from ...center.center import TimeoutCenter
from ...center.topics import coming_call, summary_call
from ...errors import LibraryError, PartialError
from ...metrics import Lateness, lateness_of, read_minutes
from ...model.failures import FailureGroup
from ...model.library import Record
from ...model.results import DEAD, Consumer, Counts, Found, Page
from ...model.topic import Topic
from .. import tokens
from ..fields import Problem, problem_of, retry_after
from ..library import FarAhead
from ..messages import read_page
from ..request import Answer, end
from ..tokens import Audit, Mask, Sessions
from . import jobs
from .jobs import PAGE_BYTES, Listing, Selection, find, likeness
from .presentation import Ask, PageExtras, Reader, View

logger = logging.getLogger(__name__)

T = TypeVar("T")

# -- the queues
#
# A look takes a few round trips, and each of its commands O(log n): nothing is read of messages.

#: Seconds between two looks, at least; a look that took longer than a fifth of this is followed by
#: a longer pause.
EVERY = 1.0
FIFTH = 5

#: Seconds for which a request waits for a look, and for which an older one is shown meanwhile.
WAIT = 5.0
STALE = 3.0

#: Seconds after which a look is given up. That the broker does not answer is said before: after
#: WAIT, or twice what the look before took.
LONGEST = 60.0

#: Queues that are looked at at a time: a server has other things to do between two round trips.
TOGETHER = 100

#: Drawings that are kept, at most.
MOST_DRAWN = 200

#: Minutes that are drawn, with the present one, which is not; and those of which lateness is told.
MINUTES = 61
LATELY = 5


class Span(NamedTuple):
    """A stretch of time ahead, in bars.

    seconds: of one bar
    """

    title: str
    bars: int
    seconds: float

    @property
    def whole(self) -> float:
        return self.bars * self.seconds


SPANS = {
    "minute": Span("minute", 60, 1.0),
    "hour": Span("hour", 60, 60.0),
    "day": Span("day", 48, 1_800.0),
    "week": Span("week", 56, 10_800.0),
}

#: Until when it is told how much comes due, whichever span is drawn.
ENDS = tuple(span.whole for span in SPANS.values())


class Minute(NamedTuple):
    """What was counted in a minute.

    p99: seconds within which 99 percent were delivered; None: nothing was
    """

    delivered: int
    failed: int
    late: Lateness
    p99: float | None

    @classmethod
    def of(cls, numbers: Mapping[str, int]) -> Minute:
        if not numbers:
            return IDLE
        late = lateness_of(numbers)
        return cls(numbers.get("delivered", 0), numbers.get("failed", 0), late, late.quantile(0.99))


IDLE = Minute(0, 0, lateness_of({}), None)


def sum_of(minutes: Iterable[Minute]) -> Minute:
    """One and the same minute of several queues, or several minutes of one."""
    busy = [one for one in minutes if one is not IDLE]
    late = sum((one.late for one in busy), IDLE.late)
    delivered, failed = sum(one.delivered for one in busy), sum(one.failed for one in busy)
    return Minute(delivered, failed, late, late.quantile(0.99))


class Row(NamedTuple):
    """A queue.

    oldest: for how many seconds the oldest due message has been due
    due: seconds from now -> how many wait that are due by then; empty if nothing is scheduled
    rate: deliveries a second, in the last minute or two
    late: how late messages were delivered, in the last minutes
    hour: each of the last minutes, without the present one
    stopped: whether its target has said that it wants nothing any more
    """

    queue: str
    counts: Counts
    oldest: float
    due: dict[float, int]
    rate: float
    late: Lateness
    hour: list[Minute]
    consumers: list[Consumer]
    paused: bool
    stopped: bool

    @property
    def waiting(self) -> int:
        return self.counts.ready + self.counts.scheduled


class Snapshot(NamedTuple):
    """One look.

    number: of this look
    now_us: Redis's clock
    spans: those of which the rows know all bars
    """

    number: int
    now_us: int
    rows: list[Row]
    spans: frozenset[str]


def _held(
    center: TimeoutCenter, topics: Sequence[Topic], edges: Sequence[float]
) -> dict[str, tuple[Counts, float, dict[float, int]]]:
    """How much each of some topics holds, for how many seconds its oldest due message has been due,
    and how much is due by some times. Only slots in which something is scheduled are asked when."""
    run_all = center.runner.run_all
    slots = [slot for one in topics for slot in one.all_slots()]
    held = run_all([summary_call(slot) for slot in slots])
    later = [slot for slot, (counts, _) in zip(slots, held, strict=True) if counts.scheduled]
    times = [round(edge * 1e6) for edge in edges]
    coming = iter(run_all([coming_call(slot, times) for slot in later]))
    made, parts = {}, iter(held)
    for one in topics:
        every, oldest = zip(*itertools.islice(parts, one.slot_span), strict=True)
        ready = sum(counts.ready for counts in every if not counts.scheduled)
        numbers = [next(coming) for counts in every if counts.scheduled]
        sums = map(sum, zip(*numbers, strict=True))
        due = {edge: ready + number for edge, number in zip(edges, sums, strict=False)}
        made[one.name] = (Counts(*map(sum, zip(*every, strict=True))), max(oldest) / 1e6, due)
    return made


def edges_of(spans: frozenset[str]) -> list[float]:
    """The times by which messages are counted: seconds from now, sorted; 0 is the first."""
    edges = {0.0, *ENDS}
    for name in spans:
        span = SPANS[name]
        edges.update(span.seconds * place for place in range(span.bars + 1))
    return sorted(edges)


def _why(exc: Exception) -> str:
    if isinstance(exc, (asyncio.TimeoutError, TimeoutError)):
        return f"the broker has not answered for {WAIT:g} seconds"
    return problem_of(exc).detail


class FirstLook(Exception):
    """There is no look yet: the first one is under way, and the broker answers.

    seen: how many queues it has seen
    of: how many there are
    """

    def __init__(self, seen: int, of: int) -> None:
        super().__init__(f"{seen} of {of} queues")
        self.seen, self.of = seen, of


class SnapshotCache:
    """The latest look, for all viewers of a process.

    clock: monotonic seconds
    """

    def __init__(
        self, center: AsyncTimeoutCenter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._center = center
        self._clock = clock
        #: of minutes that are over, what was counted: topic -> minute -> that
        self._minutes: dict[str, dict[int, Minute]] = {}
        #: how many queues the look that is taken has seen, and how many there are
        self.seen = self.of = 0
        self._latest: Snapshot | None = None
        self._taken_at = 0.0
        #: seconds that it took
        self._took = 0.0
        self._next = 0.0
        self._task: asyncio.Task[None] | None = None
        #: span -> when somebody wanted it last
        self._wanted: dict[str, float] = {}
        #: why the latest look is an old one; empty while it is not
        self.trouble = ""
        #: how many looks there were
        self.taken = 0
        #: what was drawn, and of what
        self._drawn: dict[Any, tuple[Any, str]] = {}

    async def read(self, span: str) -> Snapshot:
        """The latest look; a new one if there may be one. The bars of a span that nobody has asked
        for lately are in the next one.

        Raises Problem if there never was one.
        """
        now = self._clock()
        self._wanted[span] = now
        if self._task is None and now >= self._next:
            self._task = asyncio.get_running_loop().create_task(self._look())
        if self._task is not None and (self._latest is None or not self.trouble):
            is_old = self._latest is None or now - self._taken_at > STALE
            await asyncio.wait((self._task,), timeout=WAIT if is_old else EVERY / 2)
        if self._latest is None and not self.trouble and self.of:
            raise FirstLook(self.seen, self.of)
        if self._latest is None:
            said = self.trouble or "the broker has not answered yet"
            raise Problem("broker", said, headers=retry_after(1))
        return self._latest

    def age(self) -> float:
        """Seconds since the latest look."""
        return self._clock() - self._taken_at

    async def aclose(self) -> None:
        """End a look that is under way."""
        await end(self._task)

    def drawn(self, of: Any, key: Any, draw: Callable[[], str]) -> str:
        """What is drawn of a look, or of an hour: once for all viewers who see the same.

        of: tells one from the next
        key: tells what they see
        """
        found = self._drawn.get(key)
        if found is None or found[0] != of:
            if len(self._drawn) >= MOST_DRAWN:
                self._drawn.clear()
            found = self._drawn[key] = of, draw()
        return found[1]

    async def _look(self) -> None:
        began = self._clock()
        pause = EVERY
        spans = frozenset(name for name, at in self._wanted.items() if began - at < 10)
        self.taken += 1
        call = asyncio.ensure_future(self._center.call(self.take, spans, self.taken))
        try:
            patience = max(WAIT, 2 * self._took)
            seen = 0
            while not call.done() and self._clock() - began < LONGEST:
                await asyncio.wait((call,), timeout=patience)
                if not call.done() and self.seen == seen:
                    self.trouble = self.trouble or _why(TimeoutError())
                seen = self.seen
            if not call.done():
                raise TimeoutError
            self._latest = call.result()
            self._taken_at = self._clock()
            self._took = min(self._taken_at - began, LONGEST / 4)
            self.trouble = ""
            pause = (self._taken_at - began) * (FIFTH - 1)
        except Exception as exc:
            self.trouble = self.trouble or _why(exc)  # which is logged once
        finally:
            await end(None if call.done() else call)
            self._next = max(self._clock() + pause, began + EVERY)
            self._task = None

    # -- a look

    def take(self, center: TimeoutCenter, spans: frozenset[str], number: int) -> Snapshot:
        """Look at all queues but those that go away by themselves, such as those for replies."""
        seconds, us = center.client.time()
        topics = [one for one in center.registry.select(None) if not one.declaration.expires]
        edges = edges_of(spans)
        self.seen, self.of = 0, len(topics)
        consumers, paused = center.queues.consumers(), center.queues.paused()
        rows: list[Row] = []
        minutes = self._minutes
        self._minutes = {}
        for start in range(0, len(topics), TOGETHER):
            some = topics[start : start + TOGETHER]
            self.seen = start
            held = _held(center, some, edges)
            names = [one.name for one in some]
            counted = self._counted(center, names, seconds // 60, minutes)
            for one in some:
                name, stopped = one.name, bool(one.declaration.target_stopped)
                *hour, now = counted[name]
                rate = (hour[-1].delivered + now.delivered) / (60 + seconds % 60 + us / 1e6)
                seen = *held[name], rate, sum_of(counted[name][-LATELY:]).late, hour
                rows.append(Row(name, *seen, consumers.get(name, []), name in paused, stopped))
        return Snapshot(number, seconds * 1_000_000 + us, rows, spans)

    def _counted(
        self,
        center: TimeoutCenter,
        names: Sequence[str],
        present: int,
        before: dict[str, dict[int, Minute]],
    ) -> dict[str, list[Minute]]:
        """What was counted in each of the latest minutes, the present one last. A minute that was
        over when it was read is not read again.

        before: what the look before this one has read
        """
        wanted = range(present - MINUTES + 1, present + 1)
        known = {name: before.get(name, {}) for name in names}
        # Processes send what they have counted some seconds later.
        old = [minute for minute in wanted if minute < present - 1]
        unread = [name for name in names if any(minute not in known[name] for minute in old)]
        if unread:
            for name, numbers in read_minutes(center, unread, old).items():
                known[name].update(zip(old, map(Minute.of, numbers), strict=True))
        latest = (present - 1, present)
        for name, numbers in read_minutes(center, names, latest).items():
            known[name].update(zip(latest, map(Minute.of, numbers), strict=True))
            # Of the present minute only what it is now: it counts as read when it is over.
            self._minutes[name] = {
                minute: said for minute, said in known[name].items() if minute in wanted[:-1]
            }
        return {name: [known[name].get(minute, IDLE) for minute in wanted] for name in names}


# -- looks that are kept for as many times as long as they took

#: Seconds for which a look is shown to all viewers, at least; otherwise so many times what it took.
LEAST = 1.0
SHARE = 10

#: Looks that are kept, at most.
MOST_KEPT = 500


class Looks(Generic[T]):
    """The latest looks, for all viewers of a process: they take a tenth of the time at most."""

    def __init__(self) -> None:
        #: queue and more -> what was seen, and until when it is shown by the loop's clock
        self._kept: dict[tuple[Any, ...], tuple[T, float]] = {}
        self._looking: dict[tuple[Any, ...], asyncio.Lock] = {}
        #: how often something was changed here
        self._changes = 0

    async def read(self, key: tuple[Any, ...], look: Callable[[], Awaitable[T]]) -> T:
        """The latest look; a new one if there may be one."""
        clock = asyncio.get_running_loop().time
        async with self._looking.setdefault(key, asyncio.Lock()):
            began = clock()
            if key in self._kept and began < self._kept[key][1]:
                return self._kept[key][0]
            changes = self._changes
            seen = await look()
            shown = max(LEAST, SHARE * (clock() - began)) if changes == self._changes else 0.0
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
                self._looking.clear()
            self._kept[key] = seen, clock() + shown
            return seen

    def forget(self, queue: str) -> None:
        """Messages of a queue were changed here: whoever has done it is to see it."""
        self._changes += 1
        for key in [one for one in self._kept if one[0] in (queue, "")]:
            del self._kept[key]


# -- the latest dead letters, grouped by why they died

#: Dead letters that are looked at: of a queue, and of all together, at most.
LOOKED = 2_000
LOOKED_IN_ALL = 5_000
STEP = 200

#: Where a queue has more, or larger ones than a look reads, those that died within so many seconds
#: are looked at: the widest of these that has no more.
WINDOWS = ((86_400, "the last day"), (3_600, "the last hour"), (60, "the last minute"))

#: Groups that are shown, at most.
MOST = 200


class Group(NamedTuple):
    """Dead letters that are alike. Times are microseconds since the epoch."""

    queue: str
    task: str
    reason: str
    error: str
    number: int
    first_us: int
    last_us: int
    id: str


class Seen(NamedTuple):
    """What a look at the dead letters of a queue has seen.

    groups: the largest ones
    looked: how many dead letters were looked at
    which: which these are; empty: all
    """

    groups: list[Group]
    looked: int
    which: str


class DeadLetterGroups(Looks[Seen]):
    """The latest looks at the dead letters of queues."""

    def __init__(self, center: AsyncTimeoutCenter, reader: Reader) -> None:
        super().__init__()
        self._center = center
        self._reader = reader

    async def look(self, queue: str, total: int, most: int, now_us: int) -> Seen:
        """The latest look at a queue.

        total: how many dead letters there are
        most: how many to look at
        now_us: Redis's clock
        """

        async def look() -> Seen:
            found, which = await self._latest(queue, total, most, now_us / 1e6)
            return Seen((await self._groups(queue, found, now_us))[:MOST], len(found), which)

        return await self.read((queue, most), look)

    async def _latest(
        self, queue: str, total: int, most: int, now: float
    ) -> tuple[list[Found], str]:
        """Dead letters to look at, and which these are; nothing is said of all.

        total: how many there are
        most: how many to look at
        now: by Redis's clock
        """
        if total <= most:
            found, after = await self._read(queue, most, None)
            if after is None:
                return found, ""
        chosen: list[Found] = []
        said = ""
        for seconds, window in WINDOWS:
            found, after = await self._read(queue, most, now - seconds)
            if found:
                first = "" if after is None else "first "
                chosen = found
                said = (
                    f"These are the {first}{len(found):,} that died within {window}, of {total:,}."
                )
            if after is None:
                break
        if chosen:
            return chosen, said
        found, _ = await self._read(queue, most, None)
        return found, f"These are the oldest {len(found):,} of {total:,}."

    async def _read(self, queue: str, most: int, since: float | None) -> Page:
        """The first dead letters since a time."""
        how: dict[str, Any] = {"limit": most, "size": PAGE_BYTES, "step": STEP}
        return await read_page(self._center, queue, state=DEAD, since=since, **how)

    async def _groups(self, queue: str, found: Sequence[Found], now_us: int) -> list[Group]:
        """Dead letters that are alike, the largest group first."""
        groups: dict[tuple[str, str, str], Group] = {}
        async for shown in self._reader.read_all(found, now_us):
            one = shown.found
            key = likeness(shown)
            known = groups.get(key)
            if known is None:
                known = Group(queue, *key, 0, one.time_us, 0, one.id)
            groups[key] = known._replace(
                number=known.number + 1, last_us=max(one.time_us, known.last_us)
            )
        return sorted(groups.values(), key=lambda one: (-one.number, one.task))


# -- what filters find: one look for all who look through the same filter
#
# A filter that looks into messages reads many of them to find a few. So looking again by itself
# takes a tenth of the time at most, of all filters together. A look that has found less than a
# page, and has not come to the end, goes on while somebody looks.
#: How many times as long as it took a look is shown to whoever opens the view. A page that looks
#: again by itself is shown it for longer.
OPENED = 2

#: Seconds after which a look does not go on any more that nobody has asked for.
LEFT = 10.0

#: Looks that are kept, at most: of each there are the messages that it has found.
MOST_SEEN = 20

#: Seconds for which a filter counts as looked through.
LOOKED_THROUGH = 120.0

#: What a filter says, and where its page begins; the queue comes first.
Key = tuple[str, ...]


_NOTHING = Listing([], None, 0, 0.0)


@dataclass(eq=False)
class Search:
    """A look through a filter.

    now_us: when it began, by Redis's clock
    at: when it has found something last, by the loop's clock
    asked: when somebody has asked for it last, by the same clock
    first: ends with the first look at messages
    """

    now_us: int
    listing: Listing = _NOTHING
    at: float = 0.0
    asked: float = 0.0
    first: asyncio.Future[None] = field(default_factory=asyncio.Future)
    task: Any = None

    @property
    def goes_on(self) -> bool:
        """Whether more is looked for just now."""
        return not self.task.done()


class SearchCache:
    """The latest looks through filters, for all viewers of a process."""

    def __init__(self, center: Any, reader: Reader) -> None:
        self._center = center
        self._reader = reader
        self._seen: dict[Key, Search] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: how many looks there were
        self.taken = 0

    async def look(
        self, key: Key, selection: Selection, *, now_us: int, limit: int, is_live: bool
    ) -> Search:
        """The latest look through a filter, or a new one.

        key: ends with where the page begins
        now_us: Redis's clock
        limit: how many messages to find
        is_live: whether a page looks again by itself
        """
        loop = asyncio.get_running_loop()
        seen = self._seen.get(key)
        if seen is not None and not seen.goes_on:
            opened = seen.at + OPENED * seen.listing.took - loop.time()
            if (self.again_in(seen) if is_live else opened) <= 0:
                seen = None
        if seen is None:
            self.taken += 1
            self._seen.pop(key, None)
            while len(self._seen) >= MOST_SEEN:
                del self._seen[next(iter(self._seen))]
            seen = self._seen[key] = Search(now_us)
            seen.task = loop.create_task(self._look(key, seen, selection, limit))
            self._tasks.add(seen.task)
            seen.task.add_done_callback(self._tasks.discard)
        seen.asked = loop.time()
        await asyncio.shield(seen.first)  # who goes away ends nobody else's look
        return seen

    async def _look(self, key: Key, seen: Search, selection: Selection, limit: int) -> None:
        """Look; and look on, for half of the time at most, until there is a page or the end."""
        clock, before, after = asyncio.get_running_loop().time, seen.listing, key[-1] or None
        try:
            while True:
                more = await find(
                    self._center,
                    self._reader,
                    selection,
                    now_us=seen.now_us,
                    limit=limit - len(before.messages),
                    after=after,
                )
                messages, after = before.messages + more.messages, more.after
                looked, took = before.looked + more.looked, before.took + more.took
                before = seen.listing = Listing(messages, after, looked, took)
                seen.at = clock()
                if not seen.first.done():
                    seen.first.set_result(None)
                if after is None or len(messages) >= limit or clock() - seen.asked > LEFT:
                    return
                await asyncio.sleep(more.took)
                if self._seen.get(key) is not seen:
                    return
        except Exception as exc:  # whoever looks next is told of what lasts
            if seen.first.done():
                logger.warning("a look through a filter has ended early: %s", exc)
                return
            if self._seen.get(key) is seen:
                del self._seen[key]
            seen.first.set_exception(exc)
        finally:
            seen.first.cancel()

    def again_in(self, seen: Search) -> float:
        """In how many seconds there is another look for pages that look again by themselves."""
        now = asyncio.get_running_loop().time()
        others = (one for one in self._seen.values() if now - one.at < LOOKED_THROUGH)
        took = sum(one.listing.took for one in others if one is not seen)
        return seen.at + max(LEAST, SHARE * (took + seen.listing.took)) - now

    def forget(self, queue: str) -> None:
        """Messages of a queue were changed here: whoever has done it is to see it."""
        for key in [one for one in self._seen if one[0] == queue]:
            del self._seen[key]

    async def aclose(self) -> None:
        """End the looks that are under way."""
        await end(*self._tasks)


# -- what the views work with


class Tools:
    """One of everything, for one page.

    api: the application
    extras: what it can show beside what every center has
    mask: what is not shown
    """

    def __init__(self, api: Any, extras: PageExtras, mask: Mask) -> None:
        self.api, self.mask = api, mask
        self.extras: Any = extras
        self.audit: Audit = api.audit
        center: AsyncTimeoutCenter = api.center
        self.center = center
        self.reader = reader = Reader(mask, extras)
        self.snapshots = SnapshotCache(center)
        self.far = FarAhead(api)
        self.sessions = Sessions(center, api.tokens, api.names)
        self.actions = jobs.Actions(api.acting, extras)
        self.jobs = jobs.Jobs(center, reader, self.actions, self.audit, self.forget)
        self.now_us = self.jobs.now_us
        self.dead_letters = DeadLetterGroups(center, reader)
        self.searches = SearchCache(center, reader)
        self._failures: Looks[tuple[Sequence[FailureGroup], str]] = Looks()

    def forget(self, queue: str) -> None:
        """Messages of a queue were changed here: whoever has done it is to see it."""
        self.dead_letters.forget(queue)
        self.searches.forget(queue)
        self._failures.forget(queue)

    async def aclose(self) -> None:
        """End what goes on by itself."""
        for one in (self.jobs, self.searches, self.snapshots, self.far, self.extras):
            await one.aclose()

    async def failure_groups(self) -> tuple[Sequence[FailureGroup], str]:
        """The groups of all failed tasks, as of a moment ago, as :meth:`as_far` gives them."""
        groups = self.center.failures.groups
        return await self._failures.read(("",), lambda: self.as_far(groups()))

    @staticmethod
    async def as_far(asked: Awaitable[T]) -> tuple[T, str]:
        """What was found, and what has not answered."""
        try:
            return await asked, ""
        except PartialError as exc:
            return exc.results, "; ".join(map(str, exc.missing))

    async def recorded(self, ask: Ask, method: str, **which: Any) -> tuple[Sequence[Record], str]:
        """What the task library has, as far as the visitor may look at it; and why it has not
        answered.

        method: ``history`` or ``find``
        """
        if not self.api.has_library or not ask.visitor.may("read", None):
            return [], ""
        try:
            found = await self.api.ask_library(method, **which)
        except LibraryError as exc:
            return [], f"the task library ({exc})"
        return getattr(found, "records", found), ""

    async def queue_of(self, ask: Ask, role: str, queue: str) -> str:
        """A queue for which this is allowed. Raises Problem for any other."""
        check_role(ask, role, queue)
        known: str = await self.api.known_queue(queue)
        return known


#: Makes a view, or answers otherwise.
Viewing = Callable[[Tools, Ask], Awaitable[View | Answer]]


def check_role(ask: Ask, role: str, queue: str | None) -> None:
    """Raises Problem if this is not allowed."""
    tokens.check_role(ask.visitor.token, role, queue)


def acts_of(ask: Ask, queue: str, state: str) -> list[jobs.Act]:
    """What a visitor may do to messages of a queue that are in a state, or to failed tasks."""
    every = jobs.FAILED_ACTS if state == jobs.FAILED_TASK else jobs.ACTS
    return [act for act in every.values() if act.could(state) and ask.visitor.may(act.role, queue)]


def check_any(ask: Ask, role: str) -> None:
    """Raises Problem for who may do this for no queue."""
    if role not in ask.visitor.token.roles:
        raise Problem("forbidden", f"this needs a token with the role {role}")
