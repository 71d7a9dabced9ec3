"""Workers of two zones, each of which takes the slots of its zone first."""

from __future__ import annotations

import time
from typing import Any
from zlib import crc32

import pytest
from celery import Celery

from ..support.workers import Journal, StartWorkers


def own(entry: dict[str, Any], workers: dict[str, str]) -> bool:
    """Whether a task was started in its zone."""
    zone = "A" if crc32(entry["name"].encode()) % 8 < 4 else "B"
    return entry["worker"] == workers[zone]


@pytest.mark.alone
def test_each_zone_starts_its_own_on_time_and_one_takes_over_from_the_other(
    start_workers: StartWorkers, app: Celery, journal: Journal
) -> None:
    """D9"""
    workers = {
        zone: start_workers(
            1, "-c", "2", broker_transport_options={"toc_slots": 8, "toc_prefer_slots": slots}
        )[0]
        for zone, slots in (("A", "0-3"), ("B", "4-7"))
    }
    names = {zone: worker.hostname() for zone, worker in workers.items()}
    time.sleep(1.5)  # what they know nothing of is looked into

    def send(prefix: str, number: int) -> None:
        for i in range(number):
            name = f"{prefix}-{i}"
            headers = {"x-slot-basis": name}
            app.tasks["e2e.told"].apply_async(
                (name,), countdown=0.1 + 0.4 * (i % 2), headers=headers
            )
            time.sleep(0.02)  # each finds a process idle

    def started(prefix: str, number: int) -> list[dict[str, Any]]:
        entries = journal.wait_for(prefix, 2 * number)
        return [entry for entry in entries if not entry["name"].endswith("-done")]

    send("both", 40)
    entries = started("both", 40)
    assert [entry for entry in entries if not own(entry, names)] == []
    assert max(entry["at"] - entry["due"] for entry in entries) < 0.3
    workers["B"].container.kill()
    send("left", 30)
    for entry in started("left", 30):
        late = entry["at"] - entry["due"]
        assert entry["worker"] == names["A"]
        if own(entry, names):
            assert late < 0.3
        else:
            assert 1.0 <= late < 1.0 + 0.8
