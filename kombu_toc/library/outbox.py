"""The outbox: rows are written in the caller's own transaction, and their messages put after it.

So a task and the data that it is about are there together, or neither is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..errors import LibraryError
from ..model.library import OUTBOX, THROUGH
from .records import Row

if TYPE_CHECKING:
    from .shards import Database, Shards

logger = logging.getLogger(__name__)

_current: ContextVar[Any] = ContextVar("kombu_toc.outbox", default=None)


def current() -> Any:
    """The connection whose transaction rows are written in; None: there is no outbox."""
    connection = _current.get()
    if connection is None or _is_django(connection) or hasattr(connection, "in_transaction"):
        return connection
    return connection()  # the session that a registry has for this thread


@contextmanager
def outbox(connection: Any) -> Iterator[None]:
    """Within this, tasks are sent by rows in the caller's transaction; their messages follow when
    that is committed, and never if it is rolled back::

        with engine.begin() as connection, celery_toc.outbox(connection):
            connection.execute(orders.insert().values(id=42))
            expire.apply_async((42,), countdown=1800)

    connection: a connection or a session of SQLAlchemy's, or a connection of Django's
        (``django.db.connection``), to a database of the app's library. With an
        ``AsyncSession`` or an ``AsyncConnection``, what an event loop awaits is sent so:
        :func:`celery_toc.aio.send`, and an ``AsyncTimeoutCenter``

    Raises LibraryError for anything else, and where something is sent without a library.
    """
    takes = _is_django(connection) or hasattr(connection, "in_transaction")
    if not takes and not hasattr(connection, "session_factory"):
        raise LibraryError(
            "an outbox takes a connection or a session of SQLAlchemy's, or Django's, not a "
            f"{type(connection).__name__}"
        )
    token = _current.set(connection)
    try:
        yield
    finally:
        _current.reset(token)


def refuse(queue: str, what: str) -> None:
    """Raise LibraryError within an outbox, which cannot send this."""
    if current() is not None:
        raise LibraryError(
            f"{what} has no row, so an outbox cannot send it to {queue!r}: "
            "send it after the commit; nothing was sent"
        )


def needed(queue: str) -> LibraryError:
    """The error for what is sent without an outbox to a queue that takes nothing else."""
    return LibraryError(
        f"queue {queue!r} is declared with library={OUTBOX!r}: send to it within "
        "kombu_toc.outbox(connection), in the transaction of what the task is about, or "
        f"declare it with library={THROUGH!r}; nothing was sent"
    )


def database_of(connection: Any, shards: Shards) -> Database:
    """The database of a library that a caller's connection is to. Raises LibraryError."""
    if len(shards.databases) == 1:
        return shards.databases[0]
    asked = "SELECT number, of_databases, of_tables FROM toc_library_layout WHERE id = 1"
    try:
        if _is_django(connection):
            with connection.cursor() as cursor:
                cursor.execute(asked)
                row = cursor.fetchone()
        elif is_awaited(connection):
            raise _awaited(connection)
        else:
            from sqlalchemy import text

            row = connection.execute(text(asked)).one_or_none()
    except LibraryError:
        raise
    except Exception as exc:
        row = None
        logger.debug("the database of a transaction has no library: %s", exc)
    found = None if row is None else shards.database_of(tuple(row))
    if found is None:
        raise LibraryError(
            "an outbox needs the transaction of a database of the library, and the one of this "
            "connection is none: nothing was sent"
        )
    return found


def write(connection: Any, table: Any, insert: Any, rows: Sequence[Row]) -> None:
    """Write rows over a caller's connection. Raises what that does.

    table: of what is pending; insert: the statement, for this kind of database
    """
    values = [row._asdict() for row in rows]
    if _is_django(connection):
        _write_with_django(connection, table, insert, values)
    elif is_awaited(connection):
        raise _awaited(connection)
    else:
        connection.execute(insert, values)


def _awaited(connection: Any) -> LibraryError:
    return LibraryError(
        f"within an outbox of an {type(connection).__name__}, send with celery_toc.aio.send, "
        "or in a function that its run_sync calls, within an outbox of what that is given; "
        "nothing was sent"
    )


def _is_django(connection: Any) -> bool:
    return hasattr(connection, "cursor") and hasattr(connection, "vendor")


def is_awaited(connection: Any) -> bool:
    """Whether it is a connection or a session of SQLAlchemy's asyncio extension."""
    return hasattr(connection, "run_sync")


def _write_with_django(
    connection: Any, table: Any, insert: Any, values: Sequence[dict[str, Any]]
) -> None:
    from sqlalchemy.dialects import mysql, postgresql, sqlite

    kinds: dict[str, Any] = {"postgresql": postgresql, "mysql": mysql, "sqlite": sqlite}
    dialect = kinds[connection.vendor].dialect(paramstyle="pyformat")
    statement = str(insert.values(dict.fromkeys(values[0])).compile(dialect=dialect))
    with connection.cursor() as cursor:
        for one in values:
            bound = {}
            for name, value in one.items():
                process = table.c[name].type.dialect_impl(dialect).bind_processor(dialect)
                bound[name] = value if process is None or name == "body" else process(value)
            cursor.execute(statement, bound)


def when_committed(connection: Any, key: Any, function: Callable[[], object]) -> None:
    """Call a function soon after the transaction is committed.

    key: of what was asked for under one name in a transaction, the last is called
    """
    if hasattr(connection, "vendor"):
        from django.db import transaction

        transaction.on_commit(function, using=connection.alias)
        return
    with _lock:
        known = _waiting.get(connection)
        if known is None:
            _waiting[connection] = known = {}
            _listen(connection)
    known[key] = function


#: By connection or session: what is called when its transaction is committed, each by its name.
_waiting: WeakKeyDictionary[Any, dict[Any, Callable[[], object]]] = WeakKeyDictionary()
_lock = threading.Lock()


def _listen(connection: Any) -> None:
    """Be told when the transactions of a connection or a session end; done once for each."""
    from sqlalchemy import event
    from sqlalchemy.engine import Connection

    names = ("commit", "rollback")
    if not isinstance(connection, Connection):
        names = ("after_commit", "after_rollback")
    for name, tell in zip(names, (_committed, _rolled_back), strict=True):
        event.listen(connection, name, tell)


def _committed(connection: Any) -> None:
    waiting = _waiting.get(connection) or {}
    while waiting:
        waiting.popitem()[1]()


def _rolled_back(connection: Any) -> None:
    (_waiting.get(connection) or {}).clear()
