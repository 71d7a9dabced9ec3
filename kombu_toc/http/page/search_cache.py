"""Looks into messages, kept for all viewers: groups of dead letters, and what filters find."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...aio.center import AsyncTimeoutCenter
from ...model.results import DEAD, Found
from .reading import Reader
from .selection import PAGE_BYTES, Listing, Selection, find, likeness

# -- the latest dead letters of queues, grouped by why they died: one look for all viewers


#: Dead letters that are looked at: of a queue, and of all together, at most.
LOOKED = 2_000
LOOKED_IN_ALL = 5_000
STEP = 200

#: Where a queue has more, or larger ones than a look reads, those that died within so many seconds
#: are looked at: the widest of these that has no more.
WINDOWS = ((86_400, "the last day"), (3_600, "the last hour"), (60, "the last minute"))


#: Looks that are kept, at most.
MOST_SEEN_DEAD = 500

#: Groups that are shown, at most.
MOST = 200


class Group(NamedTuple):
    """Dead letters that are alike. Times are microseconds since the epoch."""

    queue: str
    task: str
    reason: str
    error: str
    number: int
    first_us: int
    last_us: int
    id: str


class SeenDead(NamedTuple):
    """What a look at the dead letters of a queue has seen.

    groups: the largest ones
    looked: how many dead letters were looked at
    which: which these are; empty: all
    until: until when it is shown, by the loop's clock
    """

    groups: list[Group]
    looked: int
    which: str
    until: float


class DeadLetterGroups:
    """The latest looks at the dead letters of queues, for all viewers of a process."""

    def __init__(self, center: AsyncTimeoutCenter, reader: Reader) -> None:
        self._center = center
        self._reader = reader
        self._seen: dict[tuple[str, int], SeenDead] = {}
        self._looking: dict[tuple[str, int], asyncio.Lock] = {}
        #: how many looks there were, and how often something was changed here
        self.taken = 0
        self._changes = 0

    async def look(self, queue: str, total: int, most: int, now_us: int) -> SeenDead:
        """The latest look at a queue; a new one if there may be one: it takes a tenth of the time
        at most.

        total: how many dead letters there are
        most: how many to look at
        now_us: Redis's clock
        """
        clock = asyncio.get_running_loop().time
        key = (queue, most)
        async with self._looking.setdefault(key, asyncio.Lock()):
            seen = self._seen.get(key)
            began = clock()
            if seen is not None and began < seen.until:
                return seen
            self.taken += 1
            changes = self._changes
            found, which = await self._latest(queue, total, most, now_us / 1e6)
            groups = await self._groups(queue, found, now_us)
            shown = max(LEAST, SHARE * (clock() - began)) if changes == self._changes else 0.0
            seen = SeenDead(groups[:MOST], len(found), which, clock() + shown)
            if len(self._seen) >= MOST_SEEN_DEAD:
                self._seen.clear()
                self._looking.clear()
            self._seen[key] = seen
            return seen

    def forget(self, queue: str) -> None:
        """Dead letters of a queue were changed here: whoever has done it is to see it."""
        self._changes += 1
        for key in [one for one in self._seen if one[0] == queue]:
            del self._seen[key]

    async def _latest(
        self, queue: str, total: int, most: int, now: float
    ) -> tuple[list[Found], str]:
        """Dead letters to look at, and which these are; nothing is said of all.

        total: how many there are
        most: how many to look at
        now: by Redis's clock
        """
        if total <= most:
            found, is_all = await self._read(queue, most, None)
            if is_all:
                return found, ""
        chosen: list[Found] = []
        said = ""
        for seconds, window in WINDOWS:
            found, is_all = await self._read(queue, most, now - seconds)
            if found:
                first = "" if is_all else "first "
                chosen = found
                said = (
                    f"These are the {first}{len(found):,} that died within {window}, of {total:,}."
                )
            if is_all:
                break
        if chosen:
            return chosen, said
        found, _ = await self._read(queue, most, None)
        return found, f"These are the oldest {len(found):,} of {total:,}."

    async def _read(self, queue: str, most: int, since: float | None) -> tuple[list[Found], bool]:
        """The first dead letters since a time, and whether these are all."""
        found: list[Found] = []
        size = 0
        after: str | None = None
        while len(found) < most and size < PAGE_BYTES:
            step = min(STEP, most - len(found))
            page = await self._center.scan(
                queue, state=DEAD, since=since, limit=step, after=after, size=PAGE_BYTES - size
            )
            found += page.messages
            size += sum(len(one.body) for one in page.messages)
            after = page.after
            if after is None:
                return found, True
        return found, False

    async def _groups(self, queue: str, found: Sequence[Found], now_us: int) -> list[Group]:
        """Dead letters that are alike, the largest group first."""
        groups: dict[tuple[str, str, str], Group] = {}
        async for shown in self._reader.read_all(found, now_us):
            one = shown.found
            key = likeness(shown)
            known = groups.get(key)
            if known is None:
                known = Group(queue, *key, 0, one.time_us, 0, one.id)
            groups[key] = known._replace(
                number=known.number + 1, last_us=max(one.time_us, known.last_us)
            )
        return sorted(groups.values(), key=lambda one: (-one.number, one.task))


# -- what filters find: one look for all who look through the same filter
#
# A filter that looks into messages reads many of them to find a few. So a look is shown to all
# its viewers, and looking again by itself takes a tenth of the time at most, of all filters
# together. A look that has found less than a page, and has not come to the end, goes on while
# somebody looks.


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
