"""What is kept of a schedule, and how it goes on. Pure: what happened and the time are arguments.

Each event makes of a :class:`Record` a :class:`Step`: the record as it is from then on, whether the
message that waits is taken out, and which firing is put. Whoever runs it does so in one step, and
only if the record has not changed meanwhile (:class:`kombu_toc.ScheduleChange`). That a firing is
the next one is said by the record alone. So what is delivered twice puts its successor once, and
what was lost is followed by whoever notices.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from datetime import date, datetime, time, timezone
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import kombu_toc

from . import rules

if TYPE_CHECKING:
    from celery import Celery

MISFIRES = ("once", "skip", "all")
OVERLAPS = ("allow", "skip", "wait", "cancel")

#: What became of a firing, as its line says.
STARTED, SKIPPED, LEFT_OUT, LOST, BY_HAND = "started", "skipped", "left out", "lost", "by hand"

#: Why a firing is lost.
GONE = "its message was gone"

#: Firings that are counted as missed at once, at most.
MAX_COUNTED = 1000

#: How far back the misfire rule ``all`` goes, in microseconds; of what was missed before, one runs.
CATCH_UP_US = 24 * 3600 * rules.SECOND_US
#: Stretches of time that are remembered beside the latest: none of their firings comes again when
#: the clock is set.
STRETCHES = 8

#: Changes by people that are remembered.
EDITS = 10

#: What is to be done with a firing that has come.
RUN, DROP, WAIT = "run", "drop", "wait"


@dataclass(frozen=True)
class Record:
    """A schedule. Times are microseconds since the epoch."""

    task: str
    when: dict[str, Any]  #: as `Timing.to_json` gives it
    zone: str
    misfire: str = "once"
    grace_us: int = 60 * rules.SECOND_US
    overlap: str = "allow"
    jitter_us: int = 0
    start: int | None = None
    end: int | None = None
    max_runs: int | None = None
    exclude: tuple[str, ...] = ()  #: dates of its zone on which it does not fire
    expires_us: int | None = None  #: after its planned time a firing expires
    priority: int = 0
    traits: str = ""  #: what its messages have of their own, but for what follows from `overlap`
    owner: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  #: as they were given, to be shown
    fingerprint: str = ""
    created: int = 0
    changed: int = 0
    next: int | None = None  #: the planned time of the firing that waits
    last: int | None = None  #: that of the latest firing that was followed
    since: int | None = None  #: each of its times from that on was followed, until `last`
    followed: tuple[tuple[int, int], ...] = ()  #: from and until when others were, in their order
    forgot: int | None = None  #: of times up to then, it is not known which were followed
    #: back-filled firings that wait: from and until which planned time, and when the last is due
    filled: tuple[tuple[int, int, int], ...] = ()
    runs: int = 0
    paused: bool = False
    edits: tuple[tuple[int, str, str], ...] = ()  #: when somebody changed it, who, and what
    #: planned time of the next firing, if it has come and waits for the former one to end
    waits: int | None = None
    #: it is on its way here from another queue, where it still fires
    moving: bool = False
    #: meanwhile, the planned time of a firing that was due there and had not been taken
    carried: int | None = None
    #: how often a firing was run again of which no two may run at once
    again: int | None = None
    rest: dict[str, Any] = field(default_factory=dict)  #: what only newer releases know

    @property
    def timing(self) -> rules.Timing:
        return rules.timing_of(self.when)

    @property
    def ended(self) -> bool:
        return self.next is None and not self.paused and not self.moving

    @property
    def message_traits(self) -> str:
        """What its messages have of their own. If no two may run at once, one holds the others off
        until its task has ended, also when Celery acknowledges it early."""
        if self.overlap == "allow":
            return self.traits
        return f"{self.traits},s1" if self.traits else ";s1"

    def next_id(self, name: str) -> str:
        """The id of the next firing's message, or nothing."""
        return "" if self.next is None else firing_id(name, self.next)

    def to_text(self, name: str) -> str:
        """As the center keeps it."""
        said = {k: v for k, v in vars(self).items() if v or v.__class__ in (int, str)}
        said.pop("rest", None)
        return f"{self.next_id(name)}\n{_encode({**self.rest, **said})}"

    @classmethod
    def of_text(cls, text: str) -> Record:
        said = json.loads(text.partition("\n")[2])
        for name in ("followed", "filled", "edits"):
            said[name] = tuple(map(tuple, said.get(name, ())))
        said["exclude"] = tuple(said.get("exclude", ()))
        said["rest"] = {k: said.pop(k) for k in said.keys() - _KNOWN}
        return replace(EMPTY, **said)

    # -- when

    def due(self, name: str, planned: int) -> int:
        """When a firing is due: its planned time, and its jitter, which is always the same."""
        if not self.jitter_us:
            return planned
        sum = hashlib.sha256(firing_id(name, planned).encode()).digest()
        return planned + int.from_bytes(sum[:8], "big") % (self.jitter_us + 1)

    def looked_at(self, name: str) -> int | None:
        """From when on it is looked whether it still goes on: when its next firing is due."""
        if self.moving:
            return self.changed
        return None if self.next is None else self.due(name, self.next)

    def after(self, us: int, *, again: bool = False) -> int | None:
        """The planned time of the first firing after that which was not followed yet.

        again: or was
        """
        if self.start is not None and us < self.start:
            us = self.start - 1
        found = self.timing.after(us)
        while found is not None:
            until = None if again else self._followed_until(found)
            until = self._excluded_until(found) if until is None else until
            if until is None:
                break
            found = self.timing.after(until)
        if found is None or (self.end is not None and found > self.end):
            return None
        return found

    def _excluded_until(self, planned: int) -> int | None:
        """The end of the day of a time, if that day is excluded."""
        if not self.exclude:
            return None
        zone = rules.zone_of(self.zone)
        day = rules.to_datetime(planned).astimezone(zone).date()
        if day.isoformat() not in self.exclude:
            return None
        return rules.to_us(datetime.combine(day + rules.DAY, time.min, zone)) - 1

    # -- what was followed

    @property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """From and until when its times were followed."""
        if self.since is None or self.last is None:
            return self.followed
        return (*self.followed, (self.since, self.last))

    def _followed_until(self, planned: int) -> int | None:
        """Of a time that was followed: until when all were."""
        for first, last in self.stretches:
            if first <= planned <= last:
                return last
        return None

    def was_followed(self, planned: int) -> bool:
        return self._followed_until(planned) is not None

    def follow(self, planned: int) -> Record:
        """That time is followed: it comes never again, whatever the clock says."""
        if self.was_followed(planned):
            return self
        if self.since is None or self.last is None:
            return replace(self, since=planned, last=planned)
        if planned > self.last and self.after(self.last) == planned:
            return replace(self, last=planned)
        # What was passed over was missed; or the clock was set, and it may come.
        return replace(self._remember(self.stretches), since=planned, last=planned)

    def _remember(self, stretches: Iterable[tuple[int, int]]) -> Record:
        """The latest of these stretches are those that were followed; adjacent ones are one."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted(stretches):
            before = joined[-1] if joined else None
            if before and first <= (self.after(before[1], again=True) or first):
                joined[-1] = (before[0], max(before[1], last))
            else:
                joined.append((first, last))
        forgot = max((last for _, last in joined[:-STRETCHES]), default=0)
        forgot = max(forgot, self.forgot or 0)
        return replace(self, followed=tuple(joined[-STRETCHES:]), forgot=forgot or None)

    def unfollowed(self, first: int, last: int, most: int) -> list[int]:
        """The first planned times of a range that nobody has followed, before the next firing."""
        if self.next is not None:
            last = min(last, self.next - 1)
        found: list[int] = []
        at = self.after(first - 1)
        while at is not None and at <= last and len(found) < most:
            found.append(at)
            at = self.after(at)
        return found

    def fill(self, times: Sequence[int], due: int, now: int) -> Record:
        """Each of these times is followed, as :meth:`unfollowed` has given them; due: when the
        message of the last one is."""
        filled = [one for one in self.filled if one[2] > now]
        for at in times:
            if filled and self.after(filled[-1][1], again=True) == at:
                filled[-1] = (filled[-1][0], at, due)
            else:
                filled.append((at, at, due))
        after = self._remember([*self.followed, (times[0], times[-1])])
        return replace(after, filled=tuple(filled))

    def filled_ids(self, name: str, now: int) -> list[str]:
        """The ids of back-filled firings of which some are not due yet."""
        ids = []
        for first, last, _ in (one for one in self.filled if one[2] > now):
            at: int | None = first
            while at is not None and at <= last:
                ids.append(firing_id(name, at))
                at = self.after(at, again=True)
        return ids

    def edited(self, at: int, by: str, what: str) -> Record:
        """Somebody has changed it."""
        return replace(self, edits=(*self.edits, (at, by, what))[-EDITS:])

    def seen(self, now: int) -> int:
        """Up to when its times were followed or are not to be, by a clock that was set back."""
        times = (*(last for _, last in self.stretches), self.created, self.changed)
        return max((at for at in times if 0 < at <= now), default=now)

    def following(self, planned: int, late: int, now: int) -> int | None:
        """The planned time of the firing that follows one that has come or was lost.

        late: how late it is
        """
        if late <= self.grace_us:
            return self.after(planned)
        reach = {"once": 0, "skip": self.grace_us, "all": CATCH_UP_US}[self.misfire]
        return self.after(max(planned, now - reach))


def replace(record: Record, **changed: Any) -> Record:
    """The record with other values, in a tenth of the time of :func:`dataclasses.replace`."""
    made = object.__new__(Record)
    vars(made).update(vars(record), **changed)
    return made


_encode = json.JSONEncoder(separators=(",", ":")).encode

#: What a record says beside `rest`; and one that says nothing.
_KNOWN = {one.name for one in fields(Record)} - {"rest"}
EMPTY = Record("", {}, "")


class Step(NamedTuple):
    """What an event makes of a record.

    record: None: the schedule goes
    take_out: planned time of a firing whose message goes if it still waits
    put: planned time of the firing that is put
    lines: what is noted of firings
    """

    record: Record | None
    take_out: int | None = None
    put: int | None = None
    lines: tuple[str, ...] = ()


def firing_id(name: str, planned: int) -> str:
    """The id of a firing's message, and of its task."""
    return f"{name}@{_moment(planned)}"


@lru_cache(maxsize=256)
def _moment(us: int) -> str:
    spec = "microseconds" if us % 1000 else "milliseconds"
    text = rules.to_datetime(us).isoformat(timespec=spec if us % rules.SECOND_US else "seconds")
    return f"{text[:-6]}Z"


def planned_of(name: str, id: str) -> int | None:
    """The inverse of :func:`firing_id`; None for an id that is no firing's."""
    text = id[len(name) + 1 : -1]
    if not id.startswith(f"{name}@") or not id.endswith("Z"):
        return None
    try:
        return rules.to_us(datetime.fromisoformat(text).replace(tzinfo=timezone.utc))
    except ValueError:
        return None


def line_of(
    id: str, planned: int, what: str, at: int, reason: str = "", ended: int | None = None
) -> str:
    """A line about a firing."""
    said: list[Any] = [planned, what, at, reason] + ([] if ended is None else [ended])
    return f"{id}\t{_encode(said)}"


def read_line(line: str) -> tuple[str, list[Any]]:
    """The inverse of :func:`line_of`: the id, and the rest."""
    id, _, said = line.partition("\t")
    return id, json.loads(said)


# -- events

#: What stays when a schedule is put again, or moves to another queue.
HAPPENED = (
    *("created", "last", "since", "followed", "forgot", "filled", "runs", "paused", "edits"),
    "rest",
)


def begin(record: Record, now: int) -> Step:
    """A schedule is put for the first time."""
    first = None if record.paused else record.after(now)
    return Step(replace(record, next=first, created=now, changed=now), put=first)


def change(old: Record, new: Record, now: int) -> Step:
    """A schedule is put again, as another. What has happened stays; whether it is paused, too."""
    if old.moving:
        old = replace(old, next=old.carried)
    kept = replace(new, changed=now, **{name: getattr(old, name) for name in HAPPENED})
    first = kept.after(now)
    if kept.paused or _is_over(kept, old.runs):
        return Step(replace(kept, next=None), take_out=old.next)
    pending = old.next
    if pending is not None and pending <= now and _within(new, pending):
        # What is due, or waits for its jitter, has not run: it still does, as what is put now.
        return Step(replace(kept, next=pending, waits=old.waits), take_out=pending, put=pending)
    return Step(replace(kept, next=first), take_out=old.next, put=first)


#: What a put says of a schedule, beside its message.
_DEFINED = (
    *("task", "when", "zone", "misfire", "grace_us", "overlap", "jitter_us", "start", "end"),
    *("max_runs", "exclude", "expires_us", "priority", "owner", "options"),
)


def _within(record: Record, planned: int) -> bool:
    return (
        (record.start is None or record.start <= planned)
        and (record.end is None or planned <= record.end)
        and record._excluded_until(planned) is None
    )


def difference(old: Record, new: Record) -> str:
    """What a put changes, for people."""
    told = []
    for name in _DEFINED:
        was, now = getattr(old, name), getattr(new, name)
        if was == now:
            continue
        if name == "when":
            was, now = old.timing.text, new.timing.text
        shown = {"when": "schedule", "zone": "timezone"}.get(name, name.removesuffix("_us"))
        told.append(f"{shown} {was} -> {now}" if isinstance(was, str) else shown)
    return f"put: {', '.join(told) or 'message'}"[:200]


def arrive(old: Record, new: Record, now: int, *, waits: bool) -> Record:
    """A schedule is put into another queue: what has happened is copied there. It fires there when
    it has gone from the former one. A firing that is due there goes along.

    waits: whether the message of the next firing waits in the former queue
    """
    carried = old.next if waits and old.next is not None and old.next <= now else None
    copied = {name: getattr(old, name) for name in HAPPENED}
    return replace(new, moving=True, next=None, carried=carried, changed=now, **copied)


def settle(record: Record, now: int) -> Step:
    """A schedule has arrived in another queue: it is gone from the former one."""
    return change(record, replace(record, moving=False, carried=None), now)


def pause(record: Record) -> Step:
    return Step(replace(record, paused=True, next=None, waits=None), take_out=record.next)


def resume(record: Record, now: int) -> Step:
    """What was missed meanwhile is not made up for."""
    if not (record.paused or is_late(record, now)):
        return Step(record)
    first = None if _is_over(record, record.runs) else record.after(now)
    after = replace(record, paused=False, next=first, changed=now)
    return Step(after, take_out=record.next, put=first)


def is_late(record: Record, now: int) -> bool:
    """Whether the next firing is later than it would be if the schedule were put now: the clock was
    set back."""
    if record.next is None or record.next <= now:
        return False
    first = record.after(now)
    return first is not None and first < record.next


def set_back(record: Record, now: int, lost: str = "") -> Step:
    """A schedule goes on where it was when the clock showed this time. What was missed since is
    made up for as its rules say.

    lost: the id of the next firing, if its message is gone: then it comes no more
    """
    assert record.next is not None
    lines = (line_of(lost, record.next, LOST, now, GONE),) if lost else ()
    followed = record.follow(record.next) if lost else record
    first = followed.after(record.seen(now))
    return Step(replace(followed, next=first, waits=None), record.next, first, lines)


def leave_out(name: str, record: Record, now: int) -> Step:
    """The next firing is left out."""
    if record.next is None:
        return Step(record)
    following = record.after(record.next)
    line = line_of(firing_id(name, record.next), record.next, LEFT_OUT, now)
    after = replace(record.follow(record.next), next=following, waits=None)
    return Step(after, take_out=record.next, put=following, lines=(line,))


def passed_over(before: Record, after: Record | None) -> int:
    """How many firings were left out between the one that came and the one that follows; at most
    `MAX_COUNTED`."""
    if before.next is None or after is None or after.next is None:
        return 0
    number, planned = 0, before.after(before.next)
    while planned is not None and planned < after.next and number < MAX_COUNTED:
        number, planned = number + 1, before.after(planned)
    return number


def delete(record: Record) -> Step:
    return Step(None, take_out=record.next)


def lose(name: str, record: Record, now: int) -> Step:
    """The message of the next firing is gone, although nobody has followed it."""
    assert record.next is not None
    planned = record.next
    late = now - record.due(name, planned)
    following = record.following(planned, late, now)
    line = line_of(firing_id(name, planned), planned, LOST, now, GONE)
    after = replace(record.follow(planned), next=following, waits=None)
    return Step(after, put=following, lines=(line,))


def take(
    name: str,
    record: Record,
    id: str,
    now: int,
    running: bool,
    noted: str | None,
    *,
    alone: bool = True,
) -> tuple[str, Step | None]:
    """A firing has come: what is to be done with it, and how the schedule goes on; None: as it is.

    id: of its message
    running: whether another firing is still running
    noted: what is noted of this one already
    alone: whether its message says that no two may run at once; Celery's own retry does not
    """
    if record.next is None or id != firing_id(name, record.next):
        alone = alone and record.overlap != "allow"
        return _take_another(name, record, id, now, running and alone, noted, alone)
    planned = record.next
    late = now - record.due(name, planned)
    has_waited = record.waits == planned
    reason = ""
    if running and record.overlap in ("wait", "cancel"):
        return WAIT, None if has_waited else Step(replace(record, waits=planned))
    if running and record.overlap == "skip":
        reason = "the former firing was still running"
    elif late > record.grace_us and record.misfire == "skip" and not has_waited:
        reason = f"late by {late / rules.SECOND_US:.3f} s"
    following = record.following(planned, late, now)
    runs = record.runs + (not reason)
    if _is_over(record, runs):
        following = None
    line = line_of(id, planned, SKIPPED if reason else STARTED, now, reason)
    after = replace(record.follow(planned), next=following, runs=runs, waits=None)
    return (DROP if reason else RUN), Step(after, put=following, lines=(line,))


def _take_another(
    name: str, record: Record, id: str, now: int, must_wait: bool, noted: str | None, alone: bool
) -> tuple[str, Step | None]:
    """A firing has come that is not the next one: somebody has followed it, and it comes again; or
    the schedule was paused or changed while it was on its way, and it is noted here that it has
    come, lest it comes again when the clock is set back."""
    planned = planned_of(name, id)
    if planned is None:  # by hand
        return RUN, None
    if noted == SKIPPED:
        return DROP, None
    if must_wait and record.overlap == "wait":
        return WAIT, None
    if must_wait:
        line = line_of(id, planned, SKIPPED, now, "another firing was running")
        return DROP, Step(replace(record, again=(record.again or 0) + 1), lines=(line,))
    if noted is not None or record.was_followed(planned):
        # Who takes another one at the same moment has to see that this one runs.
        return RUN, Step(replace(record, again=(record.again or 0) + 1)) if alone else None
    line = line_of(id, planned, STARTED, now)
    after = replace(record.follow(planned), runs=record.runs + 1)
    return RUN, Step(after, lines=(line,))


def _is_over(record: Record, runs: int) -> bool:
    return record.max_runs is not None and runs >= record.max_runs


# -- schedules and their firings as they are shown


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
        return rules.schedule_of(self.timing)

    text = _recorded(lambda record: record.timing.text)
    timezone = _recorded(lambda record: record.zone)
    misfire = _recorded(lambda record: record.misfire)
    overlap = _recorded(lambda record: record.overlap)
    grace = _recorded(lambda record: record.grace_us / 1e6)
    jitter = _recorded(lambda record: record.jitter_us / 1e6)
    start = _recorded(lambda record: rules.utc(record.start))
    end = _recorded(lambda record: rules.utc(record.end))
    max_runs = _recorded(lambda record: record.max_runs)
    exclude = _recorded(lambda record: [date.fromisoformat(day) for day in record.exclude])
    edits = _recorded(
        lambda record: [
            Edit(rules.to_datetime(at), by, what) for at, by, what in reversed(record.edits)
        ]
    )
    owner = _recorded(lambda record: record.owner)
    options = _recorded(lambda record: record.options)
    next = _recorded(lambda record: rules.utc(record.next))

    @property
    def next_id(self) -> str | None:
        return None if self.record.next is None else firing_id(self.name, self.record.next)

    @property
    def due(self) -> datetime | None:
        planned = self.record.next
        return None if planned is None else rules.utc(self.record.due(self.name, planned))

    last = _recorded(lambda record: rules.utc(record.last))
    runs = _recorded(lambda record: record.runs)
    paused = _recorded(lambda record: record.paused)
    ended = _recorded(lambda record: record.ended)

    @property
    def state(self) -> str:
        """``active``, ``paused`` or ``ended``."""
        return "paused" if self.paused else "ended" if self.ended else "active"

    created = _recorded(lambda record: rules.utc(record.created))
    changed = _recorded(lambda record: rules.utc(record.changed))
    fingerprint = _recorded(lambda record: record.fingerprint)

    @property
    def beat_entry(self) -> str:
        """The entry of a ``beat_schedule`` that replaces it, as Python text; what no beat can do is
        in comments."""
        timing = self.timing
        if isinstance(timing, rules.Cron):
            fields = zip(rules.FIELDS, timing.fields.split(" "), strict=True)
            when = f"crontab({', '.join(f'{name}={text!r}' for name, text in fields)})"
        elif isinstance(timing, rules.Every):
            when = f"timedelta(microseconds={timing.period_us})"
            if timing.period_us % 1_000_000 == 0:
                when = f"timedelta(seconds={timing.period_us // 1_000_000})"
        else:
            assert isinstance(timing, rules.Sun)
            when = f"solar{(timing.event, timing.latitude, timing.longitude)!r}"
        entry = {
            "task": repr(self.task),
            "schedule": when,
            "args": repr(tuple(self.args or ())),
            "kwargs": repr(dict(self.kwargs or {})),
            "options": repr({**self.options, "queue": self.queue}),
        }
        others = (
            *("misfire", "grace_us", "overlap", "jitter_us", "start", "end", "max_runs"),
            "exclude",
        )
        lost = [
            f"{rule.removesuffix('_us')}={getattr(self, rule.removesuffix('_us'))!s}"
            for rule in others
            if getattr(self.record, rule) != getattr(EMPTY, rule)
        ]
        if isinstance(timing, rules.Cron):
            lost.append(f"timezone={timing.zone!s}, unless the app has it")
            lost += ["either_day=True"] * timing.either_day
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
            found.append(rules.to_datetime(at))
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
    planned, at = rules.to_datetime(planned_us), rules.to_datetime(at_us)
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
