"""What queues were declared with: whoever puts tasks back into an empty Redis declares them so.

Each database has all of it, so that one which is away is not missed.
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import delete, select

from ..errors import LibraryError
from ..model.topic import Declaration
from .records import now_us
from .schema import TOPICS
from .shards import Database, Shards

#: Seconds after which a process writes again what a queue was declared with: somebody may have
#: deleted the queue, and another has declared it again.
AGAIN = 60.0


class Declarations:
    """The declarations that a library keeps."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        #: topic -> its declaration as it was written last, and monotonic seconds when that was
        self._declared: dict[str, tuple[str, float]] = {}
        #: what a database which was away is to have, by its number and the topic
        self._owed: dict[tuple[int, str], dict[str, Any]] = {}

    def note(self, name: str, declaration: Declaration, database: Database | None = None) -> bool:
        """Keep what a queue was declared with, if this process has not done so for a while.

        database: the one that must have it now; the others get it later if they are away: all
            unless given

        Returns whether one of them is to get it later.
        """
        text = declaration.to_json()
        before, now = self._declared.get(name), time.monotonic()
        if before is not None and before[0] == text and now < before[1] + AGAIN:
            return False
        values = {"name": name, "declaration": text, "modified_us": now_us()}
        if database is not None:
            self._write(database, values)
        for other in self._shards.databases:
            if other is not database:
                self._owed[other.number, name] = values
        self._declared[name] = text, now
        error = self.write_owed(patient=database is not None)
        if error is not None and database is None:
            self._declared.pop(name, None)
            raise error
        return bool(self._owed)

    def write_owed(self, *, patient: bool = True) -> LibraryError | None:
        """Keep declarations in databases that were away; return the error of one that still is.

        patient: leave out those that were away a moment ago
        """
        error = None
        for (number, name), values in list(self._owed.items()):
            database = self._shards.databases[number]
            if patient and database.rests:
                continue
            try:
                self._write(database, values)
            except LibraryError as exc:
                error = error or exc
            else:
                if self._owed.get((number, name)) is values:
                    self._owed.pop((number, name), None)
        return error

    def _write(self, database: Database, values: dict[str, Any]) -> None:
        changed = ("declaration", "modified_us")
        database.execute(database.dialect.upsert(TOPICS, ("name",), changed), values)

    def forget(self, name: str) -> None:
        """A queue was deleted. Raises LibraryError."""
        self._declared.pop(name, None)
        for database in self._shards.databases:
            self._owed.pop((database.number, name), None)
        for database in self._shards.databases:
            database.execute(delete(TOPICS).where(TOPICS.c.name == name))

    def all(self) -> dict[str, Declaration]:
        """What queues were declared with when something was last sent to them. Each database has
        them all: one that is away is not missed. Raises LibraryError if all are."""
        found: dict[str, tuple[int, str]] = {}
        errors: list[LibraryError] = []
        answered = False
        for database in sorted(self._shards.databases, key=lambda one: one.rests):
            if answered and database.rests:
                continue  # it was away a moment ago
            try:
                rows = database.read(select(TOPICS))
            except LibraryError as exc:
                errors.append(exc)
                continue
            answered = True
            for row in rows:
                there = found.get(row["name"])
                if there is None or there[0] < row["modified_us"]:
                    found[row["name"]] = (row["modified_us"], row["declaration"])
        if not answered:
            raise errors[0]
        return {name: Declaration.from_json(text) for name, (_, text) in found.items()}
