"""The statements of the library. Each meets one shard."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from sqlalchemy import (
    Connection,
    RowMapping,
    Table,
    delete,
    func,
    select,
    text,
    tuple_,
    union_all,
    update,
)

from ..errors import LibraryError
from ..model.records import Record, RecordPage
from ..model.topic import Declaration
from . import becoming, outbox, pages, search, statuses
from .becoming import DAY_US, are
from .declarations import Declarations
from .records import Event, Key, Row, now_us
from .schema import COMMON, IS_FAR, IS_NOT_FAR, LAYOUT
from .shards import Database, Shard, Shards

#: Microseconds for which it may be unsaid that a worker has had a message.
DOUBT_US = 3_000_000

#: Rows that one statement names.
CHUNK = 500

#: Seconds that it may take to count the rows of a table.
COUNTING = 600.0

#: What history says of a message that has a unique key no more.
TAKEN_OVER = "another message has its unique key"

_ORDER = ("action_us", "id", "token", "topic")


def chunks(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), CHUNK):
        yield items[start : start + CHUNK]


def _is_not_dead(pending: Table) -> Any:
    """That a row is not of a dead letter: history has that, too."""
    return pending.c.place != statuses.IN_DEAD_QUEUE


def row_columns(table: Table) -> list[Any]:
    """The columns of a row."""
    return [table.c[name] for name in Row._fields]


class Made(NamedTuple):
    """A row as one publish has made it."""

    key: Key
    created_us: int


class Store:
    """Reads and writes the rows of a library. Raises LibraryError."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        #: by the number of the database: days for which there is room in history
        self._days: dict[int, set[int]] = defaultdict(set)
        self.declarations = Declarations(shards)
        self._inserts: dict[int, Any] = {}

    # -- what is sent

    def insert(self, rows: Sequence[Row]) -> bool:
        """Write rows; one that is there already is left alone. Returns whether it is certain that
        none was."""
        if len(rows) == 1:
            [row] = rows
            shard = self.shards.of(row.id)
            statement, values = self._insert(shard), row._asdict()

            def insert(connection: Connection) -> int:
                return connection.execute(statement, values).rowcount

            return shard.database.dialect.inserted(shard.database.run_single(insert)) == 1
        by_database: dict[Database, list[tuple[Table, list[dict[str, Any]]]]] = defaultdict(list)
        for shard, some in self.shards.divided(rows, attrgetter("id")).items():
            # In one order, whoever else writes some of them.
            values_of = [row._asdict() for row in sorted(some)]
            by_database[shard.database].append((shard.tables.pending, values_of))
        fresh = True
        for database, tables in by_database.items():

            def work(
                connection: Connection, dialect: Any = database.dialect, all: Any = tables
            ) -> bool:
                counts = [
                    dialect.insert_rows(connection, table, values) == len(values)
                    for table, values in all
                ]
                return False not in counts

            fresh = database.run(work) and fresh
        return fresh

    def insert_with(self, connection: Any, rows: Sequence[Row]) -> None:
        """Write rows over a connection of the caller's, to the only database."""
        if len(self.shards.databases) > 1:
            raise LibraryError(
                "an outbox needs a library of one database, that of the transaction; "
                f"toc_library names {len(self.shards.databases)}; nothing was sent"
            )
        for shard, some in self.shards.divided(rows, attrgetter("id")).items():
            outbox.write(connection, shard.tables.pending, self._insert(shard), some)

    def claim_if_there(self, keys: Sequence[Key], by: str) -> list[Row]:
        """As :meth:`claim`, of those of these rows that are there."""
        found: list[Row] = []
        for shard, some in self.shards.divided(keys, lambda key: key[0]).items():
            table = shard.tables.pending
            for chunk in chunks(some):
                # To read waits for nobody, where to write may wait for the caller's transaction.
                there = shard.database.read(
                    select(table.c.id).where(are(table, chunk), table.c.place == statuses.NOT_PUT)
                )
                if there:
                    found += self.claim(shard, chunk, by)
        return found

    def _insert(self, shard: Shard) -> Any:
        found = self._inserts.get(shard.number)
        if found is None:
            found = shard.database.dialect.insert_missing(shard.tables.pending)
            self._inserts[shard.number] = found
        return found

    def withdraw(self, row: Row) -> None:
        """Delete a row whose message was refused: it was never sent."""
        shard = self.shards.of(row.id)
        table = shard.tables.pending
        # One that was there before is another message's.
        mine = are(table, [row.key]) & (table.c.created_us == row.created_us)
        shard.database.execute(delete(table).where(mine))

    def take_back(self, rows: Sequence[Made]) -> None:
        """Delete rows that were written for a publish that has failed."""
        for shard, some in self.shards.divided(rows, lambda made: made.key[0]).items():
            table = shard.tables.pending
            # Not those of another publish.
            made = tuple_(table.c.id, table.c.token, table.c.topic, table.c.created_us)
            for chunk in chunks(some):
                which = made.in_([(*one.key, one.created_us) for one in chunk])
                ids = table.c.id.in_([one.key[0] for one in chunk])
                shard.database.execute(delete(table).where(ids, which))

    def moments(self, keys: Sequence[Key]) -> dict[Key, int]:
        """When the rows of these messages were last changed, for those that have not ended."""
        found: dict[Key, int] = {}
        for shard, some in self.shards.divided(keys, lambda key: key[0]).items():
            table = shard.tables.pending
            columns = (table.c.id, table.c.token, table.c.topic, table.c.modified_us)
            for chunk in chunks(some):
                for row in shard.database.read(select(*columns).where(are(table, chunk))):
                    found[row["id"], row["token"], row["topic"]] = row["modified_us"]
        return found

    def forget(self, keys: Sequence[Key]) -> None:
        """Delete rows of messages that have ended."""
        for shard, some in self.shards.divided(keys, lambda key: key[0]).items():
            for chunk in chunks(some):
                work = partial(becoming.forget, shard.database.dialect, shard.tables.pending, chunk)
                shard.database.run_single(work)

    def take_over(self, rows: Sequence[Row]) -> None:
        """Other messages have the places of these by now: they have ended."""
        now = now_us()
        self.record(
            [Event(row.key, statuses.CANCELLED, now, 0, "", TAKEN_OVER, ({}, 0)) for row in rows]
        )

    def place(self, keys: Sequence[Key], place: int) -> None:
        """Note whether the messages of these rows are in Redis."""
        for shard, some in self.shards.divided(keys, lambda key: key[0]).items():
            table = shard.tables.pending
            for chunk in chunks(some):
                which = are(table, chunk)
                if place != statuses.IN_REDIS:  # what a worker has taken was put
                    which &= table.c.status == statuses.PENDING
                values = {"place": place}
                if place == statuses.NOT_PUT:
                    values["modified_us"] = now_us()  # it may have been put all the same
                shard.database.execute(update(table).where(which).values(**values))

    def claim(self, shard: Shard, keys: Sequence[Key], by: str) -> list[Row]:
        """Of rows that are not in Redis, those that nobody else puts: from now on they count as
        put.

        Those that may have been put are left out for a moment: if a worker has had one, it says so
        in that time.

        by: a name that no other claim has
        """
        table = shard.tables.pending
        until = now_us() - DOUBT_US

        def work(connection: Connection) -> list[Row]:
            claimed = (table.c.place == statuses.NOT_PUT) & (table.c.status == statuses.PENDING)
            sure = table.c.modified_us == table.c.created_us
            claimed &= sure | (table.c.modified_us <= until)
            change = update(table).where(are(table, keys), claimed)
            connection.execute(change.values(place=statuses.IN_REDIS, worker=by))
            mine = select(*row_columns(table)).where(are(table, keys), table.c.worker == by)
            return [Row(*row) for row in connection.execute(mine).all()]

        return shard.database.run(work)

    def note_topic(
        self, name: str, declaration: Declaration, database: Database | None = None
    ) -> bool:
        """As :meth:`.declarations.Declarations.note`."""
        return self.declarations.note(name, declaration, database)

    def topics(self) -> dict[str, Declaration]:
        """As :meth:`.declarations.Declarations.all`."""
        return self.declarations.all()

    # -- what becomes of it

    def record(self, events: Sequence[Event]) -> None:
        """Write what has happened to messages: for each of them the latest event only."""
        for shard, some in self.shards.divided(events, lambda event: event.key[0]).items():
            ended = [event for event in some if event.has_ended]
            if ended:
                self._make_room(shard, {event.at_us // DAY_US for event in ended})
            # In one order, so that two processes do not wait for each other.
            some.sort(key=attrgetter("key"))
            for chunk in chunks(some):
                work = partial(becoming.write, shard.database.dialect, shard.tables, chunk)
                shard.database.run(work)

    def make_room(self, shard: Shard, at_us: int) -> None:
        """See to it that history has room for what ends then."""
        self._make_room(shard, {at_us // DAY_US})

    def forget_days(self) -> None:
        """Look again whether history has room for a day before something is written there."""
        self._days.clear()

    def _make_room(self, shard: Shard, days: set[int]) -> None:
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
    ) -> None:
        """Give what is pending another action time.

        keys: id, queue and token; without a token, every message of that id in that queue
        others: the tokens of those that keep theirs, then
        """
        for id, topic, token in keys:
            shard = self.shards.of(id)
            table = shard.tables.pending
            which = (table.c.id == id) & (table.c.topic == topic)
            if token is not None:
                which &= table.c.token == token
            elif others:
                which &= table.c.token.not_in(others)
            values = {"action_us": action_us, "modified_us": now_us()}
            statement = update(table).where(which).values(**values)
            shard.database.execute(statement)

    def move(self, rows: Sequence[Row], action_us: int) -> list[Row]:
        """Give rows another action time that are still as they were read; return which."""
        moved: list[Row] = []
        for row in rows:
            shard = self.shards.of(row.id)
            table = shard.tables.pending
            same = (table.c.place == row.place) & (table.c.status == row.status)
            same &= table.c.modified_us == row.modified_us
            values = {"action_us": action_us, "modified_us": now_us()}
            statement = update(table).where(are(table, [row.key]), same).values(**values)

            def change(connection: Connection, statement: Any = statement) -> int:
                return connection.execute(statement).rowcount

            if shard.database.run_single(change):
                moved.append(row)
        return moved

    def of_topic(self, topic: str, until_us: int) -> Iterator[list[Row]]:
        """What has not ended of a queue, was sent until then, and is not far ahead, page by page.

        That may take longer than a statement usually may: a database has to go over what was
        deleted a moment ago.
        """
        for database, shards in self._patiently():
            for shard in shards:
                columns = shard.tables.pending.c
                mine = text(IS_NOT_FAR), columns.topic == topic, columns.created_us <= until_us
                for place in (statuses.IN_REDIS, statuses.NOT_PUT):
                    conditions, after = [columns.place == place, *mine], None
                    patient = shard._replace(database=database)
                    while rows := self._after(patient, conditions, after, CHUNK):
                        yield rows
                        after = rows[-1].action_us, *rows[-1].key

    # -- what is there

    def of_ids(self, ids: Sequence[str]) -> list[Row]:
        """What has not ended of these ids."""
        found: list[Row] = []
        for shard, some in self.shards.divided(ids, str).items():
            table = shard.tables.pending
            for chunk in chunks(some):
                statement = select(*row_columns(table)).where(
                    table.c.id.in_(list(chunk)), _is_not_dead(table)
                )
                found += _rows(shard.database, statement)
        return found

    def ended_of(self, keys: Sequence[Key], since_us: int = 0) -> set[Key]:
        """Which of these messages have ended, as far as history is kept.

        since_us: when the first of them was sent: what has ended long before is not looked at
        """
        found: set[Key] = set()
        since = since_us // DAY_US - 1  # the clocks of two machines may differ
        for shard, some in self.shards.divided(keys, lambda key: key[0]).items():
            for chunk in chunks(some):
                work = partial(
                    becoming.ended_of, shard.database.dialect, shard.tables.history, chunk, since
                )
                found |= shard.database.run_single(work)
        return found

    def page(
        self,
        shard: Shard,
        place: int,
        after: tuple[int, str, str, str] | None,
        limit: int,
        until_us: int | None = None,
    ) -> list[Row]:
        """Rows of what has not ended, the soonest first: as many as the limit and as :mod:`.pages`
        allow; none if there are no more.

        place: whether they are in Redis, as far as is known
        after: action time and key of the row before the first
        until_us: those that are due until then
        """
        columns = shard.tables.pending.c
        conditions = [columns.place == place]
        if until_us is not None:
            conditions.append(columns.action_us <= until_us)
        return self._after(shard, conditions, after, limit)

    @staticmethod
    def _after(
        shard: Shard,
        conditions: Sequence[Any],
        after: tuple[int, str, str, str] | None,
        limit: int,
    ) -> list[Row]:
        columns = shard.tables.pending.c
        order = [columns[name] for name in _ORDER]
        if after is None:
            return pages.read(shard, conditions, order, limit)[0]
        # Apart what is due at the same moment, and what is later: so an index leads to either,
        # however many are due at once.
        key = tuple_(columns.id, columns.token, columns.topic)
        same = [columns.action_us == after[0], columns.id >= after[1], key > after[1:]]
        rows, ends = pages.read(shard, [*conditions, *same], order, limit)
        if ends and len(rows) < limit:
            later = [*conditions, columns.action_us > after[0]]
            rows += pages.read(shard, later, order, limit - len(rows))[0]
        return rows

    def count_pending(self, ends: Callable[[], bool] = lambda: False) -> int | None:
        """How many rows have not ended, but for what is far ahead; None if that is not to be known
        any more.

        ends: says so, between two tables
        """
        many, number = func.count().label("many"), 0
        for database, shards in self._patiently():
            for shard in shards:
                if ends():
                    return None
                table = shard.tables.pending
                near = table.c.place.in_((statuses.IN_REDIS, statuses.NOT_PUT))
                number += database.read(select(many).select_from(table).where(near))[0]["many"]
        return number

    def _patiently(self) -> Iterator[tuple[Database, list[Shard]]]:
        """The databases, for statements that read all rows of their shards."""
        for database in self.shards.databases:
            with database.patiently(COUNTING) as patient:
                yield patient, [one for one in self.shards.all if one.database is database]

    def touch(self, keys: Sequence[Key]) -> None:
        """Note that whoever has taken these still has them."""
        for shard, some in self.shards.divided(keys, lambda key: key[0]).items():
            table = shard.tables.pending
            for chunk in chunks(some):
                which = are(table, chunk) & (table.c.status == statuses.TAKEN)
                shard.database.execute(update(table).where(which).values(modified_us=now_us()))

    def count(self) -> dict[str, int]:
        """How many rows have each status; ``not put``: how many of them are not in Redis, as far
        as is known; ``far``: how many are too far ahead for it, if any are."""
        found: dict[str, int] = defaultdict(int)
        for database, shards in self._patiently():
            for shard in shards:
                self._count(database, shard, found)
        return dict(found)

    @staticmethod
    def _count(database: Database, shard: Shard, found: dict[str, int]) -> None:
        pending, history = shard.tables
        for table in (pending, history):
            many = func.count().label("many")
            counting = select(table.c.status, many).group_by(table.c.status)
            if table is pending:  # of what is dead, history says so
                counting = counting.where(_is_not_dead(pending))
            for row in database.read(counting):
                found[statuses.NAMES[row["status"]]] += row["many"]
        unplaced = select(many).where(pending.c.place == statuses.NOT_PUT)
        found["not put"] += database.read(unplaced)[0]["many"]
        far = database.read(select(many).select_from(pending).where(text(IS_FAR)))
        if far[0]["many"]:
            found["far"] += far[0]["many"]

    def find(
        self,
        where: Mapping[str, Any],
        between: tuple[int | None, int | None],
        limit: int,
        after: str | None,
    ) -> RecordPage:
        """Records by the values of columns, in the order of their action times.

        where: values by the names of columns; of ``status``, several
        between: microseconds, both inclusive; None: without a bound
        """
        return search.find(self.shards, where, between, limit, after)

    def history(self, id: str) -> list[Record]:
        """Everything that is known of an id, the oldest first."""
        shard = self.shards.of(id)
        pending, history = (
            select(*(table.c[name] for name in COMMON)).where(table.c.id == id)
            for table in (shard.tables.pending, shard.tables.history)
        )
        pending = pending.where(_is_not_dead(shard.tables.pending))
        # One statement, for a message goes from one table to the other in between two.
        found = search.records(shard.database, union_all(history, pending))
        return sorted(found, key=lambda record: (record.created_us, record.modified_us))

    def prune(self, before_day: int, until: float = math.inf) -> tuple[int, bool]:
        """Drop the days of history before this one; return how many, and whether these are all.

        until: monotonic seconds after which nothing more is begun
        """
        dropped = 0
        for shard in self.shards.all:
            database, history = shard.database, shard.tables.history
            drop = partial(database.dialect.drop_before, history, before_day)
            goes_on = True
            while goes_on:
                if time.monotonic() >= until:
                    return dropped, False
                days, goes_on = database.run(drop)
                dropped += days
        return dropped, True

    def layout(self) -> list[RowMapping]:
        """What each database was created as."""
        return [database.read(select(LAYOUT))[0] for database in self.shards.databases]


def _rows(database: Database, statement: Any) -> list[Row]:
    """The rows that a SELECT of all columns finds."""

    def work(connection: Connection) -> list[Row]:
        return [Row(*row) for row in connection.execute(statement)]

    return database.run_single(work)
