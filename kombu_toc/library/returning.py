"""Puts messages back of which the library has rows and Redis has nothing.

Between the look at a row and the put of its message, anything may happen to it: just before, what
has ended is left out; right after, what has ended meanwhile is taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..center.admin_commands import Place
from ..center.center import TimeoutCenter
from ..model.delivery import trait, with_trait
from ..model.library import OFF
from ..model.results import WAITING, Found
from . import statuses
from .dead import DeadLetters
from .guard import ended_rows
from .putting import Putter
from .records import Event, Key, Row, is_of, now_us
from .store import Store

#: Why a message is dead that was put back again and again.
LOST = "no retries left: the workers that ran it were lost"


class Returned(NamedTuple):
    """What was put back.

    number: how many messages were not there
    rows: whose messages are there now
    expired: how many were too old for that
    """

    number: int
    rows: list[Row]
    expired: int


class Returner:
    """Puts rows back. Used by one thread."""

    def __init__(self, store: Store, center: TimeoutCenter, putter: Putter) -> None:
        self._store = store
        self._center = center
        self._putter = putter

    def put_missing(self, rows: Sequence[Row]) -> Returned:
        """Put the messages of rows that are not in Redis. What has ended, or is in a queue without
        a library by now, has no row from then on."""
        if not rows:
            return Returned(0, [], 0)
        over = ended_rows(self._store, rows)
        off = off_among(self._center, rows)
        over |= {row.key for row in rows if row.topic in off}
        self._store.forget([row.key for row in rows if row.key in over])
        wanted = self._counted([row for row in rows if row.key not in over])
        self._store.record([_event(row, statuses.PENDING) for row in wanted])
        return self.put(wanted)

    def _counted(self, rows: Sequence[Row]) -> list[Row]:
        """The same, each that a lost worker had with how often that was so; a message of which no
        retries are left for that becomes a dead letter: it may be what kills its workers."""
        wanted: list[Row] = []
        lost: list[Row] = []
        dead: list[Row] = []
        for row in rows:
            if row.status != statuses.TAKEN:
                wanted.append(row)
                continue
            times = (trait(row.traits, "l") or 0) + 1
            retries = self._putter.topic(row.topic).declaration.retries
            if times > retries:
                error = f"{times} workers, one after the other"
                dead.append(row._replace(error=error))
            else:
                lost.append(row._replace(traits=with_trait(row.traits, "l", times)))
        if lost:
            self._store.set_traits(lost)
        if dead:
            DeadLetters(self._store).bury(self._center, self._putter, dead, LOST)
            self._store.record(
                [_event(row, statuses.DEAD)._replace(error=row.error or "") for row in dead]
            )
        return wanted + lost

    def put(self, rows: Sequence[Row], *, counted: bool = False) -> Returned:
        """Put the messages of rows, but for those that have expired; take back those that have
        ended since the rows were read.

        counted: as for :meth:`.putting.Putter.put`
        """
        number = self._putter.put(rows, counted=counted)
        late = {row.key for row in self._putter.expired}
        expired = note_expired(self._store, self._putter)
        put = [row for row in rows if row.key not in late] if late else list(rows)
        over = ended_since(self._store, put)
        if over:
            number -= withdraw(self._center, [row for row in put if row.key in over])
            put = [row for row in put if row.key not in over]
        return Returned(max(number, 0), put, expired)


def off_among(center: TimeoutCenter, rows: Iterable[Row]) -> set[str]:
    """The queues of rows that are kept without a library by now."""
    known = {name: center.registry.recent(name) for name in {row.topic for row in rows}}
    return {name for name, one in known.items() if one and one.declaration.library == OFF}


def _event(row: Row, status: int) -> Event:
    return Event(row.key, status, now_us(), 0, "", "", ({}, 0))


def ended(row: Row, status: int) -> Event:
    """That a row has ended."""
    return _event(row, status)


def note_expired(store: Store, putter: Putter) -> int:
    """Record what was not put because it has expired; return how many that were."""
    expired = putter.expired
    if expired:
        store.record([ended(row, statuses.EXPIRED) for row in expired])
        putter.expired = []
    return len(expired)


def ended_since(store: Store, rows: Sequence[Row]) -> set[Key]:
    """Those of some rows whose messages have ended since they were read. One that is there again
    is another message, with the same id and the same bytes."""
    if not rows:
        return set()
    over = ended_rows(store, rows)
    return over - store.moments(list(over)).keys() if over else over


def withdraw(center: TimeoutCenter, rows: Iterable[Row]) -> int:
    """Delete the messages of rows, where they wait; return how many. What has become of them is
    known: nobody is told."""
    found: list[Found] = []
    for row in rows:
        found += [
            one
            for one in center.get(row.id, topic=row.topic, basis=row.basis)
            if is_of(row, one.body, one.token.encode()) and one.state == WAITING and not one.far
        ]
    calls = []
    for one in found:
        topic = center.registry.resolved(one.topic)
        place = Place(topic, topic.slot(one.slot), [one.id])
        calls.append(center.admin_commands.cancel(place, (WAITING,), copies=False, bodies=False))
    return sum(one.deleted for reply in center.runner.run_all(calls) for one in reply.cancelled)
