"""What a center puts again: the same bytes under the same id, and so a row of the same key.

If that is there when the bytes are put again, it is the row of the message before. That message
has ended, or it would not have been put again; but whoever has handled it, perhaps another process,
says so a moment later. The row ends then, and the new message has none: so that is looked at once
more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import select, update

from ..center.center import TimeoutCenter
from . import statuses
from .becoming import are
from .presence import MISSING, THERE, states_in_redis
from .records import Key, Row, is_raw, now_us
from .store import CHUNK, Store

#: Seconds until the first look, and until nobody is waited for any more who might say that the
#: message before has ended: it is taken for ended then.
FIRST, LAST = 2.0, 30.0

#: Rows that are kept for that, and the bytes of their messages, at most.
MAX_ROWS = 10_000
MAX_BYTES = 16_000_000


class _Put(NamedTuple):
    """at: monotonic seconds when it was put"""

    row: Row
    at: float


class PutAgain:
    """Messages that were perhaps put again. Any thread may add some; one looks at them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._put: dict[Key, _Put] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._put)

    def add(self, rows: Sequence[Row]) -> bool:
        """These are about to be put, and there may have been rows of their keys. Returns whether
        any are to be looked at."""
        now = time.monotonic()
        with self._lock:
            for row in rows:
                if is_raw(row):
                    self._drop(row.key)
                    self._put[row.key] = _Put(row, now)
                    self._bytes += len(row.body)
            while len(self._put) > MAX_ROWS or self._bytes > MAX_BYTES:
                self._drop(next(iter(self._put)))
        return bool(self._put)

    def withdraw(self, row: Row) -> None:
        """This was not put."""
        with self._lock:
            self._drop(row.key)

    def _drop(self, key: Key) -> None:
        put = self._put.pop(key, None)
        if put is not None:
            self._bytes -= len(put.row.body)

    def look(self, center: TimeoutCenter) -> None:
        """See to it that those have rows that were put a moment ago. Raises LibraryError."""
        now = time.monotonic()
        with self._lock:
            due = [put for put in self._put.values() if now - put.at >= FIRST]
        for start in range(0, len(due), CHUNK):
            self._look_at(center, due[start : start + CHUNK], now)

    def _look_at(self, center: TimeoutCenter, some: Sequence[_Put], now: float) -> None:
        made = self._made([put.row.key for put in some])
        doubtful = [put for put in some if made.get(put.row.key) != put.row.created_us]
        states = states_in_redis(center, [put.row for put in doubtful])
        there = [one for one, state in zip(doubtful, states, strict=True) if state == THERE]
        without = [put.row for put in there if put.row.key not in made]
        if without:
            self._store.insert(without)
            # What was acknowledged between the look and the row has ended, and whoever has done
            # that says so, or has said so.
            states = states_in_redis(center, without)
            gone = [row.key for row, one in zip(without, states, strict=True) if one == MISSING]
            self._store.forget(gone)
        others = [put for put in there if put.row.key in made]
        for put in others:
            if now - put.at >= LAST:
                self._take(put.row, made[put.row.key])
        waits = {put.row.key for put in others if now - put.at < LAST}
        with self._lock:
            for put in some:
                # Not if it was put once more since.
                if put.row.key not in waits and self._put.get(put.row.key) is put:
                    self._drop(put.row.key)

    def _made(self, keys: Sequence[Key]) -> dict[Key, int]:
        """By its key, when each row was made that is there."""
        found: dict[Key, int] = {}
        for shard, some in self._store.shards.divided(keys, lambda key: key[0]).items():
            table = shard.tables.pending
            columns = (table.c.id, table.c.token, table.c.topic, table.c.created_us)
            for row in shard.database.read(select(*columns).where(are(table, some))):
                found[row["id"], row["token"], row["topic"]] = row["created_us"]
        return found

    def _take(self, row: Row, created_us: int) -> None:
        """The row that is there is this message's from now on.

        created_us: when that was made
        """
        shard = self._store.shards.of(row.id)
        table = shard.tables.pending
        which = are(table, [row.key]) & (table.c.created_us == created_us)
        values = {
            "status": statuses.PENDING,
            "place": statuses.IN_REDIS,
            "action_us": row.action_us,
            "created_us": row.created_us,
            "modified_us": now_us(),
        }
        shard.database.execute(update(table).where(which).values(**values))
