"""Looks after the library: puts into Redis what is not there."""

from __future__ import annotations

import math
import os
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial

from ..center.center import TimeoutCenter
from ..errors import LibraryError
from . import statuses
from .becoming import DAY_US
from .behind import Behind
from .dead import DeadLetters
from .far import is_far
from .far_store import FarStore
from .loader import Loader
from .putting import Putter
from .reconcile import LOOK_INTERVAL, Reconciler
from .records import Key, Row, now_us
from .returning import Returner, off_among
from .shards import Shard
from .store import CHUNK, Store

#: Seconds between two looks for what is not put; between attempts to be elected; and for which a
#: process is, unless it is again.
INTERVAL = 1.0
ATTEMPT_INTERVAL = 4.0
ELECTED = 12.0

#: Seconds after which one turn puts no more of what is not put.
TURN = 0.5

#: Seconds of this that are left for what has begun.
MARGIN = 2.0

#: Seconds after which it is looked again whether a day of history is to be dropped.
PRUNE_INTERVAL = 3600.0

#: The name under which processes agree which of them does it: no queue has it.
SPEAKER = " library"


class Keeper:
    """One process's part in it; used by one thread.

    process: its name, which another one may have, too: in each of some containers the worker is
        process 1, and they may have one host name
    retention: seconds for which history is kept
    ready: raises LibraryError if these databases, or all, cannot be used
    """

    def __init__(
        self,
        store: Store,
        center: TimeoutCenter,
        process: str,
        retention: float,
        ready: Callable[..., None] = lambda databases=None: None,
    ) -> None:
        urls = [str(one.url) for one in store.shards.databases]
        host = socket.gethostname() if urls[0].startswith("sqlite") else ""
        self._speaker = f"{SPEAKER} {zlib.crc32(repr((urls, host)).encode()):08x}"
        self._retention_us = int(retention * 1_000_000)
        self._next_prune = 0.0
        self._store = store
        self._ready = ready
        self.center = center
        self._name = f"{process}/{os.urandom(6).hex()}"
        self._putter = Putter(center, store.topics, store.take_over)
        self._reconciler = Reconciler(store, center, self._putter)
        self._returner = Returner(store, center, self._putter)
        self._loader = Loader(FarStore(store), center, self._putter, self._reconciler.watch)
        self._behind = Behind(store, center)
        #: monotonic seconds until which nobody else is elected
        self._until = 0.0
        #: monotonic seconds of the next attempt to be elected, turn and look
        self._next_attempt = self._next_turn = self._next_look = 0.0
        self._elected = False
        self._claims = 0
        #: whether some were left out that are looked at again, and whether there are more to be put
        self.doubts = self.has_more = False

    def turn(self) -> bool:
        """Do what is due, if no other process does; return whether there is more to do at once.
        Raises LibraryError of the first database that cannot be used; the others are looked
        after."""
        error = self._first_unusable()
        now = time.monotonic()
        if now >= self._next_attempt:
            self._next_attempt = now + ATTEMPT_INTERVAL
            self._elected = bool(self.center.speaks_for([self._speaker], self._name, ELECTED))
            self._until = now + ELECTED - MARGIN
        if not self._elected:
            if error is not None:
                raise error
            return False
        more = False
        for turn in (partial(self._loader.turn, self._until), self._behind.turn):
            try:
                more = turn() or more
            except LibraryError as exc:  # another database may be there
                error = error or exc
        if now >= self._next_turn:
            self._next_turn = now + INTERVAL
            for do in (self.put_missing, self._look_if_due, self._prune_if_due):
                try:
                    do()
                except LibraryError as exc:
                    error = error or exc
            if self.has_more:
                self._next_turn, more = now, True
        if error is not None:
            raise error
        return more

    def _first_unusable(self) -> LibraryError | None:
        """The error of the first database whose tables cannot be used; raises it if no other one
        can."""
        errors, usable = [], False
        for database in self._store.shards.databases:
            if database.rests:
                continue  # it was away a moment ago
            try:
                self._ready([database])
                usable = True
            except LibraryError as exc:
                errors.append(exc)
        if errors and not usable:
            raise errors[0]
        return errors[0] if errors else None

    def _look_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_INTERVAL
            self._reconciler.look()

    def _prune_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._next_prune:
            self._next_prune = now + PRUNE_INTERVAL
            if not self.prune(now + TURN):
                self._next_prune = now  # the thread has other things to do as well

    def prune(self, until: float = math.inf) -> bool:
        """Drop the days of history that are kept no longer; return whether all are gone.

        until: monotonic seconds after which nothing more is begun
        """
        before_us = now_us() - self._retention_us
        _, all_of_them = self._store.prune(before_us // DAY_US, until)
        DeadLetters(self._store).prune(before_us)
        return all_of_them

    def put_missing(self) -> int:
        """Put the messages of rows that say they are not in Redis, for a while; return how many. Of
        those that may be there all the same, and of those that are left, `doubts` tells."""
        self.center.client.ping()
        self.doubts = self.has_more = False
        until = time.monotonic() + TURN
        put, error = 0, None
        for shard in self._store.shards.awake():
            try:
                self._ready([shard.database])
                put += self._put_missing_of(shard, until)
            except LibraryError as exc:
                error = error or exc
        if error is not None:
            raise error
        return put

    def _put_missing_of(self, shard: Shard, until: float) -> int:
        put = 0
        while rows := self._store.page(shard, statuses.NOT_PUT, None, CHUNK):
            if put and time.monotonic() >= until:
                # The thread has other things to do: what becomes of tasks is written by it.
                self.doubts = self.has_more = True
                break
            self._claims += 1
            by = f"{self._name}/{self._claims}"
            # Each is put by whoever has claimed it: it may have run before another looks.
            mine = self._store.claim(shard, [row.key for row in rows], by)
            put += self._put_claimed(mine)
            self.doubts = self.doubts or len(mine) < len(rows)
            if not mine:
                break
        return put

    def put_some(self, keys: Sequence[Key]) -> list[Key]:
        """Put the messages of these rows, as far as these are there; return which."""
        # Whoever cannot put them must not keep them from others who can.
        self.center.client.ping()
        self._claims += 1
        mine = self._store.claim_if_there(keys, f"{self._name}/{self._claims}")
        self._put_claimed(mine)
        return [row.key for row in mine]

    def _put_claimed(self, rows: Sequence[Row]) -> int:
        try:
            far = {row.key for row in rows if self._is_far(row)}
            if far:
                self._store.place(list(far), statuses.FAR)
                rows = [row for row in rows if row.key not in far]
            put = self._returner.put(rows).number
            off = off_among(self.center, rows)
            self._store.forget([row.key for row in rows if row.topic in off])
            return put
        except BaseException:
            self._store.place([row.key for row in rows], statuses.NOT_PUT)
            raise

    def _is_far(self, row: Row) -> bool:
        """Whether it stays in the library: who has sent it did not know its queue."""
        return is_far(self._putter.topic(row.topic).declaration, row.action_us)

    def close(self) -> None:
        """Close its connections to Redis."""
        self.center.client.close()
        pool = getattr(self.center.client, "connection_pool", None)
        if pool is not None:
            pool.disconnect()
