"""The score codec: what the numbers in the sorted sets mean.

A score is ``milliseconds * 1000 + low``. It is an integer below 2**53, so a double holds it
exactly until the year 2255, and the first 13 digits of ``ZRANGE ... WITHSCORES`` are epoch
milliseconds.

======================  ==========================================  =======================
where                   milliseconds                                low
======================  ==========================================  =======================
StoreQueue, not tried   action time                                 32..999: order within
                                                                    the millisecond
StoreQueue, tried       0 (due at once), or now + back-off          0..31: retries left
PrepareQueue            when the lease ends                         32 * step + retries left
DeadQueue               when it died                                32 * step + retries left
======================  ==========================================  =======================

``step`` is the index of the message's priority step: a message that is rolled back returns to
the StoreQueue it came from.

The order within the millisecond is the action time's own microseconds, so a due message is
recognised to about two microseconds and never too early: an action time is rounded up, the
present is rounded down. Two messages with the same action time are told apart by the put
script, which gives the later one the next higher score. ``clock.lua`` holds the same
arithmetic for the scripts.

Times are integers: microseconds (``us``) or milliseconds (``ms``) since the epoch.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import ActionTimeError

#: Redeliveries of a message, unless its topic has another limit.
MAX_RETRIES = 16

#: The highest value of *low* that counts retries; above it, *low* is an order.
TRIED = 31

#: Steps of *low* within one millisecond that are left for the order.
FINE = 967

#: The last millisecond that a score can hold exactly.
LAST_MS = (2**53 - 1000) // 1000


class Lease(NamedTuple):
    """A decoded score of PrepareQueue or DeadQueue."""

    ms: int
    step: int
    retries: int


def check(us: int) -> int:
    """Return `us`, or the epoch if it is earlier.

    Raises ActionTimeError if no score can hold it.
    """
    if us > LAST_MS * 1000:
        raise ActionTimeError(
            f"action time {us / 1e6:.3f} (seconds since the epoch) is beyond the year 2255; "
            "choose an earlier eta"
        )
    return max(us, 0)


def action(us: int) -> int:
    """Score of a message that is due at `us` and has not been tried."""
    ms, rest = divmod(check(us), 1000)
    return ms * 1000 + 32 + -(-rest * FINE // 1000)


def due(us: int) -> int:
    """The highest score that is due at `us`."""
    ms, rest = divmod(us, 1000)
    return ms * 1000 + 32 + rest * FINE // 1000


def tried(ms: int, retries: int) -> int:
    """Score in StoreQueue of a message that was delivered before; `ms` 0 means due at once."""
    if not 0 <= retries <= TRIED:
        raise ValueError(f"retries must be within 0..{TRIED}, not {retries}")
    return ms * 1000 + retries


def lease(ms: int, step: int, retries: int) -> int:
    """Score in PrepareQueue (`ms`: when the lease ends) or DeadQueue (when it died)."""
    if not 0 <= step <= 29 or not 0 <= retries <= TRIED:
        raise ValueError(f"step must be within 0..29 and retries within 0..{TRIED}")
    return ms * 1000 + 32 * step + retries


def read_lease(score: int) -> Lease:
    """The inverse of :func:`lease`."""
    ms, low = divmod(score, 1000)
    step, retries = divmod(low, 32)
    return Lease(ms, step, retries)


def plain(score: int) -> int:
    """A StoreQueue score as it was before the message came to a lane (``sorted.lua``)."""
    if score >= 0:
        return score
    return -score if score < -TRIED - 1 else -score - 1


def retries_left(score: int) -> int | None:
    """Retries left by a StoreQueue score, or None if the message has not been tried."""
    low = score % 1000
    return low if low <= TRIED else None


def action_time(score: int) -> int:
    """Microseconds at which a StoreQueue score is due; 0 means at once.

    The inverse of :func:`action`, up to the two microseconds that one step of *low* spans:
    the result is never earlier than the time that was put in.
    """
    ms, low = divmod(score, 1000)
    if low <= TRIED:
        return ms * 1000
    return ms * 1000 + -(-(low - 32) * 1000 // FINE)
