"""Makes a timeout center with the settings of a connection."""

from __future__ import annotations

from typing import Any

import redis

from ..client.options import Settings
from ..client.urls import Address
from ..metrics.counters import Metrics
from .center import TimeoutCenter


def make_center(client: redis.Redis, settings: Settings) -> TimeoutCenter:
    """A center with these settings."""
    return TimeoutCenter(
        client,
        settings.prefix,
        steps=settings.priority_steps,
        slots=settings.slots,
        retries=settings.toc_retries,
        limits=settings.limits,
        wait_replicas=settings.toc_wait_replicas,
        wait_timeout=settings.toc_wait_timeout,
        metrics=_metrics_of(client, settings),
        pop_bytes=settings.toc_pop_bytes,
    )


def trace_if_asked(center: TimeoutCenter, settings: Settings, address: Address) -> None:
    """Have spans for what is done by a center, if its settings say so. Raises ConfigurationError
    without OpenTelemetry's API."""
    if settings.toc_otel:
        from ..tracing import tracing_of  # it needs an extra
        from .traced import trace_center

        trace_center(center, tracing_of(settings, address))


def _metrics_of(client: redis.Redis, settings: Settings) -> Metrics:
    """The metrics of this process for a server. They outlive its connections."""
    if not settings.toc_metrics:
        return Metrics(active=False)
    pool: Any = client.connection_pool
    where = pool.connection_kwargs
    place = tuple(where.get(name) for name in ("host", "port", "path", "db"))
    if name := getattr(pool, "service_name", None):
        place = (repr(pool.sentinel_manager), name, where.get("db"))
    return Metrics.of((*place, settings.prefix))
