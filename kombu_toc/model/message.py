"""The envelope: a Kombu message as the bytes kept in Redis, and back.

It is one line of JSON (headers, properties, content type and encoding), then the raw body: no
base64 and no JSON inside JSON. The first byte is the form:

==========  ==================================================================
first byte  form
==========  ==================================================================
``{``       as it is
``0x01``    raw deflate, with :data:`DICTIONARY` preset
``0x02``    a byte that is the length of an id, in bytes, then raw deflate, with
            :data:`DICTIONARY` and that id preset
==========  ==================================================================

Celery writes a task's id three times into a message, and ids hardly compress. The message is
stored under its id, or under a name that begins with it, so the id need not be stored again.

A dictionary never changes: a better one gets the next number, so that stored messages stay
readable.
"""

from __future__ import annotations

import bz2
import hashlib
import io
import json
import lzma
import math
import uuid
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from kombu.utils import json as kombu_json

from ..errors import EnvelopeError, TraitError

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
_decode = json.JSONDecoder().raw_decode


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
        data, _ = _inflated(data, id, most)
    end = data.find(b"\n", 0, most)
    return data[: most if end < 0 else end]


def unpack(data: bytes, id: str = "", most: int = MAX_EXPANDED) -> dict[str, Any]:
    """The message stored in `data`, its body as bytes; otherwise as :func:`expand`."""
    return _parsed(data if data[:1] == _PLAIN else expand(data, id, most))


def expand(data: bytes, id: str = "", most: int = MAX_EXPANDED) -> bytes:
    """The inverse of :func:`compress`: a line of JSON, and the body.

    id: the id that it is stored under
    most: bytes that it may expand to

    Raises EnvelopeError, saying what is wrong, if it cannot be read.
    """
    if data[:1] == _PLAIN:
        return data
    data, is_cut = _inflated(data, id, most)
    if is_cut:
        raise EnvelopeError(f"damaged envelope: it expands to more than {most} bytes")
    return data


def _inflated(data: bytes, id: str, most: int) -> tuple[bytes, bool]:
    """What a message expands to, as far as one byte more than `most`, and whether there is more.
    One that is not compressed is all there."""
    form, preset, begin = data[:1], DICTIONARY, 1
    if form == _PLAIN:
        return data, False
    if form == _DEFLATED_WITH_ID:
        length, name, begin = int.from_bytes(data[1:2], "big"), _bytes(id), 2
        if len(name) < length:
            raise EnvelopeError(
                f"damaged envelope: it was written under an id of {length} bytes and is read "
                f"as that of {id!r}; give the id that it is kept under"
            )
        preset += name[:length]
    elif form != _DEFLATED:
        raise EnvelopeError(
            f"unknown envelope version {form!r}: it was written by a newer release, or is damaged"
        )
    inflater = zlib.decompressobj(_WINDOW, preset)
    try:
        data = inflater.decompress(data[begin:], most + 1)
    except zlib.error as exc:
        raise EnvelopeError(f"damaged envelope: {exc}") from exc
    if len(data) <= most and not inflater.eof:
        raise EnvelopeError("damaged envelope: it ends too early")
    return data, len(data) > most


def _parsed(data: bytes, hook: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any]:
    """The message in bytes that are not compressed.

    hook: reads the types that JSON has not; None: Kombu does
    """
    line, newline, body = data.partition(b"\n")
    try:
        # As text, and without json.loads, for each message is read here.
        text = line.decode("utf-8", "surrogatepass")
        meta, end = _decode(text)
        if end < len(text):
            json.loads(text)  # says what is wrong
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


# -- the key of a message
#
# Scripts know it encoded, so that it can stand among a message's traits.

#: Characters of an encoded key; a longer one is kept as its SHA-256.
MAX_ENCODED = 200

#: What the name of a key begins with that was too long.
_HASHED = "h."


def key_of(what: str, value: object) -> str:
    """A key from a header or an argument, as text; empty for none.

    what: which message it is of, for an error

    Raises TraitError for what is no text, no whole number and no UUID.
    """
    if type(value) is str:
        return value
    if value is None:
        return ""
    if isinstance(value, (str, int, uuid.UUID)) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):  # as below
            return value.decode()
    raise TraitError(f"{what}: the key must be text, a whole number or a UUID, not {value!r}")


@lru_cache(maxsize=4096)
def encode_key(key: str) -> str:
    """A key as scripts know it: of letters, digits and ``_ . % -`` only, 200 at most."""
    data = key.encode("utf-8", "surrogatepass")
    encoded = quote(data, safe="").replace("~", "%7E")
    if len(encoded) > MAX_ENCODED:
        return _HASHED + hashlib.sha256(data).hexdigest()
    return encoded


def is_hashed(encoded: str) -> bool:
    """Whether it looks like what stands for a key that was too long."""
    return encoded.startswith(_HASHED) and len(encoded) == len(_HASHED) + 64


def decode_key(encoded: str) -> str:
    """A key as its sender named it; of one that was too long, what stands for it."""
    return unquote(encoded, errors="replace")


# -- unique keys
#
# Which message has a key is kept in the slot's hash ``claims`` (``claim.lua``). The message
# itself has the key among its traits (:mod:`.delivery`), as ``u1.invoice-42``: a digit says how
# long the claim holds, and behind the dot is the key, encoded.

#: How long a claim holds: until its message is delivered, or until it is done.
START, DONE = "start", "done"

#: A claim's mode that holds for a time; the others are 0, until it starts, and 1, until done.
FOR_A_TIME = 2

#: What is done with a message whose key another one has.
KEEP_EARLIER, REPLACE, PUSH_BACK, RAISE = "keep", "replace", "push_back", "raise"
CONFLICTS = (KEEP_EARLIER, REPLACE, PUSH_BACK, RAISE)

#: Those by which a message takes the place of the other one.
TAKES = (REPLACE, PUSH_BACK)

#: Stands between what picks the slot and the key.
_BETWEEN = "\x1f"

#: Seconds for which a claim may hold, or be pushed back, at most: ten years.
_LONGEST_UNIQUE = 316_224_000


class Unique(NamedTuple):
    """That a queue is to have one message of a key at a time.

    key: the key: text, a whole number or a UUID
    until: how long the message that is put has the key: ``"start"``, until it is first delivered;
        ``"done"``, until it is acknowledged; or for so many seconds, also if it is done before. If
        it is cancelled, purged or dead, it has no key. ``"done"`` unless given; with ``replace``
        and ``push_back``, ``"start"``
    conflict: what is done with another message of that key meanwhile: ``"keep"``, nothing: the one
        that is there stays as it is; ``"replace"``, the one that waits gets the new body and the
        new time, and keeps its id; ``"push_back"``, the same, and its time only gets later;
        ``"raise"``, UniqueError. What has been delivered cannot be replaced or pushed back: then
        UniqueError is raised
    at_most: with ``push_back``: seconds after the first put beyond which it is not pushed back; as
        far as asked for unless given
    """

    key: Any
    until: str | float | None = None
    conflict: str = KEEP_EARLIER
    at_most: float | None = None


class Claim(NamedTuple):
    """A unique key as scripts know it.

    shown: the key as its sender knows it
    name: the key, encoded. Of a message whose slot is picked by something else than its unique key
        it includes that: messages of one key are unique among those of one slot basis
    mode: 0 until it starts, 1 until it is done, 2 for a time
    lasts_us: that time, in microseconds
    checksum: CRC-32 of the slot basis
    conflict, at_most_us: as in :class:`Unique`
    """

    shown: str
    name: str
    mode: int
    lasts_us: int
    checksum: int
    conflict: str
    at_most_us: int | None

    @property
    def trait(self) -> str:
        """As it is written among a message's traits."""
        return f"u{self.mode}.{self.name}"

    def among(self, traits: str) -> str:
        """The traits with this one."""
        return f"{traits},{self.trait}" if traits else f";{self.trait}"


def claim_of(what: str, unique: Unique | str, basis: str | None, names: str = "") -> Claim:
    """A claim as scripts know it.

    what: which message it is of, for an error
    basis: what picks the message's slot if it is not the unique key
    names: what the names of the fields begin with for the sender, such as ``x-unique-``

    Raises TraitError for what makes no sense.
    """
    if not isinstance(unique, Unique):
        unique = Unique(unique)
    key = key_of(f"{what}: unique", unique.key)
    if not key:
        raise TraitError(f"{what}: its unique key is empty; leave it out, or give it a key")
    conflict = unique.conflict
    if conflict not in CONFLICTS:
        raise TraitError(
            f"{what}: {names}conflict must be one of {', '.join(CONFLICTS)}, not {conflict!r}"
        )
    until = unique.until
    if until is None:
        until = START if conflict in TAKES else DONE
    lasts_us = 0
    if until not in (START, DONE):
        lasts_us = _microseconds(what, f"{names}until", until, "'start', 'done' or a number")
        if not lasts_us:
            raise TraitError(f"{what}: {names}until must be more than 0 seconds")
    at_most_us = None
    if unique.at_most is not None:
        at_most = f"{names}at-most" if names else "at_most"
        at_most_us = _microseconds(what, at_most, unique.at_most)
        if conflict != PUSH_BACK:
            raise TraitError(f"{what}: {at_most} goes with conflict push_back, not {conflict}")
    picks = basis or key
    return Claim(
        key,
        encode_key(_name_of(picks, key)),
        FOR_A_TIME if lasts_us else int(until == DONE),
        lasts_us,
        zlib.crc32(picks.encode("utf-8", "surrogatepass")),
        conflict,
        at_most_us,
    )


def _name_of(picks: str, key: str) -> str:
    """What a claim goes by: no two keys, nor two slot bases, have the same."""
    if _BETWEEN in picks or _BETWEEN in key:
        return _BETWEEN.join(("", str(len(picks)), picks, key))
    return key if picks == key else f"{picks}{_BETWEEN}{key}"


def key_of_name(name: str) -> str:
    """The key in what a claim goes by."""
    if name.startswith(_BETWEEN):
        length, _, rest = name[1:].partition(_BETWEEN)
        if length.isdecimal():
            return rest[int(length) + 1 :]
    return name.rpartition(_BETWEEN)[2]


def _microseconds(what: str, name: str, value: object, kinds: str = "a number") -> int:
    """A number of seconds, also as text, in microseconds. Raises TraitError."""
    seconds = math.nan
    if not isinstance(value, bool) and isinstance(value, (int, float, str)):
        with suppress(ValueError, OverflowError):  # as below
            seconds = float(value)
    if not 0 <= seconds <= _LONGEST_UNIQUE:
        raise TraitError(
            f"{what}: {name} must be {kinds} of seconds from 0 to 316224000, not {value!r}"
        )
    return math.ceil(seconds * 1_000_000)


# -- a message as people look at it: nothing of it runs, and it is expanded to a bound only
#
# A worker decodes a message as its app is told to, perhaps with pickle. Whoever looks at a queue
# has not asked for that: anybody who may write to it would run code in the process that shows
# it. So all that shows messages reads them here: JSON, msgpack if it is installed, and plain
# text.


#: Bytes that a message, and its body, may expand to. More is not decoded.
MOST = 1 << 20

#: How deep lists and mappings may be nested: what shows them calls itself for each level.
DEPTH = 100

#: Bytes that a decompressor may use beside what it returns.
_MEMORY = 64 << 20

#: What Kombu's JSON writes beside JSON's own types. A type that an app has registered stays as it
#: was sent: its decoder is the app's code.
_TYPES = frozenset(("datetime", "date", "time", "decimal", "uuid", "bytes", "base64"))

_TEXT = ("utf-8", "utf8", "us-ascii", "ascii")


class Content(NamedTuple):
    """A body as people look at it.

    value: None if it is not decoded
    problem: why it is not; otherwise empty
    size: bytes that were expanded for it
    """

    value: Any
    problem: str = ""
    size: int = 0


class _NotShownError(Exception):
    """Why a body is not decoded."""


def look(data: bytes, id: str = "", most: int = MOST) -> tuple[dict[str, Any], str]:
    """The message stored in `data`, as :func:`unpack` returns it, and why its body is missing:
    empty unless it expands to more than `most` bytes; then its headers are there.

    id: the id that it is stored under

    Raises EnvelopeError, saying what is wrong, if it cannot be read.
    """
    plain, is_cut = _inflated(data, id, most)
    if len(plain) > most and plain.find(b"\n", 0, most) < 0:
        raise EnvelopeError(f"its headers have more than {most:,} bytes")
    message = _parsed(plain, _typed)
    if is_cut:
        message["body"] = b""
    if _is_deep((message["headers"], message["properties"], message["content-type"])):
        raise EnvelopeError(f"its headers are nested deeper than {DEPTH} levels")
    return message, _too_large(len(data), most) if is_cut else ""


def read_content(message: dict[str, Any], most: int = MOST) -> Content:
    """The decoded body of a message.

    message: as :func:`unpack` returns it
    most: bytes that it may expand to
    """
    body, kind = message["body"], message.get("content-type")
    compression, size = message["headers"].get("compression"), 0
    try:
        if compression is not None:
            body, size = _expanded(body, compression, most)
        if len(body) > most:
            raise _NotShownError(_too_large(len(message["body"]), most))
        value = _decoded(body, kind, message.get("content-encoding"))
        if _is_deep(value):
            raise _NotShownError(f"the body is not decoded: nested deeper than {DEPTH} levels")
    except _NotShownError as exc:
        return Content(None, str(exc), size)
    except Exception as exc:  # whatever a decoder raises
        said = f"{type(exc).__name__}: {exc!s:.200}"
        problem = f"the body cannot be read as {kind!s:.80} ({len(body):,} bytes): {said}"
        return Content(None, problem, size)
    return Content(value, "", size)


def _too_large(size: int, most: int) -> str:
    return (
        f"the body is not decoded: its {size:,} bytes are, or expand to, more than the {most:,} "
        "that are shown"
    )


def _decoded(body: bytes, kind: Any, encoding: Any) -> Any:
    if kind == "application/json":
        return json.loads(body.decode(), object_hook=_typed)
    if kind == "application/x-msgpack":
        with suppress(ImportError):
            import msgpack

            return msgpack.unpackb(body, raw=False)
    elif kind in ("text/plain", "application/data") and encoding in _TEXT:
        return body.decode()
    elif kind in (None, "application/data"):
        return body
    raise _NotShownError(
        f"the body is not decoded: {len(body):,} bytes of {kind!s:.80}; only JSON, and msgpack if "
        "it is installed, are read to be shown"
    )


def _typed(found: dict[str, Any]) -> Any:
    known = found.keys() == {"__type__", "__value__"} and found["__type__"] in _TYPES
    return kombu_json.object_hook(found) if known else found


def _is_deep(value: Any) -> bool:
    """Whether a value is nested too deep to be shown."""
    level = [value]
    for _ in range(DEPTH):
        inside: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inside.extend(one.values())
            elif isinstance(one, (list, tuple)):
                inside.extend(one)
        if not inside:
            return False
        level = inside
    return True


def _expanded(body: bytes, compression: Any, most: int) -> tuple[bytes, int]:
    """A compressed body expanded, one byte more than `most` at most; and how much that is."""
    expand = _EXPANDERS.get(compression) if isinstance(compression, str) else None
    if expand is None:
        raise _NotShownError(
            f"the body is not decoded: {len(body):,} bytes, compressed as {compression!s:.80}"
        )
    found, is_whole = expand(body, most + 1)
    if len(found) <= most and not is_whole:
        raise _NotShownError(f"the body is not decoded: {len(body):,} damaged bytes")
    return found, len(found)


def _streaming(make: Callable[[], Any]) -> Callable[[bytes, int], tuple[bytes, bool]]:
    """Expands bytes with a decompressor that is told how much to return; whether that is all."""

    def expand(body: bytes, most: int) -> tuple[bytes, bool]:
        decompressor = make()
        found = decompressor.decompress(body, most)
        # What follows would be expanded by a worker: it reads another text than is shown.
        return found, decompressor.eof and not decompressor.unused_data

    return expand


def _expand_zstd(body: bytes, most: int) -> tuple[bytes, bool]:
    for name in ("compression.zstd", "backports.zstd"):
        with suppress(ImportError):
            zstd = import_module(name)
            bound = {zstd.DecompressionParameter.window_log_max: _MEMORY.bit_length() - 1}
            return _streaming(partial(zstd.ZstdDecompressor, options=bound))(body, most)
    import zstandard  # what Kombu used before 5.6

    reader = zstandard.ZstdDecompressor(max_window_size=_MEMORY).stream_reader(io.BytesIO(body))
    return reader.read(most), True


#: What Kombu calls a compression -> what expands it. Brotli has no bound in all its versions.
_EXPANDERS = {
    "application/x-gzip": _streaming(zlib.decompressobj),
    "application/x-bz2": _streaming(bz2.BZ2Decompressor),
    "application/x-lzma": _streaming(lambda: lzma.LZMADecompressor(memlimit=_MEMORY)),
    "application/zstd": _expand_zstd,
}
