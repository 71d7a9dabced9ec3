"""CloudEvents 1.0 as messages: binary (headers ``ce-...``) and structured JSON.

Whichever form comes, what is kept is the event as structured JSON. Its extension attributes
``scheduletime`` and ``delayseconds`` say when it is due.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from .fields import Number, Text, Time
from .messages import token_of, trace_of
from .problems import Problem, invalid
from .request import Request, check_encoding, read_json

STRUCTURED = "application/cloudevents+json"

_NAME = re.compile(r"[a-z0-9]{1,40}")
_NEEDED = ("id", "source", "type")
_TEXT = Text(most=500)
_TIME = Time()
_DELAY = Number(most=7e9)

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


def arguments_of(request: Request) -> dict[str, Any]:
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
        if name not in ("data", "data_base64") and not _NAME.fullmatch(name):
            raise invalid(
                stem + ascii(name)[1:-1][:40],
                "names of attributes are lower-case letters and digits",
            )
    made = _arguments(event, stem, trace_of(request))
    return made if (token := token_of(request)) is None else {**made, "token": token}


def _arguments(event: dict[str, Any], stem: str, trace: Mapping[str, str]) -> dict[str, Any]:
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
    made["body"] = json.dumps({**trace, **event}, separators=(",", ":")).encode()
    return made


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
