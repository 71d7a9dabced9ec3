"""Sends the counters of a process to Redis.

Every few seconds a process adds its changes to the totals in Redis, from the lease keeper's thread
if it has one, otherwise after a publish. Nothing is sent if nothing has changed. A failure is
logged and raises nothing: the last seconds of a process may be missing. Redis has the totals of
each topic and those of each of the last minutes, by its own clock, until the topic is deleted.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from redis.exceptions import RedisError

from ..compat.redis_connections import socket_of
from ..errors import TocError
from .counters import Counters

logger = logging.getLogger(__name__)

#: Seconds between two sendings; the same if only idle pops are new; and after a failure.
INTERVAL = 5.0
IDLE_INTERVAL = 60.0
PAUSE = 60.0


class Outlet(Protocol):
    """Adds counters up in Redis; a timeout center is one."""

    @property
    def client(self) -> Any:
        """redis-py's client, or that of a Cluster, which has a client for each node."""

    @property
    def clustered(self) -> bool: ...

    def counting(self, topic: str | None, added: dict[str, int]) -> Any:
        """The call that adds to a topic's counters; without a topic, to those of scripts."""

    def run_each(self, calls: Sequence[Any]) -> list[Any]:
        """Run such calls; return their results, or the error of a call that failed."""


class Metrics(Counters):
    """The counters of this process for one server and prefix, and when they were sent.

    active: whether anything is counted at all
    """

    def __init__(self, *, active: bool = True) -> None:
        super().__init__(active=active)
        self.reset()
        if active:
            _all.add(self)

    @classmethod
    def of(cls, identity: Hashable) -> Metrics:
        """The metrics of this process for a server and prefix."""
        found = _shared.get(identity)
        return found or _shared.setdefault(identity, cls())

    def reset(self) -> None:
        """Consider all values sent: after a fork, the parent sends them."""
        #: the thread that pops the element sends; no lock, because greenlets and native threads may
        #: both try
        self._turn = [True]
        #: monotonic seconds when something may be sent again, and when it last was
        self.due = 0.0 if self.active else float("inf")
        self._last = time.monotonic()
        #: the outlet that was last used
        self._outlet: Callable[[], Outlet | None] = _nothing
        self.all_sent()

    def pass_by(self, outlet: Outlet) -> None:
        """Send the changes if it is time to. Called by a process that has just used the server."""
        if time.monotonic() >= self.due:
            self.send(outlet)

    def send(self, outlet: Outlet) -> None:
        """Add the changes to the totals in Redis. Raises no error that a server may cause."""
        if not self.active:
            return
        try:
            turn = self._turn.pop()
        except IndexError:  # another thread sends
            return
        now = time.monotonic()
        try:
            self.due = now + INTERVAL
            self._outlet = weakref.ref(outlet)
            changed = self.changed(idle=now - self._last >= IDLE_INTERVAL)
            if not changed:
                return
            self._last = now
            results = outlet.run_each([outlet.counting(one.topic, one.added) for one in changed])
            for one, result in zip(changed, results, strict=True):
                if isinstance(result, Exception):
                    raise result
                one.was_sent()
        except (RedisError, TocError, OSError) as exc:
            self.due = now + PAUSE
            logger.debug("counters are sent later: %s", exc)
        finally:
            self._turn.append(turn)

    def send_at_exit(self) -> None:
        """At the end of the process: send the last changes over a connection that is open already,
        without waiting for the server."""
        outlet = self._outlet()
        if outlet is None:
            return
        try:
            client = outlet.client.client_for() if outlet.clustered else outlet.client
            take_open = getattr(client, "take_open", None)
            changed = self.changed(idle=False)
            connection = take_open() if changed and take_open is not None else None
            if connection is None:
                return
            calls = [outlet.counting(one.topic, one.added) for one in changed]
            commands = [call.command(whole=True) for call in calls]
            socket_of(connection).settimeout(0)
            connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        except Exception as exc:  # modules may be half torn down already
            logger.debug("the last counters are lost: %s", exc)


def _nothing() -> None:
    """Stands for an outlet that is gone."""


_shared: dict[Hashable, Metrics] = {}
_all: weakref.WeakSet[Metrics] = weakref.WeakSet()


def _after_fork() -> None:
    for metrics in list(_all):
        metrics.reset()


def _at_exit() -> None:
    for metrics in list(_all):
        metrics.send_at_exit()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
