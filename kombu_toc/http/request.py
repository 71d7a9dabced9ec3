"""A request as the operations see it, and what they answer."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import math
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import parse_qsl, quote, unquote_to_bytes

from .fields import KINDS, Object, Problem, Text, invalid

if sys.version_info >= (3, 11):
    from asyncio import timeout as timeout_after
else:
    from async_timeout import timeout as timeout_after

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

logger = logging.getLogger(__name__)

T = TypeVar("T")

JSON = b"application/json"

#: Bytes of all headers of a request, and of its path and query, at most.
MAX_HEADERS = 32 * 1024
MAX_TARGET = 16 * 1024

#: Bytes of a body that are read although its request was refused, so that the answer is seen.
MOST_DISCARDED = 256 << 20

#: Seconds within which a body must be there.
BODY_WITHIN = 30.0


#: Of an answer after which the connection cannot be used.
CLOSE = (b"connection", b"close")


class Answer(NamedTuple):
    """What is sent back.

    keep: seconds for which the answer to a request with an Idempotency-Key is kept, at most
    kept: what is kept of it then, if not all
    undo: what is awaited if nobody gets the answer
    cache: for how long it may be kept
    number: of messages that it is about, for the audit log; -1: of none
    """

    body: bytes
    status: int = 200
    content_type: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()
    keep: float = 86_400.0
    kept: bytes | None = None
    undo: Callable[[], Awaitable[Any]] | None = None
    cache: bytes = b"no-store"
    number: int = -1


class Request:
    """One request.

    segments: the parts of its path, decoded
    query: its parameters; of several with one name, the last
    asked: its parameters and the fields of its body, as its operation uses them
    root: where the application is mounted, such as ``/toc``; empty if it is not
    token: who asks: see :mod:`.tokens`
    operation: what is asked for
    path: below where the application is mounted, decoded, with its verb
    """

    def __init__(self, scope: Scope, receive: Receive, segments: list[str]) -> None:
        self.method: str = scope["method"]
        self.root: str = scope.get("root_path", "")
        self.segments = segments
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        said = scope.get("query_string", b"")
        unread = "the query of the URL cannot be decoded as UTF-8"
        self.query = dict(read_pairs(said, 100, unread)) if said else {}
        self.asked: dict[str, Any] = {}
        self.body = b""
        self.token: Any = None
        self.operation: Any = None
        self.path = ""
        #: whether the client has gone away
        self.gone = False
        self._receive = receive
        self._scheme: str = scope.get("scheme", "http")

    @property
    def is_secure(self) -> bool:
        """Whether the client speaks TLS, also to a proxy that says so."""
        # Each proxy adds what it was spoken to with: the first one is the client's.
        said = self.header(b"x-forwarded-proto").partition(",")[0]
        return self._scheme == "https" or said.strip().lower() == "https"

    def header(self, name: bytes) -> str:
        """What a header says; empty if it is not there."""
        found = self.headers.get(name)
        return "" if found is None else found.decode("latin-1")

    @property
    def media_type(self) -> str:
        """The type of the body, in lower case and without parameters."""
        return self.header(b"content-type").partition(";")[0].strip().lower()

    async def read_body(self, most: int, seconds: float = BODY_WITHIN) -> None:
        """Read the body. Raises Problem if it is too large or does not come in time."""
        said = self.headers.get(b"content-length")
        if said is not None and said.isdigit() and int(said) > most:
            raise _too_large(most)
        if b"upgrade" in self.headers and (
            b"transfer-encoding" in self.headers or (said is not None and said.strip(b"0"))
        ):
            # Some servers take what follows the headers for the other protocol's.
            raise _unreadable("a request with a body cannot ask for another protocol")
        try:
            async with timeout_after(seconds):  # cheaper than wait_for, which makes a task
                await self._read(most)
        except (asyncio.TimeoutError, TimeoutError):
            detail = f"the body was not there within {seconds:g} seconds"
            raise Problem("timeout", detail, headers=(CLOSE,)) from None
        if said is not None and said.isdigit() and int(said) != len(self.body):
            raise _unreadable(f"the body has {len(self.body)} bytes, and not {int(said)}")

    async def _read(self, most: int) -> None:
        parts, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise Gone
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                raise _too_large(most)
            parts.append(part)
            if not message.get("more_body", False):
                self.body = parts[0] if len(parts) == 1 else b"".join(parts)
                return

    async def wait_until_gone(self) -> None:
        """Return when the client has gone away. The body was read before."""
        while not self.gone:
            message = await self._receive()
            self.gone = message["type"] == "http.disconnect"

    def json(self) -> Any:
        """The body. Raises Problem."""
        return read_json(self.body) if self.body else None

    def fields(self) -> dict[str, Any]:
        """The fields of the body, as its operation takes them. Raises Problem."""
        known: Object | None = self.operation.request
        if known is None:
            return _NOTHING.read(self.json(), "") if self.body else {}
        if not self.body and not self.operation.required:
            return known.read({}, "")
        check_encoding(self)
        if self.media_type != "application/json":
            raise Problem(
                "unsupported-media-type",
                "send the body as application/json: curl -H 'content-type: application/json'",
                "content-type",
            )
        return known.read(self.json(), "")


#: The connection of the requests that a task deals with: a :class:`.serving.Guarded`.
CURRENT: ContextVar[Any] = ContextVar("toc_http_connection", default=None)

#: That of the request that is being dealt with, if it is guarded.
current = CURRENT.get


#: Headers of which two would say different things to whoever reads them.
_SINGLE = (b"host", b"authorization", b"content-type", b"content-encoding", b"idempotency-key")


def check_single(scope: Scope) -> None:
    """Raises Problem for a request that has twice what there is one of."""
    names = [name for name, _ in scope["headers"]]
    for name in _SINGLE:
        if names.count(name) > 1:
            raise _unreadable(f"the header {name.decode()} is there twice")


def has_body(scope: Scope) -> bool:
    """Whether a body comes with a request."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and said.strip(b"0 "))
        for name, said in scope["headers"]
    )


async def discard_body(receive: Receive, seconds: float = BODY_WITHIN) -> None:
    """Read what is left of a body, and keep nothing of it; for so long at most."""
    connection = current()
    if connection is not None:
        connection.discard(MOST_DISCARDED)
    with suppress(asyncio.TimeoutError, TimeoutError):
        async with timeout_after(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


async def end(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks, and wait until they have ended."""
    left = [task for task in tasks if task is not None]
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left)


class Background(Generic[T]):
    """What is asked beside the requests, for all who want to know. Nobody waits for it but who asks
    first."""

    #: who is asked
    NAME = ""
    #: seconds between two questions, at least; or so many times as long as one took; and seconds
    #: for which the first who wants to know waits
    EVERY, SHARE, FIRST = 10.0, 0.0, 0.0

    #: the latest answer
    latest: T
    task: asyncio.Task[None] | None = None
    _next = 0.0

    async def ask(self) -> T:
        """Ask. What this raises is logged, and the latest answer stays."""
        raise NotImplementedError

    async def read(self) -> T:
        """The latest answer, which may be some seconds old."""
        loop = asyncio.get_running_loop()
        if self.task is None and loop.time() >= self._next:
            self.task = loop.create_task(self._run())
            if not self._next and self.FIRST:
                await asyncio.wait((self.task,), timeout=self.FIRST)
        return self.latest

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            self.latest = await self.ask()
        except Exception as exc:
            logger.info("%s cannot be asked, and are shown as they were: %s", self.NAME, exc)
        finally:
            took = clock() - began
            self._next = began + max(took + self.EVERY, took * self.SHARE)
            self.task = None

    async def aclose(self) -> None:
        """End a question that is under way."""
        await end(self.task)


class Gone(Exception):
    """The client has gone away: nobody waits for an answer."""


def read_json(body: bytes) -> Any:
    """Raises Problem for what is no JSON."""
    try:
        return _decode(body.decode())
    except RecursionError:
        raise Problem("bad-request", "the body is nested too deeply") from None
    except (ValueError, UnicodeDecodeError) as exc:
        raise Problem("bad-request", f"the body is not JSON in UTF-8: {exc}"[:300]) from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    """A number with a fraction or an exponent. What a float cannot hold would become infinite, and
    be written as what is no JSON."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is too large a number")
    return number


_decode = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite).decode


def _too_large(most: int) -> Problem:
    detail = f"a body may have {most} bytes; send fewer messages in one request"
    return Problem("too-large", detail, headers=(CLOSE,))


def _unreadable(detail: str) -> Problem:
    return Problem("bad-request", detail, headers=(CLOSE,))


def read_pairs(raw: bytes, most: int, detail: str) -> list[tuple[str, str]]:
    """The parameters of a URL, or the fields of a form: so many at most. Raises Problem, with this
    detail."""
    try:
        return parse_qsl(
            raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=most
        )
    except ValueError:
        raise Problem("bad-request", detail) from None


def path_of(scope: Scope, verbs: frozenset[str]) -> tuple[list[str], str]:
    """The parts of a request's path, below where this is mounted, each decoded on its own: so an
    encoded slash or colon belongs to a name. And the verb, which is behind the last colon.

    verbs: those that there are; anything else behind a colon belongs to a name

    Raises Problem.
    """
    raw: bytes | None = scope.get("raw_path")
    root: str = scope.get("root_path", "")
    if raw is None:
        raw = scope["path"].encode("utf-8", "surrogateescape")
    path = raw.partition(b"?")[0]
    if root:
        # Where it is mounted is decoded, and the path need not be.
        for stem in (
            root.encode("utf-8", "surrogateescape"),
            quote(root, errors="replace").encode(),
        ):
            if path.startswith(stem):
                path = path[len(stem) :]
                break
    parts = path.removeprefix(b"/").split(b"/")
    name, _, verb = parts[-1].rpartition(b":")
    found = verb.decode("latin-1")
    if not name or found not in verbs:
        found = ""
    else:
        parts[-1] = name
    try:
        return [
            unquote_to_bytes(part).decode() if b"%" in part else part.decode() for part in parts
        ], found
    except UnicodeDecodeError:
        raise Problem("bad-request", "the path of the URL cannot be decoded as UTF-8") from None


# -- operations

#: It is given the application, the request, and the parameters of its path.
Run = Callable[..., Awaitable[Answer]]

#: What a token may be allowed, and what each is for.
ROLES = {
    "read": "look at messages, queues, limits and schedules",
    "write": "put, move and cancel messages; lease and settle them; send tasks",
    "operate": "declare, alter, pause and purge queues; requeue dead messages; change schedules",
}


@dataclass(frozen=True)
class Operation:
    """One method of one path.

    method: of HTTP
    path: its parts, such as ``("v1", "queues", "{queue}")``; those in braces are parameters
    verb: what is behind the colon, as in ``:lease``
    role: what a token needs; empty: nothing
    run: does it
    summary: one line
    request: the fields of its body; None: it takes none
    required: whether the body must be there
    query: parameters of its URL
    answers: status -> what it means, and the schema of its body
    problems: kinds of problems that it may answer beside those of every operation
    media: other types of the body -> their schema
    """

    method: str
    path: tuple[str, ...]
    run: Run
    summary: str
    role: str = "read"
    verb: str = ""
    request: Object | None = None
    required: bool = True
    query: Mapping[str, Any] = field(default_factory=dict)
    answers: Mapping[int, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    problems: Sequence[str] = ()
    media: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    about: str = ""
    text: str = ""  #: the type of its answers, if they are not JSON
    #: whether it looks at several queues, and shows of each only what the token may see
    many_queues: bool = False
    reads: bool = False  #: whether it reads its body itself: who asks decides how much it may be
    is_shown: bool = True  #: whether the OpenAPI document has it
    #: makes an answer whole that was kept in part, for a request that is repeated: it is given the
    #: application, that answer, and the parameters of the path
    again: Callable[..., Awaitable[Answer]] | None = None
    act: str = ""  #: what the audit log calls it; empty: it is not there
    subject: str = ""  #: what its id begins with in the OpenAPI document

    @property
    def shown_path(self) -> str:
        return "/" + "/".join(self.path) + (f":{self.verb}" if self.verb else "")

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(part[1:-1] for part in self.path if part.startswith("{"))

    @property
    def idempotent_by_key(self) -> bool:
        return self.is_shown and self.method == "POST"

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """What is asked for where a request does not say it."""
        kinds = {**self.query, **({} if self.request is None else self.request.fields)}
        defaults = {name: getattr(kind, "default", None) for name, kind in kinds.items()}
        return {name: default for name, default in defaults.items() if default is not None}


class Operations(list[Operation]):
    """Operations on a subject, each described where the function stands that does it.

    problems: kinds of problems of all of which no others are named
    """

    def __init__(
        self, subject: str, operations: Iterable[Operation] = (), problems: Sequence[str] = ()
    ) -> None:
        super().__init__(operations)
        self.subject, self._problems = subject, problems

    def add(
        self,
        address: str,
        summary: str = "",
        *,
        returns: tuple[str, Mapping[str, Any]] = ("", {}),
        status: int = 200,
        **more: Any,
    ) -> Callable[[Run], Run]:
        """Names the function that does an operation. Its docstring describes that: the first
        paragraph is its summary, and the others say more.

        address: its method and path, as ``POST /v1/queues/{queue}:lease``; what is behind the colon
            is its verb
        summary: of a function that does several
        returns: what its answer means, and the schema of its body
        status: of the answer
        more: as in :class:`Operation`
        """
        method, _, path = address.partition(" ")
        path, _, verb = path.removeprefix("/").partition(":")
        said = {"answers": {status: returns}, "subject": self.subject, "verb": verb}
        more = {"problems": self._problems, **said, **more}

        def named(run: Run) -> Run:
            paragraphs = (summary or run.__doc__ or "").split("\n\n")
            first, *rest = (" ".join(one.split()) for one in paragraphs)
            described = {"summary": first.rstrip("."), "about": " ".join(rest), **more}
            self.append(Operation(method, tuple(path.split("/")), run, **described))
            return run

        return named


#: The parameters of paths.
PARAMETERS = {
    "queue": Text("The name of a queue.", most=500),
    "id": Text("The id of a message.", most=2000),
    "app": Text("The name of the Celery app.", most=500),
    "schedule": Text("The name of a schedule.", most=500),
}


class Router:
    """Finds the operation of a request."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        self.operations = tuple(operations)
        self.verbs = frozenset(one.verb for one in self.operations if one.verb)
        #: number of parts, verb -> the operations
        self._by_form: dict[tuple[int, str], list[Operation]] = {}
        for one in self.operations:
            self._by_form.setdefault((len(one.path), one.verb), []).append(one)

    def find(self, method: str, parts: list[str], verb: str) -> Operation:
        """Raises Problem if there is no such path, or if it has no such method."""
        others = set()
        for one in self._by_form.get((len(parts), verb), ()):
            for wanted, part in zip(one.path, parts, strict=True):
                if wanted != part and (wanted[:1] != "{" or not part):
                    break
            else:
                if one.method == method or (method == "HEAD" and one.method == "GET"):
                    return one
                others.add(one.method)
        if others:
            allow = (b"allow", ", ".join(sorted(others)).encode())
            detail = f"{method[:20]} cannot be done here; {', '.join(sorted(others))} can"
            raise Problem("method-not-allowed", detail, headers=(allow,))
        raise Problem("not-found", "there is no such path; /openapi.json has all of them")


def read_parameters(operation: Operation, parts: list[str]) -> list[str]:
    """The parameters of a path. Raises Problem."""
    return [
        PARAMETERS[wanted[1:-1]].read(part, wanted[1:-1])
        for wanted, part in zip(operation.path, parts, strict=True)
        if wanted[:1] == "{"
    ]


def read_query_of(operation: Operation, query: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of a URL as they are used. Raises Problem, also for one that is unknown."""
    made = {}
    for name, text in query.items():
        kind = operation.query.get(name)
        if kind is None:
            known = ", ".join(operation.query) or "none"
            raise invalid(name[:100], f"unknown parameter; there are: {known}")
        read = getattr(kind, "read_text", None) or kind.read
        made[name] = read(text, name)
    return made


_NOTHING = Object({})


def check_encoding(request: Request) -> None:
    """Raises Problem for a compressed body: what it expands to has no bound."""
    if request.header(b"content-encoding").strip().lower() not in ("", "identity"):
        raise Problem(
            "unsupported-media-type",
            "send the body as it is, without a content-encoding such as gzip",
            "content-encoding",
        )


def answer(document: Any, status: int = 200, **how: Any) -> Answer:
    """An answer in JSON. What JSON has not, such as a date or an infinite number, is text."""
    try:
        text = _encode(document)
    except ValueError:
        plain = json.loads(json.dumps(document, default=str), parse_constant=str)
        text = _encode(plain)
    return Answer(text.encode(), status, **how)


_encode = json.JSONEncoder(separators=(",", ":"), default=str, allow_nan=False).encode

#: The kinds of problems that each operation may answer.
EVERYWHERE = (
    "bad-request",
    "unauthorized",
    "forbidden",
    "timeout",
    "too-large",
    "invalid-field",
    "rate-limited",
    "headers-too-large",
    "internal",
    "broker",
)


def statuses_of(kinds: Iterable[str]) -> dict[int, list[str]]:
    """Status -> the kinds of problems that have it."""
    found: dict[int, list[str]] = {}
    for kind in kinds:
        found.setdefault(KINDS[kind][0], []).append(kind)
    return found


# -- from where a request may come that has no token

_PORT_DIGITS = 5
_LOCAL_NAMES = ("localhost", "ip6-localhost")


def check_local(scope: Scope, request: Request) -> None:
    """Raises Problem for what does not come from this machine: there are no tokens. Neither a page
    in a browser nor a proxy may reach it: they ask for somebody else."""
    client, host = scope.get("client"), request.header(b"host")
    named, origin = host_of(host), request.header(b"origin")
    proxied = [
        one for one in request.headers if one in _OF_PROXIES or one.startswith(b"x-forwarded")
    ]
    for wrong, why in (
        (client is not None and not is_loopback(client[0]), "it comes from another machine"),
        (proxied, "it comes through a proxy"),
        (named and not is_loopback(named), "it names another host"),
        (origin and origin.partition("://")[2] != host, "it comes from a page of another site"),
    ):
        if wrong:
            raise Problem(
                "forbidden",
                f"without tokens, only requests from this machine are answered, and {why}; "
                "make a token: python -m kombu_toc.http --new-token NAME",
            )


#: Headers by which a proxy says that it is one; those beginning with x-forwarded are others. A
#: proxy that says nothing cannot be told from a client.
_OF_PROXIES = frozenset((b"via", b"forwarded", b"x-real-ip", b"client-ip", b"x-client-ip"))


def host_of(host: str) -> str:
    """The host in a header ``Host``, without its port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).strip("[]").lower()


def port_of(host: str) -> str:
    """The port in a header ``Host``; empty if it is that of the scheme."""
    port = host.rpartition(":")[2]
    return port if port.isascii() and port.isdigit() and len(port) <= _PORT_DIGITS else ""


def check_name(request: Request, names: frozenset[str]) -> None:
    """Raises Problem for a request without a token that names a host which is not this server's:
    a page in a browser can have its own name lead here, and read what its user can reach. By an
    address no page can."""
    named = host_of(request.header(b"host"))
    if named and named not in names and not is_loopback(named) and _address(named) is None:
        raise Problem(
            "forbidden",
            f"without a token, this server answers to its address or to a name of its own, and "
            f"{named[:100]!r} is none: --name {named[:100]} makes it one",
            "host",
        )


def _address(host: str) -> Any:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether a name or an address is of this machine only."""
    found = _address(host)
    found = getattr(found, "ipv4_mapped", None) or found
    return host.lower() in _LOCAL_NAMES or (found is not None and found.is_loopback)
