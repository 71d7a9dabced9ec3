"""Failed tasks as they are kept in Redis: records, groups and bounds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from . import message
from .timetext import eta_us

#: Writes a second of one process.
WRITES = 100


class FailureBounds(NamedTuple):
    """How much is kept of failed tasks.

    number: records at most; 0: nothing is kept
    age: seconds
    bytes: of all records together
    message: bytes of one message; a larger one is left out of its record
    """

    number: int = 10_000
    age: float = 7 * 86_400.0
    bytes: int = 16 << 20
    message: int = 8 << 10


def share_of(bounds: FailureBounds, queues: int) -> FailureBounds:
    """The share of each of so many queues; the least is a hundred records and 64 KiB."""
    number, size = bounds.number // queues, bounds.bytes // queues
    return bounds._replace(
        number=min(bounds.number, max(number, 100)), bytes=min(bounds.bytes, max(size, 64 << 10))
    )


class FailedTask(NamedTuple):
    """A task that has failed for good. A task has one record, of its latest failure.

    topic: its queue
    task: the name of the task
    exception: the name of the exception's type
    failed_us: microseconds since the epoch, by Redis's clock; no two of a queue have the same
    error: the exception's text and the end of its traceback
    args: its arguments as Celery shows them
    worker: the name of the worker
    runtime: seconds; None: it was not measured
    retries: how often its task had retried it
    dead: its message is a dead letter
    masked: something was hidden before it was kept
    has_message: whether the message is kept
    kept_id: the id that its message was kept under, which is needed to read that
    priority: priority step
    traits: what holds for its message alone (:mod:`.delivery`)
    message: the envelope; empty if it is not kept, or was not read
    token: of its record in the task library; None: Redis has it
    """

    id: str
    topic: str
    task: str
    exception: str
    failed_us: int = 0
    error: str = ""
    args: str = ""
    worker: str = ""
    runtime: float | None = None
    retries: int = 0
    dead: bool = False
    masked: bool = False
    has_message: bool = False
    kept_id: str = ""
    priority: int = 0
    traits: str = ""
    message: bytes = b""
    token: str | None = None

    @property
    def retryable(self) -> bool:
        """Whether it can be retried: by its message, or as the dead letter that it is."""
        return self.has_message or self.dead

    def __repr__(self) -> str:
        return f"<FailedTask {self.task}[{self.id}] in {self.topic!r}: {self.exception}>"


class FailurePage(NamedTuple):
    """Failed tasks, the latest first.

    after: where the next page begins; None: this is the last one
    """

    failures: list[FailedTask]
    after: str | None


class FailureGroup(NamedTuple):
    """Failed tasks of one queue, task and type of exception. Times are microseconds.

    retryable: how many can be retried
    """

    topic: str
    task: str
    exception: str
    number: int
    retryable: int
    first_us: int
    last_us: int


class FailuresRetried(NamedTuple):
    """What a retry has done.

    number: how many tasks are in their queues again
    not_kept: how many could not be retried: their messages are not kept
    gone: how many were retried before, or were dead letters and are none any more
    expires, eta: from how many a time was taken away that had passed
    unique: how many have a unique key, which they do not hold: others of it may run beside them
    chords: how many belong to a group or chord: that has failed, and their results complete nothing
    """

    number: int = 0
    not_kept: int = 0
    gone: int = 0
    expires: int = 0
    eta: int = 0
    unique: int = 0
    chords: int = 0

    def plus(self, other: FailuresRetried) -> FailuresRetried:
        return FailuresRetried(*(mine + its for mine, its in zip(self, other, strict=True)))


class FailureFilter(NamedTuple):
    """Which failed tasks are meant.

    task: a name, or a pattern with ``*`` and ``?``
    exception: the name of a type
    """

    task: str | None = None
    exception: str | None = None

    def matches(self, one: FailedTask | FailureGroup) -> bool:
        """Whether a failed task, or all of a group, is meant."""
        if self.exception is not None and one.exception != self.exception:
            return False
        return self.task is None or fnmatchcase(one.task, self.task.replace("[", "[[]"))


# -- records
#
# A record is a line with what groups need, a line with the rest, and the envelope.


def write_record(failed: FailedTask) -> bytes:
    """A failed task as it is kept."""
    head = [failed.task, failed.exception, int(failed.dead), int(bool(failed.message))]
    rest = [
        *(failed.error, failed.args, failed.worker, failed.runtime, failed.retries),
        *(int(failed.masked), failed.kept_id, failed.priority, failed.traits),
    ]
    lines = (json.dumps(part, separators=(",", ":")).encode() for part in (head, rest))
    return b"%b\n%b\n%b" % (*lines, failed.message)


def read_record(topic: str, id: str, failed_us: int, record: bytes) -> FailedTask | None:
    """A failed task, of as much of its record as was read; None if nobody here has written it."""
    head, _, more = record.partition(b"\n")
    rest, _, envelope = more.partition(b"\n")
    try:
        task, exception, dead, has_message = json.loads(head)
        made = FailedTask(id, topic, str(task), str(exception), failed_us, dead=bool(dead))
        made = made._replace(has_message=bool(has_message), message=envelope)
        if rest:
            error, args, worker, runtime, retries, masked, kept, priority, traits = json.loads(rest)
            made = made._replace(
                error=str(error),
                args=str(args),
                worker=str(worker),
                runtime=None if runtime is None else float(runtime),
                retries=int(retries),
                masked=bool(masked),
                kept_id=str(kept),
                priority=int(priority),
                traits=str(traits),
            )
    except (TypeError, ValueError):
        return None
    return made


def groups_of(failures: Iterable[FailedTask]) -> list[FailureGroup]:
    """Failed tasks by queue, task and exception, the largest group first."""
    groups: dict[tuple[str, str, str], FailureGroup] = {}
    for one in failures:
        key = (one.topic, one.task, one.exception)
        known = groups.get(key) or FailureGroup(*key, 0, 0, one.failed_us, one.failed_us)
        groups[key] = known._replace(
            number=known.number + 1,
            retryable=known.retryable + one.retryable,
            first_us=min(known.first_us, one.failed_us),
            last_us=max(known.last_us, one.failed_us),
        )
    return sorted(groups.values(), key=lambda one: (-one.number, one.topic, one.task))


def again(content: dict[str, Any], now: float) -> FailuresRetried:
    """Make a message once more of what its envelope holds; what that takes away from it.

    content: as :func:`.message.unpack` gives it; it is changed
    now: seconds since the epoch
    """
    headers, properties = content["headers"], content["properties"]
    headers.pop(message.SCHEDULE, None)
    properties.pop("expiration", None)
    taken = {"eta": 0, "expires": 0}
    for name in taken:
        at = headers.get(name)
        if at and (name == "eta" or _has_passed(at, now)):
            headers[name] = None
            taken[name] = 1
    if headers.get("retries"):
        headers["retries"] = 0
    chord = headers.get("group") is not None
    unique = headers.get(message.UNIQUE) is not None
    return FailuresRetried(1, unique=int(unique), chords=int(chord), **taken)


def traits_again(traits: str) -> str:
    """The traits that a retried message keeps: not when it expires, nor the name of its put."""
    kept = [one for one in traits[1:].split(",") if one and one[0] in "vmkuo"]
    return f";{','.join(kept)}" if kept else ""


def _has_passed(at: object, now: float) -> bool:
    """Whether a time has passed; one that cannot be read has."""
    try:
        return eta_us(at) <= now * 1_000_000
    except (ValueError, TypeError, OverflowError):
        return True
