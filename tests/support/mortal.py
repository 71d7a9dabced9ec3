"""A worker that kills itself now and then while it takes a firing of a schedule: before or after
any command that it sends for that, before the task begins, and after."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Sequence
from typing import Any

from celery_toc.worker import schedules


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Mortal:
    """An executor in whose place a worker's is put."""

    def __init__(self, executor: Any, left: int, sends_last: bool) -> None:
        self._executor, self._left, self._sends_last = executor, left, sends_last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def replies(self, calls: Sequence[Any]) -> Any:
        if not self._left and not self._sends_last:
            die()
        found = self._executor.replies(calls)
        if not self._left:
            die()
        self._left -= 1
        return found


def install(share: float) -> None:
    """Have this process die at that share of the firings, or batches of them, that it takes."""

    def mortal(taking: Callable[..., Any]) -> Callable[..., Any]:
        def take(by: Any, *args: Any) -> Any:
            if random.random() >= share:
                return taking(by, *args)
            runner = getattr(by, "_recurring", by)._runner
            executor = runner.executor
            # The third command is not sent: it lives until its task is about to begin.
            runner.executor = Mortal(executor, random.randrange(3), random.random() < 0.5)
            try:
                found = taking(by, *args)
            finally:
                runner.executor = executor
            if random.random() < 0.5:
                die()
            return found

        return take

    schedules.take = mortal(schedules.take)
    schedules.Together.take = mortal(schedules.Together.take)  # type: ignore[method-assign]
