"""Makes the tables of a library, and brings them up to date."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, insert, inspect, select

from ..errors import LibraryError
from .schema import LAYOUT, REVISION, VERSION_TABLE
from .shards import Database, Shards

#: Seconds that a change of a large table may take.
PATIENCE = 6 * 3600.0

_FOLDER = Path(__file__).parent / "migrations"


def version_of(database: Database) -> str | None:
    """The version of a database's tables; None if there are none. Raises LibraryError."""
    return database.run(_version)


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    made = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    return made.get_current_revision()


def create(shards: Shards, databases: Iterable[Database] | None = None) -> list[Database]:
    """Make the tables of databases that have none; return these databases. Raises LibraryError.

    databases: all unless given
    """
    made = []
    for database in shards.databases if databases is None else databases:
        if version_of(database) is None:
            _upgrade(shards, database)
            made.append(database)
        else:
            database.run(partial(shards.check_layout, database))
    return made


def upgrade(shards: Shards) -> list[Database]:
    """Bring the tables of databases up to date whose tables are older; return these databases.
    Raises LibraryError if there is none in one of them."""
    older = []
    for database in shards.databases:
        found = version_of(database)
        if found is None:
            raise _missing(database)
        if found != REVISION:
            _refuse_newer(database, found)
            _upgrade(shards, database)
            older.append(database)
    return older


def check(shards: Shards, database: Database) -> None:
    """Raises LibraryError, with the command that helps, unless a database's tables are those that
    this release uses."""

    def look(connection: Connection) -> str | None:
        found = _version(connection)
        if found is not None:
            shards.check_layout(database, connection)
        return found

    found = database.run(look)
    if found is None:
        raise _missing(database)
    if found != REVISION:
        _refuse_newer(database, found)
        raise LibraryError(
            f"the library {database.url} has tables of version {found}, and this release uses "
            f"{REVISION}: run 'celery toc library upgrade'"
        )


def _missing(database: Database) -> LibraryError:
    return LibraryError(
        f"the library {database.url} has no tables yet: run 'celery toc library create'"
    )


@lru_cache(maxsize=1)
def _known() -> frozenset[str]:
    return frozenset(
        one.revision for one in ScriptDirectory.from_config(_config()).walk_revisions()
    )


def _refuse_newer(database: Database, found: str) -> None:
    if found not in _known():
        raise LibraryError(
            f"the library {database.url} has tables of version {found}, which this release does "
            "not know: install the release that made them, or a newer one"
        )


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    return config


def _upgrade(shards: Shards, database: Database, to: str = "head") -> None:
    config = _config()
    config.attributes["tables"] = shards.number_of_tables

    def work(connection: Connection) -> None:
        config.attributes["connection"] = connection
        command.upgrade(config, to)
        if connection.execute(select(LAYOUT.c.id)).first() is None:
            connection.execute(
                insert(LAYOUT).values(
                    id=1,
                    number=database.number,
                    of_databases=len(shards.databases),
                    of_tables=shards.number_of_tables,
                )
            )

    if database.url.is_sqlite:
        database.run(work)  # whose statements may take any time
        return
    patient = Database(database.number, database.url, PATIENCE)
    try:
        patient.run(work)
    finally:
        patient.close()
