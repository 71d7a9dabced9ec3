"""x-guard with real workers: an older copy of Redis comes back, and what had ended stays ended."""

from __future__ import annotations

from typing import Any

import pytest
import redis

import celery_toc

from ..support.library import on_engines
from ..support.workers import LOOPS, POOLS, Live, wait_until


@pytest.fixture
def options(library_url: str) -> dict[str, Any]:
    return {
        "broker_transport_options": {
            "toc_library": library_url,
            "toc_topics": {"celery": {"guard": True}},
            "visibility_timeout": 5,
        }
    }


def copy_of(client: redis.Redis) -> dict[bytes, bytes]:
    return {key: client.dump(key) for key in client.keys("*")}


def bring_back(client: redis.Redis, copy: dict[bytes, bytes]) -> None:
    for key in client.keys("*"):
        client.delete(key)
    for key, value in copy.items():
        client.restore(key, 0, value)


@on_engines("sqlite", "postgresql")
@pytest.mark.parametrize("pool", LOOPS)
def test_what_had_ended_does_not_run_again_when_an_older_copy_of_redis_comes_back(
    live: Live, options: dict[str, Any], pool: str
) -> None:
    """Its worker is killed at the same time."""
    live.app.conf.update(options)
    library = celery_toc.timeout_center(live.app).library
    sent = [live.app.tasks["e2e.late_persist"].delay(f"job-{n}", 0.05).id for n in range(60)]
    retried = live.app.tasks["e2e.again"].delay(2, 0.2).id
    copy = copy_of(live.client)
    [worker] = live.start_workers(1, *POOLS[pool], **options)
    wait_until(
        lambda: (
            library.counts().get("succeeded", 0) >= 20
            and [one.status for one in library.history(retried)]
            == ["retried", "retried", "succeeded"]
        ),
        what=library.counts,
    )
    worker.kill()
    ended = {record.id for record in library.find(status="succeeded", limit=1000).records}
    before = live.journal.runs()
    bring_back(live.client, copy)
    live.start_workers(1, *POOLS[pool], **options)
    ended_all = {"succeeded": 61, "retried": 2, "not put": 0}
    wait_until(lambda: library.counts() == ended_all, 60, library.counts)
    runs = live.journal.runs()
    for number, id in enumerate(sent):
        name = f"job-{number}-done"
        assert runs[name] >= 1
        if id in ended:
            assert runs[name] == before[name] == 1, "it had ended"
    assert runs[f"again-{retried}"] == 3
    wait_until(
        lambda: any("came again" in str(one.error) for one in library.find(limit=1000).records)
    )


@on_engines("sqlite")
def test_a_task_is_carried_on_to_its_end_under_one_id(live: Live, options: dict[str, Any]) -> None:
    """Retries, a requeue, and the end of a worker's lease are no second run."""
    live.app.conf.update(options)
    library = celery_toc.timeout_center(live.app).library
    again = live.app.tasks["e2e.again"].delay(3, 0.1)
    step = live.app.tasks["e2e.late_step"].delay("step", "reject")
    [worker] = live.start_workers(1, "-c", "2", **options)
    assert again.get(timeout=30) == 3
    for one in (again, step):
        wait_until(
            lambda id=one.id: {r.status for r in library.history(id)} <= {"succeeded", "retried"}
        )
    hang = live.begin("hang", "hang", 600)
    worker.kill()
    live.start_workers(1, "-c", "2", **options)
    assert hang.get(timeout=30) == "hang"
    wait_until(lambda: {r.status for r in library.history(hang.id)} == {"succeeded"})
    twice = live.app.tasks["e2e.note"].apply_async(("twice",), task_id=again.id)
    wait_until(lambda: library.history(twice.id)[-1].status == "cancelled")
    assert not live.journal.entries("twice")
