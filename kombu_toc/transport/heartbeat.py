"""Renews, from a thread, what this process holds on a server.

That is: the leases of delivered messages, transient queues and bindings, and what could not be
said because a connection broke: an acknowledgement counts however late it comes. One heartbeat
per process and server, whatever happens to Kombu's connections.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

from redis.exceptions import ResponseError

from ..center import Call, Delivery, TimeoutCenter
from ..errors import TocError
from .bindings import Bindings
from .link import BROKEN

logger = logging.getLogger(__name__)

#: Renewals within one lease: two may fail before it ends.
BEATS_PER_LEASE = 3

#: Seconds between attempts to say what is owed.
RETRY_INTERVAL = 1.0

#: Seconds between looks for what others left behind.
SWEEP_INTERVAL = 15.0

#: Stale topics and exchanges that one look deletes at most.
SWEEP_MOST = 100

#: How replies begin that mean: not now.
NOT_NOW = ("READONLY", "MISCONF", "NOREPLICAS", "OOM", "LOADING", "MASTERDOWN", "CLUSTERDOWN")

_heartbeats: dict[Hashable, Heartbeat] = {}
_guard = threading.Lock()


def _after_fork() -> None:
    # The child holds nothing of what the parent was delivered, and the thread is not in it.
    global _guard
    _guard = threading.Lock()
    _heartbeats.clear()


os.register_at_fork(after_in_child=_after_fork)


class Heartbeat:
    """See above. `make_center` gives it a center with a client of its own."""

    def __init__(self, make_center: Callable[[], TimeoutCenter]) -> None:
        self._make_center = make_center
        self._held: dict[tuple[str, int, str], tuple[Delivery, float]] = {}
        #: queue -> who uses it -> milliseconds it lives without being refreshed
        self._topics: dict[str, dict[Hashable, int]] = {}
        self._bindings: dict[tuple[str, str], dict[Hashable, int]] = {}
        self._owed: list[Call] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._interval = float("inf")
        self._swept = 0.0

    @classmethod
    def of(cls, identity: Hashable, make_center: Callable[[], TimeoutCenter]) -> Heartbeat:
        """The heartbeat of this process for a server."""
        with _guard:
            try:
                return _heartbeats[identity]
            except KeyError:
                made = _heartbeats[identity] = cls(make_center)
                return made

    def hold(self, delivery: Delivery, visibility: float) -> None:
        """Renew this message's lease until it is dropped. visibility: seconds."""
        self._held[delivery.topic, delivery.slot, delivery.id] = (delivery, visibility)
        self._at_least_every(visibility / BEATS_PER_LEASE)

    def drop(self, delivery: Delivery) -> None:
        """Do not renew it any longer."""
        key = (delivery.topic, delivery.slot, delivery.id)
        held = self._held.get(key)
        if held is not None and held[0].mark == delivery.mark:  # else it was delivered again
            self._held.pop(key, None)

    def keep_topic(self, name: str, expires_ms: int, holder: Hashable) -> None:
        """Keep a transient topic from going stale until its last holder leaves it."""
        self._topics.setdefault(name, {})[holder] = expires_ms
        self._at_least_every(expires_ms / 1000 / BEATS_PER_LEASE)

    def keep_binding(self, exchange: str, binding: str, ttl_ms: int, holder: Hashable) -> None:
        """Keep a transient queue's binding from going stale until its last holder leaves it."""
        self._bindings.setdefault((exchange, binding), {})[holder] = ttl_ms
        self._at_least_every(ttl_ms / 1000 / BEATS_PER_LEASE)

    def leave_topic(self, name: str, holder: Hashable) -> None:
        _leave(self._topics, name, holder)

    def leave_binding(self, exchange: str, binding: str, holder: Hashable) -> None:
        _leave(self._bindings, (exchange, binding), holder)

    def forget_topic(self, name: str) -> None:
        """It is deleted: nobody holds it any more."""
        self._topics.pop(name, None)

    def forget_binding(self, exchange: str, binding: str) -> None:
        self._bindings.pop((exchange, binding), None)

    def leave_all(self, holder: Hashable) -> None:
        """A channel is closed."""
        for held in (self._topics, self._bindings):
            for name in list(held):
                _leave(held, name, holder)

    def owe(self, calls: list[Call]) -> None:
        """Run these as soon as the server can be reached."""
        with self._lock:
            self._owed += calls
        self._at_least_every(RETRY_INTERVAL)

    def _at_least_every(self, seconds: float) -> None:
        if seconds < self._interval or self._thread is None:
            with self._lock:
                self._interval = min(self._interval, seconds)
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="toc-heartbeat", daemon=True
                    )
                    self._thread.start()
                else:
                    self._wake.set()

    def _run(self) -> None:
        center: TimeoutCenter | None = None
        beat = time.monotonic()
        while True:
            beat += min(self._interval, SWEEP_INTERVAL)
            wait = beat - time.monotonic()
            if wait > 0 and self._wake.wait(wait):
                # A shorter interval, counted from the beat before.
                self._wake.clear()
                beat = time.monotonic()
                continue
            beat = time.monotonic()
            with self._lock:
                if not (self._held or self._topics or self._bindings or self._owed):
                    self._thread, self._interval = None, float("inf")
                    break
            try:
                if center is None:
                    center = self._make_center()
                self._beat(center)
            except BROKEN as exc:
                logger.warning("cannot renew leases for now: %s", exc)
                self._interval = min(self._interval, RETRY_INTERVAL)
            except TocError as exc:
                logger.error("cannot renew leases: %s", exc)
            except Exception:
                logger.exception("cannot renew leases")
        if center is not None:
            center.client.close()

    def _beat(self, center: TimeoutCenter) -> None:
        intervals = [SWEEP_INTERVAL]
        with self._lock:
            owed, self._owed = self._owed, []
        if owed:
            try:
                center.run_all(owed)
            except BROKEN:
                self.owe(owed)
                raise
            except ResponseError as exc:
                if str(exc).startswith(NOT_NOW):
                    self.owe(owed)
                else:
                    logger.error("cannot settle %d messages: %s", len(owed), exc)
        by_visibility: dict[float, list[Delivery]] = defaultdict(list)
        for delivery, visibility in list(self._held.values()):
            by_visibility[visibility].append(delivery)
        for visibility, deliveries in by_visibility.items():
            intervals.append(visibility / BEATS_PER_LEASE)
            for lost in center.extend(deliveries, visibility):
                if (lost.topic, lost.slot, lost.id) in self._held:
                    self.drop(lost)
                    logger.warning(
                        "message %s of %s was not renewed in time and may be delivered again",
                        lost.id,
                        lost.topic,
                    )
        bindings = Bindings(center)
        for name, holders in list(self._topics.items()):
            expires_ms = min(list(holders.values()), default=0)
            if not expires_ms:
                continue
            intervals.append(expires_ms / 1000 / BEATS_PER_LEASE)
            center.refresh(name, expires_ms)
        for (exchange, binding), holders in list(self._bindings.items()):
            ttl_ms = max(list(holders.values()), default=0)
            if not ttl_ms:
                continue
            intervals.append(ttl_ms / 1000 / BEATS_PER_LEASE)
            bindings.add(exchange, binding, ttl_ms)
        if time.monotonic() - self._swept > SWEEP_INTERVAL:
            self._swept = time.monotonic()
            sweep(center)
        with self._lock:
            self._interval = min(intervals)
            if self._owed:
                self._interval = min(self._interval, RETRY_INTERVAL)


def _leave(held: dict[Any, dict[Hashable, int]], name: Any, holder: Hashable) -> None:
    holders = held.get(name)
    if holders is not None:
        holders.pop(holder, None)
        if not holders:
            held.pop(name, None)


def sweep(center: TimeoutCenter) -> list[str]:
    """Delete the transient queues and bindings that nobody has refreshed; return their names."""
    stale = center.stale(SWEEP_MOST)
    bindings = Bindings(center)
    for member in stale:
        kind, _, name = member.partition(":")
        if kind == "topic":
            logger.info("deleting queue %s: it went stale", name)
            center.delete(name)
        else:
            bindings.of(name)
    return stale
