"""What consumers note of messages, until it is looked at: gathered for as little as can be.

Most messages are acknowledged within milliseconds. Of such a one a consumer notes a tuple of plain
values and no more: what it says is worked out when it is written. Objects that live until then have
the interpreter look for garbage, and a message that is acknowledged by then was never taken, as far
as the library is concerned.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from ..errors import LibraryError
from ..model import scores
from ..model.library import BEHIND, OFF
from ..model.results import Delivery
from ..model.topic import Topic
from . import statuses
from .backlog import Backlog
from .records import (
    NOTHING,
    TOLD_HEADERS,
    Event,
    Key,
    is_storable,
    kept_of,
    now_us,
    stem_of,
    storable,
    told_of,
)
from .schema import MAX_ERROR
from .store import Store

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
                id if isinstance(id, str) and id else stem_of(own_id)[0],
                str(token or ""),
                topic,
            )
            # A message that no row can have was not sent: its publish would have been refused.
            if mode == OFF or not is_storable(key):
                continue
            if (kind, biz, attributes) != NONE or not isinstance(task, str):
                values = zip(TOLD_HEADERS, (task, kind, biz, attributes), strict=True)
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
                    storable(error)[:MAX_ERROR] if error else "",
                    (said, scores.action_time(score)),
                    mode != BEHIND,
                    None if failed is None else kept_of(failed),
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
        self._taken: dict[Key, float] = {}

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
        if not is_storable(key):
            return None  # it has no row: its publish would have been refused
        if error:
            error = storable(error)[:MAX_ERROR]
        said = NOTHING if status in statuses.LIVE else told_of(*message)
        return Event(key, status, at_us or now_us(), attempts, self._worker, error, said, has_row)

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
        error: LibraryError | None = None
        for shard, some in store.shards.of_keys(long).items():
            if shard.database.rests:
                continue
            try:
                store.touch(some)
            except LibraryError as exc:
                error = error or exc
                continue
            with self._lock:
                for key in some:
                    if key in self._taken:
                        self._taken[key] = now
        if error is not None:
            raise error
