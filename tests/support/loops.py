"""Event loops for tests."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

R = TypeVar("R")

#: Seconds for which a loop may stand still. What blocks one in a test does so for longer.
STILL = 0.4

#: Seconds between two looks at a watched loop, and the most that counts between them: a machine
#: that stands still holds up the looks as well.
LOOK, MOST = 0.01, 0.04


def in_loop(coroutine: Coroutine[Any, Any, R]) -> R:
    """The result of a coroutine, in a loop of its own."""
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def time_that_passes() -> list[float]:
    """Seconds by which the clock of the loop that runs is ahead, from now on: they can be added."""
    loop, passed = asyncio.get_running_loop(), [0.0]
    clock = loop.time
    loop.time = lambda: clock() + passed[0]  # type: ignore[method-assign]
    return passed


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    in_loop(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


class Watchdog(threading.Thread):
    """Looks at the thread of a loop: for how long, at most, that ran or was blocked between two
    turns. Time in which the thread wanted to run, and had no processor, does not count."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.turns = 0
        self.longest = 0.0
        self.stack = ""
        self._loops_thread = threading.get_ident()
        self._waits = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._ended = threading.Event()

    def run(self) -> None:
        going = True
        while going:
            turns, queued, stood, stack = self.turns, self._queued(), 0.0, ""
            before = time.monotonic()
            while (going := not self._ended.wait(LOOK)) and turns == self.turns:
                now = time.monotonic()
                stood += min(now - before, MOST)
                before = now
                if stood > STILL / 2 and not stack:
                    frame = sys._current_frames()[self._loops_thread]  # noqa: SLF001 - as its pages say
                    stack = "".join(traceback.format_stack(frame))
            held = stood - (self._queued() - queued)
            if held > self.longest:
                self.longest, self.stack = held, stack

    def _queued(self) -> float:
        """Seconds for which the loop's thread has waited for a processor; 0 if nobody counts."""
        try:
            return int(self._waits.read_text().split()[1]) / 1e9
        except OSError:
            return 0.0

    def end(self) -> None:
        self._ended.set()
        self.join()


@asynccontextmanager
async def watched() -> AsyncIterator[None]:
    """Fail if the loop stands still while the body runs, and show where it did."""
    dog = Watchdog()

    async def turn() -> None:
        while True:
            dog.turns += 1
            await asyncio.sleep(0.001)

    task = asyncio.create_task(turn())
    dog.start()
    try:
        await asyncio.sleep(0)
        yield
        await asyncio.sleep(2 * LOOK)  # it may have been blocked to the end
    finally:
        task.cancel()
        dog.end()
    assert dog.longest < STILL, f"the loop stood still for {dog.longest:.1f} s\n{dog.stack}"
