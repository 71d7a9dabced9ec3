"""Queues whose rows are written behind, with real workers: Redis is lost, workers are killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

import celery_toc
import kombu_toc

from ..support.library import engine, library_url, new_url, on_engines
from ..support.nodes import Worker
from ..support.workers import Journal, wait_until

__all__ = ("engine", "library_url", "new_url")  # fixtures

StartWorkers = Callable[..., list[Worker]]


@pytest.fixture
def options(library_url: str) -> dict[str, Any]:
    return {
        "broker_transport_options": {
            "toc_library": library_url,
            "toc_topics": {"celery": {"library": "behind"}},
        }
    }


@pytest.mark.nightly(
    guarded_by="tests/e2e/test_library.py::test_what_waits_when_redis_is_lost_runs_on_time_and_once"
)
@on_engines("sqlite")
def test_what_waits_when_redis_is_lost_runs_on_time_and_once(
    start_workers: StartWorkers,
    app: Celery,
    journal: Journal,
    toc: kombu_toc.TimeoutCenter,
    options: dict[str, Any],
) -> None:
    # Senders need no library.
    start_workers(2, "-c", "2", **options)
    assert toc.registry.topic("celery").declaration.library == "behind"
    now = app.tasks["e2e.add"].delay(1, 2)
    for number in range(100):
        app.tasks["e2e.note"].apply_async((f"lost-{number}",), countdown=8 + number / 50)
    app.conf.update(options)
    library = celery_toc.timeout_center(app).library
    assert now.get(timeout=20) == 3
    wait_until(lambda: library.counts() == {"pending": 100, "succeeded": 1, "not put": 0})
    wait_until(lambda: not toc.queues.unwritten("celery")[0].entries)
    toc.client.flushdb()
    assert library.rebuild().put == 100
    entries = journal.wait_for("lost-", 100)
    assert len({entry["name"] for entry in entries}) == len(entries) == 100
    wait_until(lambda: library.counts() == {"succeeded": 101, "not put": 0}, what=library.counts)
    [record] = library.history(now.id)
    assert record.worker
    assert record.task == "e2e.add"


@on_engines("sqlite", "postgresql")
def test_recorders_that_are_killed_leave_what_they_have_not_written_to_others(
    start_workers: StartWorkers,
    app: Celery,
    toc: kombu_toc.TimeoutCenter,
    options: dict[str, Any],
) -> None:
    workers = start_workers(2, "-P", "solo", **options)
    by_pid = {worker.container.pid: worker for worker in workers}
    app.conf.update(options)
    library = celery_toc.timeout_center(app).library

    def recorder() -> int | None:
        """The process that is elected."""
        found = toc.client.keys("*speaker: library*")
        name = toc.client.get(found[0]) if found else None
        return int(name.split(b":")[-1].split(b"/")[0]) if name else None

    sent = 0
    for _ in range(2):
        wait_until(lambda: recorder() in by_pid, seconds=30)
        for number in range(150):
            app.tasks["e2e.note"].apply_async(("later",), countdown=3600)
            sent += 1
            if number == 75:
                worker = by_pid.pop(recorder())
                worker.container.kill()
        worker.container.start().ready()
        by_pid[worker.container.pid] = worker
    wait_until(
        lambda: library.counts() == {"pending": sent, "not put": 0},
        seconds=40,
        what=lambda: (library.counts(), toc.queues.unwritten()),
    )
    assert library.check() == []
