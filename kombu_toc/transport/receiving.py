"""Receiving: what the poller has fetched becomes messages for the consumers of a channel."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ..center.calls import RECOVER
from ..center.center import TimeoutCenter
from ..center.exchanges import Subscription, first_that_matches
from ..consumer.lease_keeper import LeaseKeeper
from ..consumer.policy import WorkerPolicy
from ..consumer.poller import Poller
from ..errors import EnvelopeError
from ..model import message as envelope
from ..model.results import Delivery
from .message import Message

logger = logging.getLogger(__name__)


class _Consumer(NamedTuple):
    callback: Callable[[Any], Any]
    no_ack: bool


class Owner(Protocol):
    """The channel, as far as its receiver knows it."""

    policy: WorkerPolicy

    @property
    def qos(self) -> Any:
        """Where a delivered message waits to be acknowledged."""


class Receiver:
    """Delivers to the consumers of a channel: these methods are what the poller calls.

    channel: what the messages belong to
    subscriptions: gives those by which broadcasts are read for a queue
    """

    def __init__(
        self,
        channel: Owner,
        center: TimeoutCenter,
        poller: Poller,
        lease_keeper: LeaseKeeper,
        subscriptions: Callable[[str], list[Subscription]],
    ) -> None:
        self._channel = channel
        self._center = center
        self._poller = poller
        self._lease_keeper = lease_keeper
        self._subscriptions = subscriptions
        #: queue -> who consumes it
        self._consumers: dict[str, _Consumer] = {}
        #: asked before a firing of a schedule is delivered, with what it came as and its name:
        #: whether it is. If not, it has been settled
        self.on_firing: Callable[[Delivery, str], bool] | None = None

    def add(self, queue: str, callback: Callable[[Any], Any], no_ack: bool) -> None:
        """Deliver what comes to a queue to `callback`; acknowledge it before, if `no_ack`."""
        self._consumers[queue] = _Consumer(callback, no_ack)

    def remove(self, queue: str) -> None:
        """Deliver no more of a queue."""
        self._consumers.pop(queue, None)

    # -- messages

    def receive(self, delivery: Delivery) -> None:
        """Deliver a message that is due."""
        consumer = self._consumers.get(delivery.topic)
        if consumer is None:
            self._poller.release([delivery])
            return
        try:
            content = envelope.unpack(delivery.body, delivery.id)
            message = Message(self._channel, content, delivery)
        except EnvelopeError as exc:
            self._poller.reject(delivery, requeue=False, reason=str(exc))
            return
        if (
            envelope.SCHEDULE in message.headers
            and self.on_firing is not None
            and not self.on_firing(delivery, str(message.headers[envelope.SCHEDULE]))
        ):
            return
        if consumer.no_ack:
            self._poller.ack(delivery)
        else:
            self._channel.qos.append(message, message.delivery_tag)
        consumer.callback(message)

    def take_early(self, delivery: Delivery) -> Message | None:
        """The message, if the queue's consumer may have it before it is due.

        :meth:`deliver_early` is next.
        """
        consumer = self._consumers.get(delivery.topic)
        if consumer is None or consumer.no_ack:
            return None
        try:
            content = envelope.unpack(delivery.body, delivery.id)
            message = Message(self._channel, content, delivery)
        except EnvelopeError:  # told when it is due
            return None
        if envelope.SCHEDULE in message.headers and self.on_firing is not None:
            return None
        if not self._channel.policy.wants_early(message):
            return None
        message.is_early = True
        self._channel.qos.append(message, message.delivery_tag)
        return message

    def deliver_early(self, message: Message) -> None:
        """Deliver what :meth:`take_early` gave."""
        assert message.delivery is not None
        self._consumers[message.delivery.topic].callback(message)

    def take_back(self, message: Message) -> bool:
        """Take back what was delivered ahead of its time and has not begun; whether it is there
        to be given back."""
        if not self._channel.qos.take_back(message):
            return False
        message.note_release()
        return True

    def get(self, queue: str, visibility: float, no_ack: bool) -> Message | None:
        """One message that is due, or None.

        visibility: seconds of its lease, unless it has its own
        """
        while True:
            recover = RECOVER if self._lease_keeper.in_time(queue) else 0
            popped = self._center.pop(queue, 1, recover=recover)
            self._poller.log_pop(queue, popped)
            if not popped.messages:
                if popped.bare or (popped.expired and popped.more):
                    continue
                return None
            delivery = popped.messages[0]
            try:
                content = envelope.unpack(delivery.body, delivery.id)
                message = Message(self._channel, content, delivery)
            except EnvelopeError as exc:
                logger.error("message %s of %s to DeadQueue: %s", delivery.id, queue, exc)
                self._center.reject(delivery, requeue=False, reason=str(exc))
                continue
            if no_ack:
                self._center.ack([delivery])
            else:
                self._lease_keeper.hold(delivery, visibility, popped.now_us)
                self._channel.qos.append(message, message.delivery_tag)
            return message

    # -- broadcasts

    def wants(self, subscription: Subscription, routing_key: str) -> bool:
        """Whether the queue gets a broadcast by this of its bindings."""
        every = self._subscriptions(subscription.queue)
        return first_that_matches(every, subscription.exchange, routing_key) is subscription

    def receive_broadcast(
        self, subscription: Subscription, routing_key: str, packed: bytes
    ) -> bool:
        """Deliver a broadcast; return whether the queue has a consumer."""
        consumer = self._consumers.get(subscription.queue)
        if consumer is None:
            return False
        try:
            message = Message(self._channel, envelope.unpack(packed), None, subscription)
        except EnvelopeError as exc:
            logger.error("broadcast of %s dropped: %s", subscription.exchange, exc)
            return False
        message.origin = (routing_key, packed)
        if not consumer.no_ack:
            self._channel.qos.append(message, message.delivery_tag)
        consumer.callback(message)
        return True
