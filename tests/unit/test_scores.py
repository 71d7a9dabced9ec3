"""The score codec keeps times to the microsecond or two, and never early (A3, A6)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kombu_toc import ActionTimeError
from kombu_toc.model import scores

LAST_US = scores.LAST_MS * 1000

times = st.integers(0, LAST_US)
#: Times that lie close together: the interesting ones.
near = st.integers(-3000, 3000)
milliseconds = st.integers(0, scores.LAST_MS)
retries = st.integers(0, scores.TRIED)
steps = st.integers(0, 9)


@given(times)
def test_a_score_never_tells_an_action_time_too_early_and_at_most_3_us_late(us):
    assert 0 <= scores.action_time(scores.action(us)) - us <= 3


@given(times, near)
def test_a_message_is_due_only_once_its_action_time_has_come(us, apart):
    now = max(us + apart, 0)
    if scores.action(us) <= scores.due(now):
        assert us <= now


@given(times, st.integers(3, 3000))
def test_a_message_is_due_three_microseconds_after_its_action_time_at_the_latest(us, after):
    assert scores.action(us) <= scores.due(us + after)


@given(times)
def test_what_is_put_for_now_is_due_now(us):
    assert scores.action_time(scores.due(us)) <= us


@given(times, near)
def test_scores_are_in_the_order_of_their_action_times(us, apart):
    other = min(max(us + apart, 0), LAST_US)
    earlier, later = sorted((us, other))
    assert scores.action(earlier) <= scores.action(later)
    assert scores.due(earlier) <= scores.due(later)


@given(times)
def test_a_double_holds_every_score_exactly(us):
    score = scores.action(us)
    assert int(float(score)) == score < 2**53
    assert int(float(score + 1)) != score


@given(times)
def test_the_first_digits_of_a_score_are_the_epoch_milliseconds(us):
    assert scores.action(us) // 1000 == us // 1000
    assert 32 <= scores.action(us) % 1000 <= 999


@given(milliseconds, steps, retries)
def test_a_lease_comes_back_as_it_was_put_in(ms, step, left):
    assert scores.read_lease(scores.lease(ms, step, left)) == (ms, step, left)


@given(milliseconds, retries, st.integers(0, 999))
def test_a_message_that_was_tried_is_due_from_its_millisecond_on(ms, left, later):
    score = scores.tried(ms, left)
    assert scores.action_time(score) == ms * 1000
    assert scores.due(ms * 1000 + later) >= score
    assert scores.due(ms * 1000 - 1) < score


@given(milliseconds, retries)
def test_a_score_says_how_many_retries_are_left(ms, left):
    assert scores.retries_left(scores.tried(ms, left)) == left


@given(times)
def test_a_message_that_was_not_tried_counts_no_retries(us):
    assert scores.retries_left(scores.action(us)) is None


def test_rolled_back_without_back_off_the_score_is_the_number_of_retries_left():
    """A6"""
    assert [scores.tried(0, left) for left in (16, 15, 0)] == [16, 15, 0]


@given(times)
def test_what_was_rolled_back_goes_ahead_of_everything_untried(us):
    assert scores.tried(0, scores.TRIED) < scores.action(us)


def test_the_last_time_a_score_holds_lies_in_2255():
    year = 1970 + LAST_US / 1e6 / 86400 / 365.2425
    assert 2255 <= year < 2256


@given(st.integers(LAST_US + 1, 10**30))
def test_an_action_time_beyond_what_a_score_holds_is_refused(us):
    with pytest.raises(ActionTimeError, match="2255"):
        scores.action(us)


@given(st.integers(-(10**30), -1))
def test_a_time_before_the_epoch_counts_as_the_epoch(us):
    assert scores.check(us) == 0
    assert scores.action(us) == scores.action(0)


@pytest.mark.parametrize("left", [-1, 32])
def test_retries_that_a_score_cannot_hold_are_refused(left):
    with pytest.raises(ValueError, match="retries"):
        scores.tried(0, left)
    with pytest.raises(ValueError, match="retries"):
        scores.lease(0, 0, left)


def test_a_step_that_a_lease_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="step"):
        scores.lease(0, 30, 0)
