"""The hosts that single messages of a queue name: each has its share of what may be under way, so
that none holds up what is for the others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

#: Parts of what may be under way of which a host has one, at most: less, if there are more hosts.
SHARES = 4

#: Messages that wait for their hosts, at most, beside what may be under way.
MOST_WAITING = 1000


class Hosts:
    """What is under way to each host.

    on_wait: called when one more message waits
    """

    def __init__(self, on_wait: Callable[[], None]) -> None:
        self._on_wait = on_wait
        self._under_way: dict[str, int] = {}
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}
        #: how many messages wait for their hosts
        self.waiting = 0

    @asynccontextmanager
    async def visit(self, host: str, limit: int) -> AsyncIterator[None]:
        """In this block a message is sent to a host. It begins when that has room for it.

        limit: how many may be under way to all hosts
        """
        if host in self._queues or self._under_way.get(host, 0) >= self._share(host, limit):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queues.setdefault(host, deque()).append(turn)
            self.waiting += 1
            self._on_wait()
            try:
                await turn
            except BaseException:
                if not turn.cancelled():
                    self._leave(host, limit)
                raise
            finally:
                self.waiting -= 1
        else:
            self._begin(host)
        try:
            yield
        finally:
            self._leave(host, limit)

    def close(self) -> None:
        """Let all begin: they are given back, and not sent."""
        for host, queue in self._queues.items():
            for turn in queue:
                if not turn.done():
                    self._begin(host)
                    turn.set_result(None)
        self._queues.clear()

    def _share(self, host: str, limit: int) -> int:
        hosts = len(self._under_way) + (host not in self._under_way)
        return max(limit // max(hosts + 1, SHARES), 1)

    def _begin(self, host: str) -> None:
        self._under_way[host] = self._under_way.get(host, 0) + 1

    def _leave(self, host: str, limit: int) -> None:
        self._under_way[host] -= 1
        queue = self._queues.get(host, deque())
        while queue and self._under_way[host] < self._share(host, limit):
            turn = queue.popleft()
            if not turn.done():
                self._begin(host)
                turn.set_result(None)
        if not queue:
            self._queues.pop(host, None)
        if not self._under_way[host]:
            del self._under_way[host]
