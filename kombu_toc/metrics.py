"""Counters of a process: operations on messages, their lateness, and the times of scripts.
Plain integers; no server is needed. Expiring topics are not counted.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

from redis.exceptions import RedisError

from .compat import socket_of
from .errors import TocError
from .model.topic import MINUTES, Declaration, Topic


@dataclass(eq=False, slots=True)
class Counted:
    """The counters of a topic."""

    put: int = 0  #: messages added
    delivered: int = 0  #: deliveries; a message that is delivered again counts again
    acked: int = 0  #: acknowledged
    released: int = 0  #: returned unhandled
    rolled_back: int = 0  #: returned after a failure, or because a lease ended
    dead: int = 0  #: moved to DeadQueue
    cancelled: int = 0  #: deleted by id while they waited or were in flight
    rescheduled: int = 0  #: given another time
    requeued: int = 0  #: taken out of DeadQueue to be delivered again
    dropped: int = 0  #: removed from DeadQueue: too old, or too many
    purged: int = 0  #: deleted with all others of the topic, or from DeadQueue
    expired: int = 0  #: not delivered: older than they may be
    overran: int = 0  #: deliveries that ended although their consumers renewed them: max lease
    refused: int = 0  #: not put: more than may be
    guarded: int = 0  #: not run again: they had ended in the task library
    unguarded: int = 0  #: delivered although that could not be asked
    fired: int = 0  #: firings of schedules that were run
    missed: int = 0  #: firings that were not: too late, overlapping, or lost
    unrecorded: int = 0  #: messages, or their ends, that the task library has not got
    failed: int = 0  #: tasks that failed for good, and were to be listed
    empty: int = 0  #: pops that found nothing due


COUNTERS = tuple(row.name for row in fields(Counted))

#: The counters of an idle consumer: if only these have changed, they are sent once a minute.
_IDLE = frozenset(("empty",))

#: Upper bounds of the lateness histogram in microseconds, each the square root of two
#: times the one before: 0.25 ms to 70 minutes.
BOUNDS_US = tuple(round(250 * 2 ** (i / 2)) for i in range(49))

#: Topics that a process counts for, at most.
MAX_TOPICS = 4096

#: The names of the histogram's buckets in Redis, after ``late:``.
PLACES = [*BOUNDS_US, "inf"]
_FIELDS = (*COUNTERS, "late_us", *(f"late:{bound}" for bound in PLACES))


class Lateness(NamedTuple):
    """A histogram of how long after their action times messages were delivered. For a message that
    was sent after its time, the time of sending counts."""

    buckets: tuple[int, ...]  #: messages within each of BOUNDS_US; the last number: beyond them
    us: int  #: sum of all, microseconds

    @property
    def count(self) -> int:  # type: ignore[override] # it is public; a tuple's is of no use here
        return sum(self.buckets)

    def quantile(self, q: float) -> float | None:
        """Seconds within which this share of the messages was delivered, to about 20 percent; None
        without messages."""
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


class TopicCounts(Counted):
    """One process's counters of one topic. Any thread may add to them; none ever decreases."""

    __slots__ = ("late", "late_us", "sent")

    def __init__(self) -> None:
        super().__init__()
        self.late = [0] * len(PLACES)
        self.late_us = 0
        #: the values that Redis has
        self.sent = self.values()

    def values(self) -> list[int]:
        return [*(getattr(self, name) for name in COUNTERS), self.late_us, *self.late]

    def popped(self, delivered: int, rolled_back: int, dead: int, dropped: int) -> None:
        """Count the results of a pop."""
        self.delivered += delivered
        self.empty += not delivered
        self.kept(rolled_back, dead, dropped)

    def kept(self, rolled_back: int, dead: int, dropped: int) -> None:
        """Count the results of upkeep."""
        self.rolled_back += rolled_back
        self.dead += dead
        self.dropped += dropped

    def expire(self, number: int, to_dead: bool) -> None:
        """Count messages that have expired."""
        self.expired += number
        self.dead += number * to_dead

    def late_by(self, us: int) -> None:
        """Count a message that was delivered this many microseconds after its action time."""
        self.late[bisect_left(BOUNDS_US, us)] += 1
        self.late_us += us

    @property
    def lateness(self) -> Lateness:
        return Lateness(tuple(self.late), self.late_us)


class _Scripts(dict[str, list[Any]]):
    """Begins to count for a script when it is first looked up."""

    def __missing__(self, script: str) -> list[Any]:
        return self.setdefault(script, [0, 0.0, 0])


def count_first(counts: TopicCounts, counter: str, raw: list[int]) -> int:
    """Add the reply of a call, which is a number of messages, to a counter."""
    setattr(counts, counter, getattr(counts, counter) + raw[0])
    return raw[0]


class Change(NamedTuple):
    """The difference from the values that were last sent."""

    topic: str | None  #: None for the times of scripts
    added: dict[str, int]
    was_sent: Callable[[], None]  #: to be called when Redis has it


# -- sends the counters of a process to Redis
#
# Every few seconds a process adds its changes to the totals in Redis, from the lease keeper's
# thread if it has one, otherwise after a publish. Nothing is sent if nothing has changed. A failure
# is logged and raises nothing: the last seconds of a process may be missing. Redis has the totals
# of each topic and those of each of the last minutes, by its own clock, until the topic is deleted.

logger = logging.getLogger(__name__)

#: Seconds between two sendings; the same if only idle pops are new; and after a failure.
INTERVAL = 5.0
IDLE_INTERVAL = 60.0
PAUSE = 60.0


#: Adds counters up in Redis: the :class:`.center.runner.Runner` of a timeout center.
Outlet: TypeAlias = Any


class Metrics:
    """The counters of this process for one server and prefix, and when they were sent.

    active: whether anything is counted at all
    """

    def __init__(self, *, active: bool = True) -> None:
        self.active = active
        #: topic -> its counters
        self.topics: dict[str, TopicCounts] = {}
        #: script -> [calls whose times were taken, their seconds, other calls]
        self.scripts = _Scripts()
        #: where to count for topics that are not reported
        self._unread = TopicCounts()
        self.reset()
        if active:
            _all.add(self)

    @classmethod
    def of(cls, identity: Hashable) -> Metrics:
        """The metrics of this process for a server and prefix."""
        found = _shared.get(identity)
        return found or _shared.setdefault(identity, cls())

    def reset(self) -> None:
        """Consider all values sent: after a fork, the parent sends them."""
        #: the thread that pops the element sends; no lock, because greenlets and native threads may
        #: both try
        self._turn = [True]
        #: monotonic seconds when something may be sent again, and when it last was
        self.due = 0.0 if self.active else float("inf")
        self._last = time.monotonic()
        #: the outlet that was last used
        self._outlet: Callable[[], Outlet | None] = _nothing
        for counts in self.topics.values():
            counts.sent = counts.values()
        #: the values of scripts that Redis has
        self._scripts_sent = self._script_values()

    def counts(self, topic: Topic) -> TopicCounts:
        """The counters of a topic."""
        found = self.topics.get(topic.name)
        if found is not None:
            return found
        if not self.active or topic.declaration.expires or len(self.topics) >= MAX_TOPICS:
            return self._unread
        return self.topics.setdefault(topic.name, TopicCounts())

    def count(self, topic: str, counter: str) -> None:
        """Count one, for a topic of a name."""
        found = self.topics.get(topic)
        if found is None and self.active and len(self.topics) < MAX_TOPICS:
            found = self.topics.setdefault(topic, TopicCounts())
        if found is not None:
            setattr(found, counter, getattr(found, counter) + 1)

    def late(self, topic: str, us: int) -> None:
        """Count the lateness, in microseconds, of a message that was counted as delivered."""
        found = self.topics.get(topic)
        if found is not None:
            found.late_by(us)

    def changed(self, *, idle: bool) -> list[Change]:
        """The changes to send.

        idle: also those of counters that an idle consumer changes, if there are no others
        """
        changed = []
        for topic, counts in list(self.topics.items()):
            values = counts.values()
            pairs = zip(_FIELDS, values, counts.sent, strict=True)
            added = {name: now - sent for name, now, sent in pairs if now != sent}
            if added and (idle or not added.keys() <= _IDLE):
                changed.append(Change(topic, added, partial(setattr, counts, "sent", values)))
        if changed or idle:
            now, sent = self._script_values(), self._scripts_sent
            added = {name: value - sent.get(name, 0) for name, value in now.items()}
            added = {name: number for name, number in added.items() if number}
            if added:
                changed.append(Change(None, added, partial(setattr, self, "_scripts_sent", now)))
        return changed

    def _script_values(self) -> dict[str, int]:
        values = {}
        for script, (timed, seconds, others) in list(self.scripts.items()):
            values[f"{script}:calls"] = timed + others
            values[f"{script}:timed"] = timed
            values[f"{script}:us"] = round(seconds * 1_000_000)
        return values

    def pass_by(self, outlet: Outlet) -> None:
        """Send the changes if it is time to. Called by a process that has just used the server."""
        if time.monotonic() >= self.due:
            self.send(outlet)

    def send(self, outlet: Outlet) -> None:
        """Add the changes to the totals in Redis. Raises no error that a server may cause."""
        if not self.active:
            return
        try:
            turn = self._turn.pop()
        except IndexError:  # another thread sends
            return
        now = time.monotonic()
        try:
            self.due = now + INTERVAL
            self._outlet = weakref.ref(outlet)
            changed = self.changed(idle=now - self._last >= IDLE_INTERVAL)
            if not changed:
                return
            self._last = now
            results = outlet.run_each([outlet.counting(one.topic, one.added) for one in changed])
            for one, result in zip(changed, results, strict=True):
                if isinstance(result, Exception):
                    raise result
                one.was_sent()
        except (RedisError, TocError, OSError) as exc:
            self.due = now + PAUSE
            logger.debug("counters are sent later: %s", exc)
        finally:
            self._turn.append(turn)

    def send_at_exit(self) -> None:
        """At the end of the process: send the last changes over a connection that is open already,
        without waiting for the server."""
        outlet = self._outlet()
        if outlet is None:
            return
        try:
            client = outlet.client.client_for() if outlet.clustered else outlet.client
            take_open = getattr(client, "take_open", None)
            changed = self.changed(idle=False)
            connection = take_open() if changed and take_open is not None else None
            if connection is None:
                return
            calls = [outlet.counting(one.topic, one.added) for one in changed]
            commands = [call.command(whole=True) for call in calls]
            socket_of(connection).settimeout(0)
            connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        except Exception as exc:  # modules may be half torn down already
            logger.debug("the last counters are lost: %s", exc)


def _nothing() -> None:
    """Stands for an outlet that is gone."""


_shared: dict[Hashable, Metrics] = {}
_all: weakref.WeakSet[Metrics] = weakref.WeakSet()


def _after_fork() -> None:
    for metrics in list(_all):
        metrics.reset()


def _at_exit() -> None:
    for metrics in list(_all):
        metrics.send_at_exit()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)


# -- reads the counters of all processes
#
# An example::
#
#     for measured in read_metrics(center).values():
#         print(measured.topic, measured.totals["put"], measured.recent_lateness.quantile(0.99))


#: The default length of "recently", in minutes.
RECENT = 5


#: Where counters are read from: a timeout center.
Source: TypeAlias = Any


class Measured(NamedTuple):
    """The counters of a topic, from all processes."""

    topic: str
    totals: dict[str, int]  #: each of COUNTERS, since the topic was declared
    lateness: Lateness
    seconds: float  #: the length of "recent"
    recent: dict[str, int]  #: the same for that time
    recent_lateness: Lateness

    def rate(self, counter: str) -> float:
        """The recent rate of a counter, per second."""
        return self.recent[counter] / self.seconds


class ScriptTimes(NamedTuple):
    """How often a script was called, and how long clients waited for it."""

    calls: int
    timed: int  #: those of them that were not in a pipeline with others
    seconds: float  #: the time that those took, from sending to reply


def read_metrics(
    center: Source, topics: Iterable[str] | None = None, *, minutes: int = RECENT
) -> dict[str, Measured]:
    """The counters of all processes, by topic; two round trips to the server.

    topics: all declared ones that are counted, unless given
    minutes: the length of "recent": this many whole minutes and the present one, at most an hour
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
            pipe.hmget(keys.minutes(name), _places(wanted))
        replies = iter(pipe.execute())
    found = {}
    for name in names:
        totals = _numbers(next(replies))
        recent: Counter[str] = Counter()
        for numbers in map(_of_minute, wanted, next(replies)):
            recent.update(numbers)
        found[name] = Measured(
            name,
            {counter: totals.get(counter, 0) for counter in COUNTERS},
            lateness_of(totals),
            minutes * 60 + seconds % 60 + us / 1_000_000,
            {counter: recent.get(counter, 0) for counter in COUNTERS},
            lateness_of(recent),
        )
    return found


def read_minutes(
    center: Source, topics: Iterable[str], minutes: Sequence[int]
) -> dict[str, list[dict[str, int]]]:
    """What all processes have counted in each of some minutes, by topic; one round trip.

    minutes: since the epoch; those of the last hour are kept

    Of a minute in which nothing was counted, the numbers are empty.
    """
    client, keys = center.client, center.keys
    names = list(topics)
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hmget(keys.minutes(name), _places(minutes))
        replies = pipe.execute() if names and minutes else ()
    return {
        name: list(map(_of_minute, minutes, reply))
        for name, reply in zip(names, replies, strict=False)
    }


def _places(minutes: Iterable[int]) -> list[int]:
    return [minute % MINUTES for minute in minutes]


def _of_minute(minute: int, raw: bytes | None) -> dict[str, int]:
    """What was counted in a minute; empty if nothing was."""
    words = [] if raw is None else raw.decode().split()
    numbers = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    return numbers if numbers.pop("minute", None) == minute else {}


def read_script_times(center: Source) -> dict[str, ScriptTimes]:
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


def lateness_of(numbers: Mapping[str, int]) -> Lateness:
    """The lateness in what was counted."""
    buckets = tuple(numbers.get(f"late:{bound}", 0) for bound in PLACES)
    return Lateness(buckets, numbers.get("late_us", 0))
