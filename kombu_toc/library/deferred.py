"""Writes the rows of queues that are kept ``behind``: their publishes wait for no database.

The scripts log which messages have changed, and each is read as it is by then: so entries may be
read twice, late, or by two processes, and a message that has ended meanwhile needs no row. Entries
are deleted when the rows are written. A process that is killed in between leaves them to the next.

A backlog, as after a time without workers, is mostly run soon, if workers are not held up by those
who write its rows. So a process that is busy with tasks takes some seconds for it.

What the log of a slot has no room for is not in it, but it says so. Then all that waits in the
queue is looked through.

Each database is written by itself. The entries of one that is away stay in the logs, and are read
again when it answers; those of the others are read on behind them.
"""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..center.calls import CANCEL, FULL, MOVE, Entry, logs_of, read_call, written_call
from ..center.center import TimeoutCenter
from ..client.connection import pipelined
from ..errors import LibraryError
from ..model import scores
from ..model.library import OFF
from ..model.results import DEAD, IN_FLIGHT, WAITING, Found
from ..model.topic import Slot, Topic
from . import statuses
from .guard import ends_of, over_of
from .putting import DeadLetters, missing_of
from .rebuild import key_of
from .records import (
    TOLD_HEADERS,
    Event,
    Key,
    Row,
    content_of,
    dead_row,
    ids_of,
    now_us,
    row_of_message,
)
from .shards import CHUNK, Asking, Database, each_asked, write_each
from .store import Store

logger = logging.getLogger(__name__)

#: Entries that are read together, and from how many slots; bytes of bodies from each.
ENTRIES = 2000
SLOTS = 16
BYTES = 1_000_000

#: Milliseconds for which an entry waits at least: what has ended by then needs no row, as most of
#: what is sent to be run at once.
AGE_MS = 1000

#: Seconds that one turn takes at most; after which it is seen which queues are kept behind; and
#: whether any other has a log, which it may have had before another process was elected.
TURN = 1.0
RELOAD = 2.0
RELOAD_OTHERS = 60.0

#: Seconds within which a process that is busy has written a backlog, about; the part of a processor
#: that other threads of it use if it is; seconds until the next turn; and seconds after everything
#: was read for which what is there has come since.
CATCH_UP = 30.0
BUSY = 0.25
INTERVAL = 0.5
RECENT = 2.0


class _Logged(NamedTuple):
    """What was read of the log of one slot."""

    topic: Topic
    slot: Slot
    entries: list[Entry]
    gone: int
    more: bool


#: Entries of the log of one slot, with the rows of their messages, if these have any.
_Part = tuple[Topic, Slot, list[tuple[Entry, Row | None]]]


class _Pace:
    """How fast a backlog is written: at once, or, if this process is busy with other things, so
    that what is left of it falls evenly to nothing."""

    def __init__(self) -> None:
        #: whether it is busy: it is, until that is known; monotonic seconds and the processor's
        #: seconds of other threads when that was last looked at
        self._busy = True
        self._used: tuple[float, float] | None = None
        #: when the backlog was met, and how many entries it had; None: there is none
        self._met: tuple[float, int] | None = None
        #: monotonic seconds when all that was old enough had been read, if it ever was
        self._read: float | None = None

    def look(self) -> None:
        """See whether the process is busy."""
        now, used = time.monotonic(), time.process_time() - time.thread_time()
        if self._used is None:
            self._used = now, used
        elif now - self._used[0] >= INTERVAL / 2:
            self._busy = used - self._used[1] >= BUSY * (now - self._used[0])
            self._used = now, used

    def met(self, whole: int) -> None:
        """There is a backlog, of so many entries when it was first met."""
        if self._met is None:
            self._met = time.monotonic(), whole

    def over(self) -> None:
        """There is none any more."""
        self._met = None
        self._read = time.monotonic()

    def waits(self, left: int) -> bool:
        """Whether nothing needs to be done until the next turn, with so many entries left."""
        now = time.monotonic()
        if left <= ENTRIES:
            self._met = None
        elif self._read is None or now - self._read > RECENT:
            # Nobody has read for a while: to begin at once would be to write rows of what is about
            # to be run.
            self.met(left)
        if self._met is None or not self._busy:
            return False
        since, whole = self._met
        done = (now + INTERVAL - since) / CATCH_UP
        return left - ENTRIES <= whole * (1 - done)


class _Look:
    """A look through all that waits in a queue, some of which is not in its logs.

    marks: the entries that say so, which are deleted when it ends
    misses: whether a database was away: all is looked through once more when it answers
    """

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.marks: list[tuple[Slot, str]] = []
        self.after: str | None = None
        self.number = 0
        self.misses = False


class Behind:
    """What the elected process does about logs. Used by one thread."""

    def __init__(self, store: Store, center: TimeoutCenter) -> None:
        self._store = store
        self._center = center
        #: the slots that may have logs, and monotonic seconds until which that is believed
        self._slots: list[tuple[Topic, Slot]] = []
        self._believed = self._next_others = 0.0
        self._asking = Asking()
        #: by the key of a log, the entry behind which it is read: of some before it, the databases
        #: were away
        self._after: dict[str, str] = {}
        #: by queue
        self._looks: dict[str, _Look] = {}
        self._pace = _Pace()

    def turn(self) -> bool:
        """Write what is logged, for a while; return whether there is more to do at once. Raises
        LibraryError of the first database that was away, when the others are written."""
        until = time.monotonic() + TURN
        self._pace.look()
        with each_asked() as self._asking:
            if self._after and not self._resting():
                with self._asking:
                    for database in self._store.shards.databases:
                        database.check()
                    self._after.clear()
            more = self._step()
            while more and time.monotonic() < until:
                more = self._step()
        return more

    def _step(self) -> bool:
        """Write some of what is logged; return whether there is more."""
        lengths = self._see()
        resting = self._resting()
        looks = [one for one in self._looks.values() if one.after or not (one.misses and resting)]
        if not looks and self._pace.waits(sum(lengths)):
            return False
        read = self._read(lengths)
        if any(one.more for one in read):
            self._pace.met(sum(lengths))
        else:
            self._pace.over()
        if not looks and not any(one.entries or one.gone for one in read):
            return False
        self._write(read)
        self._begin_looks(read)
        for look in looks or list(self._looks.values()):
            self._go_on(look)
        return True

    def _resting(self) -> bool:
        """Whether a database was away a moment ago."""
        return any(one.rests for one in self._store.shards.databases)

    # -- what is logged

    def _see(self) -> list[int]:
        """How many entries there are in the log of each slot."""
        now = time.monotonic()
        if now >= self._believed:
            # Also of a queue that is not kept behind any more; of others, now and then.
            known = {topic.name for topic, _ in self._slots}
            others = now >= self._next_others
            if others:
                self._next_others = now + RELOAD_OTHERS
            every = [
                (one, slot)
                for one in self._center.registry.select(None)
                if one.declaration.logs
                or ((others or one.name in known) and not one.declaration.expires)
                for slot in logs_of(one)
            ]
            lengths = self._lengths(every)
            self._slots = [
                pair
                for pair, length in zip(every, lengths, strict=True)
                if pair[0].declaration.logs or length
            ]
            self._believed = now + RELOAD
        return self._lengths(self._slots)

    def _read(self, lengths: Sequence[int]) -> list[_Logged]:
        """What the logs have, as much as is written together."""
        some = [pair for pair, length in zip(self._slots, lengths, strict=True) if length][:SLOTS]
        # The next time it is the turn of others.
        self._slots = [*(pair for pair in self._slots if pair not in some), *some]
        many, after = ENTRIES // (len(some) or 1), self._after.get
        calls = [read_call(slot, many, BYTES, AGE_MS, after(slot.log)) for _, slot in some]
        read = self._center.runner.run_all(calls)
        return [_Logged(*pair, *one) for pair, one in zip(some, read, strict=True)]

    def _lengths(self, slots: Sequence[tuple[Topic, Slot]]) -> list[int]:
        return pipelined(self._center.client, [("XLEN", slot.log) for _, slot in slots])

    def _write(self, read: Sequence[_Logged]) -> None:
        """Write what has changed, and then delete the entries: each database by itself."""
        parts: dict[Database | None, list[_Part]] = defaultdict(list)
        for topic, slot, entries, *_ in read:
            of: dict[Database | None, list[tuple[Entry, Row | None]]] = defaultdict(list)
            for entry in entries:
                kept = entry.state and topic.declaration.library != OFF
                row = _row(topic, slot, entry) if kept else None
                # Where the row of what was cancelled is, any database may have to say.
                known = row is not None and entry.what != CANCEL
                of[self._store.database_of(row) if row and known else None].append((entry, row))
            for database, some in of.items():
                parts[database].append((topic, slot, some))
        for database, part in parts.items():
            with self._asking:
                if not (self._resting() if database is None else database.rests):
                    self._write_part(database, part)
                    continue
            for _, slot, _ in part:
                self._after[slot.log] = ""
        for _, slot, entries, *_ in read:
            if entries and slot.log in self._after:
                self._after[slot.log] = entries[-1].name

    def _write_part(self, database: Database | None, part: Sequence[_Part]) -> None:
        """database: of the rows; None: whatever has them"""
        rows: dict[Key, Row] = {}
        dead: dict[Key, Row] = {}
        moved: list[Row] = []
        cancelled: dict[str, set[str]] = {}
        #: by the place of its log: id -> key of the row
        written: list[dict[str, Key]] = []
        for topic, _, entries in part:
            ids: dict[str, Key] = {}
            written.append(ids)
            for entry, row in entries:
                if entry.what == CANCEL:
                    cancelled.setdefault(topic.name, set()).update(ids_of(entry.id))
                if row is None:
                    continue
                ids[entry.id] = row.key
                if entry.state == DEAD:
                    dead[row.key] = row
                    continue
                rows[row.key] = row
                if entry.what == MOVE:
                    moved.append(row)
        if rows or dead:
            for topic in {one.name: one for one, *_ in part}.values():
                self._store.declarations.note(topic.name, topic.declaration, database)
        if not self._insert(list(rows.values())):
            DeadLetters(self._store).go_on(self._center, list(rows.values()))
        for row in moved:
            self._store.set_time([(row.id, row.topic, row.token)], row.action_us)
        self._store.note(self._cancelled(cancelled), statuses.CANCELLED)
        if dead:
            self._bury(dead)
        self._delete(part, written, dead)

    def _bury(self, dead: Mapping[Key, Row]) -> None:
        """Write that these are dead, with the rows that a rebuild makes dead letters of."""
        over = self._store.ended_of(list(dead))
        events = [
            Event(key, statuses.DEAD, now_us(), 0, "", "", _said(row))
            for key, row in dead.items()
            if key not in over
        ]
        if events:
            self._store.record(events)
        # Of the others, their workers have said it: they had no rows then.
        ends = ends_of(self._store, over) if over else {}
        kept = []
        for key, row in dead.items():
            end = ends.get(key)
            if end is None:
                kept.append(dead_row(row))
            elif end.status == statuses.DEAD:
                kept.append(dead_row(row, end.modified_us, end.attempts, end.error))
        self._insert(kept)

    def _delete(
        self, part: Sequence[_Part], written: Sequence[dict[str, Key]], dead: Mapping[Key, Row]
    ) -> None:
        calls, keys = [], []
        for (_, slot, entries), ids in zip(part, written, strict=True):
            names = [entry.name for entry, _ in entries if entry.what != FULL]
            if names:
                calls.append(written_call(slot, names, list(ids)))
                keys.append(ids)
        # What was acknowledged between the look and the row has ended, and whoever has done that
        # says so, or has said so.
        over: list[Key] = []
        for ids, gone in zip(keys, self._center.runner.run_all(calls), strict=True):
            if gone is None:
                over += over_of(self._store, [key for key in ids.values() if key not in dead])
            else:
                over += (ids[id] for id in gone)
        if over:
            self._store.forget(over)

    def _insert(self, rows: Sequence[Row]) -> bool:
        """Write rows, as far as databases take them; return whether it is certain that none was
        there. Raises LibraryError if these do not answer."""

        def refused(row: Row, why: Exception) -> None:
            logger.error("message %.80r in queue %s has no row: %s", row.id, row.topic, why)

        return bool(write_each(self._store.insert, rows, refused))

    def _cancelled(self, ids: dict[str, set[str]]) -> list[Key]:
        """The keys of rows whose messages were cancelled, and are gone."""
        wanted = [id for some in ids.values() for id in some]
        rows = [
            row
            for row in self._store.of_ids(wanted)
            if row.id in ids.get(row.topic, ()) and row.place == statuses.IN_REDIS
        ]
        return [row.key for row in missing_of(self._center, rows)]

    # -- what is not logged

    def _begin_looks(self, read: Iterable[_Logged]) -> None:
        for topic, slot, entries, *_ in read:
            marks = [(slot, entry.name) for entry in entries if entry.what == FULL]
            if not marks:
                continue
            look = self._looks.get(topic.name)
            if look is None:
                look = self._looks[topic.name] = _Look(topic)
                logger.warning(
                    "queue %s: more was sent than its log for the task library may have, and what "
                    "came then has no row yet: all that waits is looked through now",
                    topic.name,
                )
            if look.after is None:  # what was left out later is looked for later
                look.marks += [mark for mark in marks if mark not in look.marks]

    def _go_on(self, look: _Look) -> None:
        """Write the rows of a page of what is there; where they are, nothing changes."""
        topic = look.topic
        if look.after is None:
            look.misses = False
        states = (WAITING, IN_FLIGHT)
        page = self._center.scan(topic.name, state=states, limit=CHUNK, after=look.after)
        rows: dict[Key, Row] = {}
        for found in page.messages:
            entry = Entry("0", "", found.id, found.state, 0, found.score, found.body, found.token)
            row = _row(topic, topic.slot(found.slot), entry)
            if row is not None:
                rows[row.key] = row
        of: dict[Database, list[Row]] = defaultdict(list)
        for row in rows.values():
            of[self._store.database_of(row)].append(row)
        for database, some in of.items():
            with self._asking:
                if not database.rests:
                    self._write_seen(look, database, some)
                    continue
            look.misses = True
        look.number += len(rows)
        look.after = page.after
        if look.after is None and not look.misses:
            self._looks.pop(topic.name)
            for slot, name in look.marks:
                self._center.runner.run(written_call(slot, [name]))
            logger.info("queue %s: %d messages were looked through", topic.name, look.number)

    def _write_seen(self, look: _Look, database: Database, rows: Sequence[Row]) -> None:
        """Write the rows of what a look has seen."""
        topic = look.topic
        self._store.declarations.note(topic.name, topic.declaration, database)
        self._insert(rows)
        gone = [row.key for row in missing_of(self._center, rows)]
        if gone and all(self._lengths([(topic, slot) for slot, _ in look.marks])):
            self._store.forget(gone)  # not if everything was lost just now


def _row(topic: Topic, slot: Slot, entry: Entry) -> Row | None:
    """The row of a message; None if it can have none."""
    found = Found(
        *(topic.name, slot.number, entry.id, entry.state, entry.step),
        *(scores.plain(entry.score), entry.body, "", "", entry.token),
    )
    content = content_of(entry.body, entry.id)
    try:
        key = key_of(found, content)
        if key is None:
            return None
        row = row_of_message(found, key, content)
    except (LibraryError, ValueError, TypeError) as exc:
        said = str(exc).removesuffix("; nothing was sent")
        logger.warning("message %.80r in queue %s has no row: %s", entry.id, topic.name, said)
        return None
    sent_us = entry.ms * 1000 or row.created_us
    due = entry.state == WAITING and scores.action_time(found.score) > 0
    return row._replace(
        status=statuses.TAKEN if entry.state == IN_FLIGHT else statuses.PENDING,
        action_us=row.action_us if due else sent_us,
        created_us=sent_us,
    )


def _said(row: Row) -> tuple[dict[str, Any], int]:
    """What history is told of a message that has no row."""
    attributes = row.attributes and json.loads(row.attributes)
    headers = zip(TOLD_HEADERS, (row.task, row.biz_type, row.biz_id, attributes), strict=True)
    return {name: value for name, value in headers if value is not None}, row.action_us
