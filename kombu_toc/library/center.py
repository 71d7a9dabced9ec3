"""Records what is put, delivered and settled by the methods of a timeout center."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

from ..center.calls import ADD, PutRequest, ScheduleChange
from ..center.center import TimeoutCenter
from ..errors import LibraryError
from ..model.delivery import name_in
from ..model.library import BEHIND, OFF, OUTBOX
from ..model.results import (
    DEAD,
    IN_FLIGHT,
    REPLACED,
    WAITING,
    Cancelled,
    Delivery,
    Found,
    Put,
    Rescheduled,
)
from ..model.topic import Declaration, Topic
from . import outbox, records, statuses
from .horizon import FarMessages, is_far, new_time
from .library import Library, ServerTime
from .putting import DeadLetters, missing_of
from .recorder import Recorder, logger
from .retry import FailedRows

#: Microseconds ahead within which a message may have run before its time is changed.
UNDER_WAY_US = 5_000_000


#: The state of a message in Redis, as its row has it.
_STATUSES = {
    None: statuses.DONE,
    WAITING: statuses.PENDING,
    IN_FLIGHT: statuses.TAKEN,
    DEAD: statuses.DEAD,
}


@dataclass(eq=False)
class OpenLibrary:
    """The recorder of a process as a center uses it, and what can be asked of the record: see
    :class:`kombu_toc.center.core.Recorder`.

    center: whose methods are recorded
    """

    recorder: Recorder
    library: Library
    far: FarMessages
    failures: FailedRows
    _center: TimeoutCenter

    def __post_init__(self) -> None:
        self._dead = DeadLetters(self.recorder.store)
        self.purged_dead, self.requeued = self._dead.purged, self._dead.requeued
        self.server_time = ServerTime(self._center.client)
        #: the topic of that name, if it is known; asks nobody
        self.topic_of: Callable[[str], Topic | None] = self._center.registry.known

    # -- what is put

    def putting(self, topic: Topic, requests: Sequence[PutRequest]) -> list[records.Row | None]:
        """Messages are about to be put: write their rows, and return that of each, if it has one.
        Raises LibraryError."""
        if topic.declaration.expires or topic.declaration.library in (BEHIND, OFF):
            return []
        rows: list[records.Row | None] = [self._row(topic.name, request) for request in requests]
        if written := [row for row in rows if row is not None]:
            self.recorder.write(written, topic)
        return rows

    def named(self, topic: Topic, request: PutRequest) -> PutRequest:
        """A message that is about to be put, with a name that its row is known by."""
        if topic.declaration.expires or topic.declaration.library == OFF:
            return request
        return records.named(request)

    def keep_far(self, topic: Topic, requests: Sequence[PutRequest]) -> set[int]:
        """Keep what is too far ahead to be put now, or what is put after the caller's transaction:
        return the places of these. Raises LibraryError."""
        declared, connection = topic.declaration, outbox.current()
        if declared.library == OFF:
            outbox.refuse(topic.name, f"a message to a queue that is declared with library={OFF!r}")
        if declared.expires or declared.library == OFF:
            return set()
        if connection is not None:
            self._keep_with(connection, topic, requests)
            return set(range(len(requests)))
        if declared.library == OUTBOX:
            raise outbox.needed(topic.name)
        if declared.horizon is None:
            return set()
        rows = {
            place: row._replace(place=statuses.FAR)
            for place, request in enumerate(requests)
            if request.if_exists == ADD
            and (row := self._row(topic.name, request)) is not None
            and is_far(topic.declaration, row.action_us)
        }
        kept = bool(rows) and self.recorder.write_far(list(rows.values()), topic)
        return set(rows) if kept else set()

    def _keep_with(self, connection: Any, topic: Topic, requests: Sequence[PutRequest]) -> None:
        """Write rows in a transaction of the caller's: their messages are put after it."""
        for request in requests:
            row = self._row(topic.name, request)
            if row is None or request.if_exists != ADD:
                raise LibraryError(
                    f"message {request.id!r:.80} has no row, or is to be put only if there is none "
                    f"of its id, so an outbox cannot send it to {topic.name!r}: put it after the "
                    "commit; nothing was sent"
                )
            far = is_far(topic.declaration, row.action_us)
            row = row._replace(place=statuses.FAR if far else statuses.NOT_PUT)
            self.recorder.write_with(connection, row, topic)

    def withdraw(self, rows: Sequence[records.Row | None]) -> None:
        """Messages were not put."""
        for row in rows:
            if row is not None:
                self.recorder.withdraw(row)

    def not_put(self, rows: Sequence[records.Row | None]) -> None:
        """Redis did not answer: these follow when it does, unless they are there."""
        if keys := [row.key for row in rows if row is not None]:
            self.recorder.not_put(keys, noted=False)

    def replaced(self, rows: Sequence[records.Row | None]) -> None:
        """Messages have taken the places of others: the rows of those have ended."""
        for row in rows:
            if row is None:
                continue
            try:
                others = [
                    one
                    for one in self.recorder.store.of_keys([row.key])
                    if one.topic == row.topic
                    and one.token != row.token
                    and one.status == statuses.PENDING
                ]
                self.recorder.store.take_over(missing_of(self._center, others))
            except LibraryError as exc:
                logger.warning(
                    "message %s has taken the place of another, whose row stays for now: %s",
                    *(row.id, exc),
                )

    def repeated(self, rows: Sequence[records.Row | None]) -> None:
        """Messages had been put before: what has ended since has no row."""
        some = [row for row in rows if row is not None]
        self.withdraw(missing_of(self._center, some))

    def replace_far(self, topic: Topic, request: PutRequest) -> Put | None:
        """Give body and time of a message to the newest one of its id, if that is far ahead; None
        if it is not. Raises LibraryError, and MessageError if that has another slot basis."""
        if not topic.declaration.far or outbox.current() is not None:
            return None
        row = self._row(topic.name, request)
        return Put(row.id, REPLACED) if row is not None and self.far.replace(topic, row) else None

    # -- what becomes of it

    def delivered(self, messages: Sequence[Delivery]) -> list[Delivery]:
        """Messages were popped; return those that have ended before, and are not to be handled."""
        over: list[Delivery] = []
        for name in {one.topic for one in messages}:
            topic = self.topic_of(name)
            if topic is not None and topic.declaration.guard:
                over += self._over(topic, [one for one in messages if one.topic == name])
        held = set(map(id, over))
        for one in messages:
            if id(one) not in held:
                self._note(one, statuses.TAKEN, "")
        return over

    def _over(self, topic: Topic, messages: list[Delivery]) -> list[Delivery]:
        """Those of some messages of a topic that have ended; waits for the answer."""
        guard, counts = self.recorder.guard, self._center.context.counts(topic)
        until = time.monotonic() + guard.patience
        asked = [
            (some, Future[Any]())
            for places in guard.apart(messages)
            if (some := [messages[place] for place in places])
        ]
        for some, answer in asked:
            if not guard.ask(some, answer.set_result):
                answer.set_result(None)
        over: list[Delivery] = []
        for some, answer in asked:
            try:
                ended = answer.result(max(until - time.monotonic(), 0.0))
            except FutureTimeoutError:
                ended = None
            if ended is None:
                counts.unguarded += len(some)
            elif ended:
                counts.guarded += len(ended)
                guard.held_back(topic.name, list(ended.values()))
                over += [some[place] for place in sorted(ended)]
        return over

    def told(self, messages: Sequence[Delivery], state: str | None, error: str = "") -> None:
        """What has become of deliveries; see :meth:`.core.Recorder.told`."""
        for one in self._with_bodies(messages):
            self._note(one, _STATUSES[state], error)

    def _note(self, message: Delivery, status: int, error: str) -> None:
        if not self._keeps(message.topic):
            return
        topic = self.topic_of(message.topic)
        key, headers = records.identity_of(message.topic, message.id, message.body, message.birth)
        event = self.recorder.gathering.event_of(
            *(key, status),
            attempts=message.failures + 1,
            error=error,
            message=(headers, message.action_us),
            has_row=topic is None or topic.declaration.library != BEHIND,
        )
        if event is not None:
            self.recorder.gather(event)

    def _with_bodies(self, messages: Sequence[Delivery]) -> list[Delivery]:
        """The same; of a receipt, which has no body, what the library has of it."""
        bare = [one for one in messages if not one.body]
        if not bare:
            return list(messages)
        try:
            names = [(records.stem_of(one.id)[0], name_in(one.birth), one.topic) for one in bare]
            known = [(id, name, topic) for id, name, topic in names if name is not None]
            rows = self.recorder.store.of_ids([id for id, _, _ in names], known)
        except LibraryError as exc:
            logger.warning("what becomes of %d receipts is not recorded: %s", len(bare), exc)
            rows = []
        found = [one for one in messages if one.body]
        for one in bare:
            name = name_in(one.birth)
            mine = [
                row
                for row in rows
                if (row.id, row.topic) == (records.stem_of(one.id)[0], one.topic)
                and name in (None, row.token)
            ]
            taken = [row for row in mine if row.status == statuses.TAKEN] or mine
            found += [one._replace(body=row.body) for row in taken[:1]]
        return found

    # -- what operators do

    def cancelled(
        self,
        ids: Sequence[str],
        found: Sequence[Cancelled],
        topic: str | None,
        revoked: bool = False,
    ) -> list[Cancelled]:
        found = self._kept(found)
        self.deleted(found, revoked)
        there = _names(found)
        known = [records.key_of(one) for one in found if one.deleted]
        left = {one.id for one in found if not one.deleted}
        known += self._keys_of(sorted(left), topic) if left else []
        only: list[records.Row] = []
        for row in self.recorder.store.of_ids(ids, known):
            is_there = (row.topic, row.id) in there
            if not is_there and row.status == statuses.PENDING and topic in (None, row.topic):
                only.append(row)
        if not only:
            return []
        self.recorder.end([row.key for row in only], statuses.of_cancel(revoked))
        self._center.cancel(self._put_since(only, topic), dead=False)
        return [Cancelled(row.topic, row.id, WAITING, True, False, row.body) for row in only]

    def _put_since(self, rows: Sequence[records.Row], topic: str | None) -> list[Found]:
        """The messages of rows that were not in Redis: somebody may have put them back between the
        look there and the change of their rows."""
        keys = {row.key for row in rows}
        found = self._center.get([row.id for row in rows], topic=topic)
        return [one for one in found if not one.far and records.key_of(one) in keys]

    def deleted(self, found: Sequence[Cancelled], revoked: bool = False) -> None:
        keys = [records.key_of(one) for one in self._kept(found) if one.deleted]
        self.recorder.end(keys, statuses.of_cancel(revoked))

    def rescheduled(
        self,
        ids: Sequence[str],
        moved: Sequence[Rescheduled],
        topic: str | None,
        at_us: int | None,
        delay_us: int | None,
    ) -> list[Rescheduled]:
        # While they are in Redis, that says where their rows are.
        known = self._keys_of(ids, topic) if moved else []
        self._moved(moved, (), known)
        there = _names(moved)
        only = [
            row
            for row in self.recorder.store.of_ids(ids, known)
            if (row.topic, row.id) not in there
            and row.status == statuses.PENDING
            and row.place in (statuses.IN_REDIS, statuses.NOT_PUT)
            and topic in (None, row.topic)
        ]
        if not only:
            return []
        now, to_us = new_time(self._center, at_us, delay_us)
        # What is due may have just run, and its worker has not said so.
        sure = [
            row
            for row in only
            if row.place == statuses.NOT_PUT or row.action_us > now + UNDER_WAY_US
        ]
        changed = self.recorder.store.move(sure, to_us)
        put = self._put_since(only, topic)
        also = self._center.reschedule(put, at=to_us / 1e6) if put else []
        others = _names(also)
        return also + [
            Rescheduled(row.topic, row.id, WAITING, True, to_us)
            for row in changed
            if (row.topic, row.id) not in others
        ]

    def moved(self, moved: Sequence[Rescheduled], found: Sequence[Found] = ()) -> None:
        """Messages have another time.

        found: the messages themselves, if just these were meant; else all that share their ids
        """
        self._moved(moved, found, ())

    def _keys_of(self, ids: Sequence[str], topic: str | None) -> list[records.Key]:
        """The keys of what there is of some ids in Redis, if there are several shards."""
        if len(self.recorder.store.shards.all) == 1:
            return []
        found = self._center.get(ids, topic=topic)
        return [records.key_of(one) for one in found if not one.far]

    def _moved(
        self, moved: Sequence[Rescheduled], found: Sequence[Found], known: Sequence[records.Key]
    ) -> None:
        keys = {(one.topic, one.id): records.key_of(one) for one in found if one.body}
        # Copies are known by the id of the message, a mark, and their token.
        copies: dict[tuple[str, str], list[str]] = {}
        for one in moved:
            base = records.stem_of(one.id)[0]
            if base != one.id:
                copies.setdefault((one.topic, base), []).append(one.id[len(base) + 1 :])
        for one in moved:
            if not one.moved:
                continue
            base = records.stem_of(one.id)[0]
            token = one.id[len(base) + 1 :] if base != one.id else None
            if (key := keys.get((one.topic, one.id))) is not None:
                base, token, _ = key
            elif base != one.id:  # it may be no copy's, but its own
                self.recorder.store.set_time([(one.id, one.topic, None)], one.time_us)
            others = copies.get((one.topic, base), ()) if token is None else ()
            self.recorder.store.set_time([(base, one.topic, token)], one.time_us, others, known)

    def purged(self, topic: str) -> None:
        """What waited in a queue was deleted: also what had come back from a worker that is
        gone."""
        until, limits = records.now_us(), self._center.limits
        for rows in self.recorder.store.of_topic(topic, until):
            gone = [row.key for row in rows if row.status == statuses.PENDING]
            taken = [row for row in rows if row.status == statuses.TAKEN]
            lost = [row for row in taken if not records.has_worker(row, limits, records.now_us())]
            gone += [row.key for row in missing_of(self._center, lost)]
            self.recorder.end(gone, statuses.CANCELLED)

    def forgotten(self, topic: str) -> None:
        """A queue was deleted, with its schedules, its dead letters, and what workers have."""
        for rows in self.recorder.store.of_topic(topic, records.now_us()):
            taken = [row.key for row in rows if row.status == statuses.TAKEN]
            self.recorder.end(taken, statuses.CANCELLED)
        self.recorder.schedules.forget(topic)
        self._dead.forget(topic)
        self.recorder.store.declarations.forget(topic)

    def _kept(self, found: Sequence[Cancelled]) -> list[Cancelled]:
        """Those of queues that have rows; of the others, what was sent before that was so."""
        known = {one.topic: self.topic_of(one.topic) for one in found}
        off = {name for name, one in known.items() if one and one.declaration.library == OFF}
        if not off:
            return list(found)
        keys = {id(one): records.key_of(one) for one in found}
        old = [keys[id(one)] for one in found if one.topic in off]
        rows = {row.key for row in self.recorder.store.of_keys(old)}
        return [one for one in found if one.topic not in off or keys[id(one)] in rows]

    def scheduled(self, topic: str, change: ScheduleChange, at_us: int) -> None:
        known = self.topic_of(topic)
        if known is None or known.declaration.library != OFF:
            self.recorder.scheduled(topic, change, at_us)

    def altered(self, before: Topic, after: Topic) -> None:
        self.recorder.store.declarations.alter(before.name, before.declaration, after.declaration)

    def paused(self, topic: str, paused: bool) -> None:
        known = self.topic_of(topic)
        declaration = Declaration() if known is None else known.declaration
        self.recorder.store.declarations.pause(topic, declaration, paused)

    def requeuing(self, found: Sequence[Found]) -> None:
        self._dead.requeuing([one for one in found if self._keeps(one.topic)])

    def _keeps(self, name: str) -> bool:
        """Whether messages of a queue have rows, as far as is known."""
        topic = self.topic_of(name)
        return topic is None or not (topic.declaration.expires or topic.declaration.library == OFF)

    def _row(self, topic: str, request: PutRequest) -> records.Row | None:
        """The row of a message that a center puts; None if what is delivered would not tell whose
        it is."""
        key, headers = records.identity_of(topic, request.id, request.body, request.traits)
        if key[0] != request.id:
            return None
        made = request._replace(token=key[1])
        return records.row_of(topic, made, headers, server_us=self.server_time.of(request))


def _names(found: Sequence[Cancelled] | Sequence[Rescheduled]) -> set[tuple[str, str]]:
    """Queue and id of what there was, and of what it is a copy of."""
    return {(one.topic, id) for one in found for id in records.ids_of(one.id)}
