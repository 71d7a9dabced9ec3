"""What the task library knows of a message. Values only: nothing here asks a database."""

from __future__ import annotations

from typing import NamedTuple


class Record(NamedTuple):
    """What the library knows of a message.

    id: of the task
    token: tells the messages of one id from each other, such as those of a task's retries
    topic: its queue
    status: ``pending``, ``taken``, ``done``, ``cancelled``, ``dead`` or ``expired``
    action_us: when it is due; this and the other times are microseconds since the epoch
    attempts: how often it was delivered, as far as is recorded
    worker: who had it last
    error: what went wrong last
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
    attempts: int
    worker: str | None
    error: str | None
    created_us: int
    modified_us: int


class RecordPage(NamedTuple):
    """What a search has found so far."""

    records: list[Record]
    after: str | None  #: where the next page begins; None: there is no next page


class Rebuilt(NamedTuple):
    """What a rebuild has done so far.

    rows: how many it has looked at, of about how many; 0: that is still being counted
    put: how many messages were not in Redis, and are again
    taken: how many it has left to the workers that took them a moment ago; if one of these is gone,
        the upkeep puts its messages back
    ended: how many have ended by now, or have expired
    """

    rows: int
    of_rows: int
    put: int
    taken: int
    ended: int


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
