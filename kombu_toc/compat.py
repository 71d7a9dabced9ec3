"""Every private name of Kombu, redis-py and aiohttp that this package touches, and whether they may
be used.

A part is one use of what another library does not promise to keep. On start it is checked whether
what the part expects is there. If not, or if ``TOC_COMPAT_OFF`` names the part (several are
separated by commas), one log line says what is lost, and all else goes on without it. A part that
is needed so that no task is lost or executed twice raises `CompatError` instead: it cannot be
switched off, and nothing starts without it.

The socket of a redis-py connection, the idle connections of its pool, and an asyncio stream
(`redis-socket`, `idle-connections`, `async-streams`).

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

What Kombu's virtual channels and transports keep for their subclasses (`kombu-channel`).

Touches: of `virtual.Channel` the fields ``_tag_to_queue``, ``_active_queues``, ``_consumers`` and
``_qos``, of `virtual.Transport` ``_avail_channels``, of `virtual.QoS` ``_on_collect``; and the
methods that a subclass replaces: ``_put``, ``_size``, ``_purge``, ``_has_queue``, ``_lookup``.

Why: these are what transports outside of Kombu are made of, as its own are; but no page of Kombu's
says so, and the fields have no other name.

Read in Kombu 5.3.7, 5.4.2, 5.5.4, 5.6.2 and 5.7.0.

Without: nothing can be sent or consumed, and nothing starts.

A producer does not declare anew what is declared (`known-queues`).

Touches: `Producer.maybe_declare`, which is replaced on the class.

Why: Celery has its queue declared with each message. Kombu copies and binds the queue before it
finds that this has been done: an eighth of what it takes to send a task.

Read in Kombu 5.3.7 and 5.7.0.

Without: sending takes longer.

The protocol of the connections that aiohttp opens (`http-protocol`).

Touches: of aiohttp ``TCPConnector._factory``, and the methods of ``client_proto.ResponseHandler``
that a subclass extends or calls, and its ``_payload``.

Why: aiohttp gives what arrives to its parser in one piece, and if the parser does not like the end
of that, its beginning is lost too: the status of an answer 204 that has a body, for example. Who
sends webhooks goes by the status.

Read in aiohttp 3.14.5.

Without: an answer whose body is not as its headers say may count as a failure, whatever its status.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from .errors import CompatError, ConfigurationError

logger = logging.getLogger(__name__)

#: The environment's variable that names the parts which are not to be used.
SWITCH = "TOC_COMPAT_OFF"

_parts: dict[str, CompatPart] = {}


@dataclass(eq=False, kw_only=True)
class CompatPart:
    """One use of private names.

    name: by which it is switched off
    lost: what is lost without it, in a few words that begin with a small letter
    check: gives the names that are missing; it gets what :meth:`usable` gets
    way_out: what to do if names are missing; only of a part that nothing starts without
    """

    name: str = field(kw_only=False)
    lost: str
    check: Callable[..., Iterable[str]]
    way_out: str = field(default_factory=str)
    _told: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        if self.name in _parts:
            raise ValueError(f"there is a part {self.name!r} already")
        _parts[self.name] = self

    @property
    def required(self) -> bool:
        """Whether nothing starts without it."""
        return bool(self.way_out)

    def usable(self, *subjects: Any) -> bool:
        """Whether it is to be used: it is not switched off, and what it expects is there.

        subjects: the objects whose names are checked

        Raises CompatError if it is required and a name is missing, ConfigurationError if
        ``TOC_COMPAT_OFF`` names what cannot be switched off or, once all parts are known, what
        is no part.
        """
        if self.name in switched_off():
            self._tell(logging.INFO, f"{self.name} is switched off: {self.lost}")
            return False
        missing = ", ".join(self.check(*subjects))
        if not missing:
            return True
        if self.required:
            raise CompatError(
                f"{missing} is missing, of which {self.name} makes use; without it, {self.lost}. "
                f"{self.way_out}"
            )
        self._tell(logging.WARNING, f"{self.name}: {missing} is missing: {self.lost}")
        return False

    @staticmethod
    def missing(subject: Any, *names: str) -> list[str]:
        """Those of the names that an object does not have, as a check gives them."""
        what = subject.__name__ if hasattr(subject, "__name__") else type(subject).__name__
        return [f"{what}.{name}" for name in names if not hasattr(subject, name)]

    @staticmethod
    def check_names() -> None:
        """Call it when all parts are known.

        Raises ConfigurationError if ``TOC_COMPAT_OFF`` names what is no part, or a required one.
        """
        for name in sorted(switched_off()):
            if name not in _parts:
                known = ", ".join(name for name, part in parts().items() if not part.required)
                raise ConfigurationError(
                    f"{SWITCH} names {name!r}, which is no part; these can be switched off: {known}"
                )

    def _tell(self, level: int, line: str) -> None:
        if line not in self._told:  # once, and not at every reconnect
            self._told.add(line)
            logger.log(level, "Compatibility: %s", line)


def parts() -> dict[str, CompatPart]:
    """The parts that are known in this process, by name."""
    return dict(sorted(_parts.items()))


def switched_off() -> set[str]:
    """The parts that are not to be used. Raises ConfigurationError if one of them is required."""
    names = {name.strip() for name in os.environ.get(SWITCH, "").split(",")} - {""}
    for name in names:
        part = _parts.get(name)
        if part is not None and part.required:
            raise ConfigurationError(
                f"{SWITCH} names {name!r}, which cannot be switched off: without it, {part.lost}"
            )
    return names


# -- redis-py. What a check looks at is imported when it runs: not every program has all of it

SOCKET = CompatPart(
    "redis-socket",
    lost="no event loop can wait for Redis",
    check=lambda: CompatPart.missing(import_module("redis").Connection(), "_sock"),
    way_out="Install redis-py 5.0.8 to 8.1.0",
)

IDLE = CompatPart(
    "idle-connections",
    lost="the counters of a process's last seconds are not sent",
    check=lambda: CompatPart.missing(
        import_module("redis").ConnectionPool(), "_available_connections"
    ),
)

STREAM = CompatPart(
    "async-streams",
    lost="with asyncio, replies are read more slowly, and a call fails after an idle connection "
    "was closed",
    check=lambda: CompatPart.missing(import_module("redis.asyncio").Connection(), "_reader"),
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


# -- Kombu

_CHANNELS = ("_put", "_size", "_purge", "_has_queue", "_lookup")

KOMBU_CHANNEL = CompatPart(
    "kombu-channel",
    lost="messages can be neither sent nor consumed",
    check=lambda channel: [
        *CompatPart.missing(channel, "_tag_to_queue", "_active_queues", "_consumers", "_qos"),
        *CompatPart.missing(channel.connection, "_avail_channels"),
        *CompatPart.missing(import_module("kombu.transport.virtual").Channel, *_CHANNELS),
    ],
    way_out="Install Kombu 5.3.7 to 5.7",
)

KNOWN_QUEUES = CompatPart(
    "known-queues",
    lost="sending takes longer",
    check=lambda producer: CompatPart.missing(producer, "maybe_declare"),
)

_checked = False


def check_channel(channel: Any, base: type) -> None:
    """Once in a process; base: of all channels. Raises CompatError."""
    global _checked
    if not _checked:
        KOMBU_CHANNEL.usable(channel)
        producer = import_module("kombu").Producer
        if KNOWN_QUEUES.usable(producer):
            _use_known_queues(producer, base)
        _checked = True


def _use_known_queues(producers: Any, base: Any) -> None:
    declare = producers.maybe_declare

    def maybe_declare(producer: Any, entity: Any, retry: bool = False, **policy: Any) -> Any:
        if entity and isinstance(producer.channel, base) and entity.can_cache_declaration:
            connection = producer.channel.connection
            if connection and hash(entity) in connection.client.declared_entities:
                return False
        return declare(producer, entity, retry, **policy)

    producers.maybe_declare = maybe_declare


# -- aiohttp

_HANDLERS = ("data_received", "set_response_params", "set_exception", "force_close")

PROTOCOL = CompatPart(
    "http-protocol",
    lost="an answer to a notification whose body is not as its headers say may count as a failure",
    check=lambda connector, handler: [
        *CompatPart.missing(connector, "_factory"),
        *CompatPart.missing(handler, *_HANDLERS),
    ],
)


def use_protocol(connector: Any, handler: type, make: Callable[[], Any]) -> None:
    """Have the connections of a connector use a protocol.

    handler: its class
    make: makes it
    """
    if PROTOCOL.usable(connector, handler):
        connector._factory = make


def body_of(handler: Any) -> Any:
    """The aiohttp.StreamReader of the answer that a protocol is reading, or None."""
    return getattr(handler, "_payload", None)
