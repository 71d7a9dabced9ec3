"""Times as people write them at the command line."""

from __future__ import annotations

from zoneinfo import ZoneInfo

import pytest

from celery_toc.cli import session
from kombu_toc import read_span, read_time

from ..support.cases import each

NOW = 1_900_000_000.0


@each(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1.5", 1.5),
        ("0", 0),
        ("45s", 45),
        ("1h30m", 5400),
        ("1H30M", 5400),
        ("2d", 172_800),
        ("1w", 604_800),
        ("500ms", 0.5),
        ("1m500ms", 60.5),
        (" 5m ", 300),
        ("1 h 30 minutes", 5400),
    ],
)
def test_a_span_is_seconds_or_numbers_with_units(text, seconds):
    assert read_span(text) == pytest.approx(seconds)


@each("text", ["", "soon", "-5", "5x", "h", "1h30", "1 x", "inf", "nan", "٣"])
def test_what_is_no_span_is_refused_with_what_is_allowed(text):
    with pytest.raises(ValueError, match="1h30m"):
        read_span(text)


def test_a_moment_without_an_offset_is_in_the_apps_time_zone():
    """Which is also what the commands show."""
    vienna = ZoneInfo("Europe/Vienna")
    assert read_time("2030-07-01T12:00:00", 0, vienna) == read_time("2030-07-01T10:00:00Z", 0)
    assert read_time("2030-01-01T12:00:00", 0, vienna) == read_time("2030-01-01T12:00:00+0100", 0)


@each(
    ("text", "offset"),
    [
        *(("now", 0), ("1h", 3600), ("+1h", 3600), ("-2d", -172_800), ("-90", -90)),
        *(("10 min ago", -600), ("in 2 days", 172_800), ("2030-03-17T17:46:40Z", 0)),
    ],
)
def test_a_time_is_a_moment_or_a_span_before_or_after_now(text, offset):
    assert read_time(text, NOW) == NOW + offset


@each(
    "text",
    ["", "-", "yesterday", "--1h", "2030-13-01", "12:00", "2030-01-01T25:00", "1h30", "2300-01-01"],
)
def test_what_is_no_time_is_refused_with_both_ways_to_write_one(text):
    with pytest.raises(ValueError, match=r"ISO 8601.* or as a span"):
        read_time(text, NOW)


@each(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.35, "350ms"),
        (1.25, "1.2s"),
        (59.4, "59s"),
        (59.9, "1m00s"),
        (125, "2m05s"),
        (7500, "2h05m"),
        (3599.9, "1h00m"),
        (273_600, "3d04h"),
    ],
)
def test_people_are_shown_two_units_at_most(seconds, text):
    assert session.span(seconds) == text


def test_json_has_utc_to_the_millisecond():
    assert session.iso(NOW + 0.1239) == "2030-03-17T17:46:40.123Z"
