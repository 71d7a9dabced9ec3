"""Records what operators do to messages: they wait until it is written."""

from __future__ import annotations

from collections.abc import Sequence

from ..center.center import TimeoutCenter
from ..model.results import WAITING, Cancelled, Rescheduled
from ..model.topic import base_of
from . import statuses
from .dead import DeadLetters
from .presence import MISSING, states_in_redis
from .recorder import Recorder
from .records import Row, key_of, lease_us, now_us


class Operators:
    """What is told by the center that operators use. Raises LibraryError."""

    def __init__(self, recorder: Recorder, center: TimeoutCenter) -> None:
        self._recorder = recorder
        self._store = recorder.store
        self._center = center

    def cancelled(
        self, ids: Sequence[str], found: Sequence[Cancelled], topic: str | None
    ) -> list[Cancelled]:
        """As :meth:`kombu_toc.center.recording.Recorder.cancelled`."""
        self.deleted(found)
        there = {(one.topic, base_of(one.id)) for one in found}
        there |= {(one.topic, one.id) for one in found}
        only: list[Row] = []
        for row in self._store.of_ids(ids):
            known = (row.topic, row.id) in there
            if not known and row.status == statuses.PENDING and topic in (None, row.topic):
                only.append(row)
        if not only:
            return []
        self._recorder.end([row.key for row in only], statuses.CANCELLED)
        # Somebody may have put them back between the look into Redis and this.
        bodies = {(row.topic, row.body) for row in only}
        again = self._center.get([row.id for row in only], topic=topic)
        again = [one for one in again if (one.topic, one.body) in bodies and not one.far]
        self._center.cancel_found(again, dead=False)
        return [Cancelled(row.topic, row.id, WAITING, True, False, row.body) for row in only]

    def deleted(self, found: Sequence[Cancelled]) -> None:
        """Just these messages were cancelled."""
        keys = [key_of(one.topic, one.id, one.body) for one in found if one.deleted]
        self._recorder.end(keys, statuses.CANCELLED)

    def rescheduled(self, moved: Sequence[Rescheduled]) -> None:
        """Messages have another time."""
        for one in moved:
            if one.moved:
                # Copies are known by the id of the message, a mark, and their token.
                base = base_of(one.id)
                token = one.id[len(base) + 1 :] if base != one.id else None
                self._store.set_time([(base, one.topic, token)], one.time_us)

    def purged(self, topic: str) -> None:
        """What waited in a queue was deleted: also what had come back from a worker that is
        gone."""
        until, limits = now_us(), self._center.limits
        for rows in self._store.of_topic(topic, until):
            gone = [row.key for row in rows if row.status == statuses.PENDING]
            taken = [row for row in rows if row.status == statuses.TAKEN]
            lost = [row for row in taken if row.modified_us + lease_us(row, limits) < now_us()]
            states = states_in_redis(self._center, lost)
            gone += [row.key for row, state in zip(lost, states, strict=True) if state == MISSING]
            self._recorder.end(gone, statuses.CANCELLED)

    def forgotten(self, topic: str) -> None:
        """A queue was deleted, with its schedules, its dead letters, and what workers have."""
        for rows in self._store.of_topic(topic, now_us()):
            taken = [row.key for row in rows if row.status == statuses.TAKEN]
            self._recorder.end(taken, statuses.CANCELLED)
        self._recorder.schedules.forget(topic)
        DeadLetters(self._store).forget(topic)
        self._store.declarations.forget(topic)
