"""The channel: Kombu's operations in terms of the timeout center.

It conducts its parts: the publisher, the queues, the exchanges, the queues that read broadcasts,
the receiver, and the QoS.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

from amqp.protocol import queue_declare_ok_t
from kombu.exceptions import ChannelError
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.utils.uuid import uuid

from ..center.exchanges import Table, remember
from ..compat import check_channel
from ..consumer.connections import BROKEN
from ..consumer.holdings import task_of
from ..consumer.state import WorkerPolicy
from ..metrics import COUNTERS
from ..model import message as envelope
from ..model.results import Delivery
from ..model.topic import Topic
from .publisher import PublishBatch, Publisher, is_unique
from .queues import BroadcastQueues, Exchanges, Queues, TopicExchange
from .receiving import Capacity, QoS, Receiver, capacity_of, tags
from .receiving import Message as DeliveredMessage

logger = logging.getLogger(__name__)

#: Messages that a snapshot names one by one, at most.
MAX_SHOWN = 100

#: Messages that one pop takes where neither a prefetch count nor a worker's pool sets a bound.
BATCH = 100


class Channel(virtual.Channel):
    """Kombu's operations in terms of the timeout center.

    It has more fields and lines than other classes: Kombu calls some thirty methods of one object,
    and most hand over to a part.
    """

    QoS = QoS
    Message = DeliveredMessage  # type: ignore[assignment]  # made in another way than Kombu's
    publisher_class: type[Publisher] = Publisher
    exchange_types = {**virtual.Channel.exchange_types, "topic": TopicExchange}
    supports_fanout = True
    do_restore = True

    #: Exchanges whose broadcasts are not sent while their node of a Cluster is away: a worker would
    #: wait for it with each of its events, and start no task.
    losable: ClassVar[set[str]] = set()

    #: What the channel's owner can take and what it keeps; a worker sets its own.
    policy: WorkerPolicy = WorkerPolicy()

    #: What records the messages, where there is a task library.
    recorder: Any = None

    #: They are told what has become of a message, after it has: ack, requeue, reject, release or
    #: bury; and end, when the task of one that was acknowledged has ended.
    observers: tuple[Callable[[str, DeliveredMessage], None], ...] = ()

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)  # type: ignore[no-untyped-call]  # Kombu's
        check_channel(self, Channel)
        self.transport = connection
        self.settings = connection.settings
        self.center = connection.center
        self.poller = connection.poller
        self.lease_keeper = connection.lease_keeper
        self._pid = os.getpid()
        #: by which the lease keeper knows who uses a transient queue
        self.channel_key = next(tags)
        self.queues = Queues(self)
        self.exchanges = Exchanges(self)
        self.broadcast_queues = BroadcastQueues(self)
        self.publisher = self.publisher_class(self)
        self.receiver = receiver = Receiver(self)
        # What the poller calls for each message: the receiver's own, without a layer between.
        self.receive = receiver.receive
        self.take_early, self.deliver_early = receiver.take_early, receiver.deliver_early
        self.take_back = receiver.take_back
        self.wants, self.receive_broadcast = receiver.wants, receiver.receive_broadcast

    # -- publishing

    def basic_publish(
        self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any
    ) -> Any:
        """Publish a prepared message.

        Raises ActionTimeError if its time cannot be read or lies beyond what can be kept,
        AlreadyThereError if it has the property ENSURE and its queue has a message of its id.
        """
        self.publisher.address(message, exchange, routing_key)
        # Handed on, not kept: threads may share the channel.
        batch = kwargs.get("_publish_batch")
        if exchange:
            return self.typeof(exchange).deliver(message, exchange, routing_key, batch=batch)
        return self.publisher.put(routing_key, message, batch)

    def answer(self, message: dict[str, Any], exchange: str, routing_key: str) -> None:
        """Publish a prepared answer to a call of remote control, to a direct exchange.

        It is tried once, and for a second at most: who answers has other things to do, and who asks
        does not wait for long. Raises what a broken connection raises.
        """
        self.publisher.address(message, exchange, routing_key)
        for queue in self._lookup(exchange, routing_key):
            answer = self.publisher.prepare(self.queues.topic(queue), message)
            self.transport.run_briefly(self.publisher.call_of(answer))

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        """A batch, through which ``Producer.batch()`` publishes."""
        return PublishBatch(self, max_size)

    def _put(
        self, queue: str, message: dict[str, Any], batch: PublishBatch | None = None, **kwargs: Any
    ) -> None:
        self.publisher.put(queue, message, batch)

    def _put_fanout(
        self,
        exchange: str,
        message: dict[str, Any],
        routing_key: str,
        batch: PublishBatch | None = None,
        **kwargs: Any,
    ) -> None:
        send = partial(self.publisher.broadcast, exchange, message, routing_key, batch)
        if exchange not in self.losable:
            send()
            return

        def leave(error: Exception) -> None:
            logger.debug("an event is not sent: %s", error)

        self.center.runner.at_home(self.center.keys.topics, send, leave)

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
        self.receiver.add(queue, callback, no_ack)
        if not self.broadcast_queues.only_reads(queue):
            declared = self.queues.topic(queue).declaration
            if declared.kept:
                self.queues.hold(queue)
            if declared.kept or not declared.expires:
                self.lease_keeper.consumes(queue, self.channel_key)
            if declared.guard and self.recorder is None:
                logger.warning(
                    "queue %r was declared with x-guard, and this process has no task library to "
                    "ask what has ended: set toc_library here, too",
                    queue,
                )
            self.poller.consume(self, queue)
        for subscription in self.broadcast_queues.subscriptions(queue):
            self.poller.follow(self, subscription)

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
        self.receiver.remove(queue)
        if os.getpid() != self._pid:
            return
        for subscription in self.broadcast_queues.subscriptions(queue):
            followed = self.poller.unfollow(subscription)
            if followed is not None:
                remember(self.transport.identity, followed)
        if not self.broadcast_queues.only_reads(queue):
            # Before the lease keeper renews what is held, which the next line brings about.
            self.queues.leave(queue)
            self.lease_keeper.consumes_no_more(queue, self.channel_key)
            self.poller.cancel(self, queue)
        self._leave_queue(queue)

    def _has_other_consumer(self, queue: str) -> bool:
        return any(
            queue in channel._active_queues
            for channel in self.transport.channels
            if channel is not self
        )

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> DeliveredMessage | None:
        """One message that is due, or None."""
        limits = self.queues.topic(queue).declaration.limits(self.center.limits)
        return self.receiver.get(queue, limits.visibility, no_ack)

    def capacity(self, held: int, early: int = 0) -> Capacity:
        """How much this channel can take.

        held: messages that are fetched and not yet delivered to a consumer that can start them
        early: of these, how many were delivered ahead of their time
        """
        qos = self.qos
        most = qos.can_consume_max_estimate()
        if most is None:
            # Without a bound and without an event loop, a consumer gets what it asks for.
            most = BATCH if self.poller.long_running else 1
        # Celery's worker_disable_prefetch replaces this.
        room = most - (held - early) if qos.can_consume() else 0
        return capacity_of(self.policy, room, held, self.window())

    def window(self) -> int:
        """The prefetch count, or what stands for it."""
        return self.qos.prefetch_count or BATCH

    # -- a snapshot of what it has in hand, for people

    def snapshot(self) -> dict[str, Any]:
        """A snapshot of what this process holds for a channel and has counted; times in seconds.

        topics: per topic that it consumes, its slots, whether it holds more than there was room
            for, what this process has counted since it started, and how late it has delivered
        capacity: how many messages could start at once, and how many it would take
        leases: how many delivered messages it keeps leased, and those messages
        held: messages fetched ahead of their time, or of a process that could start them
        claims: the next times that it serves, and whose
        clock_ahead: by how much Redis's clock is ahead of this machine's, at least
        """
        poller, lease_keeper = self.poller, self.lease_keeper
        now = time.monotonic()
        server_us = poller.clock.at(now)
        state = poller.states.get(self)
        leases = lease_keeper.leases.held()
        held, claims = [], []
        queued = [entry for _, entry in list(state.ready)] if state else []
        for _, _, owner, item in [*queued, *poller.dispatcher.due]:
            if owner is not state:
                continue
            if isinstance(item, Delivery):
                held.append({**_shown_message(item), "due_in": (item.action_us - server_us) / 1e6})
            else:
                topic, slot, us = item
                claims.append({"topic": topic, "slot": slot, "due_in": (us - server_us) / 1e6})
        free, room, _ = self.capacity(*((state.buffered, len(state.early)) if state else (0, 0)))
        return {
            "prefix": self.center.keys.prefix,
            "clock_ahead": server_us / 1e6 - time.time() if poller.clock.known else None,
            "topics": {
                name: self._shown_topic(name) for name in (state.pending.topics if state else ())
            },
            "capacity": {"free": free, "room": room},
            "leases": {
                "count": len(leases),
                "renewed_in_time": lease_keeper.in_time(),
                "messages": [_shown_message(one) for one, _ in leases[:MAX_SHOWN]],
            },
            "held": sorted(held, key=itemgetter("due_in"))[:MAX_SHOWN],
            "claims": sorted(claims, key=itemgetter("due_in"))[:MAX_SHOWN],
        }

    def _shown_topic(self, name: str) -> dict[str, Any]:
        topic = self.center.registry.known(name)
        found: dict[str, Any] = {
            "slots": topic.slots if topic is not None else None,
            "backlog": name in self.poller.states[self].pending.backlog,
        }
        counts = self.center.metrics.topics.get(name)
        if counts is not None:
            found["counts"] = {counter: getattr(counts, counter) for counter in COUNTERS}
            found["late_p50"] = counts.lateness.quantile(0.5)
            found["late_p99"] = counts.lateness.quantile(0.99)
        return found

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

    # -- queues

    def prepare_queue_arguments(self, arguments: dict[str, Any], **kwargs: Any) -> Any:
        return to_rabbitmq_queue_arguments(arguments, **kwargs)

    @property
    def ignored(self) -> dict[str, list[str]]:
        """queue -> what was asked for when it was declared and has no effect, and why."""
        return self.queues.ignored

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
        transient = (
            not queue or exclusive or auto_delete or bool((arguments or {}).get("x-expires"))
        )
        queue = queue or f"amq.gen-{uuid()}"
        if passive:
            if not self._has_queue(queue):
                raise ChannelError(
                    f"NOT_FOUND - no queue {queue!r}", (50, 10), "Channel.queue_declare", "404"
                )
            return queue_declare_ok_t(queue, self._size(queue), 0)
        declare = partial(self._declare, queue, exclusive, auto_delete, arguments or {})
        return queue_declare_ok_t(queue, self._or_later(queue, declare, transient) or 0, 0)

    def _declare(self, queue: str, *how: Any) -> int:
        """Declare a queue; returns its size."""
        return 0 if self.queues.declare(queue, *how) is None else self._size(queue)

    def _or_later(self, what: Any, do: Callable[[], int | None], transient: bool) -> int | None:
        """Declare or bind a queue, also of a channel that may be there while Redis is away.

        what: the queue, or the binding
        """
        return do()

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
        bind = partial(self._bind, queue, exchange, routing_key, arguments)
        self._or_later((queue, exchange, routing_key), bind, False)

    def _bind(self, queue: str, exchange: str, routing_key: str, arguments: Any) -> None:
        fanout = self.exchanges.typeof(exchange).type == "fanout"
        self.state.binding_declare(queue, exchange, routing_key, arguments)
        ttl_ms = self.queues.transient.get(queue, 0)
        member = self.exchanges.member(queue, exchange, routing_key, arguments, bool(ttl_ms))
        if ttl_ms:
            self.lease_keeper.withdraw_deletion(queue, self.center.client.sleep)
        if not fanout or not ttl_ms:
            # Before anybody can send to it: as a transient one, if it is one.
            self.queues.topic(queue)
        self.exchanges.bind(exchange, member, ttl_ms, self.channel_key)
        if not ttl_ms:
            return
        is_consumed = queue in self._active_queues
        if fanout:
            read = self.broadcast_queues.read_from_now(queue, exchange, routing_key or "", member)
            if read is not None and is_consumed:
                self.poller.follow(self, read)
        elif self.broadcast_queues.note_routed(queue) and is_consumed:
            self.poller.consume(self, queue)

    def queue_unbind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", *args: Any, **kw: Any
    ) -> None:
        """Undo a binding."""
        exchange = exchange or "amq.direct"
        self.state.binding_delete(queue, exchange, routing_key)
        self.exchanges.unbind(queue, exchange, routing_key, None)
        bound = (queue, exchange, routing_key or "")
        self.broadcast_queues.read_no_more(lambda one: one.bound == bound)

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> int:
        """Delete a queue with all its messages and bindings; return how many were waiting."""
        if if_unused and queue in self._active_queues:
            return 0
        size = 0
        declared = self._declared(queue)
        if declared is not None:
            size = self.center.counts(queue).waiting
            if if_empty and size:
                return 0
        self._delete_declared(queue, declared)
        return size

    def _declared(self, queue: str) -> Topic | None:
        """What a queue is declared as; None if nobody has, or if it only reads broadcasts."""
        declared: Topic | None = None
        if not self.broadcast_queues.only_reads(queue):
            declared = self.center.registry.declared(queue)
        return declared

    def _delete_declared(self, queue: str, declared: Topic | None) -> None:
        self.broadcast_queues.read_no_more(lambda one: one.queue == queue)
        self.exchanges.unbind_all(queue)
        # The others' bindings of a transient queue go stale; and a queue that is gone has none:
        # Kombu deletes that of its replies to remote control twice.
        if declared is not None and not declared.declaration.expires:
            self.exchanges.unbind_everywhere(queue)
        self._forget_queue(queue)
        if declared is not None:
            self.center.queues.delete(queue)

    def after_reply_message_received(self, queue: str) -> None:
        """Kombu has the answers that it has asked for: their queue is not needed any more."""
        self._delete_transient(queue)

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return self.queues.is_there(queue)

    def _size(self, queue: str) -> int:
        return 0 if self.broadcast_queues.only_reads(queue) else self.queues.size(queue)

    def _purge(self, queue: str) -> int:
        if self.broadcast_queues.only_reads(queue):
            return 0
        purged = self.center.queues.purge(queue)
        if purged.schedules:
            logger.warning(
                "the purge of queue %r deleted the next firing of %s; each goes on with the one "
                "after that",
                queue,
                ", ".join(map(repr, purged.schedules)),
            )
        return int(purged)

    def _delete_transient(self, queue: str) -> None:
        """Delete it now, or as soon as the server can be reached again."""
        bindings: dict[str, list[str]] = {}
        try:
            bindings = self.exchanges.members_of(queue)
            declared = self._declared(queue)
            if declared is None or declared.declaration.expires:
                self._delete_declared(queue, declared)
                return
            self.exchanges.forget(bindings)  # somebody else has deleted it, and declared it to stay
            self._forget_queue(queue)
        except BROKEN as exc:
            logger.debug("queue %s is to be deleted later: %s", queue, exc)
            self._forget_queue(queue)
            self.exchanges.forget(bindings)
            self.lease_keeper.delete_later(queue, bindings)

    def _leave_queue(self, queue: str) -> None:
        """Its last consumer in this channel has gone: with it goes an auto-delete queue."""
        self.queues.leave(queue)
        if queue not in self.queues.auto_delete or self._has_other_consumer(queue):
            return
        if queue in self.queues.exclusive or self.broadcast_queues.only_reads(queue):
            self._delete_transient(queue)
            return
        # Others may consume it, elsewhere: they keep it, or it goes stale.
        self.lease_keeper.topics.leave(queue, self.channel_key)
        transient = queue in self.queues.transient
        for exchange, routing_key, arguments in self.state.queue_bindings(queue):
            member = self.exchanges.member(queue, exchange, routing_key, arguments, transient)
            self.lease_keeper.bindings.leave((exchange, member), self.channel_key)

    def _leave_all_queues(self) -> None:
        """The channel closes: with it go the queues that nobody else can use."""
        only_reading: Iterable[str] = filter(
            self.broadcast_queues.only_reads, self.queues.auto_delete
        )
        for queue in self.queues.exclusive.union(only_reading):
            if not self._has_other_consumer(queue):
                self._delete_transient(queue)
        self.lease_keeper.leave_all(self.channel_key)

    def _forget_queue(self, queue: str) -> None:
        """Remember nothing of it, and do not keep it fresh."""
        self.broadcast_queues.forget(queue)
        self.queues.forget(queue)
        self.state.queue_bindings_delete(queue)

    # -- exchanges

    def typeof(self, exchange: str, default: str = "direct") -> Any:
        """The type of an exchange; of one that this process has not declared, as it is bound."""
        return self.exchanges.typeof(exchange, default)

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        """Delete an exchange and its bindings; the queues stay."""
        self.exchanges.delete(exchange)
        for channel in self.transport.channels:
            channel.broadcast_queues.read_no_more(lambda one: one.exchange == exchange)

    def get_table(self, exchange: str) -> list[tuple[str, str, str]]:
        """(routing key, pattern, queue) of each binding of an exchange."""
        table: Table = self.transport.routes.of(exchange)
        self.queues.note_transient(table.transient)
        return table.rows

    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> Any:
        """The queues that an exchange sends a message with that routing key to."""
        found = self.exchanges.queues_for(exchange, routing_key) if exchange else None
        if found is None or (not found[0] and (default or self.deadletter_queue)):
            return super()._lookup(  # type: ignore[no-untyped-call]  # Kombu's
                exchange, routing_key, default
            )
        queues, table = found
        self.queues.note_transient(table.transient.intersection(queues))
        return queues

    # -- messages that somebody else has made

    def priority_of(self, message: dict[str, Any]) -> int:
        """The priority of a prepared message."""
        found: int = self._get_message_priority(message)  # type: ignore[no-untyped-call]
        return found

    @staticmethod
    def plain_of(message: dict[str, Any]) -> bytes:
        """A published message as bytes, before they are compressed."""
        return envelope.pack_plain(message)

    @staticmethod
    def line_of(message: dict[str, Any]) -> str:
        """All of a message but its body, as the line with which these bytes begin."""
        return envelope.encode_meta(message)

    # -- the end

    def close(self) -> None:
        """Cancel the consumers and give everything unsettled back."""
        if self.closed:
            return
        self.closed = True
        if os.getpid() != self._pid:  # a child process: the connection is its parent's
            return
        for tag in list(self._consumers):
            self.basic_cancel(tag)
        self.poller.flush()
        if self._qos is not None:
            self._qos.restore_unacked_once()
        self._leave_all_queues()
        if self.connection is not None:
            self.connection.close_channel(self)
        # As Kombu does: each of them refers to the channel.
        self.exchange_types = None  # type: ignore[assignment]


def _shown_message(delivery: Delivery) -> dict[str, Any]:
    return {
        "id": delivery.id,
        "task": task_of(delivery.body, delivery.id) or None,
        "topic": delivery.topic,
        "slot": delivery.slot,
        "failures": delivery.failures,
    }


# -- A channel that keeps what is published instead of sending it


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

    def __init__(self, channel: Any) -> None:
        super().__init__(channel)
        self.captured: list[Captured] = []

    def put(self, queue: str, message: dict[str, Any], batch: PublishBatch | None = None) -> None:
        if is_unique(message.get("headers") or {}, message["properties"]):
            self.captured.append(Captured(None, message, unique=True))
            return
        where, request, _ = self.prepare(self._topic_of(queue), message, admit=False)
        self.captured.append(Captured(where.name, message, request.priority, request.traits))

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
        """The messages that were published."""
        return self.publisher.captured
