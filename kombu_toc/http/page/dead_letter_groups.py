"""The latest dead letters and failed tasks, grouped by why: one look for all viewers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...aio.center import AsyncTimeoutCenter
from ...model.failures import FailureGroup
from ...model.results import DEAD, Found
from .reading import Reader
from .selection import PAGE_BYTES, likeness

#: Dead letters that are looked at: of a queue, and of all together, at most.
LOOKED = 2_000
LOOKED_IN_ALL = 5_000
STEP = 200

#: Where a queue has more, or larger ones than a look reads, those that died within so many seconds
#: are looked at: the widest of these that has no more.
WINDOWS = ((86_400, "the last day"), (3_600, "the last hour"), (60, "the last minute"))

#: Seconds for which a look is shown to all viewers, at least; otherwise so many times what it took.
LEAST = 1.0
SHARE = 10

#: Looks that are kept, at most.
MOST_SEEN = 500

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


class Seen(NamedTuple):
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
        self._seen: dict[tuple[str, int], Seen] = {}
        self._looking: dict[tuple[str, int], asyncio.Lock] = {}
        #: how many looks there were, and how often something was changed here
        self.taken = 0
        self._changes = 0

    async def look(self, queue: str, total: int, most: int, now_us: int) -> Seen:
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
            seen = Seen(groups[:MOST], len(found), which, clock() + shown)
            if len(self._seen) >= MOST_SEEN:
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


class FailureGroups:
    """The latest look at the groups of failed tasks, for all viewers of a process."""

    def __init__(self, center: Any) -> None:
        self._center = center
        self._lock = asyncio.Lock()
        self._until = 0.0
        self._groups: Sequence[FailureGroup] = ()

    async def read(self) -> Sequence[FailureGroup]:
        """All groups, as of a moment ago."""
        async with self._lock:
            began = time.monotonic()
            if began >= self._until:
                self._groups = await self._center.failures.groups()
                now = time.monotonic()
                self._until = now + max(LEAST, SHARE * (now - began))
            return self._groups

    def forget(self) -> None:
        """Failures were changed here: whoever has done it is to see it."""
        self._until = 0.0
