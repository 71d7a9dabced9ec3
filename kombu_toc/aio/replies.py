"""Reads replies in Redis's protocol (version 2) from pieces of bytes, as they come."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from redis.connection import DefaultParser
from redis.exceptions import InvalidResponse

#: Bytes that are asked of a socket at once.
CHUNK = 1 << 16

_error_of: Callable[[str], Exception] = DefaultParser(CHUNK).parse_error


class ReplyReader:
    """What has arrived on one connection: :meth:`feed` it, and take :attr:`replies`.

    A reply that is an error is an exception, which is not raised.
    """

    def __init__(self) -> None:
        self.replies: list[Any] = []
        self._read = _reading(self.replies)
        next(self._read)
        #: gives bytes to it; raises InvalidResponse for what is no reply
        self.feed = self._read.send

    def take(self, number: int) -> list[Any]:
        """The first replies, which are forgotten here."""
        taken = self.replies[:number]
        del self.replies[:number]
        return taken


def _reading(replies: list[Any]) -> Generator[None, bytes, None]:
    buffer, at = b"", 0
    #: the arrays that are being read, the outermost first, and how many items each still lacks
    open_arrays: list[tuple[list[Any], int]] = []
    while True:
        end = buffer.find(b"\r\n", at)
        while end < 0:
            buffer = buffer[at:] + (yield)
            at, end = 0, buffer.find(b"\r\n")
        kind, line = buffer[at : at + 1], buffer[at + 1 : end]
        at = end + 2
        value: Any
        if kind == b":":
            value = int(line)
        elif kind == b"$":
            size = int(line)
            value = None
            if size >= 0:
                missing = size + 2 - (len(buffer) - at)
                if missing > 0:
                    parts = [buffer[at:]]
                    while missing > 0:
                        parts.append((yield))
                        missing -= len(parts[-1])
                    buffer, at = b"".join(parts), 0
                value = buffer[at : at + size]
                at += size + 2
        elif kind == b"*":
            count = int(line)
            value = [] if count >= 0 else None
            if count > 0:
                open_arrays.append((value, count))
                continue
        elif kind == b"+":
            value = line
        elif kind == b"-":
            value = _error_of(line.decode("utf-8", "replace"))
        else:
            raise InvalidResponse(f"not Redis's protocol: {buffer[at - 40 : at]!r}")
        while open_arrays:
            array, lacks = open_arrays[-1]
            array.append(value)
            if lacks > 1:
                open_arrays[-1] = array, lacks - 1
                break
            open_arrays.pop()
            value = array
        else:
            replies.append(value)
