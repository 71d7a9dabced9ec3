"""Queues that are bound to fanout exchanges: what is read of the exchanges' streams for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable

from ..center.center import TimeoutCenter
from ..center.exchanges import Subscription, begin, recall


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
        #: queues that keep what is broadcast: what is read of the stream for them all the same
        self._keeping: dict[str, list[Subscription]] = {}
        #: queues that go away by themselves and are topics, for they are bound to other exchanges
        self._routed: set[str] = set()

    def only_reads(self, queue: str) -> bool:
        """Whether all that the queue gets are broadcasts, which it reads: it is no topic."""
        return queue in self._reading and queue not in self._routed

    def subscriptions(self, queue: str) -> list[Subscription]:
        """By which broadcasts are read for a queue, in the order of its bindings."""
        return [*self._reading.get(queue, ()), *self._keeping.get(queue, ())]

    def note_routed(self, queue: str) -> bool:
        """A transient queue is bound to an exchange that is not a fanout one.

        Returns whether it has only read until now, and is a topic from now on.
        """
        if queue in self._routed:
            return False
        self._routed.add(queue)
        return queue in self._reading

    def read_from_now(
        self, queue: str, exchange: str, routing_key: str, member: str, transient: bool
    ) -> Subscription | None:
        """Read what is broadcast to a queue by this binding, from now on or from where it was left.

        member: the binding as it is in Redis
        transient: the queue keeps no copy of its own

        Returns None if it is read already.
        """
        reading = (self._reading if transient else self._keeping).setdefault(queue, [])
        if any((one.exchange, one.binding) == (exchange, routing_key) for one in reading):
            return None
        known = recall(self._identity, queue, exchange, routing_key)
        last = begin(
            self._center,
            self._streams(exchange, member, transient),
            known.last if known is not None else {},
        )
        subscription = Subscription(queue, exchange, routing_key, last, kept=not transient)
        if reading:
            subscription.returned = reading[0].returned
        if known is not None and known.returned is not subscription.returned:
            subscription.returned += known.returned
            known.returned.clear()
        reading.append(subscription)
        return subscription

    def _streams(self, exchange: str, member: str, parts: bool) -> list[str]:
        """The streams that are read for a binding."""
        keys = self._center.keys
        # What is read for a queue that keeps a copy is of producers that know of no parts.
        some = json.loads(member)[4:5] if parts else []
        return [keys.fanout(exchange), *(keys.part(exchange, part) for part in some)]

    def read_no_more(self, of: Callable[[Subscription], bool]) -> None:
        """Read no more for the subscriptions of which `of` is true: they are unbound."""
        for reading in (*self._reading.values(), *self._keeping.values()):
            for subscription in [one for one in reading if of(one)]:
                reading.remove(subscription)
                self._unfollow(subscription)

    def forget(self, queue: str) -> None:
        """It is deleted, or is to be."""
        self.read_no_more(lambda one: one.queue == queue)
        self._reading.pop(queue, None)
        self._keeping.pop(queue, None)
        self._routed.discard(queue)
