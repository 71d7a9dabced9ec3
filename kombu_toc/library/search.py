"""Finds records by the values of their columns, in the order of their action times."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import sqlalchemy as sa

from ..errors import LibraryError
from ..model.delivery import spread_of_biz
from ..model.library import Record, RecordPage
from . import statuses
from .outcomes import DAY_US
from .records import storable
from .schema import COMMON, IS_TAKEN, WENT_WRONG
from .shards import Database, Shard, Shards

#: What the place of a record in the order of what is found begins with; and what of history's is
#: behind: the day. What is pending comes last.
_ORDER = ("action_us", "id", "token", "topic")
_PENDING = 1 << 31

#: The first and the last number that a column of action times has.
FIRST, LAST = -(1 << 63), (1 << 63) - 1

#: The place of a record.
_Place = tuple[int, str, str, str, int]

#: Tables that one statement asks.
_TABLES = {"sqlite": 32, "postgresql": 8}

#: A status of several that a part has.
_KIND: Any = sa.literal_column("kinds.status")

#: The places in which what has not ended may be.
_PLACES = (statuses.IN_REDIS, statuses.NOT_PUT, statuses.FAR)


def find(
    shards: Shards,
    where: Mapping[str, Any],
    between: tuple[int | None, int | None],
    limit: int,
    after: str | None,
) -> RecordPage:
    """Records by the values of columns, in the order of their action times.

    where: values by the names of columns; of ``status``, several
    between: microseconds, both inclusive; None: without a bound
    """
    start = None if after is None else _read_after(after)
    of_biz = "biz_id" in where
    # While rows are moved, also the shard that a business id had.
    every = shards.both(spread_of_biz(where["biz_id"])) if of_biz else shards.all

    def parts_of(shard: Shard, table: sa.Table) -> list[_Part]:
        is_pending = table is shard.tables.pending
        of_part = list(_times(table, between, start, is_pending=is_pending))
        return [
            part._replace(conditions=[*part.conditions, *times])
            for part in _parts(shard.database, table, where, is_pending=is_pending)
            for times in of_part
        ]

    def look(database: Database) -> list[Record]:
        some = [one for one in every if one.database is database]
        found: list[Record] = []
        if of_biz:  # a business id leads to few rows: one statement finds them
            first = shards.all[0]
            both = [(one, part) for one in first.tables for part in parts_of(first, one)]
            parts = [_first(table, part, limit) for table, part in both]
            for shard in some if parts else ():
                found += records(database, shard.own(_together(parts, limit)))
        elif database.dialect.name == "mysql":
            # It writes a union of rows that have texts to a file.
            for shard in some:
                for table in shard.tables:
                    for one in parts_of(shard, table):
                        is_pending = table is shard.tables.pending
                        if not is_pending:
                            one.conditions.extend(_until(database, table, one.conditions, limit))
                        found += records(database, _first(table, one, limit))
        else:
            for tables in zip(*(shard.tables for shard in some), strict=True):
                sorts = _leads(database, where)
                wanted = parts_of(some[0], tables[0])
                parts = [_first(tables[0], one, limit, sorts=sorts) for one in wanted]
                if parts:
                    types = {name: tables[0].c[name].type for name in COMMON}
                    order = ", ".join((*_ORDER, "modified_us"))
                    both = _together(parts, limit)
                    for statement in of_tables(database, both, tables, types, order, limit + 1):
                        found += records(database, statement)
        return found

    answers, errors = shards.side_by_side(look, {one.database: None for one in every})
    if not answers:
        raise next(iter(errors.values()))
    # One that is being moved is in two shards for a moment.
    once = {_place_of(one): one for some in answers.values() for one in some}
    found = sorted(once.items(), key=itemgetter(0))
    page = [record for _, record in found[:limit]]
    after = None if len(found) <= limit else json.dumps(found[limit - 1][0])
    return RecordPage(page, after, tuple(str(one.url) for one in errors))


def of_tables(
    database: Database,
    statement: Any,
    tables: Sequence[sa.Table],
    selected: Mapping[str, Any],
    order: str,
    limit: int,
) -> Iterator[Any]:
    """A SELECT of the first of some tables as that of the first rows of them all, for some of them
    at a time. To make it anew for each table would cost more than to run it.

    selected: the columns, with their types
    """
    first, many = tables[0], _TABLES[database.dialect.name]
    if len(tables) == 1:
        yield statement
        return
    kind: Any = type(database.engine.dialect)
    made = statement.compile(
        dialect=kind(paramstyle="named"), compile_kwargs={"render_postcompile": True}
    )
    named = re.sub(r"(:\w+)::\w+", r"\1", made.string)  # PostgreSQL's types, which follow anew
    types = {name: made.binds[name].type if name in made.binds else None for name in made.params}
    values = [sa.bindparam(name, value, type_=types[name]) for name, value in made.params.items()]
    around = re.split(rf"{first.name}(?![0-9])", named)
    for start in range(0, len(tables), many):
        union = " UNION ALL ".join(
            f"SELECT * FROM ({one.name.join(around)}) AS one"
            for one in tables[start : start + many]
        )
        ordered = f"ORDER BY {order} LIMIT {limit:d}"
        said = _text(f"SELECT {', '.join(selected)} FROM ({union}) AS every {ordered}")
        yield said.bindparams(*values).columns(**selected)


#: A statement of many tables is long: to look for its parameters takes longer than to run it.
_text = lru_cache(256)(sa.text)


def _place_of(record: Record) -> _Place:
    key = (record.action_us, record.id, record.token, record.topic)
    is_pending = statuses.NUMBERS[record.status] in statuses.LIVE
    return (*key, _PENDING if is_pending else record.modified_us // DAY_US)


class _Part(NamedTuple):
    """A part of a table.

    kinds: the statuses that it has, one after the other; empty: the conditions say so
    """

    conditions: list[Any]
    kinds: tuple[int, ...] = ()


def _parts(
    database: Database, table: sa.Table, where: Mapping[str, Any], *, is_pending: bool
) -> Iterator[_Part]:
    """The parts of a table that are wanted.

    An index has the rows of each place, and of each status in history, in the order of their
    action times: so of each part only as many rows are read as are wanted. With a business id, or
    attributes in PostgreSQL, whose own indexes lead to few rows, the table is one part.
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
    same = [
        columns[name] == where[name] for name in ("task", "biz_type", "biz_id") if name in where
    ]
    if "attributes" in where:
        same.append(have(database, table, where["attributes"]))
    is_one = "biz_id" in where or _leads(database, where)
    if is_pending and numbers == [statuses.TAKEN] and not is_one:
        yield _Part([*same, sa.text(IS_TAKEN)])
    elif is_pending:
        if wanted is not None:
            same.append(columns.status.in_(numbers))
        if is_one:
            # Of what is dead, history says so.
            yield _Part([*same, columns.place.in_(_PLACES)])
        else:
            yield from (_Part([*same, columns.place == place]) for place in _PLACES)
    elif is_one:
        among = [columns.status.in_(numbers)] if wanted is not None else []
        yield _Part([*same, *among])
    else:
        # Without a task, SQLite would take the index that begins with it.
        wrong = [number for number in numbers if "task" in where and number >= statuses.EXPIRED]
        for some, more in ((wrong, [sa.text(WENT_WRONG)]), (numbers, [])):
            several = [number for number in some if more or number not in wrong]
            if len(several) > 1 and database.dialect.name == "postgresql":
                # One part, or each would be planned for each day.
                yield _Part([*same, columns.status == _KIND, *more], tuple(several))
            else:
                for number in several:
                    yield _Part([*same, columns.status == number, *more])


def _leads(database: Database, where: Mapping[str, Any]) -> bool:
    """Whether an index leads to the attributes that are wanted."""
    return "attributes" in where and database.dialect.name == "postgresql"


def have(database: Database, table: sa.Table, attributes: Mapping[str, str]) -> Any:
    """That rows have these attributes."""
    kind, column = database.dialect.name, table.c.attributes
    if kind == "postgresql":
        return column.op("@>", is_comparison=True)(json.dumps(attributes))
    found = {f'$."{name}"': value for name, value in attributes.items()}
    values = [(sa.func.json_extract(column, path), value) for path, value in found.items()]
    if kind == "mysql":  # which compares texts without regard to case
        return sa.and_(
            *(sa.cast(sa.func.json_unquote(a), sa.LargeBinary) == b.encode() for a, b in values)
        )
    return sa.and_(*(a == b for a, b in values))


def _times(
    table: sa.Table,
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
                same.append(sa.tuple_(*key, columns.day) > start[1:])
            elif start[4] == _PENDING:
                same.append(sa.tuple_(*key) > start[1:4])
            else:  # the same message may have ended before
                same.append(sa.tuple_(*key) >= start[1:4])
            yield same
        first = max(first, start[0] + 1)
    if first <= LAST:
        later = [columns.action_us >= first]
        yield later if last is None else [*later, columns.action_us <= last]


def _until(database: Database, table: sa.Table, conditions: list[Any], limit: int) -> list[Any]:
    """The last action time of what is wanted of a part: MySQL sorts all that a partitioned table
    has behind it as well, unless it is told."""
    times = sa.select(table.c.action_us).where(*conditions).order_by(table.c.action_us)
    last = database.read(times.limit(1).offset(limit))
    return [table.c.action_us <= last[0]["action_us"]] if last else []


def _first(table: sa.Table, part: _Part, limit: int, *, sorts: bool = False) -> Any:
    """The first rows of a part; where it has several statuses, those of each.

    sorts: no index of times is to be used, which would have all rows looked at
    """
    statement = sa.select(*(table.c[name] for name in COMMON)).where(*part.conditions)
    # It is the primary key that is behind the time: so MySQL uses its index for it.
    order: list[Any] = [table.c[name] for name in (*_ORDER, *["day"] * ("day" in table.c))]
    if sorts:
        order[0] = order[0] + 0
    statement = statement.order_by(*order).limit(limit + 1)
    if not part.kinds:
        return statement
    of_kind = statement.lateral()
    numbers = ", ".join(f"({number:d})" for number in part.kinds)
    kinds = sa.text(f"(VALUES {numbers}) AS kinds (status)")
    return sa.select(of_kind).select_from(kinds, of_kind)


def _together(parts: list[Any], limit: int) -> Any:
    """The first rows of all parts. (Of a message that has ended twice, the later end was written
    on a later day.)"""
    every = sa.union_all(*(sa.select(part.subquery()) for part in parts)).subquery()
    order = (*_ORDER, "modified_us")
    return sa.select(every).order_by(*(every.c[name] for name in order)).limit(limit + 1)


def records(database: Database, statement: Any) -> list[Record]:
    """What a SELECT of the columns finds that both tables have."""
    return [
        Record(
            **{
                **row,
                "status": statuses.NAMES.get(row["status"], str(row["status"])),
                "attributes": json.loads(row["attributes"] or "{}"),
            }
        )
        for row in database.read(statement)
    ]


def _read_after(after: str) -> _Place:
    with suppress(ValueError, TypeError, OverflowError, RecursionError):
        action_us, id, token, topic, day = json.loads(after)
        place = int(action_us), str(id), str(token), str(topic), int(day)
        numbers = FIRST <= place[0] <= LAST and 0 <= place[4] <= _PENDING
        if numbers and all(storable(text) == text for text in place[1:4]):
            return place
    raise LibraryError(
        f"after={str(after)[:80]!r} is not where a page ends: give what the page before has in "
        "after"
    )
