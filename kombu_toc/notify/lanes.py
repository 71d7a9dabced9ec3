"""What is under way to each target, and what may be fetched for it. Times are handed in."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf

from ..client.programs import one_line
from .hosts import MOST_WAITING, Hosts
from .verdicts import shown

logger = logging.getLogger(__name__)

#: Seconds that a lane waits for more room than a little: so a fetch brings several messages.
GATHER = 0.01

#: Bytes of messages that may be under way to one target; and of what compressed ones of these have
#: become, beside one.
MOST_BYTES = 32 << 20

#: Seconds that a message of a queue with a rate waits for its turn here, at most: its rate may have
#: been another one, and the clock that it is counted by may have been set.
MOST_TURN = 1.0

#: Seconds between two lines in the log about a target that fails.
SAY_EVERY = 60.0


class Lane:
    """A queue and its target.

    room: how many of its messages may be under way in this process
    on_room: called when it may be fetched for again, after it could not be, and when it must not be
        any more
    """

    def __init__(
        self, queue: str, target: str, room: int, on_room: Callable[[], None] = lambda: None
    ) -> None:
        self.queue = queue
        self.target = target
        self.limit = room
        self.on_room = on_room
        self.under_way = 0
        #: those that messages name; what waits for these leaves its room to others
        self.hosts = Hosts(self._tell)
        self._bytes = 0
        #: bytes of what was compressed, and who waits until these are fewer
        self._expanded = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        #: whether its target wants nothing any more, or it has none any more
        self.closed = False
        #: whether it was left out of a fetch
        self.left_out = False
        #: seconds for which its topic has its messages wait after a failure; 0: it does not say
        self.own_backoff = 0.0
        self.longest_backoff = 0.0
        #: seconds that are between two messages at least; and when the next may be sent
        self.spacing = 0.0
        self._next_at = -inf
        self._rests_until = -inf
        self._short_since = -inf
        self._failed = self._dead = 0
        self._says_again = -inf

    def __repr__(self) -> str:
        return f"<Lane of {self.queue!r}, {self.under_way} under way>"

    @property
    def room(self) -> int:
        """How many more may be fetched."""
        full = self._bytes + self._expanded >= MOST_BYTES
        busy = self.under_way - min(self.hosts.waiting, MOST_WAITING)
        return 0 if full else max(self.limit - busy, 0)

    def begin(self, now: float, size: int = 0) -> None:
        """One more is under way, of so many bytes."""
        self.under_way += 1
        self._bytes += size
        if self.room < self._enough:
            self._short_since = now

    def end(self, size: int = 0) -> None:
        """One has ended."""
        self.under_way -= 1
        self._bytes -= size
        self._tell()

    def _tell(self) -> None:
        if self.left_out:
            self.on_room()

    @asynccontextmanager
    async def expanding(self) -> AsyncIterator[Callable[[int], None]]:
        """In this block a message is expanded and sent. It begins when others have left memory for
        it; what it yields is told the bytes."""
        while self._expanded >= MOST_BYTES:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        sizes: list[int] = []

        def tell(size: int) -> None:
            self._expanded += size
            sizes.append(size)

        try:
            yield tell
        finally:
            self._expanded -= sum(sizes)
            while self._waiting:
                turn = self._waiting.popleft()
                if not turn.done():
                    turn.set_result(None)

    @property
    def _enough(self) -> int:
        return max(self.limit // 4, 1)

    def ready_at(self) -> float:
        """From when on it may be fetched for; infinity: when something has ended."""
        if self.closed or not self.room:
            return inf
        if self.room >= self._enough:
            return self._rests_until
        return max(self._rests_until, self._short_since + GATHER)

    def turn(self, now: float) -> float:
        """Seconds until the next message may be sent, which has its turn then: nothing makes up
        for a moment in which the process stood still."""
        at = max(now, min(self._next_at, now + MOST_TURN))
        self._next_at = at + self.spacing
        return at - now

    def rest(self, until: float) -> None:
        """Its target wants to be left alone until then."""
        self._rests_until = max(self._rests_until, until)
        self.on_room()

    def wants(self, now: float) -> bool:
        """Whether its target wants to be sent something."""
        return not self.closed and now >= self._rests_until

    def close(self) -> None:
        """Fetch nothing for it any more."""
        self.closed = True
        self.hosts.close()
        self.on_room()

    # -- what is said about it

    def failed(self, why: str, now: float, *, dead: bool) -> None:
        """A message was not taken.

        dead: whether it is a dead letter now
        """
        self._failed += 1
        self._dead += dead
        if now >= self._says_again:
            self._says_again = now + SAY_EVERY
            logger.warning(
                "queue %s: its target does not take messages (%d failed, %d of them dead now): %s",
                one_line(self.queue),
                *(self._failed, self._dead, one_line(" ".join(why.split())[:300])),
            )

    def worked(self) -> None:
        """A message was taken."""
        if self._failed:
            name = one_line(self.queue)
            logger.info("queue %s: %s takes messages again", name, shown(self.target))
            self._failed = self._dead = 0
            self._says_again = -inf
