"""Schedules and their firings as they are shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import kombu_toc

from .rules import Cron, Every, Sun, schedule_of, to_datetime, utc
from .state import BY_HAND, LEFT_OUT, LOST, SKIPPED, STARTED, Record, firing_id

if TYPE_CHECKING:
    from celery import Celery

T = TypeVar("T")


def _recorded(read: Callable[[Record], T]) -> T:
    """A property of a schedule: what this reads in its record."""
    return cast(T, property(lambda schedule: read(schedule.record)))


@dataclass(frozen=True)
class Schedule:
    """A schedule as it was when it was read. Times are datetimes in UTC.

    queue: where its firings go
    text: when it fires, for people
    misfire, overlap: what it does with firings that are late, or meet the former one
    grace, jitter: seconds
    next: the planned time of the next firing, None if there is none; due: with its jitter
    next_id: the id of the next firing's message and task
    last: the planned time of the latest firing
    runs: how many of its firings were run
    options: as they were given
    exclude: days of its time zone on which it does not fire
    edits: the latest changes by people, the latest first: at most 10
    fingerprint: what two equal definitions share
    """

    name: str
    queue: str
    record: Record = field(repr=False)
    template: bytes = field(repr=False)
    reads: Callable[[kombu_toc.Delivery], Any] = field(repr=False, compare=False)

    task = _recorded(lambda record: record.task)

    @cached_property
    def message(self) -> Any:
        """The message of which each firing is made, as a :class:`celery_toc.Task`."""
        return self.reads(kombu_toc.Delivery(self.queue, 0, 0, self.name, 0, self.template, 0))

    @property
    def args(self) -> Any:
        return self.message.args

    @property
    def kwargs(self) -> Any:
        return self.message.kwargs

    timing = _recorded(lambda record: record.timing)

    @property
    def schedule(self) -> Any:
        """As Celery has it: a ``crontab``, a ``schedule`` or a ``solar``."""
        return schedule_of(self.timing)

    text = _recorded(lambda record: record.timing.text)
    timezone = _recorded(lambda record: record.zone)
    misfire = _recorded(lambda record: record.misfire)
    overlap = _recorded(lambda record: record.overlap)
    grace = _recorded(lambda record: record.grace_us / 1e6)
    jitter = _recorded(lambda record: record.jitter_us / 1e6)
    start = _recorded(lambda record: utc(record.start))
    end = _recorded(lambda record: utc(record.end))
    max_runs = _recorded(lambda record: record.max_runs)
    exclude = _recorded(lambda record: [date.fromisoformat(day) for day in record.exclude])
    edits = _recorded(
        lambda record: [Edit(to_datetime(at), by, what) for at, by, what in reversed(record.edits)]
    )
    owner = _recorded(lambda record: record.owner)
    options = _recorded(lambda record: record.options)
    next = _recorded(lambda record: utc(record.next))

    @property
    def next_id(self) -> str | None:
        return None if self.record.next is None else firing_id(self.name, self.record.next)

    @property
    def due(self) -> datetime | None:
        planned = self.record.next
        return None if planned is None else utc(self.record.due(self.name, planned))

    last = _recorded(lambda record: utc(record.last))
    runs = _recorded(lambda record: record.runs)
    paused = _recorded(lambda record: record.paused)
    ended = _recorded(lambda record: record.ended)

    @property
    def state(self) -> str:
        """``active``, ``paused`` or ``ended``."""
        return "paused" if self.paused else "ended" if self.ended else "active"

    created = _recorded(lambda record: utc(record.created))
    changed = _recorded(lambda record: utc(record.changed))
    fingerprint = _recorded(lambda record: record.fingerprint)

    @property
    def beat_entry(self) -> str:
        """The entry of a ``beat_schedule`` that replaces it, as Python text; what no beat can do is
        in comments."""
        timing = self.timing
        if isinstance(timing, Cron):
            names = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
            fields = zip(names, timing.text.split(" "), strict=True)
            when = f"crontab({', '.join(f'{name}={text!r}' for name, text in fields)})"
        elif isinstance(timing, Every):
            when = f"timedelta(microseconds={timing.period_us})"
            if timing.period_us % 1_000_000 == 0:
                when = f"timedelta(seconds={timing.period_us // 1_000_000})"
        else:
            assert isinstance(timing, Sun)
            when = f"solar{(timing.event, timing.latitude, timing.longitude)!r}"
        entry = {
            "task": repr(self.task),
            "schedule": when,
            "args": repr(tuple(self.args or ())),
            "kwargs": repr(dict(self.kwargs or {})),
            "options": repr({**self.options, "queue": self.queue}),
        }
        usual = Record(self.task, {}, self.timezone)
        rules = (
            *("misfire", "grace_us", "overlap", "jitter_us", "start", "end", "max_runs"),
            "exclude",
        )
        lost = [
            f"{rule.removesuffix('_us')}={getattr(self, rule.removesuffix('_us'))!s}"
            for rule in rules
            if getattr(self.record, rule) != getattr(usual, rule)
        ]
        if isinstance(timing, Cron):
            lost.append(f"timezone={timing.zone!s}, unless the app has it")
        if self.paused:
            lost.append("that it is paused")
        lines = [f"    # Not taken along: {'; '.join(lost)}."] if lost else []
        lines.append(f"    {self.name!r}: {{")
        lines += [f"        {key!r}: {text}," for key, text in entry.items()]
        return "\n".join([*lines, "    },"])

    def upcoming(self, count: int) -> list[datetime]:
        """The planned times of the next firings, at most so many."""
        found: list[datetime] = []
        at = self.record.next
        left = count
        if self.record.max_runs is not None:
            left = min(left, self.record.max_runs - self.record.runs)
        while at is not None and len(found) < left:
            moment = utc(at)
            assert moment is not None
            found.append(moment)
            at = self.record.after(at)
        return found


class Edit(NamedTuple):
    """A change of a schedule: when, by whom, and what was changed."""

    at: datetime
    by: str
    what: str


class Listed(NamedTuple):
    """A page of schedules.

    after: goes on behind it, as an argument of :meth:`.schedules.Schedules.list`; None: it was the
        last one
    """

    schedules: list[Schedule]
    after: str | None


class SchedulesByName(NamedTuple):
    """Some schedules by queue and name.

    behind: the queue and the name behind which it goes on; without a name, behind all of that
        queue. None: everything was read
    """

    schedules: list[Schedule]
    behind: tuple[str, str] | None


class Firing(NamedTuple):
    """What is remembered of a firing. Times are datetimes in UTC.

    id: of its message and its task
    planned: when it was to be
    started: when a worker took it to run it; None if it was not run
    outcome: ``started``, or what the result backend knows of the task since, in lower case, such as
        ``success``; ``skipped``, by the misfire or overlap rule; ``left out`` (``skip_next``);
        ``lost``: its message was cancelled, or whoever took it knew nothing of schedules
    reason: why it was not run; else empty
    ended: when its task ended, if the result backend knows
    by_hand: whether it was sent by ``run_now``
    """

    id: str
    planned: datetime
    started: datetime | None
    outcome: str
    reason: str
    ended: datetime | None
    by_hand: bool

    @property
    def late(self) -> float | None:
        """Seconds from its planned time to its start."""
        if self.started is None:
            return None
        return (self.started - self.planned).total_seconds()


def firing_of_line(app: Celery, id: str, said: list[Any]) -> Firing:
    """What a line says of a firing."""
    planned_us, what, at_us, reason = said[:4]
    planned, at = utc(planned_us), utc(at_us)
    assert planned is not None
    by_hand = what == BY_HAND
    ran = what not in (SKIPPED, LEFT_OUT, LOST)
    outcome, ended = _result(app, id) if ran else (what, None)
    return Firing(id, planned, at if ran else None, outcome, reason, ended, by_hand)


def _result(app: Celery, id: str) -> tuple[str, datetime | None]:
    try:
        result = app.AsyncResult(id)
        state = result.state
        if state in ("PENDING", "SENT", "RECEIVED"):
            return STARTED, None
        return state.lower(), result.date_done
    except Exception:  # no backend, or one that cannot be reached or asked
        return STARTED, None
