"""The bindings of queues to exchanges, kept in Redis so that all processes agree."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..scripts.call import ScriptCall, literal_pattern, load
from .broadcasts import streams
from .center import TimeoutCenter

#: Exchanges whose bindings a connection remembers, and routing keys of each.
MAX_TABLES = 256
MAX_FOUND = 4096

#: Seconds after which bindings are read again even if their version is the same; the same for an
#: exchange with more than MANY bindings.
READ_AGAIN = 1.0
READ_ALL_AGAIN = 60.0
MANY = 100


def binding(
    kind: str, routing_key: str, pattern: str | None, queue: str, part: str | None = None
) -> str:
    """A binding as it is kept in Redis.

    kind: the exchange's type
    part: the part of a fanout exchange that is read for the binding; None in the first release
    """
    made = [routing_key or "", pattern or "", queue, kind, *([] if part is None else [part])]
    return json.dumps(made, separators=(",", ":"))


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
        names = (keys.bindings, lambda _: keys.expiring, keys.readers, keys.parts, keys.bound)
        part = "".join(json.loads(member)[4:5])
        args = (exchange, member, ttl_ms, part)
        call = ScriptCall(load("bind"), [of(exchange) for of in names], args, int)
        now_ms: int = self._center.run(call)
        return now_ms

    def remove(self, exchange: str, *members: str) -> None:
        """Remove bindings; with the last one, the exchange's streams."""
        self.of(exchange, *members)

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
        named = [of(exchange) for of in (keys.bindings, keys.readers, keys.parts, keys.bound)]
        self._center.client.unlink(*named, *streams(self._center, exchange))
        self._center.client.zrem(keys.expiring, f"exchange:{exchange}")

    def kept(self, exchange: str) -> list[bytes]:
        """The bindings of a fanout exchange's queues that keep a copy of their own, for
        :func:`.broadcasts.keepers`."""
        client, key = self._center.client, self._keys.bindings(exchange)
        members: list[bytes] = client.zrangebyscore(key, "+inf", "+inf")
        return members

    def kind(self, exchange: str) -> str | None:
        """The type of an exchange; None if no queue is bound to it."""
        member = self._center.client.zrange(self._keys.bindings(exchange), 0, 0)
        return json.loads(member[0])[3] if member else None

    def of(self, exchange: str, *removed: str) -> list[tuple[str, str, str, bool]]:
        """Remove some bindings of an exchange; return (routing key, pattern, queue, whether the
        queue is transient) of each of the others."""
        keys = self._keys
        names = (
            keys.bindings(exchange),
            keys.readers(exchange),
            keys.parts(exchange),
            keys.expiring,
            keys.bound(exchange),
            *streams(self._center, exchange),
        )
        raw = self._center.run(ScriptCall(load("bindings"), names, (exchange, *removed), list))
        pairs = zip(raw[::2], raw[1::2], strict=True)
        return [(*json.loads(member)[:3], bool(transient)) for member, transient in pairs]


class Table:
    """The bindings of an exchange as they were read, with an index from routing keys to queues.

    read_at: monotonic seconds when they were read
    """

    def __init__(self, version: str, raw: Sequence[Any], read_at: float = 0.0) -> None:
        self.version = version
        self.read_at = read_at
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

    @property
    def many(self) -> bool:
        """Whether it takes long to read the bindings."""
        return len(self.rows) > MANY

    def is_old(self, now: float) -> bool:
        """Whether the bindings are to be read again. now: monotonic seconds"""
        return now - self.read_at >= (READ_ALL_AGAIN if self.many else READ_AGAIN)

    def direct(self, routing_key: str) -> list[str]:
        """The queues that a direct exchange sends to."""
        return list(self._direct.get(routing_key, ()))

    def topic(self, routing_key: str) -> list[str]:
        """The queues that a topic exchange sends to."""
        found = self._found.get(routing_key)
        if found is None:
            if not self._arranged:
                self._arrange()
            queues = dict.fromkeys(self._whole.get(routing_key, ()))
            begins = self._begins.get(routing_key.partition(".")[0], ())
            for pattern, queue in (*begins, *self._other):
                if queue not in queues and pattern.match(routing_key):
                    queues[queue] = None
            if len(self._found) >= MAX_FOUND:  # there may be any number of routing keys
                self._found.clear()
            found = self._found[routing_key] = list(queues)
        return found

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

    Each look asks the server whether they have changed, so that a new binding holds from the next
    publish on. A process of the first release that replaces one binding by another does not change
    the version. Therefore bindings are also read again from time to time, and if no queue is bound
    to a routing key.

    clock: monotonic seconds
    """

    def __init__(self, center: TimeoutCenter, clock: Callable[[], float] = time.monotonic) -> None:
        self._center = center
        self._clock = clock
        self._tables: dict[str, Table] = {}
        #: exchange -> monotonic seconds when its bindings were read although they had not changed
        self._read_again: dict[str, float] = {}

    def of(self, exchange: str, known: str | None = None) -> Table:
        """The bindings of an exchange as they are now.

        known: the version that is not read again; the remembered one, if None
        """
        table = self._tables.get(exchange)
        if known is None:
            fresh = table is not None and not table.is_old(self._clock())
            known = table.version if table is not None and fresh else ""
        keys = (self._center.keys.bindings(exchange), self._center.keys.bound(exchange))
        version, *raw = self._center.run(
            ScriptCall(load("bound"), keys, (known,), list, keys_recur=True)
        )
        version = version.decode()
        if table is None or version != known:
            if len(self._tables) >= MAX_TABLES:
                self._tables.clear()
                self._read_again.clear()
            table = self._tables[exchange] = Table(version, raw, self._clock())
        return table

    def anew(self, exchange: str) -> Table:
        """As :meth:`of`, but read again, because no queue was found for a routing key.

        An exchange with many bindings is read at most once a second; in between, the remembered
        bindings are returned.
        """
        now = self._clock()
        table = self._tables.get(exchange)
        if table is None or (table.many and now < self._read_again.get(exchange, 0.0)):
            return table or self.of(exchange)
        self._read_again[exchange] = now + READ_AGAIN
        return self.of(exchange, known="")
