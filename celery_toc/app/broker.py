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
