"""Finds the shards of rows by job ids alone.

The row of a message without a business id is in the shard of its id. Of others, the token says the
shard while the message is known; when it has ended, the locator does, a table that is written after
the row. What neither knows is looked for in all tables.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Integer, bindparam, delete, literal, select, text, union

from ..model.delivery import has_biz, spread_of
from ..model.topic import checksum_of
from ..scripts.call import parts_of
from .outcomes import DAY_US, are
from .records import Key, now_us
from .schema import LOCATOR
from .shards import ROWS_PER_STATEMENT, Asking, Database, Owed, Shard, Shards, chunks

#: Ends of which a process keeps where their rows are, until that is written.
MAX_OWED = 100_000

#: Entries that one statement drops, ids that one looks for, and tables in which it does.
TOGETHER = 500
IDS = 100
TABLES = {"sqlite": 64, "postgresql": 8, "mysql": 16}


class Locator:
    """Reads and writes where rows are. Any thread may call it."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        #: by the id and the spread, the day
        self.owed: Owed[tuple[str, int], int] = Owed(
            lambda key: shards.of(key[0]), self._write, MAX_OWED, max
        )
        self._known = threading.local()

    # -- what is written

    def owe(self, keys: Iterable[Key], at_us: int) -> bool:
        """The rows of these were written: say soon where they are. Returns whether there is
        anything to be said."""
        if len(self._shards.all) == 1:
            return False
        some = {(id, spread_of(id, token)) for id, token, _ in keys if has_biz(token)}
        if not some:
            return False
        self.owed.add(dict.fromkeys(some, at_us // DAY_US).items())
        return True

    @staticmethod
    def _write(database: Database, entries: Sequence[tuple[tuple[str, int], int]]) -> None:
        statement = database.dialect.upsert(LOCATOR, ("id", "spread"), ("day",))
        # In one order, so that two processes do not wait for each other.
        rows = [{"id": id, "spread": spread, "day": day} for (id, spread), day in sorted(entries)]
        database.run(lambda connection: connection.execute(statement, rows))

    def pruning(self, database: Database, before_day: int) -> Iterator[int]:
        """Drop what ended before that day; yield after each transaction. Raises LibraryError."""
        old = select(LOCATOR.c.id, LOCATOR.c.spread).where(LOCATOR.c.day < before_day)
        while rows := database.read(old.limit(TOGETHER)):
            ids = [row["id"] for row in rows]
            where = (LOCATOR.c.day < before_day) & LOCATOR.c.id.in_(ids)
            database.execute(delete(LOCATOR).where(where))
            yield len(ids)

    # -- what is found

    @contextmanager
    def knowing(self, keys: Iterable[Key]) -> Iterator[None]:
        """Within this, the thread knows these keys, as in :meth:`shards_of`."""
        self._known.keys = list(keys)
        try:
            yield
        finally:
            self._known.keys = []

    def shards_of(self, ids: Iterable[str], known: Iterable[Key] = ()) -> dict[Shard, list[str]]:
        """The shards that have rows of these ids; an id without any is in none.

        known: keys of messages of some of the ids: these are looked for in their shards only

        Raises LibraryError if a database is away that may have rows which no other one has.
        """
        wanted = dict.fromkeys(ids)
        if len(self._shards.all) == 1:
            return {self._shards.all[0]: list(wanted)} if wanted else {}
        found: dict[Shard, dict[str, None]] = defaultdict(dict)
        told = [key for key in (*known, *getattr(self._known, "keys", ())) if key[0] in wanted]
        for shard, keys in self._shards.of_keys(told).items():
            found[shard].update(dict.fromkeys(key[0] for key in keys))
        left = wanted.keys() - {id for some in found.values() for id in some}
        away = Asking()
        self._look_near([id for id in wanted if id in left], found, away)
        left -= {id for some in found.values() for id in some}
        if left:
            self._look_everywhere([id for id in wanted if id in left], found, away)
        return {shard: list(some) for shard, some in found.items()}

    def _look_near(
        self, ids: Sequence[str], found: dict[Shard, dict[str, None]], asking: Asking
    ) -> None:
        """Look into the shards of the ids, and into the locator beside them."""
        of_shard: dict[Shard, list[str]] = defaultdict(list)
        tables = self._shards.all[0].tables
        for id in ids:
            for shard in self._shards.both(checksum_of(id)):
                of_shard[shard].append(id)
        here, where = literal(-1).label("spread"), LOCATOR.c
        for shard, some in of_shard.items():
            with asking:
                for chunk in chunks(some):
                    mine: Any = bindparam("ids", chunk, expanding=True)
                    parts = [select(one.c.id, here).where(one.c.id.in_(mine)) for one in tables]
                    parts.append(select(where.id, where.spread).where(where.id.in_(mine)))
                    for row in shard.database.read(shard.own(union(*parts))):
                        spread = row["spread"]
                        for other in [shard] if spread < 0 else self._shards.both(spread):
                            found[other][row["id"]] = None

    def _look_everywhere(
        self, ids: Sequence[str], found: dict[Shard, dict[str, None]], asked: Asking
    ) -> None:
        """Look into all tables, and note for the next time what is found."""

        def look(database: Database) -> list[tuple[Shard, Key]]:
            return list(self._look_in(database, ids))

        answers, errors = self._shards.side_by_side(look)
        ended: list[Key] = []
        for there in answers.values():
            for shard, key in there:
                found[shard][key[0]] = None
                ended.append(key)
        self.owe(ended, now_us())
        missing = set(ids) - {id for some in found.values() for id in some}
        error = asked.error or next(iter(errors.values()), None)
        if missing and error is not None:
            raise error

    def _look_in(self, database: Database, ids: Sequence[str]) -> Iterable[tuple[Shard, Key]]:
        shards = self._shards.of_database(database)
        many = TABLES[database.dialect.name]
        for some in parts_of(shards, many):
            statement = _naming(some)
            for part in parts_of(ids, IDS):
                rows = database.read(statement.bindparams(ids=list(part)))
                for row in rows:
                    yield some[row["place"]], (row["id"], row["token"], "")


def _naming(shards: Sequence[Shard]) -> Any:
    """What there is of some ids in these shards, which are in one database."""
    columns = shards[0].tables.pending.c
    said = " UNION ALL ".join(
        f"SELECT id, token, {place} AS place FROM {table.name} WHERE id IN :ids"
        for place, shard in enumerate(shards)
        for table in shard.tables
    )
    ids = bindparam("ids", expanding=True, type_=columns.id.type)
    types: dict[str, Any] = {"id": columns.id.type, "token": columns.token.type, "place": Integer()}
    return text(said).bindparams(ids).columns(**types)


# -- rows are moved to the shards that they belong to
#
# Such are what an outbox has written into its caller's database, and all rows where a library gets
# another layout. A message is moved with all its rows, those of history too. They are locked where
# they lie until they are in their new place, so whoever changes them meanwhile waits, and finds
# them there. A process that is killed in between leaves the same rows in both places; the next one
# deletes them where they no longer belong.

#: Messages that one transaction moves, and seconds for which a process may stand still in it.
MOVED_TOGETHER = 200
LOCKED = 10.0


class Mover:
    """Moves rows. Any thread may call it. Raises LibraryError.

    make_room: sees to it that history of a shard has room for these days
    """

    def __init__(self, shards: Shards, make_room: Callable[[Shard, set[int]], None]) -> None:
        self._shards = shards
        self._make_room = make_room

    def bring_home(self, shard: Shard, keys: Sequence[Key]) -> int:
        """Move what lies in a shard of these messages, and belongs to others; return how many
        rows that were."""
        if len(self._shards.all) == 1:
            return 0
        number = 0
        for home, some in self._shards.divided(keys, lambda key: key).items():
            if home is not shard:
                for part in parts_of(some, MOVED_TOGETHER):
                    number += self._move(shard, home, sorted(part))
        return number

    def pull(self, keys: Sequence[Key]) -> None:
        """Move what still lies where the former layout had it of these messages."""
        lie: dict[Shard, list[Key]] = defaultdict(list)
        for key in keys:
            both = self._shards.both(spread_of(key[0], key[1]))
            if len(both) > 1:
                lie[both[1]].append(key)
        for shard, some in lie.items():
            self.bring_home(shard, some)

    def _move(self, shard: Shard, home: Shard, keys: Sequence[Key]) -> int:
        # To read waits for nobody.
        ids = [key[0] for key in keys]
        there = [
            shard.database.read(select(table.c.id).where(table.c.id.in_(ids), are(table, keys)))
            for table in shard.tables
        ]
        if not any(there):
            return 0
        history = shard.tables.history
        if there[1]:
            days = shard.database.read(select(history.c.day).where(are(history, keys)).distinct())
            self._make_room(home, {row["day"] for row in days})
        dialect = shard.database.dialect

        def work(connection: Connection) -> int:
            dialect.lock(connection, LOCKED)
            found: list[list[dict[str, Any]]] = []
            for table in shard.tables:
                wanted = select(table).where(are(table, keys))
                if table is shard.tables.pending:
                    wanted = dialect.locking(wanted, waits=True)
                found.append([dict(row) for row in connection.execute(wanted).mappings()])
            pending, ended = found
            if home.database is shard.database:
                _insert(home, pending, ended, connection)
            elif pending or ended:
                home.database.run(lambda other: _insert(home, pending, ended, other))
            for table in shard.tables:
                connection.execute(delete(table).where(are(table, keys)))
            return len(pending) + len(ended)

        return shard.database.run(work)


def _insert(
    home: Shard,
    pending: Sequence[Mapping[str, Any]],
    ended: Sequence[Mapping[str, Any]],
    connection: Connection,
) -> None:
    """Write rows where they belong. What has ended there since is not made to wait again."""
    dialect, (waiting, history) = home.database.dialect, home.tables
    keys: list[Key] = [(row["id"], row["token"], row["topic"]) for row in pending]
    over: dict[Key, int] = {}
    if keys:
        columns = (history.c.id, history.c.token, history.c.topic, history.c.modified_us)
        for id, token, topic, at in connection.execute(select(*columns).where(are(history, keys))):
            over[id, token, topic] = max(at, over.get((id, token, topic), at))
    rows = [
        row
        for key, row in zip(keys, pending, strict=True)
        if key not in over or over[key] < row["created_us"]
    ]
    for table, some in ((waiting, rows), (history, ended)):
        for values in parts_of(some, ROWS_PER_STATEMENT):
            connection.execute(dialect.insert_missing(table), list(map(dict, values)))
