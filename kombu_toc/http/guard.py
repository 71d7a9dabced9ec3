"""Bounds what a connection may cost, and knows when it is lost.

A server of ASGI tells an application of a request when its headers are there. A client that sends
them byte by byte, or that does not read its answer, would keep a connection for ever. The guard
stands between the socket and the server's protocol, and uses nothing of the server but that it is
an ``asyncio.Protocol``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from .problems import Problem

#: Seconds until the headers of a request must be there, from their first byte on or from the
#: beginning of the connection; for which an answer may lie unread without a byte being taken; and
#: for which a connection is kept that has no request.
HEADERS_WITHIN = 10.0
READ_WITHIN = 30.0
KEEP_ALIVE = 60.0

#: Bytes of headers that are taken before a request begins, and bytes that are taken while one
#: waits; more in one piece are bounded by the event loop, which reads 256 KiB at a time.
MOST_BYTES = 64 * 1024

#: Bytes that come while a request is dealt with: its body, in chunks of any size.
MOST_OF_BODY = 32 << 20

_CHECK = 2.0

_PROBLEM = Problem("headers-too-large", "path, query and headers may have 64 KiB together").body()
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: application/problem+json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_PROBLEM), _PROBLEM)
)


class Guarded(asyncio.Protocol):
    """A connection.

    inner: the server's protocol
    most_of_body: bytes that may come while a request is dealt with
    """

    def __init__(self, inner: asyncio.Protocol, most_of_body: int = MOST_OF_BODY) -> None:
        self._inner = inner
        self._most_of_body = most_of_body
        self._transport: Any = None
        self._loop = asyncio.get_running_loop()
        #: set when it is closed, by whichever side: a server may tell only the last request of
        #: several that a client has sent
        self.lost = asyncio.Event()
        #: requests that are being dealt with, and since when there are none
        self._requests = 0
        self._idle_since = self._loop.time()
        #: seconds for which it may be idle
        self._idle_for = HEADERS_WITHIN
        self._bytes = 0
        #: what came while a request waits
        self._held: bytearray | None = None
        self._unread = 0
        self._unread_since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # -- told by the application

    def begin(self) -> None:
        """A request begins."""
        self._requests += 1
        self._bytes = 0

    def end(self) -> None:
        """A request has ended."""
        self._requests -= 1
        self._bytes = 0
        self._idle_since, self._idle_for = self._loop.time(), KEEP_ALIVE
        held, self._held = self._held, None
        if held and not self._transport.is_closing():
            self.data_received(bytes(held))

    def discard(self, number: int) -> None:
        """So many bytes more may come while this request is dealt with: they are thrown away."""
        self._bytes = -number

    def hold(self) -> None:
        """The request that is dealt with waits for something, and its body was read: what comes
        until it ends is of the next one, and is kept back. The server would stop reading for it,
        and would not see that the client goes away."""
        if self._held is None:
            self._held = bytearray()

    async def wait_until_lost(self) -> None:
        """Return when the connection is closed, by whichever side."""
        await self.lost.wait()

    # -- told by the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._inner.connection_made(transport)
        self._timer = self._loop.call_later(_CHECK, self._check)

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        if self._held is not None:
            self._held += data
            if len(self._held) > MOST_BYTES:
                self._transport.abort()
            return
        if self._requests:
            if self._bytes > self._most_of_body:
                self._transport.abort()
                return
        else:
            if self._bytes - len(data) > MOST_BYTES:
                self._transport.write(_TOO_LARGE)
                self._transport.close()
                return
            if self._idle_for == KEEP_ALIVE:  # the headers of the next request begin
                self._idle_since, self._idle_for = self._loop.time(), HEADERS_WITHIN
        token = _current.set(self)  # the task of a request has it from here
        try:
            self._inner.data_received(data)
        finally:
            _current.reset(token)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.lost.set()
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def _check(self) -> None:
        self._timer = self._loop.call_later(_CHECK, self._check)
        now = self._loop.time()
        unread = self._transport.get_write_buffer_size()
        if unread:
            if not self._unread or unread < self._unread:
                self._unread_since = now  # it begins to lie there, or is being read
            elif now - self._unread_since > READ_WITHIN:
                self._transport.abort()
            self._unread = unread
            return
        if self._unread:  # it was read to its end this very moment
            self._unread, self._idle_since = 0, now
        if self._requests or now - self._idle_since <= self._idle_for:
            return
        if self._idle_for == KEEP_ALIVE:
            self._transport.close()
        else:
            self._transport.abort()


_current: ContextVar[Guarded | None] = ContextVar("toc_http_connection", default=None)


def current() -> Guarded | None:
    """The connection of the request that is being dealt with, if it is guarded."""
    return _current.get()


def use(connection: Guarded) -> None:
    """Have this as the connection of the requests that this task deals with from here on."""
    _current.set(connection)


def guarded(
    protocol: Callable[..., asyncio.Protocol], most_of_body: int = MOST_OF_BODY
) -> Callable[..., asyncio.Protocol]:
    """Makes guarded connections of a server's protocol; takes its arguments."""

    class Connection(Guarded):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(protocol(*args, **options), most_of_body)

    return Connection
