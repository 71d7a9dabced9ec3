"""Names in their order, page by page: of topics, of those that have schedules, of schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..scripts.call import ScriptCall, as_bytes, load, texts
from .runner import Runner

#: Names that are compared in one call.
AT_ONCE = 500


class Kind(NamedTuple):
    """What has the names.

    name: its type, as Redis has it
    scan: how they are read, a bounded number at a time
    look: tells of several whether they are there: of one that is not, :attr:`without`
    """

    name: str
    scan: str
    look: str
    without: Any


HASH = Kind("hash", "hscan", "hmget", None)
SET = Kind("set", "sscan", "smismember", 0)
SORTED_SET = Kind("zset", "zscan", "zmscore", None)


class Names:
    """Reads a sorted set of names, which whoever adds or removes one keeps.

    An older release does not keep it. Then it has another number of members than there are names,
    and is mended by whoever notices.

    there: key of what has the names
    kind: what that is
    names: key of the sorted set
    missing: is told names that are to be added, before they are; returns those that are to be
    gone: is told names that are to be removed, before they are
    """

    def __init__(
        self,
        runner: Runner,
        there: str,
        kind: Kind,
        names: str,
        missing: Callable[[list[str]], list[str]] | None = None,
        gone: Callable[[list[str]], None] | None = None,
    ) -> None:
        self._runner = runner
        self._client = runner.client
        self._there = there
        self._kind = kind
        self._names = names
        self._missing = missing
        self._gone = gone

    def page(self, prefix: str, after: str, limit: int) -> list[str]:
        """Some names that begin with a text, behind a name; sorted."""
        return self.read(self.call(prefix, after, limit))

    def call(self, prefix: str, after: str, limit: int, where: str = "") -> ScriptCall:
        """The call of :meth:`page`. Result: None if they are to be mended first.

        where: key of another sorted set that is read instead
        """
        low = b"(" + as_bytes(after) if after and after >= prefix else b"[" + as_bytes(prefix)
        # No name in UTF-8 has this byte.
        high = b"(" + as_bytes(prefix) + b"\xff"
        return ScriptCall(
            load("names"),
            (self._there, self._names, *((where,) if where else ())),
            (low, high, limit, self._kind.name),
            lambda raw: None if raw is None else texts(raw),
        )

    def read(self, call: ScriptCall) -> list[str]:
        """Run a call of :meth:`call`, after mending what is to be mended."""
        found: list[str] | None = self._runner.run(call)
        if found is None:
            self.mend()
            found = self._runner.run(call)
        if found is None:  # others go on to add and remove some
            low, high, limit, _ = call.args
            found = texts(
                self._client.zrange(call.keys[-1], low, high, bylex=True, offset=0, num=limit)
            )
        return found

    def mend(self) -> None:
        """Have the sorted set name what there is, without holding the server up."""
        client = self._client
        for some in pages(client, self._there, self._kind.scan):
            if self._missing is not None:
                known = client.zmscore(self._names, some)
                new = [name for name, score in zip(some, known, strict=True) if score is None]
                some = self._missing(texts(new)) if new else []
            if some:
                client.zadd(self._names, dict.fromkeys(some, 0))
        for some in pages(client, self._names, "zscan"):
            there = getattr(client, self._kind.look)(self._there, some)
            without = self._kind.without
            gone = [name for name, raw in zip(some, there, strict=True) if raw == without]
            if gone:
                if self._gone is not None:
                    self._gone(texts(gone))
                client.zrem(self._names, *gone)


def pages(client: Any, key: str, scan: str) -> Iterator[list[Any]]:
    """The members of a key, a bounded number at a time; one may come twice.

    scan: the command that reads them
    """
    cursor = 0
    while True:
        cursor, some = getattr(client, scan)(key, cursor, count=AT_ONCE)
        names = [one[0] if isinstance(one, tuple) else one for one in some]
        for start in range(0, len(names), AT_ONCE):
            yield names[start : start + AT_ONCE]
        if not cursor:
            return
