"""Writes what has become of messages, many in a statement, each kind of database in its own way.

All that a statement needs of its messages comes as one value, or goes to the driver as one list:
to name each of them in the statement's text would cost more than to change their rows.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Table, and_, bindparam, delete, select, text, tuple_, update
from sqlalchemy.exc import ProgrammingError

from . import statuses
from .db import Dialect
from .records import Event, Kept, Key, Row, now_us, texts_of
from .schema import COMMON, MAX_ATTEMPTS, ShardTables

#: Microseconds of a day: history is kept by days.
DAY_US = 86_400_000_000

#: What tells a row from every other.
KEY = ("id", "token", "topic")

#: What of a record is written again if a message ends once more on the same day.
ENDED = ("status", "action_us", "attempts", "worker", "error", "modified_us")

#: The columns of history that are a row's, whatever becomes of its message.
_KEPT = (
    *("id", "token", "topic", "action_us", "task", "biz_type", "biz_id", "attributes"),
    "created_us",
)

#: Those of them that a message tells itself which has no row.
TOLD = ("action_us", "task", "biz_type", "biz_id", "attributes")

#: The same, with those that an event gives; as history has them.
_MOVED = (*_KEPT, "day", "status", "attempts", "worker", "error", "modified_us")


def are(table: Table, keys: Iterable[Key]) -> Any:
    """That a row is one of these."""
    # The id as well, for whichever optimizer does not take the whole for a key.
    keys = list(keys)
    columns = table.c
    whole = tuple_(columns.id, columns.token, columns.topic).in_(keys)
    return and_(columns.id.in_([id for id, _, _ in keys]), whole)


class Becoming:
    """How it is written. These statements are for a database that has none of the ways below."""

    def change(self, connection: Connection, pending: Table, events: Sequence[Event]) -> None:
        """Give rows what has become of messages that have not ended."""
        alike: dict[tuple[int, int, str], list[Event]] = defaultdict(list)
        for event in events:
            alike[event.status, event.attempts, event.worker].append(event)
        for (status, attempts, worker), some in alike.items():
            changes: dict[str, Any] = {
                "status": status,
                "worker": worker or None,
                "modified_us": max(event.at_us for event in some),
            }
            if status == statuses.TAKEN:
                changes["place"] = statuses.IN_REDIS
            if attempts:
                changes["attempts"] = attempts
            mine = are(pending, [event.key for event in some])
            connection.execute(update(pending).where(mine).values(**changes))

    def move(self, connection: Connection, tables: ShardTables, events: Sequence[Event]) -> bool:
        """Move the rows of messages that have ended to history. False if some have no rows: then
        none is deleted yet."""
        return False

    def end(
        self,
        connection: Connection,
        dialect: Dialect,
        tables: ShardTables,
        events: Sequence[Event],
    ) -> None:
        """As :meth:`move`, also of messages that have no rows: of these, history has what they say
        themselves."""
        pending, history = tables
        keys = [event.key for event in events]
        reading = select(*(pending.c[name] for name in COMMON)).where(are(pending, keys))
        if dialect.partitions:
            reading = reading.with_for_update()
        there = {
            (row["id"], row["token"], row["topic"]): row
            for row in connection.execute(reading).mappings()
        }
        written = [_record(event, there.get(event.key)) for event in events]
        connection.execute(dialect.upsert(history, (*KEY, "day"), ENDED), written)
        self.forget(connection, pending, keys)

    def forget(self, connection: Connection, pending: Table, keys: Sequence[Key]) -> None:
        """Delete the rows of messages that have ended."""
        connection.execute(delete(pending).where(are(pending, keys)))

    def put(self, connection: Connection, pending: Table, keys: Sequence[Key], at_us: int) -> None:
        """Note that the messages of rows are in Redis from then on."""
        values = {"place": statuses.IN_REDIS, "modified_us": at_us}
        connection.execute(update(pending).where(are(pending, keys)).values(**values))

    def ended_of(
        self, connection: Connection, history: Table, keys: Sequence[Key], since: int
    ) -> set[Key]:
        """Which of these have ended on that day or later."""
        reading = select(*(history.c[name] for name in KEY))
        found = connection.execute(reading.where(are(history, keys), history.c.day >= since))
        return {(id, token, topic) for id, token, topic in found}


class SQLiteBecoming(Becoming):
    """The messages are one JSON, which the database makes rows of. A statement for each would
    interrupt what the process does beside it: each takes the interpreter's lock."""

    _EVENTS = (
        "(SELECT value ->> 0 AS id, value ->> 1 AS token, value ->> 2 AS topic, "
        "value ->> 3 AS status, value ->> 4 AS attempts, value ->> 5 AS worker, "
        "value ->> 6 AS error, value ->> 7 AS at_us FROM json_each(:events)) AS e"
    )
    #: the same, with what they say of themselves
    _TOLD = _EVENTS.replace(
        " FROM",
        ", value ->> 8 AS action_us, value ->> 9 AS task, value ->> 10 AS biz_type, "
        "value ->> 11 AS biz_id, value ->> 12 AS attributes FROM",
    )
    _SAME = " AND ".join(f"p.{name} = e.{name}" for name in KEY)

    def change(self, connection: Connection, pending: Table, events: Sequence[Event]) -> None:
        statement = _text(
            f"UPDATE {pending.name} AS p SET status = e.status, worker = e.worker, "
            "modified_us = e.at_us, attempts = coalesce(e.attempts, p.attempts), "
            f"place = CASE e.status WHEN {statuses.TAKEN} THEN {statuses.IN_REDIS} "
            f"ELSE p.place END FROM {self._EVENTS} WHERE {self._SAME}"
        )
        connection.execute(statement, {"events": _as_json(events)})

    def move(self, connection: Connection, tables: ShardTables, events: Sequence[Event]) -> bool:
        pending, history = tables.pending.name, tables.history.name
        statement = _text(
            _inserting(history)
            + f" SELECT {', '.join(f'p.{name}' for name in _KEPT)}, e.at_us / {DAY_US}, e.status, "
            "coalesce(e.attempts, p.attempts), coalesce(e.worker, p.worker), "
            f"coalesce(e.error, p.error), e.at_us FROM {self._EVENTS} CROSS JOIN {pending} AS p "
            # In one order, so that two processes do not wait for each other.
            f"WHERE {self._SAME} ORDER BY p.id, p.token, p.topic "
            "ON CONFLICT (id, token, topic, day) DO UPDATE SET "
            + ", ".join(f"{name} = excluded.{name}" for name in ENDED)
        )
        said = {"events": _as_json(events)}
        if connection.execute(statement, said).rowcount < len(events):
            return False
        connection.execute(self._forgetting(pending), said)
        return True

    def end(
        self,
        connection: Connection,
        dialect: Dialect,
        tables: ShardTables,
        events: Sequence[Event],
    ) -> None:
        pending, history = tables.pending.name, tables.history.name
        statement = _text(
            _inserting(history) + f" SELECT {_told(str)}, e.at_us / {DAY_US}, e.status, "
            "coalesce(e.attempts, p.attempts, 0), coalesce(e.worker, p.worker), "
            f"coalesce(e.error, p.error), e.at_us FROM {self._TOLD} LEFT JOIN {pending} AS p "
            # SQLite takes what is behind ON for a condition, unless there is another one.
            f"ON {self._SAME} WHERE true ORDER BY e.id, e.token, e.topic "
            "ON CONFLICT (id, token, topic, day) DO UPDATE SET "
            + ", ".join(f"{name} = excluded.{name}" for name in ENDED)
        )
        said = {"events": _as_json(events, told=True)}
        connection.execute(statement, said)
        connection.execute(self._forgetting(pending), said)

    def forget(self, connection: Connection, pending: Table, keys: Sequence[Key]) -> None:
        connection.execute(self._forgetting(pending.name), {"events": json.dumps(list(keys))})

    def _forgetting(self, pending: str) -> Any:
        """Deletes the rows of these keys, or events: they begin alike."""
        return _text(
            f"DELETE FROM {pending} WHERE (id, token, topic) IN "
            f"(SELECT id, token, topic FROM {self._EVENTS})"
        )

    def put(self, connection: Connection, pending: Table, keys: Sequence[Key], at_us: int) -> None:
        statement = _text(
            f"UPDATE {pending.name} AS p SET place = {statuses.IN_REDIS}, modified_us = :at_us "
            f"FROM {self._EVENTS} WHERE {self._SAME}"
        )
        connection.execute(statement, {"events": json.dumps(list(keys)), "at_us": at_us})

    def ended_of(
        self, connection: Connection, history: Table, keys: Sequence[Key], since: int
    ) -> set[Key]:
        statement = _text(
            f"SELECT p.id, p.token, p.topic FROM {self._EVENTS} CROSS JOIN {history.name} AS p "
            f"WHERE {self._SAME} AND p.day >= :since"
        )
        found = connection.execute(statement, {"events": json.dumps(list(keys)), "since": since})
        return {(id, token, topic) for id, token, topic in found}


class PostgreSQLBecoming(SQLiteBecoming):
    _EVENTS = (
        "(SELECT v ->> 0 AS id, v ->> 1 AS token, v ->> 2 AS topic, "
        "CAST(v ->> 3 AS smallint) AS status, CAST(v ->> 4 AS smallint) AS attempts, "
        "v ->> 5 AS worker, v ->> 6 AS error, CAST(v ->> 7 AS bigint) AS at_us "
        "FROM jsonb_array_elements(CAST(:events AS jsonb)) AS v) AS e"
    )
    _TOLD = _EVENTS.replace(
        " FROM",
        ", CAST(v ->> 8 AS bigint) AS action_us, v ->> 9 AS task, v ->> 10 AS biz_type, "
        "v ->> 11 AS biz_id, CAST(v ->> 12 AS jsonb) AS attributes FROM",
    )

    def _forgetting(self, pending: str) -> Any:
        return _text(f"DELETE FROM {pending} AS p USING {self._EVENTS} WHERE {self._SAME}")


class MySQLBecoming(Becoming):
    """As in PostgreSQL, from MariaDB 10.6 and MySQL 8 on. They do not say how many rows were
    there that an INSERT was to take, so it is counted before."""

    def __init__(self) -> None:
        #: whether a database has said that it does not know such statements
        self._plain = False

    _EVENTS = (
        "JSON_TABLE(:events, '$[*]' COLUMNS ("
        + ", ".join(
            f"{name} {kind.format('CHARACTER SET utf8mb4')} PATH '$[{at}]'"
            for at, (name, kind) in enumerate(
                (
                    *(("id", "VARCHAR(255) {}"), ("token", "VARCHAR(16) {}")),
                    *(("topic", "VARCHAR(255) {}"), ("status", "SMALLINT")),
                    *(("attempts", "SMALLINT"), ("worker", "VARCHAR(255) {}")),
                    *(("error", "TEXT {}"), ("at_us", "BIGINT")),
                )
            )
        )
        + ")) AS e"
    )
    _TOLD = _EVENTS.replace(
        ")) AS e",
        ", action_us BIGINT PATH '$[8]', "
        + ", ".join(
            f"{name} VARCHAR({length}) CHARACTER SET utf8mb4 PATH '$[{at}]'"
            for at, name, length in ((9, "task", 255), (10, "biz_type", 64), (11, "biz_id", 255))
        )
        + ", attributes TEXT CHARACTER SET utf8mb4 PATH '$[12]')) AS e",
    )
    _SAME = " AND ".join(f"p.{name} = CONVERT(e.{name} USING binary)" for name in KEY)

    def change(self, connection: Connection, pending: Table, events: Sequence[Event]) -> None:
        if not self._plain:
            statement = _text(
                f"UPDATE {self._EVENTS} STRAIGHT_JOIN {pending.name} AS p ON {self._SAME} "
                "SET p.status = e.status, p.worker = CONVERT(e.worker USING binary), "
                "p.modified_us = e.at_us, p.attempts = coalesce(e.attempts, p.attempts), "
                f"p.place = CASE e.status WHEN {statuses.TAKEN} THEN {statuses.IN_REDIS} "
                "ELSE p.place END"
            )
            if self._knows(connection, statement, _as_json(events)) is not None:
                return
        super().change(connection, pending, events)

    def move(self, connection: Connection, tables: ShardTables, events: Sequence[Event]) -> bool:
        if self._plain:
            return False
        pending, history = tables.pending.name, tables.history.name
        rows = f"FROM {self._EVENTS} STRAIGHT_JOIN {pending} AS p ON {self._SAME}"
        counting = _text(f"SELECT COUNT(*) {rows} FOR UPDATE")
        said = _as_json(events)
        counted = self._knows(connection, counting, said)
        if counted is None or counted.scalar() < len(events):
            return False
        changes = ", ".join(f"{name} = VALUES({name})" for name in ENDED)
        statement = _text(
            _inserting(history)
            + f" SELECT {', '.join(f'p.{name}' for name in _KEPT)}, e.at_us DIV {DAY_US}, "
            "e.status, coalesce(e.attempts, p.attempts), "
            "coalesce(CONVERT(e.worker USING binary), p.worker), coalesce(e.error, p.error), "
            f"e.at_us {rows} ON DUPLICATE KEY UPDATE {changes}"
        )
        connection.execute(statement, {"events": said})
        self.forget(connection, tables.pending, [event.key for event in events])
        return True

    def end(
        self,
        connection: Connection,
        dialect: Dialect,
        tables: ShardTables,
        events: Sequence[Event],
    ) -> None:
        if not self._plain:
            pending, history = tables.pending.name, tables.history.name
            changes = ", ".join(f"{name} = VALUES({name})" for name in ENDED)
            columns = _told("CONVERT({} USING binary)".format)
            statement = _text(
                _inserting(history) + f" SELECT {columns}, e.at_us DIV {DAY_US}, e.status, "
                "coalesce(e.attempts, p.attempts, 0), "
                "coalesce(CONVERT(e.worker USING binary), p.worker), coalesce(e.error, p.error), "
                f"e.at_us FROM {self._TOLD} LEFT JOIN {pending} AS p ON {self._SAME} "
                f"ON DUPLICATE KEY UPDATE {changes}"
            )
            if self._knows(connection, statement, _as_json(events, told=True)) is not None:
                self.forget(connection, tables.pending, [event.key for event in events])
                return
        super().end(connection, dialect, tables, events)

    def forget(self, connection: Connection, pending: Table, keys: Sequence[Key]) -> None:
        if not self._plain:
            statement = _text(
                f"DELETE p FROM {self._EVENTS} STRAIGHT_JOIN {pending.name} AS p ON {self._SAME}"
            )
            if self._knows(connection, statement, json.dumps(list(keys))) is not None:
                return
        super().forget(connection, pending, keys)

    def ended_of(
        self, connection: Connection, history: Table, keys: Sequence[Key], since: int
    ) -> set[Key]:
        if not self._plain:
            statement = _text(
                f"SELECT p.id, p.token, p.topic FROM {self._EVENTS} "
                f"STRAIGHT_JOIN {history.name} AS p ON {self._SAME} WHERE p.day >= {since:d}"
            )
            found = self._knows(connection, statement, json.dumps(list(keys)))
            if found is not None:
                return {(id.decode(), token.decode(), of.decode()) for id, token, of in found}
        return super().ended_of(connection, history, keys, since)

    def put(self, connection: Connection, pending: Table, keys: Sequence[Key], at_us: int) -> None:
        if not self._plain:
            statement = _text(
                f"UPDATE {self._EVENTS} STRAIGHT_JOIN {pending.name} AS p ON {self._SAME} "
                f"SET p.place = {statuses.IN_REDIS}, p.modified_us = :at_us"
            )
            said = json.dumps(list(keys))
            if self._knows(connection, statement, said, at_us=at_us) is not None:
                return
        super().put(connection, pending, keys, at_us)

    def _knows(self, connection: Connection, statement: Any, said: str, **more: Any) -> Any:
        """Run a statement; None if this database does not know its kind."""
        try:
            return connection.execute(statement, {"events": said, **more})
        except ProgrammingError:
            # It has changed nothing, and the transaction goes on.
            self._plain = True
            return None


def _as_json(events: Sequence[Event], *, told: bool = False) -> str:
    """told: with what they say of themselves"""
    rows: list[tuple[Any, ...]] = [
        (*key, status, attempts or None, worker or None, error or None, at_us)
        for key, status, at_us, attempts, worker, error, *_ in events
    ]
    if told:
        # Messages of a task share what they say.
        texts: dict[int, tuple[str | None, ...]] = {}
        for place, event in enumerate(events):
            headers, action_us = event.message
            said = texts.get(id(headers))
            if said is None:
                said = texts[id(headers)] = texts_of(headers)
            rows[place] += (action_us, *said)
    # Or a long error takes three times as many bytes.
    return json.dumps(rows, ensure_ascii=False)


def _told(text_of: Callable[[str], str]) -> str:
    """The first columns of history: those of the row, or, where there is none, what its message
    says.

    text_of: what the columns of an event's texts are written as
    """
    told = {name: f"e.{name}" for name in _KEPT} | {"created_us": "e.at_us"}
    for name in (*KEY, "task", "biz_type", "biz_id"):
        told[name] = text_of(told[name])
    return ", ".join(
        said if name in KEY else f"CASE WHEN p.id IS NULL THEN {said} ELSE p.{name} END"
        for name, said in told.items()
    )


_text = lru_cache(maxsize=2048)(text)


def _inserting(history: str) -> str:
    return f"INSERT INTO {history} ({', '.join(_MOVED)})"


_OF: dict[str, Becoming] = {
    "sqlite": SQLiteBecoming() if sqlite3.sqlite_version_info >= (3, 38) else Becoming(),
    "postgresql": PostgreSQLBecoming(),
    "mysql": MySQLBecoming(),
}


def write(
    dialect: Dialect, tables: ShardTables, events: Sequence[Event], connection: Connection
) -> None:
    """Write what has become of messages, of each the latest."""
    how = _OF[dialect.name]
    if any(event.attempts > MAX_ATTEMPTS for event in events):
        events = [event._replace(attempts=min(event.attempts, MAX_ATTEMPTS)) for event in events]
    live = statuses.LIVE
    going_on = [event for event in events if event.status in live]
    if going_on:
        how.change(connection, tables.pending, going_on)
    ended = {event.key: event for event in events if event.status not in live}
    rows = _dead_rows(tables.pending, ended, connection)
    for row in rows:
        # Whoever has taken it up again was told that it is dead before its worker could say so.
        was_changed = row.status == statuses.PENDING and row.created_us < row.modified_us
        if was_changed and ended[row.key].at_us < row.modified_us:
            del ended[row.key]
    dead = [_dead(row, ended[row.key]) for row in rows if row.key in ended]
    with_rows = [event for event in ended.values() if event.has_row]
    without = [event for event in ended.values() if not event.has_row]
    if with_rows and not how.move(connection, tables, with_rows):
        how.end(connection, dialect, tables, with_rows)
    if without:
        how.end(connection, dialect, tables, without)
    if dead:
        connection.execute(dialect.insert_missing(tables.pending), dead)
    kept = [event for event in ended.values() if event.kept is not None]
    if kept:
        _keep(tables.history, kept, connection)


def _keep(history: Table, events: Sequence[Event], connection: Connection) -> None:
    """Keep with the records of what has failed what sends it again."""
    key = [history.c[name] == bindparam(f"of_{name}") for name in (*KEY, "day")]
    changes: dict[str, Any] = {name: bindparam(f"to_{name}") for name in Kept._fields}
    values = []
    for event in events:
        of = zip((*KEY, "day"), (*event.key, event.at_us // DAY_US), strict=True)
        assert event.kept is not None
        to = event.kept._asdict().items()
        values.append({f"of_{name}": one for name, one in of} | {f"to_{n}": one for n, one in to})
    connection.execute(update(history).where(*key).values(**changes), values)


def _dead_rows(pending: Table, ended: Mapping[Key, Event], connection: Connection) -> list[Row]:
    """The rows of what is dead, as it is said."""
    keys = [key for key, event in ended.items() if event.status == statuses.DEAD]
    if not keys:
        return []
    reading = select(*(pending.c[name] for name in Row._fields)).where(are(pending, keys))
    return [Row(*found) for found in connection.execute(reading)]


def _dead(row: Row, event: Event) -> dict[str, Any]:
    """The row of what is dead from now on: it stays, for a rebuild."""
    return row._replace(
        status=statuses.DEAD,
        place=statuses.IN_DEAD_QUEUE,
        attempts=event.attempts or row.attempts,
        error=event.error or row.error,
        modified_us=event.at_us,
    )._asdict()


def put(dialect: Dialect, pending: Table, keys: Sequence[Key], connection: Connection) -> None:
    """Note that the messages of rows are in Redis."""
    _OF[dialect.name].put(connection, pending, keys, now_us())


def forget(dialect: Dialect, pending: Table, keys: Sequence[Key], connection: Connection) -> None:
    """Delete the rows of messages that have ended."""
    _OF[dialect.name].forget(connection, pending, keys)


def ended_of(
    dialect: Dialect, history: Table, keys: Sequence[Key], since: int, connection: Connection
) -> set[Key]:
    """Which of these messages have ended on that day or later, as far as history is kept."""
    return _OF[dialect.name].ended_of(connection, history, keys, since)


def _record(event: Event, row: Any) -> dict[str, Any]:
    """A row of history."""
    id, token, topic = event.key
    known = event.known if row is None else dict(row)
    return {
        **known,
        "id": id,
        "token": token,
        "topic": topic,
        "day": event.at_us // DAY_US,
        "status": event.status,
        "attempts": event.attempts or known.get("attempts", 0),
        "worker": event.worker or known.get("worker"),
        "error": event.error or known.get("error"),
        "modified_us": event.at_us,
    }
