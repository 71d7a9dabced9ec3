"""Which process of a fleet keeps all topics up: what one of them knows of that, and when it asks.

Nothing here waits or asks the server; times are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Hashable

#: Seconds for which a process is elected unless it is again. The others try when that has passed:
#: with the time between two passes it is no gap to who watches leases (``scripts/upkeep.lua``).
LEASE = 2.0

#: Seconds between attempts, at most.
ATTEMPT_INTERVAL = 2.0

NEVER = float("inf")


class Election:
    """One process's part in it. Any thread may call this."""

    def __init__(self) -> None:
        #: who wants it to take part -> seconds between two passes
        self._wanted: dict[Hashable, float] = {}
        #: monotonic seconds of the next attempt to be elected
        self.due = NEVER
        #: until when somebody else is known to be elected, and this process
        self._other_until = 0.0
        self._elected_until = 0.0

    def want(self, who: Hashable, interval: float) -> None:
        """Somebody consumes here: take part, with a pass every so many seconds if elected."""
        self._wanted[who] = interval
        if self.due == NEVER:
            self.due = 0.0

    def unwant(self, who: Hashable) -> bool:
        """They consume no more. Returns whether anybody else does."""
        self._wanted.pop(who, None)
        if not self._wanted:
            self.due = NEVER
        return self.wanted

    @property
    def wanted(self) -> bool:
        return bool(self._wanted)

    @property
    def interval(self) -> float:
        """Seconds between two passes."""
        return min(self._wanted.values(), default=0.0)

    def again(self, at: float) -> None:
        """Make the next attempt at that time."""
        self.due = at

    def result(self, mine: bool, somebody: bool, asked: float, answered: float) -> None:
        """An attempt was made.

        mine: whether this process is elected; somebody: whether any is
        asked, answered: when the server was asked, and when its answer came
        """
        if mine:
            self._elected_until = asked + LEASE
        elif somebody:
            self._other_until = answered + LEASE + ATTEMPT_INTERVAL

    def resign(self) -> None:
        """This process is elected no longer."""
        self._elected_until = 0.0

    def elected(self, now: float) -> bool:
        """Whether it is this process, as far as it knows."""
        return now < self._elected_until

    def known(self, now: float) -> bool:
        """Whether some process is known to be elected."""
        return self.elected(now) or now < self._other_until

    def renewal_due(self, now: float) -> bool:
        """Whether this process is to be elected again, to go on."""
        return now >= self._elected_until - LEASE * 2 / 3
