"""Takes over what another beat has: the tables of django-celery-beat, or redbeat's keys in Redis.

The models of django-celery-beat are read through Django, as the app has set it up; ``ModelEntry``
of ``django_celery_beat.schedulers`` shows what a row means (read in 2.5 to 2.9). redbeat need not
be installed: ``redbeat.schedulers`` and ``redbeat.decoder`` explain its keys (read in 2.0 to 2.4).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta, timezone
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple
from zoneinfo import ZoneInfo

from celery.schedules import crontab, schedule, solar

from . import configured
from .configured import UNUSABLE, Entry, NotTakenError, Read, Refused, without_marks

if TYPE_CHECKING:
    from celery import Celery

    from ..app.task import TaskCenter
    from ..schedules.messages import Plan

#: What imported schedules have before the name of their source, as their owner.
OWNER = "import:"


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
    put: list[str] = []
    paused: list[str] = []
    unchanged = 0
    refused = list(read.refused)
    plans: list[tuple[Entry, Plan]] = []
    with schedules.planning():
        for entry in read.entries:
            if entry.name in mine:
                refused.append(
                    Refused(
                        entry.name,
                        "it is in the app's beat_schedule: 'celery toc schedule sync' puts it, or "
                        "workers with toc_beat",
                    )
                )
                continue
            try:
                what = (entry.name, entry.task, entry.schedule)
                plan = schedules.plan(*what, **entry.arguments(), owner=owner)
            except UNUSABLE as exc:
                refused.append(Refused(entry.name, str(exc)))
                continue
            there = stored.get(entry.name)
            if there is not None and there.owner != owner and not force:
                by = f"by {there.owner!r}" if there.owner else "by hand"
                why = f"a schedule of that name was put {by}: --force replaces it"
                refused.append(Refused(entry.name, why))
            elif there is not None and there.fingerprint == plan.record.fingerprint:
                unchanged += 1
            else:
                plans.append((entry, plan))
    kept = [] if dry_run else schedules.keep_many([plan for _, plan in plans])
    for (entry, _), done in zip_longest(plans, kept):
        if isinstance(done, Exception):
            refused.append(Refused(entry.name, str(done)))
            continue
        put.append(entry.name)
        if entry.paused and entry.name not in stored:
            paused.append(entry.name)
            if not dry_run:
                schedules.pause(entry.name)
    return Imported(put, paused, unchanged, refused)


def _read(named: Iterable[tuple[str, Callable[[], Entry]]]) -> Read:
    """Read entries: of each its name, and what makes it or raises NotTakenError."""
    read = Read([], [])
    for name, make in named:
        try:
            read.entries.append(make())
        except NotTakenError as exc:
            read.refused.append(Refused(name, str(exc)))
    return read


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
    return _read((row.name, partial(_django_entry, row, now)) for row in rows)


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
        return crontab(
            minute=row.minute,
            hour=row.hour,
            day_of_week=row.day_of_week,
            day_of_month=row.day_of_month,
            month_of_year=row.month_of_year,
        )
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

_FIELDS = ("minute", "hour", "day_of_week", "day_of_month", "month_of_year")


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
    return _read((name, partial(_redbeat_entry, name, text)) for name, text in definitions)


def _redbeat_entry(name: str, text: str | None) -> Entry:
    try:
        found = json.loads(text or "null", object_hook=_redbeat_value)
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


def _redbeat_schedule(found: Any) -> Any:
    kind = found.get("__type__") if isinstance(found, dict) else None
    try:
        if kind == "interval":
            every = timedelta(seconds=found["every"])
            return schedule(every, relative=bool(found.get("relative")))
        if kind == "crontab":
            return crontab(**{name: found.get(name, "*") for name in _FIELDS})
    except (ValueError, TypeError, KeyError) as exc:
        raise NotTakenError(f"its {kind} cannot be read: {exc}") from exc
    raise NotTakenError(
        f"its schedule is {kind or type(found).__name__}, which has no counterpart: "
        "write it as crontab, interval or solar"
    )
