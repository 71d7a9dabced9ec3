"""Decides whether leases that have ended may be rolled back.

A lease ends by the server's clock, and the holder of the message renews it long before. A lease
that has ended proves that its holder is dead only if holders could renew leases. They could not if
the server stood still for a while, was away or was restarted, or if its clock was set forward. So
a process may roll leases back only if it has seen the server reply for a grace period, without a
gap and without a step of the server's clock. It also says until when leases must have ended, by
the server's clock: the server may run the call much later.
"""

from __future__ import annotations

#: Seconds for which a server may be silent, or not be asked. More counts as a gap.
SILENCE = 3.0

#: Seconds that a reply may take.
SLOW = 1.0

#: Seconds by which the server's clock may differ from the expected time. More counts as a step.
STEP = 1.0

#: Seconds by which the server's clock may be ahead of its lower bound.
MARGIN = 0.5

#: Bounds of the grace period, in seconds; within them it is a third of the visibility timeout.
#: Holders that could not renew a lease try again every second.
LEAST_GRACE = 2.0
MAX_GRACE = 15.0


def grace_of(visibility: float) -> float:
    """Grace period: seconds for which the server must have been watched.

    visibility: how long leases last, in seconds
    """
    return min(max(visibility / 3, LEAST_GRACE), MAX_GRACE)


def slack_of(visibility: float) -> float:
    """Seconds for which a lease must have ended before it is rolled back. A server may stand still
    for as long as :data:`SILENCE` without a gap that anybody sees. Holders renew a lease before a
    third of it has passed; of a short lease too little is left then to outlast that silence."""
    return max(SILENCE - visibility * 2 / 3, 0.0)


def grace_after_step(visibility: float) -> float:
    """Grace period after a step of the server's clock. Holders may not have noticed the step, and
    renew their leases only when these are due."""
    return visibility / 3 + LEAST_GRACE


class Watch:
    """What has been seen of one server. Times are monotonic seconds, except the server's own."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._stepped = float("-inf")
        self._seen = 0.0
        #: bounds of how many microseconds the server's clock is ahead of the monotonic one
        self._low = self._high = 0

    def sample(self, server_us: int, sent: float, received: float) -> float:
        """Learn that the server's clock showed `server_us` between these moments.

        Returns the size of a step of the server's clock in seconds: positive if the clock was set
        forward, negative if it was set back, 0 if there was none.
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
        """Until when leases must have ended to be rolled back; None if none may be.

        visibility: how long leases last, in seconds
        grace: grace period in seconds, instead of the one for such leases

        Returns microseconds since the epoch by the server's clock.
        """
        if self._since is None or now - self._seen > SILENCE:
            return None
        if now < self._since + (grace_of(visibility) if grace is None else grace):
            return None
        if now < self._stepped + (grace_after_step(visibility) if grace is None else grace):
            return None
        slack = slack_of(visibility) if grace is None else 0.0
        return int((now + MARGIN - slack) * 1_000_000) + self._low
