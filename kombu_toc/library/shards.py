"""The shards of a library: databases, each with some tables, and how a transaction is run there."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection, Engine, RowMapping, select
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ..client.databases import DatabaseURL
from ..errors import ConfigurationError, LibraryError
from ..model.topic import slot_of
from .engines import Dialect, library_error, open_engines
from .schema import LAYOUT, ShardTables, tables
from .watchdog import Watchdog

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

#: How many times as long as a statement a transaction may take.
TRANSACTION = 2

#: How often a transaction is tried that fails for a reason which may pass, and seconds between.
ATTEMPTS = 5
PAUSE = 0.02


class Database:
    """One database of a library."""

    def __init__(self, number: int, url: DatabaseURL, timeout: float) -> None:
        self.number = number
        self.url = url
        self.engine: Engine
        self.dialect: Dialect
        self.engine, self._single, self.dialect = open_engines(url, timeout)
        self._watchdog = Watchdog(timeout * TRANSACTION)
        #: what a driver raises that SQLAlchemy has not translated
        self._raw: type[Exception] = self.engine.dialect.loaded_dbapi.Error

    def run(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction. It is run again after a deadlock, or over a new connection
        if the one that it was given was broken: what it does must be repeatable.

        Raises LibraryError.
        """
        return self._run(self.engine, work)

    def run_single(self, work: Callable[[Connection], T]) -> T:
        """Run `work`, which is one statement, without a transaction around it."""
        return self._run(self._single, work)

    def execute(self, statement: Any, values: Any = None) -> None:
        """Run one statement that changes something, by itself."""

        def work(connection: Connection) -> None:
            connection.execute(statement, values)

        self.run_single(work)

    def read(self, statement: Any) -> Sequence[RowMapping]:
        """The rows that a SELECT finds."""

        def work(connection: Connection) -> Sequence[RowMapping]:
            return connection.execute(statement).mappings().all()

        return self.run_single(work)

    def _run(self, engine: Engine, work: Callable[[Connection], T]) -> T:
        broken = False
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with engine.connect() as connection:
                    descriptor = self.dialect.socket_of(connection)
                    with self._watchdog.watching(descriptor) if descriptor else nullcontext():
                        found = work(connection)
                        connection.commit()
                        return found
            except DBAPIError as exc:
                # Also the others in the pool are closed by then.
                if exc.connection_invalidated and not broken:
                    broken = True
                    continue
                if attempt == ATTEMPTS or not self.dialect.is_temporary(exc):
                    raise library_error(self.url, exc) from None
                time.sleep(PAUSE * attempt)
            except self._raw as exc:
                if broken:
                    raise library_error(self.url, exc) from None
                broken = True
            except SQLAlchemyError as exc:
                raise library_error(self.url, exc) from None
        raise AssertionError

    def close(self, *, inherited: bool = False) -> None:
        """Close its connections; of those that a forked process has inherited, forget them."""
        for engine in (self.engine, self._single):
            engine.dispose(close=not inherited)


class Shard(NamedTuple):
    """Where some of the rows are."""

    number: int
    database: Database
    tables: ShardTables


class Shards:
    """The shards of a library. Nothing is sent before one is used."""

    def __init__(self, urls: Sequence[DatabaseURL], number_of_tables: int, timeout: float) -> None:
        if not urls:
            raise ConfigurationError("a library needs a database: set toc_library")
        self.number_of_tables = number_of_tables
        self.databases = [Database(number, url, timeout) for number, url in enumerate(urls)]
        self.all = [
            Shard(at * number_of_tables + number, database, tables(number))
            for at, database in enumerate(self.databases)
            for number in range(number_of_tables)
        ]

    def of(self, id: str) -> Shard:
        """The shard of a job id."""
        return self.all[slot_of(id, len(self.all))]

    def divided(self, items: Iterable[R], id_of: Callable[[R], str]) -> dict[Shard, list[R]]:
        """Items, by the shards of their ids."""
        found: dict[int, list[R]] = defaultdict(list)
        for item in items:
            found[slot_of(id_of(item), len(self.all))].append(item)
        return {self.all[number]: some for number, some in found.items()}

    def check_layout(self, database: Database, connection: Connection) -> None:
        """Raises LibraryError if the database is not the shard that the configuration takes it
        for: rows would be looked for where they are not."""
        row = connection.execute(select(LAYOUT)).mappings().one_or_none()
        configured = (database.number, len(self.databases), self.number_of_tables)
        if row is None:
            return
        stored = (row["number"], row["of_databases"], row["of_tables"])
        if stored != configured:
            raise LibraryError(
                f"the library {database.url} was created as database {stored[0] + 1} of "
                f"{stored[1]} with {stored[2]} tables; toc_library and toc_library_tables make it "
                f"database {configured[0] + 1} of {configured[1]} with {configured[2]}: set them "
                "as they were"
            )

    def close(self, *, inherited: bool = False) -> None:
        for database in self.databases:
            database.close(inherited=inherited)
