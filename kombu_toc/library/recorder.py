"""Writes what is sent, and what becomes of it.

A row is written by whoever sends, before its message is put. What becomes of messages is gathered,
and written by a thread: no consumer waits for a database.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

from ..center.calls import ScheduleChange
from ..center.center import TimeoutCenter
from ..center.core import started
from ..center.runner import BROKEN
from ..errors import ConfigurationError, LibraryError
from ..model import scores
from ..model.library import BEHIND, OFF
from ..model.results import Delivery
from ..model.topic import Declaration, Topic
from . import outbox, records, statuses
from .guard import Guard
from .keeper import Keeper
from .putting import Schedules
from .records import Event, Key, Row
from .schema import MAX_ERROR
from .shards import Database, Owed, RefusedError, each_asked, write_each
from .store import Store

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

    def taken(self, tag: int, at_us: int) -> Event | None:
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

    def take_fresh(self) -> Iterator[Event]:
        """That messages were taken, of which nothing else is known."""
        consumer = self._consumer()
        for tag, ns in self.fresh.copy().items():
            self.fresh.pop(tag, None)
            event = consumer and consumer.taken(tag, ns // 1000)
            if event:
                yield event

    def take_ended(self, worker: str) -> list[Event]:
        """What has ended, the oldest first.

        worker: the name of this process
        """
        # Others may be noted, or noted again, meanwhile.
        ended = [self.ended.pop(tag) for tag in list(self.ended)]
        events: list[Event] = []
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
                Event(
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


# -- what a process has yet to write
#
# What a database does not take for what it is goes, by its name, and the rest is written.

#: Events, and rows, that a process keeps while a database is away.
MAX_EVENTS = 100_000
MAX_ROWS = 10_000


def _latest(before: Event, since: Event) -> Event:
    """What has ended does not begin again."""
    return before if before.has_ended and not since.has_ended else since


class Gathering:
    """What all consumers of a process have noted, and the rows and events that are to be written.
    Any thread may call it.

    An end that is noted replaces what was noted before, and is replaced by nothing that was: so
    whoever adds something has the ends looked at first, and what was taken is looked at before what
    has ended.

    count: is told the queue of each message whose record is given up
    worker: the name of this process
    """

    def __init__(self, store: Store, count: Callable[[str], None], worker: str) -> None:
        self._store, self._count = store, count
        self._all: list[Notes] = []
        #: of each message the latest
        self._events: Owed[Key, Event] = Owed(
            *(store.shards.of_key, partial(self._write_some, "record"), MAX_EVENTS, _latest),
            count=self._count_key,
        )
        self._rows: Owed[Key, Row] = Owed(
            *(store.shards.of_key, partial(self._write_some, "insert"), MAX_ROWS),
            *(lambda before, since: before, self._count_key),
        )
        #: what was written, perhaps, for publishes that have failed: by key and time
        self._withdrawn: Owed[Any, tuple[str, str, str, int]] = Owed(
            *(store.shards.of_key, partial(self._write_some, "take_back"), MAX_ROWS),
            count=self._count_key,
        )
        self._owed: tuple[Owed[Any, Any], ...] = self._withdrawn, self._rows, self._events
        self.begin(worker)

    def begin(self, worker: str) -> None:
        """Have nothing: also what a process has gathered is not its child's."""
        self._worker = worker
        self._lock = threading.Lock()
        #: what this process has: since when it was last said
        self._taken: dict[Key, float] = {}
        for notes in self._all:
            notes.forget()
        for owed in self._owed:
            owed.begin()

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
        key: Key,
        status: int,
        *,
        at_us: int = 0,
        attempts: int = 0,
        error: str = "",
        message: tuple[Mapping[str, Any], int] = ({}, 0),
        has_row: bool = True,
    ) -> Event | None:
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
        return Event(
            key, status, at_us or records.now_us(), attempts, self._worker, error, said, has_row
        )

    def add(self, event: Event, *, watched: bool = False) -> int:
        """Have an event written; return how many there are to be written.

        watched: of one that was taken, whether to say now and then that this process has it
        """
        with self._lock:
            self._take_ended()
            if watched and event.status == statuses.TAKEN:
                self._taken[event.key] = time.monotonic()
            else:
                self._taken.pop(event.key, None)
            self.add_all([event])
            return len(self._events)

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
        self.add_all(events)

    def _take_ended(self) -> None:
        for notes in self._all:
            if notes.ended:
                events = notes.take_ended(self._worker)
                if self._taken:
                    for event in events:
                        self._taken.pop(event.key, None)
                self.add_all(events)

    # -- what takes long

    def touch(self, seconds: float) -> None:
        """Say again of what this process has that it has it, if that was not said for so long.
        Raises LibraryError of the first database that was away."""
        now = time.monotonic()
        with self._lock:
            long = [key for key, since in self._taken.items() if now - since >= seconds]
        with each_asked() as asking:
            for shard, some in self._store.shards.of_keys(long).items():
                with asking:
                    if shard.database.rests:
                        continue
                    self._store.touch(some)
                    with self._lock:
                        self._taken.update((key, now) for key in some if key in self._taken)

    # -- what is to be written

    def __len__(self) -> int:
        return sum(map(len, self._owed))

    def _count_key(self, key: Key) -> None:
        self._count(key[2])

    def add_all(self, events: Sequence[Event]) -> None:
        """Have events written."""
        self._events.add(zip(map(attrgetter("key"), events), events, strict=True))

    def add_rows(self, database: Database, rows: Sequence[Row]) -> None:
        """Have rows written whose messages are sent already."""
        self._rows.add((row.key, row) for row in rows)
        self._rows.behind.add(database)

    def withdraw(self, rows: Sequence[Row]) -> None:
        """Have rows deleted: their publish has failed, though they may have been written."""
        made = [(*row.key, row.created_us) for row in rows]
        self._withdrawn.add(zip(made, made, strict=True))

    def has_rows_for(self, database: Database) -> bool:
        """Whether rows for this database are to be written: it was away a moment ago."""
        return database in self._rows.behind

    def forget(self, keys: Sequence[Key]) -> None:
        """Write nothing more of these."""
        self._events.forget(set(keys).__contains__)

    def take_lost(self) -> int:
        """How many were given up since this was last asked for want of room."""
        return sum(one.take_lost() for one in self._owed)

    def write(self, *, patient: bool = False) -> None:
        """Look, and write everything now: see :meth:`.shards.Owed.write`."""
        self.look()
        with each_asked() as asking:
            for some in (self._withdrawn, self._rows):
                with asking:
                    some.write(patient=patient)
            with asking:  # what is not there could not end
                self._events.write(patient=patient, unless=self._rows.behind)

    def _write_some(self, what: str, database: Database, items: Sequence[tuple[Any, Any]]) -> None:
        """what: the method of the store"""

        def write(some: Sequence[tuple[Any, Any]]) -> None:
            getattr(self._store, what)([one for _, one in some])

        write_each(write, items, self._is_refused)

    def _is_refused(self, item: tuple[Any, Any], why: Exception) -> None:
        (id, _, topic, *_), _ = item
        self._count(topic)
        logger.error(
            "message %.80s of %.80s is not recorded, the database does not take it: %s",
            *(id, topic, str(why)[:500]),
        )


logger = logging.getLogger(__name__)

#: Seconds that an event waits for others at most.
FLUSH_INTERVAL = 0.5

#: Seconds until the next attempt where the database does not answer, at most.
LONGEST_PAUSE = 5.0

#: Seconds after which it is said again that a message is taken.
TOUCH_INTERVAL = 15.0

#: Seconds for which a process that ends waits for what is written.
CLOSING = 10.0

#: Seconds for which a row is looked for that was written in a caller's transaction, and between two
#: looks. A worker finds what is committed later.
EXPECTED = 60.0
EXPECTED_INTERVAL = 0.05

#: Rows in transactions of callers that are looked for.
MAX_EXPECTED = 10_000

#: Seconds for which a server that did not answer is not asked by those who send.
AWAY = 1.0

_host = socket.gethostname()


@dataclass(eq=False)
class Recorder:
    """Keeps the record of what one process sends and consumes. Any thread may call it.

    store: where it is kept
    make_center: makes a center for the thread, over connections of its own
    required: whether a message is refused whose row cannot be written
    retention: seconds for which history is kept
    patience: seconds for which a delivery waits to be told whether it has ended before
    count: is told the queue of each message whose record is given up
    """

    store: Store
    _make_center: Callable[[], TimeoutCenter]
    _: KW_ONLY
    required: bool
    retention: float
    patience: float
    count: Callable[[str], None]

    def __post_init__(self) -> None:
        self._begin()
        self.gathering = Gathering(self.store, self.count, self.worker)
        #: says of queues with ``x-guard`` what has ended
        self.guard = Guard(self.store, self.gather, lambda: self.worker, self.patience)

    def _begin(self) -> None:
        """Have nothing, and no thread."""
        self._pid = os.getpid()
        self.worker = f"{_host}:{self._pid}"
        self.schedules = Schedules(self.store)
        self.store.locator.owed.begin()
        self.store.declarations.owed.begin()
        self._lock = threading.Lock()
        self._bell = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopping = False
        #: by their identities, messages that have not ended before their tasks although they are
        #: acknowledged: what says that they end. They do if this process does
        self.running: dict[int, Callable[[bool], Any]] = {}
        #: rows in transactions of callers: until when they are looked for
        self._expected: dict[Key, float] = {}
        #: what their queues were declared with, where the transactions are committed
        self._committed: dict[str, Declaration] = {}
        #: monotonic seconds until which Redis is not asked by those who send
        self.away_until = 0.0
        # Of a child: its parent uses the connections to Redis, so they are not closed.
        self._keeper: Keeper | None = None
        self._consumes = False
        #: how often Redis did not take what was sent, and how often it had not by the last look
        #: that has left nothing of it
        self._not_put = self._looked = 0

    # -- what is sent

    @property
    def is_away(self) -> bool:
        """Whether Redis did not answer a moment ago."""
        return time.monotonic() < self.away_until

    def write(self, rows: Sequence[Row], topic: Topic | None = None) -> None:
        """Write the rows of messages that are about to be put. Raises LibraryError."""
        parts: dict[Database, list[Row]] = {}
        for row in rows:
            parts.setdefault(self.store.shards.of_key(row.key).database, []).append(row)
        for database, some in parts.items():
            if not self.required and self.gathering.has_rows_for(database):
                # It does not answer: who sends does not wait again.
                self.gathering.add_rows(database, some)
                continue
            try:
                self._check(database, topic)
                self.store.insert(some)
            except LibraryError as exc:
                if self._refuses(exc, rows):
                    raise
                self.gathering.add_rows(database, some)
                logger.warning(
                    "messages are sent without a record, which is written later: %s", exc
                )
                self._start()

    def _check(self, database: Database, topic: Topic | None) -> None:
        """See to it that rows of a queue can be written into a database. Raises LibraryError."""
        note = self.store.declarations.note
        if topic is not None and note(topic.name, topic.declaration, database):
            self._start()

    def _refuses(self, error: LibraryError, rows: Sequence[Row]) -> bool:
        """Whether a publish fails with its rows: then these are deleted. Some are there, perhaps,
        and only the reply was lost."""
        refuses = self.required or isinstance(error, RefusedError)  # it would not be taken later
        if refuses:
            self.gathering.withdraw(rows)
            self._start()
        return refuses

    def write_far(self, rows: Sequence[Row], topic: Topic) -> bool:
        """Write the rows of messages that are put later because their time is far ahead; return
        whether that is done. Raises LibraryError if rows are required."""
        databases = {self.store.shards.of_key(row.key).database for row in rows}
        if not self.required and any(map(self.gathering.has_rows_for, databases)):
            return False  # it does not answer: who sends does not wait again
        try:
            for database in databases:
                self._check(database, topic)
            self.store.insert(rows)
        except LibraryError as exc:
            if self._refuses(exc, rows):
                raise
            return False
        # Redis cannot say where they are.
        if self.store.locator.owe([row.key for row in rows], max(row.action_us for row in rows)):
            self._start()
        return True

    def write_with(self, connection: Any, row: Row, topic: Topic | None = None) -> None:
        """Write a row in a transaction of the caller's; its message is put when that is
        committed. Raises LibraryError."""
        database = outbox.database_of(connection, self.store.shards)
        database.make_sure()
        row = self.store.insert_with(connection, row, database)
        if topic is not None:
            known = partial(self._committed.__setitem__, topic.name, topic.declaration)
            outbox.when_committed(connection, (self, topic.name), known)
        if row.place != statuses.FAR:
            with self._lock:
                self._expected[row.key] = time.monotonic() + EXPECTED
                while len(self._expected) > MAX_EXPECTED:  # a relay finds the others
                    self._expected.pop(next(iter(self._expected)))
        outbox.when_committed(connection, self, self._bell.set)
        self._start()

    def withdraw(self, row: Row) -> None:
        """A message was refused: nobody takes it for sent."""
        try:
            self.store.take_back([(*row.key, row.created_us)])
        except LibraryError as exc:
            logger.error(
                "message %s was refused, and its row cannot be deleted; it will be put: %s",
                *(row.id, exc),
            )

    def not_put(self, keys: Sequence[Key], *, noted: bool) -> None:
        """Redis does not answer: the messages of these rows follow when it does.

        noted: whether their rows say so already
        """
        self.away_until = time.monotonic() + AWAY
        if not noted:
            try:
                self.store.place(keys, statuses.NOT_PUT)
            except LibraryError as exc:
                logger.warning(
                    "%d messages are put into Redis when it is rebuilt; their rows cannot say that "
                    "they are not there: %s",
                    *(len(keys), exc),
                )
        self._not_put += 1
        self._start()

    # -- what becomes of it

    def consumes(self) -> None:
        """This process consumes: it looks after what is in the library, if no other does."""
        if not self._consumes:
            self._consumes = True
            self._start()

    def gather(self, event: Event, *, watched: bool = False) -> None:
        """Something that has happened is to be written soon.

        watched: of one that was taken, whether to say now and then that this process has it, until
            it says something else
        """
        if self.gathering.add(event, watched=watched) >= FLUSH_AT:
            self._bell.set()
        self._start()

    @property
    def sleeps(self) -> bool:
        """Whether nobody writes what is noted: :meth:`wake` changes that."""
        return self._thread is None

    def wake(self) -> None:
        """Have what is noted written, now if it is much."""
        self._bell.set()
        self._start()

    def flush(self) -> None:
        """Write everything now. Raises LibraryError, and keeps what is not written."""
        self.gathering.write()
        self.schedules.owed.write()
        self.store.locator.owed.write(patient=True)

    def scheduled(self, topic: str, change: ScheduleChange, at_us: int) -> None:
        """A schedule was changed; it is written soon."""
        self.schedules.changed(topic, change, at_us)
        self._start()

    @property
    def backlog(self) -> int:
        """Events and rows that are not written yet."""
        self.gathering.look()
        return len(self.gathering)

    # -- what operators do

    def end(self, keys: Sequence[Key], status: int) -> None:
        """Note at once that these have ended: people and tools wait for it. Raises LibraryError,
        and keeps what is not written."""
        if not keys:
            return
        self.gathering.look()
        self.gathering.forget(keys)
        events = [records.event_of(key, status) for key in keys]
        try:
            self.store.record(events)
        except LibraryError:
            # It has happened: if nobody repeats it, it is still to be recorded.
            self.gathering.add_all(events)
            self._start()
            raise

    # -- the thread

    def _start(self) -> None:
        if self._pid != os.getpid():
            self.after_fork()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = started(self._run, "toc-library")
                    atexit.register(self.close)

    def after_fork(self) -> None:
        """This is a child of the process that has made it: what that has gathered, and its
        connections, are its own."""
        self.store.shards.close(inherited=True)
        self.guard.after_fork()
        self._begin()
        self.gathering.begin(self.worker)

    def close(self) -> None:
        """Write what there is, and end the thread."""
        if self._pid != os.getpid():
            return
        for end in list(self.running.values()):
            end(True)
        if (thread := self._thread) is not None:
            self._stopping = True
            self._bell.set()
            thread.join(CLOSING)  # one that waits for a database ends when it has an answer
        atexit.unregister(self.close)

    def _run(self) -> None:
        pause, complained = FLUSH_INTERVAL, False
        while True:
            stopping = self._stopping
            if not stopping:
                self._bell.wait(min(pause, EXPECTED_INTERVAL) if self._expected else pause)
            self._bell.clear()
            try:
                self._turn()
                pause = FLUSH_INTERVAL
                if complained and not any(one.rests for one in self.store.shards.databases):
                    complained = False
                    logger.info("the library answers again")
            except LibraryError as exc:
                if not complained:
                    complained = True
                    logger.warning("what becomes of tasks is recorded later: %s", exc)
                databases = self.store.shards.databases
                if len(databases) == 1 or all(one.rests for one in databases):
                    pause = min(2 * pause, LONGEST_PAUSE)
            except ConfigurationError as exc:
                logger.error("what becomes of tasks is not recorded: %s", exc)
                pause = LONGEST_PAUSE
            except Exception:  # a defect: the next attempt may do better
                logger.exception("what becomes of tasks is recorded later")
                pause = min(2 * pause, LONGEST_PAUSE)
            lost = self.gathering.take_lost()
            if lost:
                logger.error(
                    "%d messages or their ends are not recorded: the library was away for too long",
                    lost,
                )
            lost = self.schedules.owed.take_lost()
            if lost:
                logger.error(
                    "the latest changes of %d schedules are not recorded, the library was away for "
                    "too long: see after a rebuild whether they are as they should be",
                    lost,
                )
            if stopping:
                if self.backlog:
                    logger.error(
                        "%d messages or their ends are not recorded: this process ends while the "
                        "library is away",
                        self.backlog,
                    )
                break
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()
        self._stopping, self._thread = False, None

    def _turn(self) -> None:
        """Do what is due. Each part is done whatever another one's database does; raises
        LibraryError of the first that was away."""
        gathering, owed = self.gathering, self.store.locator.owed
        with each_asked() as asking:
            for do in (
                *(partial(gathering.write, patient=not self._stopping), self.schedules.owed.write),
                *(self.store.declarations.owed.write, partial(gathering.touch, TOUCH_INTERVAL)),
                *(partial(owed.write, patient=True), self._keep, self._note_committed),
            ):
                with asking:
                    do()

    def _put_expected(self, keeper: Keeper) -> None:
        """Put what was written in transactions that are committed by now."""
        now = time.monotonic()
        with self._lock:
            self._expected = {key: at for key, at in self._expected.items() if at >= now}
            keys = list(self._expected)
        try:
            put = keeper.put_some(keys)
        except Exception:
            self._not_put += 1  # what was put perhaps is looked for there first
            raise
        with self._lock:
            for key in put:
                self._expected.pop(key, None)

    def _note_committed(self) -> None:
        # Not before: SQLite has one writer, which was the caller.
        for name in list(self._committed):
            self.store.declarations.note(name, self._committed[name])
            self._committed.pop(name)

    def _keep(self) -> None:
        """Put what is not in Redis, and look after the rest, if this process is to do that."""
        not_put = self._not_put  # those who send say so again meanwhile
        is_owed = not_put != self._looked
        if not (self._consumes or is_owed or self._expected):
            return
        if self._stopping:
            return
        with suppress(*BROKEN):  # Redis is away; the next turn tries again
            if self._keeper is None:
                self._keeper = Keeper(
                    *(self.store, self._make_center(), self.worker, self.retention)
                )
            restored = bool(self._expected or is_owed) and self._keeper.is_restored()
            if self._expected and restored:
                self._put_expected(self._keeper)
            if is_owed and restored:
                self._keeper.put_missing()
                if not self._keeper.doubts:
                    self._looked = not_put
                if self._keeper.has_more:
                    self._bell.set()
                self.away_until = 0.0
            if self._consumes and self._keeper.turn():
                self._bell.set()  # there is more to do at once
