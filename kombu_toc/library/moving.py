"""Moves rows to the shards that they belong to: what an outbox has written into its caller's
database, and all rows where a library gets another layout.

A message is moved with all its rows, those of history too. They are locked where they lie until
they are in their new place, so whoever changes them meanwhile waits, and finds them there. A
process that is killed in between leaves the same rows in both places; the next one deletes them
where they no longer belong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, select

from ..model.delivery import spread_of
from .db import ROWS_PER_STATEMENT
from .outcomes import are
from .records import Key
from .shards import Shard, Shards

#: Messages that one transaction moves, and seconds for which a process may stand still in it.
TOGETHER = 200
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
                for start in range(0, len(some), TOGETHER):
                    number += self._move(shard, home, sorted(some[start : start + TOGETHER]))
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
        for start in range(0, len(some), ROWS_PER_STATEMENT):
            values = some[start : start + ROWS_PER_STATEMENT]
            connection.execute(dialect.insert_missing(table), list(map(dict, values)))
