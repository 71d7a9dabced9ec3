"""Where the broker of an app is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import kombu_toc

if TYPE_CHECKING:
    from celery import Celery


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
        return Broker(url, connection.ssl, connection.transport_options)
