"""The fields of requests and answers: each is read, checked and documented by one declaration. And
what a request is refused with.

A kind has ``schema()``, which is JSON Schema for the OpenAPI document, and ``read(value, at)``: the
value as it is used here. It raises a :class:`.Problem` that names the field by `at`, such as
``tasks[3].delay``.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import cache
from http import HTTPStatus
from typing import Any

from redis import exceptions

from .. import errors

_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)[Tt]((?:[01]\d|2[0-3]):\d\d):(\d\d)(\.\d{1,9})?"
    r"([Zz]|[+-]\d\d:[0-5]\d)",
    re.ASCII,
)


def described(schema: dict[str, Any], about: str) -> dict[str, Any]:
    return {**schema, "description": about} if about else schema


# -- the schemas of answers

TEXT: dict[str, Any] = {"type": "string"}
WHOLE: dict[str, Any] = {"type": "integer"}
NUMBER: dict[str, Any] = {"type": "number"}
FLAG: dict[str, Any] = {"type": "boolean"}
TIME: dict[str, Any] = {**TEXT, "format": "date-time"}
ANYTHING: dict[str, Any] = {"type": ["object", "array", "string", "number", "boolean", "null"]}


def or_null(schema: Mapping[str, Any], about: str = "") -> dict[str, Any]:
    return described({**schema, "type": [schema["type"], "null"]}, about)


def array(items: Mapping[str, Any], about: str = "") -> dict[str, Any]:
    return described({"type": "array", "items": items}, about)


def record(
    needed: str = "", /, *, texts: str = "", wholes: str = "", **members: Mapping[str, Any]
) -> dict[str, Any]:
    """An object of an answer.

    needed: names of members that it always has
    texts, wholes: names of those that are just a text, or a whole number
    """
    every = {**dict.fromkeys(texts.split(), TEXT), **dict.fromkeys(wholes.split(), WHOLE)}
    made: dict[str, Any] = {"type": "object", "required": needed.split()}
    made["properties"] = {**every, **members}
    return {name: said for name, said in made.items() if said}


#: What nextPageToken says; and where a page need not be full.
LAST = "The parameter after of the next page; null: this is the last one."
SPARSE = f"{LAST} A page may have fewer than limit, or none."


def page_of(name: str, of: Mapping[str, Any], about: str = LAST, **more: Any) -> dict[str, Any]:
    """A page of a list, an answer to what is asked by :func:`paging`.

    name: of the member with the list
    about: of nextPageToken
    """
    members: dict[str, Any] = {name: array(of), "nextPageToken": or_null(TEXT, about)}
    return record(" ".join(members), **members, **more)


#: Members of answers -> attributes of results that are called otherwise.
_ATTRIBUTES = {
    "queue": "topic",
    "arguments": "args",
    "scheduleTime": "action_us",
    "createTime": "created_us",
    "updateTime": "modified_us",
    "failTime": "failed_us",
    "oldestSeconds": "oldest_us",
    "opensSeconds": "opens_us",
}


@cache
def _attribute(name: str) -> str:
    snake = re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name)
    return _ATTRIBUTES.get(name, snake)


def members(result: Any, names: Iterable[str], **attributes: str) -> dict[str, Any]:
    """Members of an answer, as a result has them: ``maxRuns`` is its `max_runs`, and what is a time
    or a number of seconds is counted in microseconds there.

    attributes: those of members that are called otherwise
    """
    shown = {}
    for name in names:
        value = getattr(result, attributes.get(name) or _attribute(name))
        if isinstance(value, datetime):
            value = value.isoformat().replace("+00:00", "Z")
        elif value is not None and name.endswith("Time"):
            value = shown_time(value)
        elif name.endswith("Seconds"):
            value = value / 1e6
        shown[name] = value
    return shown


# -- what a field of a request may be


@dataclass(frozen=True)
class Text:
    """Text that UTF-8 can hold."""

    about: str = ""
    most: int = 1000
    least: int = 1
    choices: tuple[str, ...] = ()

    def schema(self) -> dict[str, Any]:
        if self.choices:
            return described({"type": "string", "enum": list(self.choices)}, self.about)
        made: dict[str, Any] = {"type": "string", "minLength": self.least, "maxLength": self.most}
        return described(made, self.about)

    def read(self, value: Any, at: str) -> str:
        if not isinstance(value, str):
            raise invalid(at, "it must be a string")
        if self.choices and value not in self.choices:
            raise invalid(at, f"it must be one of {', '.join(self.choices)}")
        if not self.choices and not self.least <= len(value) <= self.most:
            raise invalid(at, f"it must have {self.least} to {self.most} characters")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise invalid(at, "it has half of a surrogate pair, which no UTF-8 can hold") from None
        return value


@dataclass(frozen=True)
class Number:
    """A number, or a whole number."""

    about: str = ""
    least: float = 0
    most: float = 1e10
    whole: bool = False
    default: float | None = None

    def schema(self) -> dict[str, Any]:
        made: dict[str, Any] = {"type": "integer" if self.whole else "number"}
        made["minimum"] = int(self.least) if self.least == int(self.least) else self.least
        made["maximum"] = int(self.most) if self.most == int(self.most) else self.most
        if self.default is not None:
            made["default"] = self.default
        return described(made, self.about)

    def read(self, value: Any, at: str) -> Any:
        what = "a whole number" if self.whole else "a number"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise invalid(at, f"it must be {what}")
        if self.whole and isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON has one kind of number
        # No float holds a whole number of 400 digits: it is only compared.
        finite = isinstance(value, int) or math.isfinite(value)
        if not finite or (self.whole and not isinstance(value, int)):
            raise invalid(at, f"it must be {what}")
        if not self.least <= value <= self.most:
            raise invalid(at, f"it must be from {self.least:g} to {self.most:g}")
        return value

    def read_text(self, text: str, at: str) -> Any:
        """A number in a URL."""
        pattern = r"-?\d{1,15}" if self.whole else r"-?\d{1,15}(\.\d{1,9})?"
        if not re.fullmatch(pattern, text, re.ASCII):
            return self.read(text, at)  # which is refused
        return self.read(int(text) if self.whole else float(text), at)


@dataclass(frozen=True)
class Flag:
    """True or false."""

    about: str = ""
    default: bool = False

    def schema(self) -> dict[str, Any]:
        return described({"type": "boolean", "default": self.default}, self.about)

    def read(self, value: Any, at: str) -> bool:
        if not isinstance(value, bool):
            raise invalid(at, "it must be true or false")
        return value

    def read_text(self, text: str, at: str) -> bool:
        return self.read({"true": True, "false": False}.get(text), at)


@dataclass(frozen=True)
class Time:
    """A moment: RFC 3339, with an offset. Read, it is seconds since the epoch."""

    about: str = ""

    def schema(self) -> dict[str, Any]:
        return described({"type": "string", "format": "date-time"}, self.about)

    def read(self, value: Any, at: str) -> float:
        found = _TIME.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            raise invalid(
                at, "it must be a time as in RFC 3339, with an offset: 2026-01-31T09:30:00Z"
            )
        day, minute, second, fraction, offset = found.groups()
        zone = "+00:00" if offset in "Zz" else offset
        leap = second == "60" and minute.endswith("59")
        try:
            moment = datetime.fromisoformat(f"{day}T{minute}:{'59' if leap else second}{zone}")
            seconds = (moment - _EPOCH) / timedelta(seconds=1) + leap
        except (ValueError, OverflowError):
            raise invalid(at, f"there is no such time as {value}") from None
        return max(seconds + float(fraction or 0), 0.0)

    def read_text(self, text: str, at: str) -> float:
        return self.read(text.replace(" ", "+"), at)  # a plus that was not encoded


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def shown_time(us: int) -> str | None:
    """Microseconds since the epoch as a time; None for none, and for what is beyond all times."""
    try:
        moment = _EPOCH + timedelta(microseconds=us)
    except OverflowError:
        return None
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ") if us else None


@dataclass(frozen=True)
class Base64:
    """Bytes, in base64."""

    about: str = ""

    def schema(self) -> dict[str, Any]:
        made = {"type": "string", "contentEncoding": "base64", "pattern": _BASE64.pattern}
        return described(made, self.about)

    def read(self, value: Any, at: str) -> bytes:
        try:
            if not isinstance(value, str) or not _BASE64.fullmatch(value):
                raise ValueError
            return base64.b64decode(value, validate=True)
        except ValueError:
            raise invalid(at, "it must be bytes in base64, with its padding") from None


_BASE64 = re.compile(r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$")


@dataclass(frozen=True)
class Anything:
    """Any JSON."""

    about: str = ""
    of: tuple[str, ...] = ()  #: the types of JSON that it may have
    also: Mapping[str, Any] = field(default_factory=dict)  #: what else its schema says

    def schema(self) -> dict[str, Any]:
        made = {"type": list(self.of)} if self.of else {}
        return described({**made, **self.also}, self.about)

    def read(self, value: Any, at: str) -> Any:
        kind = _TYPES.get(type(value), "object")
        if kind == "number" and "integer" in self.of and value == int(value):
            return value
        if self.of and kind not in self.of:
            raise invalid(at, f"it must be {' or '.join(self.of)}, not {kind}")
        return value


#: Types of Python -> those of JSON.
_TYPES = {
    **{type(None): "null", bool: "boolean", str: "string", list: "array"},
    **dict.fromkeys((int, float), "number"),
}


@dataclass(frozen=True)
class Headers:
    """Names and what they say."""

    about: str = ""
    most: int = 100

    def schema(self) -> dict[str, Any]:
        made = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 10_000}}
        return described({**made, "maxProperties": self.most}, self.about)

    def read(self, value: Any, at: str) -> dict[str, str]:
        if not isinstance(value, dict):
            raise invalid(at, "it must be an object")
        if len(value) > self.most:
            raise invalid(at, f"it must have {self.most} members at most")
        said = Text(most=10_000, least=0)
        return {said.read(name, at): said.read(value[name], f"{at}.{name}") for name in value}


@dataclass(frozen=True)
class Listed:
    """A list of one kind."""

    of: Any
    about: str = ""
    most: int = 1000

    def schema(self) -> dict[str, Any]:
        made = {"type": "array", "items": self.of.schema(), "minItems": 1}
        return described({**made, "maxItems": self.most}, self.about)

    def read(self, value: Any, at: str) -> list[Any]:
        if not isinstance(value, list):
            raise invalid(at, "it must be a list")
        if not 1 <= len(value) <= self.most:
            raise invalid(at, f"it must have 1 to {self.most} members")
        read = self.of.read
        return [read(one, f"{at}[{place}]") for place, one in enumerate(value)]


@dataclass(frozen=True)
class Object:
    """An object with these fields and no others.

    needed: those that must be there
    one_of: of these exactly one must be there
    at_most_one: of these at most one may be there
    """

    fields: Mapping[str, Any]
    needed: Sequence[str] = ()
    one_of: Sequence[str] = ()
    at_most_one: Sequence[str] = ()
    about: str = ""
    name: str = ""  #: of its schema in the document; empty: it has none of its own

    def schema(self) -> dict[str, Any]:
        made: dict[str, Any] = {
            "type": "object",
            "properties": {name: kind.schema() for name, kind in self.fields.items()},
            "additionalProperties": False,
        }
        if self.needed:
            made["required"] = list(self.needed)
        if self.one_of:
            made["oneOf"] = [{"required": [name]} for name in self.one_of]
        if self.at_most_one:
            made["not"] = {"required": list(self.at_most_one)}
        return described(made, self.about)

    def read(self, value: Any, at: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise invalid(at, "it must be an object")
        stem = f"{at}." if at else ""
        fields = self.fields
        if not value.keys() <= fields.keys():
            name = min(value.keys() - fields.keys())
            known = ", ".join(fields) or "none"
            raise invalid(f"{stem}{name[:100]!a}".replace("'", ""), f"unknown; there are: {known}")
        for name in self.needed:
            if name not in value:
                raise invalid(stem + name, "it is missing")
        if self.one_of and sum(name in value for name in self.one_of) != 1:
            raise Problem(
                "invalid-field",
                f"{at or 'the body'}: say exactly one of {', '.join(self.one_of)}",
                at or self.one_of[0],
            )
        if self.at_most_one and sum(name in value for name in self.at_most_one) > 1:
            said = f"say at most one of {', '.join(self.at_most_one)}"
            raise invalid(stem + self.at_most_one[1], said)
        return {name: fields[name].read(one, stem + name) for name, one in value.items()}


def paging(most: int, about: str = "How many at most.") -> dict[str, Any]:
    """The parameters of what answers with a :func:`page_of`, of so many at most."""
    return {
        "limit": Number(about, least=1, most=most, whole=True, default=100),
        "after": Text("The nextPageToken of the page before.", most=4000),
    }


# -- what a request is refused with: RFC 9457, ``application/problem+json``
#
# A problem names the field that is wrong, if it is one field, and the way out. No text here ever
# has a token, or a URL with a password.


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
SCHEMA: dict[str, Any] = record(
    "type title status detail",
    texts="title",
    wholes="status",
    type={**TEXT, "enum": [TYPES + kind for kind in KINDS]},
    detail=described(TEXT, "What is wrong, and the way out."),
    field=described(TEXT, "The field of the body, the parameter or the header that is wrong."),
    tasks=array(
        {"type": "object"},
        "Of a list of which some were put: what became of each, in order. What has an error was "
        "not put, or perhaps not.",
    ),
)


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


#: Errors whose text a caller is told, the kind of problem that each is, and the field that it is
#: about.
_MISTAKES: tuple[tuple[type[Exception], str, str], ...] = (
    (errors.RateLimitedError, "rate-limited", ""),
    (errors.AlreadyThereError, "conflict", "id"),
    (errors.UnknownTopicError, "not-found", ""),
    (errors.ActionTimeError, "invalid-field", "scheduleTime"),
    (errors.ReceiptError, "invalid-field", "receipts"),
    (errors.TraitError, "invalid-field", ""),
    (errors.ConfigurationError, "invalid-field", ""),
    (errors.ReplicationError, "broker", ""),
    (errors.PutManyError, "broker", ""),
)

#: The broker refuses what this server is: no retry mends that.
_REFUSALS = (
    exceptions.NoPermissionError,
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
)


def problem_of(exc: BaseException) -> Problem:
    """What a caller is told of an error. What is no fault of theirs is logged."""
    if isinstance(exc, Problem):
        return exc
    if isinstance(exc, errors.UniqueError):
        return Problem("conflict", str(exc), "unique", id=exc.id, hasStarted=exc.has_started)
    for mistake, kind, at in _MISTAKES:
        if isinstance(exc, mistake):
            again = retry_after(getattr(exc, "retry_after", 1))
            return Problem(kind, str(exc), at, again if kind in ("broker", "rate-limited") else ())
    if isinstance(exc, _REFUSALS):
        # Which rule is missing is for the operator, and is in the log.
        logger.error("the broker refuses this server: %s", exc)
        return Problem("broker", "the broker refuses this server; its log says why")
    if isinstance(
        exc, (errors.ServerError, exceptions.RedisError, OSError, errors.LibraryError)
    ) and not isinstance(exc, exceptions.ResponseError):
        logger.warning("the broker cannot be used: %s", exc)
        what = "task library" if isinstance(exc, errors.LibraryError) else "broker"
        detail = f"the {what} cannot be reached or refuses this for now; try again later"
        return Problem("broker", detail, headers=retry_after(1))
    if isinstance(exc, errors.TocError):
        return Problem("conflict", str(exc))
    logger.error("a request failed", exc_info=exc)
    return Problem("internal", "this is a fault of the server; its log says more")
