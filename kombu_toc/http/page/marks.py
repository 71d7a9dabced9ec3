"""Which messages a job has counted: it is done to these, and to none that came later.

A message is known by its id, its time to a millisecond, and its bytes. What is put later under the
same id is another message, and so is one that was given another time since.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from ...model.results import DEAD, Found

#: Messages that a job counts at most, as many as people wait for; about 30 bytes are kept of each.
MOST = 1_000_000

#: Messages of a part, and bytes from which on these are enough: a part is read and changed at once.
PART = 500
PART_BYTES = 8 << 20

#: Bytes that tell a message from others of its id.
_BYTES = 8


class Mark(NamedTuple):
    """A message that was counted.

    print: what tells it from others of its id
    """

    id: str
    print: str


def mark_of(found: Found) -> Mark:
    """What a message is known by."""
    said = blake2b(b"%d %d " % (found.time_us // 1000, found.state == DEAD), digest_size=_BYTES)
    said.update(found.body)
    return Mark(found.id, said.hexdigest())


class Marks:
    """Divides what is counted into parts.

    made: how many parts there are
    """

    def __init__(self) -> None:
        self.made = 0
        self._marks: list[Mark] = []
        self._size = 0

    def add(self, found: Iterable[Found]) -> list[bytes]:
        """Messages that were counted; returns the parts that are whole by now."""
        whole = []
        for one in found:
            self._marks.append(mark_of(one))
            self._size += len(one.body)
            if len(self._marks) >= PART or self._size >= PART_BYTES:
                whole += self.rest()
        return whole

    def rest(self) -> list[bytes]:
        """The last part, if it has any."""
        marks, self._marks, self._size = self._marks, [], 0
        if not marks:
            return []
        self.made += 1
        ids, prints = zip(*marks, strict=True)
        return [zlib.compress(json.dumps([ids, "".join(prints)]).encode(), 1)]


def read_part(raw: bytes) -> list[Mark]:
    """The messages of a part."""
    ids, prints = json.loads(zlib.decompress(raw))
    size = 2 * _BYTES
    return [Mark(id, prints[size * at : size * (at + 1)]) for at, id in enumerate(ids)]


def those_of(marks: Iterable[Mark], found: Sequence[Found]) -> list[Found]:
    """Of messages that were found by their ids, those that were counted."""
    known = set(marks)
    return [one for one in found if mark_of(one) in known]
