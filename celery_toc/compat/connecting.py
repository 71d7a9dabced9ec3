"""A worker pauses between connections that do not last.

Touches: `Consumer.connect`, which is replaced on the consumer.

Why: Celery connects again at once, five times a second. Its settings have a limit of attempts,
but no pause after a connection that was made and broke. A server that lets a worker in and then
refuses what it needs would be asked, and the log be filled, without an end.

Read in Celery 5.3.6 and 5.7.0.

Without: a worker whose connections break as soon as they are made tries five times a second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from kombu_toc import CompatPart

PART = CompatPart(
    "connect-pause",
    touches="Celery's Consumer.connect",
    lost="a worker whose connections break at once connects five times a second",
    check=lambda consumer: CompatPart.missing(consumer, "connect"),
)

#: Seconds: what lasted shorter was no connection that a worker could use; how long it pauses after
#: the first of those, and how long at most, after several in a row.
SHORT = 3.0
FIRST_PAUSE = 0.1
LAST_PAUSE = 5.0


def install(consumer: Any, maybe_shutdown: Callable[[], None]) -> None:
    """Have a worker's consumer pause; `maybe_shutdown` raises what ends a worker that is told
    to end meanwhile."""
    if not PART.usable(consumer):
        return
    connect = consumer.connect
    connected, pause = -math.inf, 0.0

    def connect_after_a_pause() -> Any:
        nonlocal connected, pause
        now = time.monotonic()
        short = now - connected < SHORT
        pause = min(max(2 * pause, FIRST_PAUSE), LAST_PAUSE) if short else 0.0
        while (left := now + pause - time.monotonic()) > 0:
            maybe_shutdown()
            time.sleep(min(left, 0.1))
        made = connect()
        connected = time.monotonic()
        return made

    consumer.connect = connect_after_a_pause
