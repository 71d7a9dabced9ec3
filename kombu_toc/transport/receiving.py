"""A delivered message, as Kombu's consumers get it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

from kombu import message as kombu_message
from kombu.transport import virtual

from ..center.calls import RECOVER
from ..center.exchanges import Subscription, first_that_matches
from ..consumer.holdings import log_pop
from ..consumer.state import WorkerPolicy
from ..errors import EnvelopeError
from ..model import message as envelope
from ..model.delivery import as_put
from ..model.failures import FailedTask
from ..model.results import Delivery
from ..model.topic import base_of

#: Delivery tags, unique within the process: one may be settled on a channel that is closed.
tags = count(1)


class Message(kombu_message.Message):
    """A delivered message.

    delivery: what the center knows of it; None for a broadcast
    """

    #: whether it goes to DeadQueue if it is acknowledged while what it is for runs, and the process
    #: that runs it is lost
    dies_if_lost = False

    #: whether that is so now, and the task library is to be told when the task has ended
    dies_later = False

    #: whether the task itself asks to be put back into its queue
    asks_requeue = False

    #: whether it was lost or failed: to be requeued costs it a retry then
    is_lost = False

    #: what the task library is told when it is acknowledged: how its task has ended, if its
    #: consumer knows that
    outcome = "done"

    #: what a traced channel knows of the span that received it
    trace: Any = None

    #: why it is rejected, and what went wrong: kept with it
    reason = error = ""

    #: it was given back unhandled: whoever still has it must not handle it
    given_back = False

    #: it was delivered, and its time has not come yet: whoever has it says by
    #: :meth:`call_when_due` what is to be done then
    is_early = False

    #: what is to be done when it is due, and if it is given back instead
    on_due: Callable[[], Any] | None = None
    on_given_back: Callable[[], Any] | None = None

    #: to be delivered again, a broadcast needs what it came as
    origin: tuple[str, bytes] | None = None

    def __init__(
        self,
        channel: Any,
        content: dict[str, Any],
        delivery: Delivery | None,
        subscription: Subscription | None = None,
    ) -> None:
        properties = content["properties"]
        info = properties.setdefault("delivery_info", {})
        tag = properties["delivery_tag"] = next(tags)
        headers = content["headers"]
        if delivery is not None and delivery.redelivered:
            info["redelivered"] = headers["redelivered"] = True
            if delivery.failures:
                headers["x-delivery-count"] = delivery.failures
        self.delivery = delivery
        self.subscription = subscription
        super().__init__(  # type: ignore[no-untyped-call]  # Kombu's
            body=content["body"],
            channel=channel,
            delivery_tag=tag,
            content_type=content["content-type"],
            content_encoding=content["content-encoding"],
            headers=headers,
            properties=properties,
            delivery_info=info,
        )

    def call_when_due(
        self, function: Callable[[], Any], otherwise: Callable[[], Any] | None = None
    ) -> None:
        """Call `function` at the message's action time; at once if that has come.

        otherwise: is called instead if the message is given back before
        """
        if self.is_early:
            self.on_due, self.on_given_back = function, otherwise
        else:
            function()

    def reject_log_error(self, logger: Any, errors: Any, requeue: bool = False) -> None:
        """Reject it as Celery does, whatever has become of its task: a requeue costs a retry,
        unless :attr:`asks_requeue`. (:meth:`requeue` and ``reject(requeue=True)``, by which a
        consumer of a program's own says "not now", cost none.)"""
        self.is_lost = not self.asks_requeue
        super().reject_log_error(logger, errors, requeue)  # type: ignore[no-untyped-call]

    def requeue_lost(self) -> None:
        """Requeue it, for who had it is gone: that costs a retry."""
        self.is_lost = True
        self.requeue()  # type: ignore[no-untyped-call]

    def note_release(self) -> None:
        """Note that the message is given back unhandled: nothing begins."""
        self.given_back = True
        self.on_due = None
        on_given_back, self.on_given_back = self.on_given_back, None
        if on_given_back is not None:
            on_given_back()

    def bury(self, reason: str, error: str = "") -> None:
        """Put it into DeadQueue although it was acknowledged: what it was for has failed. A
        broadcast has none."""
        if self.delivery is not None:
            self.reason, self.error = reason, error
            self.channel.poller.bury(self.delivery, reason, error)
            for observe in self.channel.observers:
                observe("bury", self)

    def note_outcome(self) -> None:
        """Its task has ended with an :attr:`outcome`, after it was acknowledged."""
        for observe in self.channel.observers:
            observe("end", self)

    def keep_failure(self, task: str, exception: str, *, dead: bool, **said: Any) -> None:
        """Its task has failed for good: it is listed among the failures of its queue, if there is
        room. Nothing is waited for.

        dead: the message is, or will be, a dead letter
        said: fields of :class:`.failures.FailedTask`; of one that was masked, the message is not
            kept
        """
        if self.delivery is None:
            return
        writer, delivery = self.channel.transport.failures, self.delivery
        steps = self.channel.center.registry.topic_of(delivery).steps
        is_small = len(delivery.body) <= writer.bounds.message
        writer.note(
            FailedTask(
                base_of(delivery.id),
                *(delivery.topic, task, exception),
                dead=dead,
                kept_id=delivery.id,
                priority=steps[min(delivery.step, len(steps) - 1)],
                traits=as_put(delivery.birth, 0),
                message=delivery.body if is_small and not (dead or said.get("masked")) else b"",
                **said,
            )
        )

    def return_broadcast(self) -> None:
        """A broadcast is to be delivered again."""
        if self.subscription is not None:
            self.subscription.returned.append(self.origin)

    @property
    def waited(self) -> bool:
        """Whether the center has held it back until its ``eta``."""
        # Celery's protocol 1 has the eta in the body, which nobody looks into here.
        return self.delivery is not None and self.headers.get("eta") is not None


# -- receiving: what the poller has fetched becomes messages for the consumers of a channel


logger = logging.getLogger(__name__)


class _Consumer(NamedTuple):
    callback: Callable[[Any], Any]
    no_ack: bool


class Receiver:
    """Delivers to the consumers of a channel: these methods are what the poller calls."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._center, self._poller = channel.center, channel.poller
        #: queue -> who consumes it
        self._consumers: dict[str, _Consumer] = {}
        #: asked before a firing of a schedule is delivered, with what it came as and its name:
        #: whether it is. If not, it has been settled. Without a name: whether that is known
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
        if not self._channel.policy.wants_early(message):
            return None
        if (
            envelope.SCHEDULE in message.headers
            and self.on_firing is not None
            and not self.on_firing(delivery, "")
        ):
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
            recover = RECOVER if self._channel.lease_keeper.in_time(queue) else 0
            popped = self._center.pop(queue, 1, recover=recover)
            log_pop(self._center, queue, popped)
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
                self._channel.lease_keeper.hold(delivery, visibility, popped.now_us)
                self._channel.qos.append(message, message.delivery_tag)
            return message

    # -- broadcasts

    def wants(self, subscription: Subscription, routing_key: str) -> bool:
        """Whether the queue gets a broadcast by this of its bindings."""
        every = self._channel.broadcast_queues.subscriptions(subscription.queue)
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


# -- what a channel has delivered and not yet settled, and how much more it may take


class QoS(virtual.QoS):
    """Prefetch window of a channel. Acknowledgements may come from any thread.

    What is settled goes straight to the poller, which sends it.
    """

    def __init__(self, channel: Any, prefetch_count: int = 0) -> None:
        super().__init__(channel, prefetch_count)  # type: ignore[no-untyped-call]  # Kombu's
        self._poller = channel.poller
        # Of Kombu's ordered one, nothing is used.
        self._delivered: dict[int, Message] = {}  # type: ignore[assignment]

    def append(self, message: Message, delivery_tag: int) -> None:
        self._delivered[delivery_tag] = message

    def unsettled(self) -> list[int]:
        """The delivery tags that are neither acknowledged nor rejected."""
        return list(self._delivered)

    def ack(self, delivery_tag: int) -> None:
        message = self._delivered.pop(delivery_tag, None)
        if message is None or (delivery := message.delivery) is None:
            return
        if message.dies_if_lost or (";" in delivery.birth and delivery.outlives_ack):
            self._end_place(message, delivery)
        else:
            self._poller.ack(delivery)
        for observe in self.channel.observers:
            observe("ack", message)

    def _end_place(self, message: Message, delivery: Delivery) -> None:
        """Acknowledge what has a place, or a unique key; that is held until the task has ended. So
        is what is to be dead if its task is lost."""
        policy = self.channel.policy
        execution = policy.execution(message)
        if execution is None:
            self._poller.ack_at_end(delivery)
        else:
            buries = message.dies_if_lost
            self._poller.ack_early(
                *(delivery, policy, execution),
                buries=buries,
                on_end=self._runs_on(message) if buries else None,
            )

    def _runs_on(self, message: Message) -> Callable[[bool], Any] | None:
        """What is acknowledged now is dead if its task is lost; returns what is to be called when
        that has ended: see :meth:`.holdings.EarlyAcks.add`."""
        return None

    def reject(self, delivery_tag: int, requeue: bool = False) -> None:
        message = self._delivered.pop(delivery_tag, None)
        if message is None:
            return
        delivery, on_purpose = message.delivery, requeue and not message.is_lost
        if on_purpose and delivery is not None:
            spent = self.channel.center.commands.spent_requeues(delivery)
            if spent:
                message.reason = f"{spent}: {message.reason}" if message.reason else spent
                requeue = on_purpose = False
        self._reject(message, requeue, on_purpose)

    def _reject(self, message: Message, requeue: bool, on_purpose: bool) -> None:
        if message.delivery is not None:
            how = (requeue, message.reason, message.error)
            self._poller.reject(message.delivery, *how, on_purpose=on_purpose)
        elif requeue:
            message.return_broadcast()
        for observe in self.channel.observers:
            observe("requeue" if requeue else "reject", message)

    def release(self, message: Message) -> None:
        """Release a message, if it is not settled."""
        if self._delivered.pop(message.delivery_tag, None) is not None:
            self._release([message])

    def take_back(self, message: Message) -> bool:
        """Whether it is not settled; then it is forgotten here, for it is given back."""
        if self._delivered.pop(message.delivery_tag, None) is None:
            return False
        for observe in self.channel.observers:
            observe("release", message)
        return True

    def restore_unacked(self) -> list[Any]:
        """Release whatever is not settled, but for what the worker still executes."""
        taken = []
        for tag, message in list(self._delivered.items()):
            # What is kept stays here: it is settled by its tag, later, through this channel.
            kept = self.channel.policy.keeps(message)
            if not kept and self._delivered.pop(tag, None) is not None:
                taken.append(message)
        self._release(taken)
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """As restore_unacked, when the channel closes or the program ends; once."""
        self._on_collect.cancel()
        if not self.restore_at_shutdown or not self.channel.do_restore:
            return
        if self._delivered:
            try:
                self.restore_unacked()
            except Exception:
                print("cannot give messages back:", sys.exc_info()[1], file=stderr or sys.stderr)
                raise

    def _release(self, messages: list[Message]) -> None:
        """Give messages back unhandled. What was fetched ahead of its time is as if it had not
        been delivered."""
        for message in messages:
            message.note_release()
        for handed in (True, False):
            some = [m.delivery for m in messages if m.delivery and m.is_early is not handed]
            if some:
                self._poller.release(some, handed=handed)
        for message in messages:
            if message.delivery is None:
                message.return_broadcast()
            for observe in self.channel.observers:
                observe("release", message)


# -- how much a consumer can take

#: Seconds for which a worker's processes have work queued: the round trip to Redis is hidden.
AHEAD = 0.02


class Capacity(NamedTuple):
    """How much a consumer can take."""

    free: int  #: that many could start at once; negative if more is queued than can start
    room: int  #: that many are taken, those included
    batch: int  #: the room there is when nothing is queued, and as many as free come free


def capacity_of(policy: WorkerPolicy, room: int, held: int, window: int) -> Capacity:
    """What a consumer can take, by what its owner could start and by its prefetch window.

    room: messages that still fit into the window; window: messages that fit into it when empty
    held: messages that are fetched, and could start none yet
    """
    idle = policy.idle_slots()
    if idle is None:
        return Capacity(room, room, window)
    free = idle - held
    if not policy.prefetches:
        return Capacity(free, min(room, free), 0)
    ahead = policy.idle_within(AHEAD)
    return Capacity(free, min(room, free + ahead), min(window, ahead))
