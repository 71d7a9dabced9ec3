"""What is acknowledged when it begins and dead if its worker is lost, in the library (X12)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

import celery_toc
import kombu_toc

from .conftest import LOOPS, POOLS, Journal, wait_until
from .nodes import Worker
from .test_dead_letters import dead
from .test_limits import marked

StartWorkers = Callable[..., list[Worker]]


@pytest.fixture
def options(tmp_path) -> dict[str, Any]:
    return {
        "broker_transport_options": {
            "toc_library": f"sqlite:///{tmp_path}/library.db",
            "toc_dead_on_failure": True,
            "toc_topics": {"celery": {"guard": True}},
            "visibility_timeout": 2,
        }
    }


def statuses(library: Any, id: str) -> list[str]:
    return [record.status for record in library.history(id)]


@pytest.mark.parametrize("pool", LOOPS)
def test_a_task_that_is_lost_with_its_worker_was_never_done_and_runs_when_it_is_requeued(
    start_workers: StartWorkers,
    app: Celery,
    toc: kombu_toc.TimeoutCenter,
    journal: Journal,
    options: dict[str, Any],
    pool: str,
) -> None:
    """The queue is guarded: what is done is not run again."""
    app.conf.update(options)
    library = celery_toc.timeout_center(app).library
    [first] = start_workers(1, *POOLS[pool], **options)
    short = app.tasks["e2e.nap"].delay("short", 0.1).id
    wait_until(lambda: statuses(library, short) == ["done"], what=first.logs)
    sent = app.tasks["e2e.nap"].delay("early", 5)
    journal.wait_for("early", 1)
    wait_until(lambda: len(marked(toc)) == 1, what=first.logs)
    wait_until(lambda: statuses(library, sent.id) == ["taken"], what=first.logs)
    for process in reversed(first.container.processes()):
        process.kill()
    [second] = start_workers(1, *POOLS[pool], **options)
    assert dead(toc, sent.id).error == "the worker that ran it is gone: its lease ended"
    assert "done" not in statuses(library, sent.id)
    assert celery_toc.timeout_center(app).center.requeue_dead("celery", ids=[sent.id]) == 1
    journal.wait_for("early", 2)
    wait_until(lambda: statuses(library, sent.id)[-1] == "done", what=second.logs)
    assert len(journal.entries("early")) == 2


@pytest.mark.parametrize("pool", LOOPS)
def test_a_task_that_fails_is_dead_and_stays_so_in_the_library(
    start_workers: StartWorkers,
    app: Celery,
    toc: kombu_toc.TimeoutCenter,
    options: dict[str, Any],
    pool: str,
) -> None:
    app.conf.update(options)
    library = celery_toc.timeout_center(app).library
    [worker] = start_workers(1, *POOLS[pool], **options)
    sent = app.tasks["e2e.fail"].delay("disk full")
    wait_until(lambda: statuses(library, sent.id) == ["dead"], what=worker.logs)
    later = app.tasks["e2e.nap"].delay("later", 0.0).id
    wait_until(lambda: statuses(library, later) == ["done"], what=worker.logs)
    assert statuses(library, sent.id) == ["dead"]
    worker.container.teardown()
    assert statuses(library, sent.id) == ["dead"]
