"""What consumers note of messages, until it is looked at: gathered for as little as can be."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from ..model import scores
from ..model.library import BEHIND, OFF
from ..model.results import Delivery
from ..model.topic import Topic
from . import records, statuses
from .db import RefusedError
from .schema import MAX_ERROR
from .shards import CHUNK, Database, each_asked
from .store import Made, Store

# -- what a process has yet to write
#
# Each database is written by itself: one that is away holds up what is for another in nothing.
# What a
# database does not take for what it is goes, by its name, and the rest is written.

logger = logging.getLogger(__name__)

#: Events, and rows, that a process keeps while a database is away.
MAX_EVENTS = 100_000
MAX_ROWS = 10_000

#: What a value raises that cannot be sent to a database.
_UNSENDABLE = (RefusedError, ValueError, ArithmeticError, TypeError)


class _Part(NamedTuple):
    """What is for one database."""

    rows: list[records.Row]
    events: list[records.Event]
    withdrawn: list[Made]


@dataclass(eq=False)
class Backlog:
    """Rows and events that are to be written. Any thread may call it.

    ready: raises LibraryError if these databases cannot be used
    count: is told the queue of each message whose record is given up
    """

    _store: Store
    _ready: Callable[[Sequence[Database]], None]
    _count: Callable[[str], None]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        #: held by who writes
        self._writing = threading.Lock()
        #: of each message the latest
        self._events: dict[records.Key, records.Event] = {}
        #: by the number of the database; and of which there were some that are not written yet
        self._rows: dict[int, list[records.Row]] = {}
        self._behind: set[int] = set()
        #: what was written, perhaps, for publishes that have failed
        self._withdrawn: list[Made] = []
        #: how many were given up since it was last said
        self._lost = 0

    def __len__(self) -> int:
        rows = sum(len(some) for some in self._rows.values())
        return len(self._events) + rows + len(self._withdrawn)

    def add(self, events: Iterable[records.Event]) -> int:
        """Have events written; return how many there are to be written."""
        with self._lock:
            for event in events:
                self._add(event)
            if len(self._events) > MAX_EVENTS:
                self._keep_bounds()
            return len(self._events)

    def _add(self, event: records.Event) -> None:
        before = self._events.pop(event.key, None)
        if before is not None and before.has_ended and not event.has_ended:
            event = before  # what has ended does not begin again
        self._events[event.key] = event

    def add_rows(self, rows: Sequence[records.Row]) -> None:
        """Have rows written whose messages are sent already."""
        with self._lock:
            for row in rows:
                number = self._store.shards.of_key(row.key).database.number
                self._rows.setdefault(number, []).append(row)
                self._behind.add(number)
            self._keep_bounds()

    def withdraw(self, rows: Sequence[records.Row]) -> None:
        """Have rows deleted: their publish has failed, though they may have been written."""
        with self._lock:
            self._withdrawn += [Made(row.key, row.created_us) for row in rows]
            self._keep_bounds()

    def has_rows_for(self, database: Database) -> bool:
        """Whether rows for this database are to be written: it was away a moment ago."""
        return database.number in self._behind

    def forget(self, keys: Sequence[records.Key]) -> None:
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

    def _give_up(self, key: records.Key) -> None:
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
            with each_asked() as asking:
                try:
                    for database, part in parts.items():
                        with asking:
                            if not (patient and database.rests):
                                self._write_part(database, part)
                finally:
                    with self._lock:
                        for database, part in parts.items():
                            self._put_back(database, part)

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


# -- what consumers note of messages, until it is looked at
#
# Most messages are acknowledged within milliseconds. Of such a one a consumer notes a tuple of
# plain
# values and no more: what it says is worked out when it is written. Objects that live until then
# have
# the interpreter look for garbage, and a message that is acknowledged by then was never taken, as
# far
# as the library is concerned.

#: How many events do not wait for others.
FLUSH_AT = 1000

#: How many ends a consumer notes that nobody looks at, because a database takes its time; then it
#: looks itself, and what is too much is given up.
MOST = 8 * FLUSH_AT

#: id, token, and the id that it is kept under; queue; when, in nanoseconds since the epoch; score
#: and limit of retries of its delivery; error; headers: task, business type, business id and
#: attributes; outcome; of what has failed its delivery.
End = tuple[Any, Any, str, str, int, int, int, str, Any, Any, Any, Any, str, Delivery | None]


#: Of a message without a business id.
NONE = (None, None, None)


class Consumer(Protocol):
    """Notes what becomes of messages."""

    def taken(self, tag: int, at_us: int) -> records.Event | None:
        """That a message was taken then; None if it is settled, or nobody wants to know."""


class Notes:
    """What one consumer notes; any thread may."""

    def __init__(self, consumer: Consumer, known: Callable[[str], Topic | None]) -> None:
        #: not kept alive by this: what is noted is to be written when it is gone, too
        self._consumer = weakref.ref(consumer)
        self._known = known
        #: by tag, what was acknowledged: with the outcome of its task, if that is known by now
        self.ended: dict[int, End] = {}
        #: the tags of what was delivered since somebody looked, and is not acknowledged: since
        #: when, in nanoseconds since the epoch
        self.fresh: dict[int, int] = {}

    @property
    def are_over(self) -> bool:
        """Whether nothing is noted any more."""
        return not self.ended and self._consumer() is None

    def forget(self) -> None:
        """All this is another process's."""
        self.ended.clear()
        self.fresh.clear()

    def take_fresh(self) -> Iterator[records.Event]:
        """That messages were taken, of which nothing else is known."""
        consumer = self._consumer()
        for tag, ns in self.fresh.copy().items():
            self.fresh.pop(tag, None)
            event = consumer and consumer.taken(tag, ns // 1000)
            if event:
                yield event

    def take_ended(self, worker: str) -> list[records.Event]:
        """What has ended, the oldest first.

        worker: the name of this process
        """
        # Others may be noted, or noted again, meanwhile.
        ended = [self.ended.pop(tag) for tag in list(self.ended)]
        events: list[records.Event] = []
        modes: dict[str, str | None] = {}
        said_of: dict[str, Mapping[str, Any]] = {}
        for end in ended:
            id, token, own_id, topic, at_ns, score, limit, error = end[:8]
            task, kind, biz, attributes, outcome, failed = end[8:]
            mode = modes.get(topic, "")
            if mode == "":
                mode = modes[topic] = self._mode_of(topic)
            key = (
                id if isinstance(id, str) and id else records.stem_of(own_id)[0],
                str(token or ""),
                topic,
            )
            # A message that no row can have was not sent: its publish would have been refused.
            if mode == OFF or not records.is_storable(key):
                continue
            if (kind, biz, attributes) != NONE or not isinstance(task, str):
                values = zip(records.TOLD_HEADERS, (task, kind, biz, attributes), strict=True)
                said: Mapping[str, Any] = {name: v for name, v in values if v is not None}
            elif task in said_of:
                said = said_of[task]
            else:
                said = said_of[task] = {"task": task}
            left = scores.retries_left(score)
            attempts = 1 if left is None else max(limit - left, 0) + 1
            events.append(
                records.Event(
                    *(key, statuses.NUMBERS[outcome], at_ns // 1000, attempts, worker),
                    records.storable(error)[:MAX_ERROR] if error else "",
                    (said, scores.action_time(score)),
                    mode != BEHIND,
                    None if failed is None else records.kept_of(failed),
                )
            )
        return events

    def _mode_of(self, name: str) -> str | None:
        topic = self._known(name)
        if topic is None:
            return None
        return OFF if topic.declaration.expires else topic.declaration.library


class Gathering:
    """What all consumers of a process have noted, on its way to what is to be written. Any thread
    may call it.

    An end that is noted replaces what was noted before, and is replaced by nothing that was: so
    whoever adds something has the ends looked at first, and what was taken is looked at before what
    has ended.

    worker: the name of this process
    """

    def __init__(self, backlog: Backlog, worker: str) -> None:
        self._backlog = backlog
        self._worker = worker
        self._lock = threading.Lock()
        self._all: list[Notes] = []
        #: what this process has: since when it was last said
        self._taken: dict[records.Key, float] = {}

    def after_fork(self, backlog: Backlog, worker: str) -> None:
        """This is a child of the process that has gathered it."""
        self._backlog, self._worker = backlog, worker
        self._lock = threading.Lock()
        self._taken = {}
        for notes in self._all:
            notes.forget()

    def notes_of(self, consumer: Consumer, known: Callable[[str], Topic | None]) -> Notes:
        """Where a consumer notes what becomes of messages.

        known: gives what is known of a queue
        """
        notes = Notes(consumer, known)
        with self._lock:
            self._all = [one for one in self._all if not one.are_over] + [notes]
        return notes

    def event_of(
        self,
        key: records.Key,
        status: int,
        *,
        at_us: int = 0,
        attempts: int = 0,
        error: str = "",
        message: tuple[Mapping[str, Any], int] = ({}, 0),
        has_row: bool = True,
    ) -> records.Event | None:
        """What is written of something that has happened to a message; None if nothing is.

        at_us: when it has happened, if that was not just now
        message: its headers and its action time, for one that has no row
        has_row: whether it is likely to have one
        """
        if not records.is_storable(key):
            return None  # it has no row: its publish would have been refused
        if error:
            error = records.storable(error)[:MAX_ERROR]
        said = records.NOTHING if status in statuses.LIVE else records.told_of(*message)
        return records.Event(
            key, status, at_us or records.now_us(), attempts, self._worker, error, said, has_row
        )

    def add(self, event: records.Event, *, watched: bool = False) -> int:
        """Have an event written; return how many there are to be written.

        watched: of one that was taken, whether to say now and then that this process has it
        """
        with self._lock:
            self._take_ended()
            if watched and event.status == statuses.TAKEN:
                self._taken[event.key] = time.monotonic()
            else:
                self._taken.pop(event.key, None)
            return self._backlog.add([event])

    def bound(self, notes: Notes) -> None:
        """Look at what a consumer has noted, if nobody else does for long."""
        if len(notes.ended) >= MOST:
            self.look(only_ended=True)

    def look(self, *, only_ended: bool = False) -> None:
        """Look at what is noted: from now on it is to be written."""
        with self._lock:
            if not only_ended:
                for notes in self._all:
                    if notes.fresh:
                        self._take_fresh(notes)
            self._take_ended()

    def _take_fresh(self, notes: Notes) -> None:
        events = list(notes.take_fresh())
        now = time.monotonic()
        self._taken.update((event.key, now) for event in events)
        self._backlog.add(events)

    def _take_ended(self) -> None:
        for notes in self._all:
            if notes.ended:
                events = notes.take_ended(self._worker)
                if self._taken:
                    for event in events:
                        self._taken.pop(event.key, None)
                self._backlog.add(events)

    # -- what takes long

    def touch(self, store: Store, seconds: float) -> None:
        """Say again of what this process has that it has it, if that was not said for so long.
        Raises LibraryError of the first database that was away."""
        now = time.monotonic()
        with self._lock:
            long = [key for key, since in self._taken.items() if now - since >= seconds]
        with each_asked() as asking:
            for shard, some in store.shards.of_keys(long).items():
                with asking:
                    if shard.database.rests:
                        continue
                    store.touch(some)
                    with self._lock:
                        self._taken.update((key, now) for key in some if key in self._taken)
