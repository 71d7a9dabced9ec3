"""The shards of a library: databases, each with some tables, and how a transaction is run there."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection, Engine, RowMapping, select
from sqlalchemy.exc import DBAPIError, SQLAlchemyError, StatementError

from ..client.databases import DatabaseURL
from ..errors import ConfigurationError, LibraryError
from ..model.topic import slot_of
from .engines import Dialect, RefusedError, library_error, open_engines
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

#: Seconds for which a database that did not answer is left alone by who can do something else.
REST = 5.0


class Database:
    """One database of a library."""

    def __init__(self, number: int, url: DatabaseURL, timeout: float) -> None:
        self.number = number
        self.url = url
        self.engine: Engine
        self.dialect: Dialect
        self.engine, self._single, self.dialect = open_engines(url, timeout)
        self._timeout = timeout
        self._rests_until = 0.0
        self._watchdog = Watchdog(timeout)
        #: what a driver raises that SQLAlchemy has not translated
        self._raw: type[Exception] = self.engine.dialect.loaded_dbapi.Error

    @property
    def rests(self) -> bool:
        """Whether it could not be used a moment ago."""
        return time.monotonic() < self._rests_until

    def run(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction. It is run again after a deadlock, or over a new connection
        if the one that it was given was broken: what it does must be repeatable.

        Raises LibraryError: a RefusedError if the database works and does not take a value.
        """
        return self._run(self.engine, self._timeout * TRANSACTION, work)

    def run_single(self, work: Callable[[Connection], T]) -> T:
        """Run `work`, which is one statement, without a transaction around it."""
        return self._run(self._single, self._timeout, work)

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

    def _run(self, engine: Engine, seconds: float, work: Callable[[Connection], T]) -> T:
        # Whatever is tried again: who waits is told when the time is over, or soon after.
        until = time.monotonic() + seconds
        broken = False
        for attempt in range(1, ATTEMPTS + 1):
            try:
                found = self._attempt(engine, until, work)
                self._rests_until = 0.0
                return found
            except DBAPIError as exc:
                if self._is_too_large(exc, engine):
                    raise RefusedError(
                        f"the library {self.url} does not take a message or a list of this size: "
                        "raise its max_allowed_packet, to more than twice the largest message"
                    ) from None
                late = time.monotonic() >= until
                # Also the others in the pool are closed by then.
                if exc.connection_invalidated and not broken and not late:
                    broken = True
                    continue
                if attempt < ATTEMPTS and not late and self.dialect.is_temporary(exc):
                    time.sleep(PAUSE * attempt)
                elif self.dialect.refuses(exc):
                    raise library_error(self.url, exc, RefusedError) from None
                else:
                    raise self._unusable(exc) from None
            except self._raw as exc:
                if broken or time.monotonic() >= until:
                    raise self._unusable(exc) from None
                broken = True
            except StatementError as exc:
                raise library_error(self.url, exc, RefusedError) from None
            except SQLAlchemyError as exc:
                raise self._unusable(exc) from None
        raise AssertionError

    def _is_too_large(self, error: DBAPIError, engine: Engine) -> bool:
        try:
            return self.dialect.is_too_large(error, engine)
        except (SQLAlchemyError, self._raw):
            return False  # it is away

    def _unusable(self, error: Exception) -> LibraryError:
        self._rests_until = time.monotonic() + REST
        return library_error(self.url, error)

    def _attempt(self, engine: Engine, until: float, work: Callable[[Connection], T]) -> T:
        try:
            connection = engine.connect()
        except TypeError as exc:  # what the URL asks for, and the driver does not know
            raise library_error(self.url, exc) from None
        descriptor = self.dialect.socket_of(connection)
        # Until it is back in the pool: what was not committed is rolled back before.
        watching = self._watchdog.watching(descriptor, until) if descriptor else nullcontext()
        with watching, connection:
            found = work(connection)
            connection.commit()
        return found

    @contextmanager
    def patiently(self, seconds: float) -> Iterator[Database]:
        """The same database over connections of its own, whose statements may take so long. Raises
        LibraryError, as soon as ever, if it does not answer."""
        if self.url.is_sqlite:  # whose statements may take any time
            yield self
            return
        self.run_single(lambda connection: connection.exec_driver_sql("SELECT 1"))
        patient = Database(self.number, self.url, seconds)
        try:
            yield patient
        finally:
            patient.close()

    def close(self, *, inherited: bool = False) -> None:
        """Close its connections; of those that a forked process has inherited, forget them."""
        if inherited:
            self._watchdog.after_fork()
        for engine in (self.engine, self._single):
            engine.dispose(close=not inherited)
        if not inherited:
            self._watchdog.close()


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

    def awake(self) -> Iterator[Shard]:
        """The shards whose databases were not away a moment ago."""
        return (shard for shard in self.all if not shard.database.rests)

    def of(self, id: str) -> Shard:
        """The shard of a job id."""
        if len(self.all) == 1:
            return self.all[0]
        return self.all[slot_of(id, len(self.all))]

    def divided(self, items: Iterable[R], id_of: Callable[[R], str]) -> dict[Shard, list[R]]:
        """Items, by the shards of their ids."""
        if len(self.all) == 1:
            every = list(items)
            return {self.all[0]: every} if every else {}
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
