"""Dead letters in the library: history says that they are dead, and their rows stay, so that a
rebuild makes dead letters of them again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

from sqlalchemy import Table, delete, select, text, tuple_, update

from ..center.center import TimeoutCenter
from ..center.pop import bury_call
from ..errors import LibraryError
from ..model import message, scores
from ..model.results import Delivery, Found
from . import statuses
from .guard import ends_of, over_of
from .outcomes import are
from .putting import DEAD, MISSING, Putter, states_in_redis
from .records import (
    Event,
    Key,
    Row,
    identity_of,
    ids_of,
    is_storable,
    now_us,
    row_of_message,
    storable,
)
from .schema import IS_NOT_FAR, MAX_ERROR
from .shards import Database, Shard
from .store import CHUNK, Store, chunks

#: Why a message is dead that was so when Redis was lost.
REASON = "it was dead when Redis was lost"

#: Rows that a rebuild reads at a time.
PAGE = 500


class DeadLetters:
    """The rows of dead letters."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def _change(self, named: Iterable[tuple[str, str]], make: Any) -> None:
        """Run a statement for the dead letters of these queues and ids.

        make: makes it, of a table and a condition
        """
        by_topic: dict[str, set[str]] = {}
        for topic, id in named:
            by_topic.setdefault(topic, set()).update(ids_of(id))
        for topic, ids in by_topic.items():
            for shard, some in self._store.locator.shards_of(sorted(ids)).items():
                table = shard.tables.pending
                for start in range(0, len(some), CHUNK):
                    which = table.c.id.in_(some[start : start + CHUNK]) & (table.c.topic == topic)
                    which &= table.c.place == statuses.IN_DEAD_QUEUE
                    shard.database.execute(make(table, which))

    def purged(self, named: Iterable[tuple[str, str]]) -> None:
        """Dead letters were deleted; named: queue and id of each. Raises LibraryError."""
        self._change(named, lambda table, which: delete(table).where(which))

    def requeuing(self, found: Sequence[Found]) -> None:
        """These are about to wait again: see to it that the library has them as dead. A task that
        was acknowledged when it began is done there, although its worker was lost. Raises
        LibraryError."""
        rows: dict[Key, tuple[Row, Mapping[str, Any]]] = {}
        for one in found:
            key, headers = identity_of(one.topic, one.id, one.body, one.token)
            if not key[1] or message.SCHEDULE in headers or not is_storable(key):
                continue  # it has no row, as its sender has put it
            with suppress(LibraryError, ValueError, TypeError):  # nor has what cannot be kept
                row = row_of_message(one, key)._replace(
                    status=statuses.DEAD,
                    place=statuses.IN_DEAD_QUEUE,
                    error=storable(one.error)[:MAX_ERROR] or None,
                )
                rows[key] = row, headers
        over = over_of(self._store, list(rows))
        ends = ends_of(self._store, over) if over else {}
        events = []
        for key in over:
            row, headers = rows[key]
            end = ends[key]
            said = (headers, end.action_us)
            worker, error = end.worker or "", row.error or end.error or ""
            events.append(Event(key, statuses.DEAD, now_us(), end.attempts, worker, error, said))
        if events:
            self._store.record(events)
        if rows:
            self._store.insert([row for row, _ in rows.values()])
            # Of some, their workers could not say yet that they are dead.
            values = {"status": statuses.DEAD, "place": statuses.IN_DEAD_QUEUE}
            for shard, keys in self._store.shards.of_keys(rows).items():
                table = shard.tables.pending
                for start in range(0, len(keys), CHUNK):
                    which = are(table, keys[start : start + CHUNK])
                    which &= table.c.status == statuses.TAKEN
                    shard.database.execute(update(table).where(which).values(**values))

    def requeued(self, named: Iterable[tuple[str, str]]) -> None:
        """Dead letters wait again. Raises LibraryError."""
        values = _alive()
        self._change(named, lambda table, which: update(table).where(which).values(**values))

    def go_on(self, center: TimeoutCenter, rows: Sequence[Row]) -> None:
        """The messages of these rows were not dead a moment ago: somebody has requeued those that
        the library has as dead, unless they have just died. Raises LibraryError."""
        values = _alive()
        self._store.shards.pull([row.key for row in rows])
        for shard, some in self._store.shards.divided(rows, attrgetter("key")).items():
            table = shard.tables.pending
            names = (table.c.id, table.c.token, table.c.topic, table.c.modified_us)
            for chunk in chunks(some):
                which = are(table, [row.key for row in chunk])
                which &= table.c.place == statuses.IN_DEAD_QUEUE
                said: dict[Any, tuple[Any, ...]] = {}
                for found in shard.database.read(select(*names).where(which)):
                    at = tuple(found.values())
                    said[at[:3]] = at
                # Redis is asked after that: what waits there now has not died before.
                dead = [row for row in chunk if row.key in said]
                states = states_in_redis(center, dead)
                alive = [row.key for row, one in zip(dead, states, strict=True) if one != DEAD]
                if alive:
                    which &= table.c.id.in_([key[0] for key in alive])
                    which &= tuple_(*names).in_([said[key] for key in alive])
                    shard.database.execute(update(table).where(which).values(**values))

    def forget(self, topic: str) -> None:
        """A queue was deleted, with its dead letters. Raises LibraryError."""
        self._delete(lambda table: text(IS_NOT_FAR) & (table.c.topic == topic))

    def prune(self, before_us: int) -> None:
        """Delete those that have died before. Raises LibraryError."""
        self._delete(lambda table: table.c.modified_us < before_us)

    def pruning(self, shard: Shard, before_us: int) -> Iterator[int]:
        """As :meth:`prune`, of one shard; yield after each statement that reads some."""
        return self._deleting(shard, lambda table: table.c.modified_us < before_us)

    def _delete(self, condition: Any) -> None:
        for shard in self._store.shards.all:
            list(self._deleting(shard, condition))

    @staticmethod
    def _deleting(shard: Shard, condition: Any) -> Iterator[int]:
        table: Table = shard.tables.pending
        dead = table.c.place == statuses.IN_DEAD_QUEUE
        some = select(table.c.id, table.c.token, table.c.topic).where(dead, condition(table))
        # A few at a time: however many there are, no statement takes long.
        while found := shard.database.read(some.limit(CHUNK)):
            keys: list[Key] = [(row["id"], row["token"], row["topic"]) for row in found]
            shard.database.execute(delete(table).where(dead, are(table, keys)))
            yield len(keys)
        yield 0

    def rebuild(self, center: TimeoutCenter, putter: Putter, database: Database) -> int:
        """Make dead letters of what was dead in a database and is not in Redis; return how many.
        Their age counts from now on."""
        number = 0
        for shard in self._store.shards.all:
            if shard.database is not database:
                continue
            after = None
            while rows := self._store.page(shard, statuses.IN_DEAD_QUEUE, after, PAGE):
                after = rows[-1].action_us, *rows[-1].key
                number += self.bury(center, putter, rows)
        return number

    @staticmethod
    def bury(
        center: TimeoutCenter, putter: Putter, rows: Sequence[Row], reason: str = REASON
    ) -> int:
        """Make dead letters of rows whose messages are not in Redis, with their errors; return how
        many."""
        calls = []
        for row, state in zip(rows, states_in_redis(center, rows), strict=True):
            topic = putter.topic(row.topic)
            age_us = topic.declaration.limits(center.limits).dead_age * 1_000_000
            if state != MISSING or row.modified_us + age_us < now_us():
                continue
            center.registry.admit(topic, row.id, row.basis)
            delivery = Delivery(
                topic=topic.name,
                slot=topic.slot_for(row.basis or row.id).number,
                step=topic.step_index(row.priority),
                id=row.id,
                score=scores.action(row.action_us),
                body=row.body,
                limit=topic.declaration.retries,
                birth=f"lost{row.traits}",
            )
            calls.append(bury_call(center.context, topic, delivery, reason, row.error or ""))
        center.runner.run_all(calls)
        return len(calls)


def _alive() -> dict[str, int]:
    """The columns of a row whose message waits again from now on."""
    now = now_us()
    return {
        "status": statuses.PENDING,
        "place": statuses.IN_REDIS,
        "action_us": now,
        "modified_us": now,
    }
