"""The statements of the library. Each meets one shard."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from secrets import token_hex
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection, delete, select

from ..errors import LibraryError
from ..model.library import Record
from ..model.topic import Declaration
from . import outbox, outcomes, search, statuses
from .locator import Locator, Mover
from .outcomes import DAY_US, are
from .records import Event, Key, Row, event_of, now_us
from .schema import COMMON, IS_FAR, IS_NOT_FAR, TOPICS
from .shards import CHUNK, Asking, Database, Owed, Shard, Shards, chunks, each_asked

# -- reads rows a page at a time, which is bounded in bytes as well

#: Bytes of a body that is read with its row.
SMALL = 16_384

#: Bytes of larger bodies that are read, and of any that are worked on, together. A body that has
#: more goes alone.
BYTES = 8_000_000


def read(
    shard: Shard, conditions: Sequence[Any], order: Sequence[Any], limit: int
) -> tuple[list[Row], bool]:
    """The first rows for which this holds, and whether there are no more of them. As few as one,
    though there are more, where bodies are large."""
    table = shard.tables.pending
    body = sa.case((sa.func.length(table.c.body) <= SMALL, table.c.body)).label("body")
    columns = [body if name == "body" else table.c[name] for name in Row._fields]
    statement: Any = sa.select(*columns)
    statement = statement.where(*conditions).order_by(*order).limit(limit)

    while True:
        rows = _rows(shard.database, statement)
        ends = len(rows) < limit
        large = [row.key for row in rows if row.body is None]
        if not large:
            return rows, ends
        rows, all_of_them = _with_bodies(shard, rows, large)
        ends = ends and all_of_them
        if rows or ends:
            return rows, ends
        # What was large has ended meanwhile.


def _with_bodies(shard: Shard, rows: Sequence[Row], large: Sequence[Key]) -> tuple[list[Row], bool]:
    """The same rows with the bodies that were left out, as far as these may be in memory together,
    but for rows that are there no more; and whether that is all of them."""
    table, keyed = shard.tables.pending, shard.database.keyed
    sizes = keyed(table, sa.func.length(table.c.body), are(table, large))
    total, kept = 0, 0
    for one in large:
        total += sizes.get(one, 0)
        if kept and total > BYTES:
            break
        kept += 1
    bodies = keyed(table, table.c.body, are(table, large[:kept]))
    left = set(large[kept:])
    filled: list[Row] = []
    for row in rows:
        if row.body is not None:
            filled.append(row)
        elif row.key in bodies:
            filled.append(row._replace(body=bodies[row.key]))
        elif row.key in left:
            return filled, False
    return filled, True


def together(
    rows: Iterable[Row], number: int, most: int = 0, *, once: bool = False
) -> Iterator[list[Row]]:
    """Rows, as many at a time as are worked on together: so many at most.

    most: and so many bytes, if not as many as usual; once: no two of one id
    """
    some: list[Row] = []
    ids: set[str] = set()
    size = 0
    for row in rows:
        full = len(some) >= number or size + len(row.body) > (most or BYTES)
        if some and (full or (once and row.id in ids)):
            yield some
            some, ids, size = [], set(), 0
        some.append(row)
        ids.add(row.id)
        size += len(row.body)
    if some:
        yield some


# -- the statements of the library

#: Microseconds for which it may be unsaid that a worker has had a message.
DOUBT_US = 3_000_000

#: Rows in transactions of callers that are known to belong elsewhere.
MAX_ASTRAY = 10_000

#: Tables that one statement asks.
TABLES = 128

#: Seconds that it may take to count the rows of a table.
COUNTING = 600.0

#: What history says of a message that has a unique key no more.
TAKEN_OVER = "another message has its unique key"

_ORDER = ("action_us", "id", "token", "topic")


def _is_not_dead(pending: sa.Table) -> Any:
    """That a row is not of a dead letter: history has that, too."""
    return pending.c.place != statuses.IN_DEAD_QUEUE


def row_columns(table: sa.Table) -> list[Any]:
    """The columns of a row."""
    return [table.c[name] for name in Row._fields]


def was_tried(row: Row) -> bool:
    """Whether a message may be in Redis, or has been, although its row says that it is not."""
    return row.modified_us != row.created_us


class Store:
    """Reads and writes the rows of a library. Raises LibraryError."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        #: by the number of the database: days for which there is room in history
        self._days: dict[int, set[int]] = defaultdict(set)
        self.declarations = Declarations(shards)
        self.locator = Locator(shards)
        self.mover = Mover(shards, self.make_room)
        shards.pull = self.mover.pull
        #: where rows were written in transactions of callers that belong to other databases
        self._astray: dict[Key, Shard] = {}
        self._inserts: dict[int, Any] = {}
        self._asks: dict[tuple[Any, ...], Any] = {}

    # -- what is sent

    def insert(self, rows: Sequence[Row]) -> bool:
        """Write rows; one that is there already is left alone. Returns whether it is certain that
        none was."""
        if len(rows) == 1:
            [row] = rows
            shard = self.shards.of_key(row.key)
            put, values = self._insert(shard), row._asdict()
            number = shard.database.run_single(lambda one: one.execute(put, values).rowcount)
            return shard.database.dialect.inserted(number) == 1
        by_database: dict[Database, list[tuple[sa.Table, list[dict[str, Any]]]]] = defaultdict(list)
        for shard, some in self.shards.divided(rows, attrgetter("key")).items():
            # In one order, whoever else writes some of them.
            values_of = [row._asdict() for row in sorted(some)]
            by_database[shard.database].append((shard.tables.pending, values_of))
        fresh = True
        for database, tables in by_database.items():

            def work(
                connection: sa.Connection, dialect: Any = database.dialect, all: Any = tables
            ) -> bool:
                counts = [
                    dialect.insert_rows(connection, table, values) == len(values)
                    for table, values in all
                ]
                return False not in counts

            fresh = database.run(work) and fresh
        return fresh

    def insert_with(self, connection: Any, row: Row, database: Database) -> Row:
        """Write a row over a connection of the caller's, to this database; return it as it is
        there. One that belongs to another database is moved there before it is put."""
        shard = home = self.shards.of_key(row.key)
        if home.database is not database:
            shard = self.shards.beside(home, database)
            row = row._replace(place=statuses.NOT_PUT)
            self._astray[row.key] = shard
            while len(self._astray) > MAX_ASTRAY:  # a relay finds the others
                self._astray.pop(next(iter(self._astray)))
        outbox.write(connection, shard.tables.pending, self._insert(shard), [row])
        return row

    def claim_if_there(self, keys: Sequence[Key]) -> list[Row]:
        """As :meth:`claim`, of those of these rows that are there and were not tried."""
        found: list[Row] = []
        for key in [key for key in keys if key in self._astray]:
            if self.mover.bring_home(self._astray[key], [key]):
                self._astray.pop(key)
        for shard, chunk in self.shards.parts_of(keys):
            table = shard.tables.pending
            # To read waits for nobody, where to write may wait for the caller's transaction.
            waiting = are(table, chunk) & (table.c.place == statuses.NOT_PUT)
            waiting &= table.c.modified_us == table.c.created_us
            if there := shard.database.keyed(table, table.c.modified_us, waiting):
                found += self.claim(shard, list(there))
        return found

    def _insert(self, shard: Shard) -> Any:
        found = self._inserts.get(shard.number)
        if found is None:
            found = shard.database.dialect.insert_missing(shard.tables.pending)
            self._inserts[shard.number] = found
        return found

    def take_back(self, made: Sequence[tuple[str, str, str, int]]) -> None:
        """Delete rows that were written for a publish that has failed: those with these keys that
        were made then."""
        for shard, some in self.shards.divided(made, itemgetter(slice(3))).items():
            table = shard.tables.pending
            # Not those of another publish.
            key = sa.tuple_(table.c.id, table.c.token, table.c.topic, table.c.created_us)
            for chunk in chunks(some):
                ids = table.c.id.in_([one[0] for one in chunk])
                shard.database.execute(sa.delete(table).where(ids, key.in_(chunk)))

    def moments(self, keys: Sequence[Key]) -> dict[Key, int]:
        """When the rows of these messages were last changed, for those that have not ended."""
        found: dict[Key, int] = {}
        for shard, chunk in self.shards.parts_of(keys):
            table = shard.tables.pending
            found |= shard.database.keyed(table, table.c.modified_us, are(table, chunk))
        return found

    def forget(self, keys: Sequence[Key]) -> None:
        """Delete rows of messages that have ended."""
        for shard, chunk in self.shards.parts_of(keys):
            forget = shard.database.dialect.outcomes.forget
            shard.database.run_single(partial(forget, shard.tables.pending.name, chunk))

    def take_over(self, rows: Iterable[Row]) -> None:
        """Other messages have the places of these by now: they have ended."""
        self.note((row.key for row in rows), statuses.CANCELLED, TAKEN_OVER)

    def set_traits(self, rows: Sequence[Row]) -> None:
        """Keep the traits that these rows have now."""
        self.shards.pull([row.key for row in rows])
        keys = defaultdict(list)  # most have the same
        for row in rows:
            keys[row.traits].append(row.key)
        for traits, some in keys.items():
            self._change(some, None, {"traits": traits})

    def place(self, keys: Sequence[Key], place: int) -> None:
        """Note whether the messages of these rows are in Redis."""
        values = {"place": place}
        if place == statuses.NOT_PUT:
            values["modified_us"] = now_us()  # it may have been put all the same
        # What a worker has taken was put.
        self._change(keys, statuses.PENDING if place != statuses.IN_REDIS else None, values)

    def _change(self, keys: Iterable[Key], status: int | None, values: Mapping[str, Any]) -> None:
        """Give rows other values, as far as they have this status, or any."""
        for shard, chunk in self.shards.parts_of(keys):
            table = shard.tables.pending
            which = are(table, chunk)
            if status is not None:
                which &= table.c.status == status
            shard.database.execute(sa.update(table).where(which).values(**values))

    def keep_dead(self, keys: Iterable[Key]) -> None:
        """Keep rows of what workers have as those of dead letters."""
        dead = {"status": statuses.DEAD, "place": statuses.IN_DEAD_QUEUE}
        self._change(keys, statuses.TAKEN, dead)

    def claim(self, shard: Shard, keys: Sequence[Key]) -> list[Row]:
        """Of rows that are not in Redis, those that nobody else puts: from now on they count as
        put.

        Those that may have been put are left out for a moment: it may still be on its way. They are
        for callers that have not found them in Redis, for as long as :meth:`said_until` says.

        shard: where they lie; what belongs to others is moved there
        """
        self.mover.bring_home(shard, keys)
        found: list[Row] = []
        for home, chunk in self.shards.parts_of(keys):
            found += self._claim(home, chunk)
        return found

    def _claim(self, shard: Shard, keys: Sequence[Key]) -> list[Row]:
        table, by = shard.tables.pending, f"claim/{token_hex(8)}"  # which no other one has
        until = self.said_until()

        def work(connection: sa.Connection) -> list[Row]:
            claimed = (table.c.place == statuses.NOT_PUT) & (table.c.status == statuses.PENDING)
            sure = table.c.modified_us == table.c.created_us  # as was_tried has it
            claimed &= sure | (table.c.modified_us <= until)
            change = sa.update(table).where(are(table, keys), claimed)
            connection.execute(change.values(place=statuses.IN_REDIS, worker=by))
            mine = sa.select(*row_columns(table)).where(are(table, keys), table.c.worker == by)
            return [Row(*row) for row in connection.execute(mine).all()]

        return shard.database.run(work)

    @staticmethod
    def said_until() -> int:
        """What workers have had by then they have said, in microseconds since the epoch."""
        return now_us() - DOUBT_US

    def topics(self) -> dict[str, Declaration]:
        """What queues were declared with: see :meth:`Declarations.all`."""
        return {name: kept.declared for name, kept in self.declarations.all().items()}

    # -- what becomes of it

    def note(self, keys: Iterable[Key], status: int, error: str = "") -> None:
        """Write that messages have a status from now on."""
        self.record([event_of(key, status, error) for key in keys])

    def record(self, events: Sequence[Event]) -> None:
        """Write what has happened to messages: for each of them the latest event only."""
        self.shards.pull([event.key for event in events])
        for shard, some in self.shards.divided(events, attrgetter("key")).items():
            ended = [event for event in some if event.has_ended]
            if ended:
                self.make_room(shard, {event.at_us // DAY_US for event in ended})
            # In one order, so that two processes do not wait for each other.
            some.sort(key=attrgetter("key"))
            for chunk in chunks(some):
                work = partial(outcomes.write, shard.database.dialect, shard.tables, chunk)
                try:
                    shard.database.run(work)
                except LibraryError:
                    # Perhaps history was brought back from a backup, and has no room for the day.
                    self._days.clear()
                    raise
                over = [event for event in chunk if event.has_ended]
                if over:
                    self.locator.owe([event.key for event in over], over[-1].at_us)

    def make_room(self, shard: Shard, days: set[int]) -> None:
        """See to it that history has a partition for these days."""
        database = shard.database
        known = self._days[shard.number]
        for day in sorted(days - known):
            for one in (day, day + 1):
                add = partial(database.dialect.add_day, shard.tables.history, one)
                database.run_single(add)
            known.add(day)

    def set_time(
        self,
        keys: Sequence[tuple[str, str, str | None]],
        action_us: int,
        others: Sequence[str] = (),
        known: Iterable[Key] = (),
    ) -> None:
        """Give what is pending another action time.

        keys: id, queue and token; without a token, every message of that id in that queue
        others: the tokens of those that keep theirs, then
        known: as in :meth:`of_ids`, then
        """
        for id, topic, token in keys:
            shards = (
                self.locator.shards_of([id], known)
                if token is None
                else self.shards.of_keys([(id, token, topic)])
            )
            table = self.shards.all[0].tables.pending
            for shard in shards:
                which = (table.c.id == id) & (table.c.topic == topic)
                if token is not None:
                    which &= table.c.token == token
                elif others:
                    which &= table.c.token.not_in(others)
                values = {"action_us": action_us, "modified_us": now_us()}
                statement = sa.update(table).where(which).values(**values)
                shard.database.execute(shard.own(statement))

    def move(self, rows: Sequence[Row], action_us: int) -> list[Row]:
        """Give rows another action time that are still as they were read; return which."""
        moved: list[Row] = []
        self.shards.pull([row.key for row in rows])
        for row in rows:
            shard = self.shards.of_key(row.key)
            table = shard.tables.pending
            same = (table.c.place == row.place) & (table.c.status == row.status)
            same &= table.c.modified_us == row.modified_us
            values = {"action_us": action_us, "modified_us": now_us()}
            change = sa.update(table).where(are(table, [row.key]), same).values(**values)
            if shard.database.execute(change):
                moved.append(row)
        return moved

    def of_topic(self, topic: str, until_us: int, *, far: bool = False) -> Iterator[list[Row]]:
        """What has not ended of a queue and was sent until then, page by page: what is far ahead,
        or what is not.

        That may take longer than a statement usually may: a database has to go over what was
        deleted a moment ago.
        """
        for database, shards in self.patiently():
            for shard in shards:
                columns, patient = shard.tables.pending.c, shard._replace(database=database)
                mine: list[Any] = [columns.topic == topic, columns.created_us <= until_us]
                mine += [] if far else [sa.text(IS_NOT_FAR)]
                for place in (statuses.FAR,) if far else (statuses.IN_REDIS, statuses.NOT_PUT):
                    yield from self.pages(patient, place, *mine, size=CHUNK)

    # -- what is there

    def of_keys(self, keys: Sequence[Key]) -> list[Row]:
        """What has not ended of the ids of these messages, and lies where they do."""
        return self.of_ids([key[0] for key in keys], keys)

    def of_ids(self, ids: Iterable[str], known: Iterable[Key] = ()) -> list[Row]:
        """What has not ended of these ids.

        known: keys of messages of some of them: as in :meth:`.locator.Locator.shards_of`
        """
        found: list[Row] = []
        table = self.shards.all[0].tables.pending
        for shard, some in self.locator.shards_of(ids, known).items():
            for chunk in chunks(some):
                statement = sa.select(*row_columns(table)).where(
                    table.c.id.in_(list(chunk)), _is_not_dead(table)
                )
                found += _rows(shard.database, shard.own(statement))
        return found

    def ended_of(self, keys: Sequence[Key], since_us: int = 0) -> set[Key]:
        """Which of these messages have ended, as far as history is kept.

        since_us: when the first of them was sent: what has ended long before is not looked at
        """
        found: set[Key] = set()
        since = since_us // DAY_US - 1  # the clocks of two machines may differ
        for shard, chunk in self.shards.parts_of(keys):
            ended_of = shard.database.dialect.outcomes.ended_of
            found |= shard.database.run_single(
                partial(ended_of, shard.tables.history, chunk, since)
            )
        return found

    @classmethod
    def pages(
        cls,
        shard: Shard,
        place: int,
        *conditions: Any,
        size: int,
        most: int = 0,
        after: tuple[int, str, str, str] | None = None,
    ) -> Iterator[list[Row]]:
        """Rows of what has not ended, the soonest first, a page at a time.

        place: whether they are in Redis, as far as is known
        size: how many a page has, as far as they may be in memory together; the next ones grow
        most: up to so many
        after: action time and key of the row before the first
        """
        # In these words, an index serves it that has only such rows.
        far, columns = place == statuses.FAR, shard.tables.pending.c
        wanted = [sa.text(IS_FAR) if far else columns.place == place, *conditions]
        ends = False
        while not ends:
            rows, ends = cls._after(shard, wanted, after, size)
            if rows:
                yield rows
                after = rows[-1].action_us, *rows[-1].key
            size = max(size, min(4 * size, most))

    @staticmethod
    def _after(
        shard: Shard, conditions: Sequence[Any], after: tuple[int, str, str, str] | None, limit: int
    ) -> tuple[list[Row], bool]:
        """The rows for which these hold, and whether there are no more."""
        columns = shard.tables.pending.c
        order = [columns[name] for name in _ORDER]
        if after is None:
            return read(shard, conditions, order, limit)
        # Apart what is due at the same moment, and what is later: so an index leads to either,
        # however many are due at once.
        key = sa.tuple_(columns.id, columns.token, columns.topic)
        same = [columns.action_us == after[0], columns.id >= after[1], key > after[1:]]
        rows, ends = read(shard, [*conditions, *same], order, limit)
        if ends:
            later = [*conditions, columns.action_us > after[0]]
            more, ends = read(shard, later, order, limit - len(rows))
            rows += more
        return rows, ends

    def holding(
        self, database: Database, place: int, topic: str | None = None
    ) -> list[tuple[int, Shard]]:
        """The shards of a database that have such a row, each with the action time of its soonest
        one. One statement asks 128 tables, for an answer that mostly is none.

        topic: of this queue only
        """
        shards = self.shards.of_database(database)
        given = {} if topic is None else {"topic": topic}
        found: list[tuple[int, Shard]] = []
        for start in range(0, len(shards), TABLES):
            statement = self._asking(shards[start : start + TABLES], place, given)
            for row in database.read(statement, given):
                found.append((row["first_us"], shards[row["number"] + start]))
        return found

    def _asking(self, shards: Sequence[Shard], place: int, given: Collection[str]) -> Any:
        """The statement of :meth:`holding`, for some tables."""
        name = (shards[0].number, place, *given)
        found = self._asks.get(name)
        if found is None:
            which = f"place = {place}"  # in these words, an index of such rows only serves it
            which += " AND topic = :topic" * ("topic" in given)
            parts = (
                f"SELECT number, first_us FROM (SELECT {at} AS number, action_us AS first_us "
                f"FROM {shard.tables.pending.name} WHERE {which} ORDER BY action_us LIMIT 1) "
                f"AS t{at}"
                for at, shard in enumerate(shards)
            )
            kind = shards[0].tables.pending.c.topic.type
            bound = [sa.bindparam(one, type_=kind) for one in given]
            found = self._asks[name] = sa.text(" UNION ALL ".join(parts)).bindparams(*bound)
        return found

    def count_pending(self, ends: Callable[[], bool] = lambda: False) -> int | None:
        """How many rows have not ended, but for what is far ahead; None if that is not to be known
        any more.

        ends: says so, between two tables
        """
        number = 0
        for database, shards in self.patiently():
            for shard in shards:
                if ends():
                    return None
                table = shard.tables.pending
                near = table.c.place.in_((statuses.IN_REDIS, statuses.NOT_PUT))
                number += database.count(table, near)
        return number

    def patiently(self) -> Iterator[tuple[Database, list[Shard]]]:
        """The databases, for statements that read all rows of their shards."""
        for database in self.shards.databases:
            with database.patiently(COUNTING) as patient:
                yield patient, self.shards.of_database(database)

    def touch(self, keys: Sequence[Key]) -> None:
        """Note that whoever has taken these still has them."""
        self._change(keys, statuses.TAKEN, {"modified_us": now_us()})

    def count(self) -> dict[str, int]:
        """How many rows have each status; ``not put``: how many of them are not in Redis, as far
        as is known; ``far``: how many are too far ahead for it, if any are."""
        found: Counter[str] = Counter()

        def count(database: Database) -> Counter[str]:
            mine: Counter[str] = Counter()
            many = sa.func.count().label("many")
            with database.patiently(COUNTING) as patient:
                for pending, history in (one.tables for one in self.shards.of_database(database)):
                    for table in (pending, history):
                        counting = sa.select(table.c.status, many).group_by(table.c.status)
                        if table is pending:  # of what is dead, history says so
                            counting = counting.where(_is_not_dead(pending))
                        for row in patient.read(counting):
                            mine[statuses.NAMES[row["status"]]] += row["many"]
                    mine["not put"] += patient.count(pending, pending.c.place == statuses.NOT_PUT)
                    if far := patient.count(pending, sa.text(IS_FAR)):
                        mine["far"] += far
            return mine

        for mine in self.shards.asked(count):
            found.update(mine)
        return dict(found)

    def history(self, id: str, known: Iterable[Key] = ()) -> list[Record]:
        """Everything that is known of an id, the oldest first; known: as in :meth:`of_ids`."""
        found: list[Record] = []
        first = self.shards.all[0].tables
        pending, history = (
            sa.select(*(table.c[name] for name in COMMON)).where(table.c.id == id)
            for table in first
        )
        # One statement, for a message goes from one table to the other in between two.
        both = sa.union_all(history, pending.where(_is_not_dead(first.pending)))
        for shard in self.locator.shards_of([id], known):
            found += search.records(shard.database, shard.own(both))
        return sorted(found, key=lambda record: (record.created_us, record.modified_us))

    def with_days_before(self, database: Database, day: int) -> set[int]:
        """The numbers of a database's shards whose history has a day before this one."""
        names = {
            shard.tables.history.name: shard.number for shard in self.shards.of_database(database)
        }
        found = database.run(lambda connection: database.dialect.days(connection, list(names)))
        return {names[name] for name, days in found.items() if days and days[0] < day}

    def pruning(self, shard: Shard, before_day: int) -> Iterator[int]:
        """Drop the days of history before this one, in several transactions; yield how many days
        are gone with each."""
        drop = partial(shard.database.dialect.drop_before, shard.tables.history, before_day)
        goes_on = True
        while goes_on:
            days, goes_on = shard.database.run(drop)
            yield days

    def database_of(self, row: Row) -> Database:
        """The database that a row belongs to."""
        return self.shards.of_key(row.key).database


def _rows(database: Database, statement: Any) -> list[Row]:
    """The rows that a SELECT of all columns finds."""
    found = database.run_single(lambda connection: connection.execute(statement).all())
    return [Row(*row) for row in found]


# -- queues as they were: what they were declared with, and what operators have done to them since
#
# Who puts tasks back into an empty Redis declares them so. A rebuild alters and pauses them again;
# the workers that have declared them anew meanwhile know nothing of that. Each database has all of
# it, so that one which is away is not missed.


#: Seconds after which a process writes again what a queue was declared with: somebody may have
#: deleted the queue, and another has declared it again.
AGAIN = 60.0

#: Declarations that a process keeps for databases that are away.
MAX_OWED = 10_000


class Kept(NamedTuple):
    """A queue as a library has it.

    declared: what it was declared with when something was last sent to it
    altered: what operators have altered since, by field as a declaration's JSON has it; None: taken
        back to what the consumers' connections say
    paused: whether they have paused it
    """

    declared: Declaration
    altered: dict[str, Any]
    paused: bool

    def over(self, standing: Declaration) -> Declaration:
        """A declaration with what operators have altered."""
        if not self.altered:
            return standing
        said = {**json.loads(standing.to_json()), **self.altered}
        kept = {name: value for name, value in said.items() if value is not None}
        return Declaration.from_json(json.dumps(kept))


class Declarations:
    """The declarations that a library keeps."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        #: topic -> its declaration as it was written last, and monotonic seconds when that was
        self._declared: dict[str, tuple[str, float]] = {}
        #: what a database which was away is to have, by its number and the topic
        self.owed: Owed[tuple[int, str], dict[str, Any]] = Owed(
            *(lambda key: shards.of_database(shards.databases[key[0]])[0], self._write, MAX_OWED)
        )

    def note(self, name: str, declaration: Declaration, database: Database | None = None) -> bool:
        """Keep what a queue was declared with, if this process has not done so for a while.

        database: the one that must have it now; the others get it later if they are away: all
            unless given

        Returns whether one of them is to get it later.
        """
        text = declaration.to_json()
        before, now = self._declared.get(name), time.monotonic()
        if before is not None and before[0] == text and now < before[1] + AGAIN:
            return False
        values = {"name": name, "declaration": text, "modified_us": now_us()}
        if database is not None:
            self._write(database, [((database.number, name), values)])
        others = (one for one in self._shards.databases if one is not database)
        self.owed.add(((other.number, name), values) for other in others)
        self._declared[name] = text, now
        asking = Asking()
        with asking:
            self.owed.write(patient=database is not None)
        if asking.error is not None and database is None:
            self._declared.pop(name, None)
            raise asking.error
        return bool(self.owed)

    @staticmethod
    def _write(database: Database, some: Sequence[tuple[tuple[int, str], dict[str, Any]]]) -> None:
        changed = ("declaration", "modified_us")
        made = [{"altered": "{}", "paused": False, **values} for _, values in some]
        database.execute(database.dialect.upsert(TOPICS, ("name",), changed), made)

    def alter(self, name: str, before: Declaration, after: Declaration) -> None:
        """Limits of a queue were altered by hand. Raises LibraryError if a database is away; the
        others have it."""
        old, new = json.loads(before.to_json()), json.loads(after.to_json())
        changes = {
            field: new.get(field) for field in {*old, *new} if old.get(field) != new.get(field)
        }
        self._by_hand(name, after, changes)

    def pause(self, name: str, declaration: Declaration, paused: bool) -> None:
        """A queue was paused, or goes on. Raises LibraryError, as :meth:`alter`."""
        self._by_hand(name, declaration, {}, paused=paused)

    def _by_hand(
        self, name: str, declaration: Declaration, changes: dict[str, Any], **values: Any
    ) -> None:
        def change(database: Database, connection: Connection) -> None:
            reading = select(TOPICS).where(TOPICS.c.name == name).with_for_update()
            found = connection.execute(reading).mappings().one_or_none()
            there: Any = found or {"altered": "{}", "paused": False}
            made = {
                "name": name,
                "declaration": declaration.to_json(),
                "altered": json.dumps({**json.loads(there["altered"]), **changes}),
                "paused": there["paused"],
                "modified_us": now_us(),
                **values,
            }
            changed = [field for field in made if field != "name"]
            connection.execute(database.dialect.upsert(TOPICS, ("name",), changed), made)

        with each_asked() as asking:
            for database in self._shards.databases:
                with asking:
                    database.run(partial(change, database))

    def forget(self, name: str) -> None:
        """A queue was deleted. Raises LibraryError."""
        self._declared.pop(name, None)
        self.owed.forget(lambda key: key[1] == name)
        for database in self._shards.databases:
            database.execute(delete(TOPICS).where(TOPICS.c.name == name))

    def all(self) -> dict[str, Kept]:
        """The queues by name. Each database has them all: one that is away is not missed. Raises
        LibraryError if all are."""
        found: dict[str, Any] = {}
        asking, answered = Asking(), False
        for database in sorted(self._shards.databases, key=lambda one: one.rests):
            with asking:
                if answered and database.rests:
                    continue  # it was away a moment ago
                for row in database.read(select(TOPICS)):
                    there = found.get(row["name"])
                    if there is None or there["modified_us"] < row["modified_us"]:
                        found[row["name"]] = row
                answered = True
        if asking.error is not None and not answered:
            raise asking.error
        return {
            name: Kept(
                Declaration.from_json(row["declaration"]),
                json.loads(row["altered"]),
                bool(row["paused"]),
            )
            for name, row in found.items()
        }
