"""Puts back into Redis what is pending: after it was lost, flushed, or replaced by an empty one."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from operator import attrgetter

from ..center.center import TimeoutCenter
from ..model.records import Rebuilt
from . import statuses
from .ahead import reading_ahead
from .guard import ended_rows
from .putting import Putter
from .records import Row, expires_us, lease_us, now_us
from .shards import Shard
from .store import Store

#: Rows that a statement reads, and that are put together.
PAGE = TOGETHER = 2000


def rows_by_time(store: Store, shard: Shard, place: int) -> Iterator[Row]:
    """The rows of a shard, the soonest first, a page at a time."""
    after = None
    while True:
        page = store.page(shard, place, after, PAGE)
        yield from page
        if len(page) < PAGE:
            return
        last = page[-1]
        after = (last.action_us, *last.key)


class Rebuild:
    """One rebuild. What is done already is found out as it goes: it can be repeated."""

    def __init__(self, store: Store, center: TimeoutCenter) -> None:
        self._store = store
        self._center = center
        self._putter = Putter(center, store.topics)

    def run(self, on_progress: Callable[[Rebuilt], None] | None = None) -> Rebuilt:
        store = self._store
        for name in store.topics():
            self._center.forget(name)  # Redis may have been lost since it was read
        done = Rebuilt(0, store.count_pending(), 0, 0, 0)
        places = (statuses.IN_REDIS, statuses.NOT_PUT)
        sources = [
            rows_by_time(store, shard, place) for shard in store.shards.all for place in places
        ]
        soonest = heapq.merge(*sources, key=attrgetter("action_us"))

        def batches() -> Iterator[tuple[int, list[Row], int, int]]:
            while batch := list(itertools.islice(soonest, TOGETHER)):
                yield len(batch), *self._wanted(batch)

        # The database works while Redis does.
        with reading_ahead(batches) as read:
            for number, wanted, taken, ended in read:
                put = self._putter.put(wanted)
                unplaced = [row.key for row in wanted if row.place == statuses.NOT_PUT]
                if unplaced:
                    store.place(unplaced, statuses.IN_REDIS)
                done = Rebuilt(
                    done.rows + number,
                    max(done.of_rows, done.rows + number),
                    done.put + put,
                    done.taken + taken,
                    done.ended + ended,
                )
                if on_progress is not None:
                    on_progress(done)
        return done

    def _wanted(self, batch: list[Row]) -> tuple[list[Row], int, int]:
        """Of some rows, those that are to be in Redis; how many are left to the workers that have
        taken them, and how many have ended."""
        over = ended_rows(self._store, batch)
        now, limits = now_us(), self._center.limits
        wanted: list[Row] = []
        taken = ended = 0
        for row in batch:
            expires = expires_us(row)
            if row.key in over or (expires is not None and expires <= now):
                ended += 1
            elif row.status == statuses.TAKEN and now < row.modified_us + lease_us(row, limits):
                taken += 1
            else:
                wanted.append(row)
        return wanted, taken, ended
