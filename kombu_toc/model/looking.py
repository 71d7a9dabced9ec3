"""A message as people look at it: nothing of it runs, and it is expanded to a bound only.

A worker decodes a message as its app is told to, perhaps with pickle. Whoever looks at a queue has
not asked for that: anybody who may write to it would run code in the process that shows it. So
all that shows messages reads them here: JSON, msgpack if it is installed, and plain text.
"""

from __future__ import annotations

import bz2
import io
import json
import lzma
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from kombu.utils import json as kombu_json

from ..errors import EnvelopeError
from .message import unpack_beginning

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
    message, is_whole = unpack_beginning(data, id, most, _typed)
    if _is_deep((message["headers"], message["properties"], message["content-type"])):
        raise EnvelopeError(f"its headers are nested deeper than {DEPTH} levels")
    return message, "" if is_whole else _too_large(len(data), most)


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
