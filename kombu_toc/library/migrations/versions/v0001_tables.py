"""The tables as they are at first."""

from __future__ import annotations

import time

from alembic import context, op
from sqlalchemy import text
from sqlalchemy.schema import CreateIndex, CreateTable

from kombu_toc.library import schema

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    dialect = connection.dialect.name
    today = int(time.time() // 86400)
    op.execute(CreateTable(schema.LAYOUT))
    op.execute(CreateTable(schema.TOPICS))
    for number in range(context.config.attributes["tables"]):
        pending, history = schema.tables(number)
        for table in (pending, history):
            if table is history and dialect in ("mysql", "mariadb"):
                # In one statement with the table: a partitioned table has one partition at least.
                made = str(CreateTable(table).compile(dialect=connection.dialect))
                connection.execute(
                    text(
                        f"{made} PARTITION BY RANGE (day) "
                        f"(PARTITION d{today} VALUES LESS THAN ({today + 1}))"
                    )
                )
            else:
                op.execute(CreateTable(table))
            for index in sorted(table.indexes, key=lambda one: str(one.name)):
                op.execute(CreateIndex(index))
