"""A channel that keeps what is published instead of sending it."""

from __future__ import annotations

from typing import Any

from .channel import Channel


class CapturingChannel(Channel):
    """Declares queues as any channel does, and sends nothing.

    transport: the transport of a connection
    """

    def __init__(self, transport: Any) -> None:
        super().__init__(transport)
        #: what was published: each queue that it would have gone to, None for a broadcast, and the
        #: message as Kombu has prepared it
        self.captured: list[tuple[str | None, dict[str, Any]]] = []

    def basic_publish(
        self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any
    ) -> Any:
        self.publisher.address(message, exchange, routing_key)
        if exchange:
            return self.typeof(exchange).deliver(message, exchange, routing_key)
        return self._put(routing_key, message)

    def _put(self, queue: str, message: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self.captured.append((queue, message))

    def _put_fanout(
        self, exchange: str, message: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        self.captured.append((None, message))

    def priority_of(self, message: dict[str, Any]) -> int:
        """The priority of a prepared message."""
        found: int = self._get_message_priority(message)  # type: ignore[no-untyped-call]
        return found
