"""What has become of a task, as a number in the library. Imports nothing."""

from __future__ import annotations

#: It waits for its time, or for a worker.
PENDING = 0
#: A worker has it.
TAKEN = 1
#: It was acknowledged, or, of what was acknowledged when it began, has ended.
DONE = 2
CANCELLED = 3
#: It is in DeadQueue, or was.
DEAD = 4
#: It was too old to be delivered.
EXPIRED = 5

NAMES = {
    PENDING: "pending",
    TAKEN: "taken",
    DONE: "done",
    CANCELLED: "cancelled",
    DEAD: "dead",
    EXPIRED: "expired",
}

NUMBERS = {name: number for number, name in NAMES.items()}

#: Those that a row of what has not ended may have.
LIVE = (PENDING, TAKEN)

#: Where the message of a pending row is: in Redis as far as is known; not there yet; or in the
#: library only, because its time is far ahead.
IN_REDIS, NOT_PUT, FAR = 0, 1, 2

#: Of what is dead: it is kept for a rebuild.
IN_DEAD_QUEUE = 3
