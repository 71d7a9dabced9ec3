"""Which queues a process consumes, as others can read it in Redis; and what is kept fresh there."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

#: Milliseconds for which it is known what this process consumes, unless it announces it again;
#: seconds after which it does; and within which it announces a change.
PRESENCE_MS = 60_000
PRESENCE_INTERVAL = 15.0
PRESENCE_CHANGE = 0.5

Name = TypeVar("Name", bound=Hashable)


class Presence:
    """The queues that a process consumes. Any thread may call this.

    lock: as :class:`.leases.Leases`; host, pid: of the process
    """

    def __init__(self, lock: AbstractContextManager[Any], host: str, pid: int) -> None:
        self._lock = lock
        self._process = [host, pid]
        #: queue -> the channels that consume it
        self._consumed: dict[str, set[Hashable]] = {}
        #: what is in Redis, and monotonic seconds when that is to be announced again
        self._announced = ""
        self._due = 0.0
        #: whether an announcement is on its way
        self._announcing = False

    def __bool__(self) -> bool:
        """Whether there is something to announce, now or later."""
        return bool(self._consumed or self._announced or self._announcing)

    def add(self, queue: str, holder: Hashable) -> None:
        """A channel consumes a queue."""
        with self._lock:
            self._consumed.setdefault(queue, set()).add(holder)
            self._due = 0.0

    def remove(self, queue: str, holder: Hashable) -> bool:
        """It consumes it no more. Returns whether it did."""
        with self._lock:
            holders = self._consumed.get(queue, set())
            if holder not in holders:
                return False
            holders.discard(holder)
            if not holders:
                del self._consumed[queue]
            self._due = 0.0
            return True

    def remove_all(self, holder: Hashable) -> bool:
        """A channel is closed. Returns whether it has consumed anything."""
        with self._lock:
            consumed = [queue for queue, holders in self._consumed.items() if holder in holders]
            for queue in consumed:
                self.remove(queue, holder)
            return bool(consumed)

    def end(self) -> bool:
        """The process ends, and consumes nothing any more. Returns whether Redis says otherwise,
        or is about to."""
        with self._lock:
            self._consumed.clear()
            self._due = 0.0
            return bool(self)

    def is_due(self, now: float) -> bool:
        """Whether it is to be announced."""
        return now >= self._due

    def next(self, now: float) -> tuple[str, list[str]]:
        """(what is to be announced, what it replaces); empty if the process consumes nothing.

        :meth:`announced` or :meth:`failed` is next.
        """
        with self._lock:
            queues = sorted(self._consumed)
            self._due = now + PRESENCE_INTERVAL
            self._announcing = True
        statement = json.dumps([*self._process, *queues]) if queues else ""
        return statement, [self._announced] if self._announced not in ("", statement) else []

    def announced(self, statement: str) -> None:
        """It is in Redis."""
        self._announced = statement
        self._announcing = False

    def failed(self) -> None:
        """It could not be announced: soon again."""
        self._due = 0.0
        self._announcing = False


class KeptFresh(Generic[Name]):
    """Names that are kept from going stale until their last holder leaves them. Any thread may call
    this.

    lock: as :class:`.leases.Leases`
    choose: picks one of several holders' lifetimes
    """

    def __init__(
        self, lock: AbstractContextManager[Any], choose: Callable[[Iterable[int]], int]
    ) -> None:
        self._lock = lock
        self._choose = choose
        #: name -> who holds it -> milliseconds it lives without being refreshed
        self._held: dict[Name, dict[Hashable, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def __contains__(self, name: Name) -> bool:
        return name in self._held

    def keep(self, name: Name, lifetime_ms: int, holder: Hashable) -> None:
        """Keep it until this holder leaves it, and every other."""
        with self._lock:
            self._held.setdefault(name, {})[holder] = lifetime_ms

    def leave(self, name: Name, holder: Hashable) -> bool:
        """Returns whether it was this holder that has kept it, and nobody else does."""
        with self._lock:
            holders = self._held.get(name)
            if holders is None or holder not in holders:
                return False
            del holders[holder]
            if not holders:
                self._held.pop(name, None)
            return not holders

    def leave_all(self, holder: Hashable) -> None:
        """A channel is closed."""
        with self._lock:
            for name in list(self._held):
                self.leave(name, holder)

    def forget(self, name: Name) -> None:
        """It is deleted: nobody holds it any more."""
        with self._lock:
            self._held.pop(name, None)

    def forget_where(self, of: Callable[[Name], bool]) -> None:
        """Those of which `of` is true are deleted."""
        with self._lock:
            for name in [name for name in self._held if of(name)]:
                del self._held[name]

    def lifetimes(self) -> dict[Name, int]:
        """The milliseconds of each that is held.

        Of copies: the lock keeps other threads out, but not a channel that is collected as garbage
        while this runs, and leaves what it held.
        """
        with self._lock:
            chosen = {}
            for name, holders in self._held.copy().items():
                if lifetimes := list(holders.values()):
                    chosen[name] = self._choose(lifetimes)
            return chosen
