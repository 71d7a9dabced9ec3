"""What a timeout center holds and what happens in it, for Prometheus.

Needs ``prometheus-client``: ``pip install 'celery-toc[metrics]'``. Everything is read from Redis
at each scrape. ``docs/monitoring.md`` lists the metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from redis.exceptions import RedisError

from .center.center import TimeoutCenter
from .center.runner import BROKEN
from .client.errors import read_memory
from .errors import PartialError, TocError
from .metrics import read_metrics, read_script_times
from .model.results import Missing

__all__ = ("TimeoutCenterCollector", "metrics_text", "registry_of")


#: Topics that are told at a time, at most: each has some fifty series.
MOST_TOPICS = 1000


#: What is told: name, after ``celery_toc_``, and labels -> what is said of it.
_TOLD = {
    "messages topic state": (
        "Messages: scheduled wait for their time, ready are due, in_flight are with a worker, "
        "dead were given up on."
    ),
    "oldest_overdue_seconds topic": (
        "For how long the oldest ready message has been due; 0 if there is none."
    ),
    "slots topic": "Slots of a topic.",
    "target_stopped topic": (
        "Whether the target of a topic has answered 410, and nothing is sent there any more."
    ),
    "topics_left_out": "Topics that are not told, because there are more than are told at a time.",
    "limit_used topic limit": (
        "What is used of a limit: of a rate or a concurrency as much as there is at once, of a "
        "limit of each key for how many keys it matters now."
    ),
    "limit_max topic limit": "How much there is of a limit that counts the whole topic.",
    "keys_waiting topic": "Keys that have something due and may not start it now.",
    "limited_oldest_seconds topic": (
        "For how long the oldest due message of a limited topic has waited."
    ),
    "library_unwritten topic": "Changes of messages that the task library does not know yet.",
    "library_unwritten_seconds topic": (
        "How old the oldest change is that the task library does not know yet; 0 if there is none."
    ),
    "library_incomplete topic": (
        "Whether there were more changes than a log may have: all that waits is then looked "
        "through."
    ),
    "schedules topic state": "Recurring tasks: active fire again, idle are paused or have ended.",
    "schedules_late topic": (
        "Schedules whose next firing should have begun more than five seconds ago."
    ),
    "schedule_next_seconds topic": (
        "Seconds until the next firing of a topic's schedules; negative if it is late."
    ),
    "events topic event": (
        "What happened to messages, as all producers and workers have counted it."
    ),
    "lateness_seconds topic": "How much later than their action times messages were delivered.",
    "script_calls script": "Calls of the scripts that are the operations of a timeout center.",
    "script_seconds script": (
        "How long clients waited for a script, of the calls whose time was taken."
    ),
    "memory_used_bytes server": "Memory that a server uses.",
    "memory_max_bytes server": (
        "Memory from which on it refuses new messages; 0 if nothing bounds it."
    ),
    "slots_missing topic server": (
        "Slots on a node of a Cluster that did not answer; other numbers of their topic are left "
        "out meanwhile."
    ),
}

#: Of these, what is no gauge.
_KINDS = {
    "events": CounterMetricFamily,
    "lateness_seconds": HistogramMetricFamily,
    "script_calls": CounterMetricFamily,
    "script_seconds": SummaryMetricFamily,
}

#: A name of the table, the values of its labels, and the number, or what else its kind takes.
_Samples = Iterator[tuple[Any, ...]]


def _families(samples: Iterable[tuple[Any, ...]]) -> Iterable[Any]:
    """All that is told, with these samples."""
    made: dict[str, Any] = {}
    for key, said in _TOLD.items():
        name, *labels = key.split()
        kind: Any = _KINDS.get(name, GaugeMetricFamily)
        made[name] = kind(f"celery_toc_{name}", said, labels=labels)
    for name, labels, *value in samples:
        made[name].add_metric(labels, *value)
    return made.values()


class TimeoutCenterCollector(Collector):
    """Reads a timeout center at each scrape; for a registry of your own.

    Queues that expire by themselves, such as those for replies, are left out: their names are never
    used again.

    topics: names or patterns (``*``, ``?``) of those that are told; all unless given
    most: how many at most: of more those that most was put into
    """

    def __init__(self, center: Any, topics: Iterable[str] = (), most: int = MOST_TOPICS) -> None:
        #: of an app's center, the one that it wraps
        self._center: TimeoutCenter = getattr(center, "center", center)
        self._patterns = tuple(topics)
        self._most = most
        self._names: list[str] = []
        self._left_out = 0

    def describe(self) -> list[Any]:
        """Nothing: without this, the registry would scrape when the collector is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """Read the center. If it cannot be read, only ``celery_toc_up`` is there, and 0.

        While a node of a Cluster is away, what would be too small is left out, and
        ``celery_toc_slots_missing`` says why.
        """
        samples: list[tuple[Any, ...]] = []
        missing: list[Missing] = []
        up = True
        try:
            self._choose()
            for part in (
                partial(self._queues, missing),
                partial(self._limits, missing),
                self._library,
                self._schedules,
                self._counted,
                self._scripts,
                self._memory,
            ):
                try:
                    samples += list(part())
                except BROKEN:
                    if not missing:
                        raise
        except (RedisError, TocError, OSError):
            up = False
        samples += [("slots_missing", (one.topic, one.server), len(one.slots)) for one in missing]
        yield GaugeMetricFamily(
            "celery_toc_up", "Whether Redis could be read just now.", value=float(up)
        )
        yield from _families(samples) if up else ()

    def _choose(self) -> None:
        """Which topics are told: of more than there may be the heaviest."""
        center = self._center
        names = [
            one.name
            for one in center.registry.select(None)
            if not one.declaration.expires
            and (not self._patterns or any(fnmatchcase(one.name, some) for some in self._patterns))
        ]
        self._left_out = max(len(names) - self._most, 0)
        if self._left_out:
            with center.client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hget(center.keys.counted(name), "put")
                put = dict(zip(names, map(int, (one or 0 for one in pipe.execute())), strict=True))
            names = sorted(names, key=lambda name: (-put[name], name))[: self._most]
        self._names = sorted(names)

    def _queues(self, missing: list[Missing]) -> _Samples:
        yield "topics_left_out", (), self._left_out
        try:
            summaries = self._center.queues.summary(self._names)
        except PartialError as exc:
            summaries = exc.results
            missing += exc.missing
        partly = {one.topic for one in missing}
        for found in summaries:
            if found.topic in partly:
                continue
            topic = self._center.registry.known(found.topic)
            for state, number in found.counts._asdict().items():
                yield "messages", (found.topic, state), number
            yield "oldest_overdue_seconds", (found.topic,), found.oldest_us / 1_000_000
            yield "slots", (found.topic,), found.slots
            if topic is not None and topic.declaration.target:
                yield "target_stopped", (found.topic,), bool(topic.declaration.target_stopped)

    def _limits(self, missing: list[Missing]) -> _Samples:
        partly = {one.topic for one in missing}
        for name in self._names:
            topic = self._center.registry.known(name)
            said = None if topic is None or name in partly else topic.declaration
            if said is None or not (said.gates or said.put_gates):
                continue
            found = self._center.queues.usage(name)
            for one in found.limits:
                yield "limit_used", (name, one.name), one.used
                if one.of is not None:
                    yield "limit_max", (name, one.name), one.of
            yield "keys_waiting", (name,), found.keys_waiting
            yield "limited_oldest_seconds", (name,), found.oldest_us / 1_000_000

    def _library(self) -> _Samples:
        told = set(self._names)
        for found in self._center.queues.unwritten():
            if found.topic in told:
                yield "library_unwritten", (found.topic,), found.entries
                yield "library_unwritten_seconds", (found.topic,), found.oldest_us / 1_000_000
                yield "library_incomplete", (found.topic,), float(found.incomplete)

    def _schedules(self) -> _Samples:
        told = set(self._names)
        for found in self._center.recurring.outlook():
            if found.topic not in told:
                continue
            yield "schedules", (found.topic, "active"), found.active
            yield "schedules", (found.topic, "idle"), found.schedules - found.active
            yield "schedules_late", (found.topic,), found.late
            if found.next is not None:
                yield "schedule_next_seconds", (found.topic,), found.next

    def _counted(self) -> _Samples:
        for measured in read_metrics(self._center, self._names, minutes=1).values():
            for event, number in measured.totals.items():
                yield "events", (measured.topic, event), number
            late = measured.lateness
            every = late.up_to()  # every other bound: each is twice the one before
            bounds = [(_bound(bound), number) for bound, number in (*every[:-1:2], every[-1])]
            yield "lateness_seconds", (measured.topic,), bounds, late.us / 1_000_000

    def _scripts(self) -> _Samples:
        for script, times in read_script_times(self._center).items():
            yield "script_calls", (script,), times.calls
            yield "script_seconds", (script,), times.timed, times.seconds

    def _memory(self) -> _Samples:
        for memory in read_memory(self._center.client):
            yield "memory_used_bytes", (memory.server,), memory.used
            yield "memory_max_bytes", (memory.server,), memory.most


def _bound(seconds: float) -> str:
    return "+Inf" if seconds == float("inf") else f"{seconds:.10g}"


def registry_of(center: Any, topics: Iterable[str] = ()) -> CollectorRegistry:
    """A registry with only the metrics of a center.

    topics: as of :class:`TimeoutCenterCollector`
    """
    made = CollectorRegistry()
    made.register(TimeoutCenterCollector(center, topics))
    return made


def metrics_text(center: Any, topics: Iterable[str] = ()) -> str:
    """The metrics of a center, in Prometheus's text format.

    topics: as of :class:`TimeoutCenterCollector`
    """
    return generate_latest(registry_of(center, topics)).decode()
