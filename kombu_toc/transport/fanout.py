"""Broadcast: fanout exchanges as streams, so that a consumer that reconnects misses nothing."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from ..center import REMEMBER, Call, TimeoutCenter
from ..scripts import load

#: Milliseconds after which a stream that nothing is added to goes away.
RETENTION_MS = 600_000

#: Before the first entry of a stream.
BEGINNING = "0-0"

#: Seconds for which this process remembers how far a queue had read.
MEMORY = 300.0


@lru_cache(maxsize=1024)
def _pattern(binding: str) -> re.Pattern[str]:
    # As Kombu's Redis transport: '#' and '*' both stand for anything, dots included.
    return re.compile(".*".join(map(re.escape, re.split(r"[#*]", binding))), re.DOTALL)


def matches(binding: str, routing_key: str) -> bool:
    """Whether a queue bound with `binding` gets a broadcast with that routing key.

    A fanout exchange of AMQP ignores both; Kombu's Redis transport compares them, and Celery's
    events rely on it. Where either is empty, it is AMQP.
    """
    if not binding or not routing_key:
        return True
    return _pattern(binding).fullmatch(routing_key) is not None


@dataclass
class Subscription:
    """A queue that is bound to a fanout exchange, and how far it has read."""

    queue: str
    exchange: str
    binding: str
    last: str  #: stream id
    #: the queue is a topic, into which whoever broadcasts puts a copy; what is read for it here
    #: is of producers of a release that did not
    kept: bool = False
    returned: list[Any] = field(default_factory=list)  #: given back unhandled by a lost connection
    left: float = 0.0  #: monotonic seconds when its consumer went away


_memory: dict[Hashable, Subscription] = {}
os.register_at_fork(after_in_child=_memory.clear)


def remember(identity: Hashable, subscription: Subscription) -> None:
    """Keep how far a queue has read, for a consumer that comes back within minutes."""
    now = time.monotonic()
    for key, old in list(_memory.items()):
        if now - old.left > MEMORY:
            del _memory[key]
    subscription.left = now
    _memory[identity, subscription.exchange, subscription.queue] = subscription


def recall(identity: Hashable, exchange: str, queue: str) -> Subscription | None:
    """What was remembered of a queue, if it is not too long ago."""
    found = _memory.pop((identity, exchange, queue), None)
    return found if found and time.monotonic() - found.left <= MEMORY else None


def broadcasting(
    center: TimeoutCenter,
    exchange: str,
    routing_key: str,
    envelope: bytes,
    length: int,
    publish: tuple[str, str],
) -> Call:
    """The call that broadcasts a message, if anybody is bound to the exchange.

    Its result is the bindings of the queues that keep a copy of their own, for :func:`keepers`:
    they are yet to be given it.

    publish: as :meth:`TimeoutCenter.put` has it
    """
    producer, name = publish
    keys = center.keys
    keys = (keys.bindings(exchange), keys.fanout(exchange), keys.sent(producer))
    args = (routing_key or "", envelope, length, RETENTION_MS, name, REMEMBER)
    return Call(load("broadcast"), keys, args, lambda raw: raw[1:])


def keepers(members: Iterable[bytes], routing_key: str) -> list[str]:
    """Of the queues that are so bound, those that get a broadcast with that routing key."""
    found = {}
    for member in members:
        binding, _, queue, *_ = json.loads(member)
        if matches(binding, routing_key or ""):
            found[queue] = None
    return list(found)


def order(id: str) -> tuple[int, int]:
    """A stream id in the order of streams."""
    ms, _, number = id.partition("-")
    return int(ms), int(number or 0)


def begin(center: TimeoutCenter, exchange: str, read: str | None = None) -> str:
    """Where a queue that is bound now begins to read: behind what is there, or where it had read
    to."""
    entries = center.client.xrevrange(center.keys.fanout(exchange), count=1)
    newest = entries[0][0].decode() if entries else BEGINNING
    # Ids are by the server's clock, or go on from the last one where that has stepped back: of a
    # stream that is yet to be made, all that comes is new, whatever it is called. So it is of one
    # that was made anew since it was read.
    if read is not None and order(read) > order(newest):
        return BEGINNING
    return read or newest


def listening(
    center: TimeoutCenter, positions: dict[str, str], block_ms: int | None = None
) -> tuple[Any, ...]:
    """The command that reads broadcasts: {exchange: last id}; and waits for some, if it may."""
    exchanges = list(positions)
    return (
        "XREAD",
        "COUNT",
        100,
        *(() if block_ms is None else ("BLOCK", block_ms)),
        "STREAMS",
        *(center.keys.fanout(exchange) for exchange in exchanges),
        *(positions[exchange] for exchange in exchanges),
    )


class Entry(NamedTuple):
    """An entry of a stream."""

    key: bytes  #: the stream's
    id: str
    routing_key: str
    envelope: bytes
    kept: bool  #: the queues that keep a copy of their own were given it


def read_entries(reply: Any) -> list[Entry]:
    """The entries of an XREAD reply."""
    found = []
    for key, entries in reply or ():
        for id, flat in entries:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            routing_key = fields.get(b"r", b"").decode("utf-8", "surrogatepass")
            found.append(
                Entry(key, id.decode(), routing_key, fields.get(b"m", b""), b"k" in fields)
            )
    return found
