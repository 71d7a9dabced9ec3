"""The bindings of queues to exchanges, kept in Redis so that all processes agree."""

from __future__ import annotations

import json
import os
import re
import time
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from ..client.connection import pipelined
from ..scripts.call import ScriptCall, literal_pattern, load
from .calls import REMEMBER
from .center import TimeoutCenter

# -- broadcasts
#
# An exchange whose messages have routing keys is split into parts, so that a queue bound to
# ``worker.#`` reads no ``task.received``, however many there are. The first word of the routing key
# picks the part. A part ``*`` has all messages, for queues that are bound to no certain first word.
# A message is written only into parts that somebody reads.
#
# The exchange's own stream is read by everybody. It has messages without a routing key.

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
    of_it = (one for one in subscriptions if one.exchange == exchange)
    return next((one for one in of_it if matches(one.binding, routing_key)), None)


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
    kept = _memory.pop((identity, queue, exchange, binding), None)
    return kept if kept and time.monotonic() - kept.left <= MEMORY else None


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
        of.parts(exchange),
        of.part(exchange, WHOLE),
        of.part(exchange, part),
    )
    args = (routing_key or "", envelope, length, RETENTION_MS, name, REMEMBER, part)
    return ScriptCall(load("broadcast"), keys, args, lambda raw: raw[1:])


def keepers(members: Iterable[bytes], routing_key: str) -> list[str]:
    """The queues of these bindings that get a broadcast with that routing key."""
    queues: dict[str, None] = {}
    for member in members:
        binding, _, queue, *_ = json.loads(member)
        if matches(binding, routing_key or ""):
            queues[queue] = None
    return list(queues)


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
    asked = (("XREVRANGE", key, "+", "-", "COUNT", 1) for key in keys)
    newest = pipelined(center.client, asked, raises=False)
    for reply in newest:
        if isinstance(reply, Exception) and "WRONGTYPE" not in str(reply):
            raise reply
    # One that another program has written is to be a new one.
    positions = {
        key: BEGINNING if isinstance(reply, Exception) else newest_of(reply)
        for key, reply in zip(keys, newest, strict=True)
    }
    for key in positions.keys() & read.keys():
        positions[key] = BEGINNING if restarted(read[key], positions[key]) else read[key]
    return positions


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


def read_page(key: str, entries: Any) -> list[Entry]:
    """The entries of one stream in an XREAD reply."""
    return [
        Entry(key, id.decode(), routing_key.decode("utf-8", "surrogatepass"), envelope)
        for id, (routing_key, envelope) in entries
    ]


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


# -- the bindings of queues to exchanges, kept in Redis so that all processes agree

#: Exchanges whose bindings a connection remembers, and routing keys of each.
MAX_TABLES = 256
MAX_FOUND = 4096


def binding(
    kind: str, routing_key: str, pattern: str | None, queue: str, part: str | None = None
) -> str:
    """A binding as it is kept in Redis.

    kind: the exchange's type
    part: the part of a fanout exchange that is read for the binding; None: no part is
    """
    parts = [routing_key or "", pattern or "", queue, kind, *([] if part is None else [part])]
    return json.dumps(parts, separators=(",", ":"))


class Bindings:
    """The bindings of exchanges. A binding of a transient queue expires unless it is refreshed."""

    def __init__(self, center: TimeoutCenter) -> None:
        self._center = center
        self._keys = center.keys

    def add(self, exchange: str, member: str, ttl_ms: int = 0) -> int:
        """Record or refresh a binding; return Redis's clock in milliseconds.

        ttl_ms: milliseconds until it expires unless it is refreshed; 0 for never
        """
        keys = self._keys
        names = (keys.bindings, lambda _: keys.expiring, keys.parts, keys.bound)
        part = "".join(json.loads(member)[4:5])
        args = (exchange, member, ttl_ms, part)
        call = ScriptCall(load("bind"), [of(exchange) for of in names], args, int)
        runner, bound = self._center.runner, self._center.registry.bound

        def known(error: Exception) -> int:  # a Cluster's node is away, and so nobody unbinds it
            if (exchange, member) not in bound:
                raise error
            return 0

        now_ms: int = runner.at_home(call.keys[0], lambda: runner.run(call), known)
        if not ttl_ms:
            bound.add((exchange, member))
        return now_ms

    def remove(self, exchange: str, *members: str) -> None:
        """Remove bindings, and those that went stale; with the last one, the exchange's streams."""
        self._center.registry.bound.difference_update((exchange, member) for member in members)
        of = self._keys
        names = (of.bindings(exchange), of.parts(exchange), of.expiring, of.bound(exchange))
        keys = [*names, *streams(self._center, exchange)]
        self._center.runner.run(ScriptCall(load("unbind"), keys, (exchange, *members), int))

    def with_queue(self, queue: str) -> list[tuple[str, str]]:
        """(exchange, binding) of each binding of a queue, whoever has made it."""
        every = self.every(f"*,{literal_pattern(json.dumps(queue))},*")
        return [(exchange, member) for exchange, member in every if json.loads(member)[2] == queue]

    def every(self, pattern: str | None = None) -> Iterator[tuple[str, str]]:
        """(exchange, binding) of each binding, or of each that matches a pattern.

        Looks through the names of all keys, so use it rarely.
        """
        stem, client = self._keys.bindings(""), self._center.client
        for raw in client.scan_iter(f"{literal_pattern(stem)}*", count=1000):
            exchange = raw.decode("utf-8", "surrogatepass")[len(stem) :]
            for member, _ in client.zscan_iter(raw, match=pattern, count=1000):
                yield exchange, member.decode()

    def clear(self, exchange: str) -> None:
        """Remove all bindings of an exchange, and its streams."""
        keys = self._keys
        named = [of(exchange) for of in (keys.bindings, keys.parts, keys.bound)]
        self._center.client.unlink(*named, *streams(self._center, exchange))
        self._center.client.zrem(keys.expiring, f"exchange:{exchange}")

    def kept(self, exchange: str) -> list[bytes]:
        """The bindings of a fanout exchange's queues that keep a copy of their own, for
        :func:`keepers`."""
        client, key = self._center.client, self._keys.bindings(exchange)
        members: list[bytes] = client.zrangebyscore(key, "+inf", "+inf")
        return members

    def kind(self, exchange: str) -> str | None:
        """The type of an exchange; None if no queue is bound to it."""
        member = self._center.client.zrange(self._keys.bindings(exchange), 0, 0)
        return json.loads(member[0])[3] if member else None


class Table:
    """The bindings of an exchange as they were read, with an index from routing keys to queues."""

    def __init__(self, version: str, raw: Sequence[Any]) -> None:
        self.version = version
        pairs = zip(raw[::2], raw[1::2], strict=True)
        bound = [(json.loads(member), bool(transient)) for member, transient in pairs]
        #: the type of the exchange, according to its first binding
        self.kind: str | None = bound[0][0][3] if bound else None
        #: (routing key, pattern, queue)
        self.rows: list[tuple[str, str, str]] = [tuple(member[:3]) for member, _ in bound]
        self.transient = frozenset(member[2] for member, transient in bound if transient)
        #: routing key -> queues, as a direct exchange has it
        self._direct: dict[str, dict[str, None]] = {}
        for routing_key, _, queue in self.rows:
            self._direct.setdefault(routing_key, {})[queue] = None
        #: index of patterns: patterns without wildcards, by routing key; patterns that begin with a
        #: word, by that word; the others
        self._whole: dict[str, list[str]] = {}
        self._begins: dict[str, list[tuple[re.Pattern[str], str]]] = {}
        self._other: list[tuple[re.Pattern[str], str]] = []
        self._arranged = False
        self._found: dict[str, list[str]] = {}

    def direct(self, routing_key: str) -> list[str]:
        """The queues that a direct exchange sends to."""
        return list(self._direct.get(routing_key, ()))

    def topic(self, routing_key: str) -> list[str]:
        """The queues that a topic exchange sends to."""
        known = self._found.get(routing_key)
        if known is None:
            if not self._arranged:
                self._arrange()
            queues = dict.fromkeys(self._whole.get(routing_key, ()))
            begins = self._begins.get(routing_key.partition(".")[0], ())
            for pattern, queue in (*begins, *self._other):
                if queue not in queues and pattern.match(routing_key):
                    queues[queue] = None
            if len(self._found) >= MAX_FOUND:  # there may be any number of routing keys
                self._found.clear()
            known = self._found[routing_key] = list(queues)
        return known

    def _arrange(self) -> None:
        compiled: dict[str, re.Pattern[str]] = {}
        for routing_key, pattern, queue in self.rows:
            if not set(routing_key) & set("#*"):
                self._whole.setdefault(routing_key, []).append(queue)
                continue
            if pattern not in compiled:  # re's own cache is small
                compiled[pattern] = re.compile(pattern)
            word, dot, _ = routing_key.partition(".")
            certain = dot and not set(word) & set("#*")
            into = self._begins.setdefault(word, []) if certain else self._other
            into.append((compiled[pattern], queue))
        self._arranged = True


class Routes:
    """The bindings of exchanges, for producers: read once, and again when they have changed.

    Each look asks the server whether they have changed, so a new binding holds from the next
    publish on.
    """

    def __init__(self, center: TimeoutCenter) -> None:
        self._center = center
        self._tables: dict[str, Table] = {}

    def of(self, exchange: str) -> Table:
        """The bindings of an exchange as they are now."""
        table = self._tables.get(exchange)
        known = "" if table is None else table.version
        keys = (self._center.keys.bindings(exchange), self._center.keys.bound(exchange))
        version, *raw = self._center.runner.run(
            ScriptCall(load("bound"), keys, (known,), list, keys_recur=True)
        )
        if table is None or version.decode() != known:
            if len(self._tables) >= MAX_TABLES:
                self._tables.clear()
            table = self._tables[exchange] = Table(version.decode(), raw)
        return table
