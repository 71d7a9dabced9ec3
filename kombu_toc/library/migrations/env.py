"""What Alembic runs: it is given a connection by :mod:`kombu_toc.library.migrate`."""

from __future__ import annotations

from alembic import context

from kombu_toc.library.schema import VERSION_TABLE

context.configure(connection=context.config.attributes["connection"], version_table=VERSION_TABLE)
with context.begin_transaction():
    context.run_migrations()
