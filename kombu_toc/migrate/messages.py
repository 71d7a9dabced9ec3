"""A message as Kombu's own Redis transport keeps it, and as our channel takes it. Pure."""

from __future__ import annotations

import base64
import hashlib
from datetime import datetime, timedelta, timezone
from typing import Any

from kombu.utils.json import loads
from kombu.utils.uuid import uuid

from ..errors import EnvelopeError
from ..model import message as envelope
from ..model.results import IN_FLIGHT, WAITING, Found
from ..transport.action_time import eta_us

#: Microseconds by which an ``eta`` may differ from the action time without being set to it: a
#: countdown is counted by Redis's clock, and the ``eta`` by the sender's.
NEAR = 1_000_000

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Unreadable(Exception):
    """Says why a message stays."""


def parse(raw: bytes) -> Any:
    """What JSON says. Raises Unreadable."""
    try:
        return loads(raw.decode())
    except Exception as exc:  # also whatever a decoder that was registered with Kombu raises
        raise Unreadable(f"it is not valid JSON: {exc}") from exc


def from_kombu(payload: Any) -> dict[str, Any]:
    """A message as our channel takes it. Raises Unreadable."""
    try:
        properties = dict(payload["properties"])
        headers = dict(payload.get("headers") or {})
        properties["delivery_info"] = dict(properties.get("delivery_info") or {})
        body = payload["body"]
        encoding = properties.pop("body_encoding", None)
        if encoding == "base64":
            body = base64.b64decode(body)
        elif encoding not in (None, "", "utf-8") or not isinstance(body, (str, type(None))):
            raise ValueError(f"its body is encoded as {encoding!r}")
        return {
            "headers": headers,
            "properties": properties,
            "content-type": payload.get("content-type"),
            "content-encoding": payload.get("content-encoding"),
            "body": body,
        }
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise Unreadable(f"it is not a message of Kombu's: {type(exc).__name__}: {exc}") from exc


def delivered(raw: bytes) -> tuple[dict[str, Any], str, str]:
    """A message that a worker had not acknowledged, and the exchange and the routing key that it
    was sent with. Raises Unreadable."""
    parsed = parse(raw)
    if not isinstance(parsed, list) or len(parsed) != 3:
        raise Unreadable("it is not a delivered message of Kombu's")
    payload, exchange, routing_key = parsed
    message = from_kombu(payload)
    # As Kombu does with what it restores: it may have been started.
    message["headers"]["redelivered"] = True
    message["properties"]["delivery_info"]["redelivered"] = True
    return message, str(exchange or ""), str(routing_key or "")


def tag_of(message: dict[str, Any], raw: bytes) -> str:
    """What tells a message from every other of its broker."""
    tag = message["properties"].get("delivery_tag")
    return tag if isinstance(tag, str) and tag else hashlib.sha1(raw).hexdigest()


def eta_or_none(message: dict[str, Any]) -> int | None:
    """Microseconds since the epoch of its ``eta``; None without one that can be read."""
    try:
        return eta_us(message["headers"].get("eta"))
    except (ValueError, TypeError, OverflowError):
        return None


def to_kombu(found: Found, now_us: int) -> dict[str, Any]:
    """The message as Kombu's transport keeps it. Raises Unreadable if it has to stay.

    now_us: Redis's clock, in microseconds since the epoch
    """
    try:
        message = envelope.unpack(found.body, found.id)
    except EnvelopeError as exc:
        raise Unreadable(f"it is not a message of Kombu's: {exc}") from exc
    headers, properties = message["headers"], message["properties"]
    is_task = "task" in headers
    at_us = found.time_us if found.state == WAITING else 0
    if at_us > now_us and not is_task:
        raise Unreadable(
            "it is not due yet, and Kombu's transport delivers at once: only Celery's workers "
            "wait, with a task"
        )
    if is_task:
        _keep_time(message, at_us, now_us)
    properties.pop("k", None)
    properties["body_encoding"] = "base64"
    properties["delivery_tag"] = uuid()
    properties.setdefault("priority", 0)
    info = properties.setdefault("delivery_info", {})
    info.setdefault("exchange", "")
    info.setdefault("routing_key", found.topic)
    if found.state == IN_FLIGHT or found.retries_left is not None:
        # As Kombu does with what it restores: it may have been started.
        headers["redelivered"] = info["redelivered"] = True
    return {
        "body": base64.b64encode(message["body"]).decode(),
        "content-encoding": message["content-encoding"],
        "content-type": message["content-type"],
        "headers": headers,
        "properties": properties,
    }


def _keep_time(message: dict[str, Any], at_us: int, now_us: int) -> None:
    """Let the ``eta`` be when the task is due, if it says otherwise."""
    said = eta_or_none(message) or 0
    if abs(max(said, now_us) - max(at_us, now_us)) > NEAR:
        due = _EPOCH + timedelta(microseconds=at_us)
        message["headers"]["eta"] = due.isoformat() if at_us > now_us else None
