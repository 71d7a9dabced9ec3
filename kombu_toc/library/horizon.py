"""What is far ahead: further than the horizon of its queue (``x-horizon``).

It is in the library only until then. A center looks for it, and changes it, here before it asks
Redis.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from operator import attrgetter
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, select, text, update

from ..center.center import TimeoutCenter
from ..center.core import started
from ..errors import LibraryError, MessageError
from ..model import scores
from ..model.results import WAITING, Cancelled, Found, Position, Rescheduled
from ..model.topic import Declaration, Topic
from . import outcomes, statuses
from .outcomes import DAY_US, are
from .putting import Putter
from .records import Key, Row, event_of, key_of, now_us
from .schema import IS_FAR
from .shards import CHUNK, Shard, chunks, each_asked
from .statuses import FAR
from .store import Store, row_columns

#: Digits of an action time, in the position of what is far ahead.
DIGITS = 16


def is_far(declaration: Declaration, action_us: int) -> bool:
    """Whether a message of a queue is too far ahead to be put into Redis now."""
    horizon = declaration.horizon
    return horizon is not None and action_us > now_us() + int(horizon * 1_000_000)


def new_time(center: TimeoutCenter, at_us: int | None, delay_us: int | None) -> tuple[int, int]:
    """Redis's clock, and the action time of what is to have this one, or now if neither is
    given."""
    seconds, us = center.client.time()
    now = seconds * 1_000_000 + us
    return now, max(now, now + (delay_us or 0) if at_us is None else at_us)


class FarMessages:
    """What a center can do with what is far ahead: see :class:`kombu_toc.center.core.Far`."""

    def __init__(self, store: FarStore, center: TimeoutCenter) -> None:
        self._store = store
        self._center = center
        self._putter = Putter(store.store, center)

    # -- what is there

    def get(self, ids: Sequence[str], topic: str | None) -> list[Found]:
        return [self._found(row) for row in self._rows(ids, topic)]

    def read(
        self,
        topic: Topic,
        after: tuple[int, bytes],
        since_us: int | None,
        until_us: int | None,
        step: int,
    ) -> Iterator[tuple[Found, Position]]:
        start = _start(*after)
        for row in self._store.read(topic.name, start, since_us, until_us, step):
            found = self._found(row, topic)
            id = f"{row.action_us:0{DIGITS}d}{row.id}\0{row.token}"
            yield found, Position(found.score, topic.name, id.encode(), -1, 0)

    def count(self, topic: str, limit: int | None = None, until_us: int | None = None) -> int:
        return self._store.count(topic, limit, until_us)

    def _found(self, row: Row, topic: Topic | None = None) -> Found:
        topic = topic or self._center.registry.resolved(row.topic)
        return Found(
            row.topic,
            topic.slot_for(row.basis or row.id).number,
            row.id,
            WAITING,
            topic.step_index(row.priority),
            scores.action(row.action_us),
            row.body,
            "",
            token=row.traits,
            far=True,
        )

    # -- what is done to it

    def _rows(self, of: Sequence[str | Found], topic: str | None) -> list[Row]:
        store = self._store.store
        keys = {key_of(one) for one in of if not isinstance(one, str)}
        found = store.of_ids([one for one in of if isinstance(one, str)])
        found += [row for row in store.of_keys(list(keys)) if row.key in keys]
        return [row for row in found if row.place == FAR and topic in (None, row.topic)]

    def cancel(
        self, ids: Sequence[str | Found], topic: str | None, revoked: bool
    ) -> list[Cancelled]:
        rows = self._rows(ids, topic)
        if not rows:
            return []
        ended = set(self._store.end(rows, statuses.of_cancel(revoked)))
        return [
            Cancelled(row.topic, row.id, WAITING, True, False, row.body)
            for row in rows
            if row.key in ended
        ]

    def purge(self, topic: str) -> int:
        far = self._store
        pages = far.store.of_topic(topic, now_us(), far=True)
        return sum(len(far.end(rows, statuses.CANCELLED)) for rows in pages)

    def reschedule(
        self, ids: Sequence[str | Found], topic: str | None, at_us: int | None, delay_us: int | None
    ) -> list[Rescheduled]:
        rows = self._rows(ids, topic)
        if not rows:
            return []
        _, to_us = new_time(self._center, at_us, delay_us)
        changed: set[Key] = set()
        far: list[Row] = []
        near: list[Row] = []
        for row in rows:
            declaration = self._center.registry.resolved(row.topic).declaration
            (far if is_far(declaration, to_us) else near).append(row)
        if near:
            put = self._store.put_now(near, {"action_us": to_us}, self._putter.put)
            changed.update(row.key for row in put)
        if far:
            changed.update(self._store.move(far, {"action_us": to_us}))
        return [
            Rescheduled(row.topic, row.id, WAITING, True, to_us)
            for row in rows
            if row.key in changed
        ]

    def replace(self, topic: Topic, row: Row) -> bool:
        """Give what this row says to the newest message of its id, if that is far ahead; return
        whether it was. Raises MessageError if that has another slot basis."""
        rows = self._store.store.of_keys([row.key])
        live = [one for one in rows if one.topic == row.topic and one.status == statuses.PENDING]
        newest = max(live, key=attrgetter("created_us"), default=None)
        if newest is None or newest.place != statuses.FAR:
            return False
        if (newest.basis or row.id) != (row.basis or row.id):
            raise MessageError(
                f"message {row.id!r} waits in the task library with the slot basis "
                f"{newest.basis or row.id!r}, and this one has {row.basis or row.id!r}: replace it "
                "under its own basis, or cancel it and put this one; nothing was put"
            )
        kept = ("id", "topic", "status", "place", "attempts", "worker", "error")
        changes = {name: value for name, value in row._asdict().items() if name not in kept}
        if is_far(topic.declaration, row.action_us):
            return bool(self._store.move([newest], changes))
        return bool(self._store.put_now([newest], changes, self._putter.put))


def _start(score: int, id: bytes) -> tuple[int, str, str]:
    """Action time, id and token behind which the rows are that come after this position.

    score, id: of the position; what is far ahead has its action time before its id there
    """
    if score <= 0:
        return 0, "", ""
    us = max(scores.action_time(score) - 3, 0)  # up to three have one score
    while scores.action(us) < score:
        us += 1
    while scores.action(us) == score:
        prefix = b"%0*d" % (DIGITS, us)
        if prefix == id[:DIGITS]:
            name, _, token = id[DIGITS:].partition(b"\0")
            return us, name.decode("utf-8", "replace"), token.decode("utf-8", "replace")
        if prefix > id[:DIGITS]:
            break
        us += 1
    return us, "", ""


# -- puts what is far ahead into Redis before its time

#: Seconds ahead of its time that a message is put whose queue has a horizon no longer, or is known
#: nowhere.
HORIZON, UNKNOWN = 3600.0, 60.0

#: Seconds between two looks at the queues with a horizon, and at whatever else is far ahead.
LOOK_INTERVAL, ALL_INTERVAL = 2.0, 10.0

#: Rows of one transaction, and seconds of putting after which a turn ends: the thread has other
#: things to do. Each turn puts something, however long its looks or one transaction take.
TOGETHER = 1000
TURN = 0.5

#: Rows and transactions of one turn, which takes so long at least if there is more.
ROWS, TRANSACTIONS = 10_000, 50


#: The soonest rows of a queue, or of all, in one shard: when they are due; a number, which settles
#: which of two goes first; shard and queue.
_Head = tuple[int, int, Shard, str | None]


@dataclass(eq=False)
class Loader:
    """One process's part in it; used by one thread.

    doubtful: told of rows that were put, when it is not known whether their rows say so
    """

    _far: FarStore
    _putter: Putter
    _doubtful: Callable[[Sequence[Row]], None]

    def __post_init__(self) -> None:
        self._center = self._putter.center
        #: monotonic seconds of the next looks
        self._next_look = self._next_all = 0.0
        self._queues: dict[str, Declaration] = {}
        self._numbers = count()
        #: how many it has put so far
        self.loaded = 0

    def turn(self, until: float) -> bool:
        """Put what is within the horizon of its queue, the soonest first; return whether there is
        more to put at once.

        until: monotonic seconds after which somebody else may do it
        """
        now = time.monotonic()
        if now < self._next_look:
            return False
        look_at_all = now >= self._next_all
        if look_at_all:
            declared = self._far.store.topics()
            #: the queues that have, or had, a horizon
            self._queues = {name: one for name, one in declared.items() if one.far}
        horizons = self._horizons()
        if look_at_all:
            horizons[None] = UNKNOWN
        if not horizons:
            self._next_look = now + LOOK_INTERVAL
            return False
        seconds, us = self._center.client.time()
        bounds = {
            name: seconds * 1_000_000 + us + int(horizon * 1_000_000)
            for name, horizon in horizons.items()
        }
        heads: list[_Head] = []
        with each_asked() as asking:
            for database in self._far.shards.awake():
                with asking:
                    for topic, bound in bounds.items():
                        for first_us, shard in self._far.store.holding(database, FAR, topic):
                            if first_us <= bound:
                                self._see(heads, first_us, shard, topic)
            ends = time.monotonic() + TURN
            loaded, transactions = self.loaded, 0
            while heads and time.monotonic() < until:
                first_us, _, shard, topic = heapq.heappop(heads)
                if shard.database.rests:
                    continue
                bound = bounds[topic]
                with asking:
                    ahead = self._far.ahead(shard, topic, first_us, bound, TOGETHER)
                    if ahead.number and heads and ahead.first_us > heads[0][0]:
                        # What was there before is put by now: others are sooner.
                        self._see(heads, ahead.first_us, shard, topic)
                        continue
                    if not ahead.number:
                        continue
                    transactions += 1
                    if rows := self._load(shard, topic, ahead, bound, until):
                        self._see(heads, rows[-1].action_us, shard, topic)
                if time.monotonic() >= ends or transactions >= TRANSACTIONS:
                    break
                if self.loaded - loaded >= ROWS:
                    break
            if heads:
                self._next_look = now + TURN
            else:
                self._next_look = now + LOOK_INTERVAL
                if look_at_all:
                    self._next_all = now + ALL_INTERVAL
        return bool(heads) and time.monotonic() >= self._next_look

    def _horizons(self) -> dict[str | None, float]:
        """Seconds ahead of its time that something is put, by queue. What Redis says of a queue
        goes before what was recorded of it."""
        found: dict[str | None, float] = {}
        for name, declaration in self._queues.items():
            topic = self._center.registry.recent(name)
            horizon = (declaration if topic is None else topic.declaration).horizon
            found[name] = HORIZON if horizon is None else horizon
        return found

    def _see(self, heads: list[_Head], first_us: int, shard: Shard, topic: str | None) -> None:
        """Note that a shard may have something of a queue that is to be put."""
        heapq.heappush(heads, (first_us, next(self._numbers), shard, topic))

    def _load(
        self, shard: Shard, topic: str | None, ahead: Ahead, bound: int, until: float
    ) -> list[Row]:
        """Put some rows; return them."""
        put: list[Row] = []
        expired: set[Key] = set()

        def putting(rows: Sequence[Row]) -> None:
            if time.monotonic() >= until:
                raise LibraryError("what is far ahead was not put in time; others do it")
            put.extend(rows)
            expired.update(self._putter.put(rows)[1])

        try:
            rows = self._far.put_ahead(shard, topic, ahead, bound, putting)
        except BaseException:
            self._doubtful(put)
            raise
        self._far.store.note(expired, statuses.EXPIRED)
        self.loaded += len(rows)
        return rows


# -- the statements
#
# Whoever changes such a row, or puts its message, has it locked meanwhile: so two who do that
# follow one another, and one that is killed has changed nothing in the row.

#: Seconds for which the rows of one transaction may stay locked by a process that stands still.
LOCKED = 10.0

#: Bytes of bodies that one transaction puts; a longer one goes alone.
BYTES = 8_000_000

#: Rows from which on a thread of their own is worth it.
WORTH_A_THREAD = 100

_ORDER = ("action_us", "id", "token")


#: Puts the messages of rows into Redis, of which none that is there already is added again.
PutRows = Callable[[Sequence[Row]], object]


class Ahead(NamedTuple):
    """What is soonest: when it is due, and how many rows one transaction takes; 0: nothing is."""

    first_us: int
    number: int


class FarStore:
    """Reads and changes what is far ahead. Raises LibraryError."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.shards = store.shards

    # -- what is there

    def read(
        self,
        topic: str,
        after: tuple[int, str, str],
        since_us: int | None,
        until_us: int | None,
        step: int,
    ) -> Iterator[Row]:
        """What is far ahead in a queue, in the order of action times, ids and tokens.

        after: action time, id and token of the row before the first
        since_us, until_us: bounds of action times; the latter is exclusive
        step: how many rows a statement reads at first
        """
        first = None if after[0] < (since_us or 1) else (*after, topic)

        def of(shard: Shard) -> Iterator[Row]:
            columns = shard.tables.pending.c
            wanted = [columns.topic == topic]
            if until_us is not None:
                wanted.append(columns.action_us < until_us)
            if first is None:
                wanted.append(columns.action_us >= (since_us or 0))
            pages = self.store.pages(shard, FAR, *wanted, size=step, most=CHUNK, after=first)
            return chain.from_iterable(pages)

        return heapq.merge(*map(of, self.shards.all), key=attrgetter(*_ORDER))

    def count(self, topic: str, limit: int | None = None, until_us: int | None = None) -> int:
        """How many rows are far ahead in a queue.

        limit: count so many of each table at most
        until_us: only what is due by then
        """
        number = 0
        for shard in self.shards.all:
            table = shard.tables.pending
            wanted = select(table.c.action_us).where(text(IS_FAR), table.c.topic == topic)
            if until_us is not None:
                wanted = wanted.where(table.c.action_us <= until_us)
            if limit is not None:
                wanted = wanted.limit(limit)
            number += shard.database.count(wanted.subquery())
        return number

    def ahead(
        self, shard: Shard, topic: str | None, since_us: int, until_us: int, limit: int
    ) -> Ahead:
        """The soonest rows that are due from then until then, of a queue or of all."""
        table = shard.tables.pending
        size = func.length(table.c.body).label("size")
        wanted = select(table.c.action_us, size).where(*_due(table, topic, since_us, until_us))
        found = shard.database.read(wanted.order_by(table.c.action_us).limit(limit))
        number = total = 0
        for row in found:
            total += row["size"]
            if number and total > BYTES:
                break
            number += 1
        return Ahead(found[0]["action_us"] if found else 0, number)

    # -- what is done to it

    def put_ahead(
        self, shard: Shard, topic: str | None, ahead: Ahead, until_us: int, put: PutRows
    ) -> list[Row]:
        """Have the soonest rows put into Redis that are due until then; return them.

        topic: of a queue; None: of all
        put: puts their messages, of which none that is there already is added again
        """
        table = shard.tables.pending
        wanted = select(*row_columns(table)).where(*_due(table, topic, ahead.first_us, until_us))
        wanted = wanted.order_by(table.c.action_us, table.c.id).limit(ahead.number)
        return self._put(shard, shard.database.dialect.locking(wanted), put, {})

    def put_now(self, rows: Sequence[Row], changes: dict[str, Any], put: PutRows) -> list[Row]:
        """Have these rows put into Redis, with other values, such as another action time, as far as
        they are still far ahead; return them as they were."""
        found: list[Row] = []
        for shard, keys in self.shards.parts_of(row.key for row in rows):
            table = shard.tables.pending
            wanted = select(*row_columns(table)).where(text(IS_FAR), are(table, keys))
            locked = shard.database.dialect.locking(wanted, waits=True)
            found += self._put(shard, locked, put, changes)
        return found

    def _put(self, shard: Shard, wanted: Any, put: PutRows, changes: dict[str, Any]) -> list[Row]:
        table, database = shard.tables.pending, shard.database
        done = False

        def work(connection: Connection) -> list[Row]:
            nonlocal done
            if done:
                # By now they may have run, and who has run them has had no time to say so.
                raise LibraryError(
                    f"the library {database.url} has lost a transaction; what it was about is put "
                    "again in a moment"
                )
            # What is put and not noted, because the database has crashed since, is put again: and
            # if it has run, and that was noted later, so was this.
            database.dialect.lock(connection, LOCKED, lasts=bool(changes))
            rows = [Row(*row) for row in connection.execute(wanted).all()]
            if rows:
                done = True
                changed = [row._replace(**changes) for row in rows]
                with _beside(partial(put, changed), len(rows)):
                    for chunk in chunks(rows):
                        keys = [row.key for row in chunk]
                        if changes:
                            which = are(table, keys)
                            connection.execute(update(table).where(which).values(**changes))
                            keys = [row._replace(**changes).key for row in chunk]
                        database.dialect.outcomes.put(table.name, keys, connection)
            return rows

        return database.run(work)

    def move(self, rows: Sequence[Row], changes: dict[str, Any]) -> list[Key]:
        """Give rows other values, such as another action time, as far as they are still far ahead;
        return which."""
        values = {**changes, "modified_us": now_us()}

        def move(shard: Shard, connection: Connection, keys: list[Key]) -> None:
            table = shard.tables.pending
            connection.execute(update(table).where(are(table, keys)).values(**values))

        return self._change(rows, move)

    def end(self, rows: Sequence[Row], status: int) -> list[Key]:
        """Note that rows have ended, as far as they are still far ahead; return which."""
        for shard in self.shards.divided(rows, attrgetter("key")):
            self.store.make_room(shard, {now_us() // DAY_US})

        def end(shard: Shard, connection: Connection, keys: list[Key]) -> None:
            events = [event_of(key, status) for key in keys]
            outcomes.write(shard.database.dialect, shard.tables, events, connection)

        return self._change(rows, end)

    def _change(
        self, rows: Sequence[Row], change: Callable[[Shard, Connection, list[Key]], None]
    ) -> list[Key]:
        def work(shard: Shard, some: Sequence[Key], connection: Connection) -> list[Key]:
            dialect, table = shard.database.dialect, shard.tables.pending
            dialect.lock(connection, LOCKED)
            columns = (table.c.id, table.c.token, table.c.topic)
            wanted = select(*columns).where(text(IS_FAR), are(table, some))
            statement = dialect.locking(wanted, waits=True)
            keys = [(row[0], row[1], row[2]) for row in connection.execute(statement).all()]
            if keys:
                change(shard, connection, keys)
            return keys

        changed: list[Key] = []
        for shard, some in self.shards.parts_of(row.key for row in rows):
            changed += shard.database.run(partial(work, shard, some))
        return changed


@contextmanager
def _beside(do: Callable[[], object], number: int) -> Iterator[None]:
    """Within this, something is done by a thread, unless it is little; afterwards it is done.

    Redis works on what is put while the database does on what it is told of that: it keeps that
    when both have ended.
    """
    if number < WORTH_A_THREAD:
        do()
        yield
        return
    errors: list[BaseException] = []

    def run() -> None:
        try:
            do()
        except BaseException as exc:
            errors.append(exc)

    thread = started(run, "toc-far")
    try:
        yield
    finally:
        thread.join()
    if errors:
        raise errors[0]


def _due(table: Any, topic: str | None, since_us: int, until_us: int) -> list[Any]:
    # The first bound spares the index what it has of rows that were put a moment ago.
    found = [text(IS_FAR), table.c.action_us >= since_us, table.c.action_us <= until_us]
    return found if topic is None else [*found, table.c.topic == topic]
