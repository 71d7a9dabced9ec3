"""Clients of one server and of a Cluster, for code that :func:`run` calls: it is written without
await, and its waiting does not block the loop.

They have redis-py's methods, and those of :class:`kombu_toc.client.connection.Client`. What these
send and receive goes over connections of redis.asyncio.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast
from weakref import WeakSet

import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.connection import DefaultParser
from redis.exceptions import ConnectionError, InvalidResponse, ResponseError

from ..center.waiting import WakeConnection
from ..client.connect import POOL_TIMEOUT, TLSConnection
from ..client.connection import (
    ClusterClient,
    NotSentError,
    PackingClient,
    Place,
    with_short_timeouts,
)
from ..client.errors import BROKEN, caused, is_demoted, server_of, translated
from ..client.options import arguments_of
from ..compat import STREAM, stream_of
from ..errors import ConfigurationError, ServerError, TocError
from ..scripts.call import pack_named, patience_for, pieces

if sys.version_info >= (3, 11):
    from asyncio import timeout as timeout_after
else:  # redis-py requires it there
    from async_timeout import timeout as timeout_after

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


# -- reads replies in Redis's protocol (version 2) from pieces of bytes, as they come

#: Bytes that are asked of a socket at once.
CHUNK = 1 << 16

_error_of: Callable[[str], Exception] = DefaultParser(CHUNK).parse_error


class ReplyReader:
    """What has arrived on one connection: :meth:`feed` it, and take :attr:`replies`.

    A reply that is an error is an exception, which is not raised.
    """

    def __init__(self) -> None:
        self.replies: list[Any] = []
        self._read = _reading(self.replies)
        next(self._read)
        #: gives bytes to it; raises InvalidResponse for what is no reply
        self.feed = self._read.send

    def take(self, number: int) -> list[Any]:
        """The first replies, which are forgotten here."""
        taken = self.replies[:number]
        del self.replies[:number]
        return taken


def _reading(replies: list[Any]) -> Generator[None, bytes, None]:
    buffer, at = b"", 0
    #: the arrays that are being read, the outermost first, and how many items each still lacks
    open_arrays: list[tuple[list[Any], int]] = []
    while True:
        end = buffer.find(b"\r\n", at)
        while end < 0:
            buffer = buffer[at:] + (yield)
            at, end = 0, buffer.find(b"\r\n")
        kind, line = buffer[at : at + 1], buffer[at + 1 : end]
        at = end + 2
        value: Any
        if kind == b":":
            value = int(line)
        elif kind == b"$":
            size = int(line)
            value = None
            if size >= 0:
                missing = size + 2 - (len(buffer) - at)
                if missing > 0:
                    parts = [buffer[at:]]
                    while missing > 0:
                        parts.append((yield))
                        missing -= len(parts[-1])
                    buffer, at = b"".join(parts), 0
                value = buffer[at : at + size]
                at += size + 2
        elif kind == b"*":
            count = int(line)
            value = [] if count >= 0 else None
            if count > 0:
                open_arrays.append((value, count))
                continue
        elif kind == b"+":
            value = line
        elif kind == b"-":
            value = _error_of(line.decode("utf-8", "replace"))
        else:
            raise InvalidResponse(f"not Redis's protocol: {buffer[at - 40 : at]!r}")
        while open_arrays:
            array, lacks = open_arrays[-1]
            array.append(value)
            if lacks > 1:
                open_arrays[-1] = array, lacks - 1
                break
            open_arrays.pop()
            value = array
        else:
            replies.append(value)


# -- connections of redis.asyncio to one server, a bounded number, shared by all tasks of a loop
#
# What tasks ask for in one turn of the loop leaves together, over a connection that nobody uses;
# what
# is asked for while every connection is busy leaves together with it when one is free. Another
# connection is opened only if none has become free for a moment. So a connection is used by one
# batch
# at a time, and its replies belong to that batch: a task that is cancelled leaves none unread.

#: Of what a broken connection raises, what says no more than that no connection could be opened.
_PLAIN = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)

#: Connections to one server, unless an option says otherwise.
MAX_CONNECTIONS = 10

#: Seconds for which what is asked for waits for a busy connection before another one is opened.
BUSY = 0.005

#: What is asked for in one turn of the loop by so many is sent in two halves.
MANY = 16

#: Commands, and bytes, that leave together.
MAX_COMMANDS = 500
MAX_BYTES = 1 << 20

CLOSED = "the server has closed the connection"


class Link:
    """One open connection."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        #: seconds of silence after which the connection counts as broken; None: for ever
        self.silence: float | None = connection.socket_timeout
        # Its own timeout is for each of its calls, and costs a task for each.
        connection.socket_timeout = None
        self._stream = stream_of(connection) if STREAM.usable() else None
        self._reader = ReplyReader()
        #: whether it is to be closed as soon as nobody uses it
        self.retired = False

    def is_closed(self) -> bool:
        """Whether the server has closed it, as far as can be told without a wait."""
        if not self.connection.is_connected:
            return True
        return self._stream is not None and (
            self._stream.at_eof() or self._stream.exception() is not None
        )

    async def exchange(self, packed: bytes, count: int, patience: float = 0.0) -> list[Any]:
        """Send commands and read so many replies; an error reply is an exception in its place.

        patience: seconds that the replies may take longer than usual

        Raises a ConnectionError or a TimeoutError of redis-py; then the connection is closed.
        """
        try:
            more = patience + patience_for(len(packed))
            async with timeout_after(self.silence and self.silence + more) as limit:
                await self.connection.send_packed_command(pieces(packed), check_health=False)
                if self._stream is None:
                    return [await self._read_one() for _ in range(count)]
                return await self._read(self._stream, count, more, limit)
        except BaseException as exc:
            await self.close()  # replies may still arrive
            if isinstance(exc, (asyncio.TimeoutError, TimeoutError)):
                raise redis.TimeoutError(f"no reply within {self.silence:g} seconds") from exc
            if isinstance(exc, OSError):
                raise redis.ConnectionError(f"the connection broke: {exc}") from exc
            raise

    async def _read(
        self, stream: asyncio.StreamReader, count: int, more: float, limit: Any
    ) -> list[Any]:
        reader = self._reader
        clock = asyncio.get_running_loop().time
        while len(reader.replies) < count:
            data = await stream.read(CHUNK)
            if not data:
                raise redis.ConnectionError(CLOSED)
            reader.feed(data)
            if self.silence:
                _move(limit, clock() + self.silence + more)
        return reader.take(count)

    async def _read_one(self) -> Any:
        try:
            return await self.connection.read_response(disable_decoding=True)
        except ResponseError as exc:
            return exc

    async def close(self) -> None:
        """Close it, without waiting for the server."""
        # Of a loop that is closed, nothing can be closed in an orderly way.
        with suppress(*BROKEN, asyncio.CancelledError, RuntimeError):
            await self.connection.disconnect(nowait=True)


def _move(limit: Any, when: float) -> None:
    if sys.version_info >= (3, 11):
        limit.reschedule(when)
    else:
        limit.update(when)


class _Asked(NamedTuple):
    """What one caller has asked for."""

    packed: bytes
    number: int  #: of commands
    replies: asyncio.Future[list[Any]]
    since: float


class Links:
    """The connections to one server, for the tasks of one loop.

    open: opens one
    most: how many there may be
    timeout: seconds to wait for one that is free
    """

    def __init__(
        self,
        open: Callable[[], Awaitable[Link]],
        *,
        most: int = MAX_CONNECTIONS,
        timeout: float = 20.0,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._open_one = open
        self._most = max(most, 1)
        self._timeout = timeout
        self._idle: list[Link] = []
        #: how many connections are open or being opened
        self.count = 0
        self._asked: deque[_Asked] = deque()
        self._flushing = False
        self._timer: asyncio.TimerHandle | None = None
        #: those who want a connection for themselves
        self._wanting: deque[asyncio.Future[None]] = deque()
        #: how many have one
        self._alone = 0
        #: batches that are under way, and connections that are being closed
        self._running: dict[asyncio.Task[Any], list[_Asked]] = {}
        self._closing: set[asyncio.Task[Any]] = set()
        self._links: WeakSet[Link] = WeakSet()
        self._closed = False

    # -- together with others

    def ask(self, packed: bytes, count: int) -> asyncio.Future[list[Any]]:
        """Send commands with whatever else is sent now; the future has the reply to each."""
        future: asyncio.Future[list[Any]] = self.loop.create_future()
        self._asked.append(_Asked(packed, count, future, self.loop.time()))
        if not self._flushing:
            self._flush_soon()
        return future

    def _flush_soon(self) -> None:
        self._flushing = True
        self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Hand what was asked for to connections, as far as there are free ones."""
        self._flushing = False
        most = MAX_COMMANDS
        if len(self._asked) >= MANY:
            # In two halves: while the server executes one, the loop deals with the other.
            most = -(-len(self._asked) // 2)
        while self._asked:
            link = self._free()
            if link is None:
                if self.count >= (2 if most < MAX_COMMANDS and self._most > 2 else 1):
                    break
                self.count += 1
            batch = self._next_batch(most)
            if not batch:
                self._give_back(link)
                continue
            self._start_batch(link, batch)
        if self._asked and self._timer is None:
            self._timer = self.loop.call_later(BUSY, self._late)

    def _late(self) -> None:
        """No connection has become free for a while: open another one, or give up."""
        self._timer = None
        latest = self.loop.time() - self._timeout
        while self._asked and self._asked[0].since < latest:
            one = self._asked.popleft()
            if not one.replies.done():
                one.replies.set_exception(self._no_connection())
        if not self._asked:
            return
        if self.count < self._most and not self._idle:
            self.count += 1
            batch = self._next_batch()
            if batch:
                self._start_batch(None, batch)
            else:
                self.count -= 1
        self._flush()

    def _next_batch(self, most: int = MAX_COMMANDS) -> list[_Asked]:
        batch: list[_Asked] = []
        commands = size = 0
        while self._asked and (not batch or (commands < most and size < MAX_BYTES)):
            one = self._asked.popleft()
            if one.replies.done():  # cancelled: it is not sent at all
                continue
            batch.append(one)
            commands += one.number
            size += len(one.packed)
        return batch

    async def _run(self, link: Link | None, batch: list[_Asked]) -> None:
        try:
            try:
                link = link or await self._opened()
                packed = batch[0].packed if len(batch) == 1 else b"".join([a.packed for a in batch])
                replies = await link.exchange(packed, sum([one.number for one in batch]))
            finally:
                self._give_back(link)
        except BaseException as exc:
            if not isinstance(exc, Exception):
                exc = redis.ConnectionError("the center was closed")
            for one in batch:
                if not one.replies.done():
                    one.replies.set_exception(exc)
            return
        at = 0
        for one in batch:
            if not one.replies.done():
                one.replies.set_result(replies[at : at + one.number])
            at += one.number

    # -- a connection for one caller alone

    async def alone(self, packed: bytes, count: int, patience: float = 0.0) -> list[Any]:
        """Send commands over a connection that carries nothing else meanwhile: what blocks.

        patience: seconds that the server may take longer than usual

        If the caller is cancelled, the connection is closed: its replies are nobody's.
        """
        link = await self._take()
        try:
            return await link.exchange(packed, count, patience)
        finally:
            self._alone -= 1
            self._give_back(link)

    async def _take(self) -> Link:
        # One connection is left to those who do not block.
        most = max(self._most - 1, 1)
        try:
            async with timeout_after(self._timeout):
                while True:
                    link = self._free() if self._alone < most else None
                    if link is not None:
                        self._alone += 1
                        return link
                    if self._alone < most and self.count < self._most:
                        break
                    await self._one_is_back()
        except (asyncio.TimeoutError, TimeoutError):
            raise self._no_connection() from None
        self.count += 1
        self._alone += 1
        try:
            return await self._opened()
        except BaseException:
            self._alone -= 1
            self._give_back(None)
            raise

    async def _one_is_back(self) -> None:
        wanted: asyncio.Future[None] = self.loop.create_future()
        self._wanting.append(wanted)
        try:
            await wanted
        except BaseException:
            if wanted.done() and not wanted.cancelled():
                self._wake_one()  # it was told, and does not want it any more
            raise

    def _wake_one(self) -> None:
        while self._wanting:
            wanted = self._wanting.popleft()
            if not wanted.done():
                wanted.set_result(None)
                return

    def _no_connection(self) -> redis.ConnectionError:
        return redis.ConnectionError(
            f"none of {self._most} connections became free within {self._timeout:g} seconds: "
            "raise max_connections, or let fewer tasks wait at once"
        )

    # -- connections

    def _free(self) -> Link | None:
        while self._idle:
            link = self._idle.pop()
            if not link.is_closed():
                return link
            self.count -= 1
            self._start_closing(link)
        return None

    async def _opened(self) -> Link:
        if self._closed:
            raise redis.ConnectionError("the center was closed")
        try:
            link = await self._open_one()
        except BROKEN as exc:
            if isinstance(exc, TocError) or type(exc) not in _PLAIN:
                raise  # it says more
            raise NotSentError(str(exc)) from exc
        self._links.add(link)
        return link

    def _give_back(self, link: Link | None) -> None:
        """A connection is not used any more; None: it could not be opened."""
        if link is None or not link.connection.is_connected:
            self.count -= 1
        elif self._closed or link.retired:
            self.count -= 1
            self._start_closing(link)
        else:
            self._idle.append(link)
        self._wake_one()
        if self._asked and not self._flushing:
            self._flush_soon()

    def _start_batch(self, link: Link | None, batch: list[_Asked]) -> None:
        task = self.loop.create_task(self._run(link, batch))
        self._running[task] = batch
        task.add_done_callback(self._running.pop)

    def _start_closing(self, link: Link) -> None:
        task = self.loop.create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def retire(self) -> None:
        """Have those closed that are open now, each as soon as nobody uses it."""
        for link in list(self._links):
            link.retired = True
        idle, self._idle = self._idle, []
        self.count -= len(idle)
        for link in idle:
            self._start_closing(link)

    async def close_idle(self) -> None:
        """Close the connections that nobody uses."""
        idle, self._idle = self._idle, []
        self.count -= len(idle)
        for link in idle:
            await link.close()

    def abandon(self) -> None:
        """Its loop has ended, and nobody closed it: let the connections go."""
        for link in list(self._links):
            asyncio.get_running_loop().create_task(link.close())

    def start_closing(self) -> None:
        """As :meth:`close`, which nobody awaits."""
        self._ending = self.loop.create_task(self.close())

    async def close(self) -> None:
        """Close them all. Who waits for a reply gets a ConnectionError."""
        self._closed = True
        # A task that has not begun is cancelled before it can tell anybody.
        batches = [list(self._asked), *self._running.values()]
        self._asked.clear()
        for task in list(self._running):
            task.cancel()
        for one in (one for batch in batches for one in batch):
            if not one.replies.done():
                one.replies.set_exception(redis.ConnectionError("the center was closed"))
        if self._timer is not None:
            self._timer.cancel()
        for link in list(self._links):
            await link.close()
        self._idle.clear()
        # Of those that are done, the loop has perhaps not called the callbacks yet.
        while tasks := {one for one in (*self._running, *self._closing) if not one.done()}:
            await asyncio.wait(tasks)


def whole(commands: Sequence[bytes]) -> bytes:
    """Packed commands as one piece."""
    return commands[0] if len(commands) == 1 else b"".join(commands)


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
    sleep = staticmethod(AsyncClient.sleep)  # it waits otherwise

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
