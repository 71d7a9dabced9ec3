"""An index of what is too far ahead to be in Redis (``place`` 2): by queue and action time.

And a table of schedules."""

from __future__ import annotations

from typing import Any

from alembic import context, op
from sqlalchemy import (
    BigInteger,
    Column,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    String,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.schema import CreateTable

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    op.execute(CreateTable(_schedules()))
    # MySQL has no index of some rows only.
    which = "" if connection.dialect.name in ("mysql", "mariadb") else " WHERE place = 2"
    for number in range(context.config.attributes["tables"]):
        connection.execute(
            text(
                f"CREATE INDEX toc_pending_{number}_far ON toc_pending_{number} "
                f"(place, topic, action_us, id){which}"
            )
        )


def _name(length: int) -> Any:
    plain = String(length).with_variant(String(length, collation="C"), "postgresql")
    return plain.with_variant(mysql.VARBINARY(4 * length), "mysql", "mariadb")


def _schedules() -> Table:
    body = LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
    record = Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
    return Table(
        "toc_library_schedules",
        MetaData(),
        Column("topic", _name(255), nullable=False),
        Column("name", _name(255), nullable=False),
        Column("record", record, nullable=False),
        Column("next_us", BigInteger),
        Column("template", body, nullable=False),
        Column("firing", body),
        Column("firing_id", _name(255)),
        Column("priority", SmallInteger, nullable=False),
        Column("traits", String(1000), nullable=False),
        Column("modified_us", BigInteger, nullable=False),
        PrimaryKeyConstraint("topic", "name"),
    )
