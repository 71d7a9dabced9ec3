"""Messages that were acknowledged while their tasks run on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from ..model.results import Delivery
from ..scripts.call import ScriptCall
from .policy import WorkerPolicy

# -- messages that were acknowledged while their tasks run on
#
# What such a message holds, a place of a limited queue, is held until its task has ended: only then
# is it acknowledged for good. Its owner says what is executed (:class:`.policy.WorkerPolicy`), and
# is
# asked, instead of telling each end: a task ends in many ways. So nothing is held for a task that
# nobody executes.


class EarlyAcks:
    """Those of a process. Any thread may call this.

    lock: held for moments, reentrant; see :class:`.holdings.HeldResources`
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        #: by who executes them, and by what tells one execution from others
        self._running: dict[WorkerPolicy, dict[Hashable, Delivery]] = {}
        #: by the identity of a delivery: what is to be called when its task has ended
        self._on_end: dict[int, Callable[[bool], Any]] = {}
        #: whether the process ends, and whatever it executes with it
        self.process_ends = False

    def __bool__(self) -> bool:
        return bool(self._running)

    def add(
        self,
        policy: WorkerPolicy,
        execution: Hashable,
        delivery: Delivery,
        on_end: Callable[[bool], Any] | None = None,
    ) -> None:
        """A message is acknowledged whose task runs on.

        on_end: is called once: with True when that has ended, or the process with it, and the
            message is acknowledged for good; with False when its lease has ended before
        """
        with self._lock:
            self._running.setdefault(policy, {})[execution] = delivery
            if on_end is not None:
                self._on_end[id(delivery)] = on_end

    def take_ended(self) -> list[Delivery]:
        """The messages whose tasks have ended: the caller acknowledges them for good."""
        taken = []
        with self._lock:
            for policy, running in list(self._running.items()):
                for execution in list(policy.ended(running.keys())):
                    taken.append(running.pop(execution))
                if not running:
                    del self._running[policy]
        self._tell(taken)
        return taken

    def _tell(self, deliveries: list[Delivery], is_over: bool = True) -> None:
        if self._on_end:
            for delivery in deliveries:
                if (on_end := self._on_end.pop(id(delivery), None)) is not None:
                    on_end(is_over)

    def take_all(self) -> list[Delivery]:
        """All of them, when the process ends."""
        with self._lock:
            taken = [one for running in self._running.values() for one in running.values()]
            self._running.clear()
        self._tell(taken)
        return taken

    def drop(self, delivery: Delivery, *, is_over: bool = False) -> bool:
        """It is not to be acknowledged once more. Whether it was.

        is_over: whether it is acknowledged for good, by somebody else
        """
        with self._lock:
            found = self._take(delivery)
        if found:
            self._tell([delivery], is_over)
        return found

    def _take(self, delivery: Delivery) -> bool:
        for policy, running in self._running.items():
            for execution, one in running.items():
                if one is delivery:
                    del running[execution]
                    if not running:
                        del self._running[policy]
                    return True
        return False


# -- calls that must run and could not


class OwedCalls:
    """The calls that a process owes, in order. Any thread may call this, without a lock.

    Each may run twice without harm. Its length counts those that are being tried as well.
    """

    def __init__(self) -> None:
        self._waiting: deque[ScriptCall] = deque()
        self._trying = 0

    def __len__(self) -> int:
        return len(self._waiting) + self._trying

    def add(self, calls: Iterable[ScriptCall]) -> None:
        """Run these as well."""
        self._waiting.extend(calls)

    def take(self) -> list[ScriptCall]:
        """Those that are to be tried now; :meth:`tried` is next."""
        self._trying = number = len(self._waiting)
        return [self._waiting.popleft() for _ in range(number)]

    def tried(self, again: Iterable[ScriptCall] = ()) -> None:
        """What was taken was tried; these are to be tried again, before all others."""
        self._waiting.extendleft(reversed(list(again)))
        self._trying = 0
