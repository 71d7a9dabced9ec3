"""Schedules in the library: what each is, and the message that waits for its next firing.

A schedule changes with each firing, in a worker that must not wait for a database. So the latest
change of each is gathered here, and written by the recorder's thread; a change that is older by
Redis's clock never takes the place of a newer one.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, select

from ..center.center import TimeoutCenter
from ..center.recurring import ScheduleChange, ScheduleFiring
from ..errors import LibraryError
from .putting import Putter
from .schema import SCHEDULES
from .shards import Database
from .store import Store

#: Topic and name.
Name = tuple[str, str]

#: Schedules of which a process keeps a change while a database is away.
MAX_CHANGES = 10_000

#: Schedules that a rebuild reads at a time.
PAGE = 500

_FIRING = ("firing", "firing_id", "priority", "traits")


class _Change(NamedTuple):
    """What has become of a schedule.

    record: empty: it is gone
    template: empty: the one that it has
    firing: the message of its next firing; None: there is none
    keeps: whether that is the one that was there
    at_us: when, by Redis's clock
    """

    record: str
    next_us: int | None
    template: bytes
    firing: ScheduleFiring | None
    keeps: bool
    at_us: int

    def after(self, before: _Change | None) -> _Change:
        """The same, after another change that was not written yet."""
        if before is None or not before.record or not self.record:
            return self
        if before.at_us > self.at_us:
            return before
        kept = self._replace(template=self.template or before.template)
        return kept._replace(firing=before.firing, keeps=before.keeps) if self.keeps else kept


class Schedules:
    """Writes schedules, and puts them back. Any thread may tell a change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._changes: dict[Name, _Change] = {}

    def __len__(self) -> int:
        return len(self._changes)

    def changed(self, topic: str, change: ScheduleChange, at_us: int) -> None:
        """A schedule was changed in Redis."""
        made = _Change(
            *(change.wanted, change.next_us, change.template, change.put),
            keeps=change.put is None and not change.take_out,
            at_us=at_us,
        )
        name = topic, change.name
        with self._lock:
            self._changes[name] = made.after(self._changes.pop(name, None))
            if len(self._changes) > MAX_CHANGES:
                self._changes.pop(next(iter(self._changes)))

    def forget(self, topic: str) -> None:
        """A topic was deleted, with its schedules."""
        with self._lock:
            for name in [name for name in self._changes if name[0] == topic]:
                self._changes.pop(name)
        for database in self._store.shards.databases:
            database.execute(delete(SCHEDULES).where(SCHEDULES.c.topic == topic))

    # -- in the recorder's thread

    def write(self) -> None:
        """Write what has changed. Raises LibraryError, and keeps what is not written."""
        with self._lock:
            changes, self._changes = self._changes, {}
        failed: LibraryError | None = None
        for name, change in changes.items():
            database = self._store.shards.of(name[1]).database
            try:
                database.run(partial(self._write, database, name, change))
            except LibraryError as exc:
                failed = exc
                with self._lock:
                    later = self._changes.get(name)
                    self._changes[name] = change if later is None else later.after(change)
        if failed is not None:
            raise failed

    @staticmethod
    def _write(database: Database, name: Name, change: _Change, connection: Connection) -> None:
        mine = (SCHEDULES.c.topic == name[0]) & (SCHEDULES.c.name == name[1])
        reading = select(SCHEDULES).where(mine)
        if database.dialect.partitions:
            reading = reading.with_for_update()
        there = connection.execute(reading).mappings().one_or_none()
        if there is not None and there["modified_us"] > change.at_us:
            return
        if not change.record:
            connection.execute(delete(SCHEDULES).where(mine))
            return
        known: dict[str, Any] = dict(there or {})
        values = {
            "topic": name[0],
            "name": name[1],
            "record": change.record,
            "next_us": change.next_us,
            "template": change.template or known.get("template", b""),
            "modified_us": change.at_us,
        }
        if change.keeps and known:
            values |= {one: known[one] for one in _FIRING}
        else:
            put = change.firing
            values |= {
                "firing": put and put.body,
                "firing_id": put and put.id,
                "priority": put.priority if put else 0,
                "traits": put.traits if put else "",
            }
        keys = ("topic", "name")
        changed = [one for one in values if one not in keys]
        connection.execute(database.dialect.upsert(SCHEDULES, keys, changed), values)

    # -- a rebuild

    def rebuild(self, center: TimeoutCenter, putter: Putter, database: Database) -> int:
        """Put back the schedules of a database that Redis has lost, each with the message of its
        next firing; return how many."""
        number = 0
        after: Name = ("", "")
        while rows := self._page(database, after):
            number += sum(self._put(center, putter, row) for row in rows)
            after = rows[-1]["topic"], rows[-1]["name"]
        return number

    @staticmethod
    def _page(database: Database, after: Name) -> Any:
        topic, name = SCHEDULES.c.topic, SCHEDULES.c.name
        behind = (topic > after[0]) | ((topic == after[0]) & (name > after[1]))
        reading = select(SCHEDULES).where(behind).order_by(topic, name).limit(PAGE)
        return database.read(reading)

    @staticmethod
    def _put(center: TimeoutCenter, putter: Putter, row: Any) -> bool:
        topic, name = row["topic"], row["name"]
        putter.topic(topic)
        if center.recurring.read(topic, [name])[1]:
            return False
        put = None
        if row["firing"] is not None and row["next_us"] is not None:
            how = (row["firing_id"], row["firing"], row["next_us"], row["priority"], row["traits"])
            put = ScheduleFiring(*how)
        change = ScheduleChange(
            *(name, "", row["record"], row["next_us"], row["template"]), put=put, replaces=True
        )
        return center.recurring.change(topic, change).done
