"""What a publish makes of a message's headers, without a server."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from kombu_toc.center.clock import SendersClock
from kombu_toc.errors import ActionTimeError
from kombu_toc.model.timetext import action_time
from kombu_toc.transport.publisher import _countdown_to

from ..support.cases import each

#: 2030-01-31T10:00:00Z
MOMENT_US = 1_896_084_000_000_000


@pytest.mark.versions
@each(
    "eta",
    [
        "2030-01-31T10:00:00+00:00",
        "2030-01-31T10:00:00Z",
        "2030-01-31T11:00:00+01:00",
        "2030-01-31T10:00:00",  # UTC unless an app says otherwise
        datetime(2030, 1, 31, 10, tzinfo=timezone.utc),
        datetime(2030, 1, 31, 11, tzinfo=timezone(timedelta(hours=1))),
    ],
)
def test_an_eta_is_a_moment(eta: object) -> None:
    assert action_time({"eta": eta}, "x") == (MOMENT_US, None)


@each(("digits", "us"), [("5", 500_000), ("123", 123_000), ("1234567", 123_456)])
def test_a_second_s_fraction_has_any_number_of_digits(digits: str, us: int) -> None:
    assert action_time({"eta": f"2030-01-31T10:00:00.{digits}Z"}, "x") == (MOMENT_US + us, None)


def test_an_eta_goes_before_a_delay_and_neither_means_now() -> None:
    assert action_time({"x-delay": 1500}, "x") == (None, 1_500_000)
    assert action_time({"eta": "2030-01-31T10:00:00Z", "x-delay": 1500}, "x")[1] is None
    assert action_time({}, "x") == (None, None)


@each("headers", [{"eta": "soon"}, {"eta": 5}, {"x-delay": "soon"}])
def test_what_is_no_time_is_an_error_that_names_the_message(headers: dict[str, object]) -> None:
    with pytest.raises(ActionTimeError, match="task-1"):
        action_time(headers, "task-1")


def test_a_countdown_is_counted_by_the_servers_clock_if_that_is_known() -> None:
    """It was asked for at 100 s for 10 s, and is published 4 s later."""
    clock = SendersClock()
    ends = 110_000_000
    unknown = _countdown_to(ends, clock, now=50.0, wall_us=104_000_000)
    assert unknown is not None
    assert unknown.at_us is None
    assert unknown.ends == 56.0
    clock.sample(900_000_000, 49.0)
    known = _countdown_to(ends, clock, now=50.0, wall_us=104_000_000)
    assert known is not None
    assert known.at_us == 907_000_000
    assert _countdown_to(ends, clock, now=60.0, wall_us=110_000_000) is None
