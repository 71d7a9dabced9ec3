"""Recurring tasks without a beat process, with real workers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from celery import Celery

from celery_toc import timeout_center

from .conftest import POOLS, Journal, wait_until
from .nodes import Worker

StartWorkers = Callable[..., list[Worker]]


def planned(id: str) -> datetime:
    """The time in the id of a firing."""
    return datetime.fromisoformat(id.rpartition("@")[2].replace("Z", "+00:00"))


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_any_worker_carries_a_schedule_on(
    start_workers: StartWorkers, app: Celery, journal: Journal, pool: str
) -> None:
    """Each planned time is met once, by whichever of two workers, and not before."""
    start_workers(2, *POOLS[pool])
    center = timeout_center(app)
    period = timedelta(seconds=0.1)
    center.schedules.put("often", "e2e.tick", period)
    journal.wait_for("often@", 30)
    center.schedules.delete("often")
    wait_until(lambda: center.count("celery") == 0)
    ran = journal.entries("often@")
    times = sorted(planned(entry["name"]) for entry in ran)
    assert times == [times[0] + number * period for number in range(len(times))]
    assert all(entry["by_redis"] >= entry["eta"] for entry in ran)
    if pool in ("prefork", "threads"):
        assert len({entry["pid"] for entry in ran}) > 1
