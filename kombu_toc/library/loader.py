"""Puts what is far ahead into Redis before its time."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..center.center import TimeoutCenter
from ..errors import LibraryError
from .far_store import FarStore
from .putting import Putter
from .records import Row
from .returning import note_expired
from .shards import Shard

#: Seconds ahead of its time that a message is put whose queue has a horizon no longer, or is known
#: nowhere.
HORIZON, UNKNOWN = 3600.0, 60.0

#: Seconds between two looks at the queues with a horizon, and at whatever else is far ahead.
LOOK_INTERVAL, ALL_INTERVAL = 2.0, 10.0

#: Rows of one transaction, and seconds of putting after which a turn ends: the thread has other
#: things to do. Each turn puts something, however long its looks or one transaction take.
TOGETHER = 1000
TURN = 0.5


class _Head(NamedTuple):
    """The soonest rows of a queue, or of all, in one shard.

    seen: settles which of two goes first whose times are the same
    number: how many of them one transaction takes
    """

    first_us: int
    seen: int
    shard: Shard
    topic: str | None
    number: int


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
        horizons = self._horizons()
        look_at_all = now >= self._next_all
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
        for shard in self._far.shards.awake():
            try:
                for topic, bound in bounds.items():
                    self._see(heads, shard, topic, 0, bound)
            except LibraryError as exc:  # another database may be there
                error = error or exc
        ends = time.monotonic() + TURN
        while heads and time.monotonic() < until:
            head = heapq.heappop(heads)
            if head.shard.database.rests:
                continue
            bound = bounds[head.topic]
            try:
                rows = self._load(head, bound, until)
                if len(rows) == head.number:
                    self._see(heads, head.shard, head.topic, rows[-1].action_us, bound)
            except LibraryError as exc:
                error = error or exc
            if time.monotonic() >= ends:
                break
        if not heads:
            self._next_look = now + LOOK_INTERVAL
            if look_at_all:
                self._next_all = now + ALL_INTERVAL
        if error is not None:
            raise error
        return bool(heads)

    def _horizons(self) -> dict[str | None, float]:
        """Seconds ahead of its time that something is put, by queue. What Redis says of a queue
        goes before what was recorded of it."""
        found: dict[str | None, float] = {}
        for name, declaration in self._putter.declarations().items():
            if declaration.far:
                topic = self._center.registry.recent(name)
                horizon = (declaration if topic is None else topic.declaration).horizon
                found[name] = HORIZON if horizon is None else horizon
        return found

    def _see(
        self,
        heads: list[_Head],
        shard: Shard,
        topic: str | None,
        since: int,
        bound: int,
    ) -> None:
        """Note what a shard has of a queue, if it has anything to be put."""
        ahead = self._far.ahead(shard, topic, since, bound, TOGETHER)
        if ahead.number:
            self._seen += 1
            head = _Head(ahead.first_us, self._seen, shard, topic, ahead.number)
            heapq.heappush(heads, head)

    def _load(self, head: _Head, bound: int, until: float) -> list[Row]:
        """Put some rows; return them."""
        put: list[Row] = []

        def putting(rows: Sequence[Row]) -> None:
            if time.monotonic() >= until:
                raise LibraryError("what is far ahead was not put in time; others do it")
            put.extend(rows)
            self._putter.put(rows)

        try:
            rows = self._far.put_ahead(
                *(head.shard, head.topic, head.first_us, bound, head.number), putting
            )
        except BaseException:
            self._doubtful(put)
            raise
        note_expired(self._far.store, self._putter)
        self.loaded += len(rows)
        return rows
