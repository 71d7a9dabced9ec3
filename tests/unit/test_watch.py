"""What one who watches a server's clock knows of it being set."""

from __future__ import annotations

import pytest

from kombu_toc.center.clock import RENEWED, Watch

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


def test_after_a_step_forward_leases_need_a_third_of_their_time_and_more() -> None:
    watch = Watch()
    assert watch.steady(100, 60)
    seen(watch, *each(100, 110))
    step = seen(watch, 110.5, ahead=AHEAD + 15)
    assert step == pytest.approx(15, abs=0.01)
    assert not watch.steady(110.5 + 20 + RENEWED - 0.1, 60)
    assert watch.steady(110.5 + 20 + RENEWED, 60)


def test_a_step_during_a_silence_counts_as_one() -> None:
    watch = Watch()
    seen(watch, *each(100, 110))
    assert seen(watch, 150, ahead=AHEAD + 15) > 14
    assert not watch.steady(150 + 16, 60)


def test_a_step_back_is_told() -> None:
    watch = Watch()
    seen(watch, *each(100, 110))
    assert seen(watch, 110.5, ahead=AHEAD - 15) < -14
    assert watch.steady(110.5, 60)


def test_what_takes_a_while_is_no_step() -> None:
    """However a reply's time lies within its round trip."""
    watch = Watch()
    seen(watch, *each(100, 110))
    for at, when in ((111, 110.2), (112, 111.99), (113, 112.1)):
        assert watch.sample(int((when + AHEAD) * 1_000_000), at - 0.9, at) == 0


def test_clocks_that_drift_make_no_step() -> None:
    watch = Watch()
    for i in range(1000):
        assert watch.sample(int((100 + i * 1.001 + AHEAD) * 1_000_000), 100 + i, 100 + i) == 0
