"""The task library with real workers: what becomes of tasks, and of those whose Redis is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from celery import Celery

import celery_toc
import kombu_toc

from ..support.library import on_engines, statuses
from ..support.nodes import ROOT
from ..support.workers import POOLS, Journal, StartWorkers, wait_until


@pytest.fixture
def options(library_url: str) -> dict[str, Any]:
    return {"broker_transport_options": {"toc_library": library_url}}


@on_engines("sqlite")
@pytest.mark.parametrize("pool", list(POOLS))
def test_history_tells_what_has_become_of_each_task(
    start_workers: StartWorkers, app: Celery, journal: Journal, options: dict[str, Any], pool: str
) -> None:
    app.conf.update(options)
    library = celery_toc.timeout_center(app).library
    headers = celery_toc.biz("order", 42)
    done = app.tasks["e2e.add"].apply_async((1, 2), countdown=0.5, headers=headers)
    failed, late = (app.tasks[f"e2e.{name}"].delay("disk full") for name in ("fail", "fail_late"))
    again = app.tasks["e2e.fail_again"].delay("thrice")
    refused = app.tasks["e2e.refuse"].delay("no")
    later = app.tasks["e2e.add"].apply_async((1, 2), countdown=3600, headers=headers)
    assert statuses(library, done.id) == statuses(library, later.id) == ["pending"]
    start_workers(1, *POOLS[pool], **options)
    assert done.get(timeout=20) == 3
    later.revoke()
    for one, expected in (
        (done, ["succeeded"]),
        (failed, ["failed"]),
        (late, ["failed"]),
        (again, ["retried", "retried", "failed"]),
        (refused, ["dead"]),
        (later, ["revoked"]),
    ):
        wait_until(
            lambda one=one, expected=expected: statuses(library, one.id) == expected,
            what=lambda one=one: (one, library.history(one.id)),
        )
    for one in (failed, late):
        wait_until(lambda one=one: library.history(one.id)[0].error)
        [record] = library.history(one.id)
        assert record.error.startswith("ValueError: disk full\nTraceback")
        assert record.worker
    found = library.find(biz_id="42", biz_type="order").records
    assert {record.id: record.status for record in found} == {
        done.id: "succeeded",
        later.id: "revoked",
    }


@on_engines("sqlite", "postgresql")
def test_what_waits_when_redis_is_lost_runs_on_time_and_once(
    start_workers: StartWorkers,
    app: Celery,
    journal: Journal,
    toc: kombu_toc.TimeoutCenter,
    options: dict[str, Any],
) -> None:
    app.conf.update(options)
    start_workers(2, "-c", "2", **options)
    note = app.tasks["e2e.note"]
    celery_toc.send_many(note.s(f"lost-{n}").set(countdown=6 + n / 50) for n in range(100))
    toc.client.flushdb()
    library = celery_toc.timeout_center(app).library
    assert library.rebuild().put == 100
    entries = journal.wait_for("lost-", 100)
    assert len({entry["name"] for entry in entries}) == len(entries) == 100
    wait_until(lambda: library.counts() == {"succeeded": 100, "not put": 0}, what=library.counts)


@pytest.mark.nightly(
    guarded_by="tests/chaos/test_chaos.py::"
    "test_whoever_dies_between_two_steps_of_the_library_no_message_is_lost"
)
@on_engines("sqlite", "postgresql")
def test_a_task_that_is_lost_in_redis_alone_starts_within_two_periods(
    start_workers: StartWorkers,
    app: Celery,
    journal: Journal,
    toc: kombu_toc.TimeoutCenter,
    options: dict[str, Any],
) -> None:
    app.conf.update(options)
    start_workers(1, "-c", "2", **options)
    sent = app.tasks["e2e.note"].apply_async(("lost",), countdown=2)
    [found] = toc.get(sent.id)
    slot = toc.registry.topic(found.topic).slot(found.slot)
    toc.client.hdel(slot.body, sent.id)
    toc.client.zrem(slot.stores[found.step], sent.id)
    assert not toc.get(sent.id)
    journal.wait_for("lost", 1, timeout=62)
    library = celery_toc.timeout_center(app).library
    wait_until(lambda: statuses(library, sent.id) == ["succeeded"])
    assert len(journal.entries("lost")) == 1


@pytest.mark.nightly(
    guarded_by="tests/e2e/test_library.py::test_what_waits_when_redis_is_lost_runs_on_time_and_once"
)
def test_the_example_loses_redis_and_no_task() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "library" / "lose_redis.py")],
        env={**os.environ, "TASKS": "300", "AHEAD": "10", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    sent, put, run = done.stdout.splitlines()
    assert sent == "sent 300 tasks, flushed Redis: it holds 0 messages"
    assert put == "put 300 messages back"
    assert run.startswith("run: 300 of 300, twice: 0, early: 0, late by ")
