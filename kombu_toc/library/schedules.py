"""Schedules in the library: what each is, and the message that waits for its next firing.

A schedule changes with each firing, in a worker that must not wait for a database. So the latest
change of each is gathered here, and written by the recorder's thread; a change that is older by
Redis's clock never takes the place of a newer one.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import Connection, delete, select

from ..center.calls import ScheduleChange, ScheduleFiring
from ..center.center import TimeoutCenter
from .putting import Putter
from .records import identity_of
from .schema import SCHEDULES
from .shards import Database, each_asked
from .store import Store

#: Topic and name.
Name = tuple[str, str]

#: Schedules of which a process keeps a change while a database is away.
MAX_CHANGES = 10_000

#: Schedules that a rebuild reads at a time.
PAGE = 500

#: Microseconds for which it is known that a schedule was deleted.
GONE_US = 24 * 3600 * 1_000_000

#: Schedules that one transaction writes.
TOGETHER = 200

#: What a change may say: when, by Redis's clock, and the columns that it says then. A record is
#: empty if the schedule is gone.
_PARTS = {
    "modified_us": ("record", "next_us"),
    "template_us": ("template",),
    "firing_us": ("firing", "firing_id", "priority", "traits"),
}

#: A row that is not there yet.
_NEW: dict[str, Any] = {
    **{"record": "", "next_us": None, "modified_us": 0, "template": b"", "template_us": 0},
    **{"firing": None, "firing_id": None, "priority": 0, "traits": "", "firing_us": 0},
}


def _over(there: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """A row, or a change that is not written yet, after another change: each part as it was said
    last, whichever comes first."""
    found = dict(there)
    for at, columns in _PARTS.items():
        if at in change and change[at] >= there.get(at, 0):
            found.update({column: change[column] for column in (at, *columns)})
    return found


class Schedules:
    """Writes schedules, and puts them back. Any thread may tell a change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._changes: dict[Name, dict[str, Any]] = {}
        self._writing = threading.Lock()

    def __bool__(self) -> bool:
        """Whether a change is not written yet, or just being written."""
        return bool(self._changes) or self._writing.locked()

    def changed(self, topic: str, change: ScheduleChange, at_us: int) -> None:
        """A schedule was changed in Redis."""
        made: dict[str, Any] = {
            "record": change.wanted,
            "next_us": change.next_us,
            "modified_us": at_us,
        }
        if change.template:
            made |= {"template": change.template, "template_us": at_us}
        put = change.put
        if put is not None:
            made |= {"firing": put.body, "firing_id": put.id, "priority": put.priority}
            made |= {"traits": put.traits, "firing_us": at_us}
        elif change.take_out or not change.wanted:
            made |= {"firing": None, "firing_id": None, "priority": 0, "traits": ""}
            made["firing_us"] = at_us
        with self._lock:
            self._add((topic, change.name), made)
            if len(self._changes) > MAX_CHANGES:
                self._changes.pop(next(iter(self._changes)))

    def _add(self, name: Name, change: dict[str, Any]) -> None:
        self._changes[name] = _over(self._changes.pop(name, {}), change)

    def forget(self, topic: str) -> None:
        """A topic was deleted, with its schedules."""
        with self._lock:
            for name in [name for name in self._changes if name[0] == topic]:
                self._changes.pop(name)
        for database in self._store.shards.databases:
            database.execute(delete(SCHEDULES).where(SCHEDULES.c.topic == topic))

    # -- in the recorder's thread

    def write(self) -> None:
        """Write what has changed. Raises LibraryError, and keeps what is not written.

        Who calls while another thread writes waits for it.
        """
        with self._writing:
            self._write_all()

    def _write_all(self) -> None:
        with self._lock:
            changes, self._changes = self._changes, {}
        by_database: dict[Database, list[Name]] = defaultdict(list)
        # In one order, so that two processes do not wait for each other.
        for name in sorted(changes):
            by_database[self._store.shards.of(name[1]).database].append(name)
        with each_asked() as asking:
            for database, names in by_database.items():
                for start in range(0, len(names), TOGETHER):
                    some = {name: changes[name] for name in names[start : start + TOGETHER]}
                    with asking:
                        database.run(partial(self._write, database, some))
                        continue
                    with self._lock:
                        for name, change in some.items():
                            self._add(name, change)

    @classmethod
    def merge(cls, database: Database, row: dict[str, Any]) -> None:
        """Write what another database has of a schedule, as far as it is newer."""
        name = row.pop("topic"), row.pop("name")
        database.run(partial(cls._write, database, {name: row}))

    @staticmethod
    def _write(
        database: Database, changes: Mapping[Name, dict[str, Any]], connection: Connection
    ) -> None:
        names = [SCHEDULES.c.name.in_([name for _, name in changes])]
        reading = select(SCHEDULES).where(*names, SCHEDULES.c.topic.in_([t for t, _ in changes]))
        reading = reading.order_by(SCHEDULES.c.topic, SCHEDULES.c.name).with_for_update()
        read = connection.execute(reading).mappings()
        there: dict[Name, Any] = {(row["topic"], row["name"]): row for row in read}
        rows = [
            {"topic": name[0], "name": name[1], **_over(there.get(name) or _NEW, change)}
            for name, change in changes.items()
        ]
        connection.execute(database.dialect.upsert(SCHEDULES, ("topic", "name"), list(_NEW)), rows)

    def prune(self, before_us: int) -> None:
        """Drop what was deleted before that time: nobody writes an earlier change of it now."""
        gone = (SCHEDULES.c.record == "") & (SCHEDULES.c.modified_us < before_us)
        for database in self._store.shards.databases:
            database.execute(delete(SCHEDULES).where(gone))

    # -- a rebuild

    def rebuild(self, center: TimeoutCenter, putter: Putter, database: Database) -> int:
        """Put back the schedules of a database that Redis has lost, each with the message of its
        next firing; return how many."""
        there = select(SCHEDULES).where(SCHEDULES.c.record != "")
        pages = database.pages(there, SCHEDULES.c.topic, SCHEDULES.c.name, size=PAGE)
        return sum(self._put(center, putter, rows) for rows in pages)

    def any_before(self, database: Database, us: int) -> bool:
        """Whether a schedule fires next before that time: a worker may have just taken it on."""
        soon = (SCHEDULES.c.next_us < us) & (SCHEDULES.c.record != "")
        reading = select(SCHEDULES.c.name).where(soon).limit(1)
        return bool(database.read(reading))

    def _put(self, center: TimeoutCenter, putter: Putter, rows: Sequence[Any]) -> int:
        """Put back those of these schedules that are gone, those of a queue together; return how
        many."""
        keys = {
            (row["topic"], row["name"]): identity_of(
                row["topic"], row["firing_id"], row["firing"], row["traits"]
            )[0]
            for row in rows
            if row["firing"] is not None and row["next_us"] is not None
        }
        # One that has run is not put again; who looks after schedules finds it gone, and goes on.
        known = list(keys.values())
        run = self._store.ended_of(known) | {row.key for row in self._store.of_keys(known)}
        waiting = {place for place, key in keys.items() if key not in run}
        by_topic: dict[str, list[Any]] = defaultdict(list)
        for row in rows:
            by_topic[row["topic"]].append(row)
        number = 0
        for topic, some in by_topic.items():
            putter.topic(topic)
            _, found = center.recurring.read(topic, [row["name"] for row in some])
            there = {one.name for one in found}
            changes = [
                _change(row, puts=(topic, row["name"]) in waiting)
                for row in some
                if row["name"] not in there
            ]
            number += sum(one.done for one in center.recurring.change_many(topic, changes))
        return number


def _change(row: Any, *, puts: bool) -> ScheduleChange:
    """The change that puts back a schedule; puts: with the message of its next firing."""
    put = None
    if puts:
        how = (row["firing_id"], row["firing"], row["next_us"], row["priority"], row["traits"])
        put = ScheduleFiring(*how)
    kept = (row["name"], "", row["record"], row["next_us"], row["template"])
    return ScheduleChange(*kept, put=put, replaces=True)
