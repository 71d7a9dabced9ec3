"""Moves all rows of a library to another layout, while it is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Table, delete, func, select, tuple_, update

from ..errors import LibraryError
from ..model.library import LibraryResharded
from ..model.results import OnProgress, tell_nobody
from .outcomes import KEY
from .records import Key, now_us
from .schedules import Schedules
from .schema import LAYOUT, LOCATOR, SCHEDULES, TOPICS
from .shards import MOVED, Database, Shard
from .store import COUNTING, Store

#: Rows that are looked at together.
PAGE = 1000

#: How often all is looked through, as long as somebody still writes where rows do not belong.
ROUNDS = 10


class Reshard:
    """One reshard. What was moved before is found out as it goes: it can be repeated."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._shards = store.shards
        self._done = LibraryResharded(0, 0, 0)
        self._tell: OnProgress = tell_nobody

    def run(self, on_progress: OnProgress) -> LibraryResharded:
        """Move the rows. Raises LibraryError."""
        self._tell = on_progress
        for database in self._shards.databases:
            self._move_shared(database)
        self._done = self._done._replace(of_rows=self._count())
        for _ in range(ROUNDS):
            before = self._done.moved
            for shard in self._shards.all:
                self._move(shard)
            if self._done.moved == before:
                break
        else:
            raise LibraryError(
                "there are processes that still write rows by the former layout: restart them with "
                "toc_library and toc_library_tables as they are to be, and repeat this"
            )
        for database in self._shards.databases:
            self._move_locator(database)
            self._say_layout(database)
        return self._done

    def _count(self) -> int:
        """How many rows there are."""
        number = 0
        for database in self._shards.databases:
            with database.patiently(COUNTING) as patient:
                for shard in self._shards.all:
                    if shard.database is database:
                        for table in shard.tables:
                            many = select(func.count().label("many")).select_from(table)
                            number += patient.read(many)[0]["many"]
        return number

    def _move(self, shard: Shard) -> None:
        """Move what does not belong into a shard, and say in the locator where the rest is."""
        for table in shard.tables:
            for keys in _pages(shard.database, table):
                moved = self._store.mover.bring_home(shard, keys)
                if table is shard.tables.history:
                    self._store.locator.owe(keys, now_us())
                    self._store.locator.write()
                rows = self._done.rows + len(keys)
                self._done = LibraryResharded(
                    rows, max(self._done.of_rows, rows), self._done.moved + moved
                )
                self._tell(rows, self._done.of_rows)

    def _move_shared(self, database: Database) -> None:
        """Give what a database has of queues and schedules to those that have them from now on."""
        topics = [dict(row) for row in database.read(select(TOPICS))]
        for other in self._shards.databases if topics else ():
            if other is not database:
                there = {row["name"]: row for row in other.read(select(TOPICS))}
                newer = [
                    row
                    for row in topics
                    if row["name"] not in there
                    or there[row["name"]]["modified_us"] < row["modified_us"]
                ]
                names = ("declaration", "altered", "paused", "modified_us")
                if newer:
                    other.execute(other.dialect.upsert(TOPICS, ("name",), names), newer)
        for row in database.read(select(SCHEDULES)):
            other = self._shards.of(row["name"]).database
            if other is not database:
                Schedules.merge(other, dict(row))
                mine = (SCHEDULES.c.topic == row["topic"]) & (SCHEDULES.c.name == row["name"])
                database.execute(delete(SCHEDULES).where(mine))

    def _move_locator(self, database: Database) -> None:
        """Give what a database has of the locator to those that have it from now on."""
        id, spread = LOCATOR.c.id, LOCATOR.c.spread
        after: Any = None
        while True:
            page = select(id, spread, LOCATOR.c.day).order_by(id, spread).limit(PAGE)
            if after is not None:
                page = page.where(id >= after[0], tuple_(id, spread) > after)
            rows = database.read(page)
            if not rows:
                return
            after = rows[-1]["id"], rows[-1]["spread"]
            gone = [row for row in rows if self._shards.of(row["id"]).database is not database]
            if gone:
                self._store.locator.take({(row["id"], row["spread"]): row["day"] for row in gone})
                self._store.locator.write()
                database.execute(delete(LOCATOR).where(id.in_([row["id"] for row in gone])))

    def _say_layout(self, database: Database) -> None:
        """Have a database say what it is from now on."""
        urls = self._shards.layout.urls
        says = MOVED
        if database.url in urls:
            says = urls.index(database.url), len(urls), self._shards.layout.tables
        values = dict(zip(("number", "of_databases", "of_tables"), says, strict=True))
        database.execute(update(LAYOUT).where(LAYOUT.c.id == 1).values(**values))


def _pages(database: Database, table: Table) -> Iterator[list[Key]]:
    """The keys of a table, a page at a time."""
    columns = [table.c[name] for name in KEY]
    after: Key | None = None
    while True:
        page = select(*columns).order_by(*columns).limit(PAGE)
        if after is not None:
            page = page.where(columns[0] >= after[0], tuple_(*columns) > after)
        rows = database.read(page)
        if not rows:
            return
        keys: list[Key] = [(row["id"], row["token"], row["topic"]) for row in rows]
        yield keys
        after = keys[-1]
