"""Writes what has become of messages, many in a statement, each kind of database in its own way.

All that a statement needs of its messages comes as one value, or goes to the driver as one list:
to name each of them in the statement's text would cost more than to change their rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Table, and_, bindparam, select, text, tuple_, update

from . import records, statuses
from .records import Event, Kept, Key, Row, now_us, texts_of
from .schema import MAX_ATTEMPTS, ShardTables

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


#: What one JSON says of an event, in its order; :data:`TOLD` may be behind it.
_EVENT = (*KEY, "status", "attempts", "worker", "error", "at_us")

#: The same, as MySQL's JSON_TABLE reads it.
_TYPES = {
    **dict.fromkeys(("id", "topic", "worker", "task", "biz_id"), "VARCHAR(255)"),
    **{"token": "VARCHAR(16)", "status": "SMALLINT", "attempts": "SMALLINT", "error": "TEXT"},
    **{"at_us": "BIGINT", "action_us": "BIGINT", "biz_type": "VARCHAR(64)", "attributes": "TEXT"},
}


def _extracted(names: Sequence[str]) -> str:
    return ", ".join(
        f"json_extract(value, '$[{place}]') AS {name}" for place, name in enumerate(names)
    )


def _columns(names: Sequence[str]) -> str:
    return ", ".join(
        f"{name} {kind}{' CHARACTER SET utf8mb4' * (not kind.endswith('INT'))} PATH '$[{place}]'"
        for place, name in enumerate(names)
        for kind in (_TYPES[name],)
    )


class Outcomes:
    """In SQLite. The messages are one JSON, which the database makes rows of. A statement for each
    would interrupt what the process does beside it: each takes the interpreter's lock."""

    _EVENTS = f"(SELECT {_extracted(_EVENT)} FROM json_each(:events)) AS e"
    #: the same, with what they say of themselves
    _TOLD = f"(SELECT {_extracted((*_EVENT, *TOLD))} FROM json_each(:events)) AS e"
    _SAME = " AND ".join(f"p.{name} = e.{name}" for name in KEY)
    _DAY = f"e.at_us / {DAY_US}"
    _AGAIN = "ON CONFLICT (id, token, topic, day) DO UPDATE SET " + ", ".join(
        f"{name} = excluded.{name}" for name in ENDED
    )
    #: how the rows of events are looked for: one after the other, by their keys
    _WITH = "CROSS JOIN"
    #: in one order, so that two processes do not wait for each other
    _SORTED = "ORDER BY {0}.id, {0}.token, {0}.topic"

    @staticmethod
    def _text(column: str) -> str:
        """What a text of an event is written as."""
        return column

    def change(self, connection: Connection, pending: str, events: Sequence[Event]) -> None:
        """Give rows what has become of messages that have not ended."""
        taken = f"CASE e.status WHEN {statuses.TAKEN} THEN {statuses.IN_REDIS} ELSE p.place END"
        statement = self._updating(
            pending,
            *("status = e.status", f"worker = {self._text('e.worker')}", "modified_us = e.at_us"),
            *("attempts = coalesce(e.attempts, p.attempts)", f"place = {taken}"),
        )
        connection.execute(statement, {"events": _as_json(events)})

    def _updating(self, pending: str, *changes: str) -> Any:
        """Changes the rows of events, or keys."""
        said = f"UPDATE {pending} AS p SET {', '.join(changes)} FROM {self._EVENTS}"
        return _statement(f"{said} WHERE {self._SAME}")

    def move(self, connection: Connection, tables: ShardTables, events: Sequence[Event]) -> bool:
        """Move the rows of messages that have ended to history. False if some have no rows: then
        none is deleted yet."""
        said = {"events": _as_json(events)}
        if self._moved(connection, tables, said) < len(events):
            return False
        connection.execute(self._forgetting(tables.pending.name), said)
        return True

    def _moved(self, connection: Connection, tables: ShardTables, said: dict[str, str]) -> int:
        """Write the rows that there are of events into history; return how many."""
        return connection.execute(_statement(self._moving(*self._names(tables))), said).rowcount

    def end(self, connection: Connection, tables: ShardTables, events: Sequence[Event]) -> None:
        """As :meth:`move`, also of messages that have no rows: of these, history has what they say
        themselves."""
        pending, history = self._names(tables)
        statement = _statement(
            f"{_inserting(history)} SELECT {_told(self._text)}, {self._DAY}, e.status, "
            f"coalesce(e.attempts, p.attempts, 0), coalesce({self._text('e.worker')}, p.worker), "
            f"coalesce(e.error, p.error), e.at_us FROM {self._TOLD} LEFT JOIN {pending} AS p "
            # SQLite takes what is behind ON for a condition, unless there is another one.
            f"ON {self._SAME} WHERE true {self._SORTED.format('e')} {self._AGAIN}"
        )
        said = {"events": _as_json(events, told=True)}
        connection.execute(statement, said)
        connection.execute(self._forgetting(pending), said)

    def forget(self, pending: str, keys: Sequence[Key], connection: Connection) -> None:
        """Delete the rows of messages that have ended."""
        connection.execute(self._forgetting(pending), {"events": json.dumps(list(keys))})

    def put(self, pending: str, keys: Sequence[Key], connection: Connection) -> None:
        """Note that the messages of rows are in Redis."""
        statement = self._updating(pending, f"place = {statuses.IN_REDIS}", "modified_us = :at_us")
        connection.execute(statement, {"events": json.dumps(list(keys)), "at_us": now_us()})

    def ended_of(
        self, history: Table, keys: Sequence[Key], since: int, connection: Connection
    ) -> set[Key]:
        """Which of these have ended on that day or later, as far as history is kept."""
        statement = _statement(
            f"SELECT p.id, p.token, p.topic FROM {self._EVENTS} {self._WITH} {history.name} AS p "
            f"WHERE {self._SAME} AND p.day >= :since"
        ).columns(*(history.c[name] for name in KEY))
        found = connection.execute(statement, {"events": json.dumps(list(keys)), "since": since})
        return {(id, token, topic) for id, token, topic in found}

    @staticmethod
    def _names(tables: ShardTables) -> tuple[str, str]:
        return tables.pending.name, tables.history.name

    def _moving(self, pending: str, history: str) -> str:
        return (
            f"{_inserting(history)} SELECT {', '.join(f'p.{name}' for name in _KEPT)}, "
            f"{self._DAY}, e.status, coalesce(e.attempts, p.attempts), "
            f"coalesce({self._text('e.worker')}, p.worker), coalesce(e.error, p.error), e.at_us "
            f"FROM {self._EVENTS} {self._WITH} {pending} AS p "
            f"WHERE {self._SAME} {self._SORTED.format('p')} {self._AGAIN}"
        )

    def _forgetting(self, pending: str) -> Any:
        """Deletes the rows of these keys, or events: they begin alike."""
        return _statement(
            f"DELETE FROM {pending} WHERE (id, token, topic) IN "
            f"(SELECT id, token, topic FROM {self._EVENTS})"
        )


class PostgreSQLOutcomes(Outcomes):
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
        return _statement(f"DELETE FROM {pending} AS p USING {self._EVENTS} WHERE {self._SAME}")


class MySQLOutcomes(Outcomes):
    """In MySQL and MariaDB, which do not say how many rows were there that an INSERT was to take:
    so it is counted before."""

    _EVENTS = f"JSON_TABLE(:events, '$[*]' COLUMNS ({_columns(_EVENT)})) AS e"
    _TOLD = f"JSON_TABLE(:events, '$[*]' COLUMNS ({_columns((*_EVENT, *TOLD))})) AS e"
    _SAME = " AND ".join(f"p.{name} = CONVERT(e.{name} USING binary)" for name in KEY)
    _DAY = f"e.at_us DIV {DAY_US}"
    _AGAIN = "ON DUPLICATE KEY UPDATE " + ", ".join(f"{name} = VALUES({name})" for name in ENDED)
    _WITH = "STRAIGHT_JOIN"
    _SORTED = ""  # as events are: to sort them takes a file

    @staticmethod
    def _text(column: str) -> str:
        return f"CONVERT({column} USING binary)"

    def _updating(self, pending: str, *changes: str) -> Any:
        said = f"UPDATE {self._EVENTS} STRAIGHT_JOIN {pending} AS p ON {self._SAME}"
        return _statement(f"{said} SET {', '.join(f'p.{change}' for change in changes)}")

    def _moved(self, connection: Connection, tables: ShardTables, said: dict[str, str]) -> int:
        there = f"SELECT COUNT(*) FROM {self._EVENTS} STRAIGHT_JOIN {tables.pending.name} AS p"
        counting = _statement(f"{there} ON {self._SAME} FOR UPDATE")
        found = int(connection.execute(counting, said).scalar_one())
        super()._moved(connection, tables, said)
        return found

    def _forgetting(self, pending: str) -> Any:
        return _statement(
            f"DELETE p FROM {self._EVENTS} STRAIGHT_JOIN {pending} AS p ON {self._SAME}"
        )


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


_statement = lru_cache(maxsize=2048)(text)


def _inserting(history: str) -> str:
    return f"INSERT INTO {history} ({', '.join(_MOVED)})"


def write(
    dialect: Any, tables: ShardTables, events: Sequence[Event], connection: Connection
) -> None:
    """Write what has become of messages, of each the latest.

    dialect: the :class:`.shards.Dialect` of the database
    """
    how = dialect.outcomes
    if any(event.attempts > MAX_ATTEMPTS for event in events):
        events = [event._replace(attempts=min(event.attempts, MAX_ATTEMPTS)) for event in events]
    live = statuses.LIVE
    going_on = [event for event in events if event.status in live]
    if going_on:
        how.change(connection, tables.pending.name, going_on)
    ended = {event.key: event for event in events if event.status not in live}
    rows = _dead_rows(tables.pending, ended, connection)
    for row in rows:
        # Whoever has taken it up again was told that it is dead before its worker could say so.
        was_changed = row.status == statuses.PENDING and row.created_us < row.modified_us
        if was_changed and ended[row.key].at_us < row.modified_us:
            del ended[row.key]
    dead = [
        records.dead_row(row, end.at_us, end.attempts or row.attempts, end.error or row.error)
        for row in rows
        if (end := ended.get(row.key)) is not None
    ]
    with_rows = [event for event in ended.values() if event.has_row]
    without = [event for event in ended.values() if not event.has_row]
    if with_rows and not how.move(connection, tables, with_rows):
        how.end(connection, tables, with_rows)
    if without:
        how.end(connection, tables, without)
    if dead:
        connection.execute(dialect.insert_missing(tables.pending), [row._asdict() for row in dead])
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
