"""The socket of a redis-py connection, the idle connections of its pool, and an asyncio stream.

Touches: ``Connection._sock``, ``ConnectionPool._available_connections`` and, of redis.asyncio,
``Connection._reader``.

Why: the event loop waits for a connection's socket, and redis-py gives neither the socket nor its
file number. A pool gives a connection only after it has made sure that it works, which may wait
for the server; at the end of a process nothing may wait. With asyncio, a connection that the
server has closed while nobody used it must be told from an open one, and redis-py's releases differ
in how they tell; and of many replies that arrive together, redis-py's parser awaits each line.

Read in redis-py 5.0.8, 5.3.1, 6.4.0, 7.4.1 and 8.1.0.

Without: of ``redis-socket``, nothing can be consumed, and nothing starts; of ``idle-connections``,
the counters of a process's last seconds are lost; of ``async-streams``, the first call after the
server has closed a connection fails, and an `AsyncTimeoutCenter` reads replies more slowly.
"""

from __future__ import annotations

import socket
from typing import Any

import redis

from .registry import CompatPart

SOCKET = CompatPart(
    "redis-socket",
    touches="redis-py's Connection._sock",
    lost="no event loop can wait for Redis",
    check=lambda: CompatPart.missing(redis.Connection(), "_sock"),
    way_out="Install redis-py 5.0.8 to 8.1.0",
)

IDLE = CompatPart(
    "idle-connections",
    touches="redis-py's ConnectionPool._available_connections",
    lost="the counters of a process's last seconds are not sent",
    check=lambda: CompatPart.missing(redis.ConnectionPool(), "_available_connections"),
)


def _missing_of_asyncio() -> list[str]:
    from redis.asyncio import Connection  # it costs a process without asyncio its time

    return CompatPart.missing(Connection(), "_reader")


STREAM = CompatPart(
    "async-streams",
    touches="redis-py's asyncio Connection._reader",
    lost="with asyncio, replies are read more slowly, and a call fails after an idle connection "
    "was closed",
    check=_missing_of_asyncio,
)


def socket_of(connection: Any) -> socket.socket:
    """The socket of a connection that is open."""
    found: socket.socket = connection._sock
    return found


def is_open(connection: Any) -> bool:
    """Whether a connection has a socket."""
    return connection._sock is not None


def open_of(pool: Any) -> Any:
    """An open connection of a pool that nobody uses, or None."""
    # A pool that waits for a free connection (BlockingConnectionPool) keeps them in a queue.
    if not hasattr(pool, "_available_connections") or not IDLE.usable():
        return None
    idle = pool._available_connections
    connection = idle.pop() if idle else None
    return connection if connection is not None and is_open(connection) else None


def stream_of(connection: Any) -> Any:
    """The asyncio.StreamReader of an open connection of redis.asyncio; None if there is none."""
    return getattr(connection, "_reader", None)
