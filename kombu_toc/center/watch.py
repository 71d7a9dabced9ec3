"""Whether leases that have ended may be rolled back, as far as one who watches the server can tell.

A lease ends by the server's clock, and whoever holds the message renews it long before. A lease
that has ended tells of a dead holder only if holders could renew: not if the server stood still
for a while, was away or was restarted, nor if its clock was set forward. So whoever rolls back
has to have seen the server answer for a grace, without a gap and without a step of its clock; and
says until when by the server's clock, for what it asks for may be carried out much later.
"""

from __future__ import annotations

#: Seconds for which a server may be silent, or not be asked, before that counts as a gap.
SILENCE = 3.0

#: Seconds that a reply may take.
SLOW = 1.0

#: Seconds by which the server's clock may differ from what it should show: it was set otherwise.
STEP = 1.0

#: Seconds by which the server may be ahead of what it is known to be.
MARGIN = 0.5

#: Seconds of grace: a third of the visibility timeout, but for these bounds. Holders that could
#: not renew a lease try again every second.
LEAST_GRACE = 2.0
MAX_GRACE = 15.0


def grace_of(visibility: float) -> float:
    """Seconds for which the server has to have been watched, for leases of so many seconds."""
    return min(max(visibility / 3, LEAST_GRACE), MAX_GRACE)


def grace_after_step(visibility: float) -> float:
    """The same after a step of its clock: holders may not have noticed, and renew their leases when
    they are due."""
    return visibility / 3 + LEAST_GRACE


class Watch:
    """What has been seen of one server. Times are monotonic seconds, but for the server's."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._stepped = float("-inf")
        self._seen = 0.0
        #: bounds of how many microseconds the server's clock is ahead of the monotonic one
        self._low = self._high = 0

    def sample(self, server_us: int, sent: float, received: float) -> float:
        """Learn that the server's clock showed `server_us` between these moments.

        Returns by how many seconds it was set, if it was: forward, or back if negative.
        """
        low = server_us - int(received * 1_000_000)
        high = server_us - int(sent * 1_000_000)
        step = 0.0
        if self._since is not None:
            if low > self._high + STEP * 1_000_000:
                step = (low - self._high) / 1_000_000
            elif high < self._low - STEP * 1_000_000:
                step = (high - self._low) / 1_000_000
        if self._since is None or step or received - sent > SLOW or received - self._seen > SILENCE:
            self._since = received
        if step > 0:
            self._stepped = received
        self._low, self._high, self._seen = low, high, received
        return step

    def until(self, now: float, visibility: float, grace: float | None = None) -> int | None:
        """Microseconds since the epoch, by the server's clock, until when leases of so many seconds
        may be rolled back that have ended; None as long as it cannot be told.

        grace: seconds, instead of what suits such leases
        """
        if self._since is None or now - self._seen > SILENCE:
            return None
        if now < self._since + (grace_of(visibility) if grace is None else grace):
            return None
        if now < self._stepped + (grace_after_step(visibility) if grace is None else grace):
            return None
        return int((now + MARGIN) * 1_000_000) + self._low
