"""The envelope: a Kombu message as the bytes kept in Redis, and back.

It is one line of JSON (headers, properties, content type and encoding), then the raw body: no
base64 and no JSON inside JSON. The first byte is the form:

==========  ==================================================================
first byte  form
==========  ==================================================================
``{``       as it is
``\\x01``    raw deflate, with :data:`DICTIONARY` preset
``\\x02``    a byte that is the length of an id, in bytes, then raw deflate, with
            :data:`DICTIONARY` and that id preset
==========  ==================================================================

Celery writes a task's id three times into a message, and ids hardly compress. The message is stored
under its id, or under a name that begins with it, so the id need not be stored again.

A dictionary never changes: a better one gets the next number, so that stored messages stay
readable.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

from kombu.utils import json as kombu_json

from ..errors import EnvelopeError

#: Text that Celery's messages have in common, the most frequent last: deflate needs fewer bits for
#: a short distance.
DICTIONARY = (
    b'"compression":"application/x-gzip","ticket":"clock":"expires":0,"method":"arguments":'
    b'"destination":"pattern":"matcher":"reply_to":{"exchange":"reply.celery.pidbox",'
    b'"errbacks":[{"task":"args":[],"kwargs":{},"options":{"task_id":"reply_to":'
    b'"subtask_type":"chain","chord_size":"immutable":true,"max_retries":3,"celery.chord_unlock"'
    b"celery.backend_cleanupcelery.chord_unlockcelery.accumulatecelery.groupcelery.map"
    b'"x-delay":"x-slot-basis":"application/x-python-serialize""binary""application/data"'
    b'[[1, 2, 3], {"key": "value", "id": 1, "user_id": 1, "name": "", "email": "'
    b'"callbacks": [], "errbacks": [], "chain": [], "chord": null, '
    b'"1.tasks.send_email_notification_process_update_check_order_payment_cleanup_expire'
    b"app.tasks.project.worker.jobs."
    b'@ip-10-0-gen1@localhost"[null, null]'
    b'"timelimit":[300,240],"stamped_headers":[],"stamps":{},"replaced_task_nesting":1,'
    b'"ignore_result":true,"retries":1,"2026-01-01T00:00:00.000000+00:00",'
    b'[[], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'
    b'{"h":{"lang":"py","task":"tasks.","id":"-4-8-9-a-b-","shadow":null,'
    b'"eta":"2026-1-0T12:+00:00","expires":null,'
    b'"group":null,"group_index":null,"retries":0,"timelimit":[null,null],"root_id":"",'
    b'"parent_id":null,"argsrepr":"()","kwargsrepr":"{}","origin":"gen","ignore_result":false,'
    b'"replaced_task_nesting":0,"stamped_headers":null,"stamps":{}},"p":{"correlation_id":"",'
    b'"reply_to":"","delivery_mode":2,"delivery_info":{"exchange":"","routing_key":"celery"},'
    b'"priority":0},"t":"application/json","e":"utf-8"}\n'
    b'[[], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'
)

_PLAIN = b"{"
_DEFLATED = b"\x01"
_DEFLATED_WITH_ID = b"\x02"

#: The longest id whose length fits into one byte.
_LONGEST = 255

# A window of 4 KiB holds the dictionary and a message; a larger one costs time, not bytes.
_WINDOW = -12

#: Bytes that an envelope may expand to: what a string in Redis may have.
MAX_EXPANDED = 512 << 20

#: A property that a sender may set: the ``eta`` comes from a duration and the sender's clock, which
#: may be wrong. Its distance from that clock at the moment of sending counts.
COUNTDOWN = "x-countdown"

#: A property that a sender may set: add the message only if its queue has none with its id.
ENSURE = "x-ensure"

#: A header that names the schedule whose firing a message is.
SCHEDULE = "x-schedule"

#: The header with the unique key of a message.
UNIQUE = "x-unique"

#: Properties that mean something only within one process or one delivery.
_TRANSIENT = frozenset(("body_encoding", "delivery_tag", COUNTDOWN, ENSURE))

_encode = json.JSONEncoder(
    separators=(",", ":"), default=kombu_json.JSONEncoder().default, check_circular=False
).encode


def pack(message: dict[str, Any], *, deflate: bool, id: str = "") -> bytes:
    """The bytes to store for a message.

    message: what ``Channel.prepare_message`` returns: ``headers``, ``properties``,
        ``content-type``, ``content-encoding`` and ``body`` (bytes or str)
    deflate: whether to compress it, as is worth while for a message that will wait
    id: the id that it will be stored under; then it can only be read with this id
    """
    plain = pack_plain(message)
    return compress(plain, id) if deflate else plain


def pack_plain(message: dict[str, Any]) -> bytes:
    """The bytes of a message as they are before they are compressed."""
    body = message["body"]
    if isinstance(body, str):
        body = body.encode("utf-8", "surrogatepass")
    elif body is None:
        body = b""
    return b"%b\n%b" % (encode_meta(message).encode("ascii"), bytes(body))


def encode_meta(message: dict[str, Any]) -> str:
    """The line that comes before the body."""
    properties = message.get("properties") or {}
    meta = {
        "h": message.get("headers") or {},
        "p": {key: value for key, value in properties.items() if key not in _TRANSIENT},
        "t": message.get("content-type"),
        "e": message.get("content-encoding"),
    }
    return _encode(meta)


def compress(plain: bytes, id: str = "") -> bytes:
    """The bytes to store instead of those that :func:`pack_plain` gives: compressed if that makes
    them fewer."""
    form, preset = _DEFLATED, DICTIONARY
    name = _bytes(id)
    if name and len(name) <= _LONGEST:
        form, preset = b"%b%c" % (_DEFLATED_WITH_ID, len(name)), DICTIONARY + name
    deflater = zlib.compressobj(6, zlib.DEFLATED, _WINDOW, 5, zlib.Z_DEFAULT_STRATEGY, preset)
    small = form + deflater.compress(plain) + deflater.flush()
    return small if len(small) < len(plain) else plain


def _bytes(id: str) -> bytes:
    """An id as it is stored in Redis."""
    return id.encode("utf-8", "surrogatepass")


def first_line(data: bytes, id: str, most: int) -> bytes:
    """The beginning of a message, where its headers are: of so many bytes, without its body.

    id: the id that it is stored under

    Raises EnvelopeError, saying what is wrong, if it cannot be read.
    """
    if data[:1] in (_DEFLATED, _DEFLATED_WITH_ID):
        inflater, begin = _inflater(data, id)
        try:
            data = inflater.decompress(data[begin:], most)
        except zlib.error as exc:
            raise EnvelopeError(f"damaged envelope: {exc}") from exc
    end = data.find(b"\n", 0, most)
    return data[: most if end < 0 else end]


def _inflater(data: bytes, id: str) -> tuple[Any, int]:
    """What expands a compressed message, and where in it that begins."""
    preset, begin = DICTIONARY, 1
    if data[:1] == _DEFLATED_WITH_ID:
        length, name, begin = int.from_bytes(data[1:2], "big"), _bytes(id), 2
        if len(name) < length:
            raise EnvelopeError(
                f"damaged envelope: it was written under an id of {length} bytes and is read "
                f"as that of {id!r}; give the id that it is kept under"
            )
        preset += name[:length]
    return zlib.decompressobj(_WINDOW, preset), begin


def unpack(data: bytes, id: str = "", most: int = MAX_EXPANDED) -> dict[str, Any]:
    """The message stored in `data`, its body as bytes.

    id: the id that it is stored under
    most: bytes that it may expand to

    Raises EnvelopeError, saying what is wrong, if it cannot be read.
    """
    form = data[:1]
    if form in (_DEFLATED, _DEFLATED_WITH_ID):
        data, is_whole = _inflated(data, id, most)
        if len(data) > most:
            raise EnvelopeError(f"damaged envelope: it expands to more than {most} bytes")
        if not is_whole:
            raise EnvelopeError("damaged envelope: it ends too early")
    elif form != _PLAIN:
        raise _unknown(form)
    return _parsed(data)


def unpack_beginning(
    data: bytes, id: str, most: int, hook: Callable[[dict[str, Any]], Any]
) -> tuple[dict[str, Any], bool]:
    """The message stored in `data`, as :func:`unpack` returns it, and whether its body is there:
    one that expands to more than `most` bytes is left empty.

    hook: reads what Kombu's JSON writes of the types that JSON has not, instead of Kombu

    Raises EnvelopeError, saying what is wrong, if not even its headers can be read.
    """
    form, is_whole = data[:1], True
    if form in (_DEFLATED, _DEFLATED_WITH_ID):
        data, is_whole = _inflated(data, id, most)
    elif form != _PLAIN:
        raise _unknown(form)
    if len(data) > most and data.find(b"\n", 0, most) < 0:
        raise EnvelopeError(f"its headers have more than {most:,} bytes")
    if form == _PLAIN or len(data) <= most:
        if not is_whole:
            raise EnvelopeError("damaged envelope: it ends too early")
        return _parsed(data, hook), True
    return {**_parsed(data, hook), "body": b""}, False


def _inflated(data: bytes, id: str, most: int) -> tuple[bytes, bool]:
    """What a compressed message expands to, as far as one byte more than `most`, and whether that
    is its end."""
    inflater, begin = _inflater(data, id)
    try:
        return inflater.decompress(data[begin:], most + 1), inflater.eof
    except zlib.error as exc:
        raise EnvelopeError(f"damaged envelope: {exc}") from exc


def _unknown(form: bytes) -> EnvelopeError:
    return EnvelopeError(
        f"unknown envelope version {form!r}: it was written by a newer release, or is damaged"
    )


def _parsed(data: bytes, hook: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any]:
    """The message in bytes that are not compressed.

    hook: reads the types that JSON has not; None: Kombu does
    """
    line, newline, body = data.partition(b"\n")
    try:
        meta = json.loads(line)
        if b'"__type__"' in line:  # Kombu's own encoding of dates, UUIDs and the like
            meta = kombu_json.loads(line.decode(), **({"object_hook": hook} if hook else {}))
        if not newline:
            raise ValueError("no body")
        headers, properties = meta["h"], meta["p"]
        info = properties.get("delivery_info", {}) if isinstance(properties, dict) else None
        if not isinstance(headers, dict) or not isinstance(info, dict):
            raise ValueError("headers, properties or delivery_info are not a mapping")
        return {
            "headers": headers,
            "properties": properties,
            "content-type": meta["t"],
            "content-encoding": meta["e"],
            "body": body,
        }
    except Exception as exc:  # also whatever a decoder that was registered with Kombu raises
        raise EnvelopeError(f"damaged envelope: {type(exc).__name__}: {exc}") from exc
