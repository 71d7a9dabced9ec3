"""When leases that have ended may be rolled back, as far as one who watches the server can tell."""

from __future__ import annotations

import pytest

from kombu_toc.center.watch import LEAST_GRACE, MARGIN, SILENCE, SLOW, Watch

#: By how much the server's clock is ahead of the monotonic one.
AHEAD = 1_700_000_000


def seen(watch: Watch, *times: float, ahead: float = AHEAD, took: float = 0.001) -> float:
    """Let the server answer at these monotonic times; returns what the last sample says."""
    step = 0.0
    for at in times:
        step = watch.sample(int((at - took / 2 + ahead) * 1_000_000), at - took, at)
    return step


def each(first: float, last: float) -> list[float]:
    return [first + i for i in range(int(last - first) + 1)]


def test_one_who_has_not_watched_may_roll_back_nothing() -> None:
    watch = Watch()
    assert watch.until(100, 6) is None
    seen(watch, 100)
    assert watch.until(100, 6) is None


@pytest.mark.parametrize(("visibility", "grace"), [(1, 2), (6, 2), (12, 4), (45, 15), (3600, 15)])
def test_the_grace_is_a_third_of_a_lease_within_bounds(visibility: float, grace: float) -> None:
    watch = Watch()
    seen(watch, *each(100, 100 + grace))
    assert watch.until(100 + grace - 0.01, visibility) is None
    assert watch.until(100 + grace, visibility) is not None


def test_until_is_what_the_server_shows_now_and_a_little_more() -> None:
    watch = Watch()
    seen(watch, *each(100, 110))
    until = watch.until(111, 6)
    shows = (111 + AHEAD) * 1_000_000
    assert shows < until <= shows + MARGIN * 1_000_000


def test_a_reply_that_took_long_starts_a_grace() -> None:
    watch = Watch()
    seen(watch, *each(100, 110))
    seen(watch, 112, took=SLOW + 0.5)
    assert watch.until(112, 6) is None
    seen(watch, *each(113, 115))
    assert watch.until(112 + LEAST_GRACE, 6) is not None


def test_silence_starts_a_grace() -> None:
    watch = Watch()
    seen(watch, *each(100, 110))
    assert watch.until(110 + SILENCE + 0.1, 6) is None
    seen(watch, 110 + SILENCE + 0.1)
    assert watch.until(110 + SILENCE + 0.1, 6) is None


def test_a_step_forward_starts_a_grace_of_a_third_of_a_lease_and_more() -> None:
    watch = Watch()
    seen(watch, *each(100, 110))
    step = seen(watch, 110.5, ahead=AHEAD + 15)
    assert step == pytest.approx(15, abs=0.01)
    seen(watch, *[110.5 + i for i in range(1, 30)], ahead=AHEAD + 15)
    assert watch.until(110.5 + 20 + LEAST_GRACE - 0.1, 60) is None
    until = watch.until(110.5 + 20 + LEAST_GRACE, 60)
    assert until > (110.5 + 20 + AHEAD + 15) * 1_000_000


def test_a_step_during_a_silence_counts_as_one() -> None:
    watch = Watch()
    seen(watch, *each(100, 110))
    assert seen(watch, 150, ahead=AHEAD + 15) > 14
    seen(watch, *each(151, 166), ahead=AHEAD + 15)
    assert watch.until(150 + 16, 60) is None


def test_a_step_back_starts_a_grace() -> None:
    watch = Watch()
    seen(watch, *each(100, 110))
    assert seen(watch, 110.5, ahead=AHEAD - 15) < -14
    assert watch.until(110.5, 6) is None
    seen(watch, 111.5, 112.5, ahead=AHEAD - 15)
    until = watch.until(112.5, 6)
    assert until < (112.5 + AHEAD - 14) * 1_000_000


def test_what_takes_a_while_is_no_step() -> None:
    """However a reply's time lies within its round trip."""
    watch = Watch()
    seen(watch, *each(100, 110))
    for at, when in ((111, 110.2), (112, 111.99), (113, 112.1)):
        assert watch.sample(int((when + AHEAD) * 1_000_000), at - 0.9, at) == 0
    assert watch.until(113, 6) is not None


def test_clocks_that_drift_make_no_step() -> None:
    watch = Watch()
    for i in range(1000):
        assert watch.sample(int((100 + i * 1.001 + AHEAD) * 1_000_000), 100 + i, 100 + i) == 0


def test_a_center_may_be_told_its_grace() -> None:
    watch = Watch()
    seen(watch, 100, 101)
    assert watch.until(101, 60, 0.5) is not None
    assert watch.until(101, 60, 1.5) is None


@pytest.mark.parametrize("visibility", [1, 2, 3, 4.5, 60])
def test_who_stood_still_unseen_has_a_moment_to_renew(visibility: float) -> None:
    """A lease that was renewed just in time, and then all stood still, short of a gap."""
    watch = Watch()
    seen(watch, *each(90, 110))
    lease_ends = 110 + visibility * 2 / 3
    seen(watch, 110 + SILENCE - 0.01)
    until = watch.until(110 + SILENCE - 0.01, visibility)
    assert until is not None
    assert until <= (lease_ends + AHEAD + MARGIN) * 1_000_000
    # A holder that is dead is found dead, a little later.
    later = 10 + int(lease_ends)
    seen(watch, *each(113, later))
    until = watch.until(later, visibility)
    assert until is not None
    assert until > (lease_ends + AHEAD) * 1_000_000
