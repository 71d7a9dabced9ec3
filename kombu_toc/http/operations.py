"""Operations: what may be asked for, and what the OpenAPI document says of it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .fields import Object, Text
from .problems import KINDS, Problem, invalid
from .requests import Answer, Request

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
    run: Callable[[Any, Request], Awaitable[Answer]]
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
    kept: bool = True  #: whether an Idempotency-Key counts; of POST only
    #: whether it looks at several queues, and shows of each only what the token may see
    many_queues: bool = False
    reads: bool = False  #: whether it reads its body itself: who asks decides how much it may be
    is_shown: bool = True  #: whether the OpenAPI document has it
    #: makes an answer whole that was kept in part, for a request that is repeated
    again: Callable[[Any, Request, Answer], Awaitable[Answer]] | None = None
    act: str = ""  #: what the audit log calls it; empty: it is not there

    def run_by(self, run: Callable[[Any, Request], Awaitable[Answer]]) -> Operation:
        """The same, done by another function."""
        return replace(self, run=run)

    @property
    def shown_path(self) -> str:
        return "/" + "/".join(self.path) + (f":{self.verb}" if self.verb else "")

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(part[1:-1] for part in self.path if part.startswith("{"))

    @property
    def idempotent_by_key(self) -> bool:
        return self.kept and self.method == "POST"


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
    found = []
    for wanted, part in zip(operation.path, parts, strict=True):
        if wanted[:1] == "{":
            name = wanted[1:-1]
            found.append(PARAMETERS[name].read(part, name))
    return found


def read_query(operation: Operation, query: Mapping[str, str]) -> dict[str, Any]:
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


def check_no_body(request: Request) -> None:
    """Raises Problem for a body that says something where none is taken."""
    if request.body:
        _NOTHING.read(request.json(), "")


_NOTHING = Object({})


def check_encoding(request: Request) -> None:
    """Raises Problem for a compressed body: what it expands to has no bound."""
    if request.header(b"content-encoding").strip().lower() not in ("", "identity"):
        raise Problem(
            "unsupported-media-type",
            "send the body as it is, without a content-encoding such as gzip",
            "content-encoding",
        )


def read_body(operation: Operation, request: Request) -> dict[str, Any]:
    """The fields of a JSON body. Raises Problem."""
    fields = operation.request
    assert fields is not None
    if not request.body and not operation.required:
        return fields.read({}, "")
    check_encoding(request)
    if request.media_type != "application/json":
        raise Problem(
            "unsupported-media-type",
            "send the body as application/json: curl -H 'content-type: application/json'",
            "content-type",
        )
    return fields.read(request.json(), "")


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
