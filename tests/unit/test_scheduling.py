"""How the tests themselves are run."""

from __future__ import annotations

import time

import psutil
import pytest

from ..support import scheduling


@pytest.mark.parametrize(
    ("loads", "most", "left"), [([99, 80, 10, 99], 60, 1), ([99] * 9999, 0, 9999)]
)
def test_a_process_stands_back_while_the_processors_are_busy_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, loads: list[int], most: float, left: int
) -> None:
    rest = list(loads)
    monkeypatch.setattr(psutil, "cpu_percent", lambda: rest.pop(0))
    monkeypatch.setattr(scheduling, "LOOK", 0.001)
    monkeypatch.setattr(scheduling, "MOST", most)
    time.sleep(0.002)
    next(scheduling.StandingBack().pytest_runtest_protocol())
    assert len(rest) == left
