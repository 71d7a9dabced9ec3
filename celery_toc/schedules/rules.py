"""When a schedule fires next; and what people give as a schedule, a time zone and a time.

Pure: time is an argument, in microseconds since the epoch. Only
:func:`read_exclusions` reads files.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone, tzinfo
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from celery import schedules
from celery.schedules import solar

import kombu_toc

if TYPE_CHECKING:
    from celery import Celery

# -- what can be wrong with a schedule


class ScheduleError(kombu_toc.ConfigurationError):
    """A schedule cannot be kept as it was asked for; nothing is changed."""


class UnknownScheduleError(ScheduleError):
    """There is no schedule of that name."""


# -- when a schedule fires next
#
# A crontab is read in its time zone. A local time that is missing, because the clock is put
# forward, fires once, at the end of the gap. One that is doubled, because the clock is put back,
# fires once, the first time. Where every hour counts (``hour="*"``), real time does: nothing is
# added after a gap, and the doubled hour fires twice. Intervals know nothing of zones: they are
# counted from their anchor, so they never drift.

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
MICROSECOND = timedelta(microseconds=1)
SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US

#: The last moment for which a message can wait: in the year 2255.
LAST_US = (2**53 - 1000) // 1000 * 1000
DAY = timedelta(days=1)

#: Days that are looked at for the next firing of a crontab: leap days are up to eight years apart,
#: and those on a certain day of the week forty.
MAX_DAYS = 366 * 41


class Timing(Protocol):
    """What says when a schedule fires."""

    def after(self, us: int) -> int | None:
        """The first firing after a time; None: there is none any more."""

    @property
    def text(self) -> str:
        """For people."""

    def to_json(self) -> dict[str, Any]:
        """What :func:`timing_of` reads."""


def to_us(moment: datetime) -> int:
    """An aware datetime in microseconds since the epoch."""
    return (moment - EPOCH) // MICROSECOND


def to_datetime(us: int) -> datetime:
    """The inverse of :func:`to_us`, in UTC."""
    return EPOCH + us * MICROSECOND


@lru_cache(maxsize=64)
def zone_of(name: str) -> tzinfo:
    """The time zone of that name. Raises ScheduleError."""
    if name == "UTC":
        return timezone.utc
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ScheduleError(
            f"{name!r} is no time zone that this machine knows; choose one such as "
            "'Europe/Berlin', or install the package tzdata"
        ) from None


@dataclass(frozen=True)
class Every:
    """An interval: fires at its anchor, and so many times its period before and after that."""

    period_us: int
    anchor_us: int

    def after(self, us: int) -> int | None:
        found = us + self.period_us - (us - self.anchor_us) % self.period_us
        return found if found <= LAST_US else None

    @property
    def text(self) -> str:
        seconds, rest = divmod(self.period_us, SECOND_US)
        if rest:
            return f"every {self.period_us / SECOND_US:g} s"
        for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
            if seconds % size == 0:
                return f"every {seconds // size} {unit}"
        return f"every {seconds} s"

    def to_json(self) -> dict[str, Any]:
        return {"every": self.period_us, "anchor": self.anchor_us}


#: Of each field of a crontab, its first and last number.
_RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))


@dataclass(frozen=True)
class Cron:
    """A crontab in a time zone. As in Celery, a day must be among those of the week and among those
    of the month; with `either_day` one of them is enough if both are named, as cron has it. Sunday
    is 0."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...]
    months: tuple[int, ...]
    weekdays: tuple[int, ...]
    zone: str
    either_day: bool = False

    def after(self, us: int) -> int | None:
        zone = zone_of(self.zone)
        day = (to_datetime(us).astimezone(zone)).date() - DAY
        with suppress(OverflowError):  # the year 9999
            for _ in range(MAX_DAYS):
                if self._on(day) and (firing := self._after_on(day, us, zone)) is not None:
                    return firing if firing <= LAST_US else None
                day += DAY
        return None

    def _on(self, day: date) -> bool:
        in_month, in_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        either = self.either_day and len(self.days) < 31 and len(self.weekdays) < 7
        return day.month in self.months and (
            in_month or in_week if either else in_month and in_week
        )

    def _after_on(self, day: date, us: int, zone: tzinfo) -> int | None:
        """The first firing after a time on a day of its zone."""
        begin, is_regular = _begin(day, zone)
        if not is_regular:
            return min((at for at in self._on_change(begin, zone) if at > us), default=None)
        begin_us, minutes = to_us(begin), _minutes_of_day(self.hours, self.minutes)
        at = bisect_right(minutes, (us - begin_us) // MINUTE_US)
        return begin_us + MINUTE_US * minutes[at] if at < len(minutes) else None

    def _on_change(self, begin: datetime, zone: tzinfo) -> Iterator[int]:
        """When it fires on a day on which the clock is put forward or back."""
        real_time = len(self.hours) == 24
        for hour in self.hours:
            for minute in self.minutes:
                wall = begin.replace(hour=hour, minute=minute)
                first, second = to_us(wall), to_us(wall.replace(fold=1))
                if first == second:
                    yield first
                elif first < second:  # the clock shows it twice
                    yield first
                    if real_time:
                        yield second
                elif not real_time:  # the clock never shows it: it jumps over it
                    yield _jump(second, first, zone)

    @property
    def text(self) -> str:
        return f"{self.fields} (either day)" if self.either_day else self.fields

    @cached_property
    def fields(self) -> str:
        """As a crontab has them."""
        numbers = (self.minutes, self.hours, self.days, self.months, self.weekdays)
        return " ".join(map(_field, numbers, _RANGES))

    def to_json(self) -> dict[str, Any]:
        said = {"cron": self.fields, "zone": self.zone}
        return {**said, "either_day": True} if self.either_day else said

    @classmethod
    @lru_cache(maxsize=4096)
    def of_text(cls, text: str, zone: str, either_day: bool = False) -> Cron:
        """The inverse of :attr:`fields`."""
        minutes, hours, days, months, weekdays = map(_numbers, text.split(" "), _RANGES)
        return cls(minutes, hours, days, months, weekdays, zone, either_day)


@lru_cache(maxsize=64)
def _begin(day: date, zone: tzinfo) -> tuple[datetime, bool]:
    """When a day begins, and whether the clock is not changed on it. Schedules that are put
    together look at the same few."""
    begin = datetime(day.year, day.month, day.day, tzinfo=zone)
    return begin, begin.utcoffset() == (begin + DAY).utcoffset()  # of the wall clock


@lru_cache(maxsize=256)
def _minutes_of_day(hours: tuple[int, ...], minutes: tuple[int, ...]) -> tuple[int, ...]:
    """The minutes of a day on which the clock is not changed at which a crontab fires."""
    return tuple(60 * hour + minute for hour in hours for minute in minutes)


def _jump(before_us: int, after_us: int, zone: tzinfo) -> int:
    """When the clock is put forward, between two times, to the second."""
    low, high = before_us // SECOND_US, -(-after_us // SECOND_US)

    def offset(seconds: int) -> timedelta | None:
        return to_datetime(seconds * SECOND_US).astimezone(zone).utcoffset()

    old = offset(low)
    while high - low > 1:
        middle = (low + high) // 2
        if offset(middle) == old:
            low = middle
        else:
            high = middle
    return high * SECOND_US


@lru_cache(maxsize=1024)
def _field(numbers: tuple[int, ...], within: tuple[int, int]) -> str:
    """Numbers as a field of a crontab: always the same text for the same numbers."""
    first, last = within
    if numbers == tuple(range(first, last + 1)):
        return "*"
    step = numbers[1] - numbers[0] if len(numbers) > 2 else 0
    if step > 1 and numbers == tuple(range(first, last + 1, step)):
        return f"*/{step}"
    parts: list[str] = []
    at = 0
    while at < len(numbers):
        end = at
        while end + 1 < len(numbers) and numbers[end + 1] == numbers[end] + 1:
            end += 1
        if end - at > 1:
            parts.append(f"{numbers[at]}-{numbers[end]}")
        else:
            parts += map(str, numbers[at : end + 1])
        at = end + 1
    return ",".join(parts)


@lru_cache(maxsize=1024)
def _numbers(field: str, within: tuple[int, int]) -> tuple[int, ...]:
    first, last = within
    return tuple(sorted(schedules.crontab_parser(last - first + 1, first).parse(field)))


@dataclass(frozen=True)
class Sun:
    """An event of the sun, as Celery computes it by the package ephem."""

    event: str
    latitude: float
    longitude: float

    def after(self, us: int) -> int | None:
        moment = to_datetime(us)
        event = solar(self.event, self.latitude, self.longitude, nowfun=lambda: moment)
        found = us + event.remaining_estimate(moment) // MICROSECOND
        # What it finds is rounded, and may be the event that has just been.
        return found if found > us else self.after(us + MINUTE_US)

    @property
    def text(self) -> str:
        return f"{self.event} at {self.latitude:g}, {self.longitude:g}"

    def to_json(self) -> dict[str, Any]:
        return {"sun": [self.event, self.latitude, self.longitude]}


def timing_of(said: dict[str, Any]) -> Timing:
    """The inverse of :meth:`Timing.to_json`."""
    if "cron" in said:
        return Cron.of_text(said["cron"], said["zone"], said.get("either_day", False))
    if "every" in said:
        return Every(said["every"], said["anchor"])
    return Sun(*said["sun"])


# -- what people give as a schedule, a time zone and a time, and the inverse


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


@lru_cache(maxsize=4096)
def _cron_of(*said: Any) -> Cron | None:
    """A crontab of the numbers of its fields, its zone and `either_day`; None if a field is empty.
    Among thousands that are put, many are the same."""
    *fields, zone, either_day = said
    minutes, hours, days, months, weekdays = numbers = [_sorted(one) for one in fields]
    return Cron(minutes, hours, days, months, weekdays, zone, either_day) if all(numbers) else None


@lru_cache(maxsize=1024)
def _sorted(numbers: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(sorted(map(int, numbers)))


def read_schedule(
    name: str, given: Any, zone: str, start: int | None, now: int, *, either_day: bool = False
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
        cron = _cron_of(*map(tuple, fields), tuple(given.day_of_week), zone, either_day)
        if cron is None:
            raise ScheduleError(f"schedule {name!r}: {given!r} has an empty field; it never fires")
        return cron
    if isinstance(given, schedules.solar) and is_number(given.lat + given.lon):
        return Sun(given.event, float(given.lat), float(given.lon))
    relative = False
    if isinstance(given, schedules.schedule):
        relative, given = given.relative, given.run_every
    if isinstance(given, timedelta):
        period = given // MICROSECOND
    elif is_number(given):
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


def is_number(given: Any) -> TypeGuard[float]:
    """Whether it is a number that a time can be counted with."""
    return isinstance(given, int | float) and not isinstance(given, bool) and abs(given) <= 1e300


def read_time(name: str, what: str, given: Any, zone: str) -> int | None:
    """A bound of a schedule in microseconds since the epoch."""
    if given is None:
        return None
    us = None
    if isinstance(given, datetime):
        with suppress(OverflowError):  # the first and the last year
            us = to_us(given if given.tzinfo else given.replace(tzinfo=zone_of(zone)))
    elif is_number(given):
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
    if is_number(given) and 0 <= given < 1e10:
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
FIELDS = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
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
    if len(said) != len(FIELDS):
        raise ValueError(f"{text!r} has {len(said)} fields, not five: '0 3 * * *'")
    weekdays = ",".join(map(_weekdays, said.pop().split(",")))
    try:
        return schedules.crontab(**dict(zip(FIELDS, (*said, weekdays), strict=True)))
    except schedules.ParseException as exc:
        raise ValueError(f"{text!r}: {exc}") from None


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
    return None if us is None else to_datetime(us)
