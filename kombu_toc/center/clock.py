"""Redis's clock, as can be told from here without asking: from what replies have said of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

# -- tells when a server's clock is set
#
# Scripts look at leases by the server's clock, and keep there since when they were looked at
# without a gap (``upkeep.lua``). A clock that is set forward looks to them like a gap, but
# it takes longer until all leases are renewed: their holders may not have noticed. A process that
# has watched the clock beside its own knows. One that was not answered knows that the gap was the
# server's, and not that nobody was there to look.

#: Seconds by which the server's clock may differ from the expected time. More counts as a step.
STEP = 1.0

#: Seconds within which holders try again that could not renew a lease.
RENEWED = 2.0

#: Seconds for which a process says that the server was away.
TELL = 5.0

#: What a process knows when it looks at leases, as ``upkeep.lua`` is told: that nothing
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


# -- redis's clock, as can be told from here without asking
#
# A reply says what the clock showed between the moments when its command left and when the reply
# came. So each is a bound from either side, and the best bound of the last seconds is used: clocks
# drift, and may be set.

#: Seconds for which samples count.
CLOCK_WINDOW = 5.0

#: Seconds after which a server that was not heard of does not count any more.
SILENCE = 60.0


#: Seconds for which it is known what a server's clock has shown.
REMEMBERED = 600.0


class Steps:
    """Finds out that a server's clock was set back, or that another server with a clock behind has
    taken its place, whatever becomes of the connections."""

    def __init__(self) -> None:
        #: what the clock was ahead of ours at least, in microseconds; monotonic seconds since when
        #: that is known, and when the server was last heard of
        self._ahead, self._since, self._heard = 0, 0.0, float("-inf")

    def back(self, server_us: int, left: float, came: float) -> float:
        """By how many seconds the clock has gone back since it was last heard of; 0 for not at all.

        server_us: what it shows in a reply
        left, came: monotonic seconds when the command left, and when the reply came
        """
        ahead = server_us - int(came * 1_000_000)
        at_most = server_us - int(left * 1_000_000)
        back = 0.0
        if came < self._heard + REMEMBERED and self._ahead - at_most >= STEP * 1_000_000:
            back = (self._ahead - at_most) / 1_000_000
        # Clocks drift: what was known of it for long is not.
        if back or ahead > self._ahead or came > self._since + CLOCK_WINDOW:
            self._ahead, self._since = ahead, came
        self._heard = came
        return back


class ServerClock:
    """Redis's clock as seen by who waits for a time: never ahead of it. Of several servers, whose
    clocks may differ, it is never ahead of any."""

    def __init__(self) -> None:
        #: server -> monotonic seconds, and by how much its clock was ahead of them then
        self._samples: dict[Hashable, deque[tuple[float, int]]] = {}
        self._ahead: int | None = None

    def sample(self, server_us: int, monotonic: float, where: Hashable = None) -> None:
        """Learn that a server's clock had shown `server_us` by `monotonic`.

        where: which server it is
        """
        ahead = server_us - int(monotonic * 1_000_000)
        samples = self._samples.get(where) or self._samples.setdefault(where, deque())
        while samples and (samples[0][0] < monotonic - CLOCK_WINDOW or samples[0][1] <= ahead):
            samples.popleft()
        while samples and samples[-1][1] <= ahead:
            samples.pop()
        samples.append((monotonic, ahead))
        slowest = samples[0][1]
        if len(self._samples) > 1:
            for other, lately in list(self._samples.items()):
                if lately[-1][0] < monotonic - SILENCE:
                    del self._samples[other]
                else:
                    slowest = min(slowest, lately[0][1])
        self._ahead = slowest

    def forget(self, where: Hashable = None) -> None:
        """Another server may answer from now on, or its clock was set."""
        self._samples.pop(where, None)
        self._ahead = min((lately[0][1] for lately in self._samples.values()), default=None)

    @property
    def known(self) -> bool:
        return self._ahead is not None

    def at(self, monotonic: float) -> int:
        """Microseconds since the epoch by the slowest of the clocks, at the latest."""
        return int(monotonic * 1_000_000) + (self._ahead or 0)

    def until(self, server_us: int, monotonic: float) -> float:
        """Seconds from `monotonic` until the clock shows `server_us`."""
        return (server_us - self.at(monotonic)) / 1_000_000


class SendersClock:
    """Redis's clock as seen by who says when something is to happen: never behind it.

    A countdown then does not wait for its message to arrive. How much that is: of tasks that are
    sent one at a time, the median action time is 0.23 ms after what was asked for instead of
    0.32 ms (one machine), or 0.35 instead of 0.65 (through a proxy); in a tight loop, nothing. It
    costs a microsecond for each message.

    Threads may share one: what they lose of each other's samples makes it no worse than unknown.
    """

    def __init__(self) -> None:
        #: the lowest of this half of the window, and of the one before; None if there is none
        self._ahead: int | None = None
        self._before: int | None = None
        self._ends = 0.0

    def sample(self, server_us: int, monotonic: float) -> None:
        """Learn that the server's clock showed `server_us` after `monotonic`."""
        half = CLOCK_WINDOW / 2
        ahead = server_us - int(monotonic * 1_000_000)
        if monotonic >= self._ends:
            self._before = self._ahead if monotonic < self._ends + half else None
            self._ahead = ahead
            self._ends = monotonic + half
        elif self._ahead is None or ahead < self._ahead:
            self._ahead = ahead

    def forget(self) -> None:
        """Another server may answer from now on."""
        self._ahead = self._before = None
        self._ends = 0.0

    def at(self, monotonic: float) -> int | None:
        """Microseconds since the epoch by the server's clock, at the earliest; None if nothing
        was heard of it lately."""
        ahead, before = self._ahead, self._before
        if ahead is None or monotonic >= self._ends + CLOCK_WINDOW / 2:
            return None
        if before is not None and monotonic < self._ends and before < ahead:
            ahead = before
        return int(monotonic * 1_000_000) + ahead
