"""A connection of its own that blocks on wake indexes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import redis
from redis.exceptions import ResponseError

from ..client.cluster import is_passing
from ..client.errors import translated
from ..errors import ServerError
from ..scripts.call import as_bytes, pack_command
from .runner import BROKEN
from .wait import Claim

logger = logging.getLogger(__name__)

#: Seconds that a reply may take longer than the command blocks, where the client does not say.
PATIENCE = 10.0

#: Attempts to end a wait, and the seconds between two.
MAX_UNBLOCKS = 20
UNBLOCK_AGAIN = 0.0005


class WakeConnection:
    """Takes announcements from wake indexes, one at a time. It never belongs to the client's pool:
    a bounded one may have no other connection.

    client: the center's. Where it has an attribute `wake_connection`, that class takes the place of
        this one
    clustered: whether that is a Cluster's
    """

    def __init__(self, client: Any, clustered: bool) -> None:
        self._center_client = client
        self._clustered = clustered
        #: of the server that has the wake indexes
        self._client: Any = None
        self._connection: Any = None
        self._id: int | None = None
        #: wake index -> topic, of those that are blocked on
        self._topics: dict[bytes, str] = {}
        #: monotonic seconds when the reply is overdue
        self._latest = 0.0
        self._sleep = sleep_of(client)
        self.pid = os.getpid()

    @property
    def busy(self) -> bool:
        """Whether it blocks."""
        return bool(self._topics)

    @property
    def usable(self) -> bool:
        """Whether it is open, and blocks on nothing."""
        return self._connection is not None and not self._topics

    def listen(self, wakes: Mapping[str, str], seconds: float) -> None:
        """Block on these wake indexes, each with its topic, for so many seconds at most. What the
        server gives is of the first that has something."""
        if self._connection is None:
            self._open()
        # Before it is sent: from then on there may be a claim.
        self._topics = {as_bytes(key): topic for key, topic in wakes.items()}
        command = pack_command("BZPOPMIN", *self._topics, f"{seconds:.3f}")
        patience = self._client.connection_pool.connection_kwargs.get("socket_timeout") or PATIENCE
        self._latest = time.monotonic() + seconds + patience
        self._send(command, seconds)

    def readable(self) -> bool:
        """Whether a reply has come, or the end of the connection."""
        try:
            return self._connection is None or self._can_read(0.0)
        except BROKEN:
            self.close()
            return True

    def wait(self, seconds: float) -> bool:
        """Wait for a reply; whether it has come. Raises redis-py's TimeoutError if it is
        overdue."""
        left = self._latest - time.monotonic()
        if self._can_read(max(min(seconds, left), 0.0)):
            return True
        if left <= seconds:
            raise redis.exceptions.TimeoutError("no reply: the connection is taken for broken")
        return False

    def read(self) -> Claim | None:
        """The reply: what was claimed; None if the time has passed without."""
        try:
            reply = self._reply()
        except ResponseError as exc:
            self.close()
            self._moved(exc)
            raise translated(exc, self._client.connection_pool) from exc
        topics, self._topics = self._topics, {}
        if not reply:
            return None
        slot, _, us = reply[1].decode().partition(":")
        return topics[reply[0]], int(slot), int(us)

    def stop(self) -> Claim | None:
        """Block no longer; returns what was claimed just now."""
        if not self._topics:
            return None
        if self._id is None:
            self.close()
            return None
        for _ in range(MAX_UNBLOCKS):
            if self.readable() or self._unblock():
                # It may have broken: then there is nothing to read.
                return None if self._connection is None else self.read()
            self._sleep(UNBLOCK_AGAIN)  # the command that is to be ended has not even arrived
        self.close()
        return None

    def _unblock(self) -> bool:
        """Have the server answer now; whether it was blocking."""
        return bool(self._client.execute_command("CLIENT", "UNBLOCK", self._id))

    def _open(self) -> None:
        client = self._center_client
        self._client = client.client_for() if self._clustered else client
        self._connection = self._connect(self._client.connection_pool)
        self.pid = os.getpid()
        try:
            self._send(pack_command("CLIENT", "ID"), 0.0)
            self._id = self._reply()
        except ResponseError as exc:
            # Not permitted: then it ends a wait by closing the connection. What is claimed in that
            # moment is made up for by whoever looks into all slots next.
            logger.debug("CLIENT ID: %s", exc)
            self._id = None

    def _moved(self, exc: ResponseError) -> None:
        """Raise a ServerError if a node of a Cluster no longer has the indexes, or not all."""
        if self._clustered and (
            self._center_client.apply_redirect(exc) is not None or is_passing(exc)
        ):
            raise ServerError(f"the wake indexes are being moved: {exc}") from exc

    def close(self) -> None:
        """Close it; it opens again when it is used."""
        connection, self._connection = self._connection, None
        self._topics = {}
        if connection is not None:
            self._disconnect(connection)

    # -- the connection itself

    def _connect(self, pool: Any) -> Any:
        connection = pool.connection_class(**pool.connection_kwargs)
        connection.connect()
        return connection

    def _send(self, command: bytes, seconds: float) -> None:
        """Send a command, which may block for so many seconds."""
        self._connection.send_packed_command((command,), check_health=False)

    def _can_read(self, seconds: float) -> bool:
        return bool(self._connection.can_read(timeout=seconds))

    def _reply(self) -> Any:
        return self._connection.read_response()

    def _disconnect(self, connection: Any) -> None:
        connection.disconnect()


def sleep_of(client: Any) -> Callable[[float], None]:
    """What waits for so many seconds, where this client is used."""
    found: Callable[[float], None] = getattr(client, "sleep", time.sleep)
    return found
