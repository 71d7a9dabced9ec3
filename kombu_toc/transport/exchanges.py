"""Exchanges and their bindings: what this process has bound, and what is in Redis."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from kombu.transport import virtual

from ..center.center import TimeoutCenter
from ..center.exchanges import (
    Bindings,
    Routes,
    Subscription,
    Table,
    begin,
    binding,
    part_of_binding,
    recall,
)
from ..consumer.lease_keeper import LeaseKeeper
from ..errors import NotPermittedError

# -- exchanges and their bindings

logger = logging.getLogger(__name__)


class TopicExchange(virtual.exchange.TopicExchange):
    """Patterns as AMQP has them, in every version of Kombu: ``*`` is one word."""

    wildcards = {"*": r"[^\.]+", "#": r".*?"}


class Exchanges:
    """The exchanges that a channel declares, binds queues to and sends to.

    state: Kombu's record of what this connection has declared and bound
    types: name of an exchange type -> what Kombu makes of it for this channel
    routes: the bindings in Redis, for who publishes
    """

    def __init__(
        self,
        center: TimeoutCenter,
        lease_keeper: LeaseKeeper,
        routes: Routes,
        state: Any,
        types: Mapping[str, Any],
    ) -> None:
        self._bindings = Bindings(center)
        self._lease_keeper = lease_keeper
        self._routes = routes
        self._state = state
        self._types = types

    def typeof(self, exchange: str, default: str = "direct") -> Any:
        """The type of an exchange; of one that this process has not declared, as it is bound."""
        known = self._state.exchanges.get(exchange)
        name = known["type"] if known else self._bindings.kind(exchange) or default
        return self._types[name]

    # -- bindings

    def bind(self, exchange: str, member: str, ttl_ms: int, holder: Any) -> None:
        """Record a binding in Redis, and keep it from going stale.

        member: as :meth:`member` gives it; ttl_ms: 0 if the queue is not transient
        """
        self._bindings.add(exchange, member, ttl_ms)
        if ttl_ms:
            self._lease_keeper.keep_binding(exchange, member, ttl_ms, holder)

    def unbind(self, queue: str, exchange: str, routing_key: str, arguments: Any) -> None:
        """Remove a binding."""
        members = self.members(queue, exchange, routing_key, arguments)
        self.forget({exchange: members})
        self._bindings.remove(exchange, *members)

    def unbind_all(self, queue: str) -> None:
        """Remove the bindings of a queue that this process has made."""
        for exchange, routing_key, arguments in list(self._state.queue_bindings(queue)):
            self.unbind(queue, exchange, routing_key, arguments)

    def unbind_everywhere(self, queue: str) -> None:
        """Remove the bindings of a queue that other processes have made as well."""
        try:
            for exchange, member in self._bindings.with_queue(queue):
                self.forget({exchange: [member]})
                self._bindings.remove(exchange, member)
        except NotPermittedError as exc:
            logger.warning(
                "queue %s is deleted, but bindings that others have made stay: %s", queue, exc
            )

    def members_of(self, queue: str) -> dict[str, list[str]]:
        """exchange -> the queue's bindings that this process has made, as they are in Redis."""
        found: dict[str, list[str]] = {}
        for exchange, routing_key, arguments in list(self._state.queue_bindings(queue)):
            members = self.members(queue, exchange, routing_key, arguments)
            found.setdefault(exchange, []).extend(members)
        return found

    def forget(self, bindings: Mapping[str, list[str]]) -> None:
        """Keep these bindings fresh no longer."""
        for exchange, members in bindings.items():
            for member in members:
                self._lease_keeper.forget_binding(exchange, member)

    def member(
        self, queue: str, exchange: str, routing_key: str, arguments: Any, transient: bool
    ) -> str:
        """A binding as it is kept in Redis.

        transient: the queue goes away by itself; of a fanout exchange, it reads the broadcasts
        """
        kind = self.typeof(exchange)
        reads = kind.type == "fanout" and transient
        part = part_of_binding(routing_key or "") if reads else None
        key, pattern, _ = kind.prepare_bind(queue, exchange, routing_key, arguments)
        return binding(kind.type, key, pattern, queue, part)

    def members(self, queue: str, exchange: str, routing_key: str, arguments: Any) -> list[str]:
        """A binding in all the ways in which it may be kept in Redis."""
        kind = self.typeof(exchange)
        key, pattern, _ = kind.prepare_bind(queue, exchange, routing_key, arguments)
        members = [binding(kind.type, key, pattern, queue)]
        if kind.type == "fanout":  # whoever has bound it may know the queue otherwise
            part = part_of_binding(routing_key or "")
            members.append(binding(kind.type, key, pattern, queue, part))
        return members

    # -- routing

    def table(self, exchange: str) -> Table:
        """The bindings of an exchange, as they are now."""
        return self._routes.of(exchange)

    def queues_for(self, exchange: str, routing_key: str) -> tuple[list[str], Table] | None:
        """The queues that a direct or topic exchange sends a message to, and the bindings they
        were found in; None if its type is another."""
        table = self._routes.of(exchange)
        known = self._state.exchanges.get(exchange)
        kind = known["type"] if known else table.kind or "direct"
        if kind not in ("direct", "topic"):
            return None
        return getattr(table, kind)(routing_key or ""), table

    def delete(self, exchange: str) -> None:
        """Delete an exchange and its bindings; the queues stay."""
        self._lease_keeper.forget_exchange(exchange)
        self._bindings.clear(exchange)
        for queue, name, routing_key in list(self._state.bindings):
            if name == exchange:
                self._state.binding_delete(queue, name, routing_key)
        self._state.exchanges.pop(exchange, None)


# -- queues that are bound to fanout exchanges


class BroadcastQueues:
    """The queues of a channel that are bound to fanout exchanges.

    A queue that goes away by itself reads the streams, and is a topic only if it is bound to other
    exchanges too. Any other queue is a topic, which keeps a copy of each broadcast.

    identity: the server, as :attr:`Transport.identity` tells it
    unfollow: ends the reading of a subscription
    """

    def __init__(
        self,
        center: TimeoutCenter,
        identity: Hashable,
        unfollow: Callable[[Subscription], object],
    ) -> None:
        self._center = center
        self._identity = identity
        self._unfollow = unfollow
        #: queues that go away by themselves: what is read for each binding
        self._reading: dict[str, list[Subscription]] = {}
        #: queues that go away by themselves and are topics, for they are bound to other exchanges
        self._routed: set[str] = set()

    def only_reads(self, queue: str) -> bool:
        """Whether all that the queue gets are broadcasts, which it reads: it is no topic."""
        return queue in self._reading and queue not in self._routed

    def subscriptions(self, queue: str) -> list[Subscription]:
        """By which broadcasts are read for a queue, in the order of its bindings."""
        return list(self._reading.get(queue, ()))

    def note_routed(self, queue: str) -> bool:
        """A transient queue is bound to an exchange that is not a fanout one.

        Returns whether it has only read until now, and is a topic from now on.
        """
        if queue in self._routed:
            return False
        self._routed.add(queue)
        return queue in self._reading

    def read_from_now(
        self, queue: str, exchange: str, routing_key: str, member: str
    ) -> Subscription | None:
        """Read what is broadcast to a queue by this binding, from now on or from where it was left.

        member: the binding as it is in Redis

        Returns None if it is read already.
        """
        reading = self._reading.setdefault(queue, [])
        if any((one.exchange, one.binding) == (exchange, routing_key) for one in reading):
            return None
        known = recall(self._identity, queue, exchange, routing_key)
        last = begin(
            self._center,
            self._streams(exchange, member),
            known.last if known is not None else {},
        )
        subscription = Subscription(queue, exchange, routing_key, last)
        if reading:
            subscription.returned = reading[0].returned
        if known is not None and known.returned is not subscription.returned:
            subscription.returned += known.returned
            known.returned.clear()
        reading.append(subscription)
        return subscription

    def _streams(self, exchange: str, member: str) -> list[str]:
        """The streams that are read for a binding."""
        keys = self._center.keys
        return [keys.fanout(exchange), *(keys.part(exchange, p) for p in json.loads(member)[4:5])]

    def read_no_more(self, of: Callable[[Subscription], bool]) -> None:
        """Read no more for the subscriptions of which `of` is true: they are unbound."""
        for reading in self._reading.values():
            for subscription in [one for one in reading if of(one)]:
                reading.remove(subscription)
                self._unfollow(subscription)

    def forget(self, queue: str) -> None:
        """Forget a queue that is deleted, or is to be."""
        self.read_no_more(lambda one: one.queue == queue)
        self._reading.pop(queue, None)
        self._routed.discard(queue)
