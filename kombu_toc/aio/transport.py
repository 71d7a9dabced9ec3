"""Kombu's channel and transport over connections of redis.asyncio, to publish in an event loop.

What a channel of it does is called through :meth:`AsyncTimeoutCenter.call`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..center.center import TimeoutCenter
from ..transport.channel import Channel
from ..transport.publisher import token_of
from ..transport.transport import Transport
from .center import AsyncTimeoutCenter, attach_in_threads
from .client import AsyncClient, AsyncClusterClient


class AsyncChannel(Channel):
    """A channel that publishes, one message at a time; it consumes nothing."""

    #: the message that was last published
    last: dict[str, Any] | None = None

    def basic_publish(
        self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any
    ) -> Any:
        self.last = None
        found = super().basic_publish(message, exchange, routing_key, **kwargs)
        self.last = message
        return found

    def publish_made(
        self,
        make: Callable[[str], bytes],
        queue: str,
        id: str,
        *,
        priority: int,
        eta: str,
        counts: bool,
        key: str,
        run_again: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        """Publish the message of a task that somebody else has made.

        make: makes its bytes, as :meth:`plain_of`, with a token
        id: of the task
        eta: as in its header, or nothing
        counts: whether that is a countdown
        key: its header `x-key`, or nothing
        run_again: makes a function repeat what fails because of a connection
        """
        publisher = self.publisher

        def publish() -> None:
            publisher.run(queue, call)

        name = publisher.next_name()
        token = token_of(name)
        call = publisher.putting_plain(
            queue, id, name, token, make(token), priority, eta, counts, key
        )
        try:
            publish()
        except self.connection.connection_errors:
            run_again(publish)()


@lru_cache(maxsize=8)
def _publishing(channel: type[Channel]) -> type[AsyncChannel]:
    """The class of channels that are like these and publish in an event loop."""
    return type(f"Async{channel.__name__}", (AsyncChannel, channel), {})


class AsyncTransport(Transport):
    """Publishes, and declares what it publishes to; it consumes nothing."""

    Channel = AsyncChannel
    client_classes = (AsyncClient, AsyncClusterClient)

    def _record(self, client: Any) -> None:
        super()._record(client)
        self.Channel = _publishing(self.Channel)

    def _attach(self, center: TimeoutCenter) -> None:
        attach_in_threads(center, self.settings, self.address, self._making())

    @property
    def async_center(self) -> AsyncTimeoutCenter:
        """The center behind this connection, with the same connections to the server."""
        return AsyncTimeoutCenter.over(self.center)
