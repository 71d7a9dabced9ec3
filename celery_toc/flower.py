"""Flower's Broker page: how many messages the queues of a timeout center hold.

`celery_toc.compat.control` has Flower ask :class:`Queues`. The transport calls :func:`install`
(entry point ``kombu_toc.extensions``), and only in a process that has imported Flower by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import kombu_toc

from .compat import control

#: Seconds, the same as Flower uses for Redis: a page must not wait for a server that is away.
TIMEOUTS = {"socket_connect_timeout": 1.0, "socket_timeout": 2.0}


def install() -> None:
    """Have Flower use :class:`Queues` for a broker URL of ours."""
    control.install_flower(Queues)


class Queues:
    """Has the method that Flower calls on a broker.

    broker_options: the app's ``broker_transport_options``
    broker_use_ssl: the app's setting of that name
    """

    def __init__(
        self,
        broker_url: str,
        *,
        broker_options: dict[str, Any] | None = None,
        broker_use_ssl: Any = None,
        **_: Any,
    ) -> None:
        self._url = broker_url
        self._options = {**TIMEOUTS, **kombu_toc.known_options(broker_options or {})}
        self._ssl = broker_use_ssl

    async def queues(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Each queue's name and numbers of messages: all (also those that wait for their time),
        those that are due, and those delivered and not acknowledged."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self._count, list(names))

    def _count(self, names: list[str]) -> list[dict[str, Any]]:
        center = kombu_toc.center_for(self._url, ssl=self._ssl, **self._options)
        try:
            return [
                {
                    "name": name,
                    "messages": counts.waiting + counts.in_flight,
                    "messages_ready": counts.ready,
                    "messages_unacknowledged": counts.in_flight,
                }
                for name, counts in ((name, center.counts(name)) for name in names)
            ]
        finally:
            center.client.close()
            center.client.connection_pool.disconnect()
