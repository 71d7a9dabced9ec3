"""What a process has yet to write: kept in memory, within bounds, until its database takes it.

Each database is written by itself: one that is away holds up what is for another in nothing. What a
database does not take for what it is goes, by its name, and the rest is written.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from ..errors import LibraryError
from .engines import RefusedError
from .records import Event, Key, Row
from .shards import Database
from .store import CHUNK, Made, Store

logger = logging.getLogger(__name__)

#: Events, and rows, that a process keeps while a database is away.
MAX_EVENTS = 100_000
MAX_ROWS = 10_000

#: What a value raises that cannot be sent to a database.
_UNSENDABLE = (RefusedError, ValueError, ArithmeticError, TypeError)


class _Part(NamedTuple):
    """What is for one database."""

    rows: list[Row]
    events: list[Event]
    withdrawn: list[Made]


class Backlog:
    """Rows and events that are to be written. Any thread may call it.

    ready: raises LibraryError if these databases cannot be used
    count: is told the queue of each message whose record is given up
    """

    def __init__(
        self,
        store: Store,
        ready: Callable[[Sequence[Database]], None],
        count: Callable[[str], None],
    ) -> None:
        self._store = store
        self._ready = ready
        self._count = count
        self._lock = threading.Lock()
        #: held by who writes
        self._writing = threading.Lock()
        #: of each message the latest
        self._events: dict[Key, Event] = {}
        #: by the number of the database; and of which there were some that are not written yet
        self._rows: dict[int, list[Row]] = {}
        self._behind: set[int] = set()
        #: what was written, perhaps, for publishes that have failed
        self._withdrawn: list[Made] = []
        #: how many were given up since it was last said
        self._lost = 0

    def __len__(self) -> int:
        rows = sum(len(some) for some in self._rows.values())
        return len(self._events) + rows + len(self._withdrawn)

    def add(self, events: Iterable[Event]) -> int:
        """Have events written; return how many there are to be written."""
        with self._lock:
            for event in events:
                self._add(event)
            if len(self._events) > MAX_EVENTS:
                self._keep_bounds()
            return len(self._events)

    def _add(self, event: Event) -> None:
        before = self._events.pop(event.key, None)
        if before is not None and before.has_ended and not event.has_ended:
            event = before  # what has ended does not begin again
        self._events[event.key] = event

    def add_rows(self, rows: Sequence[Row]) -> None:
        """Have rows written whose messages are sent already."""
        with self._lock:
            for row in rows:
                number = self._store.shards.of_key(row.key).database.number
                self._rows.setdefault(number, []).append(row)
                self._behind.add(number)
            self._keep_bounds()

    def withdraw(self, rows: Sequence[Row]) -> None:
        """Have rows deleted: their publish has failed, though they may have been written."""
        with self._lock:
            self._withdrawn += [Made(row.key, row.created_us) for row in rows]
            self._keep_bounds()

    def has_rows_for(self, database: Database) -> bool:
        """Whether rows for this database are to be written: it was away a moment ago."""
        return database.number in self._behind

    def forget(self, keys: Sequence[Key]) -> None:
        """Write nothing more of these."""
        with self._lock:
            for key in keys:
                self._events.pop(key, None)

    def take_lost(self) -> int:
        """How many were given up since this was last asked for want of room."""
        with self._lock:
            lost, self._lost = self._lost, 0
        return lost

    def _keep_bounds(self) -> None:
        """Give up the oldest events and the latest rows that are too many."""
        while len(self._events) > MAX_EVENTS:
            self._give_up(self._events.pop(next(iter(self._events))).key)
        over = sum(map(len, self._rows.values())) - MAX_ROWS
        while over > 0:
            longest = max(self._rows.values(), key=len)
            self._give_up(longest.pop().key)
            over -= 1
        for made in self._withdrawn[MAX_ROWS:]:
            self._give_up(made.key)
        del self._withdrawn[MAX_ROWS:]

    def _give_up(self, key: Key) -> None:
        self._lost += 1
        self._count(key[2])

    # -- writing

    def write(self, *, patient: bool = False) -> None:
        """Write everything now. Raises LibraryError of the first database that is away, when what
        is for the others is written; and keeps what is not.

        patient: leave out databases that were away a moment ago
        """
        with self._writing:
            with self._lock:
                events, self._events = self._events, {}
                rows, self._rows = self._rows, {}
                withdrawn, self._withdrawn = self._withdrawn, []
            shards = self._store.shards
            parts: dict[Database, _Part] = defaultdict(lambda: _Part([], [], []))
            for number, some in rows.items():
                parts[shards.databases[number]].rows.extend(some)
            for event in events.values():
                parts[shards.of_key(event.key).database].events.append(event)
            for made in withdrawn:
                parts[shards.of_key(made.key).database].withdrawn.append(made)
            error: LibraryError | None = None
            try:
                for database, part in parts.items():
                    if patient and database.rests:
                        continue
                    try:
                        self._write_part(database, part)
                    except LibraryError as exc:
                        error = error or exc
            finally:
                with self._lock:
                    for database, part in parts.items():
                        self._put_back(database, part)
            if error is not None:
                raise error

    def _put_back(self, database: Database, part: _Part) -> None:
        """Keep what is left of a part, before what has come meanwhile."""
        if part.rows:
            since = self._rows.get(database.number, [])
            # What fails first is tried last: it holds up no other.
            self._rows[database.number] = part.rows[CHUNK:] + part.rows[:CHUNK] + since
        elif database.number not in self._rows:
            self._behind.discard(database.number)
        if part.events:
            since_then, self._events = self._events, {}
            for event in (*part.events[CHUNK:], *part.events[:CHUNK], *since_then.values()):
                self._add(event)
        self._withdrawn += part.withdrawn
        self._keep_bounds()

    def _write_part(self, database: Database, part: _Part) -> None:
        """Write what is for a database; what is written is taken out of the part."""
        self._ready([database])
        self._write_some(part.withdrawn, self._store.take_back)
        self._write_some(part.rows, self._store.insert)
        # In one order, so that two processes do not wait for each other.
        part.events.sort(key=attrgetter("key"))
        if len(self._store.shards.all) > 1:
            part.events.sort(key=lambda event: self._store.shards.of_key(event.key).number)
        self._write_some(part.events, self._store.record)

    def _write_some(self, items: list[Any], write: Callable[[Sequence[Any]], Any]) -> None:
        while items:
            some = items[:CHUNK]
            try:
                write(some)
            except _UNSENDABLE:
                # Perhaps history was brought back from a backup, and has no room for the day.
                self._store.forget_days()
                for one in some:
                    self._write_one(one, write)
                    del items[0]
            else:
                del items[: len(some)]

    def _write_one(self, one: Any, write: Callable[[Sequence[Any]], Any]) -> None:
        try:
            write([one])
        except _UNSENDABLE as exc:
            self._count(one.key[2])
            logger.error(
                "message %.80s of %.80s is not recorded, the database does not take it: %s",
                *(one.key[0], one.key[2], str(exc)[:500]),
            )
