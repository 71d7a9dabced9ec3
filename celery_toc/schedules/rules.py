"""When a schedule fires next. Pure: time is an argument, in microseconds since the epoch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone, tzinfo
from functools import lru_cache
from typing import Any, Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from celery.schedules import solar

import kombu_toc

# -- what can be wrong with a schedule


class ScheduleError(kombu_toc.ConfigurationError):
    """A schedule cannot be kept as it was asked for; nothing is changed."""


class UnknownScheduleError(ScheduleError):
    """There is no schedule of that name."""


# -- when a schedule fires next
#
# A crontab is read in its time zone. A local time that is missing, because the clock is put
# forward,
# fires once, at the end of the gap. One that is doubled, because the clock is put back, fires once,
# the first time. Where every hour counts (``hour="*"``), real time does: nothing is added after a
# gap, and the doubled hour fires twice. Intervals know nothing of zones: they are counted from
# their
# anchor, so they never drift.

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
MICROSECOND = timedelta(microseconds=1)
SECOND_US = 1_000_000

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
        try:
            for _ in range(MAX_DAYS):
                if self._on(day):
                    instants = self._instants(day, zone)
                    at = bisect_right(instants, us)
                    if at < len(instants):
                        return instants[at] if instants[at] <= LAST_US else None
                day += DAY
        except OverflowError:  # the year 9999
            pass
        return None

    def _on(self, day: date) -> bool:
        in_month, in_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        either = self.either_day and len(self.days) < 31 and len(self.weekdays) < 7
        return day.month in self.months and (
            in_month or in_week if either else in_month and in_week
        )

    def _instants(self, day: date, zone: tzinfo) -> Sequence[int]:
        """When it fires on a day of its zone, in order."""
        begin = datetime(day.year, day.month, day.day, tzinfo=zone)
        end = begin + DAY  # of the wall clock
        if begin.utcoffset() == end.utcoffset():
            return _Regular(to_us(begin), self.hours, self.minutes)
        return sorted(set(self._on_change(begin, zone)))

    def _on_change(self, begin: datetime, zone: tzinfo) -> Iterator[int]:
        """The same, of a day on which the clock is put forward or back."""
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

    @property
    def fields(self) -> str:
        """As a crontab has them."""
        numbers = (self.minutes, self.hours, self.days, self.months, self.weekdays)
        return " ".join(map(_field, numbers, _RANGES))

    def to_json(self) -> dict[str, Any]:
        said = {"cron": self.fields, "zone": self.zone}
        return {**said, "either_day": True} if self.either_day else said

    @classmethod
    @lru_cache(maxsize=1024)
    def of_text(cls, text: str, zone: str, either_day: bool = False) -> Cron:
        """The inverse of :attr:`fields`."""
        minutes, hours, days, months, weekdays = map(_numbers, text.split(" "), _RANGES)
        return cls(minutes, hours, days, months, weekdays, zone, either_day)


class _Regular(Sequence[int]):
    """The firings of a day on which the clock is not changed, without a list of them all."""

    def __init__(self, begin_us: int, hours: tuple[int, ...], minutes: tuple[int, ...]) -> None:
        self._begin, self._hours, self._minutes = begin_us, hours, minutes

    def __len__(self) -> int:
        return len(self._hours) * len(self._minutes)

    def __getitem__(self, at: Any) -> Any:
        hour, minute = divmod(at, len(self._minutes))
        minutes = 60 * self._hours[hour] + self._minutes[minute]
        return self._begin + 60 * SECOND_US * minutes


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


def _numbers(field: str, within: tuple[int, int]) -> tuple[int, ...]:
    first, last = within
    if field.startswith("*"):
        return tuple(range(first, last + 1, int(field[2:] or 1)))
    found: list[int] = []
    for part in field.split(","):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return tuple(found)


@dataclass(frozen=True)
class Sun:
    """An event of the sun, as Celery computes it by the package ephem."""

    event: str
    latitude: float
    longitude: float

    def after(self, us: int) -> int | None:
        moment = to_datetime(us)
        left = _solar(self.event, self.latitude, self.longitude, moment).remaining_estimate(moment)
        found = us + left // MICROSECOND
        # What it finds is rounded, and may be the event that has just been.
        return found if found > us else self.after(us + 60 * SECOND_US)

    @property
    def text(self) -> str:
        return f"{self.event} at {self.latitude:g}, {self.longitude:g}"

    def to_json(self) -> dict[str, Any]:
        return {"sun": [self.event, self.latitude, self.longitude]}


def _solar(event: str, latitude: float, longitude: float, now: datetime) -> Any:
    return solar(event, latitude, longitude, nowfun=lambda: now)


def timing_of(said: dict[str, Any]) -> Timing:
    """The inverse of :meth:`Timing.to_json`."""
    if "cron" in said:
        return Cron.of_text(said["cron"], said["zone"], said.get("either_day", False))
    if "every" in said:
        return Every(said["every"], said["anchor"])
    return Sun(*said["sun"])
