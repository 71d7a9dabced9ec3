"""What a request is refused with: RFC 9457, ``application/problem+json``.

A problem names the field that is wrong, if it is one field, and the way out. No text here ever has
a token, or a URL with a password.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    RedisError,
    ResponseError,
)

from .. import errors

logger = logging.getLogger(__name__)

CONTENT_TYPE = b"application/problem+json"

#: What a problem's type begins with; docs/http.md has a section for each.
TYPES = "urn:celery-toc:"

#: kind of problem -> its status and its title, which are always the same
KINDS: dict[str, tuple[int, str]] = {
    "bad-request": (400, "The request cannot be read"),
    "unauthorized": (401, "No valid token"),
    "forbidden": (403, "The token does not allow this"),
    "not-found": (404, "There is no such thing"),
    "method-not-allowed": (405, "This cannot be done here"),
    "timeout": (408, "The request took too long to arrive"),
    "conflict": (409, "It is not in a state in which this can be done"),
    "too-large": (413, "The request is too large"),
    "unsupported-media-type": (415, "The body is not of a type that is read here"),
    "invalid-field": (422, "A field cannot be used"),
    "key-reused": (422, "The Idempotency-Key was used for another request"),
    "rate-limited": (429, "Too many requests"),
    "headers-too-large": (431, "The headers are too large"),
    "internal": (500, "The server failed"),
    "busy": (503, "The server has as many connections as it may have"),
    "broker": (503, "The broker cannot be used just now"),
}

#: What this is the body of: every answer that is an error.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string", "enum": [TYPES + kind for kind in KINDS]},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "What is wrong, and the way out."},
        "field": {
            "type": "string",
            "description": "The field of the body, the parameter or the header that is wrong.",
        },
        "tasks": {
            "type": "array",
            "items": {"type": "object"},
            "description": "Of a list of which some were put: what became of each, in order. What "
            "has an error was not put, or perhaps not.",
        },
    },
}


class Problem(Exception):
    """A request is refused.

    kind: one of :data:`KINDS`
    detail: what is wrong with it, and the way out
    field: the field, parameter or header that is wrong; empty if it is none
    headers: of the answer, beside its content type
    """

    def __init__(
        self,
        kind: str,
        detail: str,
        field: str = "",
        headers: tuple[tuple[bytes, bytes], ...] = (),
        **more: Any,
    ) -> None:
        super().__init__(detail)
        self.kind, self.detail, self.field = kind, detail, field
        self.status, self.title = KINDS[kind]
        self.headers = headers
        self.more = more

    def body(self) -> bytes:
        document = {
            "type": TYPES + self.kind,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            **({"field": self.field} if self.field else {}),
            **self.more,
        }
        return json.dumps(document).encode()


def refusal(problem: Problem) -> bytes:
    """The answer of HTTP/1.1 that says a problem, for a connection that is closed then."""
    body = problem.body()
    lines = [
        f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}",
        f"content-type: {CONTENT_TYPE.decode()}",
        "connection: close",
        *(f"{name.decode()}: {said.decode()}" for name, said in problem.headers),
        f"content-length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def invalid(field: str, detail: str) -> Problem:
    """A field that cannot be used."""
    return Problem("invalid-field", f"{field}: {detail}" if field else detail, field)


@contextmanager
def going_on(otherwise: str = "use the nextPageToken of one") -> Iterator[None]:
    """Within this, a page is read that begins where another has ended: a ValueError says that none
    has ended there."""
    try:
        yield
    except ValueError:
        raise invalid("after", f"no page goes on there; {otherwise}") from None


def not_found(what: str) -> Problem:
    return Problem("not-found", what)


def retry_after(seconds: float) -> tuple[tuple[bytes, bytes], ...]:
    """The header that says when to come again; whole seconds, at least one."""
    return ((b"retry-after", str(max(1, math.ceil(seconds))).encode()),)


#: Errors of a caller -> the field that they are about, where an error does not say itself
_INVALID: tuple[tuple[type[Exception], str], ...] = (
    (errors.ActionTimeError, "scheduleTime"),
    (errors.TraitError, ""),
    (errors.ReceiptError, "receipts"),
)


#: The broker refuses what this server is: no retry mends that.
_REFUSALS = (errors.NotPermittedError, NoPermissionError, AuthenticationError, AuthorizationError)


def problem_of(exc: BaseException) -> Problem:
    """What a caller is told of an error. What is no fault of theirs is logged."""
    if isinstance(exc, Problem):
        return exc
    if isinstance(exc, errors.RateLimitedError):
        return Problem("rate-limited", str(exc), headers=retry_after(exc.retry_after))
    if isinstance(exc, errors.UniqueError):
        return Problem("conflict", str(exc), "unique", id=exc.id, hasStarted=exc.has_started)
    if isinstance(exc, errors.AlreadyThereError):
        return Problem("conflict", str(exc), "id")
    if isinstance(exc, errors.UnknownTopicError):
        return not_found(str(exc))
    for kind, field in _INVALID:
        if isinstance(exc, kind):
            return Problem("invalid-field", str(exc), field)
    if isinstance(exc, errors.ConfigurationError):
        return Problem("invalid-field", str(exc))
    if isinstance(exc, (errors.ReplicationError, errors.PutManyError)):
        return Problem("broker", str(exc), headers=retry_after(1))
    if isinstance(exc, _REFUSALS):
        # Which rule is missing is for the operator, and is in the log.
        logger.error("the broker refuses this server: %s", exc)
        return Problem("broker", "the broker refuses this server; its log says why")
    if isinstance(
        exc, (errors.ServerError, RedisError, OSError, errors.LibraryError)
    ) and not isinstance(exc, ResponseError):
        logger.warning("the broker cannot be used: %s", exc)
        detail = "the broker cannot be reached or refuses this for now; try again later"
        return Problem("broker", detail, headers=retry_after(1))
    if isinstance(exc, errors.TocError):
        return Problem("conflict", str(exc))
    logger.error("a request failed", exc_info=exc)
    return Problem("internal", "this is a fault of the server; its log says more")
