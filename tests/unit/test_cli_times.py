"""Times as people write them at the command line."""

from __future__ import annotations

from datetime import timezone
from zoneinfo import ZoneInfo

import pytest

from celery_toc.cli import options

NOW = 1_900_000_000.0


@pytest.mark.parametrize(
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
    ],
)
def test_a_span_is_seconds_or_numbers_with_units(text, seconds):
    assert options.read_span(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "-5", "5x", "h", "1h30", "1 h", "inf", "nan", "٣"])
def test_what_is_no_span_is_refused_with_what_is_allowed(text):
    with pytest.raises(ValueError, match="1h30m"):
        options.read_span(text)


def test_a_moment_without_an_offset_is_in_the_apps_time_zone():
    """Which is also what the commands show."""
    vienna = ZoneInfo("Europe/Vienna")
    assert options.read_moment("2030-07-01T12:00:00", vienna) == options.read_moment(
        "2030-07-01T10:00:00Z", timezone.utc
    )
    assert options.read_moment("2030-01-01T12:00:00", vienna) == options.read_moment(
        "2030-01-01T12:00:00+01:00", timezone.utc
    )


@pytest.mark.parametrize("text", ["", "tomorrow", "2030-13-01", "12:00", "2030-01-01T25:00", "1h"])
def test_what_is_no_moment_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="ISO 8601, such as"):
        options.read_moment(text, timezone.utc)


@pytest.mark.parametrize(
    ("text", "offset"), [("now", 0), ("1h", 3600), ("+1h", 3600), ("-2d", -172_800), ("-90", -90)]
)
def test_a_bound_may_be_a_span_before_or_after_now(text, offset):
    assert options.read_bound(text, timezone.utc, NOW) == NOW + offset


def test_a_bound_may_be_a_moment():
    assert options.read_bound("2030-03-17T17:46:40Z", timezone.utc, 0) == NOW


@pytest.mark.parametrize("text", ["", "-", "yesterday", "--1h"])
def test_what_is_no_bound_is_refused_with_both_ways_to_write_one(text):
    with pytest.raises(ValueError, match=r"ISO 8601.* or as a span"):
        options.read_bound(text, timezone.utc, NOW)


@pytest.mark.parametrize(
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
    assert options.span(seconds) == text


def test_json_has_utc_to_the_millisecond():
    assert options.iso(NOW + 0.1239) == "2030-03-17T17:46:40.123Z"
