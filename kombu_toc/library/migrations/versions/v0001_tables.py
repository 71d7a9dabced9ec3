"""The tables as they are at first. They are written out here: those of ``schema.py`` change."""

from __future__ import annotations

import time
from typing import Any

from alembic import context, op
from sqlalchemy import (
    BigInteger,
    Column,
    Index,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    String,
    Table,
    Text,
    inspect,
    text,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.schema import CreateIndex, CreateTable

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    dialect = connection.dialect.name
    today = int(time.time() // 86400)
    # What was stopped in between can be repeated: not every database undoes it.
    for table in _shared():
        op.execute(CreateTable(table, if_not_exists=True))
    for number in range(context.config.attributes["tables"]):
        for table in (_pending(number), _history(number)):
            if table.name.startswith("toc_history") and dialect in ("mysql", "mariadb"):
                # In one statement with the table: a partitioned table has one partition at least.
                made = str(
                    CreateTable(table, if_not_exists=True).compile(dialect=connection.dialect)
                )
                connection.execute(
                    text(
                        f"{made} PARTITION BY RANGE (day) "
                        f"(PARTITION d{today} VALUES LESS THAN ({today + 1}))"
                    )
                )
            else:
                op.execute(CreateTable(table, if_not_exists=True))
            there = {one["name"] for one in inspect(connection).get_indexes(table.name)}
            for index in sorted(table.indexes, key=lambda one: str(one.name)):
                if index.name not in there:
                    op.execute(CreateIndex(index))


def _name(length: int) -> Any:
    plain, bytes_ = String(length), mysql.VARBINARY(4 * length)
    plain = plain.with_variant(String(length, collation="C"), "postgresql")
    return plain.with_variant(bytes_, "mysql", "mariadb")


def _columns() -> list[Column[Any]]:
    return [
        Column("id", _name(255), nullable=False),
        Column("token", _name(16), nullable=False),
        Column("topic", _name(255), nullable=False),
        Column("status", SmallInteger, nullable=False),
        Column("action_us", BigInteger, nullable=False),
        Column("task", _name(255)),
        Column("biz_type", _name(64)),
        Column("biz_id", _name(255)),
        Column("attempts", SmallInteger, nullable=False),
        Column("worker", _name(255)),
        Column("error", Text().with_variant(mysql.TEXT(charset="utf8mb4"), "mysql", "mariadb")),
        Column("created_us", BigInteger, nullable=False),
        Column("modified_us", BigInteger, nullable=False),
    ]


def _pending(number: int) -> Table:
    body = LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
    return Table(
        f"toc_pending_{number}",
        MetaData(),
        *_columns(),
        Column("place", SmallInteger, nullable=False),
        Column("priority", SmallInteger, nullable=False),
        Column("basis", _name(255)),
        Column("traits", String(1000), nullable=False),
        Column("body", body, nullable=False),
        PrimaryKeyConstraint("id", "token", "topic"),
        Index(f"toc_pending_{number}_time", "place", "action_us", "id"),
        Index(f"toc_pending_{number}_biz", "biz_id", "biz_type"),
    )


def _history(number: int) -> Table:
    return Table(
        f"toc_history_{number}",
        MetaData(),
        Column("day", BigInteger, nullable=False, autoincrement=False),
        *_columns(),
        PrimaryKeyConstraint("id", "token", "topic", "day"),
        Index(f"toc_history_{number}_biz", "biz_id", "biz_type"),
        postgresql_partition_by="RANGE (day)",
    )


def _shared() -> tuple[Table, Table]:
    layout = Table(
        "toc_library_layout",
        MetaData(),
        Column("id", SmallInteger, primary_key=True, autoincrement=False),
        Column("number", SmallInteger, nullable=False),
        Column("of_databases", SmallInteger, nullable=False),
        Column("of_tables", SmallInteger, nullable=False),
    )
    topics = Table(
        "toc_library_topics",
        MetaData(),
        Column("name", _name(255), primary_key=True),
        Column("declaration", Text, nullable=False),
        Column("modified_us", BigInteger, nullable=False),
    )
    return layout, topics
