"""Which queues are bound to which exchange: kept in Redis, so that all processes agree."""

from __future__ import annotations

import json
import re

from ..center import Call, TimeoutCenter
from ..scripts import load
from .fanout import streams


def binding(
    kind: str, routing_key: str, pattern: str | None, queue: str, part: str | None = None
) -> str:
    """A binding as it is kept; `kind` is the exchange's type.

    part: what is read for it of a fanout exchange; the first release knows nothing of that
    """
    made = [routing_key or "", pattern or "", queue, kind, *([] if part is None else [part])]
    return json.dumps(made, separators=(",", ":"))


class Bindings:
    """The bindings of exchanges; those of transient queues go stale unless refreshed."""

    def __init__(self, center: TimeoutCenter) -> None:
        self._center = center
        self._keys = center.keys

    def add(self, exchange: str, member: str, ttl_ms: int = 0) -> int:
        """Record or refresh a binding; return Redis's clock in milliseconds.

        ttl_ms: when it goes stale unless it is refreshed; 0 for never
        """
        keys = self._keys
        names = (keys.bindings, lambda _: keys.expiring, keys.readers, keys.parts)
        part = "".join(json.loads(member)[4:5])
        args = (exchange, member, ttl_ms, part)
        return self._center.run(Call(load("bind"), [of(exchange) for of in names], args, int))

    def remove(self, exchange: str, *members: str) -> None:
        """Forget bindings; with the last one go the exchange's streams."""
        self.of(exchange, *members)

    def with_queue(self, queue: str) -> list[tuple[str, str]]:
        """(exchange, binding) of each binding of a queue, whoever has made it.

        Looks through the names of all keys: for what is done rarely.
        """
        stem = self._keys.bindings("")
        part = f"*,{_literally(json.dumps(queue))},*"
        found = []
        for raw in self._center.client.scan_iter(f"{_literally(stem)}*", count=1000):
            exchange = raw.decode("utf-8", "surrogatepass")[len(stem) :]
            for member, _ in self._center.client.zscan_iter(raw, match=part, count=1000):
                if json.loads(member)[2] == queue:
                    found.append((exchange, member.decode()))
        return found

    def clear(self, exchange: str) -> None:
        """Forget all bindings of an exchange."""
        keys = self._keys
        named = (keys.bindings(exchange), keys.readers(exchange), keys.parts(exchange))
        self._center.client.unlink(*named, *streams(self._center, exchange))
        self._center.client.zrem(keys.expiring, f"exchange:{exchange}")

    def kept(self, exchange: str) -> list[bytes]:
        """The bindings of a fanout exchange's queues that keep a copy of their own, for
        :func:`.fanout.keepers`."""
        return self._center.client.zrangebyscore(self._keys.bindings(exchange), "+inf", "+inf")

    def kind(self, exchange: str) -> str | None:
        """The type of an exchange that something is bound to, whoever has declared it."""
        member = self._center.client.zrange(self._keys.bindings(exchange), 0, 0)
        return json.loads(member[0])[3] if member else None

    def of(self, exchange: str, *removed: str) -> list[tuple[str, str, str, bool]]:
        """(routing key, pattern, queue, whether the queue is transient) of each binding of an
        exchange, but for those that are removed."""
        keys = self._keys
        names = (keys.bindings(exchange), keys.readers(exchange), keys.parts(exchange))
        names = (*names, keys.expiring, *streams(self._center, exchange))
        raw = self._center.run(Call(load("bindings"), names, (exchange, *removed), list))
        pairs = zip(raw[::2], raw[1::2], strict=True)
        return [(*json.loads(member)[:3], bool(transient)) for member, transient in pairs]


def _literally(text: str) -> str:
    """A text as a pattern of Redis's that only it matches."""
    return re.sub(r"([][*?\\^])", r"\\\1", text)
