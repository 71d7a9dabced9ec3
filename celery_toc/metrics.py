"""The Prometheus exporter: its public names. See :mod:`celery_toc.integrations.prometheus`."""

from .integrations.prometheus import TimeoutCenterCollector, metrics_text, serve

__all__ = ("TimeoutCenterCollector", "metrics_text", "serve")
