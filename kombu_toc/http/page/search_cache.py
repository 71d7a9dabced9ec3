"""What filters find: one look for all who look through the same filter.

A filter that looks into messages reads many of them to find a few. So a look is shown to all its
viewers, and looking again by itself takes a tenth of the time at most, of all filters together.
A look that has found less than a page, and has not come to the end, goes on while somebody looks.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NamedTuple

from .reading import Reader
from .selection import Listing, Selection, find

logger = logging.getLogger(__name__)

#: How many times as long as it took a look is shown to pages that look again by themselves, and
#: seconds at least; and how many times to whoever opens the view.
SHARE = 10
LEAST = 1.0
OPENED = 2

#: Seconds after which a look does not go on any more that nobody has asked for.
LEFT = 10.0

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


def _is_short(seen: Seen, limit: int) -> bool:
    """Whether there is less than a page, and more to look at."""
    return seen.listing.after is not None and len(seen.listing.messages) < limit


class SearchCache:
    """The latest looks through filters, for all viewers of a process."""

    def __init__(self, center: Any, reader: Reader) -> None:
        self._center = center
        self._reader = reader
        self._seen: dict[Key, Seen] = {}
        self._looking: dict[Key, asyncio.Task[Seen]] = {}
        #: looks that go on, and when each was asked for last
        self._going: dict[Key, asyncio.Task[None]] = {}
        self._asked: dict[Key, float] = {}
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
        self._asked[key] = asyncio.get_running_loop().time()
        seen = self._seen.get(key)
        if seen is not None:
            if self.goes_on(key):
                return seen
            shown = self.again_in(seen) if is_live else self._shown_opened(seen)
            if shown > 0:
                return seen
        looking = self._looking.get(key)
        if looking is None:
            looking = asyncio.create_task(self._look(key, selection, now_us, limit))
            self._looking[key] = looking
        seen = await asyncio.shield(looking)  # who goes away ends nobody else's look
        if self._seen.get(key) is seen and not self.goes_on(key) and _is_short(seen, limit):
            self._going[key] = asyncio.create_task(self._go_on(key, selection, limit))
        return seen

    def goes_on(self, key: Key) -> bool:
        """Whether more is looked for just now."""
        return key in self._going

    async def _go_on(self, key: Key, selection: Selection, limit: int) -> None:
        """Look on, for half of the time at most, until there is a page or the end."""
        now_of = asyncio.get_running_loop().time
        try:
            while (seen := self._seen.get(key)) is not None and _is_short(seen, limit):
                if now_of() - self._asked.get(key, 0.0) > LEFT:
                    return
                before = seen.listing
                more = await find(
                    self._center,
                    self._reader,
                    selection,
                    now_us=seen.now_us,
                    limit=limit - len(before.messages),
                    after=before.after,
                )
                if self._seen.get(key) is not seen:
                    return
                listing = Listing(
                    before.messages + more.messages,
                    more.after,
                    before.looked + more.looked,
                    before.took + more.took,
                )
                self._seen[key] = Seen(listing, seen.now_us, now_of())
                await asyncio.sleep(more.took)
        except Exception as exc:  # whoever looks next is told of what lasts
            logger.warning("a look through a filter has ended early: %s", exc)
        finally:
            del self._going[key]

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
                    oldest = next(iter(self._seen))
                    del self._seen[oldest]
                    self._asked.pop(oldest, None)
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
        tasks = [*self._looking.values(), *self._going.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
