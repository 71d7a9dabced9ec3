"""Acknowledgements and other calls that leave together, and when they leave."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any

from ..model.results import Delivery
from ..scripts.call import ScriptCall

#: While there is a backlog, acknowledgements wait for the next pop: so many at most, and for so
#: many seconds.
MAX_ACKS = 32
ACKS_WAIT = 0.003


class Settlements:
    """What is to leave with the next turn of the loop. Any thread may add to it."""

    def __init__(self) -> None:
        self.acks: deque[Delivery] = deque()
        self.calls: deque[ScriptCall] = deque()
        #: what was acknowledged while its task runs on, and is to be marked, and whether it is dead
        #: if that is lost; each by its identity
        self.marks: dict[int, tuple[Delivery, bool]] = {}
        #: what has left something for which others may wait
        self.freed: deque[Delivery] = deque()
        #: monotonic seconds when acknowledgements leave that wait for company
        self.leave_at: float | None = None

    def __bool__(self) -> bool:
        return bool(self.acks or self.calls or self.marks)

    def may_wait(self, now: float) -> bool:
        """Whether what there is may wait for the next pop to take it along.

        Acknowledgements may, for moments from when this is first asked. Rejections do not, for
        another consumer may wait for the message.
        """
        if self.calls or len(self.acks) + len(self.marks) >= MAX_ACKS:
            return False
        if self.leave_at is None:
            self.leave_at = now + ACKS_WAIT
        return now < self.leave_at

    def leave_now(self) -> None:
        """What waits is not to wait any longer."""
        self.leave_at = 0.0

    def take(self) -> tuple[list[Delivery], list[ScriptCall]]:
        """What leaves now: deliveries to acknowledge, and calls."""
        self.leave_at = None
        return _drained(self.acks), _drained(self.calls)

    def take_freed(self) -> list[Delivery]:
        """What has left something since this was last asked."""
        return _drained(self.freed)

    def take_marks(self) -> list[tuple[Delivery, bool]]:
        """What leaves now to be marked."""
        taken = []
        with suppress(KeyError):  # another thread has taken one out
            while self.marks:
                taken.append(self.marks.popitem()[1])
        return taken


def _drained(queue: deque[Any]) -> list[Any]:
    # Others may be adding to it.
    return [queue.popleft() for _ in range(len(queue))]
