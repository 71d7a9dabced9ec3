"""What happened to messages, and how late they were delivered: counted by every process, added up
in Redis.

A process counts in plain integers and adds, every few seconds, what has come about since to
Redis: from the heartbeat's thread where there is one, else with a publish. Nothing is sent if
nothing has changed, and nothing that goes wrong with it is anybody's concern: the last seconds
of a process may be missing. In Redis there are, per topic, the totals and those of each of the
last minutes, by Redis's own clock; they go when the topic is deleted. Topics that go away by
themselves are not counted.

:func:`read_metrics` reads them::

    for measured in read_metrics(center).values():
        print(measured.topic, measured.totals["put"], measured.recent_lateness.quantile(0.99))
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from redis.exceptions import RedisError

from ..errors import TocError
from ..model.topic import MINUTES, Declaration, Topic

if TYPE_CHECKING:
    from ..center.center import TimeoutCenter

logger = logging.getLogger(__name__)

#: What is counted, per topic.
COUNTERS = (
    "put",  #: messages added
    "delivered",  #: deliveries; a message that is delivered again counts again
    "acked",  #: acknowledged
    "released",  #: given back unhandled
    "rolled_back",  #: given back after a failure, or because a lease ended
    "dead",  #: given up on
    "cancelled",  #: deleted by id before they were dead
    "rescheduled",  #: given another time
    "requeued",  #: taken out of DeadQueue to be delivered again
    "dropped",  #: removed from DeadQueue: too old, or too many
    "purged",  #: deleted with all the others, or dead
    "empty",  #: pops that found nothing that is due
)

#: Of these, what an idle consumer counts: that alone is sent once a minute.
_IDLE = frozenset(("empty",))

#: Upper bounds of the lateness histogram in microseconds, each the root of two times the one
#: before: 0.25 ms to 70 minutes.
BOUNDS_US = tuple(round(250 * 2 ** (i / 2)) for i in range(49))

#: Seconds between two sendings; where only idle pops are new; and after one that failed.
INTERVAL = 5.0
IDLE_INTERVAL = 60.0
PAUSE = 60.0

#: Minutes that "recently" is, unless asked otherwise.
RECENT = 5

#: Topics that a process counts for, at most.
MAX_TOPICS = 4096

_PLACES = [*BOUNDS_US, "inf"]
_FIELDS = (*COUNTERS, "late_us", *(f"late:{bound}" for bound in _PLACES))


class Lateness(NamedTuple):
    """How much later than their action times messages were delivered; of one that was sent after
    its time, than it was sent."""

    buckets: tuple[int, ...]  #: how many were within each of BOUNDS_US; the last: beyond them
    us: int  #: of all together, microseconds

    @property
    def count(self) -> int:
        return sum(self.buckets)

    def quantile(self, q: float) -> float | None:
        """Seconds within which that share of the messages was delivered, to about 20 percent;
        None if there were none."""
        rank, below = q * self.count, 0
        for place, number in enumerate(self.buckets):
            if number and below + number >= rank:
                upper = BOUNDS_US[min(place, len(BOUNDS_US) - 1)]
                lower = BOUNDS_US[place - 1] if place else 0
                share = max(rank - below, 0) / number
                return (lower + max(upper - lower, 0) * share) / 1_000_000
            below += number
        return None

    def up_to(self) -> list[tuple[float, int]]:
        """(seconds, how many messages were delivered within them) for each bound; the last is
        infinite."""
        bounds = (*(bound / 1_000_000 for bound in BOUNDS_US), float("inf"))
        return list(zip(bounds, accumulate(self.buckets), strict=True))

    def __add__(self, other: Lateness) -> Lateness:  # type: ignore[override]
        both = zip(self.buckets, other.buckets, strict=True)
        return Lateness(tuple(a + b for a, b in both), self.us + other.us)


class Measured(NamedTuple):
    """What was counted for a topic, by all processes."""

    topic: str
    totals: dict[str, int]  #: each of COUNTERS, since the topic was declared
    lateness: Lateness
    seconds: float  #: how long "recent" is
    recent: dict[str, int]  #: the same of that time
    recent_lateness: Lateness

    def rate(self, counter: str) -> float:
        """How many a second, recently."""
        return self.recent[counter] / self.seconds


class ScriptTimes(NamedTuple):
    """How often a script was called, and how long that took as clients saw it."""

    calls: int
    timed: int  #: of these, those that were not one of many in a pipeline
    seconds: float  #: that those took, from sending to reply


class TopicCounts:
    """One process's counters of one topic. Each is only ever added to, by any thread."""

    __slots__ = (*COUNTERS, "late", "late_us", "sent")

    def __init__(self) -> None:
        for name in COUNTERS:
            setattr(self, name, 0)
        self.late = [0] * len(_PLACES)
        self.late_us = 0
        #: what Redis has been told
        self.sent = self.values()

    def values(self) -> list[int]:
        return [*(getattr(self, name) for name in COUNTERS), self.late_us, *self.late]

    def popped(self, delivered: int, rolled_back: int, dead: int, dropped: int) -> None:
        """What a pop did."""
        self.delivered += delivered
        self.empty += not delivered
        self.kept(rolled_back, dead, dropped)

    def kept(self, rolled_back: int, dead: int, dropped: int) -> None:
        """What upkeep did."""
        self.rolled_back += rolled_back
        self.dead += dead
        self.dropped += dropped

    def late_by(self, us: int) -> None:
        """A message was delivered so many microseconds after its action time."""
        self.late[bisect_left(BOUNDS_US, us)] += 1
        self.late_us += us

    @property
    def lateness(self) -> Lateness:
        return Lateness(tuple(self.late), self.late_us)


class _Scripts(dict[str, list[Any]]):
    """Begins to count for whatever script is asked for."""

    def __missing__(self, script: str) -> list[Any]:
        return self.setdefault(script, [0, 0.0, 0])


def count_first(counts: TopicCounts, counter: str, raw: list[Any]) -> int:
    """How a call that replies how many there were counts them."""
    setattr(counts, counter, getattr(counts, counter) + raw[0])
    return raw[0]


class Metrics:
    """What this process has counted for one server and prefix.

    active: whether anything is counted at all
    """

    def __init__(self, *, active: bool = True) -> None:
        self.active = active
        #: topic -> its counters
        self.topics: dict[str, TopicCounts] = {}
        #: script -> [calls whose times were taken, their seconds, other calls]
        self.scripts = _Scripts()
        #: counts what nobody wants to know
        self._nobodys = TopicCounts()
        self.reset()
        if active:
            _all.add(self)

    @classmethod
    def of(cls, identity: Hashable) -> Metrics:
        """Those of this process for a server and prefix."""
        found = _shared.get(identity)
        return found or _shared.setdefault(identity, cls())

    def reset(self) -> None:
        """Take what was counted so far as sent: after a fork, the parent does that."""
        #: who takes it sends; no lock, for greenlets and native threads may both be at it
        self._turn = [True]
        #: monotonic seconds when something may be sent again, and when it last was
        self.due = 0.0 if self.active else float("inf")
        self._last = time.monotonic()
        #: the center that was last used to send
        self._center: Callable[[], TimeoutCenter | None] = _nobody
        for counts in self.topics.values():
            counts.sent = counts.values()
        self._scripts_sent = self._script_values()

    # -- counting

    def counts(self, topic: Topic) -> TopicCounts:
        """Where to count what happens in a topic."""
        found = self.topics.get(topic.name)
        if found is not None:
            return found
        if not self.active or topic.declaration.expires or len(self.topics) >= MAX_TOPICS:
            return self._nobodys
        return self.topics.setdefault(topic.name, TopicCounts())

    def late(self, topic: str, us: int) -> None:
        """A message that was counted as delivered was handed over, so late."""
        found = self.topics.get(topic)
        if found is not None:
            found.late_by(us)

    # -- sending

    def pass_by(self, center: TimeoutCenter) -> None:
        """Send what there is, if it is time to: for a process that has just talked to the
        server anyway."""
        if time.monotonic() >= self.due:
            self.send(center)

    def send(self, center: TimeoutCenter) -> None:
        """Add to Redis what has come about since; raises nothing that a server may cause."""
        if not self.active:
            return
        try:
            turn = self._turn.pop()
        except IndexError:  # another thread does it
            return
        now = time.monotonic()
        try:
            self.due = now + INTERVAL
            self._center = weakref.ref(center)
            changed = self._changed(idle=now - self._last >= IDLE_INTERVAL)
            if not changed:
                return
            self._last = now
            results = center.run_each([center.counting(one.topic, one.added) for one in changed])
            for one, result in zip(changed, results, strict=True):
                if isinstance(result, Exception):
                    raise result
                one.was_sent()
        except (RedisError, TocError, OSError) as exc:
            self.due = now + PAUSE
            logger.debug("counters are sent later: %s", exc)
        finally:
            self._turn.append(turn)

    def _changed(self, *, idle: bool) -> list[_Change]:
        """What is to be sent. idle: also if it is only what idle consumers count"""
        changed = []
        for topic, counts in list(self.topics.items()):
            values = counts.values()
            pairs = zip(_FIELDS, values, counts.sent, strict=True)
            added = {name: now - sent for name, now, sent in pairs if now != sent}
            if added and (idle or not added.keys() <= _IDLE):
                changed.append(_Change(topic, added, partial(setattr, counts, "sent", values)))
        if changed or idle:
            now, sent = self._script_values(), self._scripts_sent
            added = {name: value - sent.get(name, 0) for name, value in now.items()}
            added = {name: number for name, number in added.items() if number}
            if added:
                changed.append(_Change(None, added, partial(setattr, self, "_scripts_sent", now)))
        return changed

    def _script_values(self) -> dict[str, int]:
        values = {}
        for script, (timed, seconds, others) in list(self.scripts.items()):
            values[f"{script}:calls"] = timed + others
            values[f"{script}:timed"] = timed
            values[f"{script}:us"] = round(seconds * 1_000_000)
        return values

    def part(self) -> None:
        """At the end of the process: send what is left on a connection that is open already,
        and wait for nothing."""
        center = self._center()
        try:
            client = getattr(center, "client", None)
            if client is not None and center.clustered:
                client = client.client_for()
            take_open = getattr(client, "take_open", None)
            changed = self._changed(idle=False)
            connection = take_open() if changed and take_open is not None else None
            if connection is None:
                return
            calls = [center.counting(one.topic, one.added) for one in changed]
            commands = [call.command(whole=True) for call in calls]
            connection._sock.settimeout(0)
            connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        except Exception as exc:  # it may be half taken down already
            logger.debug("the last counters are lost: %s", exc)


class _Change(NamedTuple):
    topic: str | None  #: None for the times of scripts
    added: dict[str, int]
    was_sent: Callable[[], None]  #: to be told when Redis has it


def _nobody() -> None:
    """A center that is gone."""


_shared: dict[Hashable, Metrics] = {}
_all: weakref.WeakSet[Metrics] = weakref.WeakSet()


def _after_fork() -> None:
    for metrics in list(_all):
        metrics.reset()


def _at_exit() -> None:
    for metrics in list(_all):
        metrics.part()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)


# -- reading


def read_metrics(
    center: TimeoutCenter, topics: Iterable[str] | None = None, *, minutes: int = RECENT
) -> dict[str, Measured]:
    """What all processes have counted, by topic; two round trips to the server.

    topics: all declared ones that are counted unless given
    minutes: what is recent: so many whole minutes and the present one, at most 14
    """
    minutes = min(max(minutes, 1), MINUTES - 2)
    client, keys = center.client, center.keys
    with client.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.hgetall(keys.topics)
        (seconds, us), declared = pipe.execute()
    names = sorted(
        name.decode("utf-8", "surrogatepass")
        for name, raw in declared.items()
        if not Declaration.from_json(raw).expires
    )
    if topics is not None:
        asked = set(topics)
        names = [name for name in names if name in asked]
    present = seconds // 60
    wanted = range(present - minutes, present + 1)
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hgetall(keys.counted(name))
            ring = keys.minutes(name)
            for minute in wanted:
                pipe.hgetall(ring[minute % MINUTES])
        replies = iter(pipe.execute())
    found = {}
    for name in names:
        totals = _numbers(next(replies))
        recent: Counter[str] = Counter()
        for minute in wanted:
            numbers = _numbers(next(replies))
            if numbers.get("minute") == minute:  # else nobody has counted anything since
                recent.update(numbers)
        found[name] = Measured(
            name,
            {counter: totals.get(counter, 0) for counter in COUNTERS},
            _lateness(totals),
            minutes * 60 + seconds % 60 + us / 1_000_000,
            {counter: recent.get(counter, 0) for counter in COUNTERS},
            _lateness(recent),
        )
    return found


def read_script_times(center: TimeoutCenter) -> dict[str, ScriptTimes]:
    """How often all processes have called each script, and how long they waited for it."""
    numbers = _numbers(center.client.hgetall(center.keys.scripts))
    names = sorted({name.partition(":")[0] for name in numbers})
    return {
        name: ScriptTimes(
            numbers.get(f"{name}:calls", 0),
            numbers.get(f"{name}:timed", 0),
            numbers.get(f"{name}:us", 0) / 1_000_000,
        )
        for name in names
    }


def _numbers(raw: dict[bytes, bytes]) -> dict[str, int]:
    return {name.decode(): int(number) for name, number in raw.items()}


def _lateness(numbers: Mapping[str, int]) -> Lateness:
    buckets = tuple(numbers.get(f"late:{bound}", 0) for bound in _PLACES)
    return Lateness(buckets, numbers.get("late_us", 0))
