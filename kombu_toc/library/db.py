"""What differs between SQLite, PostgreSQL, and MySQL or MariaDB."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import (
    Connection,
    Engine,
    Integer,
    LargeBinary,
    Select,
    SmallInteger,
    Table,
    bindparam,
    create_engine,
    event,
    text,
)
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, NoSuchModuleError

from ..client.options import DatabaseURL
from ..errors import ConfigurationError, LibraryError
from .schema import Attributes

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


class Dropped(NamedTuple):
    """days: how many are gone; goes_on: whether there may be more to be dropped"""

    days: int
    goes_on: bool


def _array_of(type: Any) -> str:
    """What PostgreSQL calls the values of a column."""
    if isinstance(type, Attributes):
        return "jsonb"
    for kind, name in ((SmallInteger, "smallint"), (Integer, "bigint"), (LargeBinary, "bytea")):
        if isinstance(type, kind):
            return name
    return "text"


class Dialect:
    """SQLite, and what holds for all."""

    name = "sqlite"
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

    def is_temporary(self, error: DBAPIError) -> bool:
        """Whether the same statement may succeed if it is repeated."""
        said = str(error.orig)
        return "database is locked" in said or "database table is locked" in said

    def refuses(self, error: DBAPIError) -> bool:
        """Whether the row is what is wrong: another one may be written."""
        return isinstance(error, (DataError, IntegrityError)) or self._refuses(error)

    def _refuses(self, error: DBAPIError) -> bool:
        return False

    def is_too_large(self, error: DBAPIError, engine: Engine) -> bool:
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

    def locking(self, wanted: Select[Any], *, waits: bool = False) -> Select[Any]:
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

    def drop_before(self, history: Table, day: int, connection: Connection) -> Dropped:
        """Drop the days before this one. Without partitions, some rows of the first of them are
        deleted: who writes meanwhile waits no longer than that takes."""
        days = self.days(connection, [history.name])[history.name]
        if not days or days[0] >= day:
            return Dropped(0, False)
        rows = f"SELECT rowid FROM {history.name} WHERE day = :day LIMIT"
        some = text(f"DELETE FROM {history.name} WHERE rowid IN ({rows} {ROWS_PER_DELETE})")
        connection.execute(some, {"day": days[0]})
        left = connection.execute(text(f"{rows} 1"), {"day": days[0]}).first()
        return Dropped(int(left is None), True)


class PostgreSQL(Dialect):
    name = "postgresql"
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
        for start in range(0, len(values), ROWS_PER_STATEMENT):
            some = values[start : start + ROWS_PER_STATEMENT]
            arrays = tuple([one[name] for one in some] for name in names)
            inserted += connection.exec_driver_sql(statement, arrays).rowcount
        return inserted

    def socket_of(self, connection: Connection) -> int | None:
        raw: Any = connection.connection.dbapi_connection
        return int(raw.pgconn.socket)

    def is_temporary(self, error: DBAPIError) -> bool:
        return getattr(error.orig, "sqlstate", None) in _AGAIN_STATES

    def _refuses(self, error: DBAPIError) -> bool:
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
            text(
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
        return _by_table(histories, connection.execute(text(asked), {"of": list(histories)}))

    def drop_before(self, history: Table, day: int, connection: Connection) -> Dropped:
        days = self.days(connection, [history.name])[history.name]
        old = [one for one in days if one < day]
        for one in old:
            connection.execute(text(f"DROP TABLE IF EXISTS {history.name}_{one}"))
        return Dropped(len(old), False)


class MySQL(Dialect):
    name = "mysql"
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

    def is_temporary(self, error: DBAPIError) -> bool:
        return _number(error) in _AGAIN_NUMBERS

    def _refuses(self, error: DBAPIError) -> bool:
        return _number(error) in _REFUSED_NUMBERS

    def is_too_large(self, error: DBAPIError, engine: Engine) -> bool:
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
        names: Any = bindparam("of", list(histories), expanding=True)
        return _by_table(histories, connection.execute(text(asked).bindparams(names)))

    def add_day(self, history: Table, day: int, connection: Connection) -> None:
        # Each partition ends where the next begins: one for a later day has room for this one.
        days = self.days(connection, [history.name])[history.name]
        holder = min((one for one in days if one >= day), default=None)
        mine = f"PARTITION d{day} VALUES LESS THAN ({day + 1})"
        change = f"ALTER TABLE {history.name} "
        if holder is None:
            connection.execute(text(f"{change}ADD PARTITION IF NOT EXISTS ({mine})"))
        elif day < holder != days[0] and holder > time.time() // 86_400 + 2:
            # A machine's clock was far ahead: nothing of what comes before that day would be
            # dropped until then.
            its = f"PARTITION d{holder} VALUES LESS THAN ({holder + 1})"
            connection.execute(text(f"{change}REORGANIZE PARTITION d{holder} INTO ({mine}, {its})"))

    def drop_before(self, history: Table, day: int, connection: Connection) -> Dropped:
        days = self.days(connection, [history.name])[history.name]
        # A table keeps one partition at least.
        old = [one for one in days if one < day and one != max(days)]
        for one in old:
            connection.execute(text(f"ALTER TABLE {history.name} DROP PARTITION d{one}"))
        return Dropped(len(old), False)


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
    return max((sum(map(_size_sent, _values(row))) for row in rows), default=0)


def _values(row: Any) -> Iterable[Any]:
    return row.values() if isinstance(row, Mapping) else row


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
        engine = create_engine(revealed, **how, **level)
        # Nothing is to be rolled back there: that would take one more round trip.
        single = create_engine(
            revealed, **how, isolation_level="AUTOCOMMIT", pool_reset_on_return=None
        )
    except ModuleNotFoundError as exc:
        package = _PACKAGES.get(str(exc.name), str(exc.name))
        raise ConfigurationError(f"the library {url} needs {package}: pip install it") from exc
    except (ArgumentError, NoSuchModuleError, TypeError, ValueError):
        # What SQLAlchemy says of it may show the password.
        raise ConfigurationError(f"the library's URL {url} cannot be read") from None
    for one in (engine, single):
        if url.is_sqlite:
            event.listen(one, "connect", _connected)
        event.listen(one, "before_cursor_execute", _of_table, retval=True)
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
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        #: what is watched: until when, in monotonic seconds, and its socket
        self._watched: dict[int, tuple[float, int]] = {}
        self._pid = os.getpid()
        #: the thread that watches, and what wakes it; None: there is none
        self._bell: threading.Event | None = None

    def after_fork(self) -> None:
        """Nothing is watched yet in this process: the thread is its parent's."""
        self._pid, self._lock, self._watched = os.getpid(), threading.Lock(), {}
        self._bell = None

    @contextlib.contextmanager
    def watching(self, descriptor: int, until: float) -> Iterator[None]:
        """Within this, a connection is cut when the time is over.

        descriptor: of its socket
        until: monotonic seconds
        """
        number = next(self._numbers)
        self._watch(number, until, descriptor)
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

    def _watch(self, number: int, until: float, descriptor: int) -> None:
        if self._pid != os.getpid():
            self.after_fork()
        with self._lock:
            self._watched[number] = (until, descriptor)
            if self._bell is None:
                bell = self._bell = threading.Event()
                threading.Thread(
                    target=self._run, args=(bell,), name="toc-watchdog", daemon=True
                ).start()

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
