"""Indexes of history: by status and action time, for searches; by day, for what is dropped, where a
day is no partition of its own."""

from __future__ import annotations

from typing import Any

from alembic import context, op
from sqlalchemy import inspect, text

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    kind = connection.dialect.name
    # What was stopped in between can be repeated.
    for number in range(context.config.attributes["tables"]):
        table = f"toc_history_{number}"
        if kind == "postgresql":
            with op.get_context().autocommit_block():
                _in_postgresql(connection, table)
        elif kind == "sqlite":
            for name, columns in (("time", "status, action_us"), ("day", "day")):
                connection.execute(
                    text(f"CREATE INDEX IF NOT EXISTS {table}_{name} ON {table} ({columns})")
                )
        elif f"{table}_time" not in {one["name"] for one in inspect(connection).get_indexes(table)}:
            # Rows are written meanwhile, or it says that it cannot do that.
            connection.execute(
                text(
                    f"CREATE INDEX {table}_time ON {table} (status, action_us) "
                    "ALGORITHM=INPLACE LOCK=NONE"
                )
            )


def _in_postgresql(connection: Any, table: str) -> None:
    """An index of a table and its partitions, where rows are written meanwhile. A day that is made
    from now on has it."""
    index = f"{table}_time"
    connection.execute(
        text(f"CREATE INDEX IF NOT EXISTS {index} ON ONLY {table} (status, action_us)")
    )
    # An index of a partition with which another one was made together is a part of it already.
    without = text(
        "SELECT inhrelid::regclass::text FROM pg_inherits AS day "
        "WHERE inhparent = CAST(:of AS regclass) AND NOT EXISTS (SELECT 1 FROM pg_index AS own "
        "JOIN pg_inherits AS part ON part.inhrelid = own.indexrelid "
        "WHERE own.indrelid = day.inhrelid AND part.inhparent = CAST(:index AS regclass))"
    )
    for (day,) in connection.execute(without, {"of": table, "index": index}).all():
        # One that was stopped is left as an index that nobody uses.
        connection.execute(text(f"DROP INDEX CONCURRENTLY IF EXISTS {day}_time"))
        connection.execute(
            text(f"CREATE INDEX CONCURRENTLY {day}_time ON {day} (status, action_us)")
        )
        connection.execute(text(f"ALTER INDEX {index} ATTACH PARTITION {day}_time"))
