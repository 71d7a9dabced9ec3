"""Sends what a process has counted to Redis.

A process adds, every few seconds, what has come about since to the totals in Redis: from the lease
keeper's thread where there is one, else with a publish. Nothing is sent if nothing has changed. A
failure is logged and raises nothing: the last seconds of a process may be missing. In Redis there
are, per topic, the totals and those of each of the last minutes, by Redis's own clock; they go
when the topic is deleted.
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

#: Seconds between two sendings; where only idle pops are new; and after one that failed.
INTERVAL = 5.0
IDLE_INTERVAL = 60.0
PAUSE = 60.0


class Outlet(Protocol):
    """What adds counters up in Redis; a timeout center is one."""

    @property
    def client(self) -> Any:
        """redis-py's client; of a Cluster, one that has the clients of its nodes."""

    @property
    def clustered(self) -> bool: ...

    def counting(self, topic: str | None, added: dict[str, int]) -> Any:
        """The call that adds to a topic's counters; without a topic, to those of scripts."""

    def run_each(self, calls: Sequence[Any]) -> list[Any]:
        """Run such calls; in place of the result of one that failed, the error."""


class Metrics(Counters):
    """What this process has counted for one server and prefix, and when it was sent.

    active: whether anything is counted at all
    """

    def __init__(self, *, active: bool = True) -> None:
        super().__init__(active=active)
        self.reset()
        if active:
            _all.add(self)

    @classmethod
    def of(cls, identity: Hashable) -> Metrics:
        """Those of this process for a server and prefix."""
        found = _shared.get(identity)
        return found or _shared.setdefault(identity, cls())

    def reset(self) -> None:
        """Take what was counted so far as sent: after a fork, the parent does that."""
        #: who takes it sends; no lock, for greenlets and native threads may both be at it
        self._turn = [True]
        #: monotonic seconds when something may be sent again, and when it last was
        self.due = 0.0 if self.active else float("inf")
        self._last = time.monotonic()
        #: what was last used to send
        self._outlet: Callable[[], Outlet | None] = _nothing
        self.all_sent()

    def pass_by(self, outlet: Outlet) -> None:
        """Send what there is, if it is time to: for a process that has just talked to the
        server anyway."""
        if time.monotonic() >= self.due:
            self.send(outlet)

    def send(self, outlet: Outlet) -> None:
        """Add to Redis what has come about since; raises nothing that a server may cause."""
        if not self.active:
            return
        try:
            turn = self._turn.pop()
        except IndexError:  # another thread does it
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
        """At the end of the process: send what is left on a connection that is open already,
        and wait for nothing."""
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
        except Exception as exc:  # it may be half taken down already
            logger.debug("the last counters are lost: %s", exc)


def _nothing() -> None:
    """An outlet that is gone."""


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
