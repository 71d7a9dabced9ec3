"""How fast a backlog of a queue that is kept behind is written, without a server (X12)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kombu_toc.library import deferred
from kombu_toc.library.deferred import CATCH_UP, ENTRIES, INTERVAL, RECENT, _Pace


class Clock:
    """Of a process: seconds, and how much of them its other threads use the processor."""

    def __init__(self) -> None:
        self.now = self.used = self.own = 0.0

    def go_on(self, seconds: float, busy: float = 0.0) -> None:
        self.now += seconds
        self.used += seconds * busy + 0.05
        self.own += 0.05  # what the thread itself uses does not count


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    times = SimpleNamespace(
        monotonic=lambda: made.now, process_time=lambda: made.used, thread_time=lambda: made.own
    )
    monkeypatch.setattr(deferred, "time", times)
    return made


def run(clock: Clock, left: int, busy: float, arriving: int = 0) -> list[int]:
    """What is left of a backlog at each turn, of a process that writes all it may."""
    pace, found = _Pace(), []
    for _ in range(1000):
        pace.look()
        while not pace.waits(left) and left:
            pace.met(left)
            left = max(left - ENTRIES, 0)
            clock.now += 0.05
        found.append(left)
        if left <= ENTRIES:
            return found
        clock.go_on(INTERVAL, busy)
        left += arriving
    raise AssertionError(found)


def test_a_process_that_has_time_writes_a_backlog_at_once(clock: Clock) -> None:
    left = run(clock, 50 * ENTRIES, busy=0.05)
    # It is not known at first whether it has.
    assert 1 < len(left) <= 3
    assert left[0] > 40 * ENTRIES


@pytest.mark.parametrize("arriving", [0, ENTRIES // 2], ids=["alone", "with more"])
def test_a_busy_process_writes_a_backlog_evenly_and_within_its_time(
    clock: Clock, arriving: int
) -> None:
    left = run(clock, 20 * ENTRIES, busy=0.9, arriving=arriving)
    assert CATCH_UP / 2 <= clock.now <= CATCH_UP + 2
    middle = left[len(left) // 2]
    assert 5 * ENTRIES < middle < 15 * ENTRIES


def test_a_few_entries_are_written_at_once_however_busy_it_is(clock: Clock) -> None:
    assert run(clock, ENTRIES, busy=1.0) == [0]


def test_one_backlog_is_not_the_next(clock: Clock) -> None:
    run(clock, 20 * ENTRIES, busy=0.9)
    clock.go_on(100)
    clock.now = began = 1000.0
    run(clock, 20 * ENTRIES, busy=0.9)
    assert clock.now - began >= CATCH_UP / 2


def test_a_busy_process_that_is_elected_leaves_a_backlog_to_those_who_run_it(clock: Clock) -> None:
    """At first nobody knows whether it is busy, and most of what is there is run in moments."""
    pace = _Pace()
    left = 6 * ENTRIES
    for _ in range(4):
        pace.look()
        assert pace.waits(left)
        clock.go_on(INTERVAL, busy=0.9)
        left -= ENTRIES // 2  # as others run it, and it is read no more
    assert left == 4 * ENTRIES


def test_a_busy_process_that_keeps_up_writes_what_comes_at_once(clock: Clock) -> None:
    pace = _Pace()
    for _ in range(20):
        pace.look()
        assert not pace.waits(ENTRIES)
        pace.over()
        clock.go_on(INTERVAL, busy=0.9)
        assert not pace.waits(5 * ENTRIES)  # it has all come since
    clock.go_on(RECENT, busy=0.9)
    assert pace.waits(5 * ENTRIES)
