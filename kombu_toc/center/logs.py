"""The logs that scripts keep for the task library: of the queues whose rows are written behind.

A log says which messages to look at; whoever reads it is given these as they are by then. So its
entries may be read twice, late, or by two at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..model.keys import Slot
from ..model.results import STATES
from ..model.topic import Topic
from ..scripts.call import ScriptCall, load, text, texts

#: What an entry says has happened: see ``scripts/log.lua``.
PUT, MOVE, CANCEL, FULL = "p", "m", "c", "full"


class Entry(NamedTuple):
    """An entry of a log, and the message that it is about as this is now.

    name: by which it is deleted
    what: PUT, MOVE, CANCEL or FULL
    id: that the message is kept under
    state: its state; empty if it is gone
    """

    name: str
    what: str
    id: str
    state: str
    step: int
    score: int
    body: bytes
    token: str

    @property
    def ms(self) -> int:
        """When it was written, in milliseconds since the epoch."""
        return int(self.name.partition("-")[0])


class Read(NamedTuple):
    """What was read of a log.

    entries: the oldest first
    gone: how many more there were, whose messages are gone: these are deleted
    more: whether there may be more
    """

    entries: list[Entry]
    gone: int
    more: bool


def logging(
    topic: Topic, slot: Slot, script: str, keys: Sequence[str], args: Sequence[Any]
) -> tuple[str, Sequence[str], Sequence[Any]]:
    """The script, the keys and the arguments of a put that is logged."""
    place = len(keys) + 1
    return f"{script}_logged", (*keys, slot.log), (*args, place, topic.declaration.logs)


def read_call(slot: Slot, limit: int, bytes: int, age_ms: int = 0) -> ScriptCall:
    """Read a log, and delete what it says of messages that are gone by now, but for those that
    were cancelled. Result: a :class:`Read`.

    limit: how many entries at most
    bytes: that their bodies may have together; the first may have any
    age_ms: how old they are at least, in milliseconds
    """

    def parse(raw: list[Any]) -> Read:
        gone, more, found = raw
        entries = [
            Entry(
                text(found[i]),
                text(found[i + 1]),
                text(found[i + 2]),
                STATES.get(found[i + 3], ""),
                found[i + 4],
                int(float(found[i + 5])),
                found[i + 6],
                text(found[i + 7]),
            )
            for i in range(0, len(found), 8)
        ]
        return Read(entries, gone, bool(more))

    keys = (slot.log, slot.prepare, slot.dead, slot.body, slot.tokens, *slot.stores)
    return ScriptCall(load("logged"), keys, (limit, bytes, age_ms), parse)


def written_call(slot: Slot, entries: Sequence[str], ids: Sequence[str] = ()) -> ScriptCall:
    """Delete entries of a log, one at least. Result: those of the ids whose messages are gone;
    None if an entry had gone: somebody else has written it, or everything was lost just now."""

    def parse(raw: list[Any]) -> list[str] | None:
        return texts(raw[1:]) if raw[0] else None

    return ScriptCall(load("written"), (slot.log, slot.body), (len(entries), *entries, *ids), parse)


def logs_of(topic: Topic) -> list[Slot]:
    """The slots of a topic that may have a log: also those that it had before it was resharded."""
    said = topic.declaration
    span = max(topic.slot_span, *said.previous_counts, 0)
    return [topic.slot(number) for number in range(span)]
