"""What a queue's messages leave for the task library, and how much of it."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigurationError

#: How a queue is kept in the task library: the row is written before the message is put, in a
#: transaction of the caller's, after it from what the scripts have logged, or not at all.
THROUGH, OUTBOX, BEHIND, OFF = "through", "outbox", "behind", "off"
MODES = (THROUGH, OUTBOX, BEHIND, OFF)

#: Entries that the logs of a topic's slots may have together, and each of them in any case: an
#: entry takes about 50 bytes where ids are those of Celery.
LOG_ENTRIES = 200_000
LOG_LEAST = 1_000


def log_bound(slots: int) -> int:
    """Entries that the log of one slot may have."""
    return max(LOG_ENTRIES // slots, LOG_LEAST)


def check_horizon(topic: str, said: Any) -> None:
    """Raise ConfigurationError, naming the topic, if it has a horizon and no rows.

    said: its :class:`.topic.Declaration`
    """
    if said.horizon is not None and said.library == OFF:
        raise ConfigurationError(
            f"queue {topic!r}: horizon keeps rows in the task library, and library={OFF} keeps "
            "none: leave one of them out"
        )
