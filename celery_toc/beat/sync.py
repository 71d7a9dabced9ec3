"""Puts an app's ``beat_schedule`` as schedules of its timeout center: what is new and what has
changed; and removes what an earlier release of the app has put and this one does not have.

Any number of processes may do it at a time, of several releases: which of them is in force is
decided by the center (:meth:`kombu_toc.TimeoutCenter.recurring.edition`), and one process puts it.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import lru_cache, partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple
from zoneinfo import ZoneInfo

from celery.schedules import crontab, schedule, solar

import kombu_toc

from ..schedules.rules import FIELDS, check_name, read_schedule, read_zone
from ..schedules.schedules import TOGETHER
from . import configured
from .configured import UNUSABLE, Entry, NotTakenError, Read, Refused, read_each, without_marks

if TYPE_CHECKING:
    from celery import Celery

    from ..app.task import TaskCenter
    from ..schedules.messages import Plan
    from ..schedules.schedules import Schedules
    from ..schedules.state import Schedule


#: What the schedules that were put here have before the app's name, as their owner.
OWNER = "beat:"

#: Seconds after which the center is told that putting goes on: well within its patience.
RENEW = 5.0

#: How often all is put again for a process that put something late.
MOST_ROUNDS = 5

#: What a message takes from its task, if nobody says otherwise.
_OF_TASKS = (
    *("serializer", "compression", "priority", "expires", "queue", "exchange", "routing_key"),
    *("ignore_result", "soft_time_limit", "time_limit"),
)

#: What differs in every process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Outcome(NamedTuple):
    """What a :meth:`Sync.run` has done.

    told: the center's verdict; unless it was to put, nothing below has changed
    put, removed: names of schedules that are new or have changed, and that are gone
    unchanged: how many were there as they are
    refused: entries that cannot be put, and why
    """

    told: kombu_toc.Edition
    put: list[str]
    removed: list[str]
    unchanged: int
    refused: list[Refused]


class Sync:
    """What one process has of an app's ``beat_schedule``.

    app: has been finalized, and its tasks are loaded
    center: the app's
    process: a name that no other process has

    Raises ConfigurationError if the app has no name, or one that is too long.
    """

    def __init__(self, app: Celery, center: TaskCenter, process: str) -> None:
        if not app.main:
            raise kombu_toc.ConfigurationError(
                "the app that is to put its beat_schedule has no name: Celery('shop')"
            )
        self._app = app
        self._center = center
        self._process = process
        self._source = str(app.main)
        self._prefix = str(app.conf.get("toc_beat_prefix") or "")
        release = app.conf.get("toc_beat_release")
        self._release = "" if release is None else str(release)
        self._owner = f"{OWNER}{self._source}"
        #: the setting as it was read, and what was in it
        self._configured: dict[Any, Any] | None = None
        self._found = Read([], [])
        self._edition = ""

    def run(self, *, looked: float = 0.0, force: bool = False) -> Outcome:
        """Put what is to be put.

        looked: seconds for which this process has tried
        force: put it also if another release has put something else since
        """
        self._read()
        told = self._tell("force" if force else "use", looked)
        outcome = Outcome(told, [], [], 0, [])
        rounds = 0
        while told.verdict == "put" and rounds < MOST_ROUNDS:
            outcome = self._put_all(told)
            told, rounds = outcome.told, rounds + 1
        return outcome._replace(told=told, refused=[*self._found.refused, *outcome.refused])

    def plan(self) -> Outcome:
        """What :meth:`run` would do if it were to put; nothing is changed."""
        self._read()
        told = kombu_toc.Edition("put", 0, self._edition, self._release, "", 0.0, 0.0)
        new, gone, same, refused = self._compare()
        return Outcome(
            told, [one.name for one in new], gone, same, [*self._found.refused, *refused]
        )

    def _tell(self, what: str, looked: float = 0.0) -> kombu_toc.Edition:
        return self._center.recurring.edition(
            self._source,
            self._edition,
            self._process,
            what=what,
            release=self._release,
            looked=looked,
        )

    def _read(self) -> None:
        """Read the setting, unless it is as it was."""
        now = dict(self._app.conf.beat_schedule or {})
        if self._edition and now == self._configured:
            return
        found = configured.read(self._app)
        taken, refused = [], list(found.refused)
        digest = hashlib.sha256(self._prefix.encode(errors="surrogatepass"))
        for entry in found.entries:
            try:
                text = definition(self._app, entry)
            except UNUSABLE as exc:
                refused.append(Refused(entry.name, str(exc)))
            else:
                taken.append(entry)
                digest.update(text.encode(errors="surrogatepass"))
        self._found = Read(taken, refused)
        self._edition, self._configured = digest.hexdigest()[:32], now

    def _compare(self) -> tuple[list[Plan], list[str], int, list[Refused]]:
        """What is to be put, what is to be removed, how much stays, and what is not put."""
        schedules = self._center.schedules
        stored = {one.name: one for one in schedules.each()}
        mine = {name for name, one in stored.items() if one.owner == self._owner}
        with schedules.planning():
            new, same, refused = _planned(
                *(schedules, self._found.entries, stored, self._owner, self._why_not, self._prefix)
            )
        # One that cannot be put now stays as it was.
        kept = {self._prefix + one.name for some in self._found for one in some}
        return new, sorted(mine - kept), same, refused

    def _why_not(self, entry: Entry, there: Schedule | None) -> str:
        if there is None or there.owner == self._owner:
            return ""
        return (
            f"there is a schedule of that name, put {_by(there)}: give the entry another name, or "
            "set toc_beat_prefix"
        )

    def _put_all(self, told: kombu_toc.Edition) -> Outcome:
        new, gone, same, refused = self._compare()
        schedules = self._center.schedules.signed(f"beat_schedule of {self._process}")
        put: list[str] = []
        removed: list[str] = []
        renewed = time.monotonic()
        parts = [new[start : start + TOGETHER] for start in range(0, len(new), TOGETHER)]
        whats: list[list[Plan] | str] = [*parts, *gone]
        for part in whats:
            if time.monotonic() - renewed > RENEW:
                told = self._tell("renew")
                renewed = time.monotonic()
                if told.verdict != "put":
                    return Outcome(told, put, removed, same, refused)
            if isinstance(part, str):
                if schedules.delete(part, owner=self._owner):
                    removed.append(part)
                continue
            for plan, kept in zip(part, schedules.keep_many(part, own=True), strict=True):
                if isinstance(kept, Exception):
                    refused.append(Refused(plan.name.removeprefix(self._prefix), str(kept)))
                else:
                    put.append(plan.name)
        return Outcome(self._tell("done"), put, removed, same, refused)


def definition(app: Celery, entry: Entry) -> str:
    """A text that two entries share if and only if the same is to be put for both.

    It asks nobody, and has Celery make no message: every worker makes it of every entry. Raises
    ScheduleError for an entry that cannot be put, TypeError for arguments that no JSON has.
    """
    check_name(entry.name)
    zone = read_zone(app, entry.name, entry.schedule, entry.rules.get("timezone"))
    either_day = bool(entry.rules.get("either_day"))
    when = read_schedule(entry.name, entry.schedule, zone, None, 0, either_day=either_day).to_json()
    relative = bool(getattr(entry.schedule, "relative", False))
    task = app.tasks.get(entry.task)
    defaults = {name: getattr(task, name, None) for name in _OF_TASKS}
    route = app.amqp.router.route({}, entry.task, entry.args, entry.kwargs)
    where = {name: getattr(value, "name", value) for name, value in route.items()}
    said = [entry.name, entry.task, entry.arguments(), zone, when, relative, defaults, where]
    said.append(app.conf.task_default_queue)
    return _ADDRESS.sub("", json.dumps(said, sort_keys=True, default=_plain)) + "\n"


def _plain(value: Any) -> Any:
    return sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else repr(value)


def _by(there: Schedule) -> str:
    return f"by {there.owner!r}" if there.owner else "by hand"


def _planned(
    schedules: Schedules,
    entries: Iterable[Entry],
    stored: Mapping[str, Schedule],
    owner: str,
    why_not: Callable[[Entry, Schedule | None], str],
    prefix: str = "",
) -> tuple[list[Plan], int, list[Refused]]:
    """What is to be put, how much is there as it is, and what cannot be put.

    stored: the schedules that there are, by name
    owner: whose schedules they become
    why_not: says why an entry is not put, beside the schedule of its name; empty: it is
    prefix: of the names of schedules
    """
    planned: list[Plan] = []
    refused: list[Refused] = []
    same = 0
    for entry in entries:
        name = prefix + entry.name
        there = stored.get(name)
        if why := why_not(entry, there):
            refused.append(Refused(entry.name, why))
            continue
        try:
            what = (name, entry.task, entry.schedule)
            plan = schedules.plan(*what, **entry.arguments(), owner=owner)
        except UNUSABLE as exc:
            refused.append(Refused(entry.name, str(exc)))
            continue
        if entry.paused:
            plan = plan._replace(record=replace(plan.record, paused=True))
        if there is not None and there.fingerprint == plan.record.fingerprint:
            same += 1
        else:
            planned.append(plan)
    return planned, same, refused


# -- takes over what another beat has: the tables of django-celery-beat, or redbeat's keys in
# Redis
#
# The models of django-celery-beat are read through Django, as the app has set it up;
# ``ModelEntry`` of ``django_celery_beat.schedulers`` shows what a row means (read in 2.5 to
# 2.9). redbeat need not be installed: ``redbeat.schedulers`` and ``redbeat.decoder`` explain its
# keys (read in 2.0 to 2.4).


#: What imported schedules have before the name of their source, as their owner.
IMPORTED_BY = "import:"


class Imported(NamedTuple):
    """What an import has done, or would do.

    put: names of schedules that are new, or have changed
    paused: those of them that are put paused, as they were
    unchanged: how many were there as they are
    refused: entries that are not taken, and why
    """

    put: list[str]
    paused: list[str]
    unchanged: int
    refused: list[Refused]


def import_entries(
    app: Celery,
    center: TaskCenter,
    read: Read,
    owner: str,
    *,
    dry_run: bool = False,
    force: bool = False,
) -> Imported:
    """Put entries as schedules; what is there as it is stays untouched.

    owner: whose schedules they become
    dry_run: change nothing
    force: also replace schedules that others have put under the same names
    """
    schedules = center.schedules
    stored = {one.name: one for one in schedules.each()}
    mine = {one.name for some in configured.read(app) for one in some}

    def why_not(entry: Entry, there: Schedule | None) -> str:
        if entry.name in mine:
            return (
                "it is in the app's beat_schedule: 'celery toc schedule sync' puts it, or workers "
                "with toc_beat"
            )
        if there is None or there.owner == owner or force:
            return ""
        return f"a schedule of that name was put {_by(there)}: --force replaces it"

    refused = [*read.refused]
    put: list[str] = []
    unchanged = 0
    with schedules.planning():
        # A part after the other: plans take 5 KB each.
        for start in range(0, len(read.entries), TOGETHER):
            some = read.entries[start : start + TOGETHER]
            plans, same, unusable = _planned(schedules, some, stored, owner, why_not)
            unchanged += same
            refused += unusable
            kept = [] if dry_run else schedules.keep_many(plans)
            for plan, done in zip_longest(plans, kept):
                if isinstance(done, Exception):
                    refused.append(Refused(plan.name, str(done)))
                else:
                    put.append(plan.name)
    new = {entry.name for entry in read.entries if entry.paused} - stored.keys()
    paused = [name for name in put if name in new]
    return Imported(put, paused, unchanged, refused)


# -- django-celery-beat

#: For what happens once, at the time with which it starts.
_ONCE = schedule(timedelta(days=1))

_ROUTING = ("queue", "exchange", "routing_key")


def django_rows() -> Iterable[Any]:
    """The periodic tasks of the app's Django project, by name.

    Raises ImportError if django-celery-beat is not installed, what Django raises if it is not set
    up or has not these tables.
    """
    from django_celery_beat.models import PeriodicTask

    related = ("interval", "crontab", "solar", "clocked")
    found: Iterable[Any] = PeriodicTask.objects.select_related(*related).order_by("name")
    return found


def read_django(rows: Iterable[Any], now: float) -> Read:
    """Read rows of ``PeriodicTask``.

    now: seconds since the epoch
    """
    return read_each((row.name, partial(_django_entry, row, now)) for row in rows)


def _django_entry(row: Any, now: float) -> Entry:
    kinds = [kind for kind in ("interval", "crontab", "solar", "clocked") if getattr(row, kind)]
    if len(kinds) != 1:
        raise NotTakenError(f"it has {' and '.join(kinds) or 'no schedule'}, not one schedule")
    rules: dict[str, Any] = {}
    if row.expires is not None:
        if row.expires.timestamp() <= now:
            raise NotTakenError(f"it has expired at {row.expires.isoformat()}")
        rules["end"] = row.expires.timestamp()
    if row.one_off or row.clocked:
        if row.total_run_count:
            raise NotTakenError("it was to run once, and has run")
        rules["max_runs"] = 1
    if row.start_time is not None:
        rules["start"] = row.start_time.timestamp()
    when: Any = _ONCE
    if row.interval:
        when = schedule(timedelta(**{row.interval.period: row.interval.every}))
        if row.last_run_at is not None and row.start_time is None:
            rules["start"] = row.last_run_at.timestamp()  # the intervals are counted from there
    elif row.crontab:
        when, rules["timezone"] = _django_crontab(row.crontab), str(row.crontab.timezone)
    elif row.solar:
        when = solar(row.solar.event, float(row.solar.latitude), float(row.solar.longitude))
    else:
        rules["start"] = row.clocked.clocked_time.timestamp()
        if rules["start"] <= now:
            raise NotTakenError(f"its time has passed: {row.clocked.clocked_time.isoformat()}")
    options = {name: getattr(row, name) for name in _ROUTING if getattr(row, name)}
    if row.priority is not None:
        options["priority"] = row.priority
    if headers := without_marks(_django_json(row.headers, "headers", dict)):
        options["headers"] = headers
    if row.expire_seconds is not None:
        options["expires"] = row.expire_seconds
    return Entry(
        *(row.name, row.task, when),
        args=_django_json(row.args, "args", list),
        kwargs=_django_json(row.kwargs, "kwargs", dict),
        options=options,
        rules=rules,
        paused=not row.enabled,
    )


def _django_crontab(row: Any) -> crontab:
    try:
        return _crontab(*(getattr(row, name) for name in FIELDS))
    except ValueError as exc:
        raise NotTakenError(f"its crontab cannot be read: {exc}") from exc


def _django_json(text: str | None, what: str, kind: type) -> Any:
    try:
        value = json.loads(text or "null")
    except ValueError as exc:
        raise NotTakenError(f"its {what} are not JSON: {exc}") from exc
    if value is not None and not isinstance(value, kind):
        raise NotTakenError(f"its {what} are {type(value).__name__}, not {kind.__name__}")
    return kind() if value is None else value


# -- redbeat

#: What redbeat puts before the names of its keys, unless ``redbeat_key_prefix`` says otherwise.
REDBEAT_PREFIX = "redbeat:"

#: Entries that are read at a time.
_PAGE = 500


def redbeat_definitions(
    client: Any, prefix: str = REDBEAT_PREFIX
) -> Iterator[tuple[str, str | None]]:
    """Yield the name and the JSON of each entry, by name; None if the entry has none.

    client: a client of redis-py
    """
    found = client.zrange(f"{prefix}:schedule", 0, -1)
    keys = sorted(key.decode() if isinstance(key, bytes) else str(key) for key in found)
    for at in range(0, len(keys), _PAGE):
        page = keys[at : at + _PAGE]
        with client.pipeline(transaction=False) as pipe:
            for key in page:
                pipe.hget(key, "definition")
            texts = pipe.execute()
        for key, text in zip(page, texts, strict=True):
            shown = text.decode() if isinstance(text, bytes) else text
            yield key.removeprefix(prefix), shown


def read_redbeat(definitions: Iterator[tuple[str, str | None]]) -> Read:
    """Read entries: pairs of a name and JSON."""
    return read_each((name, partial(_redbeat_entry, name, text)) for name, text in definitions)


def _redbeat_entry(name: str, text: str | None) -> Entry:
    try:
        found = _decode(text or "null")
    except (ValueError, TypeError, KeyError) as exc:
        raise NotTakenError(f"its definition cannot be read: {exc}") from exc
    if not isinstance(found, dict):
        raise NotTakenError("its key has no definition")
    task, options = found.get("task"), dict(found.get("options") or {})
    if not isinstance(task, str) or not task:
        raise NotTakenError("it names no task")
    if headers := without_marks(options.pop("headers", None) or {}):
        options["headers"] = headers
    return Entry(
        *(name, task, _redbeat_schedule(found.get("schedule"))),
        args=found.get("args") or [],
        kwargs=found.get("kwargs") or {},
        options=options,
        paused=not found.get("enabled", True),
    )


def _redbeat_value(found: dict[str, Any]) -> Any:
    """What JSON has no word for, as redbeat writes it."""
    if found.get("__type__") != "datetime":
        return found
    zone = found.get("timezone", "UTC")
    names = ("year", "month", "day", "hour", "minute", "second", "microsecond")
    fields: dict[str, Any] = {name: found.get(name, 0) for name in names}
    tz = timezone(timedelta(seconds=zone)) if isinstance(zone, (int, float)) else ZoneInfo(zone)
    return datetime(**fields, tzinfo=tz)


_decode = json.JSONDecoder(object_hook=_redbeat_value).decode


@lru_cache(maxsize=2048, typed=True)
def _crontab(*fields: Any) -> crontab:
    """Many entries have the same, and reading one takes a tenth of a millisecond."""
    return crontab(**dict(zip(FIELDS, fields, strict=True)))


def _redbeat_schedule(found: Any) -> Any:
    kind = found.get("__type__") if isinstance(found, dict) else None
    try:
        if kind == "interval":
            every = timedelta(seconds=found["every"])
            return schedule(every, relative=bool(found.get("relative")))
        if kind == "crontab":
            fields = (found.get(name, "*") for name in FIELDS)
            return _crontab(*(tuple(one) if isinstance(one, list) else one for one in fields))
    except (ValueError, TypeError, KeyError) as exc:
        raise NotTakenError(f"its {kind} cannot be read: {exc}") from exc
    raise NotTakenError(
        f"its schedule is {kind or type(found).__name__}, which has no counterpart: "
        "write it as crontab, interval or solar"
    )
