"""What Celery gains from a timeout center. Nobody need import it: the broker URL is enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kombu_toc
from kombu_toc import __version__

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("__version__", "timeout_center")


def timeout_center(app: Celery, **options: Any) -> kombu_toc.TimeoutCenter:
    """The timeout center of an app's broker.

    options: added to the app's ``broker_transport_options``

    Raises ConfigurationError if the app's broker URL is not one of ours.
    """
    with app.connection_for_write() as connection:
        if not isinstance(connection.transport, kombu_toc.Transport):
            raise kombu_toc.ConfigurationError(
                f"the broker of app {app.main!r} is {connection.as_uri()}: "
                "not a timeout center; its URL begins with toc+redis://"
            )
        return kombu_toc.center_for(
            connection.as_uri(include_password=True),
            ssl=connection.ssl,
            **{**connection.transport_options, **options},
        )
