"""Far tasks with real workers: in the library until their time comes, whichever worker dies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

import celery_toc
from kombu_toc.library.horizon import FarStore
from kombu_toc.library.records import now_us
from kombu_toc.library.store import Store

from ..support.library import on_engines, shards_of
from ..support.nodes import Worker
from ..support.workers import Live, wait_until


@pytest.fixture
def url(library_url: str) -> str:
    return library_url


@pytest.fixture
def options(url) -> dict[str, Any]:
    topics = {"celery": {"horizon": 60}}
    return {"broker_transport_options": {"toc_library": url, "toc_topics": topics}}


@pytest.fixture
def far(url) -> Iterator[FarStore]:
    """What is far ahead, as it is in the database."""
    with shards_of([url]) as shards:
        yield FarStore(Store(shards))


def send(app: Celery, number: int, name: str) -> list[str]:
    """Tasks of tomorrow."""
    note = app.tasks["e2e.note"]
    return [
        note.apply_async((f"{name}-{one}",), countdown=86_400 + one).id for one in range(number)
    ]


def bring_near(far: FarStore, ids: list[str], seconds: float) -> int:
    """As if it were tomorrow: they are due in so many seconds. Returns when."""
    at_us = now_us() + int(seconds * 1_000_000)
    rows = far.store.of_ids(ids)
    assert len(rows) == len(ids)
    assert len(far.move(rows, {"action_us": at_us})) == len(ids)
    return at_us


@on_engines("sqlite")
def test_a_far_task_is_found_moved_and_revoked_and_runs_on_time(
    live: Live, options: dict[str, Any], far: FarStore
) -> None:
    live.app.conf.update(options)
    live.start_workers(1, "-c", "2", **options)
    soon, moved, revoked = send(live.app, 3, "far")
    assert not live.toc.get([soon, moved, revoked])
    center = celery_toc.timeout_center(live.app)
    found = {one.id: one for one in center.get([soon, moved, revoked])}
    assert {one.far for one in found.values()} == {True}
    assert center.task(found[soon]).name == "e2e.note"
    assert center.reschedule(moved, countdown=2)[0].moved
    live.app.control.revoke(revoked)
    wait_until(lambda: center.library.history(revoked)[0].status == "revoked")
    live.journal.wait_for("far-1", 1)
    # It is in Redis well before its time, and has that time there: so it is as punctual as others.
    due_us = bring_near(far, [soon], 60)
    wait_until(lambda: live.toc.get(soon), 100)
    [found] = live.toc.get(soon)
    assert 0 <= found.time_us - due_us <= 3
    assert not live.journal.entries("far-0")
    center.run_now(soon)
    live.journal.wait_for("far-0", 1)
    assert not live.journal.entries("far-2")


@pytest.mark.nightly(
    guarded_by="tests/engines/test_library_far.py::"
    "test_a_loader_that_dies_has_put_nothing_twice_and_forgotten_nothing"
)
@on_engines("sqlite", "postgresql")
def test_a_killed_loader_is_followed_by_another_and_nothing_is_late_or_run_twice(
    live: Live, options: dict[str, Any], far: FarStore
) -> None:
    live.app.conf.update(options)
    workers = live.start_workers(2, "-P", "threads", "-c", "4", **options)
    number = 2000
    ids = send(live.app, number, "far")
    library = celery_toc.timeout_center(live.app).library
    assert library.counts() == {"pending": number, "not put": 0, "far": number}

    def loaders() -> list[Worker]:
        keys = list(live.toc.client.scan_iter("*speaker* library *"))
        names = [live.toc.client.get(key).decode() for key in keys]
        return [
            worker
            for worker in workers
            if any(f":{worker.container.pid}" in name for name in names)
        ]

    wait_until(loaders)
    assert far.count("celery") == number
    [loader] = loaders()
    due_us = bring_near(far, ids, 180)
    center = celery_toc.timeout_center(live.app)
    center.queues.alter("celery", horizon=3600)
    wait_until(lambda: far.count("celery") < number, 60)  # it has begun
    loader.container.kill()
    wait_until(lambda: not far.count("celery"), 120)
    found = center.get(ids)
    assert len(found) == number
    assert max(abs(one.time_us - due_us) for one in found) < 3000  # 968 have one millisecond
    assert not live.journal.entries("far-")
    center.reschedule(found)
    live.journal.wait_for("far-", number, timeout=60)
    wait_until(lambda: sum(live.toc.counts("celery")) == 0)
    entries = live.journal.entries("far-")
    assert len({entry["name"] for entry in entries}) == len(entries) == number
    wait_until(lambda: library.counts() == {"succeeded": number, "not put": 0}, what=library.counts)
