"""Redis's clock as told from replies. Requirement X2."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kombu_toc.center.clock import CLOCK_WINDOW, SendersClock, ServerClock

#: seconds of a round trip: until the server reads its clock, and until the reply is here
TRIPS = st.lists(
    st.tuples(*[st.floats(0.00001, 0.5)] * 2, st.floats(0.0, CLOCK_WINDOW / 2)),
    min_size=1,
    max_size=20,
)
AHEAD = 1_800_000_000_000_000


def _server_us(monotonic: float) -> float:
    return AHEAD + monotonic * 1_000_000


@given(TRIPS)
def test_who_waits_never_sees_the_servers_clock_ahead_and_who_sends_never_behind(trips):
    waiting, sending = ServerClock(), SendersClock()
    now, nearest = 1.0, {"there": 1.0, "back": 1.0}
    for there, back, pause in trips:
        shown = int(_server_us(now + there))
        sending.sample(shown, now)
        now += there + back
        waiting.sample(shown, now)
        nearest = {"there": min(nearest["there"], there), "back": min(nearest["back"], back)}
        true = _server_us(now)
        assert waiting.at(now) <= true + 1
        assert sending.at(now) >= true - 1
        now += pause
    if now < CLOCK_WINDOW / 2:  # nothing is forgotten yet: as good as the best round trip
        assert sending.at(now) <= _server_us(now) + nearest["there"] * 1_000_000 + 2
        assert waiting.at(now) >= _server_us(now) - nearest["back"] * 1_000_000 - 2


def test_what_was_heard_long_ago_says_nothing_of_the_servers_clock():
    clock = SendersClock()
    assert clock.at(100.0) is None
    clock.sample(AHEAD, 100.0)
    assert clock.at(101.0) == AHEAD + 1_000_000
    assert clock.at(100.0 + CLOCK_WINDOW) is None


def test_a_clock_that_was_set_forward_is_followed_within_the_window():
    clock = SendersClock()
    for tenth in range(100):
        clock.sample(AHEAD + tenth * 100_000, tenth / 10)
    behind = clock.at(10.0)
    for tenth in range(100, 100 + int(CLOCK_WINDOW * 10) + 1):
        clock.sample(AHEAD + 60_000_000 + tenth * 100_000, tenth / 10)
    now = (100 + CLOCK_WINDOW * 10) / 10
    assert behind == AHEAD + 10_000_000
    assert clock.at(now) == AHEAD + 60_000_000 + int(now * 1_000_000)


def test_another_server_is_asked_anew():
    clock = SendersClock()
    clock.sample(AHEAD, 100.0)
    clock.forget()
    assert clock.at(100.1) is None
    clock.sample(AHEAD + 7, 100.2)
    assert clock.at(100.2) == AHEAD + 7


def test_of_several_servers_the_slowest_clock_counts_as_long_as_it_is_heard_of():
    """A3: a message is not early by the clock of the node that has it"""
    clocks = ServerClock()
    assert not clocks.known
    clocks.sample(5_000_000, 1.0, "fast")
    clocks.sample(3_000_000, 1.0, "slow")
    assert clocks.known
    assert clocks.at(2.0) == 4_000_000
    assert clocks.until(4_500_000, 2.0) == 0.5
    clocks.sample(5_000_000 + 100_000_000, 101.0, "fast")
    assert clocks.at(101.0) == 105_000_000
