"""A loop over messages, whose leases are renewed while its body runs.

:class:`Held` says which leases are to be renewed and when; times are handed in.
:class:`Consumption` fetches, renews from a thread, and settles.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Any

from redis.exceptions import RedisError

from ..errors import ConfigurationError
from ..model.results import Delivery
from .core import CenterPart, Core, started
from .pop import Deliveries, delivery_of
from .runner import BROKEN
from .waiting import names_of, passes, seconds_of

logger = logging.getLogger(__name__)

#: A lease is renewed so many times while it lasts, and after so many seconds at most.
TIMES = 3
MOST_INTERVAL = 15.0

#: Seconds after which a renewal that failed is tried again.
RETRY = 1.0

#: Seconds that the end of a loop waits for its thread. (It ends by itself.)
LAST_WORDS = 2.0

#: Messages that one log line names.
MAX_NAMED = 10


class Taken(Delivery):
    """A message in the body of a loop: a :class:`Delivery`, and what can be done about it.

    lost: whether its lease has ended while it was here, so that another consumer may have it, or
        it was cancelled
    """

    lost: bool
    #: whether nothing has been said of it in this loop
    _open: bool
    _consumption: Consumption

    def __reduce__(self) -> tuple[Any, ...]:
        return (Delivery, tuple(self))  # in another process it is a delivery like any other

    def ack(self) -> bool:
        """Acknowledge it; returns whether it was still there."""
        return self._consumption.acknowledge(self)

    def reject(
        self,
        *,
        requeue: bool = True,
        reason: str = "",
        error: str = "",
        backoff: float | None = None,
    ) -> str | None:
        """Give it back after a failure: see :meth:`.pop.Deliveries.reject`."""
        return self._consumption.center.reject(
            self, requeue=requeue, reason=reason, error=error, backoff=backoff
        )

    def release(self) -> bool:
        """Give it back unhandled; returns whether it was still held by this delivery."""
        return bool(self._consumption.center.release(self))


class Held:
    """The messages of a loop that are not settled, and when their leases are to be renewed.

    Threads may share one: a lock is held for moments.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: what tells a delivery -> the message, and the seconds of its lease
        self._held: dict[Hashable, tuple[Taken, float]] = {}
        #: when the leases are to be renewed
        self.due = inf

    def __contains__(self, message: Delivery) -> bool:
        return delivery_of(message) in self._held

    def __len__(self) -> int:
        return len(self._held)

    def add(self, message: Taken, lease: float, now: float) -> None:
        """Renew the lease of this message, of so many seconds, from `now` on."""
        with self._lock:
            self._held[delivery_of(message)] = (message, lease)
            self.due = min(self.due, now + interval_of(lease))

    def drop(self, messages: Iterable[Delivery]) -> list[Taken]:
        """Renew their leases no longer; returns those that were held."""
        with self._lock:
            found = (self._held.pop(delivery_of(message), None) for message in messages)
            return [one[0] for one in found if one is not None]

    def all(self) -> list[Taken]:
        """The messages that are held."""
        with self._lock:
            return [message for message, _ in self._held.values()]

    def renewing(self, now: float) -> list[Taken]:
        """What is to be renewed now, if anything; the next time is set."""
        with self._lock:
            if now < self.due:
                return []
            leases = [lease for _, lease in self._held.values()]
            self.due = now + interval_of(min(leases)) if leases else inf
            return [message for message, _ in self._held.values()]

    def again(self, now: float) -> None:
        """A renewal has failed: try it again a moment later."""
        with self._lock:
            self.due = min(self.due, now + RETRY)


def interval_of(lease: float) -> float:
    """Seconds between two renewals of a lease of so many seconds."""
    return min(lease / TIMES, MOST_INTERVAL)


class Consumption:
    """What :meth:`Loops.consume` returns: a context manager, and in its block an
    iterator over messages. The arguments are those of that method.

    loops: of the center that pops and settles
    """

    #: what a message is made
    taken: type[Taken] = Taken
    #: makes what rings for the thread
    _make_bell: Callable[[], Any] = threading.Event

    def __init__(
        self,
        loops: Loops,
        topics: Iterable[str],
        *,
        limit: int = 1,
        idle: float | None = None,
        visibility: float | None = None,
        auto_ack: bool = True,
    ) -> None:
        names, seconds = names_of(topics), seconds_of(idle, "idle")
        if limit < 1:
            raise ConfigurationError(f"consume needs a limit of at least 1, not {limit}")
        self.center = loops.deliveries
        self._pop = partial(self.center.pop, names, limit, wait=seconds, visibility=visibility)
        self._lease_of = loops.lease_of
        self._visibility = visibility
        self._auto_ack = auto_ack
        self._entered = False
        self._start_anew()

    def _start_anew(self) -> None:
        """Hold nothing. A forked child does not hold what its parent holds."""
        self._pid = os.getpid()
        self.held = Held()
        self._fetched: deque[Taken] = deque()
        self._current: Taken | None = None
        #: monotonic seconds since when leases cannot be renewed; None: they can
        self._failing_since: float | None = None
        self._thread: threading.Thread | None = None
        self._ended = False
        self._bell = self._make_bell()

    def _own(self) -> None:
        if self._pid != os.getpid():
            self._start_anew()

    # -- the block

    def __enter__(self) -> Consumption:
        if self._entered:
            raise RuntimeError("this consumption was used before: call consume() for each block")
        self._entered = True
        self.center.on_settled.append(self._settled)
        return self

    def __exit__(self, kind: object, exc: object, trace: object) -> None:
        self._own()
        self._ended = True
        self._bell.set()
        current, self._current = self._current, None
        try:
            if current is not None and isinstance(exc, Exception) and current._open:
                self.center.reject(current, requeue=True, error=told(exc))
            self.center.release(self.held.all())
        except (RedisError, *BROKEN) as error:
            logger.warning("%d messages come back when their leases end: %s", len(self.held), error)
        finally:
            self.center.on_settled.remove(self._settled)
            if self._thread is not None:
                self._thread.join(LAST_WORDS)

    def __iter__(self) -> Iterator[Taken]:
        return self

    def __next__(self) -> Taken:
        message = self.take()
        if message is None:
            raise StopIteration
        return message

    def take(self) -> Taken | None:
        """The body goes on to the next message; None if none came in time."""
        if not self._entered or self._ended:
            raise RuntimeError("messages are consumed in a block: with center.consume(...) as ...")
        self._own()
        current, self._current = self._current, None
        if current is not None and self._auto_ack and current._open:
            self.acknowledge(current)  # also if its lease has ended: nobody else need handle it
        while True:
            while self._fetched:
                message = self._fetched.popleft()
                if message in self.held:  # else its lease has ended meanwhile
                    self._current = message
                    return message
            if not self._fetch():
                return None

    def _fetch(self) -> bool:
        """Fetch messages; whether any came in time."""
        deliveries = self._pop().messages
        if not deliveries:
            return False
        now = time.monotonic()
        for delivery in deliveries:
            message = self.taken(*delivery)
            message.lost, message._open, message._consumption = False, True, self
            self.held.add(message, self._visibility or self._lease_of(message), now)
            self._fetched.append(message)
        self._start_renewing()
        self._bell.set()
        return True

    def _start_renewing(self) -> None:
        if self._thread is None:
            self._thread = started(self._renew, "toc-consume")

    # -- settling

    def acknowledge(self, message: Taken) -> bool:
        """Acknowledge a message; tries again for as long as its lease lasts, if the server cannot
        be reached."""
        until = time.monotonic() + (self._visibility or self._lease_of(message))
        pause = 0.05
        while True:
            try:
                there = bool(self.center.ack(message))
                break
            except (RedisError, *BROKEN) as exc:
                if time.monotonic() + pause > until or not passes(exc):
                    raise
                self.center.sleep(pause)
                pause = min(2 * pause, RETRY)
        if not there:
            message.lost = True
            logger.warning(
                "message %s of %s was gone when it was acknowledged: it was cancelled, or its "
                "lease had ended and another consumer has handled it",
                *(message.id, message.topic),
            )
        return there

    def _settled(self, messages: Sequence[Delivery]) -> None:
        """Messages are acknowledged, rejected or released now."""
        self._own()
        self.held.drop(messages)
        current = self._current
        if current is not None and delivery_of(current) in map(delivery_of, messages):
            current._open = False

    # -- renewing, in a thread

    def _renew(self) -> None:
        held, bell = self.held, self._bell
        while not self._ended:
            now = time.monotonic()
            if due := held.renewing(now):
                self.renew(held, due, now)
            bell.wait(None if held.due == inf else max(held.due - time.monotonic(), 0.0))
            bell.clear()

    def renew(self, held: Held, due: list[Taken], now: float) -> None:
        """Renew the leases of these."""
        try:
            ended = self.center.extend(due, self._visibility)
        except (RedisError, *BROKEN) as exc:
            held.again(now)
            if not passes(exc):
                logger.error("cannot renew leases: %s", exc)
            elif self._failing_since is None:
                self._failing_since = now
                logger.warning("cannot renew leases for now, will retry: %s", exc)
            return
        if self._failing_since is not None:
            lasted, self._failing_since = now - self._failing_since, None
            logger.warning("leases are renewed again, after %.0f seconds", lasted)
        lost = held.drop(ended)  # what was settled meanwhile is not lost
        for message in lost:
            message.lost = True
        if lost:
            shown = ", ".join(f"{one.id} of {one.topic}" for one in lost[:MAX_NAMED])
            more = f" and {len(lost) - MAX_NAMED} more" if len(lost) > MAX_NAMED else ""
            logger.warning(
                "leases ended before they were renewed, the messages may be delivered again: %s%s",
                *(shown, more),
            )


class Loops(CenterPart):
    """Makes loops over messages."""

    def __init__(self, core: Core, deliveries: Deliveries) -> None:
        super().__init__(core)
        self.deliveries = deliveries

    def consume(
        self,
        *topics: str,
        limit: int = 1,
        idle: float | None = None,
        visibility: float | None = None,
        auto_ack: bool = True,
    ) -> Consumption:
        """Consume messages in a loop, which waits for them and renews their leases::

            with center.consume("mail", "sms", limit=10) as messages:
                for message in messages:
                    print(message.topic, message.body)

        limit: how many messages to fetch at a time
        idle: seconds after which the loop ends if nothing comes; None: never
        visibility: seconds that the leases last unless they are renewed; as each message says, or
            its topic, or the center, unless given
        auto_ack: acknowledge each message when the body goes on to the next one. Without it, the
            body does so: ``message.ack()``, or :meth:`.pop.Deliveries.ack` in any thread

        At the end of the block, what is not settled is released at once. But for the message
        whose body raises an exception: it is rejected, and comes back with one retry less.

        Raises ConfigurationError for topics or numbers that make no sense.
        """
        return Consumption(
            self, topics, limit=limit, idle=idle, visibility=visibility, auto_ack=auto_ack
        )

    def lease_of(self, delivery: Delivery) -> float:
        """The seconds of a message's lease."""
        if delivery.visibility is not None:
            return delivery.visibility
        declaration = self._registry.topic_of(delivery).declaration
        return declaration.limits(self._context.limits).visibility


def told(exc: BaseException) -> str:
    """An exception as it is kept with a message: what it says, and where it was raised."""
    text = "".join(traceback.format_exception_only(type(exc), exc)).strip()
    where = traceback.extract_tb(exc.__traceback__)
    return f"{text} ({where[-1].filename}:{where[-1].lineno})" if where else text
