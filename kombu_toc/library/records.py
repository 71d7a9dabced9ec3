"""What the library knows of a message: as it is written, and as it is read. Asks nobody."""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from secrets import token_hex
from typing import Any, NamedTuple

from ..center.calls import PutRequest, suffix_of
from ..errors import EnvelopeError, LibraryError
from ..model import message as envelope
from ..model.delivery import BIZ_ID, as_put, key_in, name_in, token_with, trait
from ..model.limits import Limits
from ..model.results import WAITING, Cancelled, Delivery, Found
from ..scripts.call import Countdown
from . import statuses

#: Headers with the business type of a task, and with attributes of the user's own.
BIZ_TYPE, ATTRIBUTES = "x-biz-type", "x-attributes"

#: Headers that history is told where a message has no row.
TOLD_HEADERS = ("task", BIZ_TYPE, BIZ_ID, ATTRIBUTES)

#: Characters of all attributes of a message, as JSON; and the name of one.
MAX_ATTRIBUTES = 4000
_ATTRIBUTE = re.compile(r"[\w.-]{1,64}")

#: Bytes of a failed message that are kept, so that it can be sent again.
MAX_KEPT = 65_536

#: What is told of a message that has not ended, or is not known.
NOTHING: tuple[Mapping[str, Any], int] = ({}, 0)

#: Characters that the library keeps of what a sender names.
_LENGTHS = {"id": 255, "topic": 255, "basis": 255, BIZ_ID: 255, BIZ_TYPE: 64, "task": 255}

#: A copy of an id, as it is kept: the id, and the suffix that tells it from others.
_COPY = re.compile(r"(.*)#([0-9a-f]{8,16})(?:-[^#]*)?", re.DOTALL)

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
    attributes: str | None = None  #: as JSON

    @property
    def key(self) -> Key:
        return self.id, self.token, self.topic


class Kept(NamedTuple):
    """What history keeps of a message that has failed: it can be sent again."""

    priority: int
    basis: str | None
    traits: str
    body: bytes


class Event(NamedTuple):
    """What has happened to a message.

    status: the number of its status from now on
    at_us: when
    worker: which process says so; empty if it is none that has consumed it
    message: its headers and its action time, if it has no row
    has_row: whether it is likely to have one: it is first looked for, if so
    kept: of what has failed
    """

    key: Key
    status: int
    at_us: int
    attempts: int
    worker: str
    error: str
    message: tuple[Mapping[str, Any], int]
    has_row: bool = True
    kept: Kept | None = None

    @property
    def has_ended(self) -> bool:
        return self.status not in statuses.LIVE


def event_of(key: Key, status: int, error: str = "") -> Event:
    """That a message has a status from now on; nothing else is known of it."""
    return Event(key, status, now_us(), 0, "", error, NOTHING)


def content_of(body: bytes, id: str) -> dict[str, Any] | None:
    """The message that is kept under this id, unpacked; None if it is a center's bytes, which say
    nothing of themselves."""
    try:
        return envelope.unpack(body, id)
    except EnvelopeError:
        return None


def identity_of(topic: str, id: str, body: bytes, token: str = "") -> tuple[Key, Mapping[str, Any]]:
    """The key of the row of a message that is kept under this id, and its headers.

    token: what its slot's ``tokens`` have of it, or its traits. A message that says no name of its
        own has one there, if it was put by who records; otherwise only the id of a copy, and the
        CRC-32 of its bytes, tell it from others
    """
    content = content_of(body, id)
    headers = {} if content is None else content["headers"]
    known = headers.get("id")
    own = known if isinstance(known, str) and known else None
    if content is not None and (name := content["properties"].get("k")):
        return (own or id, str(name), topic), headers
    stem, suffix = stem_of(id)
    if name := name_in(token):
        return (own or stem, name, topic), headers
    if content is not None:
        return (own or id, "", topic), headers
    return (stem, suffix or f"{zlib.crc32(body):08x}", topic), headers


def is_of(row: Row, body: bytes | None, token: bytes | None) -> bool:
    """Whether what is kept under the id of a row, or under another one, is its message.

    body, token: what its slot has of it
    """
    name = name_in(row.traits)
    return body == row.body and (name is None or name == name_in((token or b"").decode()))


def stem_of(id: str) -> tuple[str, str]:
    """The id of a message that is kept under this one, and its suffix, or nothing."""
    found = _COPY.fullmatch(id)
    return (found[1], found[2]) if found else (id, "")


def ids_of(id: str) -> set[str]:
    """The ids that the row of a message may have that is kept under this one: an id may look like
    that of a copy, and be its own."""
    return {id, stem_of(id)[0]}


def named(request: PutRequest) -> PutRequest:
    """A message that a center is about to put, with a name that its row is known by."""
    content = content_of(request.body, request.id)
    if content is not None and content["properties"].get("k"):
        return request
    headers = {} if content is None else content["headers"]
    name = request.token or suffix_of(request.publish[1] if request.publish else token_hex(8))
    name = token_with(name, headers)
    said = f"{request.traits},n{name}" if request.traits else f";n{name}"
    return request._replace(token=name, traits=said)


def is_raw(key: Key, body: bytes) -> bool:
    """Whether a center has put the message of the row with this key: then the same bytes may be put
    again under the same id, and are another message."""
    return key[1] == f"{zlib.crc32(body):08x}"


def now_us() -> int:
    """This machine's clock, in microseconds since the epoch."""
    return time.time_ns() // 1000


def row_of(
    topic: str,
    request: PutRequest,
    headers: Mapping[str, Any],
    server_us: int | None = None,
) -> Row:
    """The row of a message that is about to be put. Raises LibraryError if it has what no row can
    have.

    server_us: from when its time counts, if it does not say its time itself and this is known
    """
    now = now_us()
    id = request.id
    (kind, biz), task = biz_of(headers), headers.get("task")
    of_business = ((BIZ_TYPE, kind), (BIZ_ID, biz))
    for name, value in (("id", id), ("topic", topic), ("basis", request.basis), *of_business):
        if value is not None:
            _check(id, name, value)
    return Row(
        id=id,
        token=request.token or "",
        topic=topic,
        status=statuses.PENDING,
        action_us=_action_us(request, now if server_us is None else server_us),
        task=task[: _LENGTHS["task"]] if isinstance(task, str) else None,
        biz_type=kind,
        biz_id=biz,
        attributes=_attributes(id, headers),
        attempts=0,
        worker=None,
        error=None,
        created_us=now,
        modified_us=now,
        place=statuses.IN_REDIS,
        priority=request.priority,
        basis=request.basis,
        traits=request.traits,
        body=request.body,
    )


def request_of(row: Row, *, counted: bool = False) -> PutRequest:
    """What puts the message of a row back into Redis: just as it was put, and not twice.

    counted: whether it counts among what may be put
    """
    return PutRequest(
        *(row.id, row.body, row.action_us),
        basis=row.basis,
        priority=row.priority,
        token=row.token or None,
        replaces=True,
        traits=row.traits,
        counted=counted,
        has_name=True,
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


def dead_row(row: Row, at_us: int = 0, attempts: int = 0, error: str | None = None) -> Row:
    """The row of what is dead from now on: it stays, for a rebuild.

    at_us: since when; 0: since just now
    """
    return row._replace(
        status=statuses.DEAD,
        place=statuses.IN_DEAD_QUEUE,
        modified_us=at_us or now_us(),
        attempts=attempts,
        error=error,
    )


def has_worker(row: Row, limits: Limits, now: int) -> bool:
    """Whether a worker that has taken a message may be about to finish it: it says so again well
    before its lease ends."""
    ms = trait(row.traits, "v")
    lease = max(limits.visibility, 0 if ms is None else ms / 1000)
    return row.status == statuses.TAKEN and now <= row.modified_us + int(lease * 1_000_000)


def row_of_message(found: Found, key: Key, content: Mapping[str, Any] | None = None) -> Row:
    """The row of a message that was put without one.

    content: the message, if it is unpacked
    """
    content = content or content_of(found.body, found.id) or {"headers": {}, "properties": {}}
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


def kept_of(delivery: Delivery) -> Kept | None:
    """What is kept of a message that has failed; None if it is too large, or a center's bytes."""
    body = delivery.body
    content = content_of(body, delivery.id) if len(body) <= MAX_KEPT else None
    if content is None:
        return None
    headers, properties = content["headers"], content["properties"]
    basis = headers.get("x-slot-basis") or key_in(delivery.birth)
    if headers.get("id") != delivery.id:  # a copy: it is read with the id of its task
        body = envelope.pack(content, deflate=True, id=str(headers.get("id")))
    return Kept(
        int(properties.get("priority") or 0),
        None if basis is None else str(basis),
        as_put(delivery.birth, 0),
        body,
    )


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


def key_of(one: Found | Cancelled) -> Key:
    """The key of the row of a message that was found: see :func:`identity_of`."""
    return identity_of(one.topic, one.id, one.body, one.token)[0]


def biz_of(headers: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Business type and business id of a message, as they are kept."""
    kind, id = headers.get(BIZ_TYPE), headers.get(BIZ_ID)
    return None if kind is None else str(kind), None if id is None else str(id)


def texts_of(headers: Mapping[str, Any]) -> tuple[str | None, ...]:
    """Task, business type, business id and attributes of a message, as every database takes
    them."""
    kind, biz = (one and storable(one) for one in biz_of(headers))
    attributes = None
    with suppress(LibraryError):  # of a message whose row was refused
        attributes = _attributes("", headers)
    task = headers.get("task")
    return (
        storable(task)[: _LENGTHS["task"]] if isinstance(task, str) else None,
        kind and kind[: _LENGTHS[BIZ_TYPE]],
        biz and biz[: _LENGTHS[BIZ_ID]],
        attributes,
    )


def attributes_of(given: Mapping[str, Any]) -> dict[str, str]:
    """Attributes as they are kept and searched: all are texts. Raises ValueError."""
    texts = {}
    for name, value in given.items():
        if not isinstance(name, str) or not _ATTRIBUTE.fullmatch(name):
            raise ValueError(
                f"an attribute has a name of letters, digits, '_', '.' and '-', 64 at most, not "
                f"{name!r:.80}"
            )
        text = str(value)
        if value is None or isinstance(value, bytes) or storable(text) != text:
            raise ValueError(f"attribute {name} must be a text, not {value!r:.80}")
        texts[name] = text
    return texts


def _attributes(id: str, headers: Mapping[str, Any]) -> str | None:
    given = headers.get(ATTRIBUTES)
    if not given:
        return None
    try:
        if isinstance(given, str):  # as a header of HTTP has them
            given = json.loads(given)
        if not isinstance(given, Mapping):
            raise ValueError(f"it must be names with their values, not {given!r:.80}")
        text = json.dumps(attributes_of(given), ensure_ascii=False, sort_keys=True)
    except ValueError as exc:
        raise LibraryError(
            f"message {id:.80}: its {ATTRIBUTES} cannot be kept: {exc}; nothing was sent"
        ) from None
    if len(text) > MAX_ATTRIBUTES:
        raise LibraryError(
            f"message {id:.80}: its {ATTRIBUTES} have {len(text)} characters, and the library "
            f"keeps {MAX_ATTRIBUTES}; nothing was sent"
        )
    return text


def _check(id: str, name: str, value: str) -> None:
    if len(value) > _LENGTHS[name]:
        raise LibraryError(
            f"message {id:.80}: its {name} has {len(value)} characters, and the library keeps "
            f"{_LENGTHS[name]}; nothing was sent"
        )
    # PostgreSQL keeps no NUL, and none keeps half a character.
    if not value.isprintable() and storable(value) != value:
        raise LibraryError(
            f"message {id!r:.80}: its {name} has characters that a database cannot keep; nothing "
            "was sent"
        )


def _action_us(request: PutRequest, now: int) -> int:
    at = request.at_us
    if isinstance(at, Countdown):
        if at.at_us is not None:
            return at.at_us
        return now + int((at.ends - time.monotonic()) * 1_000_000)
    if at is not None:
        return int(at)
    return now + (request.delay_us or 0)
