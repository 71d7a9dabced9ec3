"""What connects a poller with the world: its loop, and its connections to the server."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from redis.exceptions import ResponseError

from ..center.runner import named
from ..client.connection import close_idle
from ..scripts.call import ScriptCall
from .cluster_pipes import ClusterConnections
from .loop import Loop
from .native_threads import unpatched_threading
from .pipe import PipelinedConnection, Waiting

if TYPE_CHECKING:
    import redis

    from ..center.center import TimeoutCenter
    from .lease_keeper import LeaseKeeper

#: Seconds for which a worker keeps a connection that nobody uses, and between looks for such.
CONNECTION_IDLE = 10.0
CLOSE_IDLE = 5.0

#: Seconds after which it is said again that a queue is not served.
COMPLAIN_AGAIN = 300.0

logger = logging.getLogger(__name__)

#: Told what a server has refused; whether that is seen to, and the rest goes on.
OnRefused: TypeAlias = Callable[[Waiting, ResponseError], bool]


class Connection(Protocol):
    """Sends commands, and has replies read when the loop finds that they have come."""

    @property
    def busy(self) -> bool:
        """Whether a reply is still to come."""

    def send(self, items: Sequence[tuple[Any, ...]], *, owed: int = 0) -> None:
        """See :meth:`.pipe.PipelinedConnection.send`."""

    def check(self) -> None:
        """Raise redis-py's TimeoutError if a reply is overdue."""

    def wait(self, seconds: float) -> bool:
        """Wait for a reply, or the end of the connection; whether it has come."""

    def read(self) -> None:
        """Take the replies that have come."""

    def close(self) -> None:
        """Close it; there will be no more replies."""


class BlockingConnection(Connection, Protocol):
    """One whose commands wait at the server."""

    client_id: int

    def send(
        self, items: Sequence[tuple[Any, ...]], *, owed: int = 0, block: float = 0.0
    ) -> None: ...

    def readable(self) -> bool:
        """Whether a reply has come, or the end of the connection."""


class Wiring:
    """Kombu's loop, and connections to Redis."""

    def __init__(self, center: TimeoutCenter, leases: LeaseKeeper) -> None:
        self._center = center
        self._leases = leases
        self._close_at = 0.0
        #: first key of calls that were refused -> monotonic seconds after which it is said again
        self._complained: dict[str, float] = {}

    def loop(self, on_nudged: Callable[[], None]) -> Loop:
        """The loop of a poller."""
        return Loop(on_nudged)

    def blocking(self, loop: Loop, on_refused: OnRefused) -> BlockingConnection:
        """A connection for commands that block. On a Cluster, `on_refused` is told what is
        refused."""
        return PipelinedConnection(
            self._pool,
            *(loop.opened, loop.closed, self._leases.retry_later, self._center.metrics),
            on_refused=on_refused if self._center.clustered else None,
        )

    def work(self, loop: Loop) -> Connection:
        """A connection for everything that is answered at once."""
        told = (loop.opened, loop.closed, self._leases.retry_later, self._center.metrics)
        if self._center.clustered:
            return ClusterConnections(self._center.client, *told, self._refused)
        return PipelinedConnection(self._pool, *told, on_refused=self._refused)

    def _refused(self, waiting: Waiting, exc: ResponseError) -> bool:
        """What one queue's key makes impossible keeps nobody from the others."""
        item = waiting.item
        call = item.what
        if "WRONGTYPE" not in str(exc) or not isinstance(call, ScriptCall):
            return False
        now = time.monotonic()
        if now >= self._complained.get(call.keys[0], 0.0):
            self._complained[call.keys[0]] = now + COMPLAIN_AGAIN
            logger.error(
                "a queue is not served, and the others are: %s",
                named(exc, self._center.client, call.keys),
            )
        if waiting.owed:
            self._leases.retry_later([call])
        elif item.on_failure is not None:
            item.on_failure()
        return True

    def close_idle(self, now: float) -> None:
        """Close what this thread has not used for long, if it is time to; now: monotonic seconds"""
        if now >= self._close_at:
            self._close_at = now + CLOSE_IDLE
            patched = unpatched_threading().patched
            close_idle(CONNECTION_IDLE, threading.get_native_id() if patched else None)

    def _pool(self) -> redis.ConnectionPool:
        """Of the server that has the keys of no single slot."""
        client = self._center.client
        pool: redis.ConnectionPool = (
            client.client_for() if self._center.clustered else client
        ).connection_pool
        return pool
