"""The loop's alarms, with a hub that only notes what it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kombu_toc.consumer.loop import TICK, Alarm, Loop


class Timer:
    def __init__(self, wait: float, function: Callable[[], None]) -> None:
        self.wait, self.function, self.canceled = wait, function, False

    def cancel(self) -> None:
        self.canceled = True


class Hub:
    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, wait: float, function: Callable[[], None]) -> Timer:
        self.timers.append(Timer(wait, function))
        return self.timers[-1]

    def pending(self) -> list[Timer]:
        return [timer for timer in self.timers if not timer.canceled]


class CountingLoop(Loop):
    nudges = 0

    def nudge(self) -> None:
        self.nudges += 1


class Fixture:
    def __init__(self, **options: Any) -> None:
        self.loop = CountingLoop(lambda: None)
        self.loop.hub = self.hub = Hub()
        self.rung = 0
        self.alarm = Alarm(self.loop, self.ring, **options)

    def ring(self) -> None:
        self.rung += 1


def test_an_alarm_is_one_timer_for_the_earliest_moment_it_was_set_for() -> None:
    f = Fixture()
    f.alarm.set(20.0, 10.0)
    f.alarm.set(30.0, 10.0)
    [timer] = f.hub.pending()
    assert timer.wait == pytest.approx(10.0 - TICK)
    f.alarm.set(15.0, 10.0)
    [timer] = f.hub.pending()
    assert timer.wait == pytest.approx(5.0 - TICK)
    timer.function()
    assert f.rung == 1
    assert not f.alarm.is_set


def test_an_alarm_that_is_due_nudges_and_leaves_no_timer() -> None:
    f = Fixture()
    f.alarm.set(20.0, 10.0)
    f.alarm.set(10.0 + TICK / 2, 10.0)
    assert f.hub.pending() == []
    assert f.loop.nudges == 1


def test_a_timer_that_is_set_while_the_hub_is_about_to_wait_ends_that_wait() -> None:
    f = Fixture()
    f.loop.ticking = True
    f.alarm.set(20.0, 10.0)
    assert f.loop.nudges == 1


def test_an_alarm_that_must_not_be_early_never_is() -> None:
    f = Fixture(early=0.0)
    f.alarm.set(10.0, 10.0)
    [timer] = f.hub.pending()
    assert timer.wait == TICK


def test_a_timer_that_the_hub_dropped_is_set_again() -> None:
    f = Fixture()
    f.alarm.set(20.0, 10.0)
    f.hub.timers[0].cancel()
    f.alarm.set(30.0, 10.0)
    assert len(f.hub.pending()) == 1
    f.alarm.cancel()
    assert f.hub.pending() == []


def test_a_nudge_from_another_thread_reaches_the_loop() -> None:
    nudged = []
    loop = Loop(lambda: nudged.append(1))
    loop.wait_alone()
    try:
        loop.nudge()
        for fd in loop.wait(5.0):
            loop.readable(fd)
        assert nudged == []  # only a hub has more to do then
        assert list(loop.wait(0.0)) == []
    finally:
        loop.close()
    loop.nudge()  # nobody waits: no harm
