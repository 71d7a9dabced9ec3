"""A request as the operations see it, and what they answer."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote_to_bytes

from . import guard
from .problems import Problem

if sys.version_info >= (3, 11):
    from asyncio import timeout as timeout_after
else:
    from async_timeout import timeout as timeout_after

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

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
    asked: its parameters as its operation uses them
    root: where the application is mounted, such as ``/toc``; empty if it is not
    token: who asks: see :mod:`.tokens`
    """

    __slots__ = (
        "_receive",
        "_scheme",
        "asked",
        "body",
        "gone",
        "headers",
        "method",
        "query",
        "root",
        "segments",
        "token",
    )

    def __init__(self, scope: Scope, receive: Receive, segments: list[str]) -> None:
        self.method: str = scope["method"]
        self.root: str = scope.get("root_path", "")
        self.segments = segments
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.query = read_query(scope.get("query_string", b""))
        self.asked: dict[str, Any] = {}
        self.body = b""
        self.token: Any = None
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
        """The body as JSON; None if there is no body. Raises Problem."""
        if not self.body:
            return None
        return read_json(self.body)


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
    connection = guard.current()
    if connection is not None:
        connection.discard(MOST_DISCARDED)
    try:
        async with timeout_after(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except (asyncio.TimeoutError, TimeoutError):
        pass


class Gone(Exception):
    """The client has gone away: nobody waits for an answer."""


def read_json(body: bytes) -> Any:
    """Raises Problem for what is no JSON."""
    try:
        return json.loads(body.decode(), parse_constant=_refuse, parse_float=_finite)
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


def _too_large(most: int) -> Problem:
    detail = f"a body may have {most} bytes; send fewer messages in one request"
    return Problem("too-large", detail, headers=(CLOSE,))


def _unreadable(detail: str) -> Problem:
    return Problem("bad-request", detail, headers=(CLOSE,))


def read_query(raw: bytes) -> dict[str, str]:
    """The parameters of a URL. Raises Problem."""
    if not raw:
        return {}
    try:
        pairs = parse_qsl(
            raw.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=100,
        )
    except ValueError:
        raise Problem("bad-request", "the query of the URL cannot be decoded as UTF-8") from None
    return dict(pairs)


def path_of(scope: Scope, verbs: Collection[str]) -> tuple[list[str], str]:
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
