"""What runs in the event loop of a server, beside its requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from ..aio.center import AsyncTimeoutCenter

logger = logging.getLogger(__name__)

#: Runs until an event is set.
Run = Callable[[asyncio.Event], Awaitable[None]]

#: Makes that for a center.
Beside = Callable[[AsyncTimeoutCenter], Run]


class Background:
    """What runs from the beginning of an application to its end."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs = tuple(runs)
        self._until: asyncio.Event | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Run them."""
        if self._until is None:
            self._until = until = asyncio.Event()
            self._tasks = [asyncio.create_task(_guarded(run, until)) for run in self._runs]

    async def end(self) -> None:
        """Have them end, and wait until they have."""
        if self._until is not None:
            self._until.set()
            if self._tasks:
                await asyncio.wait(self._tasks)
            self._until, self._tasks = None, []


async def _guarded(run: Run, until: asyncio.Event) -> None:
    try:
        await run(until)
    except Exception:
        logger.exception("what runs beside the requests has failed")
