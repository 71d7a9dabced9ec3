"""Queues as topics: what was declared of them, and which go away by themselves."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import suppress
from math import inf
from typing import Any

from redis.exceptions import ResponseError

from ..center.center import TimeoutCenter
from ..client.options import Settings, suggestion
from ..consumer.connections import BROKEN
from ..consumer.lease_keeper import LeaseKeeper
from ..consumer.upkeeper import sweep
from ..errors import ConfigurationError
from ..model.limits import LIBRARY_TERMS, LIMITS, NOTIFIER_TERMS, TERMS, Limits
from ..model.topic import Topic, check_slots

# -- queues as topics

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
        "x-consumer-timeout",
        "x-dead-letter-exchange",
        "x-dead-letter-routing-key",
        "x-dead-letter-strategy",
        "x-delivery-limit",
        "x-max-length",
        "x-max-length-bytes",
        "x-overflow",
        "x-queue-leader-locator",
        "x-queue-mode",
        "x-queue-type",
        "x-quorum-initial-group-size",
        "x-single-active-consumer",
    )
)


class Queues:
    """The queues that a channel has declared or sends to.

    holder: by which the lease keeper knows who uses a transient queue
    """

    def __init__(
        self,
        center: TimeoutCenter,
        settings: Settings,
        lease_keeper: LeaseKeeper,
        holder: Hashable,
    ) -> None:
        self._center = center
        self._settings = settings
        self._lease_keeper = lease_keeper
        self._holder = holder
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
            resharded = self._resharded(topic, limits)
            self.ignored[queue] = [*_unknown(arguments), *resharded]
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
        topic = self._center.queues.declare(queue, expires=asked, kept=kept, **limits)
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
            self._touch_now_and_then(topic)
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

    def _touch_now_and_then(self, topic: Topic) -> None:
        """Something is put into it, or got."""
        now = time.monotonic()
        since = now - self._touched.get(topic.name, -inf)
        if since * 1000 >= _touch_ms(topic):
            self._touch(topic)

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
        if self._lease_keeper.leave_topic(queue, self._holder):
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
        self._lease_keeper.forget_topic(queue)
        self.transient.pop(queue, None)
        self.expiring.pop(queue, None)
        self._touched.pop(queue, None)
        self._to_be.pop(queue, None)
        self.auto_delete.discard(queue)
        self.exclusive.discard(queue)


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


def _unknown(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Of a queue's arguments, those that have no effect here."""
    for name in arguments:
        if name in _RABBITMQS:
            yield f"{name} (an argument of RabbitMQ's)"
        elif name.startswith("x-") and name not in _ARGUMENTS and name not in _OTHER_ARGUMENTS:
            yield f"{name} (no such argument{suggestion(name, [*_ARGUMENTS, *_OTHER_ARGUMENTS])})"
