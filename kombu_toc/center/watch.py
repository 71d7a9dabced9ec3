"""Tells when a server's clock is set.

Scripts look at leases by the server's clock, and keep there since when they were looked at without
a gap (``scripts/upkeep.lua``). A clock that is set forward looks to them like a gap, but it takes
longer until all leases are renewed: their holders may not have noticed. A process that has watched
the clock beside its own knows. One that was not answered knows that the gap was the server's, and
not that nobody was there to look.
"""

from __future__ import annotations

#: Seconds by which the server's clock may differ from the expected time. More counts as a step.
STEP = 1.0

#: Seconds within which holders try again that could not renew a lease.
RENEWED = 2.0

#: Seconds for which a process says that the server was away.
TELL = 5.0

#: What a process knows when it looks at leases, as ``scripts/upkeep.lua`` is told: that nothing
#: keeps it from rolling back what has ended; that it must not; that the server was away just now.
MAY, MAY_NOT, WAS_AWAY = -1, -2, -3


class Watch:
    """What has been seen of one server's clock. Times are monotonic seconds, except the server's
    own."""

    def __init__(self) -> None:
        self._stepped = float("-inf")
        self._away = float("-inf")
        self._unanswered = False
        #: bounds of how many microseconds the server's clock is ahead of the monotonic one
        self._low: int | None = None
        self._high = 0

    def sample(self, server_us: int, sent: float, received: float) -> float:
        """Learn that the server's clock showed `server_us` between these moments.

        Returns the size of a step of the server's clock in seconds: positive if the clock was set
        forward, negative if it was set back, 0 if there was none.
        """
        low = server_us - int(received * 1_000_000)
        high = server_us - int(sent * 1_000_000)
        step = 0.0
        if self._low is not None:
            if low > self._high + STEP * 1_000_000:
                step = (low - self._high) / 1_000_000
            elif high < self._low - STEP * 1_000_000:
                step = (high - self._low) / 1_000_000
        if step > 0:
            self._stepped = received
        if self._unanswered or received - sent > STEP:
            self._away, self._unanswered = received, False
        self._low, self._high = low, high
        return step

    def server_us(self, now: float) -> int:
        """What the server's clock shows, as far as is known."""
        return int(now * 1_000_000) + (self._low or 0)

    def missed(self) -> None:
        """Learn that the server has not answered."""
        self._unanswered = True

    def may(self, now: float, visibility: float) -> int:
        """Whether what has ended may be rolled back: one of the numbers above."""
        if not self.steady(now, visibility):
            return MAY_NOT
        return WAS_AWAY if self._unanswered or now < self._away + TELL else MAY

    def steady(self, now: float, visibility: float) -> bool:
        """Whether leases were renewed since the clock was set forward, as holders do before a third
        of a lease has passed.

        visibility: how long leases last, in seconds
        """
        return now >= self._stepped + visibility / 3 + RENEWED
