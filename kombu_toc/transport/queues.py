"""Queues as topics: what was declared of them, and which go away by themselves."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

from kombu.transport import virtual
from redis.exceptions import ResponseError

from ..center import exchanges
from ..center.center import TimeoutCenter
from ..client.options import Settings, suggestion
from ..consumer.connections import BROKEN
from ..consumer.lease_keeper import LeaseKeeper
from ..consumer.upkeeper import sweep
from ..errors import ConfigurationError, NotPermittedError
from ..model.limits import LIBRARY_TERMS, LIMITS, NOTIFIER_TERMS, TERMS, Limits
from ..model.topic import Topic, check_slots

#: Queues whose declarations a channel remembers.
MAX_KNOWN = 4096

#: Milliseconds after which a queue that expires is said again to be used, at most.
TOUCH_MS = 500

#: Limits of a topic that a queue's arguments may set.
_LIMITS = ("slots", "retries", *Limits._fields, *TERMS, *LIBRARY_TERMS, *NOTIFIER_TERMS)
_ARGUMENTS = {f"x-{name.replace('_', '-')}": name for name in _LIMITS}

#: Other arguments that have the effect that is meant: priorities need no declaration here.
_OTHER_ARGUMENTS = frozenset(("x-expires", "x-max-priority"))

#: What RabbitMQ knows and this transport does not.
_RABBITMQS = frozenset(
    (
        *("x-consumer-timeout", "x-dead-letter-exchange", "x-dead-letter-routing-key"),
        *("x-dead-letter-strategy", "x-delivery-limit", "x-max-length", "x-max-length-bytes"),
        *("x-overflow", "x-queue-leader-locator", "x-queue-mode", "x-queue-type"),
        *("x-quorum-initial-group-size", "x-single-active-consumer"),
    )
)


class Queues:
    """The queues that a channel has declared or sends to."""

    def __init__(self, channel: Any) -> None:
        self._center: TimeoutCenter = channel.center
        self._settings: Settings = channel.settings
        self._lease_keeper: LeaseKeeper = channel.lease_keeper
        self._holder = channel.channel_key
        #: milliseconds for which a transient queue outlives its last refresh. That is at least
        #: toc_stale_after, also with a shorter x-expires: it is refreshed by a thread of whoever
        #: uses it, and must outlive a process that stands still or reconnects.
        self.transient: dict[str, int] = {}
        #: milliseconds after which a queue expires that nobody uses, if that alone makes it
        #: transient: its consumers keep it for longer, as above
        self.expiring: dict[str, int] = {}
        #: queue of that kind -> monotonic seconds when it was last said to be used here
        self._touched: dict[str, float] = {}
        #: transient queues that others have bound, and that go stale without them
        self._others_transient: set[str] = set()
        self.auto_delete: set[str] = set()
        self.exclusive: set[str] = set()
        #: transient queue -> limits of its topic, if it becomes one
        self._to_be: dict[str, Mapping[str, Any]] = {}
        #: queue -> what was asked for when it was declared and has no effect, and why
        self.ignored: dict[str, list[str]] = {}

    def declare(
        self, queue: str, exclusive: bool, auto_delete: bool, arguments: Mapping[str, Any]
    ) -> Topic | None:
        """Declare a queue; return its topic. A transient queue is none yet: perhaps it will only be
        bound to a fanout exchange.

        Raises SlotCountError and PriorityStepsError as :meth:`Queues.declare`.
        """
        expires = arguments.get("x-expires")
        if expires is not None:
            expires = read_expires(queue, expires)
        if exclusive or auto_delete or expires:
            self._lease_keeper.withdraw_deletion(queue, self._center.client.sleep)
            stale_ms = int(self._settings.toc_stale_after * 1000)
            self.transient[queue] = max(int(expires or 0), stale_ms)
            if auto_delete:
                self.auto_delete.add(queue)
            if exclusive:
                self.exclusive.add(queue)
            if not (exclusive or auto_delete):
                self.expiring[queue] = int(expires or 0)
        limits = {_ARGUMENTS[n]: value for n, value in arguments.items() if n in _ARGUMENTS}
        reads_only = queue in self.transient and queue not in self.expiring
        if reads_only and not limits.keys() - {"message_ttl"}:
            self._to_be[queue] = limits  # also Celery's queues for events have a message_ttl
            return None
        topic = self._declare_topic(queue, limits)
        if queue not in self.transient:
            stood = [*self._resharded(topic, limits), *_expiring(topic)]
            self.ignored[queue] = [*_unknown(arguments), *stood]
        return topic

    def _declare_topic(self, queue: str, limits: Mapping[str, Any]) -> Topic:
        limits = {
            **self._settings.toc_topics.get(queue, {}),
            **self._to_be.get(queue, {}),
            **limits,
        }
        if self._center.recorder is None:
            check_library(queue, limits)
        expires = self.transient.get(queue)
        kept = expires if queue in self.expiring else None
        if kept:
            with suppress(ResponseError):  # this user may not delete what has expired
                sweep(self._center)
        if expires:
            self._lease_keeper.withdraw_deletion(queue, self._center.client.sleep)
            standing = self._center.registry.declared(queue)
            if standing is None:
                limits.setdefault("slots", 1)
            elif not standing.declaration.expires:
                # It was declared to stay, and has messages of others: it is as it was declared.
                self._stays(queue)
                expires = kept = None
        elif self._settings.toc_slots and not self._center.registry.needs_one_slot(limits):
            limits.setdefault("slots", self._settings.toc_slots)
        asked = self.expiring.get(queue, expires)
        declare = partial(self._center.queues.declare, queue, expires=asked, kept=kept, **limits)
        topic: Topic = declare()
        if topic.declaration.kept and not kept:  # it may have expired, and nobody has looked
            with suppress(ResponseError):
                sweep(self._center)
            topic = declare()
        if topic.declaration.kept:
            self._touch(topic)
        elif expires and topic.declaration.expires:
            # The keys live as long as the standing declaration says, whatever is asked now.
            lifetime = min(expires, topic.declaration.expires)
            self._lease_keeper.keep_topic(queue, lifetime, self._holder)
        return topic

    def _stays(self, queue: str) -> None:
        """Note that a queue does not go away by itself, whatever was asked for here."""
        for some in (self.transient, self.expiring):
            some.pop(queue, None)
        for names in (self.auto_delete, self.exclusive):
            names.discard(queue)

    def _resharded(self, topic: Topic, limits: Mapping[str, Any]) -> Iterator[str]:
        """The slot count that was asked for, if another one holds since the topic was resharded.
        (Of other limits that do not hold the center warns.)"""
        asked = {**self._settings.toc_topics.get(topic.name, {}), **limits}
        slots = asked.get("slots")
        if slots is None and not self._center.registry.needs_one_slot(asked):
            slots = self._settings.toc_slots
        if slots is not None and check_slots(topic.name, slots) != topic.slots:
            yield f"slots={slots!r} (it was resharded to {topic.slots})"

    def topic(self, queue: str) -> Topic:
        """The topic of a queue; declared if nobody has done so."""
        topic = self._topic(queue)
        if topic.declaration.kept:
            # Something is put into it, or got.
            since = time.monotonic() - self._touched.get(queue, -inf)
            if since * 1000 >= _touch_ms(topic):
                self._touch(topic)
        return topic

    def _topic(self, queue: str) -> Topic:
        registry = self._center.registry
        before = registry.known(queue)
        known = registry.recent(queue)
        if known is None and before is not None and not before.declaration.expires:
            known = registry.declare_again(before)
        if known is not None:
            registry.agreed(known)
        if queue in self.transient:
            expires = known is not None and known.declaration.expires
            return known if known is not None and expires else self._declare_topic(queue, {})
        if known is None and queue in self._others_transient:
            # Its consumer has gone, or is about to declare it: it must not stay for ever.
            return self._center.queues.declare(queue, slots=1, expires=self.lifetime(queue))
        return known or self._declare_topic(queue, {})

    # -- queues that expire when nobody uses them

    def _touch(self, topic: Topic) -> None:
        """Say that a queue is used just now: it expires that much later."""
        if len(self._touched) > MAX_KNOWN:
            self._touched.clear()
        margin_ms = _touch_ms(topic)
        self._center.expiring.touch(topic, margin_ms)
        self._touched[topic.name] = time.monotonic()
        self._lease_keeper.look_after(topic.name, (topic.declaration.expires or 0) + margin_ms)

    def hold(self, queue: str) -> None:
        """Note that a queue is consumed from now on."""
        topic = self._topic(queue)
        kept = topic.declaration.kept
        if kept:
            self._lease_keeper.keep_topic(queue, kept, self._holder)
            self._center.expiring.hold(topic)

    def leave(self, queue: str) -> None:
        """Note that this channel consumes a queue no more."""
        topic = self._center.registry.known(queue)
        if topic is None or not topic.declaration.kept:
            return
        if self._lease_keeper.topics.leave(queue, self._holder):
            with suppress(*BROKEN, ResponseError):  # it goes when nobody has kept it for long
                self._center.expiring.leave(topic)
                self._lease_keeper.look_after(queue, topic.declaration.expires or 0)

    def is_there(self, queue: str) -> bool:
        """Whether it is declared, and has not expired."""
        topic = self._center.registry.declared(queue)
        if topic is not None and topic.declaration.kept:
            with suppress(ResponseError):  # this user may not delete it
                sweep(self._center)
            topic = self._center.registry.declared(queue)
        return topic is not None

    def size(self, queue: str) -> int:
        """How many messages wait in a queue, due or not; 0 if it is not declared."""
        if self._center.registry.declared(queue) is None:
            return 0
        # Nobody is to be kept from declaring it by a node that is away.
        return sum(
            slot.waiting for slot in self._center.queues.counts_by_slot(queue, reachable=True)
        )

    def note_transient(self, queues: Collection[str]) -> None:
        """Others have bound these queues as transient ones."""
        if len(self._others_transient) > MAX_KNOWN:  # reply queues come and go
            self._others_transient.clear()
        self._others_transient.update(queues)

    def lifetime(self, queue: str) -> int | None:
        """Milliseconds for which a queue that goes away by itself outlives who uses it, as far as
        this process has declared it, or has met its binding; None of any other. Asks nobody."""
        if queue in self.transient:
            return self.transient[queue]
        if queue in self._others_transient:
            return int(self._settings.toc_stale_after * 1000)
        return None

    def forget(self, queue: str) -> None:
        """Forget a queue that is deleted, or is to be."""
        self._lease_keeper.topics.forget(queue)
        self._stays(queue)
        self._touched.pop(queue, None)
        self._to_be.pop(queue, None)


def check_library(queue: str, limits: Mapping[str, Any]) -> None:
    """Raise ConfigurationError, naming the queue, for what only a task library can do."""
    for name in LIBRARY_TERMS:
        said = limits.get(name) if name != "library" else None  # a sender needs none for that
        if said is not None and LIBRARY_TERMS[name].read(f"queue {queue!r}: {name}", said):
            raise ConfigurationError(
                f"queue {queue!r}: {name} needs a task library: set toc_library in "
                f"broker_transport_options, or leave {name} out"
            )


def read_expires(queue: str, value: object) -> int:
    """The argument ``x-expires`` of a queue, in milliseconds. Raises ConfigurationError."""
    limit, what = LIMITS["expires"], f"queue {queue!r}: x-expires"
    read: int = limit.read(what, value) if isinstance(value, str) else limit.check(what, value)
    return read


def _touch_ms(topic: Topic) -> int:
    """Milliseconds after which it is said again that a queue is used: puts come in thousands."""
    return min(TOUCH_MS, (topic.declaration.expires or 0) // 4)


def _expiring(topic: Topic) -> Iterator[str]:
    """That it is to stay, if it goes when nobody uses it, as it was declared first."""
    if topic.declaration.expires:
        yield (
            f"no x-expires (it was declared with {topic.declaration.expires}, which stands: it "
            f"goes with its messages when nobody uses it; 'celery toc topic delete {topic.name}', "
            "then it may be declared anew)"
        )


def _unknown(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Of a queue's arguments, those that have no effect here."""
    for name in arguments:
        if name in _RABBITMQS:
            yield f"{name} (an argument of RabbitMQ's)"
        elif name.startswith("x-") and name not in _ARGUMENTS and name not in _OTHER_ARGUMENTS:
            yield f"{name} (no such argument{suggestion(name, [*_ARGUMENTS, *_OTHER_ARGUMENTS])})"


# -- exchanges and their bindings

logger = logging.getLogger(__name__)


class TopicExchange(virtual.exchange.TopicExchange):
    """Patterns as AMQP has them, in every version of Kombu: ``*`` is one word."""

    wildcards = {"*": r"[^\.]+", "#": r".*?"}


class Exchanges:
    """The exchanges that a channel declares, binds queues to and sends to."""

    def __init__(self, channel: Any) -> None:
        self._lease_keeper: LeaseKeeper = channel.lease_keeper
        #: the bindings in Redis, for who publishes
        self._routes: exchanges.Routes = channel.transport.routes
        #: Kombu's record of what this connection has declared and bound
        self._state = channel.state
        #: name of an exchange type -> what Kombu makes of it for this channel
        self._types = channel.exchange_types
        self._bindings = exchanges.Bindings(channel.center)

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
        if ttl_ms:  # first: what is not kept, the lease keeper may remove
            self._lease_keeper.keep_binding(exchange, member, ttl_ms, holder)
        self._bindings.add(exchange, member, ttl_ms)

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
                self._lease_keeper.bindings.forget((exchange, member))

    def member(
        self, queue: str, exchange: str, routing_key: str, arguments: Any, transient: bool
    ) -> str:
        """A binding as it is kept in Redis.

        transient: the queue goes away by itself; of a fanout exchange, it reads the broadcasts
        """
        kind = self.typeof(exchange)
        reads = kind.type == "fanout" and transient
        part = exchanges.part_of_binding(routing_key or "") if reads else None
        key, pattern, _ = kind.prepare_bind(queue, exchange, routing_key, arguments)
        return exchanges.binding(kind.type, key, pattern, queue, part)

    def members(self, queue: str, exchange: str, routing_key: str, arguments: Any) -> list[str]:
        """A binding in all the ways in which it may be kept in Redis."""
        kind = self.typeof(exchange)
        key, pattern, _ = kind.prepare_bind(queue, exchange, routing_key, arguments)
        members = [exchanges.binding(kind.type, key, pattern, queue)]
        if kind.type == "fanout":  # whoever has bound it may know the queue otherwise
            part = exchanges.part_of_binding(routing_key or "")
            members.append(exchanges.binding(kind.type, key, pattern, queue, part))
        return members

    # -- routing

    def queues_for(
        self, exchange: str, routing_key: str
    ) -> tuple[list[str], exchanges.Table] | None:
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
        self._lease_keeper.bindings.forget_where(lambda name: name[0] == exchange)
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
    """

    def __init__(self, channel: Any) -> None:
        self._center: TimeoutCenter = channel.center
        self._identity = channel.transport.identity
        self._unfollow = channel.poller.unfollow
        #: queues that go away by themselves: what is read for each binding
        self._reading: dict[str, list[exchanges.Subscription]] = {}
        #: queues that go away by themselves and are topics, for they are bound to other exchanges
        self._routed: set[str] = set()

    def only_reads(self, queue: str) -> bool:
        """Whether all that the queue gets are broadcasts, which it reads: it is no topic."""
        return queue in self._reading and queue not in self._routed

    def subscriptions(self, queue: str) -> list[exchanges.Subscription]:
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
    ) -> exchanges.Subscription | None:
        """Read what is broadcast to a queue by this binding, from now on or from where it was left.

        member: the binding as it is in Redis

        Returns None if it is read already.
        """
        reading = self._reading.setdefault(queue, [])
        if any((one.exchange, one.binding) == (exchange, routing_key) for one in reading):
            return None
        known = exchanges.recall(self._identity, queue, exchange, routing_key)
        keys = self._center.keys
        parts = (keys.part(exchange, part) for part in json.loads(member)[4:5])
        streams = [keys.fanout(exchange), *parts]
        last = exchanges.begin(self._center, streams, {} if known is None else known.last)
        subscription = exchanges.Subscription(queue, exchange, routing_key, last)
        if reading:
            subscription.returned = reading[0].returned
        if known is not None and known.returned is not subscription.returned:
            subscription.returned += known.returned
            known.returned.clear()
        reading.append(subscription)
        return subscription

    def read_no_more(self, of: Callable[[exchanges.Subscription], bool]) -> None:
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
