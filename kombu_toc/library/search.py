"""Finds records by the values of their columns, in the order of their action times."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

from sqlalchemy import Table, select, tuple_, union_all

from ..errors import LibraryError
from ..model.records import Record, RecordPage
from . import statuses
from .becoming import DAY_US
from .records import storable
from .schema import COMMON
from .shards import Database, Shards

#: What the place of a record in the order of what is found begins with; and what of history's is
#: behind: the day. What is pending comes last.
_ORDER = ("action_us", "id", "token", "topic")
_PENDING = 1 << 31

#: The first and the last number that a column of action times has.
FIRST, LAST = -(1 << 63), (1 << 63) - 1

#: The place of a record.
_Place = tuple[int, str, str, str, int]

#: The places in which what has not ended may be.
_PLACES = (statuses.IN_REDIS, statuses.NOT_PUT, statuses.FAR)


def find(
    shards: Shards,
    where: Mapping[str, Any],
    between: tuple[int | None, int | None],
    limit: int,
    after: str | None,
) -> RecordPage:
    """As :meth:`kombu_toc.library.store.Store.find`."""
    start = None if after is None else _read_after(after)
    found: list[tuple[_Place, Record]] = []
    for shard in shards.all:
        for table in shard.tables:
            is_pending = table is shard.tables.pending
            wanted = [
                [*part, *times]
                for part in _parts(table, where, is_pending=is_pending)
                for times in _times(table, between, start, is_pending=is_pending)
            ]
            database = shard.database
            mysql = database.dialect.name == "mysql"
            if mysql and not is_pending and "biz_id" not in where:
                wanted = [[*one, *_until(database, table, one, limit)] for one in wanted]
            parts = [_part(table, one, limit) for one in wanted]
            # MySQL writes a union of rows that have texts to a file.
            for statement in parts if mysql or len(parts) < 2 else [_together(parts)]:
                found += [
                    (_place_of(one, is_pending=is_pending), one)
                    for one in records(database, statement)
                ]
    found.sort(key=itemgetter(0))
    page = [record for _, record in found[:limit]]
    return RecordPage(page, None if len(found) <= limit else json.dumps(found[limit - 1][0]))


def _place_of(record: Record, *, is_pending: bool) -> _Place:
    key = (record.action_us, record.id, record.token, record.topic)
    return (*key, _PENDING if is_pending else record.modified_us // DAY_US)


def _parts(table: Table, where: Mapping[str, Any], *, is_pending: bool) -> Iterator[list[Any]]:
    """The conditions of the parts of a table that are wanted.

    An index has the rows of each place, and of each status in history, in the order of their
    action times: so of each part only as many rows are read as are wanted. With a business id,
    whose own index leads to few rows, the table is one part.
    """
    wanted = where.get("status")
    numbers = [
        number
        for number in statuses.NAMES
        if (number in statuses.LIVE) is is_pending and (wanted is None or number in wanted)
    ]
    if not numbers:
        return
    columns = table.c
    same = [columns[name] == value for name, value in where.items() if name != "status"]
    if is_pending:
        if wanted is not None:
            same.append(columns.status.in_(numbers))
        if "biz_id" in where:
            # Of what is dead, history says so.
            yield [*same, columns.place.in_(_PLACES)]
        else:
            yield from ([*same, columns.place == place] for place in _PLACES)
    elif "biz_id" in where:
        yield same if wanted is None else [*same, columns.status.in_(numbers)]
    else:
        yield from ([*same, columns.status == number] for number in numbers)


def _times(
    table: Table,
    between: tuple[int | None, int | None],
    start: _Place | None,
    *,
    is_pending: bool,
) -> Iterator[list[Any]]:
    """The conditions on action times of what is behind a place: apart what is due at the same
    moment, and what is later. So an index leads to either. Each has one condition on them: with a
    second one, or none, SQLite takes another way."""
    columns = table.c
    first, last = (FIRST if between[0] is None else between[0]), between[1]
    if start is not None:
        if first <= start[0] <= (LAST if last is None else last):
            key = [columns.id, columns.token, columns.topic]
            same = [columns.action_us == start[0], columns.id >= start[1]]
            if not is_pending:
                same.append(tuple_(*key, columns.day) > start[1:])
            elif start[4] == _PENDING:
                same.append(tuple_(*key) > start[1:4])
            else:  # the same message may have ended before
                same.append(tuple_(*key) >= start[1:4])
            yield same
        first = max(first, start[0] + 1)
    if first <= LAST:
        later = [columns.action_us >= first]
        yield later if last is None else [*later, columns.action_us <= last]


def _until(database: Database, table: Table, conditions: list[Any], limit: int) -> list[Any]:
    """The last action time of what is wanted of a part: MySQL sorts all that a partitioned table
    has behind it as well, unless it is told."""
    times = select(table.c.action_us).where(*conditions).order_by(table.c.action_us)
    last = database.read(times.limit(1).offset(limit))
    return [table.c.action_us <= last[0]["action_us"]] if last else []


def _part(table: Table, conditions: list[Any], limit: int) -> Any:
    """The first rows of a part."""
    statement = select(*(table.c[name] for name in COMMON)).where(*conditions)
    # It is the primary key that is behind the time: so MySQL uses its index for it.
    order = [table.c[name] for name in (*_ORDER, *["day"] * ("day" in table.c))]
    return statement.order_by(*order).limit(limit + 1)


def _together(parts: list[Any]) -> Any:
    return union_all(*(select(part.subquery()) for part in parts))


def records(database: Database, statement: Any) -> list[Record]:
    """What a SELECT of the columns finds that both tables have."""
    return [
        Record(**{**row, "status": statuses.NAMES.get(row["status"], str(row["status"]))})
        for row in database.read(statement)
    ]


def _read_after(after: str) -> _Place:
    try:
        action_us, id, token, topic, day = json.loads(after)
        place = int(action_us), str(id), str(token), str(topic), int(day)
        numbers = FIRST <= place[0] <= LAST and 0 <= place[4] <= _PENDING
        if numbers and all(storable(text) == text for text in place[1:4]):
            return place
    except (ValueError, TypeError, OverflowError):
        pass
    raise LibraryError(
        f"after={str(after)[:80]!r} is not where a page ends: give what the page before has in "
        "after"
    )
