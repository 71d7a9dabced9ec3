"""Calls that must run and could not: they settle messages, and are repeated until they have run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ..scripts.call import ScriptCall


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
