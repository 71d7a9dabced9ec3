"""What a process holds on a server and owes it, and when that is to be seen to next."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from .deletions import OwedDeletions
from .early_acks import EarlyAcks
from .expiries import Expiries
from .flights import Flights
from .leases import BEATS_PER_LEASE, Leases
from .owed_calls import OwedCalls
from .presence import KeptFresh, Presence

#: Seconds between attempts to run what is owed.
RETRY_INTERVAL = 1.0

#: Seconds after a delivery has ended, as far as is known here, when the server is asked.
AFTER_END = 0.02

#: Seconds between looks for what others left behind.
SWEEP_INTERVAL = 15.0


def next_beat(now: float, lifetimes: Iterable[float], ends_at: float) -> float:
    """Monotonic seconds of the beat after the one that begins now.

    lifetimes: seconds that what is held lives without being renewed
    ends_at: when the first of what nobody asks for is to be given back, or a delivery ends although
        it is renewed
    """
    shortest = min(lifetimes, default=float("inf"))
    due = now + min(SWEEP_INTERVAL, shortest / BEATS_PER_LEASE)
    return min(due, max(ends_at, now + RETRY_INTERVAL))


class Holdings:
    """Passive parts, which share a lock. None of them asks the server.

    lock: held for moments, within which no greenlet yields. It is reentrant: garbage may be
        collected meanwhile, and a channel that is garbage leaves what it held.
    make_lock: makes such locks
    """

    def __init__(
        self,
        lock: AbstractContextManager[Any],
        make_lock: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.lock = lock
        self.leases = Leases(lock)
        self.early_acks = EarlyAcks(lock)
        #: transient queues
        self.topics: KeptFresh[str] = KeptFresh(lock, min)
        #: (exchange, binding) of transient queues
        self.bindings: KeptFresh[tuple[str, str]] = KeptFresh(lock, max)
        self.expiries = Expiries(lock)
        self.presence = Presence(lock, socket.gethostname(), os.getpid())
        self.calls = OwedCalls()
        self.deletions = OwedDeletions(make_lock)
        #: what is being delivered, and what was to be
        self.flights = Flights(make_lock)

    def __bool__(self) -> bool:
        """Whether there is anything to see to."""
        return bool(
            self.leases
            or self.topics
            or self.bindings
            or self.expiries
            or self.presence
            or self.calls
            or self.deletions
            or self.flights
        )

    def next_beat(self, now: float) -> float:
        """When what is held now is to be seen to after now."""
        kept = (*self.topics.lifetimes().values(), *self.bindings.lifetimes().values())
        lifetimes = [self.leases.shortest(), self.flights.shortest(), *(ms / 1000 for ms in kept)]
        ends_at = min(self.flights.kept_until(), self.leases.first_end() + AFTER_END)
        due = next_beat(now, lifetimes, ends_at)
        return min(due, self.expiries.next(now, RETRY_INTERVAL))
