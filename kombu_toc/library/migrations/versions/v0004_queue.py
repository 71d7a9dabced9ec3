"""An index of what is not far ahead (``place`` is not 2), by queue and action time: for a purge.

MySQL's index of 0002 has all rows, and serves that as well."""

from __future__ import annotations

from alembic import context, op
from sqlalchemy import text

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    kind = connection.dialect.name
    # What was stopped in between can be repeated.
    for number in range(context.config.attributes["tables"]):
        name = f"toc_pending_{number}_queue"
        columns = f"ON toc_pending_{number} (place, topic, action_us, id) WHERE place <> 2"
        if kind == "sqlite":
            connection.execute(text(f"CREATE INDEX IF NOT EXISTS {name} {columns}"))
        elif kind == "postgresql":
            with op.get_context().autocommit_block():
                # One that was stopped is left as an index that nobody uses.
                connection.execute(text(f"DROP INDEX CONCURRENTLY IF EXISTS {name}"))
                # Rows are written meanwhile.
                connection.execute(text(f"CREATE INDEX CONCURRENTLY {name} {columns}"))
