"""An index of what is too far ahead to be in Redis (``place`` 2): by queue and action time."""

from __future__ import annotations

from alembic import context, op
from sqlalchemy import text

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    # MySQL has no index of some rows only.
    which = "" if connection.dialect.name in ("mysql", "mariadb") else " WHERE place = 2"
    for number in range(context.config.attributes["tables"]):
        connection.execute(
            text(
                f"CREATE INDEX toc_pending_{number}_far ON toc_pending_{number} "
                f"(place, topic, action_us, id){which}"
            )
        )
