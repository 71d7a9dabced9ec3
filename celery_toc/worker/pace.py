"""How soon a worker's processes come free, as far as its recent tasks tell."""

from __future__ import annotations

from collections.abc import Hashable, Set

#: What the latest task counts for in the mean.
WEIGHT = 0.2


class Pace:
    """The mean run time of a worker's tasks, and since when those run that it executes now.

    Times are in monotonic seconds and are handed in.
    """

    def __init__(self) -> None:
        #: seconds that a task takes; None until one has ended
        self.mean: float | None = None
        self._began: dict[Hashable, float] = {}

    def took(self, seconds: float) -> None:
        """A task has ended that took that long."""
        if self.mean is None:
            self.mean = seconds
        else:
            self.mean += WEIGHT * (seconds - self.mean)

    def see(self, executing: Set[Hashable], now: float) -> None:
        """Learn which tasks are executing."""
        began = self._began
        for task in began.keys() - executing:
            self.took(now - began.pop(task))
        for task in executing - began.keys():
            began[task] = now

    def soon_free(self, seconds: float, processes: int, now: float) -> int:
        """How many tasks more the processes will have begun within so many seconds.

        A process whose task has taken longer than the mean is expected to take as long again:
        long tasks are what nobody must wait behind. None are if no task has ended yet.
        """
        mean = self.mean
        if mean is None:
            return 0
        mean = max(mean, 1e-6)
        rate = max(processes - len(self._began), 0) / mean
        for since in self._began.values():
            age = now - since
            rate += 1 / (age if age > mean else mean)
        return int(seconds * rate)
