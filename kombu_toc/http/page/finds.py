"""What filters find: one look for all who look through the same filter.

A filter that looks into messages reads many of them to find a few. So a look is shown to all its
viewers, and looking again by itself takes a tenth of the time at most, of all filters together.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from .reading import Reader
from .selection import Listing, Selection, find

#: How many times as long as it took a look is shown to pages that look again by themselves, and
#: seconds at least; and how many times to whoever opens the view.
SHARE = 10
LEAST = 1.0
OPENED = 2

#: Looks that are kept, at most: of each there are the messages that it has found.
MOST_SEEN = 20

#: Seconds for which a filter counts as looked through.
LOOKED_THROUGH = 120.0

#: What a filter says, and where its page begins; the queue comes first.
Key = tuple[str, ...]


class Seen(NamedTuple):
    """What a look has found.

    now_us: when it began, by Redis's clock
    at: when it ended, by the loop's clock
    """

    listing: Listing
    now_us: int
    at: float


class Finds:
    """The latest looks through filters, for all viewers of a process."""

    def __init__(self, center: Any, reader: Reader) -> None:
        self._center = center
        self._reader = reader
        self._seen: dict[Key, Seen] = {}
        self._looking: dict[Key, asyncio.Task[Seen]] = {}
        #: how many looks there were
        self.taken = 0

    async def look(
        self, key: Key, selection: Selection, *, now_us: int, limit: int, is_live: bool
    ) -> Seen:
        """The latest look through a filter, or a new one.

        key: ends with where the page begins
        now_us: Redis's clock
        limit: how many messages to find
        is_live: whether a page looks again by itself
        """
        seen = self._seen.get(key)
        if seen is not None:
            shown = self.again_in(seen) if is_live else self._shown_opened(seen)
            if shown > 0:
                return seen
        looking = self._looking.get(key)
        if looking is None:
            looking = asyncio.create_task(self._look(key, selection, now_us, limit))
            self._looking[key] = looking
        return await asyncio.shield(looking)  # who goes away ends nobody else's look

    def again_in(self, seen: Seen) -> float:
        """In how many seconds there is another look for pages that look again by themselves."""
        now = asyncio.get_running_loop().time()
        others = (one for one in self._seen.values() if now - one.at < LOOKED_THROUGH)
        took = sum(one.listing.took for one in others if one is not seen)
        return seen.at + max(LEAST, SHARE * (took + seen.listing.took)) - now

    def _shown_opened(self, seen: Seen) -> float:
        """For how many seconds more a look is shown to whoever opens the view."""
        return seen.at + OPENED * seen.listing.took - asyncio.get_running_loop().time()

    async def _look(self, key: Key, selection: Selection, now_us: int, limit: int) -> Seen:
        mine = asyncio.current_task()
        self.taken += 1
        try:
            listing = await find(
                self._center,
                self._reader,
                selection,
                now_us=now_us,
                limit=limit,
                after=key[-1] or None,
            )
            seen = Seen(listing, now_us, asyncio.get_running_loop().time())
            if self._looking.get(key) is mine:
                self._seen.pop(key, None)
                while len(self._seen) >= MOST_SEEN:
                    del self._seen[next(iter(self._seen))]  # the oldest
                self._seen[key] = seen
            return seen
        finally:
            if self._looking.get(key) is mine:
                del self._looking[key]

    def forget(self, queue: str) -> None:
        """Messages of a queue were changed here: whoever has done it is to see it."""
        for kept in (self._seen, self._looking):
            for key in [one for one in kept if one[0] == queue]:
                del kept[key]

    async def aclose(self) -> None:
        """End the looks that are under way."""
        tasks = list(self._looking.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
