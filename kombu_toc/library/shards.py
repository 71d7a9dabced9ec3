"""The shards of a library: databases, each with some tables, and how a transaction is run there."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection, Engine, RowMapping, select, tuple_
from sqlalchemy.exc import DBAPIError, SQLAlchemyError, StatementError

from ..client.options import DatabaseURL
from ..errors import ConfigurationError, LibraryError
from ..model.delivery import spread_of, spread_of_biz
from ..model.topic import slot_of
from .db import OF_TABLE, Dialect, RefusedError, Watchdog, library_error, open_engines
from .records import Key
from .schema import LAYOUT, ShardTables, tables

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

    def __init__(self, number: int, url: DatabaseURL, timeout: float, watchdog: Watchdog) -> None:
        self.number = number
        self.url = url
        self.engine: Engine
        self.dialect: Dialect
        self.engine, self._single, self.dialect = open_engines(url, timeout)
        self._timeout = timeout
        self._rests_until = 0.0
        self._watchdog = watchdog
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
        self.run_single(lambda connection: connection.execute(statement, values))

    def read(self, statement: Any, values: Any = None) -> Sequence[RowMapping]:
        """The rows that a SELECT finds."""
        return self.run_single(lambda one: one.execute(statement, values).mappings().all())

    def pages(self, reading: Any, *key: Any, size: int) -> Iterator[Sequence[RowMapping]]:
        """The rows that a SELECT finds, in the order of these columns, so many at a time. A row
        that is deleted meanwhile keeps none of the others from being found."""
        page = reading.order_by(*key).limit(size)
        after: tuple[Any, ...] | None = None
        # The first column as well: so an index leads to where a page begins.
        while rows := self.read(
            page if after is None else page.where(key[0] >= after[0], tuple_(*key) > after)
        ):
            yield rows
            after = tuple(rows[-1][one.name] for one in key)

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
        patient = Database(self.number, self.url, seconds, self._watchdog)
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


class Asking:
    """Several databases are asked one after the other. Within ``with asking``, one is: its
    LibraryError is noted, and the others are asked all the same.

    error: of the first that was away
    """

    error: LibraryError | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, exc: BaseException | None, trace: Any) -> bool:
        if not isinstance(exc, LibraryError):
            return False
        self.error = self.error or exc
        return True


@contextmanager
def each_asked() -> Iterator[Asking]:
    """Within this, databases are asked: at its end, the error of the first that was away is
    raised."""
    asking = Asking()
    yield asking
    if asking.error is not None:
        raise asking.error


#: Rows that one statement names.
CHUNK = 500


def chunks(items: Sequence[R]) -> Iterator[Sequence[R]]:
    """Items, as many as one statement names."""
    for start in range(0, len(items), CHUNK):
        yield items[start : start + CHUNK]


class Shard(NamedTuple):
    """Where some of the rows are."""

    number: int
    database: Database
    tables: ShardTables

    def own(self, statement: Any) -> Any:
        """A statement of the first tables of a database as one of this shard's."""
        return statement.execution_options(**{OF_TABLE: int(self.tables.pending.name[12:])})


#: What a database says of itself that has no rows any more.
MOVED = (-1, 0, 0)


class Layout(NamedTuple):
    """The databases that rows are spread over, and the tables of each."""

    urls: Sequence[DatabaseURL]
    tables: int


class Shards:
    """The shards of a library. Nothing is sent before one is used.

    former: the layout that the library has had: rows are moved from there when they are used
    """

    def __init__(
        self,
        urls: Sequence[DatabaseURL],
        number_of_tables: int,
        timeout: float,
        former: Layout | None = None,
    ) -> None:
        if not urls:
            raise ConfigurationError("a library needs a database: set toc_library")
        self.layout, self.former = Layout(urls, number_of_tables), former
        every = dict.fromkeys((*urls, *(former.urls if former else ())))
        watchdog = Watchdog(timeout)
        self.databases = [Database(*one, timeout, watchdog) for one in enumerate(every)]
        #: by the place: first those that rows belong to, then others in which they may still be
        places: dict[tuple[DatabaseURL, int], Shard] = {}

        def shards_of(layout: Layout) -> list[Shard]:
            found = []
            for database in (
                one for url in layout.urls for one in self.databases if one.url == url
            ):
                for number in range(layout.tables):
                    new = Shard(len(places), database, tables(number))
                    found.append(places.setdefault((database.url, number), new))
            return found

        self._own = shards_of(self.layout)
        self._before = [] if former is None else shards_of(former)
        self.all = list(places.values())
        #: told of the keys of rows before these are used, while rows are moved
        self.pull: Callable[[Sequence[Key]], None] = lambda keys: None

    def awake(self, databases: Sequence[Database] | None = None) -> Iterator[Database]:
        """Those of some databases, or of all, that were not away a moment ago."""
        return (one for one in databases or self.databases if not one.rests)

    def of(self, id: str) -> Shard:
        """The shard of a job id: of the rows without a business id."""
        if len(self.all) == 1:
            return self.all[0]
        return self._own[slot_of(id, len(self._own))]

    def of_key(self, key: Key) -> Shard:
        """The shard of the row with this key."""
        if len(self.all) == 1:
            return self.all[0]
        return self.of_spread(spread_of(key[0], key[1]))

    def of_biz(self, biz_id: str) -> list[Shard]:
        """The shard of a business id; while rows are moved, also the one that it had."""
        return self.both(spread_of_biz(biz_id))

    def of_spread(self, spread: int) -> Shard:
        """The shard that a spread picks."""
        return self._own[spread % len(self._own)]

    def before(self, spread: int) -> Shard:
        """The shard that a spread has picked, if rows are moved."""
        return self._before[spread % len(self._before)]

    def both(self, spread: int) -> list[Shard]:
        """The shards in which the rows of a spread may be."""
        own = self.of_spread(spread)
        return [own] if not self._before else list(dict.fromkeys((own, self.before(spread))))

    def divided(self, items: Iterable[R], key_of: Callable[[R], Key]) -> dict[Shard, list[R]]:
        """Items, by the shards of the rows with their keys."""
        if len(self.all) == 1:
            every = list(items)
            return {self.all[0]: every} if every else {}
        found: dict[Shard, list[R]] = defaultdict(list)
        for item in items:
            found[self.of_key(key_of(item))].append(item)
        return found

    def of_keys(self, keys: Iterable[Key]) -> dict[Shard, list[Key]]:
        """Keys, by the shards of their rows, which are there from now on."""
        if not self._before:
            return self.divided(keys, lambda key: key)
        keys = list(keys)
        self.pull(keys)
        return self.divided(keys, lambda key: key)

    def parts_of(self, keys: Iterable[Key]) -> Iterator[tuple[Shard, Sequence[Key]]]:
        """As :meth:`of_keys`, as many as a statement names; in one order, so that two processes do
        not wait for each other."""
        for shard, some in self.of_keys(keys).items():
            for chunk in chunks(sorted(some)):
                yield shard, chunk

    def of_database(self, database: Database) -> list[Shard]:
        """The shards of a database."""
        return [one for one in self.all if one.database is database]

    def beside(self, shard: Shard, database: Database) -> Shard:
        """The shard of another database in which rows wait to be moved to this one."""
        there = self.of_database(database)
        return there[shard.number % len(there)]

    def database_of(self, stored: tuple[int, int, int]) -> Database | None:
        """The database that says this of itself: its number, how many there are, and how many
        tables each has. None if it is not known which one that is."""
        found = {
            layout.urls[stored[0]]
            for layout in (self.layout, self.former)
            if layout and (len(layout.urls), layout.tables) == stored[1:] and stored[0] >= 0
        }
        return next((one for one in self.databases if {one.url} == found), None)

    def layout_of(self, database: Database) -> Layout:
        """The layout by which a database is made."""
        if self.former is not None and database.url not in self.layout.urls:
            return self.former
        return self.layout

    def tables_in(self, database: Database) -> int:
        """How many tables of each kind a database is to have."""
        return len(self.of_database(database))

    def side_by_side(
        self, work: Callable[[Database], T], databases: Iterable[Database] | None = None
    ) -> tuple[dict[Database, T], dict[Database, LibraryError]]:
        """What some work has found of each database, or the error of one that is away: no database
        waits for another.

        databases: all unless given
        """
        some = list(self.databases if databases is None else databases)
        found: dict[Database, T] = {}
        errors: dict[Database, LibraryError] = {}

        def ask(database: Database) -> None:
            try:
                found[database] = work(database)
            except LibraryError as exc:
                errors[database] = exc

        if len(some) == 1:
            ask(some[0])
        else:
            with ThreadPoolExecutor(len(some) or 1, "toc-library") as pool:
                list(pool.map(ask, some))
        return found, errors

    def asked(self, work: Callable[[Database], T]) -> Iterable[T]:
        """As :meth:`side_by_side`, of all databases. Raises LibraryError if one is away."""
        found, errors = self.side_by_side(work)
        for error in errors.values():
            raise error
        return found.values()

    def check_layout(self, database: Database, connection: Connection) -> None:
        """Raises LibraryError if the database is not the shard that the configuration takes it
        for: rows would be looked for where they are not."""
        row = connection.execute(select(LAYOUT)).mappings().one_or_none()
        if row is None:
            return
        stored = (row["number"], row["of_databases"], row["of_tables"])
        layouts = [one for one in (self.layout, self.former) if one and database.url in one.urls]
        configured = [(one.urls.index(database.url), len(one.urls), one.tables) for one in layouts]
        if stored == MOVED:
            if database.url not in self.layout.urls:
                return
            raise LibraryError(
                f"the library {database.url} has given its rows to other databases: take it out of "
                "toc_library"
            )
        if stored not in configured:
            number, databases, tables = configured[0]
            raise LibraryError(
                f"the library {database.url} was created as database {stored[0] + 1} of "
                f"{stored[1]} with {stored[2]} tables; toc_library and toc_library_tables make it "
                f"database {number + 1} of {databases} with {tables}: set them as they were, "
                "or say in toc_library_before and toc_library_tables_before how they were, and run "
                "'celery toc library reshard'"
            )

    def close(self, *, inherited: bool = False) -> None:
        for database in self.databases:
            database.close(inherited=inherited)
