"""How soon a worker's processes come free, by what it has executed; the time is handed in."""

from __future__ import annotations

import pytest

from celery_toc.worker.pool import Pace


def test_nothing_is_expected_of_tasks_that_nobody_has_seen_end() -> None:
    pace = Pace()
    assert pace.soon_free(0.02, 2, now=100.0) == 0
    pace.see({"a", "b"}, now=100.0)
    assert pace.soon_free(0.02, 2, now=100.001) == 0


def test_short_tasks_are_fetched_ahead_and_long_ones_are_not() -> None:
    for seconds, ahead in ((0.001, 40), (0.01, 4), (0.03, 1), (0.1, 0), (4.0, 0)):
        pace = Pace()
        pace.took(seconds)
        assert pace.soon_free(0.02, 2, now=100.0) == ahead


def test_how_long_a_task_takes_is_seen_by_when_it_is_executing_no_more() -> None:
    pace = Pace()
    pace.see({"a"}, now=10.0)
    pace.see({"a"}, now=11.0)
    assert pace.mean is None
    pace.see({"b"}, now=14.0)
    assert pace.mean == pytest.approx(4.0)
    pace.see(set(), now=14.5)
    assert pace.mean == pytest.approx(4.0 + 0.2 * (0.5 - 4.0))


def test_a_long_task_among_short_ones_counts_for_a_while() -> None:
    pace = Pace()
    for _ in range(100):
        pace.took(0.001)
    pace.took(4.0)
    assert pace.soon_free(0.02, 2, now=100.0) == 0
    for _ in range(40):
        pace.took(0.001)
    assert pace.soon_free(0.02, 2, now=100.0) > 4


def test_a_process_that_executes_a_long_task_is_not_expected_to_come_free() -> None:
    pace = Pace()
    pace.took(0.001)
    pace.see({"a", "b"}, now=100.0)
    assert pace.soon_free(0.02, 2, now=100.0) == 40
    # Both go on: nothing must wait behind them.
    assert pace.soon_free(0.02, 2, now=100.1) == 0
    # One has ended, and its process works off short ones again.
    pace.see({"a"}, now=100.1)
    for _ in range(40):
        pace.took(0.001)
    assert pace.soon_free(0.02, 2, now=100.2) in range(10, 21)


def test_processes_without_a_task_count() -> None:
    pace = Pace()
    pace.took(0.01)
    assert pace.soon_free(0.02, 8, now=100.0) == 16
