"""Bounds what a connection may cost while no request of it is being dealt with.

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

#: Seconds until the headers of a request must be there, and for which an answer may lie unread.
HEADERS_WITHIN = 10.0
READ_WITHIN = 30.0

#: Bytes of headers that are taken before a request begins; more in one piece are bounded by the
#: event loop, which reads 256 KiB at a time.
MOST_BYTES = 64 * 1024

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
    """

    def __init__(self, inner: asyncio.Protocol) -> None:
        self._inner = inner
        self._transport: Any = None
        self._loop = asyncio.get_running_loop()
        #: requests that are being dealt with, and since when there are none
        self._requests = 0
        self._idle_since = self._loop.time()
        self._bytes = 0
        self._unread = 0
        self._timer: asyncio.TimerHandle | None = None

    # -- told by the application

    def begin(self) -> None:
        """A request begins."""
        self._requests += 1
        self._bytes = 0

    def end(self) -> None:
        """A request has ended."""
        self._requests -= 1
        self._idle_since = self._loop.time()

    # -- told by the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._inner.connection_made(transport)
        self._timer = self._loop.call_later(_CHECK, self._check)

    def data_received(self, data: bytes) -> None:
        if not self._requests:
            if self._bytes > MOST_BYTES:
                self._transport.write(_TOO_LARGE)
                self._transport.close()
                return
            self._bytes += len(data)
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
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def _check(self) -> None:
        self._timer = self._loop.call_later(_CHECK, self._check)
        if self._requests:
            return
        idle = self._loop.time() - self._idle_since
        unread = self._transport.get_write_buffer_size()
        if unread and unread < self._unread:
            self._idle_since = self._loop.time()  # it is being read
        elif idle > (READ_WITHIN if unread else HEADERS_WITHIN):
            self._transport.abort()
        self._unread = unread


_current: ContextVar[Guarded | None] = ContextVar("toc_http_connection", default=None)


def current() -> Guarded | None:
    """The connection of the request that is being dealt with, if it is guarded."""
    return _current.get()


def guarded(protocol: Callable[..., asyncio.Protocol]) -> Callable[..., asyncio.Protocol]:
    """Makes guarded connections of a server's protocol; takes its arguments."""

    class Connection(Guarded):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(protocol(*args, **options))

    return Connection
