"""All tables, as ``schema.py`` has them until the first release.

With that release they are written out here, for those of ``schema.py`` go on to change.
"""

from __future__ import annotations

from alembic import context, op

from kombu_toc.library.migrate import make_tables

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    make_tables(op.get_bind(), context.config.attributes["tables"])
