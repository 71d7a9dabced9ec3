"""Queues as they were: what they were declared with, and what operators have done to them since.

Who puts tasks back into an empty Redis declares them so. A rebuild alters and pauses them again;
the workers that have declared them anew meanwhile know nothing of that. Each database has all of
it, so that one which is away is not missed.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, select

from ..errors import LibraryError
from ..model.topic import Declaration
from .records import now_us
from .schema import TOPICS
from .shards import Asking, Database, Shards, each_asked

#: Seconds after which a process writes again what a queue was declared with: somebody may have
#: deleted the queue, and another has declared it again.
AGAIN = 60.0


class Kept(NamedTuple):
    """A queue as a library has it.

    declared: what it was declared with when something was last sent to it
    altered: what operators have altered since, by field as a declaration's JSON has it; None: taken
        back to what the consumers' connections say
    paused: whether they have paused it
    """

    declared: Declaration
    altered: dict[str, Any]
    paused: bool

    def over(self, standing: Declaration) -> Declaration:
        """A declaration with what operators have altered."""
        if not self.altered:
            return standing
        said = {**json.loads(standing.to_json()), **self.altered}
        kept = {name: value for name, value in said.items() if value is not None}
        return Declaration.from_json(json.dumps(kept))


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
        asking = Asking()
        for (number, name), values in list(self._owed.items()):
            database = self._shards.databases[number]
            with asking:
                if not (patient and database.rests):
                    self._write(database, values)
                    if self._owed.get((number, name)) is values:
                        self._owed.pop((number, name), None)
        return asking.error

    def _write(self, database: Database, values: dict[str, Any]) -> None:
        changed = ("declaration", "modified_us")
        made = {"altered": "{}", "paused": False, **values}
        database.execute(database.dialect.upsert(TOPICS, ("name",), changed), made)

    def alter(self, name: str, before: Declaration, after: Declaration) -> None:
        """Limits of a queue were altered by hand. Raises LibraryError if a database is away; the
        others have it."""
        old, new = json.loads(before.to_json()), json.loads(after.to_json())
        changes = {
            field: new.get(field) for field in {*old, *new} if old.get(field) != new.get(field)
        }
        self._by_hand(name, after, changes, None)

    def pause(self, name: str, declaration: Declaration, paused: bool) -> None:
        """A queue was paused, or goes on. Raises LibraryError, as :meth:`alter`."""
        self._by_hand(name, declaration, {}, paused)

    def _by_hand(
        self, name: str, declaration: Declaration, changes: dict[str, Any], paused: bool | None
    ) -> None:
        change = partial(self._change, name, declaration, changes, paused)
        with each_asked() as asking:
            for database in self._shards.databases:
                with asking:
                    database.run(partial(change, database))

    @staticmethod
    def _change(
        name: str,
        declaration: Declaration,
        changes: dict[str, Any],
        paused: bool | None,
        database: Database,
        connection: Connection,
    ) -> None:
        reading = select(TOPICS).where(TOPICS.c.name == name).with_for_update()
        there = connection.execute(reading).mappings().one_or_none()
        values = {
            "name": name,
            "declaration": declaration.to_json(),
            "altered": json.dumps({**json.loads(there["altered"] if there else "{}"), **changes}),
            "paused": paused if paused is not None else bool(there and there["paused"]),
            "modified_us": now_us(),
        }
        changed = [field for field in values if field != "name"]
        connection.execute(database.dialect.upsert(TOPICS, ("name",), changed), values)

    def forget(self, name: str) -> None:
        """A queue was deleted. Raises LibraryError."""
        self._declared.pop(name, None)
        for database in self._shards.databases:
            self._owed.pop((database.number, name), None)
        for database in self._shards.databases:
            database.execute(delete(TOPICS).where(TOPICS.c.name == name))

    def all(self) -> dict[str, Kept]:
        """The queues by name. Each database has them all: one that is away is not missed. Raises
        LibraryError if all are."""
        found: dict[str, Any] = {}
        asking, answered = Asking(), False
        for database in sorted(self._shards.databases, key=lambda one: one.rests):
            with asking:
                if answered and database.rests:
                    continue  # it was away a moment ago
                for row in database.read(select(TOPICS)):
                    there = found.get(row["name"])
                    if there is None or there["modified_us"] < row["modified_us"]:
                        found[row["name"]] = row
                answered = True
        if asking.error is not None and not answered:
            raise asking.error
        return {
            name: Kept(
                Declaration.from_json(row["declaration"]),
                json.loads(row["altered"]),
                bool(row["paused"]),
            )
            for name, row in found.items()
        }
