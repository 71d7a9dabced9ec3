"""What is far ahead: further than the horizon of its queue (``x-horizon``)."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from ..center.admin_commands import Position
from ..center.center import TimeoutCenter
from ..errors import LibraryError, MessageError
from ..model import scores
from ..model.results import WAITING, Cancelled, Found, Rescheduled
from ..model.topic import Declaration, Topic
from . import statuses
from .horizon_store import Ahead, FarStore
from .putting import Putter
from .records import Key, Row, key_of, now_us
from .returning import note_expired
from .shards import Shard
from .statuses import FAR

# -- what is far ahead
#
# It is in the library only until then. A center looks for it, and changes it, here before it asks
# Redis.

#: Digits of an action time, in the position of what is far ahead.
DIGITS = 16


def is_far(declaration: Declaration, action_us: int) -> bool:
    """Whether a message of a queue is too far ahead to be put into Redis now."""
    horizon = declaration.horizon
    return horizon is not None and action_us > now_us() + int(horizon * 1_000_000)


class FarMessages:
    """What a center can do with what is far ahead: see :class:`kombu_toc.center.recording.Far`."""

    def __init__(self, store: FarStore, center: TimeoutCenter, ready: Callable[[], None]) -> None:
        self._of = store
        self._ready = ready
        self._center = center
        self._putter = Putter(center, store.store.topics)

    @property
    def _store(self) -> FarStore:
        self._ready()
        return self._of

    # -- what is there

    def get(self, ids: Sequence[str], topic: str | None) -> list[Found]:
        return [self._found(row) for row in self._store.of_ids(ids, topic)]

    def read(
        self,
        topic: Topic,
        after: tuple[int, bytes],
        since_us: int | None,
        until_us: int | None,
        step: int,
    ) -> Iterator[tuple[Found, Position]]:
        start = _start(*after)
        for row in self._store.read(topic.name, start, since_us, until_us, step):
            found = self._found(row, topic)
            id = f"{row.action_us:0{DIGITS}d}{row.id}\0{row.token}"
            yield found, Position(found.score, topic.name, id.encode(), -1, 0)

    def count(self, topic: str, limit: int | None = None, until_us: int | None = None) -> int:
        return self._store.count(topic, limit, until_us)

    def _found(self, row: Row, topic: Topic | None = None) -> Found:
        topic = topic or self._center.registry.resolved(row.topic)
        return Found(
            row.topic,
            topic.slot_for(row.basis or row.id).number,
            row.id,
            WAITING,
            topic.step_index(row.priority),
            scores.action(row.action_us),
            row.body,
            "",
            token=row.traits,
            far=True,
        )

    # -- what is done to it

    def cancel(
        self, ids: Sequence[str], topic: str | None, revoked: bool = False
    ) -> list[Cancelled]:
        return self._cancel(self._store.of_ids(ids, topic), revoked)

    def cancel_found(self, found: Sequence[Found], revoked: bool = False) -> list[Cancelled]:
        keys = {key_of(one.topic, one.id, one.body, one.token) for one in found}
        rows = self._store.of_keys(keys)
        return self._cancel([row for row in rows if row.key in keys], revoked)

    def _cancel(self, rows: Sequence[Row], revoked: bool) -> list[Cancelled]:
        if not rows:
            return []
        ended = set(self._store.end(rows, statuses.of_cancel(revoked)))
        return [
            Cancelled(row.topic, row.id, WAITING, True, False, row.body)
            for row in rows
            if row.key in ended
        ]

    def purge(self, topic: str) -> int:
        return sum(
            len(self._store.end(rows, statuses.CANCELLED)) for rows in self._store.pages(topic)
        )

    def reschedule(
        self, ids: Sequence[str], topic: str | None, at_us: int | None, delay_us: int | None
    ) -> list[Rescheduled]:
        return self._reschedule(self._store.of_ids(ids, topic), at_us, delay_us)

    def reschedule_found(
        self, found: Sequence[Found], at_us: int | None, delay_us: int | None
    ) -> list[Rescheduled]:
        keys = {key_of(one.topic, one.id, one.body, one.token) for one in found}
        rows = [row for row in self._store.of_keys(keys) if row.key in keys]
        return self._reschedule(rows, at_us, delay_us)

    def _reschedule(
        self, rows: Sequence[Row], at_us: int | None, delay_us: int | None
    ) -> list[Rescheduled]:
        if not rows:
            return []
        seconds, us = self._center.client.time()
        now = seconds * 1_000_000 + us
        to_us = now if at_us is None else at_us
        if delay_us is not None:
            to_us = now + delay_us
        to_us = max(now, to_us)
        changed: set[Key] = set()
        far: list[Row] = []
        near: list[Row] = []
        for row in rows:
            declaration = self._center.registry.resolved(row.topic).declaration
            (far if is_far(declaration, to_us) else near).append(row)
        if near:
            put = self._store.put_now(near, {"action_us": to_us}, self._putter.put)
            changed.update(row.key for row in put)
        if far:
            changed.update(self._store.move(far, {"action_us": to_us}))
        return [
            Rescheduled(row.topic, row.id, WAITING, True, to_us)
            for row in rows
            if row.key in changed
        ]

    def replace(self, topic: Topic, row: Row) -> bool:
        """Give what this row says to the newest message of its id, if that is far ahead; return
        whether it was. Raises MessageError if that has another slot basis."""
        rows = self._store.store.of_keys([row.key])
        live = [one for one in rows if one.topic == row.topic and one.status == statuses.PENDING]
        newest = max(live, key=attrgetter("created_us"), default=None)
        if newest is None or newest.place != statuses.FAR:
            return False
        if (newest.basis or row.id) != (row.basis or row.id):
            raise MessageError(
                f"message {row.id!r} waits in the task library with the slot basis "
                f"{newest.basis or row.id!r}, and this one has {row.basis or row.id!r}: replace it "
                "under its own basis, or cancel it and put this one; nothing was put"
            )
        kept = ("id", "topic", "status", "place", "attempts", "worker", "error")
        changes = {name: value for name, value in row._asdict().items() if name not in kept}
        if is_far(topic.declaration, row.action_us):
            return bool(self._store.move([newest], changes))
        return bool(self._store.put_now([newest], changes, self._putter.put))


def _start(score: int, id: bytes) -> tuple[int, str, str]:
    """Action time, id and token behind which the rows are that come after this position.

    score, id: of the position; what is far ahead has its action time before its id there
    """
    if score <= 0:
        return 0, "", ""
    us = max(scores.action_time(score) - 3, 0)  # up to three have one score
    while scores.action(us) < score:
        us += 1
    while scores.action(us) == score:
        prefix = b"%0*d" % (DIGITS, us)
        if prefix == id[:DIGITS]:
            name, _, token = id[DIGITS:].partition(b"\0")
            return us, name.decode("utf-8", "replace"), token.decode("utf-8", "replace")
        if prefix > id[:DIGITS]:
            break
        us += 1
    return us, "", ""


# -- puts what is far ahead into Redis before its time

#: Seconds ahead of its time that a message is put whose queue has a horizon no longer, or is known
#: nowhere.
HORIZON, UNKNOWN = 3600.0, 60.0

#: Seconds between two looks at the queues with a horizon, and at whatever else is far ahead.
LOOK_INTERVAL, ALL_INTERVAL = 2.0, 10.0

#: Rows of one transaction, and seconds of putting after which a turn ends: the thread has other
#: things to do. Each turn puts something, however long its looks or one transaction take.
TOGETHER = 1000
TURN = 0.5

#: Rows and transactions of one turn, which takes so long at least if there is more.
ROWS, TRANSACTIONS = 10_000, 50


class _Head(NamedTuple):
    """The soonest rows of a queue, or of all, in one shard.

    seen: settles which of two goes first whose times are the same
    """

    first_us: int
    seen: int
    shard: Shard
    topic: str | None


@dataclass(eq=False)
class Loader:
    """One process's part in it; used by one thread.

    doubtful: told of rows that were put, when it is not known whether their rows say so
    """

    _far: FarStore
    _center: TimeoutCenter
    _putter: Putter
    _doubtful: Callable[[Sequence[Row]], None]

    def __post_init__(self) -> None:
        #: monotonic seconds of the next looks
        self._next_look = self._next_all = 0.0
        self._queues: dict[str, Declaration] = {}
        #: how often it has seen something
        self._seen = 0
        #: how many it has put so far
        self.loaded = 0

    def turn(self, until: float) -> bool:
        """Put what is within the horizon of its queue, the soonest first; return whether there is
        more to put at once.

        until: monotonic seconds after which somebody else may do it
        """
        now = time.monotonic()
        if now < self._next_look:
            return False
        look_at_all = now >= self._next_all
        if look_at_all:
            self._queues = self._with_horizons()
        horizons = self._horizons()
        if look_at_all:
            horizons[None] = UNKNOWN
        if not horizons:
            self._next_look = now + LOOK_INTERVAL
            return False
        seconds, us = self._center.client.time()
        bounds = {
            name: seconds * 1_000_000 + us + int(horizon * 1_000_000)
            for name, horizon in horizons.items()
        }
        heads: list[_Head] = []
        error: LibraryError | None = None
        for database in self._far.shards.databases:
            if database.rests:
                continue
            try:
                for topic, bound in bounds.items():
                    for first_us, shard in self._far.store.holding(database, FAR, bound, topic):
                        self._see(heads, first_us, shard, topic)
            except LibraryError as exc:  # another database may be there
                error = error or exc
        ends = time.monotonic() + TURN
        loaded, transactions = self.loaded, 0
        while heads and time.monotonic() < until:
            head = heapq.heappop(heads)
            if head.shard.database.rests:
                continue
            bound = bounds[head.topic]
            try:
                ahead = self._far.ahead(head.shard, head.topic, head.first_us, bound, TOGETHER)
                if ahead.number and heads and ahead.first_us > heads[0].first_us:
                    # What was there before is put by now: others are sooner.
                    self._see(heads, ahead.first_us, head.shard, head.topic)
                    continue
                if not ahead.number:
                    continue
                transactions += 1
                rows = self._load(head, ahead, bound, until)
                if rows:
                    self._see(heads, rows[-1].action_us, head.shard, head.topic)
            except LibraryError as exc:
                error = error or exc
            if time.monotonic() >= ends or transactions >= TRANSACTIONS:
                break
            if self.loaded - loaded >= ROWS:
                break
        if heads:
            self._next_look = now + TURN
        else:
            self._next_look = now + LOOK_INTERVAL
            if look_at_all:
                self._next_all = now + ALL_INTERVAL
        if error is not None:
            raise error
        return bool(heads) and time.monotonic() >= self._next_look

    def _horizons(self) -> dict[str | None, float]:
        """Seconds ahead of its time that something is put, by queue. What Redis says of a queue
        goes before what was recorded of it."""
        found: dict[str | None, float] = {}
        for name, declaration in self._queues.items():
            topic = self._center.registry.recent(name)
            horizon = (declaration if topic is None else topic.declaration).horizon
            found[name] = HORIZON if horizon is None else horizon
        return found

    def _with_horizons(self) -> dict[str, Declaration]:
        """The queues that have, or had, a horizon."""
        declared = self._putter.declarations()
        return {name: declaration for name, declaration in declared.items() if declaration.far}

    def _see(self, heads: list[_Head], first_us: int, shard: Shard, topic: str | None) -> None:
        """Note that a shard may have something of a queue that is to be put."""
        self._seen += 1
        heapq.heappush(heads, _Head(first_us, self._seen, shard, topic))

    def _load(self, head: _Head, ahead: Ahead, bound: int, until: float) -> list[Row]:
        """Put some rows; return them."""
        put: list[Row] = []

        def putting(rows: Sequence[Row]) -> None:
            if time.monotonic() >= until:
                raise LibraryError("what is far ahead was not put in time; others do it")
            put.extend(rows)
            self._putter.put(rows)

        try:
            rows = self._far.put_ahead(
                *(head.shard, head.topic, ahead.first_us, bound, ahead.number), putting
            )
        except BaseException:
            self._doubtful(put)
            raise
        note_expired(self._far.store, self._putter)
        self.loaded += len(rows)
        return rows
