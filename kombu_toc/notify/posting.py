"""Sends requests to targets, over connections of aiohttp. Nothing else here imports that."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any

import aiohttp
import yarl
from aiohttp.abc import AbstractResolver, ResolveResult

from ..version import __version__
from .addresses import Addresses
from .answers import read_heads_first
from .time_limit import TimeLimit
from .verdicts import KEPT, Answer, shown

#: Bytes of an answer that are read: what is longer ends its connection.
MAX_ANSWER = 64 << 10

#: Seconds for which the rest of an answer is read that has said by its status that all is well:
#: then the connection can be used again.
MAX_DRAIN = 1.0

#: Bytes of one header of an answer, and of its first line.
MAX_HEADER = 8 << 10

#: Seconds for which a connection is kept that nobody uses: many servers close it after five.
KEEP_ALIVE = 4.0

#: Names that may be looked up at a time, by a thread each: one that hangs takes one until the
#: system gives up. Those whose latest look-up took long share a few.
LOOKUPS = 256
SLOW_LOOKUPS = 32

#: Seconds that are long for a look-up, and how many names of such it knows.
SLOW = 2.0
MAX_SLOW = 4096


#: What a request that fails raises.
FAILURES = (aiohttp.ClientError, OSError, ValueError, asyncio.TimeoutError)


class Poster:
    """Sends requests. It belongs to one event loop.

    addresses: which may be connected to
    timeout: seconds for a request, from looking up the name to the end of the answer; of an answer
        that takes longer what has come by then counts, if that is its headers at least. See
        :mod:`.time_limit` for a process that stood still
    """

    def __init__(self, addresses: Addresses, timeout: float) -> None:
        self._addresses = addresses
        self._timeout = timeout
        self._resolver = _Resolver()
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    async def __aenter__(self) -> Poster:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()
        await self._resolver.close()

    async def post(self, target: str, headers: dict[str, str], body: bytes) -> Answer | str:
        """Send a request; returns its answer, or why there is none."""
        with TimeLimit(self._timeout) as limit:
            while not limit.is_over:
                opened: list[bool] = []
                try:
                    return await self._post(target, headers, body, limit, opened)
                except FAILURES as exc:
                    # A connection that was kept may be closed just when it is used again, or what
                    # comes first may be the rest of the answer before: that says nothing about this
                    # message. Each such attempt uses up one of those that are kept.
                    again = not opened and (
                        _is_cut(exc) or isinstance(exc, aiohttp.ClientResponseError)
                    )
                    if not again and not limit.is_over:
                        return said(exc, target)
        return f"no answer within {self._timeout:g} seconds"

    async def _post(
        self,
        target: str,
        headers: dict[str, str],
        body: bytes,
        limit: TimeLimit,
        opened: list[bool],
    ) -> Answer:
        limit.answer = None
        url = yarl.URL(target, encoded=True)
        session = self._session(url.scheme == "https")
        async with session.post(
            url,
            data=body,
            headers=headers,
            allow_redirects=False,
            trace_request_ctx=opened,
        ) as response:
            limit.answer = response
            status = response.status
            done = 200 <= status < 300
            drained = (
                asyncio.get_running_loop().call_later(MAX_DRAIN, response.close) if done else None
            )
            begin, ended = await _read(response.content)
            if drained is not None:
                drained.cancel()
            if not ended:
                response.close()
            if done:
                return Answer(status)
            return Answer(
                status,
                (response.reason or "")[:100],
                response.headers.get("retry-after", "")[:100],
                begin,
            )

    def _session(self, encrypted: bool) -> aiohttp.ClientSession:
        session = self._sessions.get(encrypted)
        if session is None:
            addresses = self._addresses

            def open_socket(info: Any) -> socket.socket:
                family, kind, protocol, _, address = info
                addresses.check(address[0], address[1], encrypted=encrypted)
                return socket.socket(family=family, type=kind, proto=protocol)

            connector = aiohttp.TCPConnector(
                limit=0,  # how many may be under way is settled before
                resolver=self._resolver,
                socket_factory=open_socket,
                keepalive_timeout=KEEP_ALIVE,
            )
            read_heads_first(connector)
            session = self._sessions[encrypted] = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"user-agent": f"celery-toc/{__version__}", "accept-encoding": "identity"},
                auto_decompress=False,
                trust_env=False,
                timeout=aiohttp.ClientTimeout(),  # none: TimeLimit does that
                trace_configs=[_tracing()],
                max_line_size=MAX_HEADER,
                max_field_size=MAX_HEADER,
            )
        return session


async def _read(content: aiohttp.StreamReader) -> tuple[bytes, bool]:
    """The first bytes of an answer, and whether it has ended as it should within bounds."""
    begin, size = b"", 0
    while size <= MAX_ANSWER:
        try:
            piece = await content.readany()
        except FAILURES:  # its status says what becomes of the message
            return begin, False
        if not piece:
            return begin, True
        if len(begin) < KEPT:
            begin += piece[: KEPT - len(begin)]
        size += len(piece)
    return begin, False


def _tracing() -> aiohttp.TraceConfig:
    """Tells of a request whether a connection was opened for it."""

    async def opening(_: Any, context: Any, __: Any) -> None:
        context.trace_request_ctx.append(True)

    made = aiohttp.TraceConfig()
    made.on_connection_create_start.append(opening)
    return made


def _is_cut(exc: BaseException) -> bool:
    """Whether a connection was closed by the other end."""
    if isinstance(exc, (aiohttp.ServerDisconnectedError, ConnectionError)):
        return True
    return isinstance(exc, OSError) and exc.errno in (errno.ECONNRESET, errno.EPIPE)


def said(exc: BaseException, target: str) -> str:
    """An error as it is kept with a message: without what the URL of its target may have that is
    secret."""
    if isinstance(exc, aiohttp.ClientConnectorDNSError):
        return f"its name cannot be resolved: {exc.os_error}"
    if isinstance(exc, aiohttp.ClientConnectorCertificateError):
        return str(exc.certificate_error)
    if isinstance(exc, aiohttp.ClientConnectorError):
        return str(exc.os_error) or type(exc.os_error).__name__
    if isinstance(exc, aiohttp.ServerDisconnectedError):
        return "the connection was closed without an answer"
    if isinstance(exc, aiohttp.ClientResponseError):  # its text has the URL
        return f"its answer is not HTTP: {' '.join(exc.message.split())}"
    text = f"{type(exc).__name__}: {exc}"
    query = target.partition("?")[2]
    return text.replace(target, shown(target)).replace(query, "...") if query else text


class _Resolver(AbstractResolver):
    """Looks up names in threads of its own, so that names that take long delay no others. (Those of
    an executor would be waited for at the end of the process.)"""

    def __init__(self) -> None:
        self._free = {False: asyncio.Semaphore(LOOKUPS), True: asyncio.Semaphore(SLOW_LOOKUPS)}
        #: names whose latest look-up took long
        self._slow: set[str] = set()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        looked_up: asyncio.Future[list[Any]] = loop.create_future()
        free = self._free[host in self._slow]
        await free.acquire()
        began = loop.time()

        def settle(found: list[Any] | Exception) -> None:
            free.release()
            self._slow.discard(host)
            if loop.time() - began > SLOW and len(self._slow) < MAX_SLOW:
                self._slow.add(host)
            if looked_up.done():
                return
            if isinstance(found, Exception):
                looked_up.set_exception(found)
            else:
                looked_up.set_result(found)

        def look_up() -> None:
            found: list[Any] | Exception
            try:
                found = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
            except Exception as exc:
                found = exc
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, found)

        try:
            threading.Thread(target=look_up, name=f"toc-notify-{host}"[:40], daemon=True).start()
        except RuntimeError as exc:
            free.release()
            raise OSError(f"no thread can be started: {exc}") from exc
        return [
            ResolveResult(
                hostname=host,
                host=address[0],
                port=address[1],
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, _, protocol, _, address in await looked_up
        ]

    async def close(self) -> None:
        pass
