"""Messages as JSON: read from requests, and shown in answers."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote
from uuid import NAMESPACE_URL, uuid4, uuid5

from ..errors import EnvelopeError
from ..model import results
from ..model.message import MOST, Content, Unique, look, pack, read_content, unpack
from . import fields as schema
from .fields import Problem, invalid
from .request import Request, check_encoding, read_json

#: Headers that a Python process wrote may have dates, UUIDs, and numbers that JSON has not.
_encode = json.JSONEncoder(default=str).encode

#: A state as a center names it -> as it is in JSON.
STATES = {results.WAITING: "waiting", results.IN_FLIGHT: "inFlight", results.DEAD: "dead"}

#: The header with the context of a trace (W3C Trace Context).
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

#: What a message may be put with.
FIELDS: dict[str, Any] = {
    "id": schema.Text(
        "Its id; one is made unless given. Each put is a message of its own, also under an id that "
        "another one has; only a put with the same Idempotency-Key is the same.",
        most=500,
    ),
    "text": schema.Text("Its bytes, as text in UTF-8.", most=16_000_000, least=0),
    "json": schema.Anything("Its bytes, as JSON.", of=tuple(schema.ANYTHING["type"])),
    "body": schema.Base64("Its bytes, in base64."),
    "headers": schema.Headers("Headers that go with it: it is kept as an envelope then."),
    "contentType": schema.Text("The content type of its bytes: as headers.", most=200),
    "scheduleTime": schema.Time("When it is due; now unless given. A past time means now."),
    "delay": schema.Number(
        "Instead of scheduleTime: seconds from now by the broker's clock.", most=7e9
    ),
    "priority": schema.Number("0 goes first.", most=255, whole=True),
    "key": schema.Text("What it is about: its queue may limit what starts of each key.", most=1000),
    "visibility": schema.Number(
        "Seconds that a lease of it lasts unless it is extended.", least=1, most=31_536_000
    ),
    "maxLease": schema.Number(
        "Seconds for which one lease may be extended in all; 0: for ever.", most=31_536_000
    ),
    "expiration": schema.Number("Seconds after its due time when it expires.", most=1e9),
    "unique": schema.Text("The queue has one message of this unique key at a time.", most=1000),
    "uniqueUntil": schema.Text(
        "Until when this message holds the unique key; done unless given.",
        choices=("start", "done"),
    ),
    "uniqueSeconds": schema.Number(
        "Instead of uniqueUntil: for how long it holds the key.", least=0.001, most=31_536_000
    ),
    "ifExists": schema.Text(
        "What becomes of a message that has the unique key already; keep unless given.",
        choices=("keep", "replace", "pushBack", "refuse"),
    ),
}

#: The fields that say what the bytes are: one of them must be there.
BODIES = ("text", "json", "body")

#: Of a list, unique keys are left to single puts, as with `put_many`.
_UNIQUE = ("unique", "uniqueUntil", "uniqueSeconds", "ifExists")


def _task(name: str, about: str, *without: str) -> schema.Object:
    return schema.Object(
        {name: kind for name, kind in FIELDS.items() if name not in without},
        one_of=BODIES,
        at_most_one=("scheduleTime", "delay"),
        about=about,
        name=name,
    )


NEW_TASK = _task("NewTask", "A message.")
LISTED_TASK = _task("ListedTask", "A message of a list.", *_UNIQUE)

#: What takes the place of another: its id is in its path.
REPLACING_TASK = _task(
    "ReplacingTask", "A message that takes the place of another.", "id", *_UNIQUE
)


def bytes_of(task: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
    """The bytes of a message; an envelope if it has headers.

    headers: what goes along beside its own
    """
    if "text" in task:
        body, kind = task["text"].encode(), "text/plain"
    elif "json" in task:
        body, kind = json.dumps(task["json"], separators=(",", ":")).encode(), "application/json"
    else:
        body, kind = task["body"], "application/octet-stream"
    if not headers and "headers" not in task and "contentType" not in task:
        return bytes(body)
    message = {
        "headers": {**headers, **task.get("headers", {})},
        "properties": {},
        "content-type": task.get("contentType", kind),
        "content-encoding": "binary" if "body" in task else "utf-8",
        "body": body,
    }
    return pack(message, deflate=False)


def trace_of(request: Request) -> dict[str, str]:
    """The context of a trace that a request has, as headers."""
    found = {}
    if parent := request.header(b"traceparent"):
        found[TRACEPARENT] = parent[:200]
        if state := request.header(b"tracestate"):
            found[TRACESTATE] = state[:1000]
    return found


def id_of(task: Mapping[str, Any], request: Request, place: int = 0) -> str:
    """The id of a message. One that is made for a request with an Idempotency-Key is the same when
    that is repeated, also if nobody knows any more what was answered."""
    if "id" in task:
        given: str = task["id"]
        return given
    if key := request.header(b"idempotency-key"):
        return str(uuid5(NAMESPACE_URL, f"{request.token.name}\n{key}\n{place}"))
    return str(uuid4())


def token_of(request: Request) -> str | None:
    """What names the put of a request with an Idempotency-Key."""
    key = request.header(b"idempotency-key")
    return f"{request.token.name}\n{key}" if key else None


def arguments_of(task: Mapping[str, Any], request: Request, place: int = 0) -> dict[str, Any]:
    """A message as the arguments of :meth:`.put.Puts.put`."""
    made: dict[str, Any] = {
        "id": id_of(task, request, place),
        "body": bytes_of(task, trace_of(request)),
        **{argument: task[name] for name, argument in _ARGUMENTS.items() if name in task},
    }
    if (token := token_of(request)) is not None:
        made["token"] = token
    return made


#: Fields that a message is put with -> what they are called there.
_ARGUMENTS = {
    **{name: name for name in ("delay", "priority", "visibility", "expiration", "key")},
    **{"scheduleTime": "at", "maxLease": "max_lease"},
}

#: What ifExists is called elsewhere.
_CONFLICTS = {"keep": "keep", "replace": "replace", "pushBack": "push_back", "refuse": "raise"}


def unique_of(task: Mapping[str, Any]) -> Unique | None:
    """The unique key of a message. Raises Problem."""
    if "unique" not in task:
        for name in ("uniqueUntil", "uniqueSeconds", "ifExists"):
            if name in task:
                raise invalid(name, "it goes with unique, which is missing")
        return None
    if "uniqueUntil" in task and "uniqueSeconds" in task:
        raise invalid("uniqueSeconds", "say at most one of uniqueUntil and uniqueSeconds")
    until = task.get("uniqueUntil", task.get("uniqueSeconds"))
    return Unique(task["unique"], until, _CONFLICTS[task.get("ifExists", "keep")])


# -- answers


_NAME = schema.described(
    schema.TEXT, "queues/QUEUE/tasks/ID, each percent-encoded: its path below /v1."
)

#: What is shown of the bytes of a message.
CONTENT: dict[str, Any] = {
    "text": schema.described(schema.TEXT, "Its bytes, if they are UTF-8."),
    "body": schema.described(
        {**schema.TEXT, "contentEncoding": "base64"}, "Its bytes, if they are not."
    ),
    "headers": {"type": "object", "description": "Of an envelope: its headers."},
    "contentType": schema.or_null(schema.TEXT, "Of an envelope."),
}

TASK = schema.record(
    "name id queue state",
    name=_NAME,
    texts="id queue key unique",
    wholes="retriesLeft",
    state={**schema.TEXT, "enum": list(STATES.values())},
    scheduleTime=schema.described(schema.TIME, "When it is due, if it waits."),
    leaseExpireTime=schema.described(schema.TIME, "When its lease ends, if it is in flight."),
    deadTime=schema.described(schema.TIME, "When it died."),
    expireTime=schema.described(schema.TIME, "When it expires."),
    visibility=schema.NUMBER,
    maxLease=schema.NUMBER,
    reason=schema.described(schema.TEXT, "Why it is dead."),
    error=schema.described(schema.TEXT, "The last error of a consumer."),
    **CONTENT,
)

LEASED_TASK = schema.record(
    "id receipt failures",
    texts="id key",
    receipt=schema.described(schema.TEXT, "Names this delivery."),
    scheduleTime=schema.described(schema.TIME, "When it was due, unless it came back."),
    failures=schema.described(schema.WHOLE, "How often it came back before."),
    startTime=schema.described(schema.TIME, "When it may start, if its rate says later."),
    **CONTENT,
)

PUT_TASK = schema.record(
    "name id queue",
    name=_NAME,
    id=schema.described(schema.TEXT, "The id that it is kept under."),
    texts="queue",
    outcome={
        **schema.TEXT,
        "enum": [results.ADDED, results.KEPT, results.REPLACED, results.REPEATED],
        "description": "What was done; repeated: this put had been done before.",
    },
)


def _name(queue: str, id: str) -> str:
    """The path of a message below ``/v1``: no other message has it, whatever is in the names."""
    return f"queues/{quote(queue, safe='')}/tasks/{quote(id, safe='')}"


def shown_put(queue: str, id: str, **more: str) -> dict[str, Any]:
    return {"name": _name(queue, id), "id": id, "queue": queue, **more}


#: Bytes that the compressed messages of one answer may expand to: those that are shown, and those
#: that are leased, whose receiver has to do what they say.
EXPANDED = 16 << 20
LEASED = 64 << 20


#: Bytes that the bodies of a page have, from which on it ends; messages that are read at a time.
PAGE_BYTES = 8 << 20
_STEP = 50


class DecompressionBudget:
    """What the compressed messages of one answer may still expand to.

    left: bytes
    """

    def __init__(self, left: int = EXPANDED) -> None:
        self.left = left

    def unpack(self, raw: bytes, id: str) -> dict[str, Any] | None:
        """The parts of an envelope; None for what is none, and for what cannot be shown."""
        deflated = raw[:1] in (b"\x01", b"\x02")
        if not deflated and raw[:5] != b'{"h":':
            return None
        try:
            message = unpack(raw, id, self.left)
            # Deeper than here, as a part of the answer, it shall not fail.
            _encode([[[[[[[[message["headers"], message["content-type"]]]]]]]]])
        except (EnvelopeError, RecursionError):
            return None  # it only looks like one
        if deflated:
            self.left -= len(message["body"])
        return message

    def look(self, raw: bytes, id: str) -> tuple[dict[str, Any] | None, str]:
        """The parts of an envelope as people look at them, None for what is none, and why its body
        is missing."""
        if not raw.startswith((b"\x01", b"\x02", b'{"h":')):
            return None, ""
        try:
            message, problem = look(raw, id, min(MOST, self.left))
        except EnvelopeError:
            return None, ""  # it only looks like one
        if raw[:1] != b"{":
            self.left -= len(message["body"])
        return message, problem

    def read_content(self, message: dict[str, Any]) -> Content:
        """The decoded body of a message."""
        compressed = "compression" in message["headers"]
        content = read_content(message, min(MOST, self.left) if compressed else MOST)
        self.left = max(0, self.left - content.size)
        return content


async def read_page(
    center: Any,
    queue: str,
    *,
    limit: int,
    after: str | None = None,
    size: int = PAGE_BYTES,
    step: int = _STEP,
    **how: Any,
) -> results.Page:
    """A page of messages, bounded in number and in bytes. Raises Problem for an `after` that no
    page has.

    size: bytes that the bodies of a page have, from which on it ends
    step: messages that are read at a time
    """
    found: list[results.Found] = []
    while True:
        some = min(step, limit - len(found))
        with schema.going_on():
            page = await center.scan(queue, limit=some, after=after, size=size, **how)
        found += page.messages
        size -= sum(len(one.body) for one in page.messages)
        after = page.after
        if after is None or len(found) >= limit or size <= 0:
            return results.Page(found, after)


def content_of(raw: bytes, id: str, budget: DecompressionBudget) -> dict[str, Any]:
    """The bytes of a message, as they are shown."""
    shown: dict[str, Any] = {}
    message = budget.unpack(raw, id)
    if message is not None:
        raw, kind = message["body"], message["content-type"]
        shown["headers"] = message["headers"]
        shown["contentType"] = kind if kind is None else str(kind)
    try:
        shown["text"] = raw.decode()
    except UnicodeDecodeError:
        shown["body"] = b64encode(raw).decode()
    return shown


#: What the time of a message of each state is called; and what it has as attributes.
_TIMES = {
    results.WAITING: "scheduleTime",
    results.IN_FLIGHT: "leaseExpireTime",
    results.DEAD: "deadTime",
}
_OF_FOUND = ("retriesLeft", "key", "unique", "visibility", "maxLease", "reason", "error")


def shown_found(
    found: results.Found, *, with_body: bool = True, budget: DecompressionBudget | None = None
) -> dict[str, Any]:
    """A message as it was found."""
    shown: dict[str, Any] = {
        "name": _name(found.topic, found.id),
        "id": found.id,
        "queue": found.topic,
        "state": STATES[found.state],
    }
    more = {
        _TIMES[found.state]: schema.shown_time(found.time_us),
        "expireTime": schema.shown_time(found.expires_us or 0),
        **schema.members(found, _OF_FOUND),
    }
    shown.update((name, value) for name, value in more.items() if value not in (None, ""))
    if with_body:
        shown.update(content_of(found.body, found.id, budget or DecompressionBudget()))
    return shown


def shown_masked(found: results.Found, masked: Any, *, with_body: bool = True) -> dict[str, Any]:
    """A message as it was found, for who may not see all of it.

    masked: what may be seen: a :class:`.page.presentation.Shown`
    """
    shown = shown_found(found, with_body=False)
    for name in ("key", "unique", "reason", "error"):
        if name in shown:
            shown[name] = getattr(masked, name)
    if with_body:
        if masked.headers or masked.content_type is not None:
            shown["headers"], shown["contentType"] = masked.headers, masked.content_type
        shown["text"] = masked.body
    return shown


def shown_delivery(one: results.Delivery, budget: DecompressionBudget) -> dict[str, Any]:
    """A message as it was leased."""
    shown: dict[str, Any] = {"id": one.id, "receipt": one.receipt, "failures": one.failures}
    times = {"scheduleTime": one.action_us, "startTime": one.start_us}
    shown.update((name, schema.shown_time(us)) for name, us in times.items() if us)
    if (key := one.key) is not None:
        shown["key"] = key
    return {**shown, **content_of(one.body, one.id, budget)}


# -- CloudEvents 1.0 as messages: binary (headers ``ce-...``) and structured JSON
#
# Whichever form comes, what is kept is the event as structured JSON. Its extension attributes
# ``scheduletime`` and ``delayseconds`` say when it is due.


STRUCTURED = "application/cloudevents+json"

_ATTRIBUTE = re.compile(r"[a-z0-9]{1,40}")
_NEEDED = ("id", "source", "type")
_TEXT = schema.Text(most=500)
_TIME = schema.Time()
_DELAY = schema.Number(most=7e9)

MEDIA: Mapping[str, Mapping[str, Any]] = {
    STRUCTURED: {
        "type": "object",
        "required": ["specversion", *_NEEDED],
        "properties": {
            "specversion": {"const": "1.0"},
            **{name: _TEXT.schema() for name in _NEEDED},
            "scheduletime": _TIME.schema(),
            "delayseconds": _DELAY.schema(),
        },
        "additionalProperties": True,
    }
}


def is_event(request: Request) -> bool:
    """Whether a request has an event."""
    return b"ce-specversion" in request.headers or request.media_type.startswith(
        "application/cloudevents"
    )


def arguments_of_event(request: Request) -> dict[str, Any]:
    """An event as the arguments of :meth:`.put.Puts.put`. Raises Problem."""
    kind = request.media_type
    check_encoding(request)
    if kind.startswith("application/cloudevents") and kind != STRUCTURED:
        raise Problem(
            "unsupported-media-type",
            f"of structured events {STRUCTURED} is read; put the events of a batch one by one",
            "content-type",
        )
    if kind == STRUCTURED:
        event = request.json()
        if not isinstance(event, dict):
            raise invalid("", "an event is a JSON object")
        stem = ""
    else:
        event, stem = _binary(request), "ce-"
    if event.get("specversion") != "1.0":
        raise invalid(f"{stem}specversion", "it must be 1.0")
    for name in _NEEDED:
        if name not in event:
            raise invalid(stem + name, "it is missing")
        _TEXT.read(event[name], stem + name)
    for name in event:
        if name not in ("data", "data_base64") and not _ATTRIBUTE.fullmatch(name):
            raise invalid(
                stem + ascii(name)[1:-1][:40],
                "names of attributes are lower-case letters and digits",
            )
    made: dict[str, Any] = {"id": event["id"]}
    if "scheduletime" in event and "delayseconds" in event:
        raise invalid(f"{stem}delayseconds", "say at most one of scheduletime and delayseconds")
    if "scheduletime" in event:
        made["at"] = _TIME.read(event["scheduletime"], f"{stem}scheduletime")
    if "delayseconds" in event:
        said, at = event["delayseconds"], f"{stem}delayseconds"
        # In headers everything is text.
        made["delay"] = _DELAY.read_text(said, at) if stem else _DELAY.read(said, at)
    # The extension for distributed tracing: what the event says goes before the request.
    event = {**trace_of(request), **event}
    made["body"] = json.dumps(event, separators=(",", ":")).encode()
    return made if (token := token_of(request)) is None else {**made, "token": token}


def _binary(request: Request) -> dict[str, Any]:
    event: dict[str, Any] = {}
    for name, said in request.headers.items():
        if name.startswith(b"ce-"):
            try:
                event[name[3:].decode("ascii")] = unquote(said.decode(), errors="strict")
            except UnicodeDecodeError:
                raise invalid(ascii(name)[2:-1], "it is not UTF-8, percent-encoded") from None
    if request.body:
        kind = request.header(b"content-type")
        if kind:
            event["datacontenttype"] = kind
        if request.media_type == "application/json" or request.media_type.endswith("+json"):
            event["data"] = read_json(request.body)
        else:
            try:
                event["data"] = request.body.decode()
            except UnicodeDecodeError:
                event["data_base64"] = b64encode(request.body).decode()
    return event
