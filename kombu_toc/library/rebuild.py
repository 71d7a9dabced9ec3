"""Puts back into Redis what is pending: after it was lost, flushed, or replaced by an empty one."""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import NamedTuple

from sqlalchemy import select

from ..center.center import TimeoutCenter
from ..errors import LibraryError
from ..model.library import OFF, Rebuilt
from . import statuses
from .ahead import reading_ahead
from .dead import DeadLetters
from .guard import ended_rows
from .pages import together
from .presence import MISSING, states_in_redis
from .putting import Putter
from .records import Key, Row, expires_us, lease_us, now_us
from .returning import Returned, Returner
from .schedules import Schedules
from .schema import LAYOUT
from .shards import Database, Shard
from .store import Store, chunks

#: Rows that a statement reads, and that are put together.
PAGE = TOGETHER = 2000

#: Microseconds ahead within which a message may be delivered before it is put.
SOON_US = 5_000_000

#: Seconds after which a worker has said that it has had a message, and after which a publish that
#: has written its row has put its message.
SETTLE = 1.5
YOUNG = 0.5

#: Seconds for which a rebuild waits to know how many rows there are, as it begins and as it ends.
FEW = 0.5
LAST = 5.0


def rows_by_time(store: Store, shard: Shard, place: int) -> Iterator[Row]:
    """The rows of a shard, the soonest first, a page at a time."""
    after = None
    while page := store.page(shard, place, after, PAGE):
        yield from page
        last = page[-1]
        after = (last.action_us, *last.key)


class _Batch(NamedTuple):
    """What has come of some rows.

    number: how many rows that is
    wanted: those that are to be in Redis
    taken, ended: how many are left to the workers that have them, and how many have ended
    """

    number: int
    wanted: list[Row]
    taken: int
    ended: int


class _Doubt(NamedTuple):
    """A row that may be under way to a worker, or back: it is looked at once more.

    at: monotonic seconds when
    """

    at: float
    row: Row


class _Total:
    """How many rows there are: to count many takes long, and nothing waits for that."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: int | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._count, name="toc-count", daemon=True)
        self._thread.start()
        self._thread.join(FEW)

    def _count(self) -> None:
        # It is an estimate that is missing then, and no more.
        with suppress(Exception):
            self._rows = self._store.count_pending(self._stopping.is_set)

    def of(self, rows: int) -> int:
        """The number, if so many have been looked at; 0: it is not known yet."""
        return 0 if self._rows is None else max(self._rows, rows)

    def __enter__(self) -> _Total:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """All rows were looked at, or an error ends it: have no more counted. Wait a moment for
        the statement that runs, but not with an error: who has rebuilt may close the library."""
        self._stopping.set()
        if kind is None:
            self._thread.join(LAST)


class Rebuild:
    """One rebuild. What is done already is found out as it goes: it can be repeated.

    ready: raises LibraryError if these databases cannot be used
    """

    def __init__(
        self,
        store: Store,
        center: TimeoutCenter,
        ready: Callable[[Sequence[Database]], None] = lambda databases: None,
    ) -> None:
        self._store = store
        self._center = center
        self._ready = ready
        #: the databases that are away, and what has said so
        self._away: dict[Database, LibraryError] = {}
        self._putter = Putter(center, store.topics, store.take_over)
        self._returner = Returner(store, center, self._putter)
        self._doubts: deque[_Doubt] = deque()
        self._name = f"rebuild/{os.urandom(6).hex()}"
        self._claims = 0

    def run(self, on_progress: Callable[[Rebuilt], None] | None = None) -> Rebuilt:
        """Put back what is pending. Raises LibraryError: if another database is there, when what
        that one has is put back."""
        store, databases = self._store, self._store.shards.databases
        began = time.monotonic()
        for database in databases:
            self._look(database)
        if len(self._away) == len(databases):
            raise next(iter(self._away.values()))
        self._restore_queues()
        done = Rebuilt(0, 0, 0, 0, 0)
        places = (statuses.IN_REDIS, statuses.NOT_PUT)
        sources = [self._rows(shard, place) for shard in store.shards.all for place in places]
        soonest = heapq.merge(*sources, key=attrgetter("action_us"))

        def batches() -> Iterator[_Batch]:
            for batch in together(soonest, TOGETHER):
                yield self._wanted(batch)
                yield from self._settled()
            while self._doubts:
                time.sleep(max(self._doubts[0].at - time.monotonic(), 0.0))
                yield from self._settled()

        # The database works while Redis does.
        with _Total(store) as total, reading_ahead(batches) as read:
            for number, wanted, taken, ended in read:
                put = self._put(wanted)
                done = Rebuilt(
                    done.rows + number,
                    total.of(done.rows + number),
                    done.put + put.number,
                    done.taken + taken,
                    done.ended + ended + put.expired,
                )
                if on_progress is not None:
                    on_progress(done)
        done = done._replace(of_rows=max(total.of(done.rows), done.rows))
        others = 0
        for database in databases:
            if database in self._away:
                continue
            with self._noting(database):
                if Schedules(store).any_before(database, now_us() + SOON_US):
                    # A worker that has taken a firing says so soon.
                    time.sleep(max(began + SETTLE - time.monotonic(), 0.0))
                others += Schedules(store).rebuild(self._center, self._putter, database)
                others += DeadLetters(store).rebuild(self._center, self._putter, database)
        off = [
            topic.name
            for topic in self._center.registry.select(None)
            if topic.declaration.library == OFF and not topic.declaration.expires
        ]
        done = done._replace(put=done.put + others, not_kept=tuple(sorted(off)))
        if others and on_progress is not None:
            on_progress(done)
        if self._away:
            raise LibraryError(
                f"what {' and '.join(str(one.url) for one in self._away)} has is not put back: "
                f"{next(iter(self._away.values()))}; what the others have is in Redis: {done.put} "
                "messages were put; rebuild again when it answers"
            )
        return done

    def _restore_queues(self) -> None:
        """Alter and pause queues as operators had, before anything is delivered."""
        registry = self._center.registry
        for name, kept in self._store.declarations.all().items():
            self._center.forget(name)  # Redis may have been lost since it was read
            if not kept.altered and not kept.paused:
                continue
            while True:
                topic = self._putter.topic(name)
                if registry.redeclare(topic, kept.over(topic.declaration)):
                    break
            if kept.paused:
                self._center.client.sadd(self._center.keys.paused, name)

    def _look(self, database: Database) -> None:
        """See whether a database can be used."""
        with self._noting(database):
            self._ready([database])
            database.read(select(LAYOUT))

    @contextmanager
    def _noting(self, database: Database) -> Iterator[None]:
        """Within this, a database is asked: if it is away, that is noted."""
        try:
            yield
        except LibraryError as exc:
            self._away[database] = exc

    def _rows(self, shard: Shard, place: int) -> Iterator[Row]:
        """The rows of a shard, until its database is away."""
        if shard.database not in self._away:
            with self._noting(shard.database):
                for row in rows_by_time(self._store, shard, place):
                    if place == statuses.NOT_PUT:
                        self._store.mover.bring_home(shard, [row.key])
                    yield row

    def _by_database(self, rows: Sequence[Row]) -> Iterator[tuple[Database, list[Row]]]:
        """Rows, by their databases, but for those of a database that is away: what it had said of
        them may not be so any more."""
        found: dict[Database, list[Row]] = defaultdict(list)
        for row in rows:
            found[self._store.shards.of_key(row.key).database].append(row)
        for database, some in found.items():
            if database not in self._away:
                yield database, some

    def _put(self, rows: Sequence[Row]) -> Returned:
        """Put some rows, as far as their databases answer."""
        number, expired = 0, 0
        there: list[Row] = []
        for database, some in self._by_database(rows):
            # What one that is away was to be told is not told to the next.
            self._putter.expired = []
            with self._noting(database):
                put = self._put_of_one(some)
                number, expired = number + put.number, expired + put.expired
                there += put.rows
        return Returned(number, there, expired)

    def _put_of_one(self, rows: Sequence[Row]) -> Returned:
        """Put rows of one database; those that are not in Redis, as far as they say, if nobody
        else does."""
        certain = [row for row in rows if row.place != statuses.NOT_PUT]
        claimed = self._claim([row for row in rows if row.place == statuses.NOT_PUT])
        try:
            return self._returner.put([*certain, *claimed])
        except BaseException:
            with suppress(LibraryError):  # the next rebuild looks whether they are there
                self._store.place([row.key for row in claimed], statuses.NOT_PUT)
            raise

    def _claim(self, rows: Sequence[Row]) -> list[Row]:
        found: list[Row] = []
        for shard, some in self._store.shards.divided(rows, attrgetter("key")).items():
            for chunk in chunks(some):
                self._claims += 1
                by = f"{self._name}/{self._claims}"
                found += self._store.claim(shard, [row.key for row in chunk], by)
        return found

    def _wanted(self, batch: list[Row]) -> _Batch:
        """Of some rows, those that are to be in Redis; how many are left to the workers that have
        taken them, and how many have ended."""
        found = self._sorted(batch)
        soon = now_us() + SOON_US
        near = [
            row for row in found.wanted if row.action_us <= soon and row.place != statuses.NOT_PUT
        ]
        if not near:
            return found
        # What is due, and not in Redis, may be with a worker, or have just been: that is not known
        # here before the worker has said so.
        now = time.monotonic()
        states = states_in_redis(self._center, near)
        held = [row for row, state in zip(near, states, strict=True) if state == MISSING]
        for row in held:
            # By the clock of its sender, which may be wrong.
            young = min(max(YOUNG - (now_us() - row.created_us) / 1e6, 0.0), YOUNG)
            self._doubts.append(_Doubt(now + SETTLE + young, row))
        left = {row.key for row in near}
        wanted = [row for row in found.wanted if row.key not in left]
        return found._replace(number=found.number - len(held), wanted=wanted)

    def _settled(self) -> Iterator[_Batch]:
        """Rows that were looked at before, and of which nothing was heard since."""
        now = time.monotonic()
        rows: list[Row] = []
        while self._doubts and self._doubts[0].at <= now and len(rows) < TOGETHER:
            rows.append(self._doubts.popleft().row)
        if not rows:
            return
        number = 0
        same: list[Row] = []
        for database, some in self._by_database(rows):
            with self._noting(database):
                moments = self._store.moments([row.key for row in some])
                number += len(some)
                same += [row for row in some if moments.get(row.key) == row.modified_us]
        states = states_in_redis(self._center, same)
        missing = [row for row, state in zip(same, states, strict=True) if state == MISSING]
        found = self._sorted(missing)
        lost = len(missing) - found.number  # those of a database that has just gone away
        yield found._replace(number=number - lost, ended=found.ended + number - len(same))

    def _sorted(self, batch: Sequence[Row]) -> _Batch:
        """What has come of rows, but for those of databases that are away."""
        over: set[Key] = set()
        known: list[Row] = []
        for database, some in self._by_database(batch):
            with self._noting(database):
                over |= ended_rows(self._store, some)
                known += some
        if len(known) == len(batch):
            known = list(batch)  # in their order
        now, limits = now_us(), self._center.limits
        wanted: list[Row] = []
        taken = ended = 0
        for row in known:
            expires = expires_us(row)
            if row.key in over or (expires is not None and expires <= now):
                ended += 1
            elif row.status == statuses.TAKEN and now < row.modified_us + lease_us(row, limits):
                taken += 1
            else:
                wanted.append(row)
        return _Batch(len(known), wanted, taken, ended)
