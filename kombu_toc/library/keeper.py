"""Looks after the library: puts into Redis what is not there."""

from __future__ import annotations

import time

from ..center.center import TimeoutCenter
from . import statuses
from .putting import Putter
from .store import CHUNK, Store

#: Seconds between two looks for what is not put, and for which a process is elected to do so.
INTERVAL = 1.0
ELECTED = 5.0

#: The name under which processes agree which of them does it: no queue has it.
SPEAKER = " library"


class Keeper:
    """One process's part in it; used by one thread.

    name: of the process
    """

    def __init__(self, store: Store, center: TimeoutCenter, name: str) -> None:
        self._store = store
        self._center = center
        self._name = name
        self._putter = Putter(center, store.topics)
        self._next = 0.0
        self._claims = 0

    def turn(self) -> None:
        """Do what is due, if no other process does."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + INTERVAL
        if self._center.speaks_for([SPEAKER], self._name, ELECTED):
            self.put_missing()

    def put_missing(self) -> int:
        """Put the messages of rows that say they are not in Redis; return how many."""
        self._center.client.ping()
        put = 0
        for shard in self._store.shards.all:
            while rows := self._store.page(shard, statuses.NOT_PUT, None, CHUNK):
                self._claims += 1
                by = f"{self._name}/{self._claims}"
                # Each is put by whoever has claimed it: it may have run before another looks.
                mine = self._store.claim(shard, [row.key for row in rows], by)
                try:
                    put += self._putter.put(mine)
                except BaseException:
                    self._store.place([row.key for row in mine], statuses.NOT_PUT)
                    raise
                if len(rows) < CHUNK:
                    break
        return put

    def close(self) -> None:
        """Close its connections to Redis."""
        self._center.client.close()
        pool = getattr(self._center.client, "connection_pool", None)
        if pool is not None:
            pool.disconnect()
