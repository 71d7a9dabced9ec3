"""Reads rows a page at a time, which is bounded in bytes as well: a body may have megabytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, case, func, select

from .becoming import are
from .records import Key, Row
from .shards import Shard

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
    body = case((func.length(table.c.body) <= SMALL, table.c.body)).label("body")
    columns = [body if name == "body" else table.c[name] for name in Row._fields]
    statement: Any = select(*columns)
    statement = statement.where(*conditions).order_by(*order).limit(limit)

    def work(connection: Connection) -> list[Row]:
        return [Row(*row) for row in connection.execute(statement)]

    while True:
        rows = shard.database.run_single(work)
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
    table = shard.tables.pending
    key = (table.c.id, table.c.token, table.c.topic)

    def read(value: Any, keys: Sequence[Key]) -> dict[Key, Any]:
        found = shard.database.read(select(*key, value.label("value")).where(are(table, keys)))
        return {(row["id"], row["token"], row["topic"]): row["value"] for row in found}

    sizes = read(func.length(table.c.body), large)
    total, kept = 0, 0
    for one in large:
        total += sizes.get(one, 0)
        if kept and total > BYTES:
            break
        kept += 1
    bodies = read(table.c.body, large[:kept])
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


def together(rows: Iterable[Row], number: int) -> Iterator[list[Row]]:
    """Rows, as many at a time as are worked on together: so many at most."""
    some: list[Row] = []
    size = 0
    for row in rows:
        if some and (len(some) >= number or size + len(row.body) > BYTES):
            yield some
            some, size = [], 0
        some.append(row)
        size += len(row.body)
    if some:
        yield some
