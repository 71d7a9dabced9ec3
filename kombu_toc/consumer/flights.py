"""Pops that are on their way, and those whose replies were lost: what they gave is not.

The process keeps them, and not a connection: who connects again asks for them by name. What nobody
asks for is given back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from ..center.center import TimeoutCenter
from ..center.requests import REMEMBER
from ..model.topic import Topic
from ..scripts.call import ScriptCall

#: Seconds after which messages are given back whose consumer has not asked for them: it finds them
#: where they were, then, or another one does.
KEPT = 0.5

#: Seconds after which a node of a Cluster is asked again.
AGAIN = 0.1

#: When the reply of a pop was lost that is still on its way.
NOT_LOST = float("inf")


@dataclass
class Flight:
    """A pop that was sent."""

    topic: Topic
    slots: tuple[int, ...] | None
    name: str
    visibility: float
    #: monotonic seconds when it left
    left: float = field(default_factory=time.monotonic)
    #: monotonic seconds when its reply was lost first; when it may be asked for again
    lost: float = NOT_LOST
    again: float = 0.0

    def recalling(self, center: TimeoutCenter) -> ScriptCall:
        """The call that delivers once more what it gave."""
        return self._call(center)

    def holding(self, center: TimeoutCenter) -> ScriptCall:
        """The call that renews the leases of what it gave, if it has run."""
        return self._call(center, bodies=False, remember=0)

    def returning(self, center: TimeoutCenter) -> ScriptCall:
        """The call that tells what it gave, so that it can be released."""
        return self._call(center, bodies=False)

    def _call(self, center: TimeoutCenter, **how: Any) -> ScriptCall:
        return center.commands.recall(self.topic, self.slots, self.name, **how)


class Flights:
    """Those of a process and a server.

    lock: makes a lock that is held for moments
    clock: monotonic seconds
    """

    def __init__(
        self, lock: Callable[[], Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lock = lock()
        self._clock = clock
        self._flying: dict[str, Flight] = {}
        self._lost: dict[str, Flight] = {}

    def __bool__(self) -> bool:
        return bool(self._flying or self._lost)

    def expect(self, flight: Flight) -> None:
        """It is on its way."""
        self._flying[flight.name] = flight

    def arrive(self, flight: Flight) -> None:
        """Its reply has come."""
        self._flying.pop(flight.name, None)

    def lose(self, flight: Flight) -> bool:
        """Its reply will not come. Whether what it gave can still be asked for."""
        now = self._clock()
        with self._lock:
            self._flying.pop(flight.name, None)
            if flight.lost == NOT_LOST:
                flight.lost = now
            else:
                flight.again = now + AGAIN
            if now > flight.lost + REMEMBER:
                return False
            self._lost[flight.name] = flight
            return True

    @property
    def any_lost(self) -> bool:
        return bool(self._lost)

    def take(self, topics: Collection[str]) -> list[Flight]:
        """Those that were lost of these topics: the caller asks for what they gave."""
        now = self._clock()
        return self._take(lambda one: one.topic.name in topics and now >= one.again)

    def take_kept(self) -> list[Flight]:
        """Those that nobody has asked for: the caller gives back what they gave."""
        now = self._clock()
        return self._take(lambda one: now >= one.lost + KEPT)

    def _take(self, which: Callable[[Flight], bool]) -> list[Flight]:
        with self._lock:
            taken = [one for one in self._lost.values() if which(one)]
            for one in taken:
                del self._lost[one.name]
        return taken

    def flying(self) -> list[Flight]:
        """Those whose replies have been on their way for so long that their leases are to be
        renewed."""
        now = self._clock()
        return [one for one in list(self._flying.values()) if now >= one.left + one.visibility / 6]

    def kept_until(self) -> float:
        """Monotonic seconds when the first of those that nobody asks for is to be given back."""
        return min((one.lost + KEPT for one in list(self._lost.values())), default=float("inf"))

    def shortest(self) -> float:
        """Seconds of the shortest lease of any."""
        return min((one.visibility for one in list(self._flying.values())), default=float("inf"))
