"""Blocks on the wake indexes of topics, and hands on what it claims there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from ..client.cluster import is_passing
from .claims import WakeTopics
from .loop import TICK, Loop
from .pipe import BROKEN, Waiting

if TYPE_CHECKING:
    from ..center.center import TimeoutCenter
    from .due_queue import Claim
    from .wiring import Wiring

logger = logging.getLogger(__name__)

#: Seconds a blocking command waits at the server before it is sent again. (What keeps track of
#: connections on the way, and a server's own timeout, may forget one after half a minute.)
WAKE_BLOCK = 20.0

#: Seconds after which a Cluster's node is asked again to wait on keys that are being moved.
BLOCK_AGAIN = 0.1

#: Attempts to end a wait, half a millisecond apart.
MAX_UNBLOCKS = 20


class WakeListener:
    """A connection that waits for the next time that is to be claimed."""

    def __init__(
        self,
        center: TimeoutCenter,
        loop: Loop,
        wiring: Wiring,
        on_claim: Callable[[Claim], None],
        passed_on: Callable[[str], list[str]] | None = None,
    ) -> None:
        self.topics = WakeTopics()
        self._passed_on = passed_on
        #: while the wait is ended: whoever ends it goes on with what comes of it
        self.stopping = False
        self.connection = wiring.blocking(loop, self._on_refused)
        self._center = center
        self._loop = loop
        self._on_claim = on_claim
        #: monotonic seconds before which nothing blocks: what it would wait on is being moved
        self._blocks_at = 0.0

    @property
    def may_listen(self) -> bool:
        """Whether it waits for nothing, and may."""
        return not (self.connection.busy or self.stopping or self._blocks_at > self._loop.now())

    def listen(self, topics: list[str], block: float) -> None:
        """Block on the wake indexes of these, for so many seconds at most."""
        keys = self.topics.listen(topics, self._center.keys.wake, self._passed_on)
        item = (("BZPOPMIN", *keys, f"{block:.3f}"), self._on_reply)
        self.connection.send([item], block=block)

    def stop(self) -> None:
        """End the wait: it is for other topics than it should be."""
        if not self.connection.busy:
            return
        self.stopping = True
        try:
            for _ in range(MAX_UNBLOCKS):
                if self.unblock() or self.connection.readable():
                    self.connection.read()  # a claim, if one has come just now; else nothing
                    break
                self._loop.sleep(TICK / 2)  # what is to be ended has not even arrived
            else:
                self.connection.close()
        except BROKEN:
            self.connection.close()
        except ResponseError as exc:
            # Not permitted: a claim may be lost with the connection, and is made up for by
            # whoever looks into all slots next.
            logger.debug("CLIENT UNBLOCK: %s", exc)
            self.connection.close()
        finally:
            self.stopping = False

    def unblock(self) -> bool:
        """Have the server answer now; whether it was waiting."""
        return bool(
            self._center.client.execute_command("CLIENT", "UNBLOCK", self.connection.client_id)
        )

    def _on_reply(self, reply: Any) -> None:
        claim = self.topics.received(reply)
        if claim is not None:
            self._on_claim(claim)

    def _on_refused(self, waiting: Waiting, exc: ResponseError) -> bool:
        # Nothing is lost by that: a claim that was not made.
        if self._center.client.apply_redirect(exc) is None and not is_passing(exc):
            return False
        self.connection.close()
        self._blocks_at = self._loop.now() + BLOCK_AGAIN
        return True
