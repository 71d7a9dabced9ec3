"""The statements about what is far ahead: rows whose messages are not in Redis yet.

Whoever changes such a row, or puts its message, has it locked meanwhile: so two who do that follow
one another, and one that is killed has changed nothing in the row.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, select, text, tuple_, update

from ..errors import LibraryError
from . import outcomes, statuses
from .outcomes import are
from .records import Event, Key, Row, now_us
from .schema import IS_FAR
from .shards import Shard
from .store import CHUNK, Store, chunks, row_columns

#: Seconds for which the rows of one transaction may stay locked by a process that stands still.
LOCKED = 10.0

#: Bytes of bodies that one transaction puts; a longer one goes alone.
BYTES = 8_000_000

#: Rows from which on a thread of their own is worth it.
WORTH_A_THREAD = 100

_ORDER = ("action_us", "id", "token")


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

    def of_ids(self, ids: Sequence[str], topic: str | None) -> list[Row]:
        """What is far ahead of these ids, in one queue or in all."""
        rows = [row for row in self.store.of_ids(ids) if row.place == statuses.FAR]
        return [row for row in rows if topic in (None, row.topic)]

    def of_keys(self, keys: Collection[Key]) -> list[Row]:
        """What is far ahead of these messages, and of others of their ids that lie there."""
        return [row for row in self.store.of_keys(list(keys)) if row.place == statuses.FAR]

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
        parts = [
            self._read(shard, topic, after, since_us, until_us, step) for shard in self.shards.all
        ]
        return heapq.merge(*parts, key=attrgetter(*_ORDER))

    def _read(
        self,
        shard: Shard,
        topic: str,
        after: tuple[int, str, str],
        since_us: int | None,
        until_us: int | None,
        step: int,
    ) -> Iterator[Row]:
        table = shard.tables.pending
        order = [table.c[name] for name in _ORDER]
        wanted = select(*row_columns(table)).where(text(IS_FAR), table.c.topic == topic)
        if until_us is not None:
            wanted = wanted.where(table.c.action_us < until_us)
        since, begun = since_us or 0, after[0] >= (since_us or 0)
        while True:
            rows: list[Row] = []
            if begun:  # apart what is due at the same moment, however much that is
                same = [table.c.action_us == after[0], table.c.id >= after[1]]
                page = wanted.where(*same, tuple_(*order[1:]) > after[1:])
                rows += self._rows(shard, page.order_by(*order).limit(step))
            if len(rows) < step:
                later = table.c.action_us > after[0] if begun else table.c.action_us >= since
                page = wanted.where(later).order_by(*order).limit(step - len(rows))
                rows += self._rows(shard, page)
            yield from rows
            if len(rows) < step:
                return
            after, begun = (rows[-1].action_us, rows[-1].id, rows[-1].token), True
            step = min(4 * step, CHUNK)

    @staticmethod
    def _rows(shard: Shard, statement: Any) -> list[Row]:
        return [Row(*row.values()) for row in shard.database.read(statement)]

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
            counted = select(func.count().label("many")).select_from(wanted.subquery())
            number += int(shard.database.read(counted)[0]["many"])
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
        self,
        shard: Shard,
        topic: str | None,
        since_us: int,
        until_us: int,
        limit: int,
        put: Callable[[Sequence[Row]], object],
    ) -> list[Row]:
        """Have the soonest rows put into Redis that are due from then until then; return them.

        topic: of a queue; None: of all
        put: puts their messages, of which none that is there already is added again
        """
        table = shard.tables.pending
        wanted = select(*row_columns(table)).where(*_due(table, topic, since_us, until_us))
        wanted = wanted.order_by(table.c.action_us, table.c.id).limit(limit)
        return self._put(shard, shard.database.dialect.locking(wanted), put, {})

    def put_now(
        self,
        rows: Sequence[Row],
        changes: dict[str, Any],
        put: Callable[[Sequence[Row]], object],
    ) -> list[Row]:
        """Have these rows put into Redis, with other values, such as another action time, as far as
        they are still far ahead; return them as they were."""
        found: list[Row] = []
        for shard, keys in self._divided([row.key for row in rows]):
            table = shard.tables.pending
            wanted = select(*row_columns(table)).where(text(IS_FAR), are(table, keys))
            locked = shard.database.dialect.locking(wanted, waits=True)
            found += self._put(shard, locked, put, changes)
        return found

    def _put(
        self,
        shard: Shard,
        wanted: Any,
        put: Callable[[Sequence[Row]], object],
        changes: dict[str, Any],
    ) -> list[Row]:
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
                        outcomes.put(database.dialect, table, keys, connection)
            return rows

        return database.run(work)

    def move(self, rows: Sequence[Row], changes: dict[str, Any]) -> list[Key]:
        """Give rows other values, such as another action time, as far as they are still far ahead;
        return which."""
        return self._change(rows, self._move, changes)

    def end(self, rows: Sequence[Row], status: int) -> list[Key]:
        """Note that rows have ended, as far as they are still far ahead; return which."""
        at = now_us()
        for shard in self.shards.divided(rows, attrgetter("key")):
            self.store.make_room(shard, at)
        return self._change(rows, self._end, (status, at))

    def _change(
        self,
        rows: Sequence[Row],
        change: Callable[[Shard, Connection, list[Key], Any], None],
        how: Any,
    ) -> list[Key]:
        changed: list[Key] = []
        for shard, some in self._divided([row.key for row in rows]):
            database, table = shard.database, shard.tables.pending

            def work(
                connection: Connection,
                shard: Shard = shard,
                some: Sequence[Key] = some,
                table: Any = table,
            ) -> list[Key]:
                dialect = shard.database.dialect
                dialect.lock(connection, LOCKED)
                columns = (table.c.id, table.c.token, table.c.topic)
                wanted = select(*columns).where(text(IS_FAR), are(table, some))
                statement = dialect.locking(wanted, waits=True)
                keys = [(row[0], row[1], row[2]) for row in connection.execute(statement).all()]
                if keys:
                    change(shard, connection, keys, how)
                return keys

            changed += database.run(work)
        return changed

    def _move(
        self, shard: Shard, connection: Connection, keys: list[Key], changes: dict[str, Any]
    ) -> None:
        table = shard.tables.pending
        values = {**changes, "modified_us": now_us()}
        connection.execute(update(table).where(are(table, keys)).values(**values))

    def _end(
        self, shard: Shard, connection: Connection, keys: list[Key], how: tuple[int, int]
    ) -> None:
        status, at = how
        events = [Event(key, status, at, 0, "", "", ({}, 0)) for key in keys]
        outcomes.write(shard.database.dialect, shard.tables, events, connection)

    def _divided(self, keys: Sequence[Key]) -> Iterator[tuple[Shard, Sequence[Key]]]:
        """Keys by their shards, as many as a statement names, in one order whoever does it."""
        for shard, some in self.shards.of_keys(keys).items():
            for chunk in chunks(sorted(some)):
                yield shard, chunk

    def pages(self, topic: str) -> Iterator[list[Row]]:
        """What is far ahead in a queue now, some rows at a time, for who ends them."""
        until = time.time_ns() // 1000
        after = (0, "", "")
        while True:
            found = []
            for row in self.read(topic, after, None, None, CHUNK):
                after = (row.action_us, row.id, row.token)
                if row.created_us <= until:
                    found.append(row)
                if len(found) >= CHUNK:
                    break
            if not found:
                return
            yield found


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

    thread = threading.Thread(target=run, name="toc-far", daemon=True)
    thread.start()
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
