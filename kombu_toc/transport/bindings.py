"""Which queues are bound to which exchange: kept in Redis, so that all processes agree."""

from __future__ import annotations

import json

from ..center import Call, TimeoutCenter
from ..scripts import load


def binding(kind: str, routing_key: str, pattern: str | None, queue: str) -> str:
    """A binding as it is kept; `kind` is the exchange's type."""
    return json.dumps([routing_key or "", pattern or "", queue, kind], separators=(",", ":"))


class Bindings:
    """The bindings of exchanges; those of transient queues go stale unless refreshed."""

    def __init__(self, center: TimeoutCenter) -> None:
        self._center = center
        self._keys = center.keys

    def add(self, exchange: str, member: str, ttl_ms: int = 0) -> int:
        """Record or refresh a binding; return Redis's clock in milliseconds.

        ttl_ms: when it goes stale unless it is refreshed; 0 for never
        """
        keys = (self._keys.bindings(exchange), self._keys.expiring)
        return self._center.run(Call(load("bind"), keys, (exchange, member, ttl_ms), int))

    def remove(self, exchange: str, member: str) -> None:
        """Forget a binding; with the last one goes the exchange's stream."""
        self._center.client.zrem(self._keys.bindings(exchange), member)
        self.of(exchange)

    def clear(self, exchange: str) -> None:
        """Forget all bindings of an exchange."""
        self._center.client.unlink(self._keys.bindings(exchange), self._keys.fanout(exchange))
        self._center.client.zrem(self._keys.expiring, f"exchange:{exchange}")

    def kept(self, exchange: str) -> list[bytes]:
        """The bindings of a fanout exchange's queues that keep a copy of their own, for
        :func:`.fanout.keepers`."""
        return self._center.client.zrangebyscore(self._keys.bindings(exchange), "+inf", "+inf")

    def kind(self, exchange: str) -> str | None:
        """The type of an exchange that something is bound to, whoever has declared it."""
        member = self._center.client.zrange(self._keys.bindings(exchange), 0, 0)
        return json.loads(member[0])[3] if member else None

    def of(self, exchange: str) -> list[tuple[str, str, str, bool]]:
        """(routing key, pattern, queue, whether the queue is transient) of each binding of an
        exchange."""
        keys = (self._keys.bindings(exchange), self._keys.fanout(exchange), self._keys.expiring)
        raw = self._center.run(Call(load("bindings"), keys, (exchange,), list))
        pairs = zip(raw[::2], raw[1::2], strict=True)
        return [(*json.loads(member)[:3], bool(transient)) for member, transient in pairs]
