"""When a schedule fires: crontabs in time zones, intervals, and the doubled and missing hours."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import ephem
import pytest
from celery.schedules import crontab, schedule, solar

from celery_toc.schedules.rules import (
    Cron,
    Every,
    ScheduleError,
    Timing,
    read_schedule,
    timing_of,
    to_datetime,
    to_us,
    zone_of,
)
from celery_toc.schedules.state import Record

from ..support.cases import each, night

UTC = timezone.utc
MINUTE = 60_000_000

#: Clocks that go forward and back at midnight, in the night and by half an hour; that skip a day;
#: and one that is never changed.
ZONES = (
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "Asia/Beirut",
    "Pacific/Apia",
    "Atlantic/Azores",
    "America/Havana",
    "Asia/Kolkata",
)

CRONTABS = (
    "30 2 * * *",
    "*/30 * * * 0,5",
    "0,30 0-3 * * *",
    "0 0 * * 0",
    "59 23 29 2 *",
    "15 1-2 1-7 3,4,10,11 0",
)


def crontab_of(text: str) -> crontab:
    minute, hour, day, month, weekday = text.split(" ")
    return crontab(minute, hour, weekday, day, month)


def cron(text: str, zone: str = "UTC") -> Timing:
    return read_schedule("a", crontab_of(text), zone, None, 0)


def firings(timing: Timing, begin: datetime, end: datetime) -> Iterator[datetime]:
    us = to_us(begin) - 1
    while True:
        found = timing.after(us)
        if found is None or found > to_us(end):
            return
        assert found > us
        yield to_datetime(found)
        us = found


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


# -- a reference that goes minute by minute


class Minutes:
    """Years of a zone: each minute of the world, and what the clock on the wall shows then."""

    def __init__(self, zone: str, years: int) -> None:
        #: (minute since the epoch, minutes by which the wall clock is ahead), when that changes
        self.changes: list[tuple[int, int]] = []
        tz = ZoneInfo(zone)
        first, last = (
            int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) // 60 for year in (2008, 2008 + years)
        )
        ahead = None
        for minute in range(first, last):
            if minute % 15 and ahead is not None:
                continue  # no clock has been changed at other minutes in these years
            moment = datetime.fromtimestamp(60 * minute, tz)
            offset = moment.utcoffset()
            assert offset is not None
            found = int(offset.total_seconds()) // 60
            if found != ahead:
                self.changes.append((minute, found))
                ahead = found
        self.first, self.last = first, last


def expected(minutes: Minutes, text: str) -> list[int]:
    """The rule, told in another way: walk through all minutes of the world. A minute fires if the
    wall clock matches, unless it has shown the same before and the crontab names hours. Where the
    wall clock jumps, the minute after the jump fires if any that was jumped over matches, and the
    crontab names hours."""
    spec = crontab_of(text)
    names_hours = len(spec.hour) < 24
    times = [time for time in range(1440) if time % 60 in spec.minute and time // 60 in spec.hour]
    days: dict[int, bool] = {}

    def day_matches(wall: int) -> bool:
        day = wall // 1440
        if day not in days:
            moment = datetime(1970, 1, 1) + timedelta(days=day)
            days[day] = (
                moment.day in spec.day_of_month
                and moment.month in spec.month_of_year
                and moment.isoweekday() % 7 in spec.day_of_week
            )
        return days[day]

    def may_match(wall: int) -> bool:
        return day_matches(wall) and wall % 1440 in times

    found = []
    shown_until = None
    ends = [minute for minute, _ in minutes.changes[1:]] + [minutes.last]
    for (begin, ahead), end in zip(minutes.changes, ends, strict=True):
        wall = begin + ahead
        if names_hours and shown_until is not None and wall > shown_until:
            jumped = range(shown_until, wall)
            if any(map(may_match, jumped)) and not may_match(wall):
                found.append(begin)
        for day in range((begin + ahead) // 1440, (end + ahead) // 1440 + 1):
            if not day_matches(1440 * day):
                continue
            for time in times:
                wall = 1440 * day + time
                if not begin + ahead <= wall < end + ahead:
                    continue
                if names_hours and shown_until is not None and wall < shown_until:
                    continue
                found.append(wall - ahead)
        shown_until = max(shown_until or 0, end + ahead)
    return found


@pytest.mark.parametrize(
    "zone, years",
    [
        # By day one whose clock changes by an hour, and one with half an hour.
        *(("Europe/Berlin", 2), ("Australia/Lord_Howe", 2)),
        *(night(zone, 10) for zone in ZONES),
    ],
)
def test_years_of_minutes_are_as_the_reference_has_them(zone: str, years: int) -> None:
    minutes = Minutes(zone, years)
    assert len(minutes.changes) >= (1 if zone == "Asia/Kolkata" else 1.5 * years)
    for text in CRONTABS:
        wanted = expected(minutes, text)
        timing = cron(text, zone)
        us = 60_000_000 * minutes.first - 1
        for number, minute in enumerate(wanted):
            found = timing.after(us)
            assert found == minute * MINUTE, (
                text,
                number,
                to_datetime(us),
                to_datetime(found or 0),
            )
            us = found


# -- the missing and the doubled hour, told one by one


def test_what_is_missing_fires_once_right_after_the_gap() -> None:
    """In Berlin, 2025-03-30 has no 02:00 to 03:00: it is 03:00 at 01:00 UTC."""
    day = at("2025-03-30"), at("2025-03-30T23:00")
    assert list(firings(cron("30 2 * * *", "Europe/Berlin"), *day)) == [at("2025-03-30T01:00")]
    assert list(firings(cron("*/10 2 * * *", "Europe/Berlin"), *day)) == [at("2025-03-30T01:00")]
    # At the end of the gap there is a firing anyway.
    assert list(firings(cron("0 2,3 * * *", "Europe/Berlin"), *day)) == [at("2025-03-30T01:00")]
    # Where every hour counts, real time does.
    every = list(firings(cron("30 * * * *", "Europe/Berlin"), *day))
    assert every == [at("2025-03-30T00:30") + timedelta(hours=n) for n in range(23)]


def test_what_is_doubled_fires_once_where_hours_are_named() -> None:
    """In Berlin, 2025-10-26 has 02:00 to 03:00 twice, from 00:00 UTC and from 01:00 UTC."""
    day = at("2025-10-25T22:00"), at("2025-10-26T22:59")
    assert list(firings(cron("30 2 * * *", "Europe/Berlin"), *day)) == [at("2025-10-26T00:30")]
    assert list(firings(cron("0 3 * * *", "Europe/Berlin"), *day)) == [at("2025-10-26T02:00")]
    every = list(firings(cron("30 * * * *", "Europe/Berlin"), *day))
    assert len(every) == 25
    assert every == [at("2025-10-25T22:30") + timedelta(hours=n) for n in range(25)]


def test_what_falls_on_a_day_that_is_missing_fires_when_it_is_over() -> None:
    """Samoa had no 30 December 2011."""
    days = at("2011-12-29T00:00"), at("2012-01-01T00:00")
    assert list(firings(cron("0 12 * * *", "Pacific/Apia"), *days)) == [
        at("2011-12-29T22:00"),
        at("2011-12-30T10:00"),
        at("2011-12-30T22:00"),
        at("2011-12-31T22:00"),
    ]


def test_an_interval_never_drifts() -> None:
    timing = Every(7_000_001, to_us(at("2025-03-30T00:00")))
    us = timing.anchor_us - 1
    for number in range(10_000):
        found = timing.after(us + (number % 7) * 100)  # asked late, by different amounts
        assert found == timing.anchor_us + number * timing.period_us
        us = found


def test_an_interval_is_the_same_over_a_change_of_the_clock() -> None:
    timing = read_schedule(
        "a", timedelta(minutes=30), "Europe/Berlin", None, to_us(at("2025-03-30"))
    )
    found = list(firings(timing, at("2025-03-30"), at("2025-03-30T04:00")))
    assert {b - a for a, b in itertools.pairwise(found)} == {timedelta(minutes=30)}


def test_a_relative_interval_begins_at_a_round_time_as_celerys() -> None:
    now = to_us(at("2025-06-01T10:20:30.500"))
    for period, first in ((2, "12:00"), (24, None)):
        timing = read_schedule(
            "a", schedule(timedelta(hours=period), relative=True), "UTC", None, now
        )
        wanted = at("2025-06-02T00:00") if first is None else at(f"2025-06-01T{first}")
        assert to_datetime(timing.after(now)) == wanted  # type: ignore[arg-type]


def test_an_interval_begins_when_it_is_told_to() -> None:
    start = to_us(at("2030-01-01"))
    timing = read_schedule("a", 60, "UTC", start, to_us(at("2025-01-01")))
    found = Record("tasks.tick", timing.to_json(), "UTC", start=start)
    assert found.after(0) == start
    assert found.after(start) == start + MINUTE


@each(
    "text, written",
    [
        ("* * * * *", "* * * * *"),
        ("*/15 0-6/2 1,2,3 * 1-5", "*/15 0,2,4,6 1-3 * 1-5"),
        ("0 */4 * 1-3 sun,sat", "0 */4 * 1-3 0,6"),
        ("7,8 3 * * *", "7,8 3 * * *"),
    ],
)
def test_a_crontab_is_written_in_one_way_and_read_again(text: str, written: str) -> None:
    timing = cron(text, "Europe/Berlin")
    assert timing.text == written
    assert timing_of(timing.to_json()) == timing
    assert cron(written, "Europe/Berlin") == timing


def test_a_day_of_the_month_and_of_the_week_is_both_unless_either_is_asked_for() -> None:
    both = cron("0 3 13 * 5")
    either = read_schedule("a", crontab_of("0 3 13 * 5"), "UTC", None, 0, either_day=True)
    begin, end = at("2026-03-01"), at("2026-03-31")
    assert [day.day for day in firings(both, begin, end)] == [13]
    assert [day.day for day in firings(either, begin, end)] == [6, 13, 20, 27]
    assert timing_of(either.to_json()) == either
    assert (both.text, either.text) == ("0 3 13 * 5", "0 3 13 * 5 (either day)")
    # Where one of the fields names no day, cron asks for the other.
    monthly = read_schedule("a", crontab_of("0 3 13 * *"), "UTC", None, 0, either_day=True)
    assert [day.day for day in firings(monthly, begin, end)] == [13]


def test_every_crontab_of_a_few_values_is_read_as_it_was_written() -> None:
    for size in range(1, 4):
        for numbers in itertools.combinations((0, 1, 2, 5, 10, 58, 59), size):
            made = read_schedule("a", crontab(minute=list(numbers)), "UTC", None, 0)
            assert timing_of(made.to_json()) == made


@each(
    "period, text",
    [(90, "every 90 s"), (0.25, "every 0.25 s"), (3600, "every 1 h"), (120, "every 2 min"),
     (172800, "every 2 d")],
)  # fmt: skip
def test_an_interval_is_written_for_people(period: float, text: str) -> None:
    assert read_schedule("a", period, "UTC", None, 0).text == text


def test_a_leap_day_is_found_years_ahead_and_what_never_comes_is_not() -> None:
    assert cron("0 0 29 2 *").after(to_us(at("2096-03-01"))) == to_us(at("2104-02-29"))
    friday = Cron((0,), (0,), (29,), (2,), (5,), "UTC")
    assert to_datetime(friday.after(to_us(at("2025-01-01"))) or 0) == at("2036-02-29") - timedelta(
        0
    )
    assert Cron((0,), (0,), (30,), (2,), tuple(range(7)), "UTC").after(0) is None
    assert Every(10**15, 0).after(to_us(at("2255-06-01"))) is None


def test_an_unknown_zone_is_refused_with_its_name() -> None:
    with pytest.raises(ScheduleError, match="'Mars/Olympus'"):
        zone_of("Mars/Olympus")


def test_the_sun_is_where_ephem_has_it_every_day_of_a_year() -> None:
    place = ephem.Observer()
    place.lat, place.lon = "52.5", "13.4"
    place.pressure, place.horizon = 0, "-0:34"  # as the tables of almanacs have it
    for event, find in (("sunrise", place.next_rising), ("sunset", place.next_setting)):
        sun = read_schedule("a", solar(event, 52.5, 13.4), "UTC", None, 0)
        us = to_us(datetime(2026, 1, 1, tzinfo=UTC))
        times = []
        for _ in range(365):
            place.date = to_datetime(us).replace(tzinfo=None)
            expected = find(ephem.Sun()).datetime().replace(tzinfo=UTC)
            us = sun.after(us)
            assert abs(to_datetime(us) - expected) < timedelta(seconds=2)
            times.append(us)
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert min(gaps) > 1435 * MINUTE and max(gaps) < 1445 * MINUTE


def test_the_sun_is_written_and_read_again() -> None:
    sun = read_schedule("a", solar("dusk_civil", -37.8, 144.9), "UTC", None, 0)
    assert sun.text == "dusk_civil at -37.8, 144.9"
    assert timing_of(sun.to_json()) == sun
