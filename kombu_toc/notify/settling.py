"""Acknowledges, rejects and releases what was sent; tries again while the leases last."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import RedisError

from ..aio.center import AsyncTimeoutCenter
from ..center.runner import BROKEN
from ..center.waiting import passes
from ..model.results import Delivery

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds between two attempts: at first, and at most.
FIRST_PAUSE, MOST_PAUSE = 0.05, 1.0


class Settler:
    """Settles messages.

    patience: the seconds for which it is tried, while the broker cannot be used
    """

    def __init__(self, center: AsyncTimeoutCenter, patience: float) -> None:
        self._center = center
        self._patience = patience
        self._acks: list[tuple[Delivery, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def ack(self, message: Delivery) -> None:
        """Acknowledge a message, together with others that are acknowledged just now."""
        done = asyncio.get_running_loop().create_future()
        self._acks.append((message, done))
        if self._task is None:
            self._task = asyncio.create_task(self._ack_all())
        await done

    async def _ack_all(self) -> None:
        try:
            while self._acks:
                some, self._acks = self._acks, []
                messages = [message for message, _ in some]
                await self._try(partial(self._center.ack, messages), messages)
                for _, done in some:
                    if not done.done():
                        done.set_result(None)
        finally:
            self._task = None

    async def reject(self, message: Delivery, **how: Any) -> str | None:
        """Give a message back after a failure; returns its state, None if it is not held any
        more or that is not known."""
        return await self._try(partial(self._center.reject, message, **how), [message])

    async def release(self, message: Delivery) -> None:
        """Give a message back as it was."""
        await self._try(partial(self._center.release, message), [message])

    async def _try(self, settle: Callable[[], Awaitable[T]], messages: list[Delivery]) -> T | None:
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + self._patience, FIRST_PAUSE
        while True:
            began = loop.time()  # or one that fails because the process stood still is the last
            try:
                return await settle()
            except Exception as exc:
                if (
                    began + pause > until
                    or not isinstance(exc, (RedisError, *BROKEN))
                    or not passes(exc)
                ):
                    logger.warning(
                        "%d messages that were sent are sent again when their leases end: %s",
                        *(len(messages), exc),
                    )
                    return None
            await asyncio.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE)
