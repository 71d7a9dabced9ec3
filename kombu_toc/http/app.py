"""The ASGI application: from a request to an operation, and from what it does to an answer.

It uses nothing of a framework: paths are matched as they were sent, so a name may have a slash or
a colon in it, and a request costs little beside what it asks of the broker.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from ..aio.center import AsyncTimeoutCenter
from ..center.center import TimeoutCenter
from ..library.opening import center_for
from . import guard, library, pull, queues, tasks
from .desk import Desk
from .idempotency import Idempotency, as_answer
from .openapi import document
from .operations import Operation, Router, answer, read_parameters
from .problems import Problem, not_found, problem_of
from .requests import (
    CLOSE,
    MAX_HEADERS,
    MAX_TARGET,
    Answer,
    Gone,
    Receive,
    Request,
    Scope,
    Send,
    path_of,
)
from .tokens import Token, Tokens

logger = logging.getLogger(__name__)

#: Bytes of a body, and seconds within which it must be there.
MAX_BODY = 16 << 20
BODY_WITHIN = 30.0

#: Seconds for which answers are kept under an Idempotency-Key.
KEEP_ANSWERS = 3600.0

#: Headers of every answer: what is answered is for nobody else, and never a page.
_ALWAYS = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
)

_LOCAL_NAMES = ("localhost", "ip6-localhost")


class HttpApi:
    """The application. It belongs to one event loop, and connects when it is first used.

    center: the center whose messages these are
    tokens: who may do what; without any, only requests from this machine are answered
    recorded: a center with a task library, whose methods block: what is cancelled and moved is
        recorded there
    operations: more than those of every center
    on_close: awaited when the application ends
    keep_answers: seconds for which answers are kept under an Idempotency-Key
    max_body: bytes of a body
    check_message: is told the id and the bytes of each message before it is put; it raises a
        Problem for one that may not be
    names: names of this server, by which who has no token may read, where that is allowed
    """

    def __init__(
        self,
        center: AsyncTimeoutCenter,
        *,
        tokens: Tokens | None = None,
        recorded: TimeoutCenter | None = None,
        operations: Iterable[Operation] = (),
        on_close: Iterable[Callable[[], Awaitable[None]]] = (),
        keep_answers: float = KEEP_ANSWERS,
        max_body: int = MAX_BODY,
        check_message: Callable[[str, bytes], None] | None = None,
        names: Iterable[str] = (),
    ) -> None:
        self.center = center
        self.tokens = tokens or Tokens()
        self.desk = Desk(center, len(self.tokens.tokens))
        self.router = Router((*OPERATIONS, *operations))
        self._idempotency = Idempotency(center, keep_answers)
        self.max_body = max_body
        self.check_message = check_message
        self._names = frozenset(name.lower() for name in names)
        self._recorded = recorded
        self._on_close = tuple(on_close)
        #: what cancels and moves messages, so that the library knows
        self.acting: Any = center if recorded is None else _InThreads(recorded)
        self._document: Any = None

    async def aclose(self) -> None:
        """Answer all who wait, and close the connections to the broker."""
        await self.desk.aclose()
        await self.center.aclose()
        for close in self._on_close:
            await close()
        if self._recorded is not None:
            self._recorded.client.close()

    # -- for operations

    async def known_queue(self, queue: str) -> str:
        """A queue that somebody has declared. Raises Problem for any other."""
        if await self.center.declared(queue) is None:
            raise not_found(f"there is no queue {queue!r}")
        return queue

    async def ask_library(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the task library, in a thread. Raises Problem if there is none."""
        if self._recorded is None:
            raise not_found("there is no task library: set toc_library in the broker's URL")
        return await asyncio.to_thread(getattr(self._recorded.library, method), *args, **options)

    @property
    def document(self) -> Any:
        """The OpenAPI document."""
        if self._document is None:
            self._document = document(self.router)
        return self._document

    # -- ASGI

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            connection = guard.current()
            if connection is not None:
                connection.begin()
            try:
                await self._serve(scope, receive, send)
            finally:
                if connection is not None:
                    connection.end()
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = None
        connection = guard.current()
        try:
            request = self._read(scope, receive)
            made = await self._answer(request[0], request[1], request[2])
        except Gone:
            if connection is None:
                return
            made = Answer(b"", 408)  # for nobody; but the server wants one
        except Exception as exc:
            made = as_answer(problem_of(exc))
        if made.undo is not None and request is not None and await _has_gone(request[0]):
            await made.undo()
            if connection is None:
                return
            made = Answer(b"", 408)  # as above
        headers = [
            (b"content-type", made.content_type),
            (b"content-length", str(len(made.body)).encode()),
            *_ALWAYS,
            *made.headers,
        ]
        if CLOSE not in made.headers and any(name == b"upgrade" for name, _ in scope["headers"]):
            # Nothing is upgraded here, and a server may read no further request after it.
            headers.append(CLOSE)
        try:
            await send({"type": "http.response.start", "status": made.status, "headers": headers})
            body = b"" if scope["method"] == "HEAD" else made.body
            await send({"type": "http.response.body", "body": body})
            gone = connection is not None and connection.lost.is_set()
        except OSError:
            gone = True
        if gone and made.undo is not None:  # the client has gone away meanwhile
            await made.undo()

    def _read(self, scope: Scope, receive: Receive) -> tuple[Request, Operation, str]:
        """The request, its operation, and its path below where this is mounted."""
        if sum(len(name) + len(said) for name, said in scope["headers"]) > MAX_HEADERS:
            raise Problem("headers-too-large", f"headers may have {MAX_HEADERS} bytes")
        if len(scope.get("raw_path") or b"") + len(scope.get("query_string", b"")) > MAX_TARGET:
            raise Problem("bad-request", f"path and query may have {MAX_TARGET} bytes")
        parts, verb = path_of(scope, self.router.verbs)
        operation = self.router.find(scope["method"], parts, verb)
        request = Request(scope, receive, parts)
        if not self.tokens:
            _check_local(scope, request)
        if operation.role:
            request.token = self.tokens.check(request.header(b"authorization"))
            _check_role(request.token, operation, parts)
            if request.token.is_anonymous:
                _check_name(request, self._names)
        request.segments = read_parameters(operation, parts)
        return request, operation, f"{'/'.join(parts)}:{verb}"

    async def _answer(self, request: Request, operation: Operation, path: str) -> Answer:
        if request.method in ("POST", "PUT", "PATCH"):
            await request.read_body(self.max_body, BODY_WITHIN)
        if b"idempotency-key" in request.headers and operation.idempotent_by_key:
            key = request.header(b"idempotency-key")
            return await self._idempotency.run(
                key, request, path, lambda: operation.run(self, request)
            )
        return await operation.run(self, request)


def api_for(
    url: str,
    *,
    tokens: Tokens | None = None,
    operations: Iterable[Operation] = (),
    on_close: Iterable[Callable[[], Awaitable[None]]] = (),
    check_message: Callable[[str, bytes], None] | None = None,
    names: Iterable[str] = (),
    keep_answers: float = KEEP_ANSWERS,
    ssl: Any = None,
    **options: Any,
) -> HttpApi:
    """The application for a broker URL, to be served or mounted.

    tokens: who may do what; without any, only requests from this machine are answered
    operations: more than those of every center
    on_close: awaited when the application ends
    check_message: is told the id and the bytes of each message before it is put; it raises a
        Problem for one that may not be
    names: names of this server, by which who has no token may read, where that is allowed
    keep_answers: seconds for which answers are kept under an Idempotency-Key
    ssl: as in Celery's ``broker_use_ssl``
    options: as in ``broker_transport_options``

    Raises ConfigurationError for a URL or an option that makes no sense.
    """
    recorded = center_for(url, ssl=ssl, **options)
    return HttpApi(
        AsyncTimeoutCenter.from_url(url, ssl=ssl, **options),
        on_close=on_close,
        tokens=tokens,
        operations=operations,
        check_message=check_message,
        names=names,
        keep_answers=keep_answers,
        recorded=recorded if recorded.recorder is not None else None,
    )


class _InThreads:
    """The methods of a center that block, awaited."""

    def __init__(self, center: TimeoutCenter) -> None:
        self._center = center

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._center, name)
        return lambda *args, **options: asyncio.to_thread(method, *args, **options)


async def _has_gone(request: Request) -> bool:
    """Whether the client has gone away, as far as is known by now."""
    connection = guard.current()
    if connection is not None and connection.lost.is_set():
        request.gone = True
    if not request.gone:
        leaving = asyncio.ensure_future(request.wait_until_gone())
        await asyncio.sleep(0)
        if not leaving.done():
            leaving.cancel()
    return request.gone


def _check_role(token: Token, operation: Operation, parts: list[str]) -> None:
    """Raises Problem if a token does not allow this."""
    queue = None
    if "{queue}" in operation.path:
        queue = parts[operation.path.index("{queue}")]
    allowed = operation.role in token.roles if operation.many_queues else None
    if not (token.allows(operation.role, queue) if allowed is None else allowed):
        where = "of all queues" if queue is None else f"of queue {queue!r}"
        raise Problem("forbidden", f"this needs a token with the role {operation.role} {where}")


def _check_local(scope: Scope, request: Request) -> None:
    """Raises Problem for what does not come from this machine: there are no tokens. Neither a page
    in a browser nor a proxy may reach it: they ask for somebody else."""
    client = scope.get("client")
    if client is not None and not is_loopback(client[0]):
        raise _not_local("it comes from another machine")
    for header in request.headers:
        if header in _OF_PROXIES or header.startswith(b"x-forwarded"):
            raise _not_local("it comes through a proxy")
    host = request.header(b"host")
    named = _named(host)
    if named and not is_loopback(named):
        raise _not_local("it names another host")
    origin = request.header(b"origin")
    if origin and origin.partition("://")[2] != host:
        raise _not_local("it comes from a page of another site")


#: Headers by which a proxy says that it is one; those beginning with x-forwarded are others. A
#: proxy that says nothing cannot be told from a client.
_OF_PROXIES = frozenset((b"via", b"forwarded", b"x-real-ip", b"client-ip", b"x-client-ip"))


def _named(host: str) -> str:
    """The host in a header ``Host``, without its port."""
    name, _, port = host.rpartition(":")
    return (name if port.isdigit() else host).strip("[]").lower()


def _check_name(request: Request, names: frozenset[str]) -> None:
    """Raises Problem for a request without a token that names a host which is not this server's:
    a page in a browser can have its own name lead here, and read what its user can reach. By an
    address no page can."""
    named = _named(request.header(b"host"))
    if named and named not in names and not is_loopback(named) and not _is_address(named):
        raise Problem(
            "forbidden",
            f"without a token, this server answers to its address or to a name of its own, and "
            f"{named[:100]!r} is none: --name {named[:100]} makes it one",
            "host",
        )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _not_local(why: str) -> Problem:
    return Problem(
        "forbidden",
        f"without tokens, only requests from this machine are answered, and {why}; "
        "make a token: python -m kombu_toc.http --new-token NAME",
    )


def is_loopback(host: str) -> bool:
    """Whether a name or an address is of this machine only."""
    if host.lower() in _LOCAL_NAMES:
        return True
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


# -- what is of no queue


async def _openapi(api: HttpApi, request: Request) -> Answer:
    return answer(api.document)


async def _healthz(api: HttpApi, request: Request) -> Answer:
    return answer({"status": "ok"})


async def _readyz(api: HttpApi, request: Request) -> Answer:
    try:
        await asyncio.wait_for(api.center.call(lambda center: center.client.time()), 5)
    except Exception as exc:
        problem = problem_of(exc) if not isinstance(exc, asyncio.TimeoutError) else None
        raise Problem(
            "broker", "the broker does not answer" if problem is None else problem.detail
        ) from None
    return answer({"status": "ready"})


async def _metrics(api: HttpApi, request: Request) -> Answer:
    try:
        from ..exporter import metrics_text
    except ImportError:
        raise not_found(
            "metrics need prometheus-client: pip install 'celery-toc[metrics]'"
        ) from None
    text = await api.center.call(metrics_text)
    return Answer(text.encode(), content_type=b"text/plain; version=0.0.4; charset=utf-8")


_STATUS = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"type": "string"}},
}

OPERATIONS = (
    *tasks.OPERATIONS,
    *pull.OPERATIONS,
    *queues.OPERATIONS,
    *library.OPERATIONS,
    Operation(
        "GET",
        ("metrics",),
        _metrics,
        "Metrics in Prometheus's text format",
        answers={200: ("As celery toc metrics prints them.", {})},
        problems=("not-found",),
        text="text/plain",
    ),
    Operation(
        "GET",
        ("openapi.json",),
        _openapi,
        "This document",
        role="",
        answers={200: ("OpenAPI 3.1.", {"type": "object"})},
    ),
    Operation(
        "GET",
        ("healthz",),
        _healthz,
        "Tell whether the process lives",
        role="",
        answers={200: ("It does.", _STATUS)},
    ),
    Operation(
        "GET",
        ("readyz",),
        _readyz,
        "Tell whether the broker can be used",
        role="",
        answers={200: ("It can.", _STATUS)},
    ),
)
