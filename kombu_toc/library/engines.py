"""What differs between SQLite, PostgreSQL, and MySQL or MariaDB.

Statements are plain SQL for one shard, in one transaction or none: no RETURNING, no sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    Connection,
    Engine,
    Integer,
    LargeBinary,
    Select,
    SmallInteger,
    Table,
    create_engine,
    event,
    text,
)
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    NoSuchModuleError,
)

from ..client.databases import DatabaseURL
from ..errors import ConfigurationError, LibraryError

#: Connections that a process keeps open to a database, and how many more it opens if need be.
POOL, OVERFLOW = 5, 10

#: Errors that repeating may mend: PostgreSQL's SQLSTATE, MySQL's numbers. The latter of each are
#: those of two processes that make room for a day at the same moment.
_AGAIN_STATES = frozenset(("40001", "40P01", "55P03", "42P07", "23505"))
_AGAIN_NUMBERS = frozenset((1205, 1213, 1493, 1517))

#: Errors that say that a row cannot be kept as it is: classes of PostgreSQL's SQLSTATE (data,
#: integrity, limits of the program), MySQL's numbers (a packet or a value that is too large, a
#: wrong text, a constraint).
_REFUSED_CLASSES = frozenset(("22", "23", "54"))
_REFUSED_NUMBERS = frozenset((1118, 1153, 1366, 1406, 3819, 4025))


#: Rows that one statement inserts.
ROWS_PER_STATEMENT = 1000


def _array_of(type: Any) -> str:
    """What PostgreSQL calls the values of a column."""
    for kind, name in ((SmallInteger, "smallint"), (Integer, "bigint"), (LargeBinary, "bytea")):
        if isinstance(type, kind):
            return name
    return "text"


class Dialect:
    """SQLite, and what holds for all."""

    name = "sqlite"
    partitions = False
    #: of transactions; None: the default
    isolation: str | None = None

    def arguments(self, timeout: float) -> dict[str, Any]:
        return {"connect_args": {"timeout": timeout, "check_same_thread": False}}

    def prepare(self, engine: Engine, timeout: float) -> None:
        """What each new connection is told."""

        def connected(connection: Any, _: Any) -> None:
            cursor = connection.cursor()
            # Readers do not wait for the writer. Of a machine that loses power, the latest
            # transactions may be missing; not of a process that is killed.
            cursor.execute("PRAGMA journal_mode=WAL")
            cursor.execute("PRAGMA synchronous=NORMAL")
            cursor.close()

        event.listen(engine, "connect", connected)

    def insert_missing(self, table: Table) -> Any:
        """INSERT that leaves a row alone that is there already."""
        return sqlite.insert(table).on_conflict_do_nothing()

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
        made = sqlite.insert(table)
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
        return wanted

    # -- history, by days

    def add_day(self, history: Table, day: int, connection: Connection) -> None:
        """Make room for a day, where each has a partition of its own."""

    def drop_before(self, history: Table, day: int, connection: Connection) -> int:
        """Drop the days before this one; return how many. Without partitions, one day's rows
        are deleted."""
        found = connection.execute(
            text(f"SELECT MIN(day) FROM {history.name} WHERE day < :day"), {"day": day}
        ).scalar()
        if found is None:
            return 0
        connection.execute(text(f"DELETE FROM {history.name} WHERE day = :day"), {"day": found})
        return 1


class PostgreSQL(Dialect):
    name = "postgresql"
    partitions = True

    def arguments(self, timeout: float) -> dict[str, Any]:
        ms = int(timeout * 1000)
        return {
            "pool_size": POOL,
            "max_overflow": OVERFLOW,
            "pool_timeout": timeout,
            "connect_args": {
                "connect_timeout": max(int(timeout), 2),
                "options": f"-c statement_timeout={ms} -c lock_timeout={ms}",
                "tcp_user_timeout": ms,
                "keepalives_idle": 30,
                "application_name": "celery-toc",
            },
        }

    def prepare(self, engine: Engine, timeout: float) -> None:
        pass

    def insert_missing(self, table: Table) -> Any:
        return postgresql.insert(table).on_conflict_do_nothing()

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

    def upsert(self, table: Table, keys: Sequence[str], values: Sequence[str]) -> Any:
        made = postgresql.insert(table)
        changes = {name: made.excluded[name] for name in values}
        return made.on_conflict_do_update(index_elements=list(keys), set_=changes)

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

    def locking(self, wanted: Select[Any], *, waits: bool = False) -> Select[Any]:
        return wanted.with_for_update(skip_locked=not waits)

    def add_day(self, history: Table, day: int, connection: Connection) -> None:
        connection.execute(
            text(
                f"CREATE TABLE IF NOT EXISTS {history.name}_{day} PARTITION OF {history.name} "
                f"FOR VALUES FROM ({day}) TO ({day + 1})"
            )
        )

    def drop_before(self, history: Table, day: int, connection: Connection) -> int:
        rows = connection.execute(
            text(
                "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = :of ::regclass"
            ),
            {"of": history.name},
        )
        days = sorted(int(name.strip('"').rpartition("_")[2]) for (name,) in rows)
        old = [one for one in days if one < day]
        for one in old:
            connection.execute(text(f"DROP TABLE IF EXISTS {history.name}_{one}"))
        return len(old)


class MySQL(Dialect):
    name = "mysql"
    partitions = True
    isolation = "READ COMMITTED"

    def arguments(self, timeout: float) -> dict[str, Any]:
        return {
            "pool_size": POOL,
            "max_overflow": OVERFLOW,
            "pool_timeout": timeout,
            "pool_recycle": 3600,
            "connect_args": {
                "connect_timeout": timeout,
                "read_timeout": timeout,
                "write_timeout": timeout,
                "charset": "utf8mb4",
            },
        }

    def prepare(self, engine: Engine, timeout: float) -> None:
        pass

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

    def lock(self, connection: Connection, seconds: float, *, lasts: bool = True) -> None:
        if connection.dialect.name == "mariadb" or getattr(connection.dialect, "is_mariadb", False):
            connection.exec_driver_sql(f"SET SESSION idle_transaction_timeout = {int(seconds)}")

    def locking(self, wanted: Select[Any], *, waits: bool = False) -> Select[Any]:
        return wanted.with_for_update(skip_locked=not waits)

    def _days(self, connection: Connection, history: Table) -> list[int]:
        """The days that have partitions."""
        rows = connection.execute(
            text(
                "SELECT partition_name FROM information_schema.partitions "
                "WHERE table_schema = DATABASE() AND table_name = :name "
                "AND partition_name IS NOT NULL"
            ),
            {"name": history.name},
        )
        return sorted(int(name[1:]) for (name,) in rows)

    def add_day(self, history: Table, day: int, connection: Connection) -> None:
        # Each partition ends where the next begins: one for a later day has room for this one.
        if max(self._days(connection, history), default=-1) >= day:
            return
        connection.execute(
            text(
                f"ALTER TABLE {history.name} ADD PARTITION IF NOT EXISTS "
                f"(PARTITION d{day} VALUES LESS THAN ({day + 1}))"
            )
        )

    def drop_before(self, history: Table, day: int, connection: Connection) -> int:
        days = self._days(connection, history)
        # A table keeps one partition at least.
        old = [one for one in days if one < day and one != max(days)]
        for one in old:
            connection.execute(text(f"ALTER TABLE {history.name} DROP PARTITION d{one}"))
        return len(old)


def _number(error: DBAPIError) -> Any:
    """MySQL's number of an error."""
    arguments: tuple[Any, ...] = getattr(error.orig, "args", ())
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
        dialect.prepare(one, timeout)
    return engine, single, dialect


class RefusedError(LibraryError):
    """A database works, and does not take what it was given."""


def library_error(
    url: DatabaseURL, error: BaseException, kind: type[LibraryError] = LibraryError
) -> LibraryError:
    """What a caller is told of a database's error."""
    cause = getattr(error, "orig", None) or error
    said = url.scrub(" ".join(str(cause).split()))[:300]
    return kind(f"the library {url} cannot be used: {type(cause).__name__}: {said}")
