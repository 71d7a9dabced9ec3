"""Clients of one server and of a Cluster, for code that :func:`run` calls: it is written without
await, and its waiting does not block the loop.

They have redis-py's methods, and those of :class:`kombu_toc.client.connection.Client`. What these
send and receive goes over connections of redis.asyncio.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, ResponseError

from ..center.waiting import WakeConnection
from ..client.connect import POOL_TIMEOUT, TLSConnection
from ..client.connection import (
    ClusterClient,
    PackingClient,
    Place,
    with_short_timeouts,
)
from ..client.errors import caused, is_demoted, server_of, translated
from ..client.options import arguments_of
from ..errors import ConfigurationError, ServerError
from ..scripts.call import pack_named
from .links import BROKEN, MAX_CONNECTIONS, Link, Links, whole

# -- runs code that is written without await in a task of an event loop
#
# The code runs in a greenlet. Where it needs the server, :func:`wait_for` switches to the task,
# which awaits what is to be awaited, and switches back with the result. Meanwhile other tasks run.
# So the center has one code for both worlds; SQLAlchemy's asyncio extension does the same.

try:
    import greenlet

    _Greenlet: Any = greenlet.greenlet
except ImportError:  # a program that needs it, and more, says so itself
    greenlet, _Greenlet = None, object

P = ParamSpec("P")
R = TypeVar("R")


def check() -> None:
    """Raises ConfigurationError without the package greenlet."""
    if greenlet is None:
        raise ConfigurationError(
            "asyncio needs the package greenlet: pip install 'celery-toc[asyncio]'"
        )


class _Bridge(_Greenlet):  # type: ignore[misc]  # it has no types
    """The greenlet of one call; no other greenlet is one of these."""


async def run(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function whose waiting for the server does not block the loop.

    If the task is cancelled, the function gets the CancelledError where it waits.
    """
    task = greenlet.getcurrent()
    bridge = _Bridge(function, task)
    # What a task has in context variables holds here, too: what traces requests relies on it.
    bridge.gr_context = task.gr_context
    found = bridge.switch(*args, **kwargs)
    while not bridge.dead:
        try:
            value = await found
        except BaseException as exc:
            found = bridge.throw(exc)
        else:
            found = bridge.switch(value)
    return cast(R, found)


def wait_for(awaitable: Awaitable[R]) -> R:
    """Await something from within a function that :func:`run` calls.

    Raises ConfigurationError anywhere else.
    """
    current = greenlet.getcurrent()
    if not isinstance(current, _Bridge):
        close = getattr(awaitable, "close", None)
        if close is not None:  # or Python warns of a coroutine that was never awaited
            close()
        raise not_awaited()
    return cast(R, current.parent.switch(awaitable))


class AwaitedPart:
    """A part of a center, whose methods are awaited: ``await center.queues.declare("mail")``.

    call: as :func:`run`
    """

    def __init__(self, part: Any, call: Callable[..., Any] = run) -> None:
        self._part = part
        self._call = call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._part, name)
        return partial(self._call, found) if callable(found) else found

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._part)})


def not_awaited() -> ConfigurationError:
    """The error of who uses asyncio's client as if it were another one."""
    return ConfigurationError(
        "what belongs to an AsyncTimeoutCenter is awaited: call its methods with await"
    )


class AsyncWakeConnection(WakeConnection):
    """As :class:`WakeConnection`, over a connection of redis.asyncio. It is closed after each wait:
    it belongs to its loop, which may end at any time."""

    _exchange: asyncio.Task[list[Any]] | None = None

    @property
    def usable(self) -> bool:
        return False

    def _connect(self, pool: Any) -> Any:
        return wait_for(self._client.open_link())

    def _send(self, command: bytes, seconds: float) -> None:
        exchange = self._connection.exchange(command, 1, seconds)
        self._exchange = asyncio.get_running_loop().create_task(exchange)

    def _can_read(self, seconds: float) -> bool:
        if self._exchange is None:
            return False
        done, _ = wait_for(asyncio.wait({self._exchange}, timeout=seconds))
        return bool(done)

    def _reply(self) -> Any:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None  # it is read only after something was sent
        [reply] = wait_for(exchange)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _disconnect(self, connection: Any) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None and not exchange.cancel():
            exchange.exception()  # or asyncio complains that nobody has asked for it
        wait_for(connection.close())


# -- clients

#: Commands that may block, and where the seconds for which they may do so are.
_BLOCKING = {"BZPOPMIN": -1, "BZPOPMAX": -1, "BLPOP": -1, "BRPOP": -1}


#: Connections of the parent process, in the child of a fork. They stay as they are: to close one
#: here would take it out of the parent's loop, with which the child shares what watches sockets.
_inherited: list[Links] = []


class AsyncClient(PackingClient):
    """A client of one server.

    connection_pool: its arguments say where the server is; it makes no connection
    open: opens a connection instead
    most: how many connections there may be
    """

    def __init__(
        self,
        connection_pool: redis.ConnectionPool,
        *,
        open: Callable[[], Awaitable[Link]] | None = None,
        most: int | None = None,
    ) -> None:
        super().__init__(connection_pool=connection_pool)
        bounded = isinstance(connection_pool, redis.BlockingConnectionPool)
        #: how many connections there may be
        self.most = most or (connection_pool.max_connections if bounded else MAX_CONNECTIONS)
        self._timeout: float = getattr(connection_pool, "timeout", None) or POOL_TIMEOUT
        self._open = open or (lambda: open_link(connection_pool))
        self._links: Links | None = None
        self._pid = os.getpid()

    #: what pops block on that wait
    wake_connection = AsyncWakeConnection

    def open_link(self) -> Awaitable[Link]:
        """Open a connection that is not one of :attr:`links`."""
        return self._open()

    @property
    def links(self) -> Links:
        """Its connections. Raises ConfigurationError in another event loop than before."""
        links = self._links
        loop = _running_loop()
        if links is not None and links.loop is loop:
            return links
        if links is not None and not links.loop.is_closed() and self._pid == os.getpid():
            raise ConfigurationError(
                "an AsyncTimeoutCenter belongs to the event loop that it was first used in: make "
                "one for each loop"
            )
        # The connections of a loop that has ended, or of the parent process, are of no use here.
        if links is not None and self._pid == os.getpid():
            links.abandon()
        elif links is not None:
            _inherited.append(links)
        self._pid = os.getpid()
        self._links = links = Links(self._open, most=self.most, timeout=self._timeout)
        return links

    # -- packed commands

    def run_packed(self, commands: Sequence[bytes]) -> list[Any]:
        """Send packed commands; return their replies, and for one that is refused the error."""
        return self._checked(wait_for(self._ask(commands)))

    def _ask(self, commands: Sequence[bytes]) -> asyncio.Future[list[Any]]:
        return self.links.ask(whole(commands), len(commands))

    @contextmanager
    def sending(self, commands: Sequence[bytes]) -> Iterator[Callable[[int], list[Any]]]:
        """As :meth:`run_packed`, in two steps: yields a function that reads the replies."""
        replies = self._ask(commands)
        try:
            yield lambda number: self._checked(wait_for(replies))
        finally:
            replies.cancel()

    def _checked(self, replies: list[Any]) -> list[Any]:
        for number, reply in enumerate(replies):
            if isinstance(reply, ResponseError):
                replies[number] = self._translated(reply)
        return replies

    def _translated(self, reply: ResponseError) -> Exception:
        if hasattr(self.connection_pool, "sentinel_manager") and is_demoted(reply):
            self.links.retire()  # the next connection asks the sentinels
            text = f"{server_of(self.connection_pool)} is not the master any more"
            return caused(ServerError(text), reply)
        found: Exception = translated(reply, self.connection_pool)
        return found

    # -- redis-py's commands

    def _replies(self, packed: list[bytes], commands: Sequence[tuple[Any, Any]]) -> list[Any]:
        patience = _patience([args for args, _ in commands])
        if patience is None:
            return self.run_packed(packed)
        alone = self.links.alone(whole(packed), len(packed), patience)
        return self._checked(wait_for(alone))

    # -- what callers of any client use

    @staticmethod
    def sleep(seconds: float) -> None:
        """Wait, while other tasks run."""
        wait_for(asyncio.sleep(seconds))

    def take_open(self) -> None:
        """No connection can be used when no loop runs any more."""

    def drop_idle(self, seconds: float = 0.0) -> None:
        """Close the connections that nobody uses."""
        if self._links is not None:
            wait_for(self._links.close_idle())

    def close(self) -> None:
        """Begin to close its connections; nobody waits for it."""
        links, self._links = self._links, None
        if links is not None and not links.loop.is_closed():
            links.start_closing()

    async def aclose(self) -> None:
        """Close its connections; they open again when they are needed."""
        links, self._links = self._links, None
        if links is not None and links.loop is asyncio.get_running_loop():
            await links.close()
        manager = getattr(self.connection_pool, "sentinel_manager", None)
        for sentinel in () if manager is None else manager.sentinels:
            await sentinel.aclose()

    async def ask_apart(self, *command: Any) -> Any:
        """The reply to one command over a connection of its own, with short timeouts."""
        arguments = with_short_timeouts(self.connection_pool.connection_kwargs)
        link = await open_link(self.connection_pool, arguments)
        try:
            [reply] = await link.exchange(pack_named(*command), 1)
        finally:
            await link.close()
        if isinstance(reply, Exception):
            raise self._translated(reply) if isinstance(reply, ResponseError) else reply
        return reply


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise not_awaited() from None


def _patience(commands: Sequence[tuple[Any, ...]]) -> float | None:
    """Seconds for which commands may block the connection; None if none of them does."""
    found: float | None = None
    for args in commands:
        name = str(args[0]).upper()
        if name == "WAIT":
            found = (found or 0.0) + int(args[2]) / 1000
        elif name in _BLOCKING:
            found = (found or 0.0) + float(args[_BLOCKING[name]])
        elif name == "XREAD" and "BLOCK" in (words := [str(a).upper() for a in args[:6]]):
            found = (found or 0.0) + int(args[words.index("BLOCK") + 1]) / 1000
    return found


class _Lock:
    """A lock for tasks; of threads, only one runs the loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()

    def __enter__(self) -> None:
        loop = _running_loop()
        if self._loop is not loop:
            self._loop, self._lock = loop, asyncio.Lock()
        wait_for(self._lock.acquire())

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


class AsyncClusterClient(ClusterClient):
    """As :class:`ClusterClient`, for clients of nodes that are :class:`AsyncClient`."""

    wake_connection = AsyncWakeConnection
    sleep = staticmethod(AsyncClient.sleep)  # type: ignore[assignment]  # it waits otherwise

    def __init__(self, places: Sequence[Place], make_client: Callable[[Place], Any]) -> None:
        super().__init__(places, make_client)
        # One task asks for the hash slots at a time, and the others wait for it.
        self._lock = _Lock()  # type: ignore[assignment]

    def _slots_by(self, place: Place) -> list[Any]:
        client: Any = self.client_at(place)
        found: list[Any] = wait_for(client.ask_apart("CLUSTER", "SLOTS"))
        return found

    async def aclose(self) -> None:
        """Close the connections to all nodes; they open again when they are needed."""
        for client in list(self._clients.values()):
            await client.aclose()  # type: ignore[attr-defined]


# -- opening connections

#: Classes of connections -> those of redis.asyncio.
_CLASSES = (
    (redis.SSLConnection, redis.asyncio.SSLConnection),
    (redis.UnixDomainSocketConnection, redis.asyncio.UnixDomainSocketConnection),
    (redis.Connection, redis.asyncio.Connection),
)

#: Arguments that the center gives to redis-py's other connections, and that have no use here.
_OTHERS = frozenset(("command_packer", "retry", "parser_class", "socket_type"))

#: How redis-py's arguments begin that are about a server's maintenance.
_OF_MAINTENANCE = ("maint", "orig_", "oss_cluster")


async def open_link(pool: Any, arguments: dict[str, Any] | None = None) -> Link:
    """Open a connection as a pool of redis-py would, or of redis.asyncio.

    arguments: instead of the pool's
    """
    arguments = {**(pool.connection_kwargs if arguments is None else arguments)}
    manager = getattr(pool, "sentinel_manager", None)
    if not issubclass(pool.connection_class, redis.Connection | redis.UnixDomainSocketConnection):
        # A pool of redis.asyncio. Replies are read in the older protocol, which has no notices of
        # maintenance.
        arguments = {k: v for k, v in arguments.items() if not k.startswith(_OF_MAINTENANCE)}
        arguments["protocol"] = 2
        return await _connected(pool.connection_class(**arguments))
    if manager is None:
        return await _open(pool, arguments)
    address = await run(pool.get_master_address)
    arguments.pop("connection_pool", None)
    arguments.update(host=address[0], port=address[1])
    link = await _open(pool, arguments)
    try:
        [role] = await link.exchange(pack_named("ROLE"), 1)
        manager.connected_to(address, role)
    except BaseException:
        await link.close()
        raise
    return link


async def _open(pool: Any, arguments: dict[str, Any]) -> Link:
    made: type[Any] = next(new for old, new in _CLASSES if issubclass(pool.connection_class, old))
    known = arguments_of(made)  # type: ignore[arg-type]  # a class can be hashed
    unknown = sorted(
        name
        for name, value in arguments.items()
        if name not in known and name not in _OTHERS and value
    )
    if unknown:
        raise ConfigurationError(
            f"redis.asyncio knows no {unknown[0]!r}: leave it out for an AsyncTimeoutCenter"
        )
    given = {name: value for name, value in arguments.items() if name in known - _OTHERS}
    try:
        return await _connected(made(**given, retry=Retry(NoBackoff(), 0)))
    except BROKEN as exc:
        if not issubclass(pool.connection_class, TLSConnection) or isinstance(exc, ServerError):
            raise
        text = TLSConnection(**{**arguments, "retry": None}).explain(exc)
        if text is None:
            raise
        raise ServerError(f"{arguments.get('host')}:{arguments.get('port')}: {text}") from exc


async def _connected(connection: Any) -> Link:
    # In a task of its own: redis-py sends what it says first by asyncio.wait_for, which may lose a
    # cancellation before Python 3.12.
    connecting = asyncio.ensure_future(connection.connect())
    try:
        await asyncio.wait({connecting})
    except BaseException:
        connecting.cancel()
        with suppress(Exception, asyncio.CancelledError):
            await connecting
        await connection.disconnect(nowait=True)
        raise
    try:
        connecting.result()
    except ResponseError as exc:  # the server refuses the login, or the database
        raise translated(exc, _Where(connection)) from exc
    except BaseException:
        await connection.disconnect(nowait=True)  # it may be open, and not be ready
        raise
    if not connection.is_connected:
        raise ConnectionError("the connection was closed while it was opened")
    return Link(connection)


class _Where:
    """Says for an error where a connection leads, as a pool does."""

    def __init__(self, connection: Any) -> None:
        names = ("host", "port", "path", "db", "username")
        self.connection_kwargs = {name: getattr(connection, name, None) for name in names}
