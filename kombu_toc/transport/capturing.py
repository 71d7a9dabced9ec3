"""A channel that keeps what is published instead of sending it."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..center.requests import PutRequest
from ..model.topic import Topic
from ..scripts.call import ScriptCall, load
from .channel import Channel
from .publish_batch import PublishBatch
from .publishing import Publisher
from .uniqueness import is_unique


class Captured(NamedTuple):
    """A message that was not sent.

    queue: where it would have gone; None for a broadcast, and for a message with a unique key
    message: as Kombu has prepared it
    traits: what holds for it alone, as :func:`kombu_toc.model.delivery.traits_of` makes it
    """

    queue: str | None
    message: dict[str, Any]
    priority: int = 0
    traits: str = ""
    unique: bool = False


class _CapturingPublisher(Publisher):
    """Keeps what the center would be asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.captured: list[Captured] = []
        self._message: dict[str, Any] = {}

    def put(
        self,
        queue: str,
        message: dict[str, Any],
        batch: PublishBatch | None = None,
        topic: Topic | None = None,
    ) -> None:
        if is_unique(message.get("headers") or {}, message["properties"]):
            self.captured.append(Captured(None, message, unique=True))
            return
        self._message = message
        self.putting(topic or self._topic_of(queue), message, admit=False)

    def call_of(self, topic: Topic, request: PutRequest) -> ScriptCall:
        made = Captured(topic.name, self._message, request.priority, request.traits)
        self.captured.append(made)
        return ScriptCall(load("put"), (), (), lambda raw: raw)

    def broadcast(self, exchange: str, message: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self.captured.append(Captured(None, message))


class CapturingChannel(Channel):
    """Declares queues as any channel does, and sends nothing.

    transport: the transport of a connection
    """

    publisher: _CapturingPublisher
    publisher_class = _CapturingPublisher

    @property
    def captured(self) -> list[Captured]:
        """What was published."""
        return self.publisher.captured
