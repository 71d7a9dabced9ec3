"""Looks after the library: puts into Redis what is not there."""

from __future__ import annotations

import os
import socket
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ..center.center import TimeoutCenter
from ..model.library import OFF
from ..model.topic import Declaration
from . import statuses
from .deferred import Behind
from .horizon import FarStore, Loader, is_far
from .outcomes import DAY_US
from .putting import GONE_US, DeadLetters, Putter, Schedules, missing_of, off_among
from .rebuild import LOOK_INTERVAL, Reconciler, Restored
from .records import Key, Row, now_us
from .shards import CHUNK, Asking, Database, Shard, each_asked
from .store import Store, was_tried

#: Seconds between two looks for what is not put; between attempts to be elected; and for which a
#: process is, unless it is again.
INTERVAL = 1.0
ATTEMPT_INTERVAL = 4.0
ELECTED = 12.0

#: Seconds after which one turn puts no more of what is not put, and until the next one that goes on
#: with it; rows and tables of one turn.
TURN = 0.5
ROWS, TABLES = 5000, 50

#: Databases that a second asks for what is not put, while it has found none: the next second asks
#: the next ones.
ASKED = 4

#: Seconds of this that are left for what has begun.
MARGIN = 2.0

#: Seconds after which it is looked again whether a day of history is to be dropped, and how many
#: transactions of that there are in a second.
PRUNE_INTERVAL = 3600.0
PRUNED = 5

#: Seconds after which it is looked again which queues have no rows: a rebuild names them.
OFF_INTERVAL = 60.0

#: The name under which processes agree which of them does it: no queue has it.
SPEAKER = " library"


@dataclass(eq=False)
class Keeper:
    """One process's part in it; used by one thread.

    process: its name, which another one may have, too: in each of some containers the worker is
        process 1, and they may have one host name
    retention: seconds for which history is kept
    """

    _store: Store
    center: TimeoutCenter
    _process: str
    _retention: float

    def __post_init__(self) -> None:
        urls = [str(url) for url in self._store.shards.layout.urls]
        host = socket.gethostname() if urls[0].startswith("sqlite") else ""
        self._speaker = f"{SPEAKER} {zlib.crc32(repr((urls, host)).encode()):08x}"
        self._retention_us = int(self._retention * 1_000_000)
        #: the queues that have no rows, as the library has them
        self._off: dict[str, Declaration] = {}
        #: what is left of a round of it that goes on
        self._pruning: Iterator[int] | None = None
        #: the number of the shard that was looked at last
        self._last_shard = -1
        #: the number of the database that is asked next
        self._asked = 0
        self._name = f"{self._process}/{os.urandom(6).hex()}"
        self._putter = Putter(self._store, self.center)
        self.is_restored = Restored(self._putter, self._name)
        self._reconciler = Reconciler(self._putter)
        self._loader = Loader(FarStore(self._store), self._putter, self._reconciler.watch)
        self._behind = Behind(self._store, self.center)
        #: monotonic seconds until which this process is elected, whatever becomes of attempts
        self._until = 0.0
        #: by what is done now and then, monotonic seconds of the next time
        self._next: dict[str, float] = defaultdict(float)
        #: by the number of a shard, of what may have been put and is not in Redis: its row, as key
        #: and time of the last change, and since when it is missing
        self._missing: dict[int, dict[tuple[Key, int], int]] = {}
        #: whether some were left out that are looked at again, and whether there are more to be put
        self.doubts = self.has_more = False

    @property
    def is_elected(self) -> bool:
        """Whether it is this process that looks after the library."""
        return time.monotonic() < self._until

    def _is_due(self, what: str, interval: float) -> bool:
        """Whether so many seconds have passed since this was due."""
        now = time.monotonic()
        is_due = now >= self._next[what]
        if is_due:
            self._next[what] = now + interval
        return is_due

    def turn(self) -> bool:
        """Do what is due, if no other process does; return whether there is more to do at once.
        Raises LibraryError of the first database that cannot be used; the others are looked
        after."""
        more = False
        with each_asked() as asking:
            self._check_usable(asking)
            now = time.monotonic()
            if self._is_due("attempt", ATTEMPT_INTERVAL):
                mine = self.center.notes.speaks_for([self._speaker], self._name, ELECTED)
                self._until = now + ELECTED - MARGIN if mine else 0.0
            if not (self.is_elected and self.is_restored()):
                return False
            for turn in (partial(self._loader.turn, self._until), self._behind.turn):
                with asking:
                    more = turn() or more
            if self._is_due("turn", INTERVAL):
                due: list[Callable[[], object]] = [partial(self.put_missing, self._next_asked())]
                # Once a second, whatever is left of what is put.
                if self._is_due("others", INTERVAL):
                    due += [self._look_if_due, self._prune_if_due, self._note_off_if_due]
                for do in due:
                    with asking:
                        do()
                if self.has_more:
                    self._next["turn"] = now + TURN
                    more = more or time.monotonic() >= now + TURN
        return more

    def _check_usable(self, asking: Asking) -> None:
        """Raises the error of the first database whose tables cannot be used, if no other one
        can."""
        is_usable = False
        for database in self._store.shards.awake():
            with asking:
                database.make_sure()
                is_usable = True
        if asking.error is not None and not is_usable:
            raise asking.error

    def _look_if_due(self) -> None:
        goes_on = self._reconciler.goes_on
        self._reconciler.look(begins=not goes_on and self._is_due("look", LOOK_INTERVAL))

    def _note_off_if_due(self) -> None:
        if not self._is_due("off", OFF_INTERVAL):
            return
        off = {
            one.name: one.declaration
            for one in self.center.registry.select(None)
            if one.declaration.library == OFF and not one.declaration.expires
        }
        for name, declaration in off.items():
            if self._off.get(name) != declaration:
                self._store.declarations.note(name, declaration)
        self._off = off

    def _prune_if_due(self) -> None:
        now = time.monotonic()
        pruning, self._pruning = self._pruning, None
        if pruning is None and self._is_due("prune", PRUNE_INTERVAL):
            pruning = self.pruning()
        if pruning is None:
            return
        for _ in range(PRUNED):
            if time.monotonic() < now + TURN and next(pruning, None) is None:
                return
        self._pruning = pruning  # the thread has other things to do as well

    def pruning(self) -> Iterator[int]:
        """Drop the days of history that are kept no longer, of one shard after the other; yield
        after each transaction."""
        before_us = now_us() - self._retention_us
        day = before_us // DAY_US
        dead = DeadLetters(self._store)
        with each_asked() as asking:
            for database in self._store.shards.databases:
                with asking:
                    # Asked together: most tables have nothing to be dropped.
                    have_old = self._store.with_days_before(database, day)
                    holding = self._store.holding(database, statuses.IN_DEAD_QUEUE)
                    have_dead = {shard.number for _, shard in holding}
                    for shard in self._store.shards.of_database(database):
                        if shard.number in have_old:
                            yield from self._store.pruning(shard, day)
                        if shard.number in have_dead:
                            yield from dead.pruning(shard, before_us)
                    yield from self._store.locator.pruning(database, day)
            Schedules(self._store).prune(now_us() - GONE_US)

    def _next_asked(self) -> Sequence[Database]:
        databases = self._store.shards.databases
        if self.has_more or len(databases) <= ASKED:
            return databases
        start, self._asked = self._asked, (self._asked + ASKED) % len(databases)
        return (databases * 2)[start : start + ASKED]

    def put_missing(self, databases: Sequence[Database] | None = None) -> int:
        """Put the messages of rows that say they are not in Redis, for a while; return how many. Of
        those that may be there all the same, and of those that are left, `doubts` tells.

        databases: only those of these; of all unless given
        """
        self.center.client.ping()
        self.doubts = self.has_more = False
        until = time.monotonic() + TURN
        put = looks = 0
        holding: deque[Shard] = deque()
        with each_asked() as asking:
            for database in self._store.shards.awake(databases):
                with asking:
                    found = self._store.holding(database, statuses.NOT_PUT)
                    holding += [shard for _, shard in found]
            # The next turn begins behind the table that this one has ended with.
            last = self._last_shard
            holding.rotate(-sum(shard.number <= last for shard in holding))
            while holding:
                # The thread has other things to do: what becomes of tasks is written by it.
                if looks and (time.monotonic() >= until or put >= ROWS or looks >= TABLES):
                    self.doubts = self.has_more = True
                    break
                looks += 1
                shard = holding.popleft()
                self._last_shard = shard.number
                if shard.database.rests:
                    continue
                with asking:
                    number, more = self._put_missing_of(shard)
                    put += number
                    if more:
                        holding.append(shard)
        return put

    def _put_missing_of(self, shard: Shard) -> tuple[int, bool]:
        """Put some of a shard; return how many, and whether there may be more."""
        rows = next(self._store.pages(shard, statuses.NOT_PUT, size=CHUNK), [])
        if not rows:
            return 0, False
        # Each is put by whoever has claimed it: it may have run before another looks.
        there, sure = self._sort(shard, rows)
        self._store.place(there, statuses.IN_REDIS)
        mine = self._store.claim(shard, sure)
        put = self._put_claimed(mine)
        self.doubts = self.doubts or len(there) + len(mine) < len(rows)
        return put, bool(there or mine)

    def _sort(self, shard: Shard, rows: Sequence[Row]) -> tuple[list[Key], list[Key]]:
        """Of rows that say they are not in Redis, those that are there all the same, and those that
        are not and with no worker either: it would have said so by now."""
        tried = [row for row in rows if was_tried(row)]
        missing = [(row.key, row.modified_us) for row in missing_of(self.center, tried)]
        before, now = self._missing.get(shard.number, {}), now_us()
        since = self._missing[shard.number] = {row: before.get(row, now) for row in missing}
        there = [row.key for row in tried if (row.key, row.modified_us) not in since]
        sure = [row.key for row in rows if not was_tried(row)]
        until = self._store.said_until()
        return there, sure + [key for (key, _), at in since.items() if at <= until]

    def put_some(self, keys: Sequence[Key]) -> list[Key]:
        """Put the messages of these rows, as far as these are there; return which."""
        # Whoever cannot put them must not keep them from others who can.
        self.center.client.ping()
        mine = self._store.claim_if_there(keys)
        self._put_claimed(mine)
        return [row.key for row in mine]

    def _put_claimed(self, rows: Sequence[Row]) -> int:
        try:
            # What stays in the library: who has sent it did not know its queue.
            queue = self._putter.topic
            far = {row.key for row in rows if is_far(queue(row.topic).declaration, row.action_us)}
            if far:
                self._store.place(list(far), statuses.FAR)
                rows = [row for row in rows if row.key not in far]
            put = self._putter.put_back(rows, counted=True).number
            off = off_among(self.center, rows)
            self._store.forget([row.key for row in rows if row.topic in off])
            return put
        except BaseException:
            self._store.place([row.key for row in rows], statuses.NOT_PUT)
            raise

    def close(self) -> None:
        """Close its connections to Redis."""
        self.center.client.close()
        pool = getattr(self.center.client, "connection_pool", None)
        if pool is not None:
            pool.disconnect()
