"""What is sent of a message: its bytes, and the headers of Standard Webhooks."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from ..errors import ConfigurationError, EnvelopeError
from ..model.delivery import origin_in
from ..model.limits import Url
from ..model.message import first_line, unpack
from ..model.results import Delivery
from .signing import normal, signature

#: The header that gives one message another target than its queue's.
TARGET = "x-target"

#: Bytes that a compressed message may expand to.
MAX_EXPANDED = 16 << 20

#: Bytes that are parsed to tell whether they are JSON: nothing else is done meanwhile.
MAX_PARSED = 1 << 20

#: Characters of an id that are sent; of a longer one a hash is.
MAX_ID = 200

#: What a message of Kombu's or of the HTTP API begins with, if it is one; and if it is compressed.
COMPRESSED = (b"\x01", b"\x02")
_ENVELOPES = (b'{"h":', *COMPRESSED)

#: The same as it is written among the headers, and bytes of these that are looked through for it.
_NAMED = b'"x-target"'
_HEADERS = 64 << 10

#: The headers of a message that are sent along: the context of a trace.
_TRACE = ("traceparent", "tracestate")

#: What a header may have.
_PLAIN = re.compile(r"[\x20-\x7e]{1,1000}")

_url = Url()


class Content(NamedTuple):
    """A message as it is sent."""

    body: bytes
    content_type: str
    headers: dict[str, str]  #: those that go along
    target: str | None  #: the URL that the message itself names


def content_of(delivery: Delivery) -> Content:
    """What is sent of a message. Raises ConfigurationError if it names a target that is none,
    EnvelopeError if it is too large."""
    raw = delivery.body
    if raw.startswith(_ENVELOPES):
        try:
            return _unpacked(unpack(raw, delivery.id, MAX_EXPANDED))
        except EnvelopeError as exc:
            if "expands to more" in str(exc):
                raise
            # Otherwise it only looks like one.
    return Content(raw, type_of(raw), {}, None)


def host_of(delivery: Delivery) -> str:
    """The host, and the port, of the target that a message names; empty if it names none."""
    raw = delivery.body
    if not raw.startswith(_ENVELOPES):
        return ""
    try:
        if _NAMED not in first_line(raw, delivery.id, _HEADERS):
            return ""
        target = unpack(raw, delivery.id, MAX_EXPANDED)["headers"].get(TARGET)
        return urlsplit(normal(target)).netloc if isinstance(target, str) else ""
    except (EnvelopeError, ValueError):
        return ""  # that it cannot be sent is said when it is


def _unpacked(message: dict[str, Any]) -> Content:
    said = message["headers"]
    kind = message["content-type"]
    if not isinstance(kind, str) or not _PLAIN.fullmatch(kind):
        kind = "application/octet-stream"
    encoding = message["content-encoding"]
    if kind.startswith("text/") and "charset" not in kind and encoding == "utf-8":
        kind += "; charset=utf-8"
    along = {
        name: said[name]
        for name in _TRACE
        if isinstance(said.get(name), str) and _PLAIN.fullmatch(said[name])
    }
    target = said.get(TARGET)
    if target is not None:
        try:
            target = _url.check(f"the header {TARGET}", target)
        except ConfigurationError as exc:
            # It may have what is secret, and is told wherever messages fail.
            raise ConfigurationError(str(exc).partition(", not ")[0]) from None
    return Content(message["body"], kind, along, target)


def type_of(body: bytes) -> str:
    """The content type of bytes of which nobody has said one."""
    if body[:1] in (b"{", b"["):
        if len(body) > MAX_PARSED:
            return "application/json" if body[-1:] in (b"}", b"]") else "application/octet-stream"
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            pass
        else:
            is_event = isinstance(found, dict) and "specversion" in found
            return "application/cloudevents+json" if is_event else "application/json"
    try:
        body.decode()
    except UnicodeDecodeError:
        return "application/octet-stream"
    return "text/plain; charset=utf-8"


def webhook_id(delivery: Delivery) -> str:
    """The header ``webhook-id``: the same for each attempt, and another one for each other message
    of the same id. It has no dot, which separates the parts of what is signed."""
    slot, birth = origin_in(delivery.birth, delivery.slot)
    told = _digest(f"{delivery.topic}\n{slot}\n{birth}")[:16]
    return f"{_encoded(delivery.id)}_{told}"


def headers_of(
    delivery: Delivery, content: Content, keys: Sequence[bytes], timestamp: int
) -> dict[str, str]:
    """The headers of one attempt.

    keys: those that sign it; without any, it is not signed
    timestamp: when it is made, in seconds since the epoch
    """
    id = webhook_id(delivery)
    made = {
        "content-type": content.content_type,
        "webhook-id": id,
        "webhook-timestamp": str(timestamp),
        "toc-queue": _encoded(delivery.topic),
        "toc-id": _encoded(delivery.id),
        "toc-failures": str(delivery.failures),
        **content.headers,
    }
    if keys:
        made["webhook-signature"] = signature(keys, id, timestamp, content.body)
    return made


def _encoded(name: str) -> str:
    made = quote(name, safe=":@+,", errors="surrogatepass").replace(".", "%2E")
    return made if len(made) <= MAX_ID else f"h-{_digest(name)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
