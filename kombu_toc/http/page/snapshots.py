"""What all viewers are shown of the queues: one look for all of them, at most once a second.

A look takes a few round trips, and each of its commands O(log n): nothing is read of messages. If
a look takes long, the next one comes later, so that looking never takes more than a fifth of the
time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...aio.center import AsyncTimeoutCenter
from ...center.center import TimeoutCenter
from ...metrics.counters import Lateness, lateness_of, read_minutes
from ...model.keys import Slot
from ...model.results import Consumer, Counts
from ...model.topic import Topic
from ..problems import Problem, problem_of, retry_after

#: Seconds between two looks, at least; a look that took longer than a fifth of this is followed by
#: a longer pause.
EVERY = 1.0
SHARE = 5

#: Seconds for which a request waits for a look, and for which an older one is shown meanwhile.
WAIT = 5.0
STALE = 3.0

#: Seconds after which a look is given up. That the broker does not answer is said before: after
#: WAIT, or twice what the look before took.
LONGEST = 60.0

#: Queues that are looked at at a time: a server has other things to do between two round trips.
TOGETHER = 100

#: Minutes of a sparkline, the present one among them; and those of which lateness is told.
MINUTES = 14
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


class Row(NamedTuple):
    """A queue.

    oldest: for how many seconds the oldest due message has been due
    rate: deliveries a second, in the last minute or two
    late: how late messages were delivered, in the last minutes
    rates: deliveries a second, of each minute
    lates: seconds within which 99 percent were delivered, of each minute; None: there were none
    due: seconds from now -> how many wait that are due by then; empty if nothing is scheduled
    stopped: whether its target has said that it wants nothing any more
    """

    queue: str
    counts: Counts
    oldest: float
    rate: float
    late: Lateness
    rates: list[float]
    lates: list[float | None]
    consumers: list[Consumer]
    paused: bool
    due: dict[float, int]
    stopped: bool = False

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


class Trouble(NamedTuple):
    """Why there is no new look.

    since: by the monotonic clock
    """

    said: str
    since: float


class SnapshotReader:
    """Takes looks at a center, with what earlier ones have read of minutes that are over."""

    def __init__(self) -> None:
        #: topic -> minute -> what was counted
        self._minutes: dict[str, dict[int, dict[str, int]]] = {}
        #: how many queues the look that is taken has seen, and how many there are
        self.seen = self.of = 0

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
                name = one.name
                counts, oldest, due = held[name]
                rows.append(
                    Row(
                        name,
                        counts,
                        oldest,
                        *_rates(counted[name], seconds % 60 + us / 1e6),
                        consumers.get(name, []),
                        name in paused,
                        due,
                        bool(one.declaration.target_stopped),
                    )
                )
        return Snapshot(number, seconds * 1_000_000 + us, rows, spans)

    def _counted(
        self,
        center: TimeoutCenter,
        names: Sequence[str],
        present: int,
        before: dict[str, dict[int, dict[str, int]]],
    ) -> dict[str, list[dict[str, int]]]:
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
                known[name].update(zip(old, numbers, strict=True))
        latest = (present - 1, present)
        for name, numbers in read_minutes(center, names, latest).items():
            known[name].update(zip(latest, numbers, strict=True))
            known[name] = {minute: said for minute, said in known[name].items() if minute in wanted}
        # Of the present minute only what it is now: it counts as read when it is over.
        for name, read in known.items():
            self._minutes[name] = {
                minute: said for minute, said in read.items() if minute < present
            }
        return {name: [known[name].get(minute, {}) for minute in wanted] for name in names}


def _held(
    center: TimeoutCenter, topics: Sequence[Topic], edges: Sequence[float]
) -> dict[str, tuple[Counts, float, dict[float, int]]]:
    """How much each of some topics holds, for how many seconds its oldest due message has been due,
    and how much is due by some times. Only slots in which something is scheduled are asked when."""
    admin, run_all = center.admin_commands, center.runner.run_all
    slots = [(one.name, slot) for one in topics for slot in one.all_slots()]
    held = run_all([admin.summary(slot) for _, slot in slots])
    totals = {one.name: [0, 0, 0, 0] for one in topics}
    oldest = dict.fromkeys(totals, 0)
    later: list[tuple[str, Slot]] = []
    ready = dict.fromkeys(totals, 0)
    for (name, slot), (counts, late) in zip(slots, held, strict=True):
        totals[name] = [have + more for have, more in zip(totals[name], counts, strict=True)]
        oldest[name] = max(oldest[name], late)
        if counts.scheduled:
            later.append((name, slot))
        else:
            ready[name] += counts.ready
    times = [round(edge * 1e6) for edge in edges]
    due: dict[str, dict[float, int]] = {name: {} for name in totals}
    for (name, _), numbers in zip(
        later, run_all([admin.coming(slot, times) for _, slot in later]), strict=True
    ):
        known = due[name] or dict.fromkeys(edges, ready[name])
        due[name] = {
            edge: known[edge] + number for edge, number in zip(edges, numbers, strict=True)
        }
    return {name: (Counts(*totals[name]), oldest[name] / 1e6, due[name]) for name in totals}


def edges_of(spans: frozenset[str]) -> list[float]:
    """The times by which messages are counted: seconds from now, sorted; 0 is the first."""
    edges = {0.0, *ENDS}
    for name in spans:
        span = SPANS[name]
        edges.update(span.seconds * place for place in range(span.bars + 1))
    return sorted(edges)


def _rates(
    minutes: Sequence[dict[str, int]], into: float
) -> tuple[float, Lateness, list[float], list[float | None]]:
    """The rate, the lateness, and both of each minute.

    into: seconds of the present minute that are over
    """
    if not any(minutes):
        return _IDLE
    delivered = [numbers.get("delivered", 0) for numbers in minutes]
    each = [lateness_of(numbers) for numbers in minutes]
    lately = each[-LATELY]
    for one in each[-LATELY + 1 :]:
        lately = lately + one
    rates = [number / 60 for number in delivered]
    rates[-1] = delivered[-1] / max(into, 10.0)
    return (
        (delivered[-2] + delivered[-1]) / (60 + into),
        lately,
        rates,
        [one.quantile(0.99) for one in each],
    )


#: Of a queue in which nothing happens.
_IDLE: tuple[float, Lateness, list[float], list[float | None]] = (
    0.0,
    lateness_of({}),
    [0.0] * MINUTES,
    [None] * MINUTES,
)


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
        self._looks = SnapshotReader()
        self._latest: Snapshot | None = None
        self._taken_at = 0.0
        #: seconds that it took
        self._took = 0.0
        self._next = 0.0
        self._task: asyncio.Task[None] | None = None
        #: span -> when somebody wanted it last
        self._wanted: dict[str, float] = {}
        #: why the latest look is an old one; None while it is not
        self.trouble: Trouble | None = None
        #: how many looks there were
        self.taken = 0
        #: what was drawn of the look of that number
        self._drawn_of = 0
        self._drawn: dict[Any, str] = {}

    async def read(self, span: str) -> Snapshot:
        """The latest look; a new one if there may be one. The bars of a span that nobody has asked
        for lately are in the next one.

        Raises Problem if there never was one.
        """
        now = self._clock()
        self._wanted[span] = now
        if self._task is None and now >= self._next:
            self._task = asyncio.get_running_loop().create_task(self._look())
        if self._task is not None and (self._latest is None or self.trouble is None):
            is_old = self._latest is None or now - self._taken_at > STALE
            await asyncio.wait((self._task,), timeout=WAIT if is_old else EVERY / 2)
        if self._latest is None and self.trouble is None and self._looks.of:
            raise FirstLook(self._looks.seen, self._looks.of)
        if self._latest is None:
            said = "the broker has not answered yet" if self.trouble is None else self.trouble.said
            raise Problem("broker", said, headers=retry_after(1))
        return self._latest

    def age(self) -> float:
        """Seconds since the latest look."""
        return self._clock() - self._taken_at

    async def aclose(self) -> None:
        """End a look that is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def drawn(self, snapshot: Snapshot, key: Any, draw: Callable[[], str]) -> str:
        """What is drawn of a look: once for all viewers who see the same.

        key: tells what they see
        """
        if snapshot.number != self._drawn_of:
            self._drawn_of, self._drawn = snapshot.number, {}
        found = self._drawn.get(key)
        if found is None:
            found = self._drawn[key] = draw()
        return found

    def _note(self, exc: Exception, began: float) -> None:
        if self.trouble is None:  # and it is logged once
            self.trouble = Trouble(_why(exc), began)

    async def _look(self) -> None:
        began = self._clock()
        pause = EVERY
        spans = frozenset(name for name, at in self._wanted.items() if began - at < 10)
        self.taken += 1
        call = asyncio.ensure_future(self._center.call(self._looks.take, spans, self.taken))
        try:
            patience = max(WAIT, 2 * self._took)
            seen = 0
            while not call.done() and self._clock() - began < LONGEST:
                await asyncio.wait((call,), timeout=patience)
                if not call.done() and self._looks.seen == seen:
                    self._note(TimeoutError(), began)
                seen = self._looks.seen
            if not call.done():
                raise TimeoutError
            self._latest = call.result()
            self._taken_at = self._clock()
            self._took = min(self._taken_at - began, LONGEST / 4)
            self.trouble = None
            pause = (self._taken_at - began) * (SHARE - 1)
        except Exception as exc:
            self._note(exc, began)
        finally:
            if not call.done():
                call.cancel()
                await asyncio.wait((call,))
            self._next = max(self._clock() + pause, began + EVERY)
            self._task = None
