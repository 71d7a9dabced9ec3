"""The tables of the library.

A shard has two tables: what has not ended, and history. A row is one message in one queue: a task
that is sent again under its id, as by a retry, is another message with another token, and another
row.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.types import TypeDecorator

from .statuses import EXPIRED, FAILED, FAR, TAKEN

#: The version that these tables are of: the latest of ``migrations/versions``.
REVISION = "0001"

#: Alembic's own record of it, beside that of the application whose database this may be.
VERSION_TABLE = "toc_library_version"

#: Characters of an id, and of a business id.
MAX_ID = 255

#: Characters of an error that are kept.
MAX_ERROR = 4000

#: How many attempts are told apart: more are as many.
MAX_ATTEMPTS = 32_767

#: That a row is far ahead: in these words, an index serves it that has only such rows.
IS_FAR = f"place = {FAR}"

#: That it is not: in these words, an index serves it that has only the others.
IS_NOT_FAR = f"place <> {FAR}"


#: That a worker has it: in these words, an index serves it that has only such rows.
IS_TAKEN = f"status = {TAKEN}"

#: That it has failed, likewise.
HAS_FAILED = f"status = {FAILED}"

#: That it went wrong, likewise: it has expired, has failed or is dead.
WENT_WRONG = f"status >= {EXPIRED}"


class Name(TypeDecorator[str]):
    """A text that tells one row from another, for MySQL. It compares texts without regard to case
    and to spaces at their ends; so it is given bytes."""

    impl = sa.String
    cache_ok = True

    def load_dialect_impl(self, dialect: Any) -> Any:
        return dialect.type_descriptor(mysql.VARBINARY(4 * self.length))

    def process_bind_param(self, value: str | None, dialect: Any) -> Any:
        return None if value is None else value.encode()

    def process_result_value(self, value: Any, dialect: Any) -> str | None:
        return value.decode() if isinstance(value, bytes) else value


def _name(length: int) -> Any:
    """The type of a text that tells one row from another. Elsewhere than in MySQL, Python has
    nothing to do for its values."""
    in_postgresql = sa.String(length, collation="C")
    return (
        sa.String(length)
        .with_variant(in_postgresql, "postgresql")
        .with_variant(Name(length), "mysql", "mariadb")
    )


class Attributes(TypeDecorator[str]):
    """Attributes of the user's own: JSON, which the database can look into."""

    impl = sa.Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Any) -> Any:
        if dialect.name == "postgresql":
            return dialect.type_descriptor(postgresql.JSONB(none_as_null=True))
        if dialect.name in ("mysql", "mariadb"):
            return dialect.type_descriptor(mysql.JSON(none_as_null=True))
        return dialect.type_descriptor(sa.Text())

    def process_bind_param(self, value: str | None, dialect: Any) -> Any:
        return value if value is None or dialect.name == "sqlite" else json.loads(value)

    def process_result_value(self, value: Any, dialect: Any) -> str | None:
        if value is None or isinstance(value, str):
            return value
        return json.dumps(value, ensure_ascii=False, sort_keys=True)


#: Of any text, whatever the database keeps where nothing is said.
_ERROR = sa.Text().with_variant(mysql.TEXT(charset="utf8mb4"), "mysql", "mariadb")
_BODY = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")


#: What an index's ``info`` names the only kinds of databases by that have it.
ONLY = "only"


class ShardTables(NamedTuple):
    """The tables of one shard."""

    pending: sa.Table
    history: sa.Table


#: What both tables have, in their order.
COMMON = (
    *("id", "token", "topic", "status", "action_us", "task", "biz_type", "biz_id"),
    *("attributes", "attempts", "worker", "error", "created_us", "modified_us"),
)


def _columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("id", _name(MAX_ID), nullable=False),
        sa.Column("token", _name(16), nullable=False),
        sa.Column("topic", _name(255), nullable=False),
        sa.Column("status", sa.SmallInteger, nullable=False),
        sa.Column("action_us", sa.BigInteger, nullable=False),
        sa.Column("task", _name(255)),
        sa.Column("biz_type", _name(64)),
        sa.Column("biz_id", _name(MAX_ID)),
        sa.Column("attributes", Attributes),
        sa.Column("attempts", sa.SmallInteger, nullable=False),
        sa.Column("worker", _name(255)),
        sa.Column("error", _ERROR),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("modified_us", sa.BigInteger, nullable=False),
    ]


def _index(name: str, *columns: str, of: str = "", only: tuple[str, ...] = ()) -> sa.Index:
    """An index.

    of: the rows that it has, but in MySQL, where it has all; empty: all
    only: the kinds of databases that have it; empty: all
    """
    where = sa.text(of) if of else None
    info = {ONLY: only} if only else {}
    return sa.Index(name, *columns, sqlite_where=where, postgresql_where=where, info=info)


#: Where indexes of a few rows are worth it: in MySQL they would have all.
_SOME = ("sqlite", "postgresql")


def _searched(table: str, *by: str) -> list[sa.Index]:
    """The indexes of what a table is searched by. They cost nothing where a row has no such
    value, but in MySQL.

    by: the column, if any, that parts the rows, before the action time
    """
    typed, attributed = "biz_type IS NOT NULL", "attributes IS NOT NULL"
    return [
        _index(f"{table}_type", "biz_type", *by, "action_us", of=typed),
        sa.Index(
            f"{table}_attributes",
            "attributes",
            postgresql_using="gin",
            postgresql_ops={"attributes": "jsonb_path_ops"},
            postgresql_where=sa.text(attributed),
            info={ONLY: ("postgresql",)},
        ),
    ]


@lru_cache(maxsize=256)
def tables(number: int) -> ShardTables:
    """The tables with this number in a database."""
    metadata = sa.MetaData()
    name, ended = f"toc_pending_{number}", f"toc_history_{number}"
    pending = sa.Table(
        name,
        metadata,
        *_columns(),
        sa.Column("place", sa.SmallInteger, nullable=False),
        sa.Column("priority", sa.SmallInteger, nullable=False),
        sa.Column("basis", _name(MAX_ID)),
        sa.Column("traits", sa.String(1000), nullable=False),
        sa.Column("body", _BODY, nullable=False),
        sa.PrimaryKeyConstraint("id", "token", "topic"),
        # By action time; what is not in Redis apart.
        _index(f"{name}_time", "place", "action_us", "id"),
        _index(f"{name}_biz", "biz_id", "biz_type"),
        # What is too far ahead to be in Redis, by queue and action time: an index that costs
        # nothing where there is no such row, but in MySQL.
        _index(f"{name}_far", "place", "topic", "action_us", "id", of=IS_FAR),
        # The others, likewise: what a purge looks for. MySQL has them all in the one before.
        _index(f"{name}_queue", "place", "topic", "action_us", "id", of=IS_NOT_FAR, only=_SOME),
        # What workers have, which is little of much.
        _index(f"{name}_taken", "action_us", of=IS_TAKEN, only=_SOME),
        *_searched(name, "place"),
    )
    history = sa.Table(
        ended,
        metadata,
        # Days since the epoch: history is kept, and dropped, by days.
        sa.Column("day", sa.BigInteger, nullable=False, autoincrement=False),
        *_columns(),
        # Of what has failed: it can be sent again.
        sa.Column("priority", sa.SmallInteger),
        sa.Column("basis", _name(MAX_ID)),
        sa.Column("traits", sa.String(1000)),
        sa.Column("body", _BODY),
        sa.PrimaryKeyConstraint("id", "token", "topic", "day"),
        _index(f"{ended}_biz", "biz_id", "biz_type"),
        # By action time, each status apart: of many that are done, few are dead.
        _index(f"{ended}_time", "status", "action_us"),
        # What went wrong of a task.
        _index(f"{ended}_wrong", "task", "status", "action_us", of=WENT_WRONG, only=_SOME),
        # What has failed, by when.
        _index(f"{ended}_failed", "modified_us", of=HAS_FAILED, only=_SOME),
        *_searched(ended, "status"),
        # Where a day is no partition of its own.
        _index(f"{ended}_day", "day", only=("sqlite",)),
        postgresql_partition_by="RANGE (day)",
    )
    return ShardTables(pending, history)


def indexes_of(table: sa.Table, kind: str) -> list[sa.Index]:
    """The indexes that a table has in this kind of database, in the order of their names."""
    there = (index for index in table.indexes if kind in index.info.get(ONLY, (kind,)))
    return sorted(there, key=lambda index: str(index.name))


_METADATA = sa.MetaData()

#: One row: which of how many databases this is, and how many tables of each kind it has.
LAYOUT = sa.Table(
    "toc_library_layout",
    _METADATA,
    sa.Column("id", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("number", sa.SmallInteger, nullable=False),
    sa.Column("of_databases", sa.SmallInteger, nullable=False),
    sa.Column("of_tables", sa.SmallInteger, nullable=False),
)

#: What queues were declared with: whoever puts tasks back into an empty Redis declares them so.
TOPICS = sa.Table(
    "toc_library_topics",
    _METADATA,
    sa.Column("name", _name(255), primary_key=True),
    sa.Column("declaration", sa.Text, nullable=False),
    # What operators have done to it: limits as JSON, of fields of its declaration, and a pause.
    sa.Column("altered", sa.Text, nullable=False),
    sa.Column("paused", sa.Boolean, nullable=False),
    sa.Column("modified_us", sa.BigInteger, nullable=False),
)

#: The schedules of topics, and what waits for their next firings: for a rebuild. Several processes
#: change a schedule, and write later: each part has the time of its latest change by Redis's clock.
#: One that was deleted stays for a while, without a record.
SCHEDULES = sa.Table(
    "toc_library_schedules",
    _METADATA,
    sa.Column("topic", _name(255), nullable=False),
    sa.Column("name", _name(255), nullable=False),
    sa.Column(
        "record", sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb"), nullable=False
    ),
    sa.Column("next_us", sa.BigInteger),
    sa.Column("template", _BODY, nullable=False),
    sa.Column("template_us", sa.BigInteger, nullable=False),
    sa.Column("firing_us", sa.BigInteger, nullable=False),
    sa.Column("firing", _BODY),
    sa.Column("firing_id", _name(MAX_ID)),
    sa.Column("priority", sa.SmallInteger, nullable=False),
    sa.Column("traits", sa.String(1000), nullable=False),
    sa.Column("modified_us", sa.BigInteger, nullable=False),
    sa.PrimaryKeyConstraint("topic", "name"),
)

#: Where the rows of ended messages with a business id are, by their job ids: a spread picks the
#: shard. It lies in the database of the id's own shard, and is written after the rows.
LOCATOR = sa.Table(
    "toc_library_locator",
    _METADATA,
    sa.Column("id", _name(MAX_ID), nullable=False),
    sa.Column("spread", sa.Integer, nullable=False, autoincrement=False),
    sa.Column("day", sa.BigInteger, nullable=False, autoincrement=False),
    sa.PrimaryKeyConstraint("id", "spread"),
    sa.Index("toc_library_locator_day", "day"),
)

#: The tables that a database has once.
SHARED = (LAYOUT, TOPICS, SCHEDULES, LOCATOR)
