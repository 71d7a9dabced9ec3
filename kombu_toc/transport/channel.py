"""The channel: Kombu's operations in terms of the timeout center."""

from __future__ import annotations

import json
import logging
import os
import re
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import count
from secrets import token_urlsafe
from typing import Any, NamedTuple

from amqp.protocol import queue_declare_ok_t
from kombu import message as kombu_message
from kombu.exceptions import ChannelError, KombuError
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.utils.uuid import uuid
from redis.exceptions import ResponseError

from ..center.bindings import Bindings, binding
from ..center.broadcasts import (
    Subscription,
    begin,
    broadcasting,
    first_that_matches,
    keepers,
    part_of_binding,
    recall,
    remember,
)
from ..center.center import RECOVER, RELOAD, REMEMBER, SENT, Delivery, Put, ScriptCall
from ..client.options import suggestion
from ..compat import kombu_channel
from ..consumer.clock import SendersClock
from ..consumer.pipe import BROKEN
from ..consumer.policy import DefaultPolicy, WorkerPolicy
from ..consumer.snapshot import report
from ..errors import ActionTimeError, AlreadyThereError, EnvelopeError, NotPermittedError
from ..model import envelope
from ..model.scores import MAX_RETRIES
from ..model.topic import Declaration, Limits, Topic
from ..scripts.call import Countdown
from .qos import QoS

try:
    from kombu.exceptions import BatchPublishError
except ImportError:  # Kombu before 5.7 publishes no batches

    class BatchPublishError(KombuError):  # type: ignore[no-redef]
        """A batch failed; what of it was delivered is uncertain."""


logger = logging.getLogger(__name__)

#: Seconds for which a worker's processes have work queued: the round trip to Redis is hidden.
AHEAD = 0.02

#: Messages that one pop takes where neither a prefetch count nor a worker's pool sets a bound.
BATCH = 100

#: Seconds that a publish takes before it fails for a node of a Cluster that cannot be reached: as
#: Celery pauses before it connects again.
ATTEMPT_PAUSE = 0.2

#: Messages of a batch for which it is forgotten, when it is complete, that they were put; of more,
#: this goes by itself.
MAX_NOTED = 50_000

#: Queues whose declarations a channel remembers.
MAX_KNOWN = 4096

#: Limits of a topic that a queue's arguments may set.
_LIMITS = ("slots", "retries", *Limits._fields)
_ARGUMENTS = {f"x-{name.replace('_', '-')}": name for name in _LIMITS}

#: Other arguments that have the effect that is meant: priorities need no declaration here.
_OTHER_ARGUMENTS = frozenset(("x-expires", "x-max-priority"))

#: What RabbitMQ knows and this transport does not.
_RABBITMQS = frozenset(
    (
        "x-consumer-timeout",
        "x-dead-letter-exchange",
        "x-dead-letter-routing-key",
        "x-dead-letter-strategy",
        "x-delivery-limit",
        "x-max-length",
        "x-max-length-bytes",
        "x-message-ttl",
        "x-overflow",
        "x-queue-leader-locator",
        "x-queue-mode",
        "x-queue-type",
        "x-quorum-initial-group-size",
        "x-single-active-consumer",
    )
)

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)
_FRACTION = re.compile(r"\.(\d+)")

#: Delivery tags, unique within the process: one may be settled on a channel that is closed.
_tags = count(1)


class Capacity(NamedTuple):
    """How much a consumer can take."""

    free: int  #: that many could start at once; negative if more is queued than can start
    room: int  #: that many are taken, those included
    batch: int  #: the room there is when nothing is queued, and as many as free come free


def _naive_is_utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=timezone.utc)


_aware: Callable[[datetime], datetime] = _naive_is_utc


#: Reads an ``eta`` that datetime does not.
_read: Callable[[str], datetime | None] = datetime.fromisoformat


def use_timezone(
    aware: Callable[[datetime], datetime],
    read: Callable[[str], datetime | None] = datetime.fromisoformat,
) -> None:
    """Say how an ``eta`` is understood.

    aware: gives one without time zone the zone that it is in; UTC unless told
    read: makes a time of a text that `datetime.fromisoformat` does not understand, lest a
        sender refuses what a consumer can read
    """
    global _aware, _read
    _aware, _read = aware, read


def eta_us(eta: Any) -> int:
    """An ``eta`` header as microseconds since the epoch.

    eta: ISO 8601, or a datetime. Raises ValueError or TypeError if it is neither.
    """
    if not isinstance(eta, datetime):
        if not isinstance(eta, str):
            raise TypeError(f"not a time: {eta!r}")
        try:
            eta = datetime.fromisoformat(eta)
        except ValueError:
            # Python 3.10 knows no 'Z' and only three or six digits of a second's fraction.
            text = _FRACTION.sub(lambda m: "." + m[1][:6].ljust(6, "0"), eta, count=1)
            try:
                eta = datetime.fromisoformat(text.replace("Z", "+00:00"))
            except ValueError:
                eta = _read(eta)
                if eta is None:
                    raise
    if eta.tzinfo is None:
        eta = _aware(eta)
    return (eta - _EPOCH) // _MICROSECOND


class TopicExchange(virtual.exchange.TopicExchange):
    """Patterns as AMQP has them, in every version of Kombu: ``*`` is one word."""

    wildcards = {"*": r"[^\.]+", "#": r".*?"}


class Message(kombu_message.Message):
    """A delivered message.

    delivery: what the center knows of it; None for a broadcast
    """

    def __init__(
        self,
        channel: Channel,
        content: dict[str, Any],
        delivery: Delivery | None,
        subscription: Subscription | None = None,
    ) -> None:
        properties = content["properties"]
        info = properties.setdefault("delivery_info", {})
        tag = properties["delivery_tag"] = next(_tags)
        headers = content["headers"]
        if delivery is not None and delivery.failures:
            info["redelivered"] = True
            headers["x-delivery-count"] = delivery.failures
        self.delivery = delivery
        self.subscription = subscription
        super().__init__(
            body=content["body"],
            channel=channel,
            delivery_tag=tag,
            content_type=content["content-type"],
            content_encoding=content["content-encoding"],
            headers=headers,
            properties=properties,
            delivery_info=info,
        )
        #: why it is rejected, and what went wrong: kept with it
        self.reason = self.error = ""
        #: it was given back unhandled: whoever still has it must not handle it
        self.given_back = False
        #: it was handed over, and its time has not come yet: whoever has it says by
        #: :meth:`when_due` what is to be done then
        self.early = False
        #: what is to be done when it is due
        self.begin: Callable[[], Any] | None = None
        #: what is to be done if it is given back instead
        self.otherwise: Callable[[], Any] | None = None
        #: to be delivered again, a broadcast needs what it came as
        self.origin: tuple[str, bytes] | None = None

    def when_due(
        self, function: Callable[[], Any], otherwise: Callable[[], Any] | None = None
    ) -> None:
        """Call it at the message's action time; now if that has come. If the message is given back
        before, call `otherwise`."""
        if self.early:
            self.begin, self.otherwise = function, otherwise
        else:
            function()

    def give_up(self) -> None:
        """It is given back unhandled: nothing begins."""
        self.given_back = True
        self.begin = None
        otherwise, self.otherwise = self.otherwise, None
        if otherwise is not None:
            otherwise()

    @property
    def waited(self) -> bool:
        """Whether the center has held it back until its ``eta``."""
        # Celery's protocol 1 has the eta in the body, which nobody looks into here.
        return self.delivery is not None and self.headers.get("eta") is not None


class _PublishName(str):
    """The producer's name, a dot, and a number: what no other publish has."""

    __slots__ = ("slots",)

    #: queue -> slot count by which it was sent there first: where a repeated publish is recognised
    slots: dict[str, int]


def _publish_of(name: str, batch: PublishBatch | None = None) -> tuple[str, str]:
    """(producer, name of the publish): of a producer, its latest publish is remembered. In a batch
    each message is as one of a producer of its own, for all of them may be repeated."""
    return name if batch is not None else name.rpartition(".")[0], name


def _only_if_added(parse: Callable[[Any], Put]) -> Callable[[Any], Put]:
    def added(raw: Any) -> Put:
        put = parse(raw)
        if not put.added:
            raise AlreadyThereError(f"there is a message {put.id!r} already")
        return put

    return added


class _Receiver(NamedTuple):
    callback: Callable[[Any], Any]
    no_ack: bool


class Channel(virtual.Channel):
    """See the module."""

    QoS = QoS
    Message = Message
    exchange_types = {**virtual.Channel.exchange_types, "topic": TopicExchange}
    supports_fanout = True
    do_restore = True

    #: What the channel's owner can take and what it keeps; a worker sets its own.
    policy: WorkerPolicy = DefaultPolicy()

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        kombu_channel.check(self)
        self.transport = connection
        self.settings = connection.settings
        self.center = connection.center
        self.poller = connection.poller
        self.heartbeat = connection.heartbeat
        self._pid = os.getpid()
        #: by which the heartbeat knows who uses a transient queue
        self.channel_key = next(_tags)
        self._receivers: dict[str, _Receiver] = {}
        #: queues that go away and are bound to fanout exchanges: what is read for each binding
        self._fanout_queues: dict[str, list[Subscription]] = {}
        #: queues bound to a fanout exchange that keep what is broadcast, and are topics: what is
        #: read of the stream for them all the same
        self._kept: dict[str, list[Subscription]] = {}
        #: queues that go away and are topics, for they are bound to other exchanges
        self._routed: set[str] = set()
        #: milliseconds for which a transient queue outlives its last refresh
        self._transient: dict[str, int] = {}
        #: queues that others have bound, and that go stale without them
        self._others_transient: set[str] = set()
        self._auto_delete: set[str] = set()
        self._exclusive: set[str] = set()
        #: process, name, numbers
        self._producer: tuple[int, str, Iterator[int]] | None = None
        self._clock = SendersClock()
        #: queue -> monotonic seconds when its declaration was read
        self._read_at: dict[str, float] = {}
        #: queue -> what was asked for when it was declared and has no effect, and why
        self.ignored: dict[str, list[str]] = {}

    # -- publishing

    def basic_publish(
        self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any
    ) -> Any:
        """Publish a prepared message.

        Raises ActionTimeError if its time cannot be read or lies beyond what can be kept,
        AlreadyThereError if it has the property ENSURE and its queue has a message of its id.
        """
        properties = message["properties"]
        # Kombu repeats a publish with the same properties: it stays one message. (Any other tag
        # is of a delivered message, ours or another transport's, whose properties somebody sends
        # along, and perhaps more than once.)
        if not isinstance(properties.get("delivery_tag"), _PublishName):
            properties["delivery_tag"] = self._name_publish()
        properties["delivery_info"].update(exchange=exchange, routing_key=routing_key)
        # Handed on, not kept: threads may share the channel.
        batch = kwargs.get("_publish_batch")
        if exchange:
            return self.typeof(exchange).deliver(message, exchange, routing_key, batch=batch)
        return self._put(routing_key, message, batch=batch)

    def _name_publish(self) -> _PublishName:
        """A name that no other publish has: its producer's, and a number."""
        producer = self._producer
        if producer is None or producer[0] != os.getpid():  # a forked child is another producer
            producer = self._producer = (os.getpid(), token_urlsafe(9), count(1))
        name = _PublishName(f"{producer[1]}.{next(producer[2])}")
        name.slots = {}
        return name

    def forget_clock(self) -> None:
        """Another server answers from now on."""
        self._clock.forget()

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        """What ``Producer.batch()`` publishes through."""
        return PublishBatch(self, max_size)

    def _put(
        self,
        queue: str,
        message: dict[str, Any],
        batch: PublishBatch | None = None,
        **kwargs: Any,
    ) -> None:
        topic = self._topic(queue)
        slots = message["properties"]["delivery_tag"].slots.setdefault(queue, topic.slots)
        if slots != topic.slots:  # resharded between two attempts
            topic = replace(topic, declaration=replace(topic.declaration, slots=slots))
        publish = None
        if not topic.declaration.expires:  # what goes away by itself is no harm twice: a reply
            publish = _publish_of(message["properties"]["delivery_tag"], batch)
        call = self._putting(topic, message, publish)
        if batch is not None:
            batch.add(call, call.keys[SENT])
            return
        began = time.monotonic()
        try:
            [put] = self.center.run_puts([call], wait=not topic.declaration.expires)
        except BaseException as exc:
            self._clock.forget()
            if self.center.clustered and isinstance(exc, BROKEN):
                self.transport.miss(call.keys[0])
                # Kombu pauses between attempts only if it cannot connect; but to the others it can.
                time.sleep(ATTEMPT_PAUSE)
            raise
        if put.now_us is not None and not self.center.clustered:  # whose clocks may differ
            self._clock.sample(put.now_us, began)

    def _put_fanout(
        self,
        exchange: str,
        message: dict[str, Any],
        routing_key: str,
        batch: PublishBatch | None = None,
        **kwargs: Any,
    ) -> None:
        call = broadcasting(
            self.center,
            exchange,
            routing_key,
            envelope.pack(message, deflate=False),
            self.settings.toc_fanout_length,
            _publish_of(message["properties"]["delivery_tag"], batch),
        )
        if batch is not None:
            batch.add(call, call.keys[2])
            bound = Bindings(self.center).kept(exchange)
        else:
            # Celery ends a worker whose greeting to the others fails otherwise than by its
            # connection; and a broadcast is kept for a while at best.
            [bound] = self.center.run_puts([call], wait=False)
        for queue in keepers(bound, routing_key):
            self._put(queue, message, batch=batch)

    def _putting(
        self,
        topic: Topic,
        message: dict[str, Any],
        publish: tuple[str, str] | None = None,
        remember: int = REMEMBER,
    ) -> ScriptCall:
        headers = message.get("headers") or {}
        tag = message["properties"]["delivery_tag"]
        id = named = headers.get("id")
        if not isinstance(id, str) or not id:
            id, named = tag, None
        at_us, delay_us = self._action_time(headers, message["properties"], id)
        waits = at_us is not None or delay_us is not None
        basis = headers.get("x-slot-basis")
        basis = None if basis is None else str(basis)
        self.center.admit(topic, named, basis)
        message["properties"]["k"] = token = f"{zlib.crc32(tag.encode()):08x}"
        packed = envelope.pack(message, deflate=waits and self.settings.toc_deflate, id=id)
        ensure = bool(message["properties"].get(envelope.ENSURE))
        call = self.center.putting(
            topic,
            id,
            packed,
            at_us=at_us,
            delay_us=delay_us,
            basis=basis,
            priority=self._get_message_priority(message),
            token=token,
            ensure=ensure,
            publish=publish,
            remember=remember,
            # A retry is sent before its task ends, or after it was acknowledged: to refuse it, as a
            # server does that is full, would be to lose it.
            replaces=bool(headers.get("retries")),
        )
        return call._replace(parse=_only_if_added(call.parse)) if ensure else call

    def _action_time(
        self, headers: dict[str, Any], properties: dict[str, Any], id: str
    ) -> tuple[int | Countdown | None, int | None]:
        """(microseconds since the epoch, microseconds from now); both None for now.

        Raises ActionTimeError if it cannot be told: a worker could not read it either.
        """
        eta = headers.get("eta")
        if eta is not None:
            try:
                at_us = eta_us(eta)
            except (ValueError, TypeError, OverflowError) as exc:
                raise ActionTimeError(
                    f"task {id}: its eta {eta!r:.80} is not a time; pass a datetime, or a text "
                    "such as '2030-01-31T10:00:00+00:00'"
                ) from exc
            if properties.get(envelope.COUNTDOWN):
                # What is left of it now: less than at first if Kombu repeats the publish.
                left_us = at_us - time.time_ns() // 1000
                if left_us <= 0:
                    return None, None
                now = time.monotonic()
                now_us = self._clock.at(now)
                # If nothing was heard of the clock, it begins when it gets there: a bit later.
                at_us = None if now_us is None else now_us + left_us
                return Countdown(at_us, now + left_us / 1_000_000), None
            return at_us, None
        delay = headers.get("x-delay")
        if delay is not None:
            try:
                return None, int(float(delay) * 1000)
            except (ValueError, TypeError, OverflowError) as exc:
                raise ActionTimeError(
                    f"message {id}: its x-delay {delay!r:.80} is not a number of milliseconds"
                ) from exc
        return None, None

    # -- consuming

    def basic_consume(
        self,
        queue: str,
        no_ack: bool,
        callback: Callable[[Any], Any],
        consumer_tag: str,
        **kwargs: Any,
    ) -> None:
        """Deliver what comes to a queue to `callback`.

        Raises NotPermittedError if this user may not.
        """
        self.connection.check_consumer()
        self._tag_to_queue[consumer_tag] = queue
        self._active_queues.append(queue)
        self._consumers.add(consumer_tag)
        self._receivers[queue] = _Receiver(callback, no_ack)
        if not self._only_reads(queue):
            if not self._topic(queue).declaration.expires:
                self.heartbeat.consumes(queue, self.channel_key)
            self.poller.consume(self, queue)
        for subscription in self._subscriptions(queue):
            self.poller.follow(self, subscription)

    def _only_reads(self, queue: str) -> bool:
        """Whether all that the queue gets are broadcasts, which it reads: it is no topic."""
        return queue in self._fanout_queues and queue not in self._routed

    def _subscriptions(self, queue: str) -> list[Subscription]:
        """By which broadcasts are read for a queue, in the order of its bindings."""
        return [*self._fanout_queues.get(queue, ()), *self._kept.get(queue, ())]

    def basic_cancel(self, consumer_tag: str) -> None:
        """Deliver no more to this consumer.

        With the last one goes an auto-delete queue: at once if nobody else can consume it, that
        is, if it is exclusive or bound to fanout exchanges alone, else when it goes stale.
        """
        if consumer_tag not in self._consumers:
            return
        self._consumers.remove(consumer_tag)
        queue = self._tag_to_queue.pop(consumer_tag)
        with suppress(ValueError):
            self._active_queues.remove(queue)
        if queue in self._active_queues:  # it has another consumer
            return
        self._receivers.pop(queue, None)
        if os.getpid() != self._pid:
            return
        for subscription in self._subscriptions(queue):
            followed = self.poller.unfollow(subscription)
            if followed is not None:
                remember(self.transport.identity, followed)
        if not self._only_reads(queue):
            self.heartbeat.consumes_no_more(queue, self.channel_key)
            self.poller.cancel(self, queue)
        if queue in self._auto_delete and not self._has_other_consumer(queue):
            if queue in self._exclusive or self._only_reads(queue):
                self._delete_transient(queue)
            else:
                # Others may consume it, elsewhere: they keep it, or it goes stale.
                self.heartbeat.leave_topic(queue, self.channel_key)
                for exchange, routing_key, arguments in self.state.queue_bindings(queue):
                    member = self._member(queue, exchange, routing_key, arguments)
                    self.heartbeat.leave_binding(exchange, member, self.channel_key)

    def _has_other_consumer(self, queue: str) -> bool:
        return any(
            queue in channel._active_queues
            for channel in self.transport.channels
            if channel is not self
        )

    def _delete_transient(self, queue: str) -> None:
        """Delete it now, or as soon as the server can be reached again."""
        bindings: dict[str, list[str]] = {}
        try:
            for exchange, routing_key, arguments in list(self.state.queue_bindings(queue)):
                members = self._members(queue, exchange, routing_key, arguments)
                bindings.setdefault(exchange, []).extend(members)
            self.queue_delete(queue)
        except BROKEN as exc:
            logger.debug("queue %s is to be deleted later: %s", queue, exc)
            self._forget_queue(queue)
            for exchange, members in bindings.items():
                for member in members:
                    self.heartbeat.forget_binding(exchange, member)
            self.heartbeat.delete_later(queue, bindings)

    def after_reply_message_received(self, queue: str) -> None:
        """Kombu has the answers that it has asked for: their queue is not needed any more."""
        self._delete_transient(queue)

    def take_ahead(self, delivery: Delivery) -> Message | None:
        """The message, if the queue's consumer may have it before it is due: :meth:`hand_over`
        is next."""
        receiver = self._receivers.get(delivery.topic)
        if receiver is None or receiver.no_ack:
            return None
        try:
            message = Message(self, envelope.unpack(delivery.body, delivery.id), delivery)
        except EnvelopeError:  # told when it is due
            return None
        if not self.policy.wants_early(message):
            return None
        message.early = True
        self.qos.append(message, message.delivery_tag)
        return message

    def take_back(self, message: Message) -> bool:
        """Take back what was handed over ahead of its time and has not begun; whether it is there
        to be given back."""
        if not self.qos.take_back(message):
            return False
        message.give_up()
        return True

    def hand_over(self, message: Message) -> None:
        """Give it to the queue's consumer."""
        self._receivers[message.delivery.topic].callback(message)

    def receive(self, delivery: Delivery) -> None:
        """Hand a message to the queue's consumer."""
        receiver = self._receivers.get(delivery.topic)
        if receiver is None:
            self.poller.release([delivery])
            return
        try:
            message = Message(self, envelope.unpack(delivery.body, delivery.id), delivery)
        except EnvelopeError as exc:
            self.poller.give_back(delivery, requeue=False, reason=str(exc))
            return
        if receiver.no_ack:
            self.poller.settle(delivery)
        else:
            self.qos.append(message, message.delivery_tag)
        receiver.callback(message)

    def wants(self, subscription: Subscription, routing_key: str) -> bool:
        """Whether the queue gets a broadcast by this of its bindings."""
        every = self._subscriptions(subscription.queue)
        return first_that_matches(every, subscription.exchange, routing_key) is subscription

    def receive_broadcast(
        self, subscription: Subscription, routing_key: str, packed: bytes
    ) -> bool:
        """Hand a broadcast to the queue's consumer; return whether it has one."""
        receiver = self._receivers.get(subscription.queue)
        if receiver is None:
            return False
        try:
            message = Message(self, envelope.unpack(packed), None, subscription)
        except EnvelopeError as exc:
            logger.error("broadcast of %s dropped: %s", subscription.exchange, exc)
            return False
        message.origin = (routing_key, packed)
        if not receiver.no_ack:
            self.qos.append(message, message.delivery_tag)
        receiver.callback(message)
        return True

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Message | None:
        """One message that is due, or None."""
        topic = self._topic(queue)
        visibility = topic.declaration.limits(self.center.limits).visibility
        while True:
            recover = RECOVER if self.heartbeat.in_time(queue) else 0
            popped = self.center.pop(queue, 1, recover=recover)
            self.poller.tell(queue, popped)
            if not popped.messages:
                if popped.bare:
                    continue
                return None
            delivery = popped.messages[0]
            try:
                message = Message(self, envelope.unpack(delivery.body, delivery.id), delivery)
            except EnvelopeError as exc:
                logger.error("message %s of %s to DeadQueue: %s", delivery.id, queue, exc)
                self.center.reject(delivery, requeue=False, reason=str(exc))
                continue
            if no_ack:
                self.center.ack([delivery])
            else:
                self.heartbeat.hold(delivery, visibility)
                self.qos.append(message, message.delivery_tag)
            return message

    def capacity(self, held: int, early: int = 0) -> Capacity:
        """How much this channel can take.

        held: messages that are fetched and not yet handed to a consumer that can start them
        early: of these, how many it has been handed ahead of their time
        """
        qos = self.qos
        most = qos.can_consume_max_estimate()
        if most is None:
            # Without a bound and without an event loop, a consumer gets what it asks for.
            most = BATCH if self.poller.steady else 1
        room = most - (held - early) if qos.can_consume() else 0
        policy = self.policy
        idle = policy.idle_slots()
        if idle is None:
            return Capacity(room, room, self.window())
        free = idle - held
        if not policy.prefetches:
            return Capacity(free, min(room, free), 0)
        ahead = policy.idle_within(AHEAD)
        return Capacity(free, min(room, free + ahead), min(self.window(), ahead))

    def report(self) -> dict[str, Any]:
        """What this process has in hand and has counted; see :func:`.report.report`."""
        return report(self)

    def window(self) -> int:
        """The prefetch count, or what stands for it."""
        return self.qos.prefetch_count or BATCH

    # -- settling

    def basic_ack(self, delivery_tag: Any, multiple: bool = False) -> None:
        """Acknowledge a message; with `multiple`, and those delivered before it."""
        if multiple:
            for tag in self.qos.unsettled():
                if tag <= delivery_tag:
                    self.qos.ack(tag)
        else:
            self.qos.ack(delivery_tag)

    def basic_recover(self, requeue: bool = False) -> None:
        """Give back everything that is not settled."""
        if not requeue:
            raise NotImplementedError("Does not support recover(requeue=False)")
        self.qos.restore_unacked()

    def settle(self, message: Message) -> None:
        """The QoS has taken an acknowledgement."""
        if message.delivery is not None:
            self.poller.settle(message.delivery)

    def give_back(self, message: Message, requeue: bool) -> None:
        """The QoS has taken a rejection."""
        if message.delivery is not None:
            self.poller.give_back(message.delivery, requeue, message.reason, message.error)
        elif requeue and message.subscription is not None:
            message.subscription.returned.append(message.origin)

    def keeps(self, message: Message) -> bool:
        """Whether it stays with this process although the channel closes."""
        return self.policy.keeps(message)

    def release(self, messages: list[Message]) -> None:
        """Give messages back unhandled."""
        for message in messages:
            message.give_up()
        self.poller.release([m.delivery for m in messages if m.delivery is not None])
        for message in messages:
            if message.delivery is None and message.subscription is not None:
                message.subscription.returned.append(message.origin)

    # -- queues

    def prepare_queue_arguments(self, arguments: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return to_rabbitmq_queue_arguments(arguments, **kwargs)

    def queue_declare(
        self,
        queue: str | None = None,
        passive: bool = False,
        durable: bool = False,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: dict[str, Any] | None = None,
        nowait: bool = False,
        **kwargs: Any,
    ) -> queue_declare_ok_t:
        """Declare a queue. Of its arguments, ``x-slots``, ``x-retries``, ``x-expires``
        (milliseconds) and those named for the other limits are used, such as ``x-visibility``
        and ``x-retry-backoff`` (seconds).

        Raises SlotCountError if it was declared with another slot count, PriorityStepsError if
        with other steps than ``priority_steps`` says, and Kombu's
        ChannelError if `passive` and it was not.
        """
        queue = queue or f"amq.gen-{uuid()}"
        if passive:
            if self.center.declared(queue) is None:
                raise ChannelError(
                    f"NOT_FOUND - no queue {queue!r}", (50, 10), "Channel.queue_declare", "404"
                )
            return queue_declare_ok_t(queue, self._size(queue), 0)
        arguments = arguments or {}
        expires = arguments.get("x-expires")
        if exclusive or auto_delete or expires:
            self.heartbeat.withdraw_deletion(queue)
            stale = int(self.settings.toc_stale_after * 1000)
            self._transient[queue] = max(int(expires or 0), stale)
            if auto_delete:
                self._auto_delete.add(queue)
            if exclusive:
                self._exclusive.add(queue)
        limits = {_ARGUMENTS[n]: value for n, value in arguments.items() if n in _ARGUMENTS}
        if queue in self._transient and not limits:
            # Perhaps it will be bound to a fanout exchange, and is no topic at all.
            return queue_declare_ok_t(queue, 0, 0)
        topic = self._declare_topic(queue, limits)
        if queue not in self._transient:
            self.ignored[queue] = [*_unknown(arguments), *self._overruled(topic, limits)]
        return queue_declare_ok_t(queue, self._size(queue), 0)

    def _overruled(self, topic: Topic, limits: dict[str, Any]) -> Iterator[str]:
        """Of what was asked for, what another declaration had settled before."""
        asked = {**self.settings.toc_topics.get(topic.name, {}), **limits}
        if self.settings.toc_slots:
            asked.setdefault("slots", self.settings.toc_slots)
        if self.settings.toc_retries != MAX_RETRIES:
            asked.setdefault("retries", self.settings.toc_retries)
        standing = topic.declaration
        for name, value in asked.items():
            holds = getattr(standing, name)
            if value is None or holds == getattr(Declaration.of(topic.name, **{name: value}), name):
                continue
            if name == "slots":
                why = f"it was resharded to {holds}"
            elif holds is None:
                why = "it was declared without, and the first declaration stands"
            else:
                why = f"it was declared with {holds:g}, and the first declaration stands"
            yield f"{name}={value!r} ({why})"

    def _declare_topic(self, queue: str, limits: dict[str, Any]) -> Topic:
        limits = {**self.settings.toc_topics.get(queue, {}), **limits}
        expires = self._transient.get(queue)
        if expires:
            self.heartbeat.withdraw_deletion(queue)
            limits.setdefault("slots", 1)
        elif self.settings.toc_slots:
            limits.setdefault("slots", self.settings.toc_slots)
        limits.setdefault("retries", self.settings.toc_retries)
        topic = self.center.declare(queue, expires=expires, **limits)
        if expires:
            # The keys live as long as the standing declaration says, whatever is asked now.
            standing = topic.declaration.expires or expires
            self.heartbeat.keep_topic(queue, min(expires, standing), self.channel_key)
        return topic

    def _topic(self, queue: str) -> Topic:
        """The topic of a queue; declared if nobody has done so."""
        known = self.center.known(queue)
        now = time.monotonic()
        if now - self._read_at.get(queue, -RELOAD) >= RELOAD:
            # It may have been deleted and declared anew, with other slots, by somebody else.
            if len(self._read_at) > MAX_KNOWN:  # reply queues come and go
                self._read_at.clear()
                self._others_transient.clear()
            known = self.center.declared(queue)
            if known is not None:
                self.center.agreed(known)
            self._read_at[queue] = now
        if queue in self._transient:
            expires = known is not None and known.declaration.expires
            return known if expires else self._declare_topic(queue, {})
        if known is None and queue in self._others_transient:
            # Its consumer has gone, or is about to declare it: it must not stay for ever.
            stale = int(self.settings.toc_stale_after * 1000)
            return self.center.declare(queue, slots=1, expires=stale)
        return known or self._declare_topic(queue, {})

    def queue_bind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Bind a queue to an exchange; to one of type fanout, for the messages to come.

        A queue that is neither exclusive nor auto-delete and does not expire keeps what is
        broadcast until it is consumed, and its consumers share it. Any other reads the
        exchange's stream, for as long as it is consumed.
        """
        exchange = exchange or "amq.direct"
        kind = self.typeof(exchange)
        self.state.binding_declare(queue, exchange, routing_key, arguments)
        member = self._member(queue, exchange, routing_key, arguments)
        ttl = self._transient.get(queue, 0)
        if ttl:
            self.heartbeat.withdraw_deletion(queue)
        if kind.type != "fanout" or not ttl:
            # Before anybody can send to it: as a transient one, if it is one.
            self._topic(queue)
        Bindings(self.center).add(exchange, member, ttl)
        if ttl:
            self.heartbeat.keep_binding(exchange, member, ttl, self.channel_key)
        if kind.type == "fanout":
            self._read_from_now(queue, exchange, routing_key or "", member, bool(ttl))
        elif ttl and queue not in self._routed:
            self._routed.add(queue)
            if queue in self._fanout_queues and queue in self._active_queues:
                self.poller.consume(self, queue)

    def _read_from_now(
        self, queue: str, exchange: str, routing_key: str, member: str, transient: bool
    ) -> None:
        """Read what is broadcast to a queue by this binding, from now on or from where it was left.

        transient: the queue keeps no copy of its own
        """
        followed = (self._fanout_queues if transient else self._kept).setdefault(queue, [])
        if any((one.exchange, one.binding) == (exchange, routing_key) for one in followed):
            return
        known = recall(self.transport.identity, queue, exchange, routing_key)
        last = begin(
            self.center,
            self._streams(exchange, member, transient),
            known.last if known is not None else {},
        )
        subscription = Subscription(queue, exchange, routing_key, last, kept=not transient)
        if followed:
            subscription.returned = followed[0].returned
        if known is not None and known.returned is not subscription.returned:
            subscription.returned += known.returned
            known.returned.clear()
        followed.append(subscription)
        if queue in self._active_queues:
            self.poller.follow(self, subscription)

    def _read_no_more(self, of: Callable[[Subscription], bool]) -> None:
        """Read no more broadcasts for what was unbound: the subscriptions of which `of` is true."""
        for followed in (*self._fanout_queues.values(), *self._kept.values()):
            for subscription in [one for one in followed if of(one)]:
                followed.remove(subscription)
                self.poller.unfollow(subscription)

    def queue_unbind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", *args: Any, **kw: Any
    ) -> None:
        """Undo a binding."""
        exchange = exchange or "amq.direct"
        self.state.binding_delete(queue, exchange, routing_key)
        self._unbind(queue, exchange, routing_key, None)
        bound = (queue, exchange, routing_key or "")
        self._read_no_more(lambda one: one.bound == bound)

    def _streams(self, exchange: str, member: str, parts: bool) -> list[str]:
        """The streams that are read for a binding."""
        keys = self.center.keys
        # What is read for a queue that keeps a copy is of producers that know of no parts.
        some = json.loads(member)[4:5] if parts else []
        return [keys.fanout(exchange), *(keys.part(exchange, part) for part in some)]

    def _member(self, queue: str, exchange: str, routing_key: str, arguments: Any) -> str:
        kind = self.typeof(exchange)
        reads = kind.type == "fanout" and queue in self._transient
        part = part_of_binding(routing_key or "") if reads else None
        return binding(kind.type, *kind.prepare_bind(queue, exchange, routing_key, arguments), part)

    def _unbind(self, queue: str, exchange: str, routing_key: str, arguments: Any) -> None:
        members = self._members(queue, exchange, routing_key, arguments)
        for member in members:
            self.heartbeat.forget_binding(exchange, member)
        Bindings(self.center).remove(exchange, *members)

    def _members(self, queue: str, exchange: str, routing_key: str, arguments: Any) -> list[str]:
        """A binding in all the ways in which it may be kept."""
        kind = self.typeof(exchange)
        made = kind.prepare_bind(queue, exchange, routing_key, arguments)
        members = [binding(kind.type, *made)]
        if kind.type == "fanout":  # whoever has bound it may know the queue otherwise
            members.append(binding(kind.type, *made, part_of_binding(routing_key or "")))
        return members

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> int:
        """Delete a queue with all its messages and bindings; return how many were waiting."""
        if if_unused and queue in self._active_queues:
            return 0
        size = 0
        declared = None if self._only_reads(queue) else self.center.declared(queue)
        if declared is not None:
            size = self.center.counts(queue).waiting
            if if_empty and size:
                return 0
        self._read_no_more(lambda one: one.queue == queue)
        for exchange, routing_key, arguments in list(self.state.queue_bindings(queue)):
            self._unbind(queue, exchange, routing_key, arguments)
        # The others' bindings of a transient queue go stale; and a queue that is gone has none:
        # Kombu deletes that of its replies to remote control twice.
        if declared is not None and not declared.declaration.expires:
            self._unbind_everywhere(queue)
        self._forget_queue(queue)
        if declared is not None:
            self.center.delete(queue)
        return size

    def _forget_queue(self, queue: str) -> None:
        """Remember nothing of it, and do not keep it fresh."""
        self._read_no_more(lambda one: one.queue == queue)
        self._fanout_queues.pop(queue, None)
        self._kept.pop(queue, None)
        self._routed.discard(queue)
        self.state.queue_bindings_delete(queue)
        self.heartbeat.forget_topic(queue)
        self._transient.pop(queue, None)
        self._auto_delete.discard(queue)
        self._exclusive.discard(queue)

    def _unbind_everywhere(self, queue: str) -> None:
        """From the exchanges that other processes have bound it to as well."""
        bindings = Bindings(self.center)
        try:
            for exchange, member in bindings.with_queue(queue):
                self.heartbeat.forget_binding(exchange, member)
                bindings.remove(exchange, member)
        except NotPermittedError as exc:
            logger.warning(
                "queue %s is deleted, but bindings that others have made stay: %s", queue, exc
            )

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        """Delete an exchange and its bindings; the queues stay."""
        self.heartbeat.forget_exchange(exchange)
        Bindings(self.center).clear(exchange)
        for channel in self.transport.channels:
            channel._read_no_more(lambda one: one.exchange == exchange)
        for queue, name, routing_key in list(self.state.bindings):
            if name == exchange:
                self.state.binding_delete(queue, name, routing_key)
        self.state.exchanges.pop(exchange, None)

    def typeof(self, exchange: str, default: str = "direct") -> Any:
        """The type of an exchange; of one that this process has not declared, as it is bound."""
        known = self.state.exchanges.get(exchange)
        name = known["type"] if known else Bindings(self.center).kind(exchange) or default
        return self.exchange_types[name]

    def get_table(self, exchange: str) -> list[tuple[str, str, str]]:
        """(routing key, pattern, queue) of each binding of an exchange."""
        table = self.transport.routes.of(exchange)
        self._others_transient |= table.transient
        return table.rows

    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> list[str]:
        """The queues that an exchange sends a message with that routing key to."""
        if not exchange:
            return super()._lookup(exchange, routing_key, default)
        table = self.transport.routes.of(exchange)
        known = self.state.exchanges.get(exchange)
        kind = known["type"] if known else table.kind or "direct"
        if kind not in ("direct", "topic"):
            return super()._lookup(exchange, routing_key, default)
        queues = getattr(table, kind)(routing_key or "")
        if not queues:
            table = self.transport.routes.anew(exchange)
            queues = getattr(table, kind)(routing_key or "")
        if not queues and (default or self.deadletter_queue):
            return super()._lookup(exchange, routing_key, default)
        self._others_transient.update(table.transient.intersection(queues))
        return queues

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return self.center.declared(queue) is not None

    def _size(self, queue: str) -> int:
        """How many messages wait in a queue, due or not."""
        if self._only_reads(queue) or not self._has_queue(queue):
            return 0
        # Nobody is to be kept from declaring it by a node that is away.
        return sum(slot.waiting for slot in self.center.counts_by_slot(queue, reachable=True))

    def _purge(self, queue: str) -> int:
        return 0 if self._only_reads(queue) else self.center.purge(queue)

    # -- the end

    def close(self) -> None:
        """Cancel the consumers and give everything unsettled back."""
        if self.closed:
            return
        if os.getpid() != self._pid:  # a child process: the connection is its parent's
            self.closed = True
            return
        self.closed = True
        for tag in list(self._consumers):
            self.basic_cancel(tag)
        self.poller.flush()
        if self._qos is not None:
            self._qos.restore_unacked_once()
        only_reading = filter(self._only_reads, self._auto_delete)
        for queue in self._exclusive.union(only_reading):
            if not self._has_other_consumer(queue):
                self._delete_transient(queue)
        self.heartbeat.leave_all(self.channel_key)
        if self.connection is not None:
            self.connection.close_channel(self)
        self.exchange_types = None


def _unknown(arguments: dict[str, Any]) -> Iterator[str]:
    """Of a queue's arguments, those that have no effect here."""
    for name in arguments:
        if name in _RABBITMQS:
            yield f"{name} (an argument of RabbitMQ's)"
        elif name.startswith("x-") and name not in _ARGUMENTS and name not in _OTHER_ARGUMENTS:
            yield f"{name} (no such argument{suggestion(name, [*_ARGUMENTS, *_OTHER_ARGUMENTS])})"


class PublishBatch:
    """Publishes that leave together, for ``Producer.batch()`` of Kombu 5.7.

    A message that is sent twice because a reply was lost stays one message, so the messages of a
    batch that has failed may be published again in another one, whatever has become of them.
    """

    def __init__(self, channel: Channel, max_size: int) -> None:
        self.channel = channel
        self.max_size = max_size
        self._calls: list[ScriptCall] = []
        self._over = ""
        #: where it is remembered that a message of the batch was put, and of those that were
        self._notes: list[str] = []
        self._noted: deque[str] = deque(maxlen=MAX_NOTED)

    def publish(self, message: dict[str, Any], **kwargs: Any) -> Any:
        """Route a prepared message and keep it until the batch is full or flushed."""
        self._check()
        result = self.channel.basic_publish(message, _publish_batch=self, **kwargs)
        if len(self._calls) >= self.max_size:
            self.flush()
        return result

    def add(self, call: ScriptCall, note: str) -> None:
        """Take what the channel has made of a message.

        note: the key in which it is remembered that it was put
        """
        self._calls.append(call)
        self._notes.append(note)

    def flush(self) -> None:
        """Send what has gathered. Raises Kombu's BatchPublishError if any of it fails."""
        self._check()
        calls, self._calls = self._calls, []
        notes, self._notes = self._notes, []
        try:
            self.channel.center.run_puts(calls)
        except Exception as exc:
            self._over = "has failed before"
            raise BatchPublishError("publish batch failed; delivery is uncertain") from exc
        self._noted.extend(notes)

    def discard(self) -> None:
        """Forget what was not sent yet."""
        self._calls, self._notes = [], []
        self._over = "is aborted"

    def close(self) -> None:
        """It is complete, unless it has failed: nobody will repeat it."""
        if self._over:
            return
        self._over = "is closed"
        by_slot: dict[str, list[str]] = defaultdict(list)
        for key in self._noted:
            by_slot[key.rpartition(":sent:")[0]].append(key)
        with (
            suppress(*BROKEN, ResponseError),  # they go by themselves within a minute
            self.channel.center.client.pipeline(transaction=False) as pipe,
        ):
            for keys in by_slot.values():
                for start in range(0, len(keys), BATCH):
                    pipe.unlink(*keys[start : start + BATCH])
            pipe.execute()

    def _check(self) -> None:
        if self._over:
            raise RuntimeError(f"the publish batch {self._over}")


__all__ = ("Capacity", "Channel", "Message", "PublishBatch", "use_timezone")
