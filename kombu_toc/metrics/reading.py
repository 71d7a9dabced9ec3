"""Reads the counters of all processes.

An example::

    for measured in read_metrics(center).values():
        print(measured.topic, measured.totals["put"], measured.recent_lateness.quantile(0.99))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ..model.keys import MINUTES, Keys
from ..model.topic import Declaration
from .counters import COUNTERS, PLACES, Lateness

#: The default length of "recently", in minutes.
RECENT = 5


class Source(Protocol):
    """Where counters are read from; a timeout center is one."""

    @property
    def client(self) -> Any: ...

    @property
    def keys(self) -> Keys: ...


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
    minutes: the length of "recent": this many whole minutes and the present one, at most 14
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
            if numbers.get("minute") == minute:  # otherwise nothing was counted in that minute
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


def read_minutes(
    center: Source, topics: Iterable[str], minutes: Sequence[int]
) -> dict[str, list[dict[str, int]]]:
    """What all processes have counted in each of some minutes, by topic; one round trip.

    minutes: since the epoch; those of the last 14 are kept

    Of a minute in which nothing was counted, the numbers are empty.
    """
    client, keys = center.client, center.keys
    names = list(topics)
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            ring = keys.minutes(name)
            for minute in minutes:
                pipe.hgetall(ring[minute % MINUTES])
        replies = iter(pipe.execute() if names and minutes else ())
    found: dict[str, list[dict[str, int]]] = {}
    for name in names:
        found[name] = []
        for minute in minutes:
            numbers = _numbers(next(replies))
            found[name].append(numbers if numbers.get("minute") == minute else {})
    return found


def lateness_of(numbers: Mapping[str, int]) -> Lateness:
    """The lateness in what was counted in a minute."""
    return _lateness(numbers)


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


def _lateness(numbers: Mapping[str, int]) -> Lateness:
    buckets = tuple(numbers.get(f"late:{bound}", 0) for bound in PLACES)
    return Lateness(buckets, numbers.get("late_us", 0))
