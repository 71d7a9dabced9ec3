"""Connections of redis.asyncio to one server, a bounded number, shared by all tasks of a loop."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakSet

import redis
from redis.connection import DefaultParser
from redis.exceptions import InvalidResponse, ResponseError

from ..client.connection import NotSentError
from ..compat import STREAM, stream_of
from ..errors import TocError
from ..scripts.call import patience_for, pieces

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

if sys.version_info >= (3, 11):
    from asyncio import timeout as timeout_after
else:  # redis-py requires it there
    from async_timeout import timeout as timeout_after

#: What a broken connection raises.
BROKEN = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError)

#: Of these, those that say no more than that no connection could be opened.
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
