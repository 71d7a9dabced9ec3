"""The names of topics in their order, page by page."""

from __future__ import annotations

from typing import Any

from ..model.keys import Keys
from ..scripts.call import ScriptCall, as_bytes, texts
from ..scripts.loader import load
from .runner import Runner

#: Names that are compared in one call.
_AT_ONCE = 500


class Names:
    """Reads the sorted set of names, which whoever declares or deletes a topic keeps.

    An older release does not keep it. Then it has another number of members than there are topics,
    and is mended by whoever notices.
    """

    def __init__(self, runner: Runner, keys: Keys) -> None:
        self._runner = runner
        self._client = runner.client
        self._keys = keys

    def page(self, prefix: str, after: str, limit: int) -> list[str]:
        """Some names that begin with a text, behind a name; sorted."""
        low = b"(" + as_bytes(after) if after and after >= prefix else b"[" + as_bytes(prefix)
        # No name in UTF-8 has this byte.
        high = b"(" + as_bytes(prefix) + b"\xff"
        call = ScriptCall(
            load("names"),
            (self._keys.topics, self._keys.names),
            (low, high, limit),
            lambda raw: None if raw is None else texts(raw),
        )
        found: list[str] | None = self._runner.run(call)
        if found is None:
            self._mend()
            found = self._runner.run(call)
        if found is None:  # others go on to declare and delete topics
            names = texts(
                self._client.zrange(self._keys.names, low, high, bylex=True, offset=0, num=limit)
            )
            found = names
        return found

    def _mend(self) -> None:
        """Have the sorted set name the topics that there are, without holding the server up."""
        client, keys = self._client, self._keys
        for some in self._pages(keys.topics, "hscan"):
            client.zadd(keys.names, dict.fromkeys(some, 0))
        for some in self._pages(keys.names, "zscan"):
            there = client.hmget(keys.topics, some)
            gone = [name for name, raw in zip(some, there, strict=True) if raw is None]
            if gone:
                client.zrem(keys.names, *gone)

    def _pages(self, key: str, command: str) -> Any:
        """The members of a key, a bounded number at a time; one may come twice."""
        cursor = 0
        while True:
            cursor, some = getattr(self._client, command)(key, cursor, count=_AT_ONCE)
            names = [one[0] if isinstance(one, tuple) else one for one in some]
            for start in range(0, len(names), _AT_ONCE):
                yield names[start : start + _AT_ONCE]
            if not cursor:
                return
