"""Event loops for tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

R = TypeVar("R")


def in_loop(coroutine: Coroutine[Any, Any, R]) -> R:
    """The result of a coroutine, in a loop of its own."""
    return asyncio.run(asyncio.wait_for(coroutine, 60))


class Watchdog:
    """How long, at most, a loop did not turn."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.turns = 0


@asynccontextmanager
async def watched() -> AsyncIterator[Watchdog]:
    """Measure the loop while the body runs."""
    dog = Watchdog()

    async def watch() -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            now = time.monotonic()
            dog.longest = max(dog.longest, now - before)
            dog.turns += 1
            before = now

    task = asyncio.create_task(watch())
    await asyncio.sleep(0)
    try:
        yield dog
    finally:
        await asyncio.sleep(0.002)
        task.cancel()
