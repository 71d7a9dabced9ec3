"""The audit log: who has done what over HTTP or on the page, and to how many.

An entry is a line of the logger ``kombu_toc.audit``, and an entry of a stream in Redis, which the
page shows.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from ..aio.center import AsyncTimeoutCenter
from ..client.programs import one_line
from ..errors import TocError
from .problems import Problem, problem_of

logger = logging.getLogger("kombu_toc.audit")

#: Entries that are kept, about.
KEPT = 10_000

#: Characters of what an entry says.
MOST = 2_000

#: Refusals that are logged in a minute, at most: anybody can have one.
MOST_REFUSALS = 100


class Entry(NamedTuple):
    """What somebody has done.

    us: when, microseconds since the epoch
    number: how many messages it was done to; -1: it is not about messages
    """

    us: int
    who: str
    act: str
    queue: str
    what: str
    number: int


class Doing:
    """Something that is being done.

    number: how many messages it was done to; -1: it is not about messages, or nobody knows
    """

    def __init__(self) -> None:
        self.number = -1


class Audit:
    """Writes and reads the log.

    clock: monotonic seconds
    """

    def __init__(
        self, center: AsyncTimeoutCenter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._center = center
        self._clock = clock
        #: since when refusals are counted, and how many there were
        self._since = 0.0
        self._refusals = 0

    async def write(
        self, who: str, act: str, queue: str = "", what: str = "", number: int = -1
    ) -> None:
        """Note what was done. It was done: if Redis cannot be told, the logger has it."""
        what = what[:MOST]
        about = f", {what}" if what else ""
        how_many = f": {number}" if number >= 0 else ""
        logger.info("%s", one_line(f"{who}: {act}{_place(queue)}{about}{how_many}"))
        entry = json.dumps([who, act, queue, what, number])
        try:
            await self._center.call(
                lambda center: center.client.xadd(
                    center.keys.audit, {b"e": entry}, maxlen=KEPT, approximate=True
                )
            )
        except (RedisError, TocError, OSError) as exc:
            logger.warning("the audit log lacks an entry, the broker cannot be told: %s", exc)

    @asynccontextmanager
    async def doing(
        self, who: str, act: str, queue: str = "", what: str = ""
    ) -> AsyncIterator[Doing]:
        """Note what is done within, also if it fails on the way: it may be done then, in part or
        as a whole. A Problem says that nothing was done."""
        doing = Doing()
        try:
            yield doing
        except Problem:
            raise
        except Exception as exc:
            why = f"failed: {problem_of(exc).detail}"
            await self.write(who, act, queue, f"{why}; {what}" if what else why, doing.number)
            raise
        await self.write(who, act, queue, what, doing.number)

    def refused(self, who: str, act: str, queue: str, why: str) -> None:
        """Note what was not done because somebody may not do it: for the logger only, or who may do
        nothing could push out of Redis what was done. Of very many in a minute, some."""
        now = self._clock()
        if now - self._since > 60:
            self._since, self._refusals = now, 0
        self._refusals += 1
        if self._refusals > MOST_REFUSALS:
            if self._refusals == MOST_REFUSALS + 1:
                logger.warning("what else is refused in this minute is not logged")
            return
        said = f"{who or 'somebody'}: {act[:100]}{_place(queue[:MOST])} is refused: {why}"
        logger.warning("%s", one_line(said))

    async def read(self, limit: int, before: str = "") -> tuple[list[Entry], str]:
        """The latest entries, and what goes on behind them; empty: nothing does.

        before: that of a page before
        """
        top = f"({before}" if before else "+"
        raw: list[Any] = await self._center.call(
            lambda center: center.client.xrevrange(center.keys.audit, top, "-", count=limit)
        )
        entries = []
        for name, fields in raw:
            said = json.loads(fields[b"e"])
            entries.append(Entry(int(name.split(b"-")[0]) * 1000, *said))
        return entries, raw[-1][0].decode() if len(raw) == limit else ""


def _place(queue: str) -> str:
    return f" in {queue!r}" if queue else ""
