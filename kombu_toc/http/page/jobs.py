"""What is done to messages: which of them are meant, what can be done, and jobs, which do it to all
messages or failed tasks that match.

A job goes on in steps, and can be stopped. Messages are counted first, and who is at the page is
asked. How far a job has come is kept in Redis, so each process of several can show it, begin it and
stop it. One process counts, and one does it, which need not be the same: each writes a field of its
own. Beside these are the marks of what was counted, in parts. It is done to nothing else: who
confirms has seen a number, and means these.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

from ...aio.center import AsyncTimeoutCenter
from ...aio.client import AwaitedPart, wait_for
from ...center.reshard import reshard_topic
from ...model.failures import FailureFilter
from ...model.results import DEAD, IN_FLIGHT, WAITING, Cancelled, Found
from ...model.topic import check_slots
from ..fields import Problem, going_on, invalid, not_found, problem_of, retry_after
from ..request import end
from ..tokens import Audit
from . import presentation
from .presentation import Reader, Shown, iso, moment, read_time, state_of

logger = logging.getLogger(__name__)

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
        if state not in (*presentation.STATES, ALL_WAITING, ANY):
            raise invalid(
                "state", f"it must be one of {', '.join((*presentation.STATES, ALL_WAITING, ANY))}"
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
        states = {presentation.FLYING: IN_FLIGHT, presentation.DIED: DEAD, ANY: None}
        if self.state == presentation.SCHEDULED:
            since = max(since or 0.0, now)
        elif self.state == presentation.READY:
            until = now if until is None else min(until, now)
        return {"state": states.get(self.state, WAITING), "since": since, "until": until}

    def matches(self, message: Shown) -> bool:
        """Whether a message that was read is meant: of what is hidden, nothing is."""
        if self.alike:
            if likeness(message) != (self.task, self.reason, self.error):
                return False
        elif not self._fits(message):
            return False
        if self.text and self.text.lower() not in message.arguments.lower():
            return False
        return not self.biz or (message.biz is not None and message.biz[1] == self.biz)

    def _fits(self, message: Shown) -> bool:
        if self.task and not fnmatchcase(message.task or "", self.task.replace("[", "[[]")):
            return False
        if self.reason and message.reason != self.reason:
            return False
        return not self.error or presentation.last_line(message.error) == self.error

    def described(self) -> str:
        """In words: ``waiting messages of shop.remind in mail``."""
        what = "messages" if self.state == ANY else f"{self.state.replace('-', ' ')} messages"
        what = "failed tasks" if self.state == FAILED_TASK else what
        parts = (
            what,
            f"of {self.task}" if self.task else self.alike and "of no task",
            f"in {self.queue}",
            self.text and f"with {self.text!r} in their arguments",
            self.biz and f"of business id {self.biz!r}",
            self.since is not None and f"not before {moment(round(self.since * 1e6))}",
            self.until is not None and f"before {moment(round(self.until * 1e6))}",
            self.reason and f"that died because {self.reason!r}",
            f"with the error {self.error!r}" if self.error else self.alike and "without an error",
        )
        return " ".join(part for part in parts if part)


def likeness(message: Shown) -> tuple[str, str, str]:
    """What dead letters are grouped by: their task, why they died, and what tells their error."""
    return message.task or "", message.reason, presentation.last_line(message.error)


class Listing(NamedTuple):
    """What was found.

    after: where to go on; None: there is no more
    looked: how many messages were looked at
    took: seconds
    goes_on: whether more is looked for
    """

    messages: list[Shown]
    after: str | None
    looked: int
    took: float
    goes_on: bool = False


async def find(
    center: Any,
    reader: Reader,
    selection: Selection,
    *,
    now_us: int,
    limit: int,
    after: str | None,
) -> Listing:
    """Messages that match, in the order of their times: so many, or a few more where it has to be
    read what matches. Raises Problem for an `after` that no page has."""
    found: list[Shown] = []
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
                arguments = shown.arguments[: presentation.WHOLE]
                found.append(shown._replace(arguments=arguments, body=""))
                size += len(shown.found.body)
        number += len(messages)
        after = page.after
        took = time.monotonic() - began
        enough = after is None or len(found) >= limit or size >= PAGE_BYTES
        if enough or (selection.looks_inside and (number >= LOOKED or took >= SECONDS)):
            return Listing(found, after, number, took)


# -- which messages a job has counted
#
# A message is known by its id, its time to a millisecond, and its bytes. What is put later under
# the same id is another message, and so is one that was given another time since.

#: Messages that a job counts at most, as many as people wait for; about 30 bytes are kept of each.
MOST = 1_000_000

#: Messages of a part, and bytes from which on these are enough: a part is read, counted and changed
#: at once.
PART = 500
PART_BYTES = 8 << 20

#: Bytes that tell a message from others of its id.
_BYTES = 8


#: A message that was counted: its id, and what tells it from others of that.
Mark: TypeAlias = tuple[str, str]


def mark_of(found: Found) -> Mark:
    """What a message is known by."""
    said = blake2b(b"%d %d " % (found.time_us // 1000, found.state == DEAD), digest_size=_BYTES)
    said.update(found.body)
    return found.id, said.hexdigest()


def part_of(marks: Sequence[Mark]) -> bytes:
    """A part."""
    ids, prints = zip(*marks, strict=True)
    return zlib.compress(json.dumps([ids, "".join(prints)]).encode(), 1)


def read_part(raw: bytes) -> list[Mark]:
    """The messages of a part."""
    ids, prints = json.loads(zlib.decompress(raw))
    size = 2 * _BYTES
    return [(id, prints[size * at : size * (at + 1)]) for at, id in enumerate(ids)]


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
            return not set(_WAITING).isdisjoint(self.states)
        return state == ANY or state in self.states


_WAITING = (presentation.SCHEDULED, presentation.READY)

EVERY_ACT = {
    one.name: one
    for one in (
        Act("cancel", "Cancel", "write", _WAITING, "cancelled", True),
        Act("run", "Run now", "write", (presentation.SCHEDULED,), "made due", False),
        Act("reschedule", "Reschedule", "write", _WAITING, "rescheduled", False),
        Act("requeue", "Requeue", "operate", (presentation.DIED,), "requeued", False),
        Act("purge", "Delete", "operate", (presentation.DIED,), "deleted", True),
        Act("retry", "Retry", "operate", (FAILED_TASK,), "retried", False),
        Act("forget", "Delete", "operate", (FAILED_TASK,), "deleted", True),
        Act("reshard", "Reshard", "operate", (ANY,), "moved", False),
    )
}

#: Those to failed tasks; another number of slots, which moves messages of any state; and those to
#: messages.
FAILED_ACTS = {name: one for name, one in EVERY_ACT.items() if FAILED_TASK in one.states}
RESHARD = EVERY_ACT["reshard"]
ACTS = {name: one for name, one in EVERY_ACT.items() if one not in (*FAILED_ACTS.values(), RESHARD)}


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

    def __init__(self, center: Any, extras: presentation.PageExtras) -> None:
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
    return ALL_WAITING if act.states == _WAITING else act.states[0]


# -- jobs: what is done to all that match, in steps

#: Jobs that a process has under way, at most.
MAX_JOBS = 8

#: Seconds for which a job is kept after it was written last; and after which one that was not
#: written is taken for lost, with its process.
KEPT = 3_600
SILENT = 20.0

#: Seconds for which steps that are under way may go on when the server ends.
END_WITHIN = 1.5

COUNTING, ASKING, RUNNING = "counting", "asking", "running"
DONE, STOPPED, FAILED, LOST = "done", "stopped", "failed", "lost"
PHASES = (COUNTING, ASKING, RUNNING, DONE, STOPPED, FAILED, LOST)


#: Seconds for which a reshard waits for what workers have.
PATIENCE = 60.0

#: Failed tasks of a step; jobs that are listed.
FAILED_STEP, LISTED = 100, 50

#: Schedules that the end of a job names.
MAX_NAMED = 10


class Job(NamedTuple):
    """Something that is done to all that match.

    at: the new time of what is rescheduled, seconds since the epoch
    phase: one of PHASES
    matching: how many matched when it was counted
    looked: how many were looked at, or tried, in this phase
    number, late: how many it was done to, and for how many it was too late
    said: why it has failed
    is_meant: whether somebody has confirmed it
    parts: in how many parts those are that were counted
    more: whether there are more than may be counted
    skipped: schedules whose next firing was cancelled: some of their names, and how many they are
    notes: as of :class:`Done`
    slots: the new number of slots; 0: the act is another one
    """

    id: str
    act: str
    selection: Selection
    who: str
    at: float | None = None
    phase: str = COUNTING
    matching: int = 0
    looked: int = 0
    number: int = 0
    late: int = 0
    said: str = ""
    is_meant: bool = False
    parts: int = 0
    more: bool = False
    skipped: tuple[Sequence[str], int] = ((), 0)
    notes: Mapping[str, int] = {}
    slots: int = 0

    @property
    def is_over(self) -> bool:
        return self.phase in (DONE, STOPPED, FAILED, LOST)

    def plus(self, done: Done, looked: int) -> Job:
        """The job after a step more.

        looked: how many the step was about
        """
        return self._replace(
            looked=self.looked + looked,
            number=self.number + done.number,
            late=self.late + done.late,
            skipped=(
                [*self.skipped[0], *done.skipped][:MAX_NAMED],
                self.skipped[1] + len(done.skipped),
            ),
            notes={name: self.notes.get(name, 0) + more for name, more in done.notes.items()},
        )

    def to_json(self) -> str:
        return json.dumps([*self._replace(selection=list(self.selection))])  # type: ignore[arg-type]

    @classmethod
    def of_json(cls, raw: bytes) -> Job:
        said = json.loads(raw)
        said[2] = Selection(*said[2])
        return cls(*said)


class _Stopped(Exception):
    """A job is to end where it is, in this phase."""


@dataclass(eq=False)
class Jobs:
    """The jobs that somebody has begun.

    changed: is told the queue of which messages were changed
    """

    _center: AsyncTimeoutCenter
    _reader: Reader
    _acting: Actions
    _audit: Audit
    _changed: Callable[[str], None] = lambda queue: None

    def __post_init__(self) -> None:
        self._redis = AwaitedPart(self._center.center.client)
        self._closing = False
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(
        self, act: str, selection: Selection, who: str, at: float | None = None, **how: Any
    ) -> Job:
        """Begin to count what matches, and to do it where nobody is asked: failed tasks, and what
        a reshard moves, are not counted. Raises Problem if too much is under way, and
        SlotCountError.

        how: whether it `asks`, unless it is false; of a reshard, the `slots`, and `settle` as of
            :func:`.reshard_topic`
        """
        self._check_room()
        asks, slots = how.pop("asks", True), how.pop("slots", 0)
        id, run = secrets.token_urlsafe(16), self._count if asks else self._count_and_do
        selection = selection._replace(state=narrowed(EVERY_ACT[act], selection.state))
        job = Job(id, act, selection, who, at, slots=slots)
        if slots:
            check_slots(selection.queue, slots)
            run = partial(self._reshard, **how)
        elif act in FAILED_ACTS:
            run = self._do_to_failed
        if slots or act in FAILED_ACTS:
            job = job._replace(phase=RUNNING, is_meant=True)
            await self._note(job, "begins")
        await self._write(job)

        def list_it(center: Any) -> Any:
            with center.client.pipeline(transaction=False) as pipe:
                pipe.zadd(center.keys.jobs, {id: time.time()})
                pipe.zremrangebyrank(center.keys.jobs, 0, -LISTED - 1)
                pipe.expire(center.keys.jobs, KEPT)
                pipe.execute()

        await self._center.call(list_it)
        self._start(job, run)
        return job

    async def latest(self) -> list[Job]:
        """The jobs that were begun last, the latest first."""
        found = []
        for id in reversed(await self._redis.zrange(self._center.center.keys.jobs, 0, -1)):
            with contextlib.suppress(Problem):  # it is over for an hour
                found.append(await self.get(id.decode()))
        return found

    async def get(self, id: str) -> Job:
        """How far a job has come. Raises Problem if there is none."""
        run, counted = await self._redis.hmget(self._key(id), "run", "job")
        if not (run or counted):
            raise not_found("there is no such job: it is over for an hour, or was never begun")
        job = Job.of_json(run or counted)
        # By Redis's clock: those of several machines differ.
        silent = KEPT - await self._redis.pttl(self._key(id)) / 1000
        if job.phase in (COUNTING, RUNNING) and silent > SILENT and id not in self._tasks:
            return job._replace(phase=LOST)
        return job

    async def confirm(self, id: str, who: str) -> Job:
        """Do what a job has counted; once, whoever says so. Raises Problem, also while it counts:
        nobody knows yet what it would be done to."""
        job = await self.get(id)
        if job.phase == COUNTING:
            raise Problem(
                "conflict", "they are still being counted: wait until it is known how many"
            )
        if job.phase != ASKING:
            return job
        self._check_room()
        if not await self._redis.hset(self._key(id), "go", who):
            return job  # somebody else was first
        job = job._replace(phase=RUNNING, who=who, looked=0, is_meant=True)
        if phase := await self._write(job):  # somebody has wanted before that it stops
            await self._end(job, phase)
            return job
        await self._note(job, "begins")
        self._start(job, self._do)
        return job

    async def stop(self, id: str) -> None:
        """Have a job end where it is."""
        job = await self.get(id)
        if job.phase == ASKING:
            await self._drop(job)
            await self._write(job._replace(phase=STOPPED))
        elif not job.is_over:
            await self._redis.hset(self._key(id), "stop", "1")

    @property
    def busy(self) -> int:
        """How many are under way in this process."""
        return len(self._tasks)

    async def aclose(self) -> None:
        """Stop all that is under way here, if it can be between two steps: then it is known how far
        each has come."""
        self._closing = True
        tasks = list(self._tasks.values())
        if tasks:
            await asyncio.wait(tasks, timeout=END_WITHIN)
        await end(*tasks)

    # -- doing

    def _check_room(self) -> None:
        if len(self._tasks) >= MAX_JOBS:
            raise Problem(
                "rate-limited",
                f"{MAX_JOBS} jobs are under way here: wait for one, or stop one",
                headers=retry_after(5),
            )

    def _start(self, job: Job, run: Callable[[Job], Any]) -> None:
        task = asyncio.get_running_loop().create_task(self._run(job, run))
        self._tasks[job.id] = task

    async def _run(self, job: Job, run: Callable[[Job], Any]) -> None:
        try:
            await run(job)
        except Exception as exc:
            with contextlib.suppress(Exception):
                job = await self.get(job.id)
            job = job._replace(phase=FAILED, said=problem_of(exc).detail)
            await self._note(job, "fails")
            try:
                await self._write(job)
            except Exception:
                logger.warning("a job of the page has failed, and the broker cannot be told")
        finally:
            if self._tasks.get(job.id) is asyncio.current_task():
                del self._tasks[job.id]

    async def _count(self, job: Job) -> None:
        marks: list[Mark] = []
        size = 0
        async for page, looked in self._matching(job):
            left = MOST - job.matching
            if len(page) > left:
                page, job = page[:left], job._replace(more=True)
            more, parts = sum(len(one.body) for one in page), {}
            if marks and (len(marks) + len(page) > PART or size + more > PART_BYTES):
                parts, marks, size = {_part(job.parts): part_of(marks)}, [], 0
            marks += map(mark_of, page)
            size += more
            job = job._replace(
                matching=job.matching + len(page),
                looked=job.looked + looked,
                parts=job.parts + len(parts),
            )
            if phase := await self._write(job, parts):
                await self._drop(job)
                await self._write(job._replace(phase=phase))
                return
            if job.more:
                break
        rest = {_part(job.parts): part_of(marks)} if marks else {}
        await self._write(job._replace(phase=ASKING, parts=job.parts + len(rest)), rest)

    async def _count_and_do(self, job: Job) -> None:
        await self._count(job)
        job = await self.get(job.id)
        if job.phase == ASKING:
            job = job._replace(phase=RUNNING, looked=0, is_meant=True)
            await self._note(job, "begins")
            await self._do(job)

    async def _do_to_failed(self, job: Job) -> None:
        """Retry or forget failed tasks, the latest first, but none that fails from now on."""
        asked, failures = job.selection, self._center.failures
        which = FailureFilter(asked.task or None, asked.error or None)
        now = await self.now_us() / 1e6
        groups = await failures.groups(asked.queue, since=asked.since)
        job = job._replace(matching=sum(one.number for one in groups if which.matches(one)))
        after: str | None = None
        while True:
            page = await failures.find(
                asked.queue,
                since=asked.since,
                until=min(asked.until or now, now),
                limit=FAILED_STEP,
                after=after,
                **which._asdict(),
            )
            ids = [one.id for one in page.failures]
            done = await self._acting.run_failed(job.act, asked.queue, ids) if ids else Done(0, 0)
            self._changed(asked.queue)
            job, after = job.plus(done, len(ids)), page.after
            phase = await self._write(job)
            if phase or after is None:
                await self._end(job, phase if after else DONE)
                return

    async def _reshard(self, job: Job, **how: Any) -> None:
        """Give a queue another number of slots. Where it ends, another one goes on."""

        def tell(moved: int, of: int) -> None:
            nonlocal job
            job = job._replace(matching=of, looked=moved, number=moved)
            if phase := wait_for(self._write(job)):
                raise _Stopped(phase)

        reshard = partial(reshard_topic, patience=PATIENCE, on_progress=tell, **how)
        queue = job.selection.queue
        try:
            done = await self._center.call(reshard, queue, job.slots)
        except _Stopped as stopped:
            await self._end(job, str(stopped))
        else:
            await self._end(job._replace(late=done.left), DONE)
        self._changed(queue)

    async def _do(self, job: Job) -> None:
        for number in range(job.parts):
            raw = await self._redis.hget(self._key(job.id), _part(number))
            counted = read_part(raw) if raw is not None else []
            done = await self._acting.run(job.act, await self._still(job, counted), job.at)
            self._changed(job.selection.queue)
            job = job.plus(done, len(counted))
            phase = await self._write(job)
            if phase == STOPPED or (phase and number + 1 < job.parts):
                await self._end(job, phase)
                return
        await self._end(job, DONE)

    async def _still(self, job: Job, counted: Sequence[Mark]) -> list[Found]:
        """Of what was counted, what is still there, as it was, in a state in which it can be
        done."""
        if not counted:
            return []
        ids, known = [id for id, _ in counted], set(counted)
        found = await self._center.get(ids, topic=job.selection.queue)
        now_us = await self.now_us()
        states = ACTS[job.act].states
        there = [one for one in found if mark_of(one) in known and state_of(one, now_us) in states]
        places = {id: place for place, id in enumerate(ids)}
        return sorted(there, key=lambda one: places[one.id])  # in the order of their times

    async def _end(self, job: Job, phase: str) -> None:
        said = {DONE: "ends", STOPPED: "is stopped", LOST: "ends with its server"}
        job = job._replace(phase=phase)
        await self._note(job, said[phase])
        await self._drop(job)
        await self._write(job)

    async def _note(self, job: Job, what: str) -> None:
        """Write into the audit log what becomes of a job that was confirmed."""
        if job.is_meant:
            to = "" if job.at is None else f" to {iso(round(job.at * 1e6))}"
            to += f" to {job.slots} slots" if job.slots else ""
            said = f"{what}: {job.selection.described()}{to}"
            begun = what == "begins"
            await self._audit.write(
                job.who,
                f"{job.act} all",
                job.selection.queue,
                said,
                job.matching if begun else job.number,
            )

    async def _matching(self, job: Job) -> AsyncIterator[tuple[list[Found], int]]:
        """The messages that match, page by page, and how many were looked at for each."""
        selection = job.selection
        now_us = await self.now_us()
        how = selection.scanned(now_us / 1e6)
        states = ACTS[job.act].states
        after: str | None = None
        while True:
            page = await self._center.scan(
                selection.queue, limit=PART, after=after, size=PART_BYTES, **how
            )
            found = [one for one in page.messages if state_of(one, now_us) in states]
            if selection.looks_inside:
                read = self._reader.read_all(found, now_us)
                found = [one.found async for one in read if selection.matches(one)]
            yield found, len(page.messages)
            after = page.after
            if after is None:
                return

    async def now_us(self) -> int:
        """Redis's clock."""
        seconds, us = await self._redis.time()
        return int(seconds) * 1_000_000 + int(us)

    # -- keeping

    async def _write(self, job: Job, parts: Mapping[str, bytes] | None = None) -> str:
        """Keep how far a job has come; return the phase in which it is to end, if somebody wants it
        to stop or the server ends.

        parts: of what it has counted, by their fields
        """
        fields: dict[str, Any] = {**(parts or {}), "run" if job.is_meant else "job": job.to_json()}

        def write(center: Any) -> Any:
            with center.client.pipeline(transaction=False) as pipe:
                pipe.hset(self._key(job.id), mapping=fields)
                pipe.expire(self._key(job.id), KEPT)
                pipe.hget(self._key(job.id), "stop")
                return pipe.execute()

        stops = (await self._center.call(write))[-1] is not None
        return STOPPED if stops else LOST if self._closing else ""

    async def _drop(self, job: Job) -> None:
        """Forget what it has counted."""
        if job.parts:
            names = [_part(number) for number in range(job.parts)]
            await self._redis.hdel(self._key(job.id), *names)

    def _key(self, id: str) -> str:
        return self._center.center.keys.job(id)


def _part(number: int) -> str:
    """The field of a part of what was counted."""
    return f"part-{number}"
