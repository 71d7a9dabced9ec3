"""Which messages are meant: filters, and reading what they match within bounds."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Any, NamedTuple

from ...model.results import DEAD, IN_FLIGHT, WAITING, Cancelled, Found
from ..fields import going_on, invalid
from . import reading
from .render import moment, read_time

# -- which messages are meant

#: What else a state may be: what waits, and everything; and that of a failed task, of which there
#: is a record, and perhaps no message.
ALL_WAITING, ANY, FAILED_TASK = "waiting", "any", "failed"

#: Messages that one request looks at to find those that match, and seconds that it takes for it,
#: at most; then the page says where it has come to.
LOOKED = 20_000
SECONDS = 1.0

#: Messages that are read at a time; bytes of those that match after which a page ends, and of those
#: that are read at a time.
STEP = 100
PAGE_BYTES = 2 << 20

#: The way out, where no page goes on.
FIRST = "begin with the first one"

#: Parameters of a URL and fields of a form.
FIELDS = ("queue", "state", "since", "until", "task", "text", "biz", "reason", "error", "alike")


class Selection(NamedTuple):
    """Messages of a queue that are like this.

    state: one of STATES, ALL_WAITING or ANY
    since, until: bounds of their times, seconds since the epoch
    task: a name, or a pattern
    text: what their arguments have in them, in any case
    biz: their business id
    reason, error: why they are dead, and the last line of the last error
    alike: of just this task, reason and error, and not of any where nothing is said
    """

    queue: str
    state: str = ALL_WAITING
    since: float | None = None
    until: float | None = None
    task: str = ""
    text: str = ""
    biz: str = ""
    reason: str = ""
    error: str = ""
    alike: bool = False

    @classmethod
    def of(cls, said: Mapping[str, str], now: float) -> Selection:
        """The selection that a URL or a form asks for. Raises Problem."""
        queue = said.get("queue", "")
        if not queue:
            raise invalid("queue", "it is missing")
        state = said.get("state") or ALL_WAITING
        if state not in (*reading.STATES, ALL_WAITING, ANY):
            raise invalid(
                "state", f"it must be one of {', '.join((*reading.STATES, ALL_WAITING, ANY))}"
            )
        alike = bool(said.get("alike"))
        task = said.get("task", "")
        return cls(
            queue,
            state,
            read_time(said.get("since", ""), "since", now),
            read_time(said.get("until", ""), "until", now),
            task if alike else task.strip(),
            said.get("text", ""),
            said.get("biz", "").strip(),
            said.get("reason", ""),
            said.get("error", ""),
            alike,
        )

    @property
    def looks_inside(self) -> bool:
        """Whether messages have to be read to know if they match."""
        return bool(self.task or self.text or self.biz or self.reason or self.error or self.alike)

    def scanned(self, now: float) -> dict[str, Any]:
        """The arguments of a scan.

        now: by Redis's clock: it tells what is scheduled from what is ready
        """
        since, until = self.since, self.until
        states: dict[str, str | None] = {reading.FLYING: IN_FLIGHT, reading.DIED: DEAD, ANY: None}
        if self.state == reading.SCHEDULED:
            since = max(since or 0.0, now)
        elif self.state == reading.READY:
            until = now if until is None else min(until, now)
        return {"state": states.get(self.state, WAITING), "since": since, "until": until}

    def matches(self, message: reading.Shown) -> bool:
        """Whether a message that was read is meant: of what is hidden, nothing is."""
        if self.alike:
            if likeness(message) != (self.task, self.reason, self.error):
                return False
        elif not self._fits(message):
            return False
        if self.text and self.text.lower() not in message.arguments.lower():
            return False
        return not self.biz or (message.biz is not None and message.biz[1] == self.biz)

    def _fits(self, message: reading.Shown) -> bool:
        if self.task and not fnmatchcase(message.task or "", self.task.replace("[", "[[]")):
            return False
        if self.reason and message.reason != self.reason:
            return False
        return not self.error or reading.last_line(message.error) == self.error

    def described(self) -> str:
        """In words: ``waiting messages of shop.remind in mail``."""
        what = "messages" if self.state == ANY else f"{self.state.replace('-', ' ')} messages"
        what = "failed tasks" if self.state == FAILED_TASK else what
        parts = [what]
        if self.task:
            parts.append(f"of {self.task}")
        elif self.alike:
            parts.append("of no task")
        parts.append(f"in {self.queue}")
        if self.text:
            parts.append(f"with {self.text!r} in their arguments")
        if self.biz:
            parts.append(f"of business id {self.biz!r}")
        for name, at in (("not before", self.since), ("before", self.until)):
            if at is not None:
                parts.append(f"{name} {moment(round(at * 1e6))}")
        for said, name in ((self.reason, "that died because"), (self.error, "with the error")):
            if said:
                parts.append(f"{name} {said!r}")
        if self.alike and not self.error:
            parts.append("without an error")
        return " ".join(parts)


def likeness(message: reading.Shown) -> tuple[str, str, str]:
    """What dead letters are grouped by: their task, why they died, and what tells their error."""
    return message.task or "", message.reason, reading.last_line(message.error)


class Listing(NamedTuple):
    """What was found.

    after: where to go on; None: there is no more
    looked: how many messages were looked at
    took: seconds
    goes_on: whether more is looked for
    """

    messages: list[reading.Shown]
    after: str | None
    looked: int
    took: float
    goes_on: bool = False


async def find(
    center: Any,
    reader: reading.Reader,
    selection: Selection,
    *,
    now_us: int,
    limit: int,
    after: str | None,
    looked: int = LOOKED,
    seconds: float = SECONDS,
) -> Listing:
    """Messages that match, in the order of their times: so many, or a few more where it has to be
    read what matches. Raises Problem for an `after` that no page has."""
    found: list[reading.Shown] = []
    size = number = 0
    began = time.monotonic()
    how = selection.scanned(now_us / 1e6)
    while True:
        step = STEP if selection.looks_inside else min(STEP, limit - len(found))
        with going_on(FIRST):
            page = await center.scan(
                selection.queue, limit=step, after=after, size=PAGE_BYTES, **how
            )
        messages: list[Found] = page.messages
        async for shown in reader.read_all(messages, now_us):
            if selection.matches(shown):
                # A list shows no more of it, and of some it is a mebibyte.
                found.append(shown._replace(arguments=shown.arguments[: reading.WHOLE], body=""))
                size += len(shown.found.body)
        number += len(messages)
        after = page.after
        took = time.monotonic() - began
        enough = after is None or len(found) >= limit or size >= PAGE_BYTES
        if enough or (selection.looks_inside and (number >= looked or took >= seconds)):
            return Listing(found, after, number, took)


# -- which messages a job has counted
#
# A message is known by its id, its time to a millisecond, and its bytes. What is put later under
# the same id is another message, and so is one that was given another time since.

#: Messages that a job counts at most, as many as people wait for; about 30 bytes are kept of each.
MOST = 1_000_000

#: Messages of a part, and bytes from which on these are enough: a part is read and changed at once.
PART = 500
PART_BYTES = 8 << 20

#: Bytes that tell a message from others of its id.
_BYTES = 8


class Mark(NamedTuple):
    """A message that was counted.

    print: what tells it from others of its id
    """

    id: str
    print: str


def mark_of(found: Found) -> Mark:
    """What a message is known by."""
    said = blake2b(b"%d %d " % (found.time_us // 1000, found.state == DEAD), digest_size=_BYTES)
    said.update(found.body)
    return Mark(found.id, said.hexdigest())


class Marks:
    """Divides what is counted into parts.

    made: how many parts there are
    """

    def __init__(self) -> None:
        self.made = 0
        self._marks: list[Mark] = []
        self._size = 0

    def add(self, found: Iterable[Found]) -> list[bytes]:
        """Messages that were counted; returns the parts that are whole by now."""
        whole = []
        for one in found:
            self._marks.append(mark_of(one))
            self._size += len(one.body)
            if len(self._marks) >= PART or self._size >= PART_BYTES:
                whole += self.rest()
        return whole

    def rest(self) -> list[bytes]:
        """The last part, if it has any."""
        marks, self._marks, self._size = self._marks, [], 0
        if not marks:
            return []
        self.made += 1
        ids, prints = zip(*marks, strict=True)
        return [zlib.compress(json.dumps([ids, "".join(prints)]).encode(), 1)]


def read_part(raw: bytes) -> list[Mark]:
    """The messages of a part."""
    ids, prints = json.loads(zlib.decompress(raw))
    size = 2 * _BYTES
    return [Mark(id, prints[size * at : size * (at + 1)]) for at, id in enumerate(ids)]


def those_of(marks: Iterable[Mark], found: Sequence[Found]) -> list[Found]:
    """Of messages that were found by their ids, those that were counted."""
    known = set(marks)
    return [one for one in found if mark_of(one) in known]


# -- what can be done to messages: each act with what it needs and what is told of it


class Act(NamedTuple):
    """Something that is done to messages.

    role: that a token needs
    states: of the messages that it can be done to
    done: of what was done
    asks: whether it is asked if it is meant: it cannot be taken back
    """

    name: str
    title: str
    role: str
    states: tuple[str, ...]
    done: str
    asks: bool

    def could(self, state: str) -> bool:
        """Whether it can be done to messages of a state that is asked for."""
        if state == ALL_WAITING:
            return bool({reading.SCHEDULED, reading.READY} & set(self.states))
        return state == ANY or state in self.states


ACTS = {
    one.name: one
    for one in (
        Act("cancel", "Cancel", "write", (reading.SCHEDULED, reading.READY), "cancelled", True),
        Act("run", "Run now", "write", (reading.SCHEDULED,), "made due", False),
        Act(
            "reschedule",
            "Reschedule",
            "write",
            (reading.SCHEDULED, reading.READY),
            "rescheduled",
            False,
        ),
        Act("requeue", "Requeue", "operate", (reading.DIED,), "requeued", False),
        Act("purge", "Delete", "operate", (reading.DIED,), "deleted", True),
    )
}


#: What can be done to failed tasks.
FAILED_ACTS = {
    one.name: one
    for one in (
        Act("retry", "Retry", "operate", (FAILED_TASK,), "retried", False),
        Act("forget", "Delete", "operate", (FAILED_TASK,), "deleted", True),
    )
}

#: Another number of slots for a queue, which moves messages of any state.
RESHARD = Act("reshard", "Reshard", "operate", (ANY,), "moved", False)

EVERY_ACT = {**ACTS, **FAILED_ACTS, RESHARD.name: RESHARD}


class Done(NamedTuple):
    """What became of messages, or of failed tasks.

    late: how many were gone, or in another state by then
    skipped: the schedules whose next firing was among those that are cancelled
    notes: of how many that were retried what holds, by the names of `FailuresRetried`
    """

    number: int
    late: int
    skipped: tuple[str, ...] = ()
    notes: Mapping[str, int] = {}


class Actions:
    """Does it.

    center: what cancels and moves messages, so that the task library knows
    """

    def __init__(self, center: Any, extras: reading.PageExtras) -> None:
        self._center = center
        self._extras = extras

    async def run(self, act: str, found: Sequence[Found], at: float | None = None) -> Done:
        """Do something to messages that were found a moment ago.

        at: the new time of those that are rescheduled, seconds since the epoch
        """
        if not found:
            return Done(0, 0)
        if act == "cancel":
            cancelled: list[Cancelled] = await self._center.cancel(found, dead=False)
            deleted = [one for one in cancelled if one.deleted]
            if deleted:
                await self._extras.cancelled(deleted)
            skipped = tuple(one.schedule for one in deleted if one.schedule)
            return Done(len(deleted), len(found) - len(deleted), skipped)
        if act in ("run", "reschedule"):
            moved = await self._center.reschedule(found, at=at if act == "reschedule" else None)
            number = sum(one.moved for one in moved)
            return Done(number, len(found) - number)
        # Just these: another one of the same id may have died meanwhile.
        these = {(one.id, one.time_us, one.body) for one in found}
        ids = sorted({one.id for one in found})
        method = self._center.dead.requeue if act == "requeue" else self._center.dead.purge
        number = await method(
            found[0].topic, ids=ids, where=lambda one: (one.id, one.time_us, one.body) in these
        )
        return Done(number, max(len(found) - number, 0))

    async def run_failed(self, act: str, queue: str, ids: Sequence[str]) -> Done:
        """Retry or forget failed tasks."""
        if act == "forget":
            number = await self._center.failures.delete(queue, ids=ids)
            return Done(number, len(ids) - number)
        done = (await self._center.failures.retry(queue, ids=ids))._asdict()
        number, gone = done.pop("number"), done.pop("gone")
        return Done(number, gone, notes=done)


def narrowed(act: Act, state: str) -> str:
    """Of a state that is asked for, that to which an act can be done."""
    if state not in (ALL_WAITING, ANY):
        return state
    return ALL_WAITING if set(act.states) == {reading.SCHEDULED, reading.READY} else act.states[0]
