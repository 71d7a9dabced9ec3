"""What has become of a task, as a number in the library."""

from __future__ import annotations

from ..model.library import STATUSES

#: It waits for its time, or for a worker.
PENDING = 0
#: A worker has it.
TAKEN = 1
#: It was acknowledged. How its task ended is not known, or not yet.
DONE = 2
#: Its task has succeeded.
SUCCEEDED = 3
#: It was sent again, as another message of its id: by its task, or by an operator.
RETRIED = 4
CANCELLED = 5
#: Its task was revoked.
REVOKED = 6
#: It was too old to be delivered, or to be begun.
EXPIRED = 7
#: Its task has failed, and is not tried again.
FAILED = 8
#: It is in DeadQueue, or was.
DEAD = 9

NAMES = dict(enumerate(STATUSES))
NUMBERS = {name: number for number, name in NAMES.items()}

#: Those that a row of what has not ended may have.
LIVE = (PENDING, TAKEN)

#: Those of a message that is not to be run again.
OVER = (DONE, SUCCEEDED, RETRIED, CANCELLED, REVOKED, FAILED)

#: Where the message of a pending row is: in Redis as far as is known; not there yet; or in the
#: library only, because its time is far ahead.
IN_REDIS, NOT_PUT, FAR = 0, 1, 2

#: Of what is dead: it is kept for a rebuild.
IN_DEAD_QUEUE = 3


def of_cancel(revoked: bool) -> int:
    """The status of what was cancelled, or revoked."""
    return REVOKED if revoked else CANCELLED
