"""Sends requests to targets, over connections of aiohttp. Nothing else here imports that."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import threading
from contextlib import suppress
from functools import partial
from typing import Any

import aiohttp
import yarl
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler

from ..compat import body_of, use_protocol
from ..version import __version__
from .targets import KEPT, Addresses, Answer, TimeLimit, shown

# -- reads the answers of targets

#: Bytes of headers in which their end is looked for. What has more is left to the parser.
MAX_HEAD = 64 << 10

#: The end of headers.
_END = re.compile(rb"\r?\n\r?\n")

#: What says of an answer that has no body that it has one: the status, and the two headers.
_BODILESS = re.compile(rb"HTTP/\d\.\d (?:204|304)\b")
_BODY = re.compile(rb"\n(?:content-length[ \t]*:[ \t]*0*[1-9]|transfer-encoding[ \t]*:)", re.I)


class AnswerHandler(ResponseHandler):
    """As aiohttp has it, but the parser gets the headers of an answer before what is behind them.
    So a body that is not as these say does not take the status along: one of a 204, which has
    none, or one that is longer than was said, or is badly divided."""

    #: the beginning of an answer whose headers have not ended; None: there is none
    _head: bytes | None = None

    def set_response_params(self, *args: Any, **kwargs: Any) -> None:
        self._head = b""
        super().set_response_params(*args, **kwargs)

    def data_received(self, data: bytes) -> None:
        while self._head is not None and data:
            had = len(self._head)
            head = self._head + data
            end = _END.search(head, max(had - 3, 0))
            if end is None:
                self._head = head if len(head) < MAX_HEAD else None
                break
            self._head = b"" if head.startswith(b"HTTP/1.1 1") else None  # another answer follows
            if _BODILESS.match(head) and _BODY.search(head, 0, end.end()):
                self.force_close()  # nobody may take its body for the next answer
            first, data = data[: end.end() - had], data[end.end() - had :]
            super().data_received(first)
            if not data:
                return
        super().data_received(data)

    def set_exception(self, exc: BaseException, *cause: Any) -> None:
        super().set_exception(exc, *cause)
        body = body_of(self)
        if body is not None and body.exception() is None and not body.is_eof():
            # Or it would be waited for until its time is over.
            body.set_exception(aiohttp.ClientPayloadError(str(exc)))


# -- sends requests to targets, over connections of aiohttp

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
        :mod:`.queue` for a process that stood still
    """

    def __init__(self, addresses: Addresses, timeout: float) -> None:
        self._addresses = addresses
        self._timeout = timeout
        self._resolver = _Resolver()
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    async def __aenter__(self) -> Poster:
        return self

    async def __aexit__(self, *_: object) -> None:
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
            make = partial(AnswerHandler, loop=asyncio.get_running_loop())
            use_protocol(connector, AnswerHandler, make)
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
