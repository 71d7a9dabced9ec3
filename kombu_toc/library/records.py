"""What the library knows of a message: as it is written, and as it is read. Asks nobody."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from ..center.requests import PutRequest
from ..errors import EnvelopeError, LibraryError
from ..model import envelope
from ..model.limits import Limits
from ..model.results import WAITING, Found
from ..model.traits import as_put, trait
from ..scripts.call import Countdown
from . import statuses

#: Headers with the business id and type of a task.
BIZ_ID, BIZ_TYPE = "x-biz-id", "x-biz-type"

#: Headers that history is told where a message has no row.
TOLD_HEADERS = ("task", BIZ_TYPE, BIZ_ID)

#: What is told of a message that has not ended, or is not known.
NOTHING: tuple[Mapping[str, Any], int] = ({}, 0)

#: Characters that the library keeps of what a sender names.
_LENGTHS = {"id": 255, "topic": 255, "basis": 255, BIZ_ID: 255, BIZ_TYPE: 64, "task": 255}

#: id, token and topic: what tells one message from every other.
Key = tuple[str, str, str]


class Row(NamedTuple):
    """A message as its row is written: the columns of the table of what is pending."""

    id: str
    token: str
    topic: str
    status: int
    action_us: int
    task: str | None
    biz_type: str | None
    biz_id: str | None
    attempts: int
    worker: str | None
    error: str | None
    created_us: int
    modified_us: int
    place: int
    priority: int
    basis: str | None
    traits: str
    body: bytes

    @property
    def key(self) -> Key:
        return self.id, self.token, self.topic


class Event(NamedTuple):
    """What has happened to a message.

    status: the number of its status from now on
    at_us: when
    worker: which process says so; empty if it is none that has consumed it
    message: its headers and its action time, if it has no row
    has_row: whether it is likely to have one: it is first looked for, if so
    """

    key: Key
    status: int
    at_us: int
    attempts: int
    worker: str
    error: str
    message: tuple[Mapping[str, Any], int]
    has_row: bool = True

    @property
    def has_ended(self) -> bool:
        return self.status not in statuses.LIVE

    @property
    def known(self) -> dict[str, Any]:
        """The columns of its row as far as the message says them."""
        headers, action_us = self.message
        task, kind, biz = texts_of(headers)
        return {
            "action_us": action_us,
            "task": task,
            "biz_type": kind,
            "biz_id": biz,
            "attempts": 0,
            "worker": None,
            "error": None,
            "created_us": self.at_us,
        }


def identity_of(topic: str, id: str, body: bytes) -> tuple[Key, Mapping[str, Any]]:
    """The key of the row of a message that is kept under this id, and its headers. Bytes that are
    no envelope are put by a center, and told apart by their CRC-32."""
    try:
        content = envelope.unpack(body, id)
    except EnvelopeError:
        token = f"{zlib.crc32(body):08x}"
        return (id.removesuffix(f"#{token}"), token, topic), {}
    headers, token = content["headers"], content["properties"].get("k")
    named = headers.get("id")
    return (named if isinstance(named, str) and named else id, str(token or ""), topic), headers


def is_raw(row: Row) -> bool:
    """Whether a center has put it: then the same bytes may be put again under the same id, and are
    another message."""
    return is_raw_key(row.key, row.body)


def is_raw_key(key: Key, body: bytes) -> bool:
    """As :func:`is_raw`, of the key of a row and the message."""
    return key[1] == f"{zlib.crc32(body):08x}"


def now_us() -> int:
    """This machine's clock, in microseconds since the epoch."""
    return time.time_ns() // 1000


def row_of(
    topic: str,
    request: PutRequest,
    headers: Mapping[str, Any],
    place: int = statuses.IN_REDIS,
    server_us: int | None = None,
) -> Row:
    """The row of a message that is about to be put. Raises LibraryError if it has what no row can
    have.

    server_us: from when its time counts, if it does not say its time itself and this is known
    """
    now = now_us()
    id = request.id
    business = _business(id, headers)
    task = headers.get("task")
    _check(id, "id", id)
    _check(id, "topic", topic)
    if request.basis is not None:
        _check(id, "basis", request.basis)
    return Row(
        id=id,
        token=request.token or "",
        topic=topic,
        status=statuses.PENDING,
        action_us=_action_us(request, now if server_us is None else server_us),
        task=task[: _LENGTHS["task"]] if isinstance(task, str) else None,
        biz_type=business[0],
        biz_id=business[1],
        attempts=0,
        worker=None,
        error=None,
        created_us=now,
        modified_us=now,
        place=place,
        priority=request.priority,
        basis=request.basis,
        traits=request.traits,
        body=request.body,
    )


def request_of(row: Row) -> PutRequest:
    """What puts the message of a row back into Redis: just as it was put, and not twice."""
    return PutRequest(
        *(row.id, row.body, row.action_us),
        basis=row.basis,
        priority=row.priority,
        token=row.token or None,
        replaces=True,
        traits=row.traits,
        counted=False,
    )


def expires_us(row: Row, ttl_ms: int | None = None) -> int | None:
    """When a message has expired, if it ever does.

    ttl_ms: milliseconds after its due time when a message of its queue has
    """
    ms = trait(row.traits, "e")
    if ttl_ms is not None and (ms is None or ttl_ms < ms):
        ms = ttl_ms
    return None if ms is None else row.action_us + ms * 1000


def as_of(row: Row, ttl_ms: int | None, now: int) -> Row | None:
    """A row as its message is put now; None if it has expired. What is overdue is due when it is
    put, and Redis counts from then: so it has only what is left of its time.

    ttl_ms: as in :func:`expires_us`; now: microseconds since the epoch
    """
    expires = expires_us(row, ttl_ms)
    if expires is None or row.action_us >= now:
        return row
    if expires <= now:
        return None
    said = f"{row.traits},x" if row.traits else ";x"
    return row._replace(traits=as_put(f"{said}{expires // 1000}", now // 1000))


def lease_us(row: Row, limits: Limits) -> int:
    """For how long a worker that has taken a message may be about to finish it: it says so again
    well before."""
    ms = trait(row.traits, "v")
    return int(max(limits.visibility, 0 if ms is None else ms / 1000) * 1_000_000)


def row_of_message(found: Found, key: Key, content: Mapping[str, Any] | None = None) -> Row:
    """The row of a message that was put without one.

    content: the message, if it is unpacked
    """
    if content is None:
        content = {"headers": {}, "properties": {}}
        with suppress(EnvelopeError):  # a center's bytes say nothing of themselves
            content = envelope.unpack(found.body, found.id)
    headers, properties = content["headers"], content["properties"]
    basis = headers.get("x-slot-basis") or found.key
    action_us = (found.time_us if found.state == WAITING else 0) or now_us()
    request = PutRequest(
        *(key[0], found.body, action_us),
        basis=None if basis is None else str(basis),
        priority=int(properties.get("priority") or 0),
        token=key[1],
        traits=as_put(found.own_token, action_us // 1000),
    )
    return row_of(found.topic, request, headers)


def told_of(headers: Mapping[str, Any], action_us: int) -> tuple[Mapping[str, Any], int]:
    """What an event tells of its message. Not the whole: what lives until it is written has the
    interpreter look for garbage, which cost a task more than to note what becomes of it."""
    return {name: headers[name] for name in TOLD_HEADERS if name in headers}, action_us


def storable(text: str) -> str:
    """A text as every database keeps it."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def is_storable(key: Key) -> bool:
    """Whether a row may have this key."""
    id, token, topic = key
    if len(id) > 255 or len(token) > 16 or len(topic) > 255:
        return False
    # What can be printed can be kept.
    if id.isprintable() and token.isprintable() and topic.isprintable():
        return True
    return all(storable(one) == one for one in key)


def key_of(topic: str, id: str, body: bytes) -> Key:
    """The key of the row of a message that is kept under this id."""
    return identity_of(topic, id, body)[0]


def biz_of(headers: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Business type and business id of a message, as they are kept."""
    kind, id = headers.get(BIZ_TYPE), headers.get(BIZ_ID)
    return None if kind is None else str(kind), None if id is None else str(id)


def texts_of(headers: Mapping[str, Any]) -> tuple[str | None, str | None, str | None]:
    """Task, business type and business id of a message, as every database takes them."""
    kind, biz = (one and storable(one) for one in biz_of(headers))
    task = headers.get("task")
    return (
        storable(task)[: _LENGTHS["task"]] if isinstance(task, str) else None,
        kind and kind[: _LENGTHS[BIZ_TYPE]],
        biz and biz[: _LENGTHS[BIZ_ID]],
    )


def _business(id: str, headers: Mapping[str, Any]) -> tuple[str | None, str | None]:
    kind, biz = biz_of(headers)
    for name, value in ((BIZ_TYPE, kind), (BIZ_ID, biz)):
        if value is not None:
            _check(id, name, value)
    return kind, biz


def _check(id: str, name: str, value: str) -> None:
    if len(value) > _LENGTHS[name]:
        raise LibraryError(
            f"message {id:.80}: its {name} has {len(value)} characters, and the library keeps "
            f"{_LENGTHS[name]}; nothing was sent"
        )
    # PostgreSQL keeps no NUL, and none keeps half a character.
    if "\0" in value or not (value.isprintable() or _is_text(value)):
        raise LibraryError(
            f"message {id!r:.80}: its {name} has characters that a database cannot keep; nothing "
            "was sent"
        )


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _action_us(request: PutRequest, now: int) -> int:
    at = request.at_us
    if isinstance(at, Countdown):
        if at.at_us is not None:
            return at.at_us
        return now + int((at.ends - time.monotonic()) * 1_000_000)
    if at is not None:
        return int(at)
    return now + (request.delay_us or 0)
