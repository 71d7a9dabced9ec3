"""Estimates how soon a worker's processes become idle, from the run times of recent tasks."""

from __future__ import annotations

from collections.abc import Hashable, Set

#: The weight of the latest task in the moving average.
WEIGHT = 0.2


class Pace:
    """The mean run time of a worker's tasks, and when its current tasks started.

    Times are monotonic seconds and are passed in.
    """

    def __init__(self) -> None:
        #: mean run time in seconds; None until a task has ended
        self.mean: float | None = None
        self._began: dict[Hashable, float] = {}

    def took(self, seconds: float) -> None:
        """Record the run time of a task that has ended."""
        if self.mean is None:
            self.mean = seconds
        else:
            self.mean += WEIGHT * (seconds - self.mean)

    def see(self, executing: Set[Hashable], now: float) -> None:
        """Record which tasks are executing now."""
        began = self._began
        for task in began.keys() - executing:
            self.took(now - began.pop(task))
        for task in executing - began.keys():
            began[task] = now

    def soon_free(self, seconds: float, processes: int, now: float) -> int:
        """Estimate how many more tasks the processes start within `seconds`.

        A task that has run for longer than the mean is expected to run for as long again, so that
        nothing is fetched to wait behind a long task. Returns 0 until a task has ended.
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
