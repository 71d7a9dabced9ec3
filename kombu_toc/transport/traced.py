"""Channels of a connection with ``toc_otel``: what they send, receive and settle is traced.

They are classes of their own, made for a connection that asks for them: any other connection has
none of this between a message and its broker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

from opentelemetry.trace import SpanContext

from ..consumer.connections import BROKEN
from ..errors import ActionTimeError
from ..model.timetext import action_time
from ..tracing import Received, Reception, Tracing
from .channel import Channel
from .publisher import PublishBatch, Publisher
from .receiving import Message


@lru_cache(maxsize=8)
def traced(channel: type[Channel]) -> type[Channel]:
    """The class of channels that are like these and traced."""
    return type(
        f"Traced{channel.__name__}",
        (TracedChannel, channel),
        {
            "publisher_class": type(
                "TracedPublisher", (TracedPublisher, channel.publisher_class), {}
            ),
            "__doc__": f"{channel.__name__}, traced.",
        },
    )


class TracedPublisher(Publisher):
    """Puts messages, each in a span; its context goes along."""

    def __init__(self, channel: Any) -> None:
        super().__init__(channel)
        self.tracing: Tracing = channel.tracing

    def put(self, queue: str, message: dict[str, Any], batch: PublishBatch | None = None) -> None:
        if self._goes_by_itself(queue):
            super().put(queue, message, batch)
            return
        headers = message.get("headers") or {}
        name = message["properties"]["delivery_tag"]
        id = str(headers.get("id") or name)
        sent: dict[str, dict[str, str]] | None = getattr(name, "trace", None)
        if sent is None:
            sent = name.trace = {}
        again = sent.get(queue)
        if again is not None:  # the publish is repeated: it is the same message
            headers = {**headers, **again}
        sending = self.tracing.sending(
            queue, id, headers, _due_us(headers, id), batched=batch is not None
        )
        with sending as (made, context):
            along = sent.setdefault(queue, made)
            if along:
                message = {**message, "headers": {**headers, **along}}
            super().put(queue, message, batch)
            if isinstance(batch, TracedBatch):
                batch.note(context, queue)

    def _goes_by_itself(self, queue: str) -> bool:
        """Whether it is a queue for replies, or the like: they would be most of all spans."""
        topic = self._center.registry.known(queue)
        if topic is None:
            library = getattr(self, "library", None)
            if library is not None and library.recorder.is_away:
                return False  # nobody can be asked
            try:
                topic = self._topic_of(queue)
            except BROKEN:  # the library may take the message
                return False
        return bool(topic.declaration.expires)


def _due_us(headers: dict[str, Any], id: str) -> int | None:
    """When a message is due, in microseconds since the epoch; None: now."""
    try:
        at_us, delay_us = action_time(headers, id)
    except ActionTimeError:  # the publisher says so
        return None
    if at_us is None and delay_us is not None:
        return time.time_ns() // 1000 + delay_us
    return at_us


class TracedBatch(PublishBatch):
    """Publishes that leave together, in a span that links to the one of each."""

    def __init__(self, channel: Any, max_size: int) -> None:
        super().__init__(channel, max_size)
        #: the context and the queue of each message
        self._made: list[tuple[SpanContext, str]] = []

    def note(self, context: SpanContext, queue: str) -> None:
        """A message was made."""
        self._made.append((context, queue))

    def flush(self) -> None:
        made, self._made = self._made, []
        tracing = self.channel.tracing
        with tracing.flushing(*zip(*made, strict=True)) if made else nullcontext():
            super().flush()

    def discard(self) -> None:
        self._made = []
        super().discard()


class TracedChannel(Channel):
    """A channel whose messages are traced; see :func:`traced`."""

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        self.tracing: Tracing = connection.tracing
        super().__init__(connection, **kwargs)
        self.observers = (*self.observers, self._settled)

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        return TracedBatch(self, max_size)

    def _settled(self, operation: str, message: Message) -> None:
        """Make a span of what settles a message, once, and of its burial after that."""
        received: Received | None = message.trace
        if received is None or operation == "end" or (received.settled and operation != "bury"):
            return
        message.trace = received._replace(settled=True)
        reason = "" if operation in ("ack", "release") else message.reason
        self.tracing.settled(operation, received, reason)

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], Any], *args: Any, **kwargs: Any
    ) -> None:
        traced = partial(self._hand_over, callback)
        super().basic_consume(queue, no_ack, traced, *args, **kwargs)

    def _hand_over(self, callback: Callable[[Any], Any], message: Message) -> Any:
        """Deliver a message to a consumer, in a span."""
        if not self._is_traced(message):
            return callback(message)
        reception = self._receive(message)
        ends = True
        try:
            if not message.is_early:
                reception.begins(self._now_us())
            with reception.current():
                result = callback(message)
            if message.is_early and message.on_due is not None:
                ends = False
                self._end_when_due(message, reception)
            return result
        finally:
            if ends:
                reception.end()

    def _end_when_due(self, message: Message, reception: Reception) -> None:
        """End the span of a message that was handed over ahead of its time when that has come."""
        on_due, on_given_back = message.on_due, message.on_given_back

        def begin() -> Any:
            reception.begins(self._now_us())
            reception.end()
            return None if on_due is None else on_due()

        def give_back() -> Any:
            reception.end()
            return None if on_given_back is None else on_given_back()

        message.on_due, message.on_given_back = begin, give_back

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Message | None:
        message = super().basic_get(queue, no_ack, **kwargs)
        if message is not None and self._is_traced(message):
            reception = self._receive(message)
            reception.begins(self._now_us())
            reception.end()
        return message

    def _is_traced(self, message: Message) -> bool:
        """Whether it is neither a broadcast nor of a queue that goes away by itself."""
        if message.delivery is None:
            return False
        topic = self.center.registry.known(message.delivery.topic)
        return topic is None or not topic.declaration.expires

    def _receive(self, message: Message) -> Reception:
        delivery, headers = message.delivery, message.headers
        assert delivery is not None
        reception = self.tracing.receive(
            delivery.topic,
            delivery.id,
            headers,
            due_us=delivery.action_us,
            failures=delivery.failures,
            waited=headers.get("eta") is not None or headers.get("x-delay") is not None,
        )
        message.trace = reception.received
        return reception

    def _now_us(self) -> int:
        """Microseconds since the epoch, by the server's clock as far as that is known."""
        poller = self.poller
        return poller.clock.at(poller.loop.now()) if poller.clock.known else time.time_ns() // 1000
