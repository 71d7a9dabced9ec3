"""Says of what was delivered whether it has ended already: queues with ``x-guard`` ask before a
task is run.

Consumers ask, and do not wait: a thread asks each database, of everything that was asked for
meanwhile with one statement for each table. While one does not answer it is known that it does not,
and what it is asked then is not waited for; once a second somebody is.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import select

from ..center.core import started
from ..errors import ConfigurationError, LibraryError
from ..model.results import Delivery
from . import statuses
from .records import Event, Key, Row, identity_of, is_raw, is_storable, now_us
from .shards import Database
from .store import Store

logger = logging.getLogger(__name__)

#: Seconds for which databases that did not answer are not waited for.
AWAY = 1.0

#: Seconds that the thread waits for a question before it ends.
IDLE = 60.0

#: Ids that one log line names.
NAMED = 10

#: What history says of something that came again.
AGAIN = "came again, and was not run: x-guard"
SENT_AGAIN = "not run: its id had ended before it was sent (x-guard)"

#: What is to be recorded of those that have ended, by their places; None if that is not known.
Ended = Mapping[int, Event] | None
Answer = Callable[[Ended], None]


class _End(NamedTuple):
    """How a message has ended, as history has it."""

    status: int
    modified_us: int
    attempts: int
    worker: str | None
    error: str | None
    action_us: int


class _Named(NamedTuple):
    """A delivered message as the library knows it.

    goes_on: whether it goes on with a task of its id, as a retry does
    """

    key: Key
    goes_on: bool
    headers: Mapping[str, Any]


def name_of(delivery: Delivery) -> _Named:
    """Who a delivered message is."""
    key, headers = identity_of(delivery.topic, delivery.id, delivery.body, delivery.birth)
    goes_on = bool(headers.get("retries")) or bool(headers.get("replaced_task_nesting"))
    return _Named(key, goes_on, headers)


def ends_of(store: Store, keys: Iterable[Key]) -> dict[Key, _End]:
    """How messages of the ids of these have ended that lie where they do: the latest that history
    has of each."""
    found: dict[Key, _End] = {}
    names = ("id", "token", "topic", *_End._fields)
    for shard, some in store.shards.parts_of(set(keys)):
        history = shard.tables.history
        columns = [history.c[name] for name in names]
        which = history.c.id.in_({key[0] for key in some})
        for row in shard.database.read(select(*columns).where(which)):
            key: Key = (row["id"], row["token"], row["topic"])
            end = _End(*(row[name] for name in _End._fields))
            before = found.get(key)
            if before is None or before.modified_us < end.modified_us:
                found[key] = end
    return found


def ended_rows(store: Store, rows: Sequence[Row]) -> set[Key]:
    """Those of some rows whose messages have ended."""
    over = store.ended_of(
        [row.key for row in rows], since_us=min((row.created_us for row in rows), default=0)
    )
    again = [row for row in rows if row.key in over]
    if again:
        ends = ends_of(store, [row.key for row in again])
        for row in again:
            end = ends.get(row.key)
            if end is None:
                continue
            # What was dead has been requeued since; what a center has put may be put again.
            requeued = end.status == statuses.DEAD and end.modified_us <= row.modified_us
            if requeued or (is_raw(row.key, row.body) and end.modified_us < row.created_us):
                over.discard(row.key)
    return over


def over_of(store: Store, keys: Sequence[Key]) -> set[Key]:
    """Those of some messages that wait although they have ended. What was dead was requeued."""
    over = store.ended_of(keys)
    if over:
        ends = ends_of(store, over)
        over = {key for key in over if key in ends and ends[key].status != statuses.DEAD}
    return over


class _Question(NamedTuple):
    """at: monotonic seconds when it was asked"""

    at: float
    deliveries: Sequence[Delivery]
    answer: Answer


@dataclass(eq=False)
class Guard:
    """Asks the databases of one library, each for itself; any thread may call it.

    record: is told what is held back
    patience: seconds for which whoever asks waits
    """

    _store: Store
    _record: Callable[[Event], None]
    _worker: Callable[[], str]
    patience: float

    def __post_init__(self) -> None:
        #: by the number of the database
        self.askers = [
            Asker(self._store, one, self._worker, self.patience)
            for one in self._store.shards.databases
        ]

    def after_fork(self) -> None:
        """Nobody has asked anything yet in this process."""
        for asker in self.askers:
            asker.after_fork()

    def _number_of(self, delivery: Delivery) -> int:
        """The database that has the row."""
        return self._store.shards.of_key(name_of(delivery).key).database.number

    def apart(self, deliveries: Sequence[Delivery]) -> list[list[int]]:
        """Their places, by who is asked: a database that is away keeps no other's waiting."""
        if len(self.askers) == 1:
            return [list(range(len(deliveries)))]
        found: dict[int, list[int]] = {}
        for place, delivery in enumerate(deliveries):
            found.setdefault(self._number_of(delivery), []).append(place)
        return list(found.values())

    def ask(self, deliveries: Sequence[Delivery], answer: Answer) -> bool:
        """Ask which of these have ended, of which one database knows; `answer` is called by a
        thread. False if it does not answer just now."""
        return self.askers[self._number_of(deliveries[0])].ask(deliveries, answer)

    def held_back(self, topic: str, known: Sequence[Event]) -> None:
        """These were acknowledged and not delivered: have it recorded."""
        for event in known:
            self._record(event)
        ids = [event.key[0] for event in known]
        more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
        logger.info(
            "%d messages of %s are not run again, for the library has them as ended: %s%s",
            *(len(ids), topic, ", ".join(ids[:NAMED]), more),
        )


@dataclass(eq=False)
class Asker:
    """Asks one database, by a thread of its own; any thread may call it.

    patience: seconds for which whoever asks waits
    """

    _store: Store
    _database: Database
    _worker: Callable[[], str]
    _patience: float

    def __post_init__(self) -> None:
        self.after_fork()

    def after_fork(self) -> None:
        """Nobody has asked anything yet in this process."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._bell = threading.Event()
        self._questions: deque[_Question] = deque()
        self._thread: threading.Thread | None = None
        #: monotonic seconds when the first was asked of those that have no answer yet; None: all
        #: have one, or the thread has not seen them
        self._since: float | None = None
        #: whether they did not answer, and until when they are not waited for
        self._is_away = False
        self._away_until = 0.0

    def ask(self, deliveries: Sequence[Delivery], answer: Answer) -> bool:
        """As :meth:`Guard.ask`."""
        if self._pid != os.getpid():
            self.after_fork()
        now, since = time.monotonic(), self._since
        if since is not None and now - since > self._patience:
            self._note_away(f"{self._database.url}: no answer for {self._patience:g} seconds")
        if self._is_away and (now < self._away_until or since is not None):
            return False
        self._questions.append(_Question(now, deliveries, answer))
        with self._lock:
            if self._thread is None:
                self._thread = started(self._run, "toc-guard")
        self._bell.set()
        return True

    def _note_away(self, reason: object) -> None:
        self._away_until = time.monotonic() + AWAY
        if not self._is_away:
            self._is_away = True
            logger.warning(
                "messages are delivered without asking the library whether they have ended: %s",
                reason,
            )

    # -- the thread

    def _run(self) -> None:
        while True:
            if not self._bell.wait(IDLE):
                with self._lock:
                    if not self._questions:
                        self._thread = None
                        return
            self._bell.clear()
            asked: list[_Question] = []
            while self._questions:
                asked.append(self._questions.popleft())
            if not asked:
                continue
            self._since = asked[0].at
            ended: list[Ended] = [None] * len(asked)
            try:
                ended[:] = self._judge([question.deliveries for question in asked])
                if self._is_away:
                    self._is_away = False
                    logger.info("the library says again what has ended")
            except (LibraryError, ConfigurationError) as exc:
                self._note_away(exc)
            except Exception as exc:  # a defect: messages are delivered all the same
                logger.exception("the library cannot say what has ended")
                self._note_away(exc)
            self._since = None
            for question, places in zip(asked, ended, strict=True):
                question.answer(places)

    def _judge(self, batches: Sequence[Sequence[Delivery]]) -> list[Ended]:
        named = [[name_of(delivery) for delivery in batch] for batch in batches]
        keys = {one.key for batch in named for one in batch if is_storable(one.key)}
        ends = ends_of(self._store, keys)
        #: id and queue of what is over, whatever its token
        over = {(key[0], key[2]) for key, end in ends.items() if end.status in statuses.OVER}
        found: list[Ended] = []
        for batch, ones in zip(batches, named, strict=True):
            ended: dict[int, Event] = {}
            for place, (delivery, one) in enumerate(zip(batch, ones, strict=True)):
                end = ends.get(one.key)
                if end is not None:
                    if end.status in statuses.OVER:
                        ended[place] = _again(one, end)
                elif not one.goes_on and (one.key[0], one.key[2]) in over:
                    ended[place] = self._sent_again(one, delivery.action_us)
            found.append(ended)
        return found

    def _sent_again(self, one: _Named, action_us: int) -> Event:
        now = now_us()
        return Event(
            *(one.key, statuses.CANCELLED, now, 0, self._worker(), SENT_AGAIN),
            (one.headers, action_us or now),
        )


def _again(one: _Named, end: _End) -> Event:
    """What is to be written of a message that has come again: what is there, with a note. When it
    has ended is not written anew."""
    said = end.error or ""
    error = said if AGAIN in said else "; ".join(filter(None, (said, AGAIN)))
    return Event(
        *(one.key, end.status, end.modified_us, end.attempts, end.worker or "", error),
        (one.headers, end.action_us),
    )
