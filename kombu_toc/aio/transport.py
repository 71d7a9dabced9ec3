"""Kombu's transport over connections of redis.asyncio, for publishing in an event loop.

What a channel of it does is called through :meth:`AsyncTimeoutCenter.call`.
"""

from __future__ import annotations

from typing import Any

from ..center.center import TimeoutCenter
from ..transport.transport import Transport
from .center import AsyncTimeoutCenter
from .channel import AsyncChannel
from .client import AsyncClient, AsyncClusterClient
from .library import attach_in_threads


class AsyncTransport(Transport):
    """Publishes, and declares what it publishes to; it consumes nothing."""

    Channel = AsyncChannel
    client_classes = (AsyncClient, AsyncClusterClient)

    def _record(self, client: Any) -> None:
        from .recorded import RecordedAsyncChannel  # it needs an extra

        super()._record(client)
        self.Channel = RecordedAsyncChannel

    def _attach(self, center: TimeoutCenter) -> None:
        attach_in_threads(center, self.settings, self.address, self._making())

    @property
    def async_center(self) -> AsyncTimeoutCenter:
        """The center behind this connection, with the same connections to the server."""
        return AsyncTimeoutCenter.over(self.center)
