"""Redis's clock, for the rows of what is counted by it: a sender's own clock may be wrong."""

from __future__ import annotations

import time
from typing import Any

from ..center.requests import PutRequest
from ..center.runner import BROKEN
from ..scripts.call import Countdown

#: Seconds after which a server is asked again.
INTERVAL = 30.0


class ServerTime:
    """What a server's clock shows, as it was asked lately. Any thread may call it.

    client: reaches the server
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._next = 0.0
        #: what it is ahead of this process's monotonic clock
        self._ahead_us: int | None = None

    def of(self, request: PutRequest) -> int | None:
        """The moment from which the time of a message counts, in microseconds since the epoch;
        None if it says its time itself, or the server does not answer."""
        at_us = request.at_us
        if at_us is not None and not (isinstance(at_us, Countdown) and at_us.at_us is None):
            return None
        now = time.monotonic()
        if now >= self._next:
            self._next = now + INTERVAL
            self._ahead_us = self._ask()
        return None if self._ahead_us is None else int(now * 1_000_000) + self._ahead_us

    def _ask(self) -> int | None:
        try:
            seconds, us = self._client.time()
        except BROKEN:
            return None
        return int(seconds) * 1_000_000 + int(us) - int(time.monotonic() * 1_000_000)
