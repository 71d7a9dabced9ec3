"""What tests consume with Kombu's consumers, by hand and in its event loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from kombu import Connection, Consumer, Message, Queue
from kombu.asynchronous import Hub


class Inbox:
    """A consumer, and what it got; at the end of a `with` it consumes no more.

    on: a connection or a channel; queues: 'mail' unless given
    ack: whether it acknowledges; how: as Consumer takes it
    """

    def __init__(self, on: Any, *queues: Queue, ack: bool = True, **how: Any) -> None:
        self.messages: list[Message] = []
        self._ack = ack
        self.consumer = Consumer(on, queues or [Queue("mail")], callbacks=[self._take], **how)
        self.consumer.consume()

    def _take(self, body: Any, message: Message) -> None:
        self.messages.append(message)
        if self._ack:
            message.ack()

    @property
    def bodies(self) -> list[Any]:
        return [message.payload for message in self.messages]

    def __enter__(self) -> Inbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.consumer.cancel()


def deliver_until(connection: Connection, holds: Callable[[], Any], seconds: float = 20) -> Any:
    """Deliver what comes until that holds; what it returned at last."""
    end = time.monotonic() + seconds
    while not (value := holds()) and (left := end - time.monotonic()) > 0:
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=min(left, 0.2))
    return value


class Loop:
    """Kombu's event loop, of a connection that ends with it."""

    def __init__(self, connection: Connection) -> None:
        self.hub = Hub()
        self._connection = connection
        connection.register_with_event_loop(self.hub)

    def until(self, holds: Callable[[], Any], seconds: float = 10, what: Any = None) -> None:
        """Turn until that holds. what: what a failure shows; called for, if it can be"""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, what() if callable(what) else what
            self.hub.run_once()

    def turn_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end, seconds + 10)

    def close(self) -> None:
        self._connection.release()
        self.hub.close()

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
