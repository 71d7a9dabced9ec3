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
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from ..center.calls import ScheduleChange
from ..center.center import TimeoutCenter
from ..center.runner import BROKEN
from ..errors import ConfigurationError, LibraryError
from ..model.topic import Declaration, Topic
from . import outbox, statuses
from .db import RefusedError
from .guard import Guard
from .keeper import Keeper
from .notes import FLUSH_AT, Backlog, Gathering
from .putting import Schedules
from .records import Event, Key, Row, now_us
from .shards import Database, each_asked
from .store import Store

logger = logging.getLogger(__name__)

#: Seconds that an event waits for others at most.
FLUSH_INTERVAL = 0.5

#: Seconds until the next attempt where the database does not answer, at most.
LONGEST_PAUSE = 5.0

#: Seconds after which it is said again that a message is taken.
TOUCH_INTERVAL = 15.0

#: Seconds for which a row is looked for that was written in a caller's transaction, and between two
#: looks. A worker finds what is committed later.
EXPECTED = 60.0
EXPECTED_INTERVAL = 0.05

#: Rows in transactions of callers that are looked for.
MAX_EXPECTED = 10_000

#: Seconds for which a server that did not answer is not asked by those who send.
AWAY = 1.0

_host = socket.gethostname()

#: Raises LibraryError unless these databases, or all, can be used.
Ready = Callable[..., None]


@dataclass(eq=False)
class Recorder:
    """Keeps the record of what one process sends and consumes. Any thread may call it.

    store: where it is kept
    make_center: makes a center for the thread, over connections of its own
    required: whether a message is refused whose row cannot be written
    retention: seconds for which history is kept
    patience: seconds for which a delivery waits to be told whether it has ended before
    ready: raises LibraryError if these databases, or any, cannot be used
    count: is told the queue of each message whose record is given up
    """

    store: Store
    _make_center: Callable[[], TimeoutCenter]
    ready: Ready
    _: KW_ONLY
    required: bool
    retention: float
    patience: float
    count: Callable[[str], None]

    def __post_init__(self) -> None:
        self._begin()
        #: what consumers note, until it is to be written
        self.gathering = Gathering(self._backlog, self.worker)
        #: says of queues with ``x-guard`` what has ended
        self.guard = Guard(self.store, self.ready, self.gather, lambda: self.worker, self.patience)

    def _begin(self) -> None:
        """Have nothing, and no thread."""
        self._pid = os.getpid()
        self.worker = f"{_host}:{self._pid}"
        self._backlog = Backlog(self.store, self.ready, self.count)
        self.schedules = Schedules(self.store)
        self._lock = threading.Lock()
        self._bell = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopping = False
        #: by their identities, messages that have not ended before their tasks although they are
        #: acknowledged: what says that they end. They do if this process does
        self.running: dict[int, Callable[[bool], Any]] = {}
        #: rows in transactions of callers: until when they are looked for
        self._expected: dict[Key, float] = {}
        #: what the queues of these were declared with
        self._declared: dict[str, Declaration] = {}
        #: the same, where their transactions are committed and nothing is put: they are far ahead
        self._committed: dict[str, Declaration] = {}
        #: monotonic seconds until which Redis is not asked by those who send
        self.away_until = 0.0
        # Of a child: its parent uses the connections to Redis, so they are not closed.
        self._keeper: Keeper | None = None
        self._consumes = False
        self._not_put = False

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
            if not self.required and self._backlog.has_rows_for(database):
                self._backlog.add_rows(some)  # it does not answer: who sends does not wait again
                continue
            try:
                self._check(database, topic)
                self.store.insert(some)
            except LibraryError as exc:
                if self._refuses(exc, rows):
                    raise
                self._backlog.add_rows(some)
                logger.warning(
                    "messages are sent without a record, which is written later: %s", exc
                )
                self._start()

    def _check(self, database: Database, topic: Topic | None) -> None:
        """See to it that rows of a queue can be written into a database. Raises LibraryError."""
        self.ready([database])
        note = self.store.declarations.note
        if topic is not None and note(topic.name, topic.declaration, database):
            self._start()

    def _refuses(self, error: LibraryError, rows: Sequence[Row]) -> bool:
        """Whether a publish fails with its rows: then these are deleted. Some are there, perhaps,
        and only the reply was lost."""
        refuses = self.required or isinstance(error, RefusedError)  # it would not be taken later
        if refuses:
            self._backlog.withdraw(rows)
            self._start()
        return refuses

    def write_far(self, rows: Sequence[Row], topic: Topic) -> bool:
        """Write the rows of messages that are put later because their time is far ahead; return
        whether that is done. Raises LibraryError if rows are required."""
        databases = {self.store.shards.of_key(row.key).database for row in rows}
        if not self.required and any(map(self._backlog.has_rows_for, databases)):
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
        self.ready([database])
        row = self.store.insert_with(connection, row, database)
        if row.place == statuses.FAR:
            if topic is not None:
                known = partial(self._committed.__setitem__, topic.name, topic.declaration)
                outbox.when_committed(connection, (self, topic.name), known)
            outbox.when_committed(connection, self, self._bell.set)
            self._start()
            return
        with self._lock:
            if topic is not None:
                self._declared[topic.name] = topic.declaration
            self._expected[row.key] = time.monotonic() + EXPECTED
            while len(self._expected) > MAX_EXPECTED:  # a relay finds the others
                self._expected.pop(next(iter(self._expected)))
        outbox.when_committed(connection, self, self._bell.set)
        self._start()

    def withdraw(self, row: Row) -> None:
        """A message was refused: nobody takes it for sent."""
        try:
            self.store.withdraw(row)
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
        self._not_put = True
        self._start()

    # -- what becomes of it

    def consumes(self) -> None:
        """This process consumes: it looks after what is in the library, if no other does."""
        if not self._consumes:
            self._consumes = True
            self._start()

    def note(self, key: Key, status: int, *, watched: bool = True, **about: Any) -> None:
        """Something has happened to a message; it is written soon.

        about: as for :meth:`.notes.Gathering.event_of`
        watched: of one that was taken, whether to say now and then that this process has it, until
            it says something else
        """
        event = self.gathering.event_of(key, status, **about)
        if event is not None:
            self.gather(event, watched=watched)

    def gather(self, event: Event, *, watched: bool = False) -> None:
        """Something that has happened is to be written soon."""
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
        self.gathering.look()
        self._backlog.write()
        self._write_schedules()
        self.store.locator.write()

    def _write_schedules(self) -> None:
        if self.schedules:
            self.ready()
            self.schedules.write()

    def scheduled(self, topic: str, change: ScheduleChange, at_us: int) -> None:
        """A schedule was changed; it is written soon."""
        self.schedules.changed(topic, change, at_us)
        self._start()

    @property
    def backlog(self) -> int:
        """Events and rows that are not written yet."""
        self.gathering.look()
        return len(self._backlog)

    # -- what operators do

    def end(self, keys: Sequence[Key], status: int) -> None:
        """Note at once that these have ended: people and tools wait for it. Raises LibraryError,
        and keeps what is not written."""
        if not keys:
            return
        now = now_us()
        self.gathering.look()
        self._backlog.forget(keys)
        events = [Event(key, status, now, 0, "", "", ({}, 0)) for key in keys]
        try:
            self.store.record(events)
        except LibraryError:
            # It has happened: if nobody repeats it, it is still to be recorded.
            self._backlog.add(events)
            self._start()
            raise

    # -- the thread

    def _start(self) -> None:
        if self._pid != os.getpid():
            self.after_fork()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="toc-library", daemon=True
                    )
                    self._thread.start()
                    atexit.register(self.close)

    def after_fork(self) -> None:
        """This is a child of the process that has made it: what that has gathered, and its
        connections, are its own."""
        self.store.shards.close(inherited=True)
        self.guard.after_fork()
        self._begin()
        self.gathering.after_fork(self._backlog, self.worker)

    def close(self) -> None:
        """Write what there is, and end the thread."""
        if self._pid != os.getpid():
            return
        for end in list(self.running.values()):
            end(True)
        self._stopping = True
        self._bell.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(10)
        # One that waits for a database ends when it has an answer.
        self._stopping = thread is not None and thread.is_alive()
        self._thread = None
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
            lost = self._backlog.take_lost()
            if lost:
                logger.error(
                    "%d messages or their ends are not recorded: the library was away for too long",
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

    def _turn(self) -> None:
        """Do what is due. Each part is done whatever another one's database does; raises
        LibraryError of the first that was away."""
        owed = self.store.declarations.write_owed
        with each_asked() as asking:
            for do in (
                *(self._write_backlog, owed, self._write_schedules),
                *(self._touch, self._note_committed, self.store.locator.write, self._keep),
            ):
                with asking:
                    do()

    def _write_backlog(self) -> None:
        self.gathering.look()
        self._backlog.write(patient=not self._stopping)

    def _put_expected(self, keeper: Keeper) -> None:
        """Put what was written in transactions that are committed by now."""
        now = time.monotonic()
        with self._lock:
            for key in [key for key, until in self._expected.items() if until < now]:
                self._expected.pop(key)
            keys = list(self._expected)
        try:
            put = keeper.put_some(keys)
        except Exception:
            self._not_put = True  # what was put perhaps is looked for there first
            raise
        for _, _, topic in put:
            # Not before: SQLite has one writer, which was the caller.
            declaration = self._declared.pop(topic, None)
            if declaration is not None:
                self.store.declarations.note(topic, declaration)
        with self._lock:
            for key in put:
                self._expected.pop(key, None)

    def _note_committed(self) -> None:
        for name in list(self._committed):
            self.store.declarations.note(name, self._committed[name])
            self._committed.pop(name)

    def _touch(self) -> None:
        """Say again of what takes long that this process has it."""
        self.gathering.touch(self.store, TOUCH_INTERVAL)

    def _keep(self) -> None:
        """Put what is not in Redis, and look after the rest, if this process is to do that."""
        if not (self._consumes or self._not_put or self._expected):
            return
        if self._stopping:
            return
        try:
            if self._keeper is None:
                self._keeper = Keeper(
                    *(self.store, self._make_center(), self.worker, self.retention),
                    ready=self.ready,
                )
            if self._expected:
                self._put_expected(self._keeper)
            if self._not_put:
                self._keeper.put_missing()
                self._not_put = self._keeper.doubts
                if self._keeper.has_more:
                    self._bell.set()
                self.away_until = 0.0
            if self._consumes and self._keeper.turn():
                self._bell.set()  # there is more to do at once
        except BROKEN:
            pass  # Redis is away; the next turn tries again
