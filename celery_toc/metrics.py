"""What a timeout center holds and what happens in it, for Prometheus.

Needs ``prometheus-client``: ``pip install 'celery-toc[metrics]'``. Everything is read from Redis
at each scrape, so one exporter serves all producers and workers, and it may run anywhere::

    from celery_toc.metrics import serve

    serve(app, "127.0.0.1", 9808)

``docs/monitoring.md`` lists the metrics.
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from prometheus_client import CollectorRegistry, generate_latest, start_http_server

import kombu_toc
from kombu_toc.exporter import TimeoutCenterCollector, registry_of

from . import TaskCenter, timeout_center

__all__ = ("TimeoutCenterCollector", "metrics_text", "serve")

#: The port that the documentation, the alerts and the dashboard use.
PORT = 9808


def registry(of: Celery | kombu_toc.TimeoutCenter | TaskCenter) -> CollectorRegistry:
    """A registry with only the metrics of an app's timeout center, or of a center.

    Raises ConfigurationError if the app's broker URL is not one of ours.
    """
    return registry_of(timeout_center(of) if isinstance(of, Celery) else of)


def metrics_text(of: Celery | kombu_toc.TimeoutCenter | TaskCenter) -> str:
    """The metrics of an app's timeout center, or of a center, in Prometheus's text format."""
    return generate_latest(registry(of)).decode()


def serve(
    of: Celery | kombu_toc.TimeoutCenter | TaskCenter, host: str = "127.0.0.1", port: int = PORT
) -> tuple[Any, Any]:
    """Serve the metrics of an app's timeout center, or of a center, over HTTP, from a thread.

    host: an address of this machine; ``0.0.0.0`` for all of them
    port: 0 for a free one

    Returns the server and the thread: ``server.shutdown()`` ends it, ``server.server_port`` is the
    port. Raises OSError if the port is taken, ConfigurationError as :func:`registry`.
    """
    return start_http_server(port, host, registry=registry(of))
