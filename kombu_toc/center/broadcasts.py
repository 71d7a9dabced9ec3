"""Broadcasts: fanout exchanges as streams, so that a consumer that reconnects misses nothing.

An exchange whose messages have routing keys is split into parts, so that a queue bound to
``worker.#`` reads no ``task.received``, however many there are. The first word of the routing key
picks the part. A part ``*`` has all messages, for queues that are bound to no certain first word.
A message is written only into parts that somebody reads.

The exchange's own stream is read by everybody. It has messages without a routing key, and all
messages while a reader of the first release is there, which knows no parts.
"""

from __future__ import annotations

import json
import os
import re
import time
import zlib
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from ..scripts.call import ScriptCall, load
from .center import TimeoutCenter
from .requests import REMEMBER

#: Milliseconds after which a stream that nothing is added to goes away.
RETENTION_MS = 600_000

#: Entries that one command reads from a stream.
PAGE = 100

#: Parts of an exchange. First words of routing keys share them.
PARTS = 32

#: The part that has the messages of all parts.
WHOLE = "*"

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


def part_of_key(routing_key: str) -> str:
    """The part that a broadcast with a routing key goes into; empty for the exchange's own
    stream."""
    word = routing_key.partition(".")[0]
    return str(zlib.crc32(word.encode("utf-8", "surrogatepass")) % PARTS) if routing_key else ""


def part_of_binding(binding: str) -> str:
    """The part that has all messages of a queue that is bound like this."""
    word, dot, _ = binding.partition(".")
    certain = dot and not set(word) & set("#*")
    return part_of_key(binding) if certain else WHOLE


def streams(center: TimeoutCenter, exchange: str) -> list[str]:
    """The keys of all streams that an exchange may have."""
    parts = (WHOLE, *map(str, range(PARTS)))
    return [center.keys.fanout(exchange), *(center.keys.part(exchange, part) for part in parts)]


@dataclass(eq=False)
class Subscription:
    """One binding of a queue to a fanout exchange, and how far the queue has read."""

    queue: str
    exchange: str
    binding: str
    last: dict[str, str]  #: key of a stream that is read -> id of the last entry
    #: the queue is a topic, and producers put a copy into it; what is read here comes from
    #: producers of an older release, which put none
    kept: bool = False
    #: messages that were read and not handled, or released by a lost connection; of all bindings
    #: of the queue
    returned: list[Any] = field(default_factory=list)
    left: float = 0.0  #: monotonic seconds when its consumer went away

    @property
    def bound(self) -> tuple[str, str, str]:
        """Identifies the subscription among those of a channel."""
        return (self.queue, self.exchange, self.binding)


def first_that_matches(
    subscriptions: Iterable[Subscription], exchange: str, routing_key: str
) -> Subscription | None:
    """The subscription by which a queue gets a broadcast: one, however many match."""
    for one in subscriptions:
        if one.exchange == exchange and matches(one.binding, routing_key):
            return one
    return None


_memory: dict[Hashable, Subscription] = {}
os.register_at_fork(after_in_child=_memory.clear)


def remember(identity: Hashable, subscription: Subscription) -> None:
    """Remember how far a queue has read, for a consumer that comes back within MEMORY seconds."""
    now = time.monotonic()
    for key, old in list(_memory.items()):
        if now - old.left > MEMORY:
            del _memory[key]
    subscription.left = now
    key = (identity, *subscription.bound)
    _memory[key] = subscription


def recall(identity: Hashable, queue: str, exchange: str, binding: str) -> Subscription | None:
    """Take what :func:`remember` has kept; None if it is older than MEMORY seconds."""
    found = _memory.pop((identity, queue, exchange, binding), None)
    return found if found and time.monotonic() - found.left <= MEMORY else None


def broadcast_call(
    center: TimeoutCenter,
    exchange: str,
    routing_key: str,
    envelope: bytes,
    length: int,
    publish: tuple[str, str],
) -> ScriptCall:
    """The call that broadcasts a message, if any queue is bound to the exchange.

    publish: (producer, name of this publish), as of :meth:`TimeoutCenter.put`

    Result: the bindings of queues that keep a copy of their own, for :func:`keepers`. The caller
    puts the copies.
    """
    producer, name = publish
    of = center.keys
    part = part_of_key(routing_key or "")
    keys = (
        of.bindings(exchange),
        of.fanout(exchange),
        of.sent(producer),
        of.readers(exchange),
        of.parts(exchange),
        of.part(exchange, WHOLE),
        of.part(exchange, part),
    )
    args = (routing_key or "", envelope, length, RETENTION_MS, name, REMEMBER, part)
    return ScriptCall(load("broadcast"), keys, args, lambda raw: raw[1:])


def keepers(members: Iterable[bytes], routing_key: str) -> list[str]:
    """The queues of these bindings that get a broadcast with that routing key."""
    found: dict[str, None] = {}
    for member in members:
        binding, _, queue, *_ = json.loads(member)
        if matches(binding, routing_key or ""):
            found[queue] = None
    return list(found)


def order(id: str) -> tuple[int, int]:
    """Sort key of a stream id."""
    ms, _, number = id.partition("-")
    return int(ms), int(number or 0)


def restarted(read: str, newest: str) -> bool:
    """Whether a stream was deleted and created again since it was read.

    read: id of the last entry that was read
    newest: id of the newest entry now

    Ids follow the server's clock, or go on from the last one if the clock has stepped back. So the
    entries of the new stream may have ids below `read`.
    """
    return order(read) > order(newest)


def newest_of(entries: Any) -> str:
    """The id of the newest entry, from a reply to XREVRANGE with a count of 1."""
    return entries[0][0].decode() if entries else BEGINNING


def begin(center: TimeoutCenter, keys: Iterable[str], read: dict[str, str]) -> dict[str, str]:
    """Where a queue that is bound now begins to read: {key of a stream: id of the last entry read}.

    keys: the streams
    read: how far the queue had read; it goes on there. In other streams, it begins behind the
        newest entry; in a stream that does not exist, at the beginning
    """
    keys = list(keys)
    with center.client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.xrevrange(key, count=1)
        found = dict(zip(keys, map(newest_of, pipe.execute()), strict=True))
    for key in found.keys() & read.keys():
        found[key] = BEGINNING if restarted(read[key], found[key]) else read[key]
    return found


def read_command(positions: dict[str, str], block_ms: int | None = None) -> tuple[Any, ...]:
    """The command that reads broadcasts.

    positions: {key of a stream: id of the last entry read}
    block_ms: milliseconds to wait for an entry; without it, the command does not wait
    """
    block = () if block_ms is None else ("BLOCK", block_ms)
    return ("XREAD", "COUNT", PAGE, *block, "STREAMS", *positions, *positions.values())


class Entry(NamedTuple):
    """An entry of a stream."""

    key: str  #: the stream's
    id: str
    routing_key: str
    envelope: bytes
    kept: bool  #: the queues that keep a copy of their own were given it


def read_page(key: str, entries: Any) -> list[Entry]:
    """The entries of one stream in an XREAD reply."""
    page = []
    for id, flat in entries:
        if len(flat) == 2:  # in a part
            routing_key = flat[0].decode("utf-8", "surrogatepass")
            page.append(Entry(key, id.decode(), routing_key, flat[1], True))
            continue
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        routing_key = fields.get(b"r", b"").decode("utf-8", "surrogatepass")
        page.append(Entry(key, id.decode(), routing_key, fields.get(b"m", b""), b"k" in fields))
    return page


def in_order(pages: list[list[Entry]]) -> list[Entry]:
    """The entries of several streams of one exchange, in the order in which they were broadcast.

    If a page is full, its stream may have more entries. Later entries of other streams are left
    out; they will be read again with those.
    """
    if len(pages) < 2:
        return pages[0] if pages else []
    entries = sorted((order(entry.id), n, entry) for page in pages for n, entry in enumerate(page))
    horizon = min((order(page[-1].id) for page in pages if len(page) >= PAGE), default=None)
    return [entry for id, _, entry in entries if horizon is None or id <= horizon]
