"""What is in the task library only: how much of a queue is further ahead than its horizon."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from redis.exceptions import RedisError

from ..center.center import TimeoutCenter
from ..errors import TocError

logger = logging.getLogger(__name__)

#: Seconds for which databases are waited for. (KEDA waits for three.)
FAR_WITHIN = 2.0


async def far_of(api: Any, queue: str) -> int | None:
    """How many messages of a queue with a horizon are in the task library only. None: it cannot be
    asked."""
    try:
        found: dict[str, int] = await asyncio.wait_for(api.center.count_far(queue), FAR_WITHIN)
    except (TocError, RedisError, asyncio.TimeoutError):
        return None
    return found.get(queue)


def _with_horizon(center: TimeoutCenter) -> list[str]:
    return [one.name for one in center.registry.far(None)]


class FarAhead:
    """The same of all queues, for all who look at a page: asked at most every ten seconds, and no
    more often than takes a twentieth of the time. Nobody waits for a slow database."""

    EVERY: float = 10.0
    SHARE: float = 20.0

    #: Seconds for which the first viewer waits.
    FIRST = 0.5

    def __init__(self, api: Any) -> None:
        self._api = api
        self._latest: dict[str, int | None] = {}
        self._next = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def looks(self) -> bool:
        """Whether it is asking."""
        return self._task is not None

    async def read(self) -> dict[str, int | None]:
        """Of each queue with a horizon, how much is in the library only; None: it cannot be asked.
        It may be some seconds old."""
        if not self._api.has_library:
            return {}
        loop = asyncio.get_running_loop()
        if self._task is None and loop.time() >= self._next:
            is_first = not self._next
            self._task = loop.create_task(self._look())
            if is_first:
                await asyncio.wait((self._task,), timeout=self.FIRST)
        return self._latest

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        names: list[str] = []
        center = self._api.center
        try:
            names = await center.call(_with_horizon)
            if names:
                self._latest = {**dict.fromkeys(names), **await center.count_far()}
            else:
                self._latest = {}
        except Exception as exc:
            logger.debug("what is in the task library only is not known: %s", exc)
            self._latest = dict.fromkeys(names or self._latest)
        finally:
            took = loop.time() - began
            self._next = began + max(self.EVERY, took * self.SHARE)
            self._task = None

    async def aclose(self) -> None:
        """End a look that is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
