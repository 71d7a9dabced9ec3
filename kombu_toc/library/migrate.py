"""Makes the tables of a library, and brings them up to date."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, insert, inspect, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.schema import CreateIndex, CreateTable

from ..errors import LibraryError
from .schema import LAYOUT, REVISION, SHARED, VERSION_TABLE, indexes_of, tables
from .shards import Database, Shards, library_error

logger = logging.getLogger(__name__)

#: Seconds that a change of a large table may take, and between two looks whether another process
#: is still at it.
PATIENCE = 6 * 3600.0
PAUSE = 0.1

#: Alembic has one environment for all threads of a process.
_alembic = threading.Lock()


def _after_fork() -> None:
    global _alembic
    _alembic = threading.Lock()  # one of the parent's threads may have held it


os.register_at_fork(after_in_child=_after_fork)

_FOLDER = Path(__file__).parent / "migrations"


def version_of(database: Database) -> str | None:
    """The version of a database's tables; None if there are none. Raises LibraryError."""
    return database.run(_version)


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    made = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    return made.get_current_revision()


def _is_made(connection: Connection) -> bool:
    """Whether there are tables. Which database this is, is said last of all."""
    if _version(connection) is None:
        return False
    return connection.execute(select(LAYOUT.c.id)).first() is not None


def create(shards: Shards, databases: Iterable[Database] | None = None) -> list[Database]:
    """Make the tables of databases that have none; return these databases. Raises LibraryError.

    databases: all unless given
    """
    every = shards.databases if databases is None else databases
    return [database for database in every if _create(shards, database)]


def _create(shards: Shards, database: Database) -> bool:
    with database.as_it_is():
        if not database.run(_is_made):
            return _change(shards, database, unless=_is_made)
        database.run(partial(shards.check_layout, database))
        return shards.former is not None and _add_tables(shards, database)


def _add_tables(shards: Shards, database: Database) -> bool:
    """Make the tables that another layout needs, and that a database has not; return whether there
    were any."""

    def work(connection: Connection) -> bool:
        if not _is_whole(shards, database, connection):
            make_tables(connection, len(shards.of_database(database)))
        return True

    if database.run(partial(_is_whole, shards, database)):
        return False
    with database.patiently(PATIENCE) as patient, _alone(patient):
        return patient.run(work)


def _is_whole(shards: Shards, database: Database, connection: Connection) -> bool:
    last = tables(len(shards.of_database(database)) - 1).history
    return inspect(connection).has_table(last.name)


def make_tables(connection: Connection, number: int) -> None:
    """Make so many tables of each kind, and those that a database has once, as far as they are not
    there."""
    kind = connection.dialect.name
    today = int(time.time() // 86400)
    every = [one for at in range(number) for one in tables(at)]
    # What was stopped in between can be repeated: not every database undoes it.
    for table in (*SHARED, *every):
        made = CreateTable(table, if_not_exists=True)
        if table.name.startswith("toc_history") and kind in ("mysql", "mariadb"):
            # In one statement with the table: a partitioned table has one partition at least.
            written = str(made.compile(dialect=connection.dialect))
            partition = f"PARTITION d{today} VALUES LESS THAN ({today + 1})"
            connection.execute(text(f"{written} PARTITION BY RANGE (day) ({partition})"))
        else:
            connection.execute(made)
        there = {one["name"] for one in inspect(connection).get_indexes(table.name)}
        for index in indexes_of(table, kind):
            if index.name not in there:
                connection.execute(CreateIndex(index))


def upgrade(shards: Shards) -> list[Database]:
    """Bring the tables of databases up to date whose tables are older; return these databases.
    Raises LibraryError if there is none in one of them."""
    return [database for database in shards.databases if _upgrade(shards, database)]


def _upgrade(shards: Shards, database: Database) -> bool:
    with database.as_it_is():
        found = version_of(database)
        if found is None:
            raise _missing(database)
        if found == REVISION:
            return False
        _refuse_newer(database, found)
        return _change(shards, database, unless=lambda one: _version(one) == REVISION)


def prepare(shards: Shards, database: Database) -> None:
    """As :func:`check`; makes the tables of SQLite."""
    if all(one.url.is_sqlite for one in shards.databases):
        create(shards, [database])
    check(shards, database)


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
    if shards.former is not None and not database.run(partial(_is_whole, shards, database)):
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


def _refuse_newer(database: Database, found: str) -> None:
    known = ScriptDirectory.from_config(_config()).walk_revisions()
    if all(found != one.revision for one in known):
        raise LibraryError(
            f"the library {database.url} has tables of version {found}, which this release does "
            "not know: install the release that made them, or a newer one"
        )


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    return config


def _change(shards: Shards, database: Database, unless: Callable[[Connection], bool]) -> bool:
    """Bring the tables of a database to this version; return whether that was done here.

    unless: says that another process has done it. One does it at a time
    """
    config = _config()
    config.attributes["tables"] = len(shards.of_database(database))

    def work(connection: Connection) -> bool:
        # SQLite does all of it or nothing, and who writes waits; the others let Alembic begin.
        patient.dialect.lock(connection, PATIENCE)
        if unless(connection):
            return False
        if not patient.url.is_sqlite:
            connection.rollback()
        config.attributes["connection"] = connection
        with _alembic:
            command.upgrade(config, "head")
        if connection.execute(select(LAYOUT.c.id)).first() is None:
            connection.execute(insert(LAYOUT).values((1, *shards.configured(database)[0])))
        return True

    with database.patiently(PATIENCE) as patient, _alone(patient):
        return patient.run(work)


@contextmanager
def _alone(database: Database) -> Iterator[None]:
    """While no other process changes the tables of a database."""
    if database.url.is_sqlite:  # which sees to that itself
        yield
        return
    with ExitStack() as stack:
        try:
            connection = stack.enter_context(database.engine.connect())
            _wait_for_turn(database, connection)
        except SQLAlchemyError as exc:
            raise library_error(database.url, exc) from None
        try:
            yield
        finally:
            with suppress(SQLAlchemyError):  # it is over with the connection
                database.dialect.end_turn(connection)


def _wait_for_turn(database: Database, connection: Connection) -> None:
    until, waits = time.monotonic() + PATIENCE, False
    # Nobody waits within a statement: to make an index, PostgreSQL waits for it to end.
    while not database.dialect.take_turn(connection):
        connection.rollback()
        if time.monotonic() >= until:
            raise LibraryError(
                f"another process has changed the tables of the library {database.url} for "
                f"{PATIENCE / 3600:g} hours: run the command again when it has ended"
            )
        if not waits:
            waits = True
            logger.warning(
                "another process changes the tables of the library %s: this one waits for it",
                database.url,
            )
        time.sleep(PAUSE)
