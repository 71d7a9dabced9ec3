"""How much a consumer can take."""

from __future__ import annotations

from typing import NamedTuple

from ..consumer.policy import WorkerPolicy

#: Seconds for which a worker's processes have work queued: the round trip to Redis is hidden.
AHEAD = 0.02


class Capacity(NamedTuple):
    """How much a consumer can take."""

    free: int  #: that many could start at once; negative if more is queued than can start
    room: int  #: that many are taken, those included
    batch: int  #: the room there is when nothing is queued, and as many as free come free


def capacity_of(policy: WorkerPolicy, room: int, held: int, window: int) -> Capacity:
    """What a consumer can take, by what its owner could start and by its prefetch window.

    room: messages that still fit into the window; window: messages that fit into it when empty
    held: messages that are fetched, and could start none yet
    """
    idle = policy.idle_slots()
    if idle is None:
        return Capacity(room, room, window)
    free = idle - held
    if not policy.prefetches:
        return Capacity(free, min(room, free), 0)
    ahead = policy.idle_within(AHEAD)
    return Capacity(free, min(room, free + ahead), min(window, ahead))
