"""The time of a request. What has come when it is over counts, also if this process stood still
and has not read it yet."""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType
from typing import Any

#: Seconds for which the event loop may still read what has come when the time is over.
MOMENT = 0.01


class TimeLimit:
    """The time of a request, which a ``with`` block is. When it is over, the task is cancelled and
    the block ends; if the headers of an answer have come, only the reading of its rest ends.

    The loop reads what has come before that. If that is nothing, and this process stood still, the
    request has as much time again as its end was late, `seconds` at most: what stopped this process
    may have stopped the target too, or lost what it has sent, which its system then sends again.

    seconds: the time
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        #: the answer whose headers have come; it is closed when the time is over
        self.answer: Any = None
        #: whether the time is over
        self.is_over = False
        self._is_extended = self._has_cancelled = False
        self._cancelled_before = 0

    def __enter__(self) -> TimeLimit:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        if sys.version_info >= (3, 11):
            self._cancelled_before = task.cancelling()
        self._ends = self._loop.time() + self._seconds
        self._step: asyncio.Handle = self._loop.call_at(self._ends, self._read_on)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._step.cancel()
        if not self._has_cancelled:
            return False
        if sys.version_info >= (3, 11) and self._task.uncancel() > self._cancelled_before:
            return False  # somebody else has cancelled it, too
        return kind is not None and issubclass(kind, asyncio.CancelledError)

    def _read_on(self) -> None:
        """The time is over: let the loop read what has come."""
        late = self._loop.time() - self._ends
        self._step = self._loop.call_later(MOMENT, self._hand_over, late)

    def _hand_over(self, late: float) -> None:
        """Let the task have what was read in this turn of the loop. If it were cancelled now, it
        would not get that."""
        self._step = self._loop.call_soon(self._end, late)

    def _end(self, late: float) -> None:
        if self.answer is not None:
            self.is_over = True
            self.answer.close()
        elif late > MOMENT and not self._is_extended:
            self._is_extended = True
            self._step = self._loop.call_later(min(late, self._seconds), self._read_on)
        else:
            self.is_over = self._has_cancelled = True
            self._task.cancel()
