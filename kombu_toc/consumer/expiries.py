"""When queues that this process has used may expire: somebody has to look then.

Nothing here asks a server: the time is an argument.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


class Expiries:
    """When each queue may expire, as far as this process knows. Any thread may call this.

    lock: as :class:`.leases.Leases`
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        #: queue -> monotonic seconds
        self._at: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._at)

    def note(self, queue: str, at: float) -> None:
        """It was used just now, and expires at that time, in monotonic seconds, if nobody uses it
        until then."""
        with self._lock:
            self._at[queue] = at

    def next(self, now: float, retry: float) -> float:
        """Monotonic seconds when to look next, after a look that begins now.

        retry: seconds after which to look again for those whose time has come, if the look fails
        """
        with self._lock:
            return min(
                (at if at > now else now + retry for at in self._at.values()),
                default=float("inf"),
            )

    def take(self, now: float) -> bool:
        """Whether it is time to look; if so, it has been for those of which it was."""
        with self._lock:
            passed = [queue for queue, at in self._at.items() if at <= now]
            for queue in passed:
                del self._at[queue]
            return bool(passed)
