"""What a timeout center holds and what happens in it, for Prometheus.

Needs ``prometheus-client``: ``pip install 'celery-toc[metrics]'``. Everything is read from Redis
at each scrape. ``docs/monitoring.md`` lists the metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from .client.health import read_memory
from .errors import TocError
from .metrics.counters import Lateness
from .metrics.reading import read_metrics, read_script_times

__all__ = ("TimeoutCenterCollector", "metrics_text", "registry_of")


class TimeoutCenterCollector(Collector):
    """Reads a timeout center at each scrape; for a registry of your own.

    Queues that expire by themselves, such as those for replies, are left out: their names are never
    used again.
    """

    def __init__(self, center: Any) -> None:
        #: of an app's center, the one that it wraps
        self._center: TimeoutCenter = getattr(center, "center", center)

    def describe(self) -> list[Any]:
        """Nothing: without this, the registry would scrape when the collector is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """Read the center. If it cannot be read, only ``celery_toc_up`` is there, and 0."""
        try:
            families = [
                *self._queues(),
                *self._limits(),
                *self._library(),
                *self._schedules(),
                *self._counted(),
                *self._scripts(),
                *self._memory(),
            ]
        except (RedisError, TocError, OSError):
            families = []
        yield GaugeMetricFamily(
            "celery_toc_up", "Whether Redis could be read just now.", value=float(bool(families))
        )
        yield from families

    def _queues(self) -> list[Any]:
        messages = GaugeMetricFamily(
            "celery_toc_messages",
            "Messages: scheduled wait for their time, ready are due, in_flight are with a worker, "
            "dead were given up on.",
            labels=("topic", "state"),
        )
        overdue = GaugeMetricFamily(
            "celery_toc_oldest_overdue_seconds",
            "For how long the oldest ready message has been due; 0 if there is none.",
            labels=("topic",),
        )
        slots = GaugeMetricFamily("celery_toc_slots", "Slots of a topic.", labels=("topic",))
        stopped = GaugeMetricFamily(
            "celery_toc_target_stopped",
            "Whether the target of a topic has answered 410, and nothing is sent there any more.",
            labels=("topic",),
        )
        for found in self._center.summary():
            topic = self._center.known(found.topic)
            if topic is not None and topic.declaration.expires:
                continue
            for state, number in found.counts._asdict().items():
                messages.add_metric((found.topic, state), number)
            overdue.add_metric((found.topic,), found.oldest_us / 1_000_000)
            slots.add_metric((found.topic,), found.slots)
            if topic is not None and topic.declaration.target:
                stopped.add_metric((found.topic,), bool(topic.declaration.target_stopped))
        return [messages, overdue, slots, stopped]

    def _limits(self) -> list[Any]:
        used = GaugeMetricFamily(
            "celery_toc_limit_used",
            "What is used of a limit: of a rate or a concurrency as much as there is at once, of a "
            "limit of each key for how many keys it matters now.",
            labels=("topic", "limit"),
        )
        most = GaugeMetricFamily(
            "celery_toc_limit_max",
            "How much there is of a limit that counts the whole topic.",
            labels=("topic", "limit"),
        )
        keys = GaugeMetricFamily(
            "celery_toc_keys_waiting",
            "Keys that have something due and may not start it now.",
            labels=("topic",),
        )
        oldest = GaugeMetricFamily(
            "celery_toc_limited_oldest_seconds",
            "For how long the oldest due message of a limited topic has waited.",
            labels=("topic",),
        )
        for name in self._center.topics():
            topic = self._center.known(name)
            if topic is None or not (topic.declaration.gates or topic.declaration.put_gates):
                continue
            found = self._center.usage(name)
            for one in found.limits:
                used.add_metric((name, one.name), one.used)
                if one.of is not None:
                    most.add_metric((name, one.name), one.of)
            keys.add_metric((name,), found.keys_waiting)
            oldest.add_metric((name,), found.oldest_us / 1_000_000)
        return [used, most, keys, oldest]

    def _library(self) -> list[Any]:
        unwritten = GaugeMetricFamily(
            "celery_toc_library_unwritten",
            "Changes of messages that the task library does not know yet.",
            labels=("topic",),
        )
        oldest = GaugeMetricFamily(
            "celery_toc_library_unwritten_seconds",
            "How old the oldest change is that the task library does not know yet; 0 if there is "
            "none.",
            labels=("topic",),
        )
        incomplete = GaugeMetricFamily(
            "celery_toc_library_incomplete",
            "Whether there were more changes than a log may have: all that waits is then looked "
            "through.",
            labels=("topic",),
        )
        for found in self._center.unwritten():
            unwritten.add_metric((found.topic,), found.entries)
            oldest.add_metric((found.topic,), found.oldest_us / 1_000_000)
            incomplete.add_metric((found.topic,), float(found.incomplete))
        return [unwritten, oldest, incomplete]

    def _schedules(self) -> list[Any]:
        schedules = GaugeMetricFamily(
            "celery_toc_schedules",
            "Recurring tasks: active fire again, idle are paused or have ended.",
            labels=("topic", "state"),
        )
        late = GaugeMetricFamily(
            "celery_toc_schedules_late",
            "Schedules whose next firing should have begun more than five seconds ago.",
            labels=("topic",),
        )
        following = GaugeMetricFamily(
            "celery_toc_schedule_next_seconds",
            "Seconds until the next firing of a topic's schedules; negative if it is late.",
            labels=("topic",),
        )
        for found in self._center.recurring.outlook():
            schedules.add_metric((found.topic, "active"), found.active)
            schedules.add_metric((found.topic, "idle"), found.schedules - found.active)
            late.add_metric((found.topic,), found.late)
            if found.next is not None:
                following.add_metric((found.topic,), found.next)
        return [schedules, late, following]

    def _counted(self) -> list[Any]:
        events = CounterMetricFamily(
            "celery_toc_events",
            "What happened to messages, as all producers and workers have counted it.",
            labels=("topic", "event"),
        )
        lateness = HistogramMetricFamily(
            "celery_toc_lateness_seconds",
            "How much later than their action times messages were delivered.",
            labels=("topic",),
        )
        for measured in read_metrics(self._center, minutes=1).values():
            for event, number in measured.totals.items():
                events.add_metric((measured.topic, event), number)
            lateness.add_metric(
                (measured.topic,),
                [(_bound(bound), number) for bound, number in _cumulated(measured.lateness)],
                measured.lateness.us / 1_000_000,
            )
        return [events, lateness]

    def _scripts(self) -> list[Any]:
        calls = CounterMetricFamily(
            "celery_toc_script_calls",
            "Calls of the scripts that are the operations of a timeout center.",
            labels=("script",),
        )
        seconds = SummaryMetricFamily(
            "celery_toc_script_seconds",
            "How long clients waited for a script, of the calls whose time was taken.",
            labels=("script",),
        )
        for script, times in read_script_times(self._center).items():
            calls.add_metric((script,), times.calls)
            seconds.add_metric((script,), times.timed, times.seconds)
        return [calls, seconds]

    def _memory(self) -> list[Any]:
        used = GaugeMetricFamily(
            "celery_toc_memory_used_bytes", "Memory that a server uses.", labels=("server",)
        )
        most = GaugeMetricFamily(
            "celery_toc_memory_max_bytes",
            "Memory from which on it refuses new messages; 0 if nothing bounds it.",
            labels=("server",),
        )
        for memory in read_memory(self._center.client):
            used.add_metric((memory.server,), memory.used)
            most.add_metric((memory.server,), memory.most)
        return [used, most]


def _cumulated(lateness: Lateness) -> list[tuple[float, int]]:
    """Pairs of (seconds, number delivered no later), for every other bound: each is twice the one
    before."""
    found = lateness.up_to()
    return [*found[:-1:2], found[-1]]


def _bound(seconds: float) -> str:
    return "+Inf" if seconds == float("inf") else f"{seconds:.10g}"


def registry_of(center: Any) -> CollectorRegistry:
    """A registry with only the metrics of a center."""
    made = CollectorRegistry()
    made.register(TimeoutCenterCollector(center))
    return made


def metrics_text(center: Any) -> str:
    """The metrics of a center, in Prometheus's text format."""
    return generate_latest(registry_of(center)).decode()
