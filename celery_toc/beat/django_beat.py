"""Reads the tables of django-celery-beat.

Its models are read through Django, as the app has set it up. What a row means is in ``ModelEntry``
of ``django_celery_beat.schedulers``; read in 2.5 to 2.9.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from celery.schedules import crontab, schedule, solar

from .configured import Entry, NotTakenError, Read, Refused, without_marks

#: For what happens once, at the time with which it starts.
_ONCE = schedule(timedelta(days=1))

_OPTIONS = ("queue", "exchange", "routing_key")


def rows() -> Iterable[Any]:
    """The periodic tasks of the app's Django project, by name.

    Raises ImportError if django-celery-beat is not installed, what Django raises if it is not set
    up or has not these tables.
    """
    from django_celery_beat.models import PeriodicTask

    related = ("interval", "crontab", "solar", "clocked")
    found: Iterable[Any] = PeriodicTask.objects.select_related(*related).order_by("name")
    return found


def read(rows: Iterable[Any], now: float) -> Read:
    """Read rows of ``PeriodicTask``.

    now: seconds since the epoch
    """
    found = Read([], [])
    for row in rows:
        try:
            found.entries.append(_entry(row, now))
        except NotTakenError as exc:
            found.refused.append(Refused(row.name, str(exc)))
    return found


def _entry(row: Any, now: float) -> Entry:
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
        when, rules["timezone"] = _crontab(row.crontab), str(row.crontab.timezone)
    elif row.solar:
        when = solar(row.solar.event, float(row.solar.latitude), float(row.solar.longitude))
    else:
        rules["start"] = row.clocked.clocked_time.timestamp()
        if rules["start"] <= now:
            raise NotTakenError(f"its time has passed: {row.clocked.clocked_time.isoformat()}")
    options = {name: getattr(row, name) for name in _OPTIONS if getattr(row, name)}
    if row.priority is not None:
        options["priority"] = row.priority
    if headers := without_marks(_json(row.headers, "headers", dict)):
        options["headers"] = headers
    if row.expire_seconds is not None:
        options["expires"] = row.expire_seconds
    return Entry(
        *(row.name, row.task, when),
        args=_json(row.args, "args", list),
        kwargs=_json(row.kwargs, "kwargs", dict),
        options=options,
        rules=rules,
        paused=not row.enabled,
    )


def _crontab(row: Any) -> crontab:
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


def _json(text: str | None, what: str, kind: type) -> Any:
    try:
        value = json.loads(text or "null")
    except ValueError as exc:
        raise NotTakenError(f"its {what} are not JSON: {exc}") from exc
    if value is not None and not isinstance(value, kind):
        raise NotTakenError(f"its {what} are {type(value).__name__}, not {kind.__name__}")
    return kind() if value is None else value
