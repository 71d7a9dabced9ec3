"""Queues whose rows are written behind, with real workers: Redis is lost, workers are killed."""

from __future__ import annotations

from typing import Any

import pytest

import celery_toc

from ..support.library import on_engines
from ..support.workers import Live, wait_until


@pytest.fixture
def options(library_url: str) -> dict[str, Any]:
    return {
        "broker_transport_options": {
            "toc_library": library_url,
            "toc_topics": {"celery": {"library": "behind"}},
        }
    }


@pytest.mark.nightly(
    guarded_by="tests/engines/test_library_behind.py::"
    "test_a_recorder_that_is_killed_again_and_again_loses_nothing"
)
@on_engines("sqlite", "postgresql")
def test_recorders_that_are_killed_leave_what_they_have_not_written_to_others(
    live: Live, options: dict[str, Any]
) -> None:
    workers = live.start_workers(2, "-P", "solo", **options)
    by_pid = {worker.container.pid: worker for worker in workers}
    live.app.conf.update(options)
    library = celery_toc.timeout_center(live.app).library

    def recorder() -> int | None:
        """The process that is elected."""
        found = live.toc.client.keys("*speaker: library*")
        name = live.toc.client.get(found[0]) if found else None
        return int(name.split(b":")[-1].split(b"/")[0]) if name else None

    sent = 0
    for _ in range(2):
        wait_until(lambda: recorder() in by_pid, seconds=30)
        for number in range(150):
            live.app.tasks["e2e.note"].apply_async(("later",), countdown=3600)
            sent += 1
            if number == 75:
                worker = by_pid.pop(recorder())
                worker.container.kill()
        worker.container.start().ready()
        by_pid[worker.container.pid] = worker
    wait_until(
        lambda: library.counts() == {"pending": sent, "not put": 0},
        seconds=40,
        what=lambda: (library.counts(), live.toc.queues.unwritten()),
    )
    assert library.check() == []
