"""Where the broker of an app is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from celery.app.backends import by_url
from celery.exceptions import ImproperlyConfigured

import kombu_toc

if TYPE_CHECKING:
    from celery import Celery


# -- where the broker of an app is


class Broker(NamedTuple):
    """What a center of an app's broker is made of."""

    url: str
    ssl: Any
    options: dict[str, Any]


#: Seconds of a visibility timeout that is most likely left from ``redis://``, where it had to be
#: longer than the longest countdown; Kombu's default there, and so what nobody raised it to.
_LEFT_OVER = 3600.0


def visibility_warnings(limits: kombu_toc.Limits) -> list[str]:
    """That the visibility timeout of an app is far longer than it need be."""
    seconds = limits.visibility
    if seconds < _LEFT_OVER:
        return []
    return [
        f"visibility_timeout is {seconds:g} seconds ({seconds / 3600:.3g} hours), and so long do "
        "the messages of a killed worker stay in flight; remove it if it is left from redis://: "
        "here a worker renews its leases, however long a task runs or waits"
    ]


def broker_of(app: Celery) -> Broker:
    """The broker that an app sends to. Raises ConfigurationError if it is no timeout center."""
    with app.connection_for_write() as connection:
        url = connection.as_uri(include_password=True)
        if not isinstance(connection.transport, kombu_toc.Transport):
            raise kombu_toc.ConfigurationError(
                f"the broker of app {app.main!r} is {kombu_toc.mask_password(url)}, which is not a "
                "timeout center: such a URL begins with toc+, as in toc+redis://localhost:6379/0"
            )
        options = kombu_toc.known_options(connection.transport_options)
        return Broker(url, connection.ssl, options)


# -- the result backend of a URL toc+redis://...
#
# Celery finds it by the entry point ``toc`` of its group ``celery.result_backends``.


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
