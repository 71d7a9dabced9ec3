"""The result backend of a URL ``toc+redis://...``: Celery's own, on the same server.

Celery finds it by the entry point ``toc`` of its group ``celery.result_backends``.
"""

from __future__ import annotations

from typing import Any

from celery.app.backends import by_url
from celery.exceptions import ImproperlyConfigured

import kombu_toc


def result_backend(app: Any, url: str) -> Any:
    """Make the backend for ``result_backend="toc+redis://..."``.

    url: with or without ``toc+``, which Celery removes

    Raises ImproperlyConfigured, which names an alternative, if Celery has no backend for such a
    server, or needs more than the URL says.
    """
    scheme = url.partition("://")[0].removeprefix("toc+")
    if scheme == "cluster":
        raise ImproperlyConfigured(
            "Celery keeps no results in a Redis Cluster: result_backend cannot be "
            "toc+cluster://...; name one server, redis://host:6379/0, or another backend"
        )
    if scheme == "sentinel":
        raise ImproperlyConfigured(
            "result_backend cannot be toc+sentinel://...: use Celery's own, "
            "sentinel://h1:26379/0;sentinel://h2:26379/0, and name the master in "
            "result_backend_transport_options = {'master_name': ...}"
        )
    try:
        cls, plain = by_url(kombu_toc.server_url(url), app.loader)
    except kombu_toc.ConfigurationError as exc:
        raise ImproperlyConfigured(f"result_backend: {exc}") from exc
    return cls(app=app, url=plain)
