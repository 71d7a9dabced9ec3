"""Records what operators do to messages: they wait until it is written."""

from __future__ import annotations

from collections.abc import Sequence

from ..center.center import TimeoutCenter
from ..model.results import WAITING, Cancelled, Found, Rescheduled
from . import statuses
from .dead import DeadLetters
from .presence import MISSING, states_in_redis
from .recorder import Recorder
from .records import Key, Row, ids_of, key_of, lease_us, now_us, stem_of

#: Microseconds ahead within which a message may have run before its time is changed.
UNDER_WAY_US = 5_000_000


class Operators:
    """What is told by the center that operators use. Raises LibraryError."""

    def __init__(self, recorder: Recorder, center: TimeoutCenter) -> None:
        self._recorder = recorder
        self._store = recorder.store
        self._center = center

    def cancelled(
        self,
        ids: Sequence[str],
        found: Sequence[Cancelled],
        topic: str | None,
        revoked: bool = False,
    ) -> list[Cancelled]:
        """As :meth:`kombu_toc.center.recording.Recorder.cancelled`."""
        self.deleted(found, revoked)
        there = _names(found)
        known = [key_of(one.topic, one.id, one.body, one.token) for one in found if one.deleted]
        left = {one.id for one in found if not one.deleted}
        known += self._keys_of(sorted(left), topic) if left else []
        only: list[Row] = []
        for row in self._store.of_ids(ids, known):
            is_there = (row.topic, row.id) in there
            if not is_there and row.status == statuses.PENDING and topic in (None, row.topic):
                only.append(row)
        if not only:
            return []
        self._recorder.end([row.key for row in only], statuses.of_cancel(revoked))
        self._center.cancel_found(self._put_since(only, topic), dead=False)
        return [Cancelled(row.topic, row.id, WAITING, True, False, row.body) for row in only]

    def _put_since(self, rows: Sequence[Row], topic: str | None) -> list[Found]:
        """The messages of rows that were not in Redis: somebody may have put them back between the
        look there and the change of their rows."""
        keys = {row.key for row in rows}
        found = self._center.get([row.id for row in rows], topic=topic)
        return [
            one
            for one in found
            if not one.far and key_of(one.topic, one.id, one.body, one.token) in keys
        ]

    def deleted(self, found: Sequence[Cancelled], revoked: bool = False) -> None:
        """Just these messages were cancelled, or revoked."""
        keys = [key_of(one.topic, one.id, one.body, one.token) for one in found if one.deleted]
        self._recorder.end(keys, statuses.of_cancel(revoked))

    def rescheduled(
        self,
        ids: Sequence[str],
        moved: Sequence[Rescheduled],
        topic: str | None,
        at_us: int | None,
        delay_us: int | None,
    ) -> list[Rescheduled]:
        """As :meth:`kombu_toc.center.recording.Recorder.rescheduled`."""
        # While they are in Redis, that says where their rows are.
        known = self._keys_of(ids, topic) if moved else []
        self._moved(moved, (), known)
        there = _names(moved)
        only = [
            row
            for row in self._store.of_ids(ids, known)
            if (row.topic, row.id) not in there
            and row.status == statuses.PENDING
            and row.place in (statuses.IN_REDIS, statuses.NOT_PUT)
            and topic in (None, row.topic)
        ]
        if not only:
            return []
        seconds, us = self._center.client.time()
        now = seconds * 1_000_000 + us
        to_us = max(now if at_us is None else at_us, now)
        if delay_us is not None:
            to_us = max(now + delay_us, now)
        # What is due may have just run, and its worker has not said so.
        sure = [
            row
            for row in only
            if row.place == statuses.NOT_PUT or row.action_us > now + UNDER_WAY_US
        ]
        changed = self._store.move(sure, to_us)
        put = self._put_since(only, topic)
        also = self._center.reschedule_found(put, at=to_us / 1e6) if put else []
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

    def _keys_of(self, ids: Sequence[str], topic: str | None) -> list[Key]:
        """The keys of what there is of some ids in Redis, if there are several shards."""
        if len(self._store.shards.all) == 1:
            return []
        found = self._center.get(ids, topic=topic)
        return [key_of(one.topic, one.id, one.body, one.token) for one in found if not one.far]

    def _moved(
        self, moved: Sequence[Rescheduled], found: Sequence[Found], known: Sequence[Key]
    ) -> None:
        keys = {
            (one.topic, one.id): key_of(one.topic, one.id, one.body, one.token)
            for one in found
            if one.body
        }
        # Copies are known by the id of the message, a mark, and their token.
        copies: dict[tuple[str, str], list[str]] = {}
        for one in moved:
            base = stem_of(one.id)[0]
            if base != one.id:
                copies.setdefault((one.topic, base), []).append(one.id[len(base) + 1 :])
        for one in moved:
            if not one.moved:
                continue
            base = stem_of(one.id)[0]
            token = one.id[len(base) + 1 :] if base != one.id else None
            if (key := keys.get((one.topic, one.id))) is not None:
                base, token, _ = key
            elif base != one.id:  # it may be no copy's, but its own
                self._store.set_time([(one.id, one.topic, None)], one.time_us)
            others = copies.get((one.topic, base), ()) if token is None else ()
            self._store.set_time([(base, one.topic, token)], one.time_us, others, known)

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


def _names(found: Sequence[Cancelled] | Sequence[Rescheduled]) -> set[tuple[str, str]]:
    """Queue and id of what there was, and of what it is a copy of."""
    return {(one.topic, id) for one in found for id in ids_of(one.id)}
