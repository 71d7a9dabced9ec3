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
    inspect,
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
    kind = connection.dialect.name
    # What was stopped in between can be repeated: the index is made in no transaction.
    op.execute(CreateTable(_schedules(), if_not_exists=True))
    numbers = range(context.config.attributes["tables"])
    if kind == "postgresql":
        with op.get_context().autocommit_block():
            for number in numbers:
                # One that was stopped is left as an index that nobody uses.
                op.execute(text(f"DROP INDEX CONCURRENTLY IF EXISTS toc_pending_{number}_far"))
                # Rows are written meanwhile.
                op.execute(text(_index(number, "CONCURRENTLY", " WHERE place = 2")))
        return
    for number in numbers:
        if kind == "sqlite":
            connection.execute(text(_index(number, "IF NOT EXISTS", " WHERE place = 2")))
        elif f"toc_pending_{number}_far" not in _indexes(connection, number):
            # MySQL has no index of some rows only. Rows are written meanwhile, or it says that it
            # cannot do that.
            connection.execute(text(_index(number, "", " ALGORITHM=INPLACE LOCK=NONE")))


def _indexes(connection: Any, number: int) -> set[str | None]:
    """The indexes of a table."""
    return {one["name"] for one in inspect(connection).get_indexes(f"toc_pending_{number}")}


def _index(number: int, how: str, which: str) -> str:
    return (
        f"CREATE INDEX {how} toc_pending_{number}_far ON toc_pending_{number} "
        f"(place, topic, action_us, id){which}"
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
