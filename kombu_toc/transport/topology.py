"""Queues, exchanges and bindings together: what concerns more than one of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from ..center.center import TimeoutCenter
from ..center.exchanges import Subscription
from ..consumer.connections import BROKEN
from ..consumer.lease_keeper import LeaseKeeper
from .broadcast_queues import BroadcastQueues
from .exchanges import Exchanges
from .queues import Queues

logger = logging.getLogger(__name__)


class Topology:
    """Binds and deletes the queues of a channel.

    state: Kombu's record of what this connection has declared and bound
    holder: by which the lease keeper knows who uses a transient queue
    """

    def __init__(
        self,
        center: TimeoutCenter,
        lease_keeper: LeaseKeeper,
        queues: Queues,
        exchanges: Exchanges,
        broadcast_queues: BroadcastQueues,
        state: Any,
        holder: Hashable,
    ) -> None:
        self._center = center
        self._lease_keeper = lease_keeper
        self._queues = queues
        self._exchanges = exchanges
        self._broadcasts = broadcast_queues
        self._state = state
        self._holder = holder

    def bind(
        self, queue: str, exchange: str, routing_key: str, arguments: Any
    ) -> tuple[Subscription | None, bool]:
        """Bind a queue to an exchange.

        Returns by what broadcasts are read for it from now on, and whether the queue, which has
        only read broadcasts, is a topic from now on.
        """
        fanout = self._exchanges.typeof(exchange).type == "fanout"
        self._state.binding_declare(queue, exchange, routing_key, arguments)
        ttl_ms = self._queues.transient.get(queue, 0)
        member = self._exchanges.member(queue, exchange, routing_key, arguments, bool(ttl_ms))
        if ttl_ms:
            self._lease_keeper.withdraw_deletion(queue, self._center.client.sleep)
        if not fanout or not ttl_ms:
            # Before anybody can send to it: as a transient one, if it is one.
            self._queues.topic(queue)
        self._exchanges.bind(exchange, member, ttl_ms, self._holder)
        if fanout:
            read = self._broadcasts.read_from_now
            return read(queue, exchange, routing_key or "", member, bool(ttl_ms)), False
        return None, bool(ttl_ms) and self._broadcasts.note_routed(queue)

    def unbind(self, queue: str, exchange: str, routing_key: str) -> None:
        """Undo a binding."""
        self._state.binding_delete(queue, exchange, routing_key)
        self._exchanges.unbind(queue, exchange, routing_key, None)
        bound = (queue, exchange, routing_key or "")
        self._broadcasts.read_no_more(lambda one: one.bound == bound)

    def delete(self, queue: str, if_empty: bool = False) -> int:
        """Delete a queue with all its messages and bindings; return how many were waiting.

        if_empty: not if any were
        """
        size = 0
        declared = None if self._broadcasts.only_reads(queue) else self._center.declared(queue)
        if declared is not None:
            size = self._center.counts(queue).waiting
            if if_empty and size:
                return 0
        self._broadcasts.read_no_more(lambda one: one.queue == queue)
        self._exchanges.unbind_all(queue)
        # The others' bindings of a transient queue go stale; and a queue that is gone has none:
        # Kombu deletes that of its replies to remote control twice.
        if declared is not None and not declared.declaration.expires:
            self._exchanges.unbind_everywhere(queue)
        self._forget(queue)
        if declared is not None:
            self._center.delete(queue)
        return size

    def delete_transient(self, queue: str) -> None:
        """Delete it now, or as soon as the server can be reached again."""
        bindings: dict[str, list[str]] = {}
        try:
            bindings = self._exchanges.members_of(queue)
            self.delete(queue)
        except BROKEN as exc:
            logger.debug("queue %s is to be deleted later: %s", queue, exc)
            self._forget(queue)
            self._exchanges.forget(bindings)
            self._lease_keeper.delete_later(queue, bindings)

    def leave(self, queue: str, is_consumed: Callable[[str], bool]) -> None:
        """Its last consumer in this channel has gone: with it goes an auto-delete queue.

        is_consumed: whether another channel of the connection consumes a queue
        """
        self._queues.leave(queue)
        if queue not in self._queues.auto_delete or is_consumed(queue):
            return
        if queue in self._queues.exclusive or self._broadcasts.only_reads(queue):
            self.delete_transient(queue)
            return
        # Others may consume it, elsewhere: they keep it, or it goes stale.
        self._lease_keeper.leave_topic(queue, self._holder)
        transient = queue in self._queues.transient
        for exchange, routing_key, arguments in self._state.queue_bindings(queue):
            member = self._exchanges.member(queue, exchange, routing_key, arguments, transient)
            self._lease_keeper.leave_binding(exchange, member, self._holder)

    def leave_all(self, is_consumed: Callable[[str], bool]) -> None:
        """The channel closes: with it go the queues that nobody else can use."""
        only_reading: Iterable[str] = filter(self._broadcasts.only_reads, self._queues.auto_delete)
        for queue in self._queues.exclusive.union(only_reading):
            if not is_consumed(queue):
                self.delete_transient(queue)
        self._lease_keeper.leave_all(self._holder)

    def size(self, queue: str) -> int:
        """How many messages wait in a queue, due or not."""
        return 0 if self._broadcasts.only_reads(queue) else self._queues.size(queue)

    def purge(self, queue: str) -> int:
        """Delete what waits in a queue; return how many messages that were."""
        if self._broadcasts.only_reads(queue):
            return 0
        purged = self._center.purge(queue)
        if purged.schedules:
            logger.warning(
                "the purge of queue %r deleted the next firing of %s; each goes on with the one "
                "after that",
                queue,
                ", ".join(map(repr, purged.schedules)),
            )
        return int(purged)

    def _forget(self, queue: str) -> None:
        """Remember nothing of it, and do not keep it fresh."""
        self._broadcasts.forget(queue)
        self._queues.forget(queue)
        self._state.queue_bindings_delete(queue)
