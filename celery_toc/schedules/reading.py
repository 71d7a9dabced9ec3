"""What people give as a schedule, a time zone and a time, and the inverse."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import date, datetime, timedelta, timezone, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from celery import schedules

from .rules import (
    DAY,
    LAST_US,
    MICROSECOND,
    Cron,
    Every,
    ScheduleError,
    Sun,
    Timing,
    to_datetime,
    to_us,
    zone_of,
)

if TYPE_CHECKING:
    from celery import Celery

#: The shortest interval, in microseconds.
SHORTEST = 1000

#: Dates that a schedule may exclude.
MAX_EXCLUDED = 1000


def read_zone(app: Celery, name: str, schedule: Any, given: Any) -> str:
    """The name of a schedule's time zone: as given, else the schedule's own, else the app's."""
    if given is None:
        given = vars(schedule).get("tz") if hasattr(schedule, "__dict__") else None
    if given is None:
        given = app.timezone
    if isinstance(given, str):
        zone_of(given)
        return given
    for text in (getattr(given, "key", None), getattr(given, "zone", None), str(given)):
        if isinstance(text, str):
            try:
                zone_of(text)
            except ScheduleError:
                continue
            return text
    if isinstance(given, tzinfo) and given.utcoffset(None) == timedelta(0):
        return "UTC"
    raise ScheduleError(
        f"schedule {name!r}: {given!r} is no time zone with a name; give one such as "
        "'Europe/Berlin' or zoneinfo.ZoneInfo('Europe/Berlin')"
    )


def decides_itself(schedule: Any) -> bool:
    """Whether a schedule is of a class that says otherwise than Celery's when it is due."""
    for kind in (schedules.crontab, schedules.solar, schedules.schedule):
        if isinstance(schedule, kind):
            same = type(schedule).remaining_estimate is kind.remaining_estimate
            # The crontab of django-celery-beat looks at its time zone, as we do.
            zoned = same and "tz" in vars(schedule)
            return not zoned and not (same and type(schedule).is_due is kind.is_due)
    return False


def read_schedule(
    name: str,
    given: Any,
    zone: str,
    start: int | None,
    now: int,
    *,
    either_day: bool = False,
) -> Timing:
    """What says when it fires.

    start: when an interval begins; it fires first after one period from now on if there is none
    now: microseconds since the epoch
    either_day: a crontab that names days of the month and of the week fires on both

    Raises ScheduleError for what is no schedule that can be kept.
    """
    if decides_itself(given):
        raise ScheduleError(
            f"schedule {name!r}: its class {type(given).__name__} decides when it is due, and no "
            "store has it: give a crontab, a timedelta or solar"
        )
    if either_day and not isinstance(given, schedules.crontab):
        raise ScheduleError(f"schedule {name!r}: either_day is for a crontab, unlike {given!r}")
    if isinstance(given, schedules.crontab):
        fields = (given.minute, given.hour, given.day_of_month, given.month_of_year)
        numbers = [tuple(sorted(map(int, one))) for one in (*fields, given.day_of_week)]
        if not all(numbers):
            raise ScheduleError(f"schedule {name!r}: {given!r} has an empty field; it never fires")
        minutes, hours, days, months, weekdays = numbers
        return Cron(minutes, hours, days, months, weekdays, zone, either_day)
    if isinstance(given, schedules.solar):
        return Sun(given.event, float(given.lat), float(given.lon))
    relative = False
    if isinstance(given, schedules.schedule):
        relative, given = given.relative, given.run_every
    if isinstance(given, timedelta):
        period = given // MICROSECOND
    elif _is_number(given):
        period = round(given * 1_000_000)
    else:
        raise ScheduleError(
            f"schedule {name!r}: {given!r} says nothing of when it fires; give a crontab, a "
            "timedelta, a number of seconds, celery.schedules.schedule or solar"
        )
    if period < SHORTEST:
        raise ScheduleError(
            f"schedule {name!r}: it cannot fire every {period / 1e6:g} s; the shortest interval is "
            f"{SHORTEST / 1e6:g} s"
        )
    if now + period > LAST_US:
        raise ScheduleError(
            f"schedule {name!r}: it would fire first after the year 2255, every {period / 1e6:g} s"
        )
    if start is not None:
        return Every(period, start)
    return Every(period, (_floor(now, period, zone) if relative else now) + period)


def _floor(now: int, period: int, zone: str) -> int:
    """A time without what is finer than the interval, as Celery rounds with ``relative``."""
    local = to_datetime(now).astimezone(zone_of(zone)).replace(microsecond=0)
    if period >= 86_400_000_000:
        return to_us(local.replace(hour=0, minute=0, second=0))
    if period >= 3_600_000_000:
        return to_us(local.replace(minute=0, second=0))
    return to_us(local.replace(second=0) if period >= 60_000_000 else local)


def _is_number(given: Any) -> TypeGuard[float]:
    """Whether it is a finite number."""
    number = isinstance(given, (int, float)) and not isinstance(given, bool)
    return number and math.isfinite(given)


def read_time(name: str, what: str, given: Any, zone: str) -> int | None:
    """A bound of a schedule in microseconds since the epoch."""
    if given is None:
        return None
    us = None
    if isinstance(given, datetime):
        with suppress(OverflowError):  # the first and the last year
            us = to_us(given if given.tzinfo else given.replace(tzinfo=zone_of(zone)))
    elif _is_number(given):
        us = round(given * 1_000_000)
    if us is not None and 0 <= us <= LAST_US:
        return us
    raise ScheduleError(
        f"schedule {name!r}: {what}={given!r} is no time that a message can wait for; give a "
        "datetime, or seconds since the epoch, until the year 2255"
    )


def read_seconds(name: str, what: str, given: Any) -> int:
    """A number of seconds, or a timedelta, in microseconds; not negative."""
    if isinstance(given, timedelta):
        given = given.total_seconds()
    if _is_number(given) and 0 <= given < 1e10:
        return round(given * 1_000_000)
    raise ScheduleError(
        f"schedule {name!r}: {what}={given!r} is no duration; give a number of seconds"
    )


def read_exclusions(name: str, given: Any) -> tuple[str, ...]:
    """The dates on which a schedule does not fire, sorted, in ISO 8601.

    given: dates, texts of them, and paths of files of holidays; one or several
    """
    found: set[str] = set()
    is_one = isinstance(given, (str, os.PathLike)) or not isinstance(given, Iterable)
    for one in [given] if is_one else given:
        try:
            if isinstance(one, os.PathLike):
                days = _holidays(Path(one).read_text())
            elif isinstance(one, str) or type(one) is date:
                days = iter([_date(str(one))])
            else:
                raise ValueError("it is neither a date nor the path of a file")
            for day in days:
                found.add(day.isoformat())
                if len(found) > MAX_EXCLUDED:
                    raise ValueError(f"a schedule excludes at most {MAX_EXCLUDED} dates")
        except (ValueError, OSError) as exc:
            raise ScheduleError(f"schedule {name!r}: exclude={str(one)!r}: {exc}") from None
    return tuple(sorted(found))


def _date(text: str) -> date:
    return datetime.strptime(text, "%Y%m%d" if text.isdigit() else "%Y-%m-%d").date()


def _holidays(text: str) -> Iterator[date]:
    """The dates in a file: an iCalendar (RFC 5545) of all-day events, or lines that begin with a
    date, of which the rest and what follows a # is not read."""
    if not text.startswith("BEGIN:VCALENDAR"):
        for line in text.splitlines():
            if said := re.split(r"[\s,;]", line.partition("#")[0].strip())[0]:
                yield _date(said)
        return
    for event in text.split("BEGIN:VEVENT")[1:]:
        if re.search(r"^(RRULE|RDATE)", event, re.MULTILINE):
            raise ValueError("an event repeats: give each of its dates")
        bounds = dict(re.findall(r"^(DTSTART|DTEND)\b[^:\n]*:(\d{8})", event, re.MULTILINE))
        if "DTSTART" not in bounds:
            raise ValueError("an event has no DTSTART")
        day = _date(bounds["DTSTART"])
        end = _date(bounds["DTEND"]) if "DTEND" in bounds else day
        yield day
        while (day := day + DAY) < end:
            yield day


def check_name(name: Any) -> str:
    """A name that can be part of an id."""
    if not isinstance(name, str) or not name or len(name) > 250:
        raise ScheduleError(f"{name!r:.80} names no schedule; give a text of 1 to 250 characters")
    if re.search(r"[\x00-\x1f\x7f]", name):
        raise ScheduleError(f"schedule {name!r}: its name has a control character; leave it out")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ScheduleError(
            f"schedule {name!r}: its name has half of a surrogate pair; leave it out"
        ) from None
    return name


#: The fields of a crontab in their usual order, and names of some crontabs.
_FIELDS = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
_NAMED = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


def read_cron(text: str) -> schedules.crontab:
    """A crontab as cron has it: five fields, in which Sunday may be 7, or a name such as
    ``@daily``. Raises ValueError."""
    said = text.split()
    if len(said) == 1 and said[0][:1] == "@":
        try:
            said = _NAMED[said[0].lower()].split()
        except KeyError:
            raise ValueError(f"there is no {said[0]}; there are {', '.join(_NAMED)}") from None
    if len(said) != len(_FIELDS):
        raise ValueError(f"{text!r} has {len(said)} fields, not five: '0 3 * * *'")
    *others, weekdays = said
    weekdays = ",".join(map(_weekdays, weekdays.split(",")))
    return schedules.crontab(**dict(zip(_FIELDS, (*others, weekdays), strict=True)))


def _weekdays(part: str) -> str:
    """A part of a field of days of the week in which Sunday is 0: Celery knows no 7."""
    found = re.fullmatch(r"([0-7])(?:-([0-7])(?:/([1-9]))?)?", part)
    if found is None or "7" not in part.partition("/")[0]:
        return part
    first, last = int(found[1]), int(found[2] or found[1])
    first, last = (0, last) if first == 7 and last < 7 else (first, last)
    return ",".join(str(day % 7) for day in range(first, last + 1, int(found[3] or 1)))


def schedule_of(timing: Timing) -> Any:
    """The schedule as Celery has it."""
    if isinstance(timing, Cron):
        minute, hour, day, month, weekday = timing.fields.split(" ")
        made = schedules.crontab(minute, hour, weekday, day, month)
        made.tz = zone_of(timing.zone)
        return made
    if isinstance(timing, Every):
        return schedules.schedule(timedelta(microseconds=timing.period_us))
    assert isinstance(timing, Sun)
    return schedules.solar(timing.event, timing.latitude, timing.longitude)


def utc(us: int | None) -> datetime | None:
    return None if us is None else to_datetime(us).astimezone(timezone.utc)
