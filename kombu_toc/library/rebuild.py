"""Puts back into Redis what is pending: after it was lost, flushed, or replaced by an empty
one."""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import select

from ..center.center import TimeoutCenter
from ..center.core import started
from ..errors import LibraryError
from ..model import message
from ..model.delivery import name_in
from ..model.library import BEHIND, DISAGREEMENTS, OFF, Disagreement, Rebuilt
from ..model.results import IN_FLIGHT, WAITING, Found, OnProgress, tell_nobody
from . import putting, records, statuses
from .guard import ended_rows, over_of
from .putting import Schedules
from .records import now_us
from .schema import LAYOUT
from .shards import CHUNK, Asking, Database, Shard, each_asked
from .store import Store, together, was_tried

T = TypeVar("T")

logger = logging.getLogger(__name__)

# -- puts back into Redis what is pending

#: Rows that a statement reads, and that are put together.
PAGE = TOGETHER = 2000

#: Microseconds ahead within which a message may be delivered before it is put.
SOON_US = 5_000_000

#: Seconds after which a worker has said that it has had a message, and after which a publish that
#: has written its row has put its message.
SETTLE = 1.5

#: Seconds after which every worker knows of a pause; after which another process restores what one
#: has not; and how Redis says "never".
PAUSE_KNOWN, RESTORING, EVER = 5.0, 15, -1
YOUNG = 0.5

#: Seconds for which a rebuild waits to know how many rows there are, as it begins and as it ends.
FEW = 0.5
LAST = 5.0


def rows_by_time(store: Store, shard: Shard, place: int) -> Iterator[records.Row]:
    """The rows of a shard, the soonest first, a page at a time."""
    return chain.from_iterable(store.pages(shard, place, size=PAGE))


class _Batch(NamedTuple):
    """What has come of some rows.

    number: how many rows that is
    wanted: those that are to be in Redis
    taken, ended: how many are left to the workers that have them, and how many have ended
    """

    number: int
    wanted: list[records.Row]
    taken: int
    ended: int


@contextmanager
def counting(store: Store) -> Iterator[Callable[[int], int]]:
    """Within this, rows are counted by a thread: to count many takes long, and nothing waits for
    that. What it yields says how many there are, if so many have been looked at; 0: it is not known
    yet."""
    counted: list[int] = []
    stopping = threading.Event()

    def count() -> None:
        # It is an estimate that is missing then, and no more.
        with suppress(Exception):
            rows = store.count_pending(stopping.is_set)
            counted.extend(() if rows is None else (rows,))

    thread = started(count, "toc-count")
    thread.join(FEW)
    try:
        yield lambda rows: max(*counted, rows) if counted else 0
    finally:
        stopping.set()
    # Of the statement that runs, but not with an error: who has rebuilt may close the library.
    thread.join(LAST)


@contextmanager
def reading_ahead(source: Iterator[T]) -> Iterator[Iterator[T]]:
    """Within this, what a source yields is read by a thread, one before it is asked for: what is
    known of rows gets old. What reading raises is raised where it is iterated."""
    with ThreadPoolExecutor(1, "toc-read-ahead") as pool:

        def ahead() -> Iterator[T]:
            later = pool.submit(next, source, None)
            while (one := later.result()) is not None:
                later = pool.submit(next, source, None)
                yield one

        yield ahead()


@dataclass(eq=False)
class Restored:
    """Whether Redis has what operators have done to queues, and workers know of it: nothing is put
    before. One process restores what Redis has lost, and the others wait for that.

    name: of this process, which no other one has
    """

    _putter: putting.Putter
    _name: str

    def __post_init__(self) -> None:
        self._store, self._center = self._putter.store, self._putter.center
        #: the queues that it has paused as Redis had lost that, and monotonic seconds when workers
        #: know of it; None: it is not at it
        self._paused: tuple[list[str], float] | None = None

    def __call__(self) -> bool:
        client, key = self._center.client, self._center.keys.restored
        expires = self._center.runner.at_home(key, partial(client.ttl, key), lambda error: EVER)
        if expires == EVER:
            self._paused = None
            return True
        if client.set(key, self._name, nx=True, ex=RESTORING):
            self._begin()
        if self._paused is None or time.monotonic() < self._paused[1]:
            return False
        self._restore(self._paused[0])
        return bool(client.persist(key))

    def _begin(self) -> None:
        paused = self._restore()
        self._paused = paused, time.monotonic() + (PAUSE_KNOWN if paused else 0.0)

    def wait(self, *, anew: bool = False) -> None:
        """Return when it is so.

        anew: restore it whatever Redis says
        """
        if anew:
            key = self._center.keys.restored
            begin = partial(self._center.client.set, key, self._name, ex=RESTORING)
            self._center.runner.at_home(key, begin, lambda error: None)
            self._begin()
        while not self():
            time.sleep(0.1)

    def _restore(self, before: Iterable[str] = ()) -> list[str]:
        """Alter and pause queues as operators had, before anything is delivered; return those that
        were not paused.

        before: those that this has paused a moment ago: they go on if they were resumed meanwhile
        """
        store, center = self._store, self._center
        paused: list[str] = []
        queues = store.declarations.all()
        for name, kept in queues.items():
            center.registry.forget(name)  # Redis may have been lost since it was read
            if not kept.altered and not kept.paused:
                continue
            while True:
                topic = self._putter.topic(name)
                wanted = kept.over(topic.declaration)
                if center.registry.redeclare(topic, wanted):
                    break
            if kept.paused and center.client.sadd(center.keys.paused, name):
                paused.append(name)
            again = [("limited", "topic set")] * (wanted != topic.declaration)
            again += [("paused", "resume")] * (name in paused)
            for what in again:
                logger.warning(
                    "queue %s is %s again, as the library has it: 'celery toc %s' changes that",
                    *(name, *what),
                )
        for name in before:
            if name in queues and not queues[name].paused:
                center.client.srem(center.keys.paused, name)
        return paused


@dataclass(eq=False)
class Rebuild:
    """One rebuild. What is done already is found out as it goes: it can be repeated."""

    _store: Store
    _center: TimeoutCenter

    def __post_init__(self) -> None:
        #: the databases that are away, and what has said so
        self._away: dict[Database, LibraryError] = {}
        self._putter = putting.Putter(self._store, self._center)
        #: rows that may be under way to a worker, or back: monotonic seconds when each is looked at
        #: once more
        self._doubts: deque[tuple[float, records.Row]] = deque()

    def run(self, on_progress: OnProgress = tell_nobody) -> Rebuilt:
        """Put back what is pending. Raises LibraryError: if another database is there, when what
        that one has is put back."""
        store, databases = self._store, self._store.shards.databases
        began = time.monotonic()
        for database in databases:
            with self._noting(database):
                database.read(select(LAYOUT))
        if len(self._away) == len(databases):
            raise next(iter(self._away.values()))
        Restored(self._putter, f"rebuild/{os.urandom(6).hex()}").wait(anew=True)
        done = Rebuilt(0, 0, 0, 0, 0)
        places = (statuses.IN_REDIS, statuses.NOT_PUT)
        sources = [self._rows(shard, place) for shard in store.shards.all for place in places]
        soonest = heapq.merge(*sources, key=attrgetter("action_us"))

        def batches() -> Iterator[_Batch]:
            for batch in together(soonest, TOGETHER):
                yield self._wanted(batch)
                yield from self._settled()
            while self._doubts:
                time.sleep(max(self._doubts[0][0] - time.monotonic(), 0.0))
                yield from self._settled()

        # The database works while Redis does.
        with counting(store) as total, reading_ahead(batches()) as read:
            for number, wanted, taken, ended in read:
                put, expired = self._put(wanted)
                done = Rebuilt(
                    done.rows + number,
                    total(done.rows + number),
                    done.put + put,
                    done.taken + taken,
                    done.ended + ended + expired,
                )
                on_progress(done.rows, done.of_rows)
        done = done._replace(of_rows=max(total(done.rows), done.rows))
        others = 0
        for database in databases:
            if database in self._away:
                continue
            with self._noting(database):
                if Schedules(store).any_before(database, now_us() + SOON_US):
                    # A worker that has taken a firing says so soon.
                    time.sleep(max(began + SETTLE - time.monotonic(), 0.0))
                others += Schedules(store).rebuild(self._putter, database)
                others += putting.DeadLetters(store).rebuild(self._putter, database)
        there = {one.name: one.declaration for one in self._center.registry.select(None)}
        every = sorted((self._store.topics() | there).items())
        off, behind = (
            tuple(name for name, one in every if one.library == mode and not one.expires)
            for mode in (OFF, BEHIND)
        )
        done = done._replace(put=done.put + others, not_kept=off, behind=behind)
        on_progress(done.rows, done.of_rows)
        if self._away:
            raise LibraryError(
                f"what {' and '.join(str(one.url) for one in self._away)} has is not put back: "
                f"{next(iter(self._away.values()))}; what the others have is in Redis: {done.put} "
                "messages were put; rebuild again when it answers"
            )
        return done

    @contextmanager
    def _noting(self, database: Database) -> Iterator[None]:
        """Within this, a database is asked: if it is away, that is noted."""
        try:
            yield
        except LibraryError as exc:
            self._away[database] = exc

    def _rows(self, shard: Shard, place: int) -> Iterator[records.Row]:
        """The rows of a shard, until its database is away."""
        if shard.database not in self._away:
            with self._noting(shard.database):
                for row in rows_by_time(self._store, shard, place):
                    if place == statuses.NOT_PUT:
                        self._store.mover.bring_home(shard, [row.key])
                    yield row

    def _by_database(
        self, rows: Sequence[records.Row]
    ) -> Iterator[tuple[Database, list[records.Row]]]:
        """Rows, by their databases, but for those of a database that is away: what it had said of
        them may not be so any more."""
        found: dict[Database, list[records.Row]] = defaultdict(list)
        for row in rows:
            found[self._store.shards.of_key(row.key).database].append(row)
        for database, some in found.items():
            if database not in self._away:
                yield database, some

    def _put(self, rows: Sequence[records.Row]) -> tuple[int, int]:
        """Put some rows, as far as their databases answer; return how many were not there, and how
        many have expired."""
        number = expired = 0
        for database, some in self._by_database(rows):
            with self._noting(database):
                put = self._put_of_one(some)
                number, expired = number + put.number, expired + put.expired
        return number, expired

    def _put_of_one(self, rows: Sequence[records.Row]) -> putting.Returned:
        """Put rows of one database; those that are not in Redis, as far as they say, if nobody
        else does."""
        certain = [row for row in rows if row.place != statuses.NOT_PUT]
        claimed: list[records.Row] = []
        not_put = [row.key for row in rows if row.place == statuses.NOT_PUT]
        for shard, keys in self._store.shards.divided(not_put, lambda key: key).items():
            claimed += self._store.claim(shard, keys)
        try:
            return self._putter.put_back([*certain, *claimed])
        except BaseException:
            with suppress(LibraryError):  # the next rebuild looks whether they are there
                self._store.place([row.key for row in claimed], statuses.NOT_PUT)
            raise

    def _wanted(self, batch: list[records.Row]) -> _Batch:
        """Of some rows, those that are to be in Redis; how many are left to the workers that have
        taken them, and how many have ended."""
        found = self._sorted(batch)
        soon = now_us() + SOON_US
        near = [
            row
            for row in found.wanted
            if row.action_us <= soon and (row.place != statuses.NOT_PUT or was_tried(row))
        ]
        if not near:
            return found
        # What is due, and not in Redis, may be with a worker, or have just been: that is not known
        # here before the worker has said so.
        now = time.monotonic()
        held = putting.missing_of(self._center, near)
        for row in held:
            # By the clock of its sender, which may be wrong.
            young = min(max(YOUNG - (now_us() - row.created_us) / 1e6, 0.0), YOUNG)
            self._doubts.append((now + SETTLE + young, row))
        left = {row.key for row in near}
        wanted = [row for row in found.wanted if row.key not in left]
        return found._replace(number=found.number - len(held), wanted=wanted)

    def _settled(self) -> Iterator[_Batch]:
        """Rows that were looked at before, and of which nothing was heard since."""
        now = time.monotonic()
        rows: list[records.Row] = []
        while self._doubts and self._doubts[0][0] <= now and len(rows) < TOGETHER:
            rows.append(self._doubts.popleft()[1])
        if not rows:
            return
        number = 0
        same: list[records.Row] = []
        for database, some in self._by_database(rows):
            with self._noting(database):
                moments = self._store.moments([row.key for row in some])
                number += len(some)
                same += [row for row in some if moments.get(row.key) == row.modified_us]
        missing = putting.missing_of(self._center, same)
        found = self._sorted(missing)
        lost = len(missing) - found.number  # those of a database that has just gone away
        yield found._replace(number=number - lost, ended=found.ended + number - len(same))

    def _sorted(self, batch: Sequence[records.Row]) -> _Batch:
        """What has come of rows, but for those of databases that are away."""
        over: set[records.Key] = set()
        known: list[records.Row] = []
        for database, some in self._by_database(batch):
            with self._noting(database):
                over |= ended_rows(self._store, some)
                known += some
        if len(known) == len(batch):
            known = list(batch)  # in their order
        now, limits = now_us(), self._center.limits
        wanted: list[records.Row] = []
        taken = ended = 0
        for row in known:
            expires = records.expires_us(row)
            if row.key in over or (expires is not None and expires <= now):
                ended += 1
            elif records.has_worker(row, limits, now):
                taken += 1
            else:
                wanted.append(row)
        return _Batch(len(known), wanted, taken, ended)


# -- compares the library with Redis, and brings them to agree

#: Microseconds for which a row or a message may be on its way.
UNDER_WAY_US = 5_000_000

#: Seconds between two looks at what is overdue, and after which what was missing is still missing.
LOOK_INTERVAL = 10.0
CONFIRM = 8.0

#: Rows, and pages of them, that one look reads at most; the next one goes on there, a second
#: later.
ROWS_PER_LOOK, PAGES_PER_LOOK = 2000, 50

#: Rows of a shard that are known to be missing, and rows that were put back, at most.
MAX_SUSPECTS = 100_000

#: Seconds for which it is watched whether what was put back has ended elsewhere meanwhile.
WATCH = 600.0


#: How many that disagree a comparison has in memory at a time, and bytes of their bodies. Each time
#: costs a moment of waiting.
MAX_FOUND, MAX_FOUND_BYTES = 50_000, 64_000_000


#: Of a row that is missing: since when, by the monotonic clock, and when it was changed last.
_Suspect = tuple[float, int]


@dataclass(eq=False)
class Reconciler:
    """What the upkeep does about what is overdue. Used by one thread."""

    _putter: putting.Putter

    def __post_init__(self) -> None:
        self._store, self._center = self._putter.store, self._putter.center
        #: the shards that are looked at in this round, and what is left of each, by its number
        self._round: deque[Shard] = deque()
        self._pages: dict[int, Iterator[list[records.Row]]] = {}
        #: by the number of a shard: what was missing in the latest round through it, and what is in
        #: this one. Whatever is not met again has ended
        self._suspects: dict[int, dict[records.Key, _Suspect]] = defaultdict(dict)
        self._seen: dict[int, dict[records.Key, _Suspect]] = defaultdict(dict)
        #: by the number of a shard: what was put back, and when that was
        self._returned: dict[int, dict[records.Key, tuple[records.Row, float]]] = {}

    @property
    def goes_on(self) -> bool:
        """Whether a round is under way: the next look goes on with it."""
        return bool(self._round)

    def look(self, *, begins: bool = True) -> int:
        """Put back what is overdue and has been missing for a while; return how many. A look is
        bounded: a round through all that is overdue may take several.

        begins: whether to begin with a round, unless one is under way
        """
        put = read = pages = 0
        with each_asked() as asking:
            if begins and not self._round:
                self._begin(asking)
            while self._round and read < ROWS_PER_LOOK and pages < PAGES_PER_LOOK:
                shard = self._round.popleft()
                if not shard.database.rests:
                    pages += 1
                    with asking:
                        rows, ends = self._page(shard)
                        put += self._judge(shard, rows)
                        read += len(rows)
                        self._go_on(shard, ends)
                        continue
                self._forget(shard)
            with asking:
                self._withdraw_ended()
            if put:
                logger.warning(
                    "%d messages were overdue and not in Redis: put there again from the library",
                    put,
                )
        return put

    def _go_on(self, shard: Shard, ends: bool) -> None:
        """A page of a shard was read, perhaps the last one."""
        if ends or len(self._seen[shard.number]) >= MAX_SUSPECTS:
            # Its round is over: with so many that are missing, the first of them come first.
            self._pages.pop(shard.number)
            self._suspects[shard.number] = self._seen.pop(shard.number, {})
        else:
            self._round.append(shard)

    def _begin(self, asking: Asking) -> None:
        """Begin a round through the shards that have something overdue."""
        until = now_us() - UNDER_WAY_US
        overdue: set[int] = set()
        for database in self._store.shards.awake():
            with asking:
                holding = self._store.holding(database, statuses.IN_REDIS)
                overdue |= {shard.number for first_us, shard in holding if first_us <= until}
        for shard in self._store.shards.all:
            if shard.number in overdue:
                self._round.append(shard)
            else:
                self._forget(shard)

    def _forget(self, shard: Shard) -> None:
        """Begin anew with a shard that was away, or has nothing overdue: of one that was away, what
        has ended meanwhile is recorded first."""
        for kept in (self._pages, self._suspects, self._seen):
            kept.pop(shard.number, None)

    def _page(self, shard: Shard) -> tuple[list[records.Row], bool]:
        """The next rows that are overdue, and whether there are no more."""
        if shard.number not in self._pages:
            overdue = shard.tables.pending.c.action_us <= now_us() - UNDER_WAY_US
            pages = self._store.pages(shard, statuses.IN_REDIS, overdue, size=CHUNK)
            self._pages[shard.number] = pages
        rows = next(self._pages[shard.number], None)
        return rows or [], rows is None

    def _judge(self, shard: Shard, rows: Sequence[records.Row]) -> int:
        now, limits = now_us(), self._center.limits
        rows = [row for row in rows if not records.has_worker(row, limits, now)]
        dead: list[records.Key] = []
        confirmed: list[records.Row] = []
        for row, state in zip(rows, putting.states_in_redis(self._center, rows), strict=True):
            if state == putting.THERE:
                continue
            if state == putting.DEAD:
                dead.append(row.key)
            elif self._is_confirmed(shard, row):
                confirmed.append(row)
        self._store.note(dead, statuses.DEAD)
        put = self._putter.put_missing(confirmed)
        self.watch(put.rows)
        return put.number

    def _is_confirmed(self, shard: Shard, row: records.Row) -> bool:
        """Whether it was missing before, and nothing has become of it since."""
        now = time.monotonic()
        suspect = self._suspects[shard.number].get(row.key)
        if suspect is None or suspect[1] != row.modified_us:
            suspect = now, row.modified_us
        if suspect[0] < now - CONFIRM:
            return True
        self._seen[shard.number][row.key] = suspect
        return False

    def watch(self, rows: Iterable[records.Row]) -> None:
        """These were put, and it is not known what has become of them."""
        now = time.monotonic()
        for row in rows:
            number = self._store.shards.of_key(row.key).number
            self._returned.setdefault(number, {})[row.key] = row, now
        while sum(map(len, self._returned.values())) > MAX_SUSPECTS:
            longest = max(self._returned.values(), key=len)
            longest.pop(next(iter(longest)))

    def _withdraw_ended(self) -> None:
        """A worker may have ended after all what was put back for it: then it does not run
        again. As with a round, some shards are looked at, and the next look goes on."""
        since, asked = time.monotonic() - WATCH, []
        if not self._returned:
            return
        awake = {one.number for one in self._store.shards.all if not one.database.rests}
        for number in list(self._returned)[:PAGES_PER_LOOK]:
            kept = self._returned.pop(number)
            for key in [key for key, (_, at) in kept.items() if at < since]:
                kept.pop(key)
            if kept:
                self._returned[number] = kept  # behind the others
            if number in awake:
                asked += [row for row, _ in kept.values()]
        if asked:
            over = putting.ended_since(self._store, asked)
            putting.withdraw(self._center, [row for row in asked if row.key in over])
            for kept in self._returned.values():
                for key in over & kept.keys():
                    kept.pop(key)


@dataclass(eq=False)
class Comparison:
    """Everything that disagrees: what is found is looked at once more after a moment, for much is
    on its way.

    sleep: waits for so many seconds
    """

    _store: Store
    _center: TimeoutCenter
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self._putter = putting.Putter(self._store, self._center)

    def run(self, *, fix: bool = False) -> Iterator[Disagreement]:
        """Yield what disagrees; with `fix`, mend it."""
        suspects: list[records.Row] = []
        messages: list[tuple[Found, records.Key]] = []
        if fix:
            Restored(self._putter, f"check/{os.urandom(6).hex()}").wait()
        for rows in self._rows():
            suspects += self._apart(rows)
            if _is_much(suspects):
                yield from self._settle(suspects, [], fix)
                suspects = []
        for page in self._messages():
            messages += self._unknown(page)
            if _is_much([one for one, _ in messages]):
                yield from self._settle(suspects, messages, fix)
                suspects, messages = [], []
        if suspects or messages:
            yield from self._settle(suspects, messages, fix)

    def _settle(
        self,
        suspects: Sequence[records.Row],
        messages: Sequence[tuple[Found, records.Key]],
        fix: bool,
    ) -> Iterator[Disagreement]:
        """Yield what disagrees still, of what did a moment ago."""
        self.sleep(UNDER_WAY_US / 1e6)
        again = {row.key: row for row in self._store.of_keys([row.key for row in suspects])}
        rows = [row for row in suspects if again.get(row.key, row._replace(body=b"")) == row]
        states = putting.states_in_redis(self._center, rows)
        missing = [row for row, state in zip(rows, states, strict=True) if state == putting.MISSING]
        dead = [row for row, state in zip(rows, states, strict=True) if state == putting.DEAD]
        there = self._center.get([one.id for one, _ in messages]) if messages else []
        still = {(one.topic, one.id, one.body) for one in there}
        pairs = self._unknown([one for one, _ in messages])
        messages = [(one, key) for one, key in pairs if (one.topic, one.id, one.body) in still]
        # Of bytes that a center has put nobody knows whether they are the message that has ended.
        over = over_of(
            self._store, [key for one, key in messages if not records.is_raw(key, one.body)]
        )
        off = putting.off_among(self._center, missing)
        if fix:
            self._store.forget([row.key for row in missing if row.topic in off])
        missing = [row for row in missing if row.topic not in off]
        if fix:
            self._mend(missing, dead, messages, over)
        for row in missing:
            yield Disagreement(DISAGREEMENTS[0], row.id, row.topic, row.action_us)
        for row in dead:
            yield Disagreement(DISAGREEMENTS[1], row.id, row.topic, row.action_us)
        for one, key in messages:
            kind = DISAGREEMENTS[3] if key in over else DISAGREEMENTS[2]
            yield Disagreement(kind, one.id, one.topic, one.time_us)

    def _mend(
        self,
        missing: Sequence[records.Row],
        dead: Sequence[records.Row],
        messages: Sequence[tuple[Found, records.Key]],
        over: set[records.Key],
    ) -> None:
        self._putter.put_missing(missing)
        self._store.note((row.key for row in dead), statuses.DEAD)
        new = [records.row_of_message(one, key) for one, key in messages if key not in over]
        if new:
            self._store.insert(new)
            # What was handled before has ended, and whoever has done that has said so.
            self._store.forget([row.key for row in putting.missing_of(self._center, new)])
            # What was requeued by somebody who does not know the library has one already.
            putting.DeadLetters(self._store).requeued([(row.topic, row.id) for row in new])
        self._center.cancel(
            [one for one, key in messages if key in over and one.state == WAITING], dead=False
        )

    def _rows(self) -> Iterator[list[records.Row]]:
        """Rows whose messages are to be in Redis, and not just now."""
        for shard in self._store.shards.all:
            rows = rows_by_time(self._store, shard, statuses.IN_REDIS)
            still = (row for row in rows if row.modified_us < now_us() - UNDER_WAY_US)
            yield from together(still, CHUNK)

    def _apart(self, rows: Sequence[records.Row]) -> list[records.Row]:
        now, limits = now_us(), self._center.limits
        return [
            row
            for row, state in zip(rows, putting.states_in_redis(self._center, rows), strict=True)
            if state != putting.THERE and not records.has_worker(row, limits, now)
        ]

    def _messages(self) -> Iterator[list[Found]]:
        """What is in Redis and was recorded."""
        for topic in self._center.registry.select(None):
            if topic.declaration.expires or topic.declaration.library == OFF:
                continue
            after = None
            while True:
                where = (WAITING, IN_FLIGHT)
                page = self._center.scan(topic.name, state=where, limit=CHUNK, after=after)
                yield page.messages
                if (after := page.after) is None:
                    break

    def _unknown(self, messages: Sequence[Found]) -> list[tuple[Found, records.Key]]:
        """Messages without a row, and the keys that their rows would have."""
        keyed = [
            (one, key)
            for one in messages
            if (key := key_of(one, records.content_of(one.body, one.id))) is not None
        ]
        known = {row.key for row in self._store.of_keys([key for _, key in keyed])}
        return [(one, key) for one, key in keyed if key not in known]


def _is_much(found: Sequence[records.Row | Found]) -> bool:
    """Whether no more are to be in memory at a time."""
    return len(found) >= MAX_FOUND or sum(len(one.body) for one in found) >= MAX_FOUND_BYTES


def key_of(found: Found, content: Mapping[str, Any] | None) -> records.Key | None:
    """The key of a message's row; None if it is to have none.

    content: the message, unpacked; None: it is a center's bytes
    """
    token = found.token
    if content is not None:
        token = found.own_token
        name = content["properties"].get("k") or name_in(token)
        if not name or message.SCHEDULE in content["headers"]:
            return None
    return records.identity_of(found.topic, found.id, found.body, token)[0]
