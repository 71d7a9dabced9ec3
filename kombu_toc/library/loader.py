"""Puts what is far ahead into Redis before its time."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..center.center import TimeoutCenter
from ..errors import LibraryError
from ..model.topic import Declaration
from .far_store import Ahead, FarStore
from .putting import Putter
from .records import Row
from .returning import note_expired
from .shards import Shard
from .statuses import FAR

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


class Loader:
    """One process's part in it; used by one thread.

    doubtful: told of rows that were put, when it is not known whether their rows say so
    """

    def __init__(
        self,
        far: FarStore,
        center: TimeoutCenter,
        putter: Putter,
        doubtful: Callable[[Sequence[Row]], None],
    ) -> None:
        self._far = far
        self._center = center
        self._putter = putter
        self._doubtful = doubtful
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
