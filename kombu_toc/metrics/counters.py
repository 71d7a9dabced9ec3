"""Counters of a process: operations on messages, their lateness, and the times of scripts. Plain
integers; no server is needed. Expiring topics are not counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from ..model.topic import Topic

#: The counters of a topic.
COUNTERS = (
    "put",  #: messages added
    "delivered",  #: deliveries; a message that is delivered again counts again
    "acked",  #: acknowledged
    "released",  #: returned unhandled
    "rolled_back",  #: returned after a failure, or because a lease ended
    "dead",  #: moved to DeadQueue
    "cancelled",  #: deleted by id while they waited or were in flight
    "rescheduled",  #: given another time
    "requeued",  #: taken out of DeadQueue to be delivered again
    "dropped",  #: removed from DeadQueue: too old, or too many
    "purged",  #: deleted with all others of the topic, or from DeadQueue
    "expired",  #: not delivered: older than they may be
    "overran",  #: deliveries that ended although their consumers renewed them: max lease
    "refused",  #: not put: more than may be
    "guarded",  #: not run again: they had ended in the task library
    "unguarded",  #: delivered although that could not be asked
    "fired",  #: firings of schedules that were run
    "missed",  #: firings that were not: too late, overlapping, or lost
    "unrecorded",  #: messages, or their ends, that the task library has not got
    "empty",  #: pops that found nothing due
)

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


class TopicCounts:
    """One process's counters of one topic. Any thread may add to them; none ever decreases."""

    __slots__ = (*COUNTERS, "late", "late_us", "sent")

    put: int
    delivered: int
    acked: int
    released: int
    rolled_back: int
    dead: int
    cancelled: int
    rescheduled: int
    requeued: int
    dropped: int
    purged: int
    expired: int
    overran: int
    fired: int
    missed: int
    refused: int
    guarded: int
    unguarded: int
    unrecorded: int
    empty: int

    def __init__(self) -> None:
        for name in COUNTERS:
            setattr(self, name, 0)
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


class Counters:
    """What this process has counted for one server and prefix.

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
        #: the values of scripts that Redis has
        self._scripts_sent: dict[str, int] = {}

    def counts(self, topic: Topic) -> TopicCounts:
        """The counters of a topic."""
        found = self.topics.get(topic.name)
        if found is not None:
            return found
        if not self.active or topic.declaration.expires or len(self.topics) >= MAX_TOPICS:
            return self._unread
        return self.topics.setdefault(topic.name, TopicCounts())

    def unrecorded(self, topic: str) -> None:
        """Count a message of which the task library does not know what it should."""
        found = self.topics.get(topic)
        if found is None and self.active and len(self.topics) < MAX_TOPICS:
            found = self.topics.setdefault(topic, TopicCounts())
        if found is not None:
            found.unrecorded += 1

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

    def all_sent(self) -> None:
        """Consider all values sent."""
        for counts in self.topics.values():
            counts.sent = counts.values()
        self._scripts_sent = self._script_values()

    def _script_values(self) -> dict[str, int]:
        values = {}
        for script, (timed, seconds, others) in list(self.scripts.items()):
            values[f"{script}:calls"] = timed + others
            values[f"{script}:timed"] = timed
            values[f"{script}:us"] = round(seconds * 1_000_000)
        return values
