"""The shards of a library: databases of several kinds, each with some tables, and how a transaction
is run there."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import socket
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, Table
from sqlalchemy.dialects import mysql, postgresql, sqlite

from ..center.core import started
from ..client.options import DatabaseURL
from ..errors import ConfigurationError, LibraryError
from ..model.delivery import spread_of
from ..model.topic import checksum_of
from ..scripts.call import parts_of
from .outcomes import MySQLOutcomes, Outcomes, PostgreSQLOutcomes
from .records import Key
from .schema import LAYOUT, Attributes, ShardTables, tables

# -- what differs between SQLite, PostgreSQL, and MySQL or MariaDB
#
# Statements are plain SQL for one shard, in one transaction or none: no RETURNING, no sequences.

#: Connections that a process keeps open to a database, and how many more it opens if need be.
_POOL = {"pool_size": 5, "max_overflow": 10}

#: Errors that repeating may mend: PostgreSQL's SQLSTATE, MySQL's numbers. The latter of each are
#: those of two processes that make room for a day at the same moment.
_AGAIN_STATES = frozenset(("40001", "40P01", "55P03", "42P07", "23505"))
_AGAIN_NUMBERS = frozenset((1205, 1213, 1493, 1517))

#: Errors that say that a row cannot be kept as it is: classes of PostgreSQL's SQLSTATE (data,
#: integrity, limits of the program), MySQL's numbers (a packet or a value that is too large, a
#: wrong text, a constraint).
_REFUSED_CLASSES = frozenset(("22", "23", "54"))
_REFUSED_NUMBERS = frozenset((1118, 1153, 1366, 1406, 3819, 4025))

#: What MySQL says of a statement that is too large, and what its client says when the server has
#: closed the connection, as it does then, too.
TOO_LARGE = 1153
_CLOSED_NUMBERS = frozenset((2006, 2013))


#: Rows that one statement inserts, and deletes of a day that is dropped.
ROWS_PER_STATEMENT = 1000
ROWS_PER_DELETE = 5000

#: Bytes that MySQL takes in one statement in any case, as it is configured.
SMALLEST_PACKET = 1 << 20


#: The first SQLite that knows UPDATE FROM.
OLDEST_SQLITE = (3, 33)

#: The lock of who changes tables. MySQL has its locks for all databases of a server together.
TURN = "toc_library_tables"
_TURN_IN_MYSQL = f"MD5(CONCAT(DATABASE(), '.{TURN}'))"


def _array_of(type: Any) -> str:
    """What PostgreSQL calls the values of a column."""
    if isinstance(type, Attributes):
        return "jsonb"
    for kind, name in (
        (sa.SmallInteger, "smallint"),
        (sa.Integer, "bigint"),
        (sa.LargeBinary, "bytea"),
    ):
        if isinstance(type, kind):
            return name
    return "text"


class Dialect:
    """SQLite, and what holds for all."""

    name = "sqlite"
    outcomes = Outcomes()
    #: SQLAlchemy's module with its INSERT
    sql: Any = sqlite
    #: of transactions; None: the default
    isolation: str | None = None

    def arguments(self, timeout: float) -> dict[str, Any]:
        return {"connect_args": {"timeout": timeout, "check_same_thread": False}}

    def insert_missing(self, table: Table) -> Any:
        """INSERT that leaves a row alone that is there already."""
        return self.sql.insert(table).on_conflict_do_nothing()

    def insert_rows(
        self, connection: Connection, table: Table, values: Sequence[Mapping[str, Any]]
    ) -> int | None:
        """As :meth:`insert_missing`, of many rows; how many were not there, if that is known."""
        return self.inserted(connection.execute(self.insert_missing(table), values).rowcount)

    def inserted(self, counted: int) -> int | None:
        """How many rows a statement has inserted that says to have changed so many; None if that
        is not known."""
        return counted

    def upsert(self, table: Table, keys: Sequence[str], values: Sequence[str]) -> Any:
        """INSERT that replaces these values of a row that is there already."""
        made = self.sql.insert(table)
        changes = {name: made.excluded[name] for name in values}
        return made.on_conflict_do_update(index_elements=list(keys), set_=changes)

    def socket_of(self, connection: Connection) -> int | None:
        """The socket of a connection whose driver waits without an end; None if it does not."""
        return None

    def is_temporary(self, error: sa.exc.DBAPIError) -> bool:
        """Whether the same statement may succeed if it is repeated."""
        said = str(error.orig)
        return "database is locked" in said or "database table is locked" in said

    def refuses(self, error: sa.exc.DBAPIError) -> bool:
        """Whether the row is what is wrong: another one may be written."""
        return isinstance(error, (sa.exc.DataError, sa.exc.IntegrityError)) or self._refuses(error)

    def _refuses(self, error: sa.exc.DBAPIError) -> bool:
        return False

    def is_too_large(self, error: sa.exc.DBAPIError, engine: Engine) -> bool:
        """Whether the database has closed the connection because a statement is too large for it:
        another one may succeed."""
        return False

    # -- rows that nobody else is to change meanwhile

    def lock(self, connection: Connection, seconds: float, *, lasts: bool = True) -> None:
        """Begin a transaction that reads rows to change them. SQLite has one writer: it is this
        connection from now on.

        seconds: for which a process may stand still in it, where that can be bounded
        lasts: whether it has to outlive a crash of the database that comes right after it
        """
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    def locking(self, wanted: sa.Select[Any], *, waits: bool = False) -> sa.Select[Any]:
        """A SELECT of rows that are locked from then on.

        waits: for those that somebody else has locked; else they are left out
        """
        return wanted.with_for_update(skip_locked=not waits)  # SQLite has no words for it

    # -- tables, which one process changes at a time

    def take_turn(self, connection: Connection) -> bool:
        """Whether this process may change tables, until :meth:`end_turn`."""
        return True

    def end_turn(self, connection: Connection) -> None:
        """Let the next one change tables."""

    # -- history, by days

    def add_day(self, history: Table, day: int, connection: Connection) -> None:
        """Make room for a day, where each has a partition of its own."""

    def days(self, connection: Connection, histories: Sequence[str]) -> Mapping[str, list[int]]:
        """The days that some tables have room for, sorted; without partitions, the first one that
        each has rows of."""
        asked = (f"SELECT '{name}' AS name, MIN(day) AS day FROM {name}" for name in histories)
        rows = connection.exec_driver_sql(" UNION ALL ".join(asked))
        return {name: [] if day is None else [day] for name, day in rows}

    def drop_before(self, history: Table, day: int, connection: Connection) -> tuple[int, bool]:
        """Drop the days before this one; how many are gone, and whether there may be more to be
        dropped. Without partitions, some rows of the first of them are deleted: who writes
        meanwhile waits no longer than that takes."""
        days = self.days(connection, [history.name])[history.name]
        if not days or days[0] >= day:
            return 0, False
        rows = f"SELECT rowid FROM {history.name} WHERE day = :day LIMIT"
        some = sa.text(f"DELETE FROM {history.name} WHERE rowid IN ({rows} {ROWS_PER_DELETE})")
        connection.execute(some, {"day": days[0]})
        left = connection.execute(sa.text(f"{rows} 1"), {"day": days[0]}).first()
        return int(left is None), True


class PostgreSQL(Dialect):
    name = "postgresql"
    outcomes = PostgreSQLOutcomes()
    sql = postgresql

    def arguments(self, timeout: float) -> dict[str, Any]:
        ms = int(timeout * 1000)
        return {
            **_POOL,
            "pool_timeout": timeout,
            "connect_args": {
                "connect_timeout": max(int(timeout), 2),
                "options": f"-c statement_timeout={ms} -c lock_timeout={ms}",
                "tcp_user_timeout": ms,
                "keepalives_idle": 30,
                "application_name": "celery-toc",
            },
        }

    def insert_rows(
        self, connection: Connection, table: Table, values: Sequence[Mapping[str, Any]]
    ) -> int | None:
        # One statement, whose arguments are columns: the database reads it once.
        names = list(values[0])
        columns = ", ".join(f"%s::{_array_of(table.c[name].type)}[]" for name in names)
        statement = (
            f"INSERT INTO {table.name} ({', '.join(names)}) "
            f"SELECT * FROM unnest({columns}) ON CONFLICT DO NOTHING"
        )
        inserted = 0
        for some in parts_of(values, ROWS_PER_STATEMENT):
            arrays = tuple([one[name] for one in some] for name in names)
            inserted += connection.exec_driver_sql(statement, arrays).rowcount
        return inserted

    def socket_of(self, connection: Connection) -> int | None:
        raw: Any = connection.connection.dbapi_connection
        return int(raw.pgconn.socket)

    def is_temporary(self, error: sa.exc.DBAPIError) -> bool:
        return getattr(error.orig, "sqlstate", None) in _AGAIN_STATES

    def _refuses(self, error: sa.exc.DBAPIError) -> bool:
        return str(getattr(error.orig, "sqlstate", None))[:2] in _REFUSED_CLASSES

    def lock(self, connection: Connection, seconds: float, *, lasts: bool = True) -> None:
        ms = int(seconds * 1000)
        connection.exec_driver_sql(
            f"SELECT set_config('idle_in_transaction_session_timeout', '{ms}', true)"
            + ("" if lasts else ", set_config('synchronous_commit', 'off', true)")
        )

    def take_turn(self, connection: Connection) -> bool:
        # Of a transaction, which a pooler of connections keeps together. It holds nothing else
        # that whoever makes an index waits for.
        asked = f"SELECT pg_try_advisory_xact_lock(hashtext('{TURN}'), 0)"
        return bool(connection.exec_driver_sql(asked).scalar())

    def end_turn(self, connection: Connection) -> None:
        connection.rollback()

    def add_day(self, history: Table, day: int, connection: Connection) -> None:
        connection.execute(
            sa.text(
                f"CREATE TABLE IF NOT EXISTS {history.name}_{day} PARTITION OF {history.name} "
                f"FOR VALUES FROM ({day}) TO ({day + 1})"
            )
        )

    def days(self, connection: Connection, histories: Sequence[str]) -> Mapping[str, list[int]]:
        asked = (
            "SELECT parent.relname, substring(child.relname FROM '[0-9]+$') FROM pg_inherits "
            "JOIN pg_class parent ON parent.oid = inhparent "
            "JOIN pg_class child ON child.oid = inhrelid "
            "WHERE inhparent = ANY(CAST(:of AS regclass[]))"
        )
        return _by_table(histories, connection.execute(sa.text(asked), {"of": list(histories)}))

    def drop_before(self, history: Table, day: int, connection: Connection) -> tuple[int, bool]:
        days = self.days(connection, [history.name])[history.name]
        old = [one for one in days if one < day]
        for one in old:
            connection.execute(sa.text(f"DROP TABLE IF EXISTS {history.name}_{one}"))
        return len(old), False


class MySQL(Dialect):
    name = "mysql"
    outcomes = MySQLOutcomes()
    isolation = "READ COMMITTED"

    def arguments(self, timeout: float) -> dict[str, Any]:
        return {
            **_POOL,
            "pool_timeout": timeout,
            "pool_recycle": 3600,
            "connect_args": {
                "connect_timeout": timeout,
                "read_timeout": timeout,
                "write_timeout": timeout,
                "charset": "utf8mb4",
            },
        }

    def insert_missing(self, table: Table) -> Any:
        made = mysql.insert(table)
        return made.on_duplicate_key_update(id=table.c.id)

    def inserted(self, counted: int) -> int | None:
        return None  # one that was there counts as well

    def upsert(self, table: Table, keys: Sequence[str], values: Sequence[str]) -> Any:
        made = mysql.insert(table)
        return made.on_duplicate_key_update({name: made.inserted[name] for name in values})

    def is_temporary(self, error: sa.exc.DBAPIError) -> bool:
        return _number(error) in _AGAIN_NUMBERS

    def _refuses(self, error: sa.exc.DBAPIError) -> bool:
        return _number(error) in _REFUSED_NUMBERS

    def is_too_large(self, error: sa.exc.DBAPIError, engine: Engine) -> bool:
        # It says so at times, and closes the connection: then the latest error is that of what was
        # sent next.
        numbers = list(map(_number, _with_earlier(error)))
        if TOO_LARGE in numbers:
            return True
        if numbers[0] not in _CLOSED_NUMBERS:
            return False
        size = _bytes_sent(error.params)
        if size < SMALLEST_PACKET:
            return False
        with engine.connect() as connection:
            limit = connection.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one()
        return size > int(limit)

    def lock(self, connection: Connection, seconds: float, *, lasts: bool = True) -> None:
        if connection.dialect.name == "mariadb" or getattr(connection.dialect, "is_mariadb", False):
            connection.exec_driver_sql(f"SET SESSION idle_transaction_timeout = {int(seconds)}")

    def take_turn(self, connection: Connection) -> bool:
        asked = f"SELECT GET_LOCK({_TURN_IN_MYSQL}, 0)"
        return bool(connection.exec_driver_sql(asked).scalar())

    def end_turn(self, connection: Connection) -> None:
        connection.exec_driver_sql(f"DO RELEASE_LOCK({_TURN_IN_MYSQL})")

    def days(self, connection: Connection, histories: Sequence[str]) -> Mapping[str, list[int]]:
        asked = (
            "SELECT table_name, SUBSTR(partition_name, 2) FROM information_schema.partitions "
            "WHERE table_schema = DATABASE() AND table_name IN :of AND partition_name IS NOT NULL"
        )
        names: Any = sa.bindparam("of", list(histories), expanding=True)
        return _by_table(histories, connection.execute(sa.text(asked).bindparams(names)))

    def add_day(self, history: Table, day: int, connection: Connection) -> None:
        # Each partition ends where the next begins: one for a later day has room for this one.
        days = self.days(connection, [history.name])[history.name]
        holder = min((one for one in days if one >= day), default=None)
        mine = f"PARTITION d{day} VALUES LESS THAN ({day + 1})"
        change = f"ALTER TABLE {history.name} "
        if holder is None:
            connection.execute(sa.text(f"{change}ADD PARTITION IF NOT EXISTS ({mine})"))
        elif day < holder != days[0] and holder > time.time() // 86_400 + 2:
            # A machine's clock was far ahead: nothing of what comes before that day would be
            # dropped until then.
            its = f"PARTITION d{holder} VALUES LESS THAN ({holder + 1})"
            connection.execute(
                sa.text(f"{change}REORGANIZE PARTITION d{holder} INTO ({mine}, {its})")
            )

    def drop_before(self, history: Table, day: int, connection: Connection) -> tuple[int, bool]:
        days = self.days(connection, [history.name])[history.name]
        # A table keeps one partition at least.
        old = [one for one in days if one < day and one != max(days)]
        for one in old:
            connection.execute(sa.text(f"ALTER TABLE {history.name} DROP PARTITION d{one}"))
        return len(old), False


def _by_table(tables: Sequence[str], rows: Iterable[Any]) -> Mapping[str, list[int]]:
    """Numbers in rows of a table's name and a number, sorted."""
    found: dict[str, list[int]] = {name: [] for name in tables}
    for name, number in rows:
        found[name].append(int(number))
    return {name: sorted(numbers) for name, numbers in found.items()}


def _bytes_sent(parameters: Any) -> int:
    """Bytes that a statement of MySQL's has about its values; of one for many rows, about those of
    the largest: PyMySQL sends few in one packet."""
    rows = parameters if isinstance(parameters, list) else [parameters or ()]
    values = [row.values() if isinstance(row, Mapping) else row for row in rows]
    return max((sum(map(_size_sent, some)) for some in values), default=0)


def _size_sent(value: Any) -> int:
    if isinstance(value, (bytes, bytearray)):
        return 2 * len(value)  # in hexadecimal digits
    if isinstance(value, str):
        return len(value.encode()) + sum(map(value.count, "\"'\\"))
    return 8


def _with_earlier(error: BaseException | None) -> Iterable[BaseException]:
    """An error, and those during whose handling it was raised."""
    while error is not None:
        yield error
        error = error.__context__


def _number(error: BaseException) -> Any:
    """MySQL's number of an error."""
    arguments: tuple[Any, ...] = getattr(getattr(error, "orig", error), "args", ())
    return arguments[0] if arguments else None


_DIALECTS: Mapping[str, Callable[[], Dialect]] = {
    "sqlite": Dialect,
    "postgresql": PostgreSQL,
    "mysql": MySQL,
    "mariadb": MySQL,
}

#: The package that brings each driver, for the error where it is not installed.
_PACKAGES = {"psycopg": "psycopg[binary]", "pymysql": "PyMySQL"}


def open_engines(url: DatabaseURL, timeout: float) -> tuple[Engine, Engine, Dialect]:
    """An engine for transactions, one for single statements, and what is particular to both;
    nothing is sent yet. (To switch a connection to and fro would take a round trip.)

    Raises ConfigurationError for a URL that SQLAlchemy does not understand, or whose driver is not
    installed.
    """
    revealed = url.reveal()
    dialect = _DIALECTS[revealed.partition(":")[0].partition("+")[0].lower()]()
    if url.is_sqlite and sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise ConfigurationError(
            f"the library {url} needs SQLite 3.33, and this Python has {sqlite3.sqlite_version}: "
            "use a newer Python, or another database"
        )
    try:
        how = {"hide_parameters": True, **dialect.arguments(timeout)}
        level = {"isolation_level": dialect.isolation} if dialect.isolation else {}
        engine = sa.create_engine(revealed, **how, **level)
        # Nothing is to be rolled back there: that would take one more round trip.
        single = sa.create_engine(
            revealed, **how, isolation_level="AUTOCOMMIT", pool_reset_on_return=None
        )
    except ModuleNotFoundError as exc:
        package = _PACKAGES.get(str(exc.name), str(exc.name))
        raise ConfigurationError(f"the library {url} needs {package}: pip install it") from exc
    except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, TypeError, ValueError):
        # What SQLAlchemy says of it may show the password.
        raise ConfigurationError(f"the library's URL {url} cannot be read") from None
    for one in (engine, single):
        if url.is_sqlite:
            sa.event.listen(one, "connect", _connected)
        sa.event.listen(one, "before_cursor_execute", _of_table, retval=True)
    return engine, single, dialect


def _connected(connection: Any, _: Any) -> None:
    """A connection to SQLite was made."""
    cursor = connection.cursor()
    # Readers do not wait for the writer. Of a machine that loses power, the latest transactions may
    # be missing; not of a process that is killed.
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()


#: The execution option of a statement of the first tables that is to be one of those with this
#: number. SQLAlchemy makes its text once for them all, which takes longer than to run it.
OF_TABLE = "toc_table"

_FIRST = re.compile(r"\btoc_(pending|history)_0\b")


def _of_table(
    connection: Connection, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
) -> tuple[str, Any]:
    number = context.execution_options.get(OF_TABLE) if context is not None else None
    if number:
        statement = _FIRST.sub(rf"toc_\1_{number:d}", statement)
    return statement, parameters


class RefusedError(LibraryError):
    """A database works, and does not take what it was given."""


def library_error(
    url: DatabaseURL, error: BaseException, kind: type[LibraryError] = LibraryError
) -> LibraryError:
    """What a caller is told of a database's error."""
    cause = getattr(error, "orig", None) or error
    said = url.scrub(" ".join(str(cause).split()))[:300]
    return kind(f"the library {url} cannot be used: {type(cause).__name__}: {said}")


# -- cuts connections to a database that does not answer in time
#
# A driver waits for as long as the database's machine is there: also if the database stands still.

#: Seconds between two looks, at most.
INTERVAL = 0.5

#: Seconds that the thread waits for something to watch before it ends.
IDLE = 5.0


class Watchdog:
    """Watches connections while they are used. Any thread may call it.

    timeout: seconds that a connection is watched for, at least: how often it looks
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._numbers = itertools.count()
        self.after_fork()

    def after_fork(self) -> None:
        """Nothing is watched yet in this process: the thread is its parent's."""
        self._pid, self._lock = os.getpid(), threading.Lock()
        #: what is watched: until when, in monotonic seconds, and its socket
        self._watched: dict[int, tuple[float, int]] = {}
        #: the thread that watches, and what wakes it; None: there is none
        self._bell: threading.Event | None = None

    @contextlib.contextmanager
    def watching(self, descriptor: int, until: float) -> Iterator[None]:
        """Within this, a connection is cut when the time is over.

        descriptor: of its socket
        until: monotonic seconds
        """
        if self._pid != os.getpid():
            self.after_fork()
        number = next(self._numbers)
        with self._lock:
            self._watched[number] = (until, descriptor)
            if self._bell is None:
                started(self._run, "toc-watchdog", bell := threading.Event())
                self._bell = bell
        try:
            yield
        finally:
            # Held while a connection is cut: its number may be another's afterwards.
            with self._lock:
                self._watched.pop(number, None)

    def close(self) -> None:
        """End the thread, if nothing is watched. It starts again when something is."""
        if (bell := self._bell) is not None:
            bell.set()

    def _run(self, bell: threading.Event) -> None:
        pid, used = os.getpid(), time.monotonic()
        while pid == os.getpid():
            closing = bell.wait(min(INTERVAL, self._timeout / 4))
            bell.clear()
            now = time.monotonic()
            with self._lock:
                if self._watched:
                    used = now
                elif closing or now > used + IDLE:
                    self._bell = None
                    return
                over = [
                    self._watched.pop(number)
                    for number, (until, _) in list(self._watched.items())
                    if now > until
                ]
                for _, descriptor in over:
                    _cut(descriptor)


def _cut(descriptor: int) -> None:
    """End a connection; who waits for it gets an error."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        copy.shutdown(socket.SHUT_RDWR)


logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K")
V = TypeVar("V")

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
        #: before the first statement: raises LibraryError unless the tables are those of this
        #: release; None: they are
        self.prepare: Callable[[Database], object] | None = None
        #: held by who looks, or changes them: whether that is so
        self._looking = threading.RLock()
        self._as_it_is = False

    @property
    def rests(self) -> bool:
        """Whether it could not be used a moment ago."""
        return time.monotonic() < self._rests_until

    def make_sure(self) -> None:
        """Raises LibraryError unless the tables are there. It looks once."""
        if self.prepare is not None:
            with self._looking:
                if self.prepare is not None and not self._as_it_is:
                    with self.as_it_is():
                        self.prepare(self)
                    self.prepare = None

    @contextmanager
    def as_it_is(self) -> Iterator[None]:
        """Within this, the thread uses its tables whatever they are. Others wait, unless they are
        known to be right."""
        with self._looking:
            before, self._as_it_is = self._as_it_is, True
            try:
                yield
            finally:
                self._as_it_is = before

    def run(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction. It is run again after a deadlock, or over a new connection
        if the one that it was given was broken: what it does must be repeatable.

        Raises LibraryError: a RefusedError if the database works and does not take a value.
        """
        return self._run(self.engine, self._timeout * TRANSACTION, work)

    def run_single(self, work: Callable[[Connection], T]) -> T:
        """Run `work`, which is one statement, without a transaction around it."""
        return self._run(self._single, self._timeout, work)

    def check(self) -> None:
        """Raises LibraryError if it does not answer."""
        self.run_single(lambda connection: connection.exec_driver_sql("SELECT 1"))

    def execute(self, statement: Any, values: Any = None) -> int:
        """Run one statement that changes something, by itself; return how many rows that were."""
        return self.run_single(lambda one: one.execute(statement, values).rowcount)

    def read(self, statement: Any, values: Any = None) -> Sequence[sa.RowMapping]:
        """The rows that a SELECT finds."""
        return self.run_single(lambda one: one.execute(statement, values).mappings().all())

    def keyed(
        self, table: Table, value: Any, *where: Any, limit: int | None = None
    ) -> dict[Key, Any]:
        """A column of the rows of a table for which this holds, by their keys."""
        columns = (table.c.id, table.c.token, table.c.topic, value)
        statement = sa.select(*columns).where(*where).limit(limit)
        found = self.run_single(lambda connection: connection.execute(statement).all())
        return {(id, token, topic): said for id, token, topic, said in found}

    def count(self, table: Any, *where: Any) -> int:
        """How many rows there are for which this holds."""
        counting = sa.select(sa.func.count()).select_from(table).where(*where)
        return int(self.run_single(lambda connection: connection.execute(counting).scalar_one()))

    def pages(self, reading: Any, *key: Any, size: int) -> Iterator[Sequence[sa.RowMapping]]:
        """The rows that a SELECT finds, in the order of these columns, so many at a time. A row
        that is deleted meanwhile keeps none of the others from being found."""
        page = reading.order_by(*key).limit(size)
        after: tuple[Any, ...] | None = None
        # The first column as well: so an index leads to where a page begins.
        while rows := self.read(
            page if after is None else page.where(key[0] >= after[0], sa.tuple_(*key) > after)
        ):
            yield rows
            after = tuple(rows[-1][one.name] for one in key)

    def _run(self, engine: Engine, seconds: float, work: Callable[[Connection], T]) -> T:
        self.make_sure()
        # Whatever is tried again: who waits is told when the time is over, or soon after.
        until = time.monotonic() + seconds
        broken = False
        for attempt in range(1, ATTEMPTS + 1):
            try:
                found = self._attempt(engine, until, work)
                self._rests_until = 0.0
                return found
            except sa.exc.DBAPIError as exc:
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
            except sa.exc.StatementError as exc:
                raise library_error(self.url, exc, RefusedError) from None
            except sa.exc.SQLAlchemyError as exc:
                raise self._unusable(exc) from None
        raise AssertionError

    def _is_too_large(self, error: sa.exc.DBAPIError, engine: Engine) -> bool:
        try:
            return self.dialect.is_too_large(error, engine)
        except (sa.exc.SQLAlchemyError, self._raw):
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
        """This database over connections of its own, whose statements may take so long. Raises
        LibraryError, as soon as ever, if it does not answer."""
        if self.url.is_sqlite:  # whose statements may take any time
            yield self
            return
        self.check()
        patient = Database(self.number, self.url, seconds, self._watchdog)
        try:
            yield patient
        finally:
            patient.close()

    def close(self, *, inherited: bool = False) -> None:
        """Close its connections; of those that a forked process has inherited, forget them."""
        if inherited:
            self._watchdog.after_fork()
            self._looking, self._as_it_is = threading.RLock(), False
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


#: What a value raises that a database does not take, or that cannot be sent to it.
_REFUSED = (RefusedError, ValueError, ArithmeticError, TypeError)


def write_each(
    write: Callable[[Sequence[R]], T], some: Sequence[R], refused: Callable[[R, Exception], object]
) -> T | None:
    """Write some together, and return what that does; or, if the database does not take one of
    them, each by itself.

    refused: told of one that is not taken, and why
    """
    with contextlib.suppress(*_REFUSED):
        return write(some)
    for one in some:
        try:
            write([one])
        except _REFUSED as exc:
            refused(one, exc)
    return None


#: Rows that one statement names.
CHUNK = 500


class Owed(Generic[K, V]):
    """What is to be written into databases, by its key. Each is written by itself: what is for one
    that is away is kept until that answers. Any thread may call it.

    of: a shard of the database that a key is for: what is for one is written together
    write: writes some into a database
    most: how many are kept; of more the oldest are given up
    merge: of what was owed for a key, and what has come since, what is written: the latter
    count: is told the keys of those that are given up
    """

    def __init__(
        self,
        of: Callable[[K], Shard],
        write: Callable[[Database, list[tuple[K, V]]], object],
        most: int,
        merge: Callable[[V, V], V] = lambda before, since: since,
        count: Callable[[K], object] = lambda key: None,
    ) -> None:
        self._of, self._write, self._most, self._merge, self._count = of, write, most, merge, count
        self.begin()

    def begin(self) -> None:
        """Owe nothing: also what a process owes is not its child's."""
        self._lock = threading.Lock()
        #: held by who writes
        self._writing = threading.Lock()
        self.items: dict[K, V] = {}
        #: for which databases there were some that are not written yet
        self.behind: set[Database] = set()
        #: how many were given up since it was last said
        self._lost = 0

    def __len__(self) -> int:
        return len(self.items)

    def add(self, items: Iterable[tuple[K, V]]) -> None:
        """Have these written."""
        with self._lock:
            self._add(items)

    def _add(self, items: Iterable[tuple[K, V]]) -> None:
        owed = self.items
        for key, value in items:
            if key in owed:
                value = self._merge(owed.pop(key), value)
            owed[key] = value
        while len(owed) > self._most:
            key = next(iter(owed))
            owed.pop(key)
            self._lost += 1
            self._count(key)

    def forget(self, which: Callable[[K], bool]) -> None:
        """Write nothing more of these."""
        with self._lock:
            self.items = {key: value for key, value in self.items.items() if not which(key)}

    def take_lost(self) -> int:
        """How many were given up since this was last asked."""
        with self._lock:
            lost, self._lost = self._lost, 0
        return lost

    def write(self, *, patient: bool = False, unless: Container[Database] = ()) -> None:
        """Write everything now. Raises LibraryError of the first database that is away, when what
        is for the others is written; and keeps what is not. Who calls while another thread writes
        waits for it.

        patient: leave out databases that were away a moment ago
        unless: leave out these
        """
        with self._writing:
            with self._lock:
                items, self.items = self.items, {}
            places = zip(map(self._of, items), items.items(), strict=True)
            parts: dict[Database, list[tuple[K, V]]] = defaultdict(list)
            for shard, item in sorted(places, key=itemgetter(0)):
                parts[shard.database].append(item)
            with each_asked() as asking:
                try:
                    for database, part in parts.items():
                        with asking:
                            while part and not ((patient and database.rests) or database in unless):
                                self._write(database, part[:CHUNK])
                                del part[:CHUNK]
                finally:
                    with self._lock:
                        self._put_back(parts)

    def _put_back(self, parts: Mapping[Database, list[tuple[K, V]]]) -> None:
        """Keep what is left, before what has come meanwhile. What fails first is tried last: it
        holds up no other."""
        since, self.items = self.items, {}
        for part in parts.values():
            self._add(part[CHUNK:] + part[:CHUNK])
        self.behind = {one for one, part in parts.items() if part}
        self.behind |= {self._of(key).database for key in since}
        self._add(since.items())


def chunks(items: Sequence[R]) -> Iterator[Sequence[R]]:
    """Items, as many as one statement names."""
    return parts_of(items, CHUNK)


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

    def make_sure(self) -> None:
        """Look at those that answer; of the others, whoever asks them is told. Raises LibraryError
        if none does."""
        found, errors = self.side_by_side(Database.make_sure)
        if not found:
            raise next(iter(errors.values()))

    def awake(self, databases: Sequence[Database] | None = None) -> Iterator[Database]:
        """Those of some databases, or of all, that were not away a moment ago."""
        return (one for one in databases or self.databases if not one.rests)

    def of(self, id: str) -> Shard:
        """The shard of a job id: of the rows without a business id."""
        return self.of_spread(checksum_of(id))

    def of_key(self, key: Key) -> Shard:
        """The shard of the row with this key."""
        if len(self.all) == 1:
            return self.all[0]
        return self.of_spread(spread_of(key[0], key[1]))

    def of_spread(self, spread: int) -> Shard:
        """The shard that a spread picks."""
        return self._own[spread % len(self._own)]

    def both(self, spread: int) -> list[Shard]:
        """The shards in which the rows of a spread may be."""
        own, before = self.of_spread(spread), self._before
        return [own] if not before else list(dict.fromkeys((own, before[spread % len(before)])))

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
        found = [one for one in self.databases if stored in self.configured(one)]
        return found[0] if len(found) == 1 else None

    def configured(self, database: Database) -> list[tuple[int, int, int]]:
        """What a database may say of itself, as :meth:`database_of` has it: at first by the layout
        by which it is made."""
        layouts = [one for one in (self.layout, self.former) if one and database.url in one.urls]
        return [(one.urls.index(database.url), len(one.urls), one.tables) for one in layouts]

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

    def asked(
        self, work: Callable[[Database], T], databases: Iterable[Database] | None = None
    ) -> Iterable[T]:
        """As :meth:`side_by_side`. Raises LibraryError if one is away."""
        found, errors = self.side_by_side(work, databases)
        for error in errors.values():
            raise error
        return found.values()

    def check_layout(self, database: Database, connection: Connection) -> None:
        """Raises LibraryError if the database is not the shard that the configuration takes it
        for: rows would be looked for where they are not."""
        row = connection.execute(sa.select(LAYOUT)).mappings().one_or_none()
        if row is None:
            return
        stored = (row["number"], row["of_databases"], row["of_tables"])
        configured = self.configured(database)
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
