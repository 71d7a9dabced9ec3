"""What the task library knows of a message. Values only: nothing here asks a database."""

from __future__ import annotations

from typing import NamedTuple

#: What may have become of a message: it waits, a worker has it, or one of the ways to end. In the
#: order of their numbers (kombu_toc/library/statuses.py).
STATUSES = (
    *("pending", "taken", "done", "succeeded", "retried", "cancelled", "revoked", "expired"),
    *("failed", "dead"),
)

#: Those that went wrong, and can be sent again: see :meth:`TaskLibrary.retry`.
FAILURES = ("failed", "dead")


class Record(NamedTuple):
    """What the library knows of a message.

    id: of the task
    token: tells the messages of one id from each other, such as those of a task's retries
    topic: its queue
    status: one of :data:`STATUSES`
    action_us: when it is due; this and the other times are microseconds since the epoch
    attributes: of the user's own: names with texts
    attempts: how often it was delivered, as far as is recorded
    worker: who had it last
    error: what went wrong last, in the first line; behind it the end of the traceback
    created_us, modified_us: when it was sent, and when its status changed last
    """

    id: str
    token: str
    topic: str
    status: str
    action_us: int
    task: str | None
    biz_type: str | None
    biz_id: str | None
    attributes: dict[str, str]
    attempts: int
    worker: str | None
    error: str | None
    created_us: int
    modified_us: int


class RecordPage(NamedTuple):
    """What a search has found so far."""

    records: list[Record]
    after: str | None  #: where the next page begins; None: there is no next page
    away: tuple[str, ...] = ()  #: the databases that have not answered, by their URLs


class LibraryResharded(NamedTuple):
    """What a reshard of a library has done.

    rows: how many the library has
    moved: how many of them were moved
    """

    rows: int
    moved: int


class Rebuilt(NamedTuple):
    """What a rebuild has done so far.

    rows: how many it has looked at, of about how many; 0: that is still being counted
    put: how many messages were not in Redis, and are again
    taken: how many it has left to the workers that took them a moment ago; if one of these is gone,
        the upkeep puts its messages back
    ended: how many have ended by now, or have expired
    not_kept: queues of which the library has nothing (``x-library: off``): what was in them is lost
    behind: queues whose rows are written behind: what was sent last may be lost
    """

    rows: int
    of_rows: int
    put: int
    taken: int
    ended: int
    not_kept: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()


class LibraryStatus(NamedTuple):
    """One database of a library.

    url: without its password
    version: of its tables; None: there are none
    problem: why it cannot be used; empty if it can
    """

    url: str
    version: str | None
    problem: str


#: What may disagree: a row whose message is not in Redis; a row whose message is dead there; a
#: message without a row; a message that waits although it has ended.
DISAGREEMENTS = ("not in Redis", "dead in Redis", "no row", "has ended")


class Disagreement(NamedTuple):
    """Something in which the library and Redis do not agree.

    kind: one of ``not in Redis``, ``dead in Redis``, ``no row`` and ``has ended``
    action_us: when it is due, in microseconds since the epoch
    """

    kind: str
    id: str
    topic: str
    action_us: int


# -- what a queue's messages leave for the task library, and how much of it

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
