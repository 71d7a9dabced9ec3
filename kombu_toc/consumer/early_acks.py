"""Messages that were acknowledged while their tasks run on.

What such a message holds, a place of a limited queue, is held until its task has ended: only then
is it acknowledged for good. Its owner says what is executed (:class:`.policy.WorkerPolicy`), and is
asked, instead of telling each end: a task ends in many ways. So nothing is held for a task that
nobody executes.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

from ..model.results import Delivery
from .policy import WorkerPolicy


class EarlyAcks:
    """Those of a process. Any thread may call this.

    lock: held for moments, reentrant; see :class:`.holdings.Holdings`
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        #: by who executes them, and by what tells one execution from others
        self._running: dict[WorkerPolicy, dict[Hashable, Delivery]] = {}
        #: whether the process ends, and whatever it executes with it
        self.process_ends = False

    def __bool__(self) -> bool:
        return bool(self._running)

    def add(self, policy: WorkerPolicy, execution: Hashable, delivery: Delivery) -> None:
        """A message is acknowledged whose task runs on."""
        with self._lock:
            self._running.setdefault(policy, {})[execution] = delivery

    def take_ended(self) -> list[Delivery]:
        """The messages whose tasks have ended: the caller acknowledges them for good."""
        taken = []
        with self._lock:
            for policy, running in list(self._running.items()):
                for execution in list(policy.ended(running.keys())):
                    taken.append(running.pop(execution))
                if not running:
                    del self._running[policy]
        return taken

    def take_all(self) -> list[Delivery]:
        """All of them, when the process ends."""
        with self._lock:
            taken = [one for running in self._running.values() for one in running.values()]
            self._running.clear()
        return taken

    def drop(self, delivery: Delivery) -> bool:
        """It is not to be acknowledged once more. Whether it was."""
        with self._lock:
            for policy, running in self._running.items():
                for execution, one in running.items():
                    if one is delivery:
                        del running[execution]
                        if not running:
                            del self._running[policy]
                        return True
        return False
