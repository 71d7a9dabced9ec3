"""Celery's own views tell of what waits in the center as they tell of what a worker holds.

The first two are written after Celery's integration tests, ``test_Inspect.test_scheduled`` and
``test_revoked``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, states
from celery.app.control import Inspect
from celery.result import AsyncResult
from celery.worker import state as worker_state
from kombu import pools
from kombu.utils.uuid import uuid

from celery_toc.worker import remote_control as remote

from ..support import nursery
from ..support.workers import ALONE, POOLS, Live, wait_until

HOUR = 3600


@pytest.fixture(autouse=True)
def _new_connections(client: Any) -> Iterator[None]:
    """Kombu's pools outlive a test, and the topics that a channel has declared are flushed."""
    pools.reset()
    yield
    pools.reset()


def note(app: Celery, name: str, **options: Any) -> AsyncResult:
    return app.tasks["e2e.note"].apply_async((name,), **options)


def inspect(app: Celery, number: int = 1) -> Inspect:
    """Asks so many workers, and waits no longer than for them."""
    return app.control.inspect(limit=number, timeout=10)


def listed(answers: dict[str, list[dict[str, Any]]]) -> list[str]:
    return [one["request"]["id"] for some in answers.values() for one in some]


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_a_scheduled_task_is_listed_as_celery_has_it(live: Live, pool: str) -> None:
    [worker] = live.start_workers(1, *POOLS[pool], *ALONE)
    due = datetime.now(timezone.utc) + timedelta(seconds=60)
    sent = live.app.tasks["e2e.add"].apply_async([1], {"y": 3}, eta=due)
    assert inspect(live.app).scheduled() == {
        worker.hostname(): [
            {
                "eta": due.strftime("%Y-%m-%dT%H:%M:%S.%f") + "+00:00",
                "priority": 6,
                "request": {
                    "id": sent.id,
                    "name": "e2e.add",
                    "args": [1],
                    "kwargs": {"y": 3},
                    "type": "e2e.add",
                    "hostname": worker.hostname(),
                    "time_start": None,
                    "acknowledged": False,
                    "delivery_info": {
                        "exchange": "",
                        "routing_key": "celery",
                        "priority": 0,
                        "redelivered": False,
                    },
                    "worker_pid": None,
                },
            }
        ]
    }
    [[listed]] = inspect(live.app).scheduled().values()
    assert inspect(live.app).query_task(sent.id, "unknown") == {
        worker.hostname(): {sent.id: ["scheduled", listed["request"]]}
    }


def test_no_secret_of_the_broker_is_told_to_who_asks_a_worker(live: Live) -> None:
    """K1: neither of its URLs nor of its options."""
    urls = [live.server.toc_url, "toc+redis://:sesame@127.0.0.1:1/0"]
    options = {"sentinel_kwargs": {"password": "sesame"}}
    live.start_workers(1, *ALONE, broker_url=urls, broker_transport_options=options)
    [stats] = inspect(live.app).stats().values()
    assert stats["broker"]["transport"].startswith("toc")
    assert "sesame" not in repr(stats)


@pytest.mark.parametrize("countdown", [pytest.param(None, marks=pytest.mark.nightly), HOUR])
def test_a_revoked_task_is_listed_although_it_never_came_to_a_worker(
    live: Live, countdown: float | None
) -> None:
    """In every worker's list, for every worker would have it; and its id may be used again."""
    workers = live.start_workers(2, "-c", "1", *ALONE)
    live.fill("nap", 4, "nap-", 1)
    sent = note(live.app, "revoked", countdown=countdown)
    sent.revoke()
    answers = inspect(live.app, 2).revoked()
    assert set(answers) == {worker.hostname() for worker in workers}
    assert all(sent.id in ids for ids in answers.values())
    assert sent.state == states.REVOKED
    if countdown:
        note(live.app, "again", task_id=sent.id)
        live.journal.wait_for("again", 1)
    live.journal.wait_for("nap", 4)
    assert live.journal.entries("revoked") == []


#: A user's own test: a worker in a thread of it, and no command line of Celery's.
IN_A_THREAD = """
import sys
from celery.contrib.testing.worker import start_worker
from tests.support.tasks import make_app

app = make_app(*sys.argv[1:])
with start_worker(app, perform_ping_check=False):
    later = app.tasks["e2e.note"].apply_async(("x",), countdown=3600)
    gone = app.tasks["e2e.note"].apply_async(("x",), countdown=3600)
    gone.revoke()
    asked = app.control.inspect(limit=1, timeout=10)
    [scheduled], [revoked] = asked.scheduled().values(), asked.revoked().values()
    assert [one["request"]["id"] for one in scheduled] == [later.id], scheduled
    assert revoked == [gone.id], revoked
"""


def test_a_worker_in_a_thread_of_a_program_lists_what_every_worker_lists(
    live: Live, celery_backend_cluster: Any, log_url: str
) -> None:
    urls = (live.server.toc_url, celery_backend_cluster[0].config()["url"])
    nursery.done(("-c", IN_A_THREAD, *urls), execute=True)


def test_tasks_are_listed_once_in_a_fleet_and_by_another_worker_when_one_goes(live: Live) -> None:
    workers = live.start_workers(2, "-c", "1", *ALONE)
    sent = {note(live.app, "x", countdown=HOUR, queue=queue).id for queue in ("celery", "urgent")}
    answers = inspect(live.app, 2).scheduled()
    assert len(answers) == 2
    assert sorted(listed(answers)) == sorted(sent)
    [teller] = [worker for worker in workers if answers[worker.hostname()]]
    assert listed(inspect(live.app, 2).scheduled()) == listed(answers), (
        "the same one tells it again"
    )
    teller.kill("SIGKILL")
    wait_until(lambda: sorted(listed(inspect(live.app).scheduled())) == sorted(sent), 30)


def test_a_bounded_number_is_listed_the_soonest_first(live: Live) -> None:
    live.start_workers(1, "-c", "1", *ALONE)
    queues = ("celery", "urgent", "one-slot")
    begin = datetime.now(timezone.utc) + timedelta(seconds=HOUR)
    ids = [uuid() for _ in range(1100)]
    for number in reversed(range(1100)):
        eta = begin + timedelta(seconds=number)
        note(live.app, "x", eta=eta, queue=queues[number % 3], task_id=ids[number])
    assert listed(inspect(live.app).scheduled()) == ids[:1000]
    assert listed(inspect(live.app)._request("scheduled", limit=7)) == ids[:7]


def test_the_time_is_the_one_that_the_center_goes_by(live: Live) -> None:
    """A task that was moved, a countdown, one that is due and waits for a process, one that is
    listed although its arguments cannot be, and what is no task."""
    live.start_workers(1, "-c", "1", *ALONE)
    for name in ("a", "b", "c"):
        live.app.tasks["e2e.nap"].delay(name, 5)
    moved = note(live.app, "x", eta=datetime.now(timezone.utc) + timedelta(seconds=HOUR))
    counted = note(live.app, "x", countdown=HOUR / 2)
    odd = live.app.send_task(
        "of.another.program", ({"deep": [1]},), countdown=2 * HOUR, shadow="odd"
    )
    live.toc.reschedule(moved.id, delay=60.0)
    live.toc.put("celery", "none", b"no task", delay=30)
    [answer] = inspect(live.app).scheduled().values()
    due = {found.id: found.time_us / 1e6 for found in live.toc.get([moved.id, counted.id, odd.id])}
    assert [one["request"]["id"] for one in answer] == [moved.id, counted.id, odd.id]
    for one in answer:
        told = datetime.fromisoformat(one["eta"])
        assert told.timestamp() == pytest.approx(due[one["request"]["id"]], abs=0.002)
    assert answer[2]["request"]["name"] == "odd"
    assert answer[2]["request"]["type"] == "of.another.program"
    assert answer[2]["request"]["args"] == [{"deep": [1]}]


def test_a_worker_of_another_broker_tells_what_celery_does() -> None:
    consumer = SimpleNamespace(timer=SimpleNamespace(schedule=SimpleNamespace(queue=())))
    assert remote.scheduled(SimpleNamespace(consumer=consumer)) == []
    assert remote.query_task(SimpleNamespace(consumer=consumer), ["unknown"]) == {}
    assert remote.revoked(SimpleNamespace(consumer=consumer)) == list(worker_state.revoked)


def test_a_worker_answers_again_seconds_after_the_server_has_lost_its_memory(live: Live) -> None:
    [worker] = live.start_workers(1, *POOLS["threads"])
    wait_until(lambda: live.app.control.ping(timeout=1), what=worker.logs)
    live.client.flushall()
    began = time.monotonic()
    wait_until(lambda: live.app.control.ping(timeout=0.5), 8, what=worker.logs)
    assert time.monotonic() - began < 7
