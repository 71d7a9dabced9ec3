"""Whether the pool goes first: what was delivered starts before anything is said to Redis."""

from __future__ import annotations

#: Seconds for which everything else waits until the pool has sent what is delivered, at most.
POOL_FIRST = 0.02


class PoolFirst:
    """Which turns of the loop are for the pool.

    The server would take the processor from the processes that are to start a task. So after a
    delivery one turn passes in which nothing is sent; but not while there is a backlog, which is
    worked off with fewer turns.
    """

    def __init__(self) -> None:
        #: turns of the loop, and that of the latest delivery
        self.turn = 0
        self.delivered_in = -1
        #: monotonic seconds since when each turn has been for the pool; None if the latest was not
        self._since: float | None = None

    @property
    def delivered_now(self) -> bool:
        """Whether something was delivered in this turn: the pool's own part of the turn may have
        been over by then."""
        return self.turn == self.delivered_in

    @property
    def may_have_tasks(self) -> bool:
        """Whether the pool may still have to send something that was delivered."""
        return self.turn <= self.delivered_in + 1

    def pass_by(self) -> None:
        """This turn is not the pool's."""
        self._since = None

    def takes_turn(self, now: float, backlog: bool) -> bool:
        """Whether this turn is the pool's.

        now: monotonic seconds
        backlog: whether more is due than there is room for
        """
        if not self.may_have_tasks:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        if backlog or now >= self._since + POOL_FIRST:
            self._since = None
            return False
        return True
