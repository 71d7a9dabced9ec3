"""The task library with real workers: what becomes of tasks, and of those whose Redis is lost."""

from __future__ import annotations

from typing import Any

import pytest

import celery_toc

from ..support import nursery
from ..support.library import on_engines
from ..support.nodes import ROOT
from ..support.workers import Live, wait_until


@pytest.fixture
def options(library_url: str) -> dict[str, Any]:
    return {"broker_transport_options": {"toc_library": library_url}}


@on_engines("sqlite", "postgresql")
def test_what_waits_when_redis_is_lost_runs_on_time_and_once(
    live: Live, options: dict[str, Any]
) -> None:
    live.app.conf.update(options)
    live.start_workers(2, "-c", "2", **options)
    note = live.app.tasks["e2e.note"]
    celery_toc.send_many(note.s(f"lost-{n}").set(countdown=6 + n / 50) for n in range(100))
    live.toc.client.flushdb()
    library = celery_toc.timeout_center(live.app).library
    assert library.rebuild().put == 100
    entries = live.journal.wait_for("lost-", 100)
    assert len({entry["name"] for entry in entries}) == len(entries) == 100
    wait_until(lambda: library.counts() == {"succeeded": 100, "not put": 0}, what=library.counts)


@pytest.mark.nightly(
    guarded_by="tests/e2e/test_library.py::test_what_waits_when_redis_is_lost_runs_on_time_and_once"
)
def test_the_example_loses_redis_and_no_task() -> None:
    environment = {"TASKS": "300", "AHEAD": "10", "PYTHONPATH": str(ROOT)}
    words = ("examples/library/lose_redis.py",)
    done = nursery.done(words, execute=True, environment=environment, timeout=150)
    sent, put, run = done.stdout.splitlines()
    assert sent == "sent 300 tasks, flushed Redis: it holds 0 messages"
    assert put == "put 300 messages back"
    assert run.startswith("run: 300 of 300, twice: 0, early: 0, late by ")
