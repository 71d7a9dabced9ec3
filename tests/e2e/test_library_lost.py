"""What is lost with a worker or with Redis, and comes back from the library (X12)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from celery.schedules import crontab

import celery_toc
from kombu_toc.library.schema import SCHEDULES

from ..support.library import statuses
from ..support.workers import LOOPS, POOLS, Live, wait_until
from .test_dead_letters import dead
from .test_limits import marked


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


@pytest.mark.parametrize("pool", LOOPS)
def test_a_task_that_is_lost_with_its_worker_was_never_done_and_runs_when_it_is_requeued(
    live: Live, options, pool
) -> None:
    """The queue is guarded: what is done is not run again."""
    live.app.conf.update(options)
    library = celery_toc.timeout_center(live.app).library
    [first] = live.start_workers(1, *POOLS[pool], **options)
    short = live.app.tasks["e2e.nap"].delay("short", 0.1).id
    wait_until(lambda: statuses(library, short) == ["succeeded"], what=first.logs)
    sent = live.begin("nap", "early", 5)
    wait_until(lambda: len(marked(live.toc)) == 1, what=first.logs)
    wait_until(lambda: statuses(library, sent.id) == ["taken"], what=first.logs)
    first.container.end()
    [second] = live.start_workers(1, *POOLS[pool], **options)
    assert dead(live.toc, sent.id).error == "the worker that ran it is gone: its lease ended"
    assert not {"done", "succeeded"} & set(statuses(library, sent.id))
    assert celery_toc.timeout_center(live.app).center.dead.requeue("celery", ids=[sent.id]) == 1
    live.journal.wait_for("early", 2)
    wait_until(lambda: statuses(library, sent.id)[-1] == "succeeded", what=second.logs)
    assert len(live.journal.entries("early")) == 2


@pytest.mark.parametrize("pool", LOOPS)
def test_a_task_that_fails_is_dead_and_stays_so_in_the_library(live: Live, options, pool) -> None:
    live.app.conf.update(options)
    library = celery_toc.timeout_center(live.app).library
    [worker] = live.start_workers(1, *POOLS[pool], **options)
    sent = live.app.tasks["e2e.fail"].delay("disk full")
    wait_until(lambda: statuses(library, sent.id) == ["dead"], what=worker.logs)
    later = live.app.tasks["e2e.nap"].delay("later", 0.0).id
    wait_until(lambda: statuses(library, later) == ["succeeded"], what=worker.logs)
    assert statuses(library, sent.id) == ["dead"]
    worker.container.teardown()
    assert statuses(library, sent.id) == ["dead"]


def test_a_queue_stays_paused_while_workers_put_back_what_redis_has_lost(
    live: Live, options
) -> None:
    live.app.conf.update(options)
    queues = celery_toc.timeout_center(live.app).center.queues
    live.toc.queues.declare("celery")
    queues.pause("celery")
    live.app.tasks["e2e.note"].delay("held")
    [worker] = live.start_workers(1, *POOLS["threads"], **options)
    live.toc.client.flushdb()
    wait_until(
        lambda: live.journal.entries("held") or live.toc.counts("celery").ready, 60, worker.logs
    )
    assert live.journal.entries("held") == [] and live.toc.queues.is_paused("celery")
    queues.resume("celery")
    live.journal.wait_for("held", 1)


def test_schedules_pauses_and_limits_come_back_after_redis_has_lost_everything(
    live: Live, options, request, monkeypatch
) -> None:
    """While workers run the schedules, and others send; nobody tells the library to write."""
    # A busy machine may take longer to write what has ended, which would come back.
    monkeypatch.setattr("kombu_toc.library.rebuild.SETTLE", 6.0)
    live.app.conf.update(options)
    live.app.conf.beat_schedule = {}
    center = celery_toc.timeout_center(live.app)
    library = center.library
    workers = live.start_workers(2, *POOLS["threads"], **options)
    center.schedules.put("often", "e2e.tick", 0.2)
    center.schedules.put("monthly", "e2e.note", crontab(0, 3, day_of_month=1), args=("month",))
    center.schedules.put("paused", "e2e.note", 0.2, args=("paused",))
    center.schedules.pause("paused")
    center.center.queues.alter("celery", rate="50/s")
    live.toc.queues.declare("later")
    center.center.queues.pause("later")
    live.app.tasks["e2e.note"].apply_async(("held",), queue="later")
    stopping, sent = threading.Event(), []

    def send() -> None:
        while not stopping.wait(0.02):
            name = f"load-{len(sent):04d}"
            live.app.tasks["e2e.note"].apply_async((name,), countdown=len(sent) % 40 / 10)
            sent.append(name)

    load = threading.Thread(target=send)
    load.start()
    request.addfinalizer(stopping.set)
    live.journal.wait_for("often@", 5)
    monthly = center.schedules.get("monthly")
    wait_until(lambda: kept(library) == {"often", "monthly", "paused"}, what=workers[0].logs)
    live.journal.wait_for("load-", 50)
    live.toc.client.flushdb()
    library.rebuild()
    ran = len(live.journal.entries("often@"))
    live.journal.wait_for("often@", ran + 5)
    stopping.set()
    load.join()
    live.journal.wait_for("load-", len(sent))
    again = celery_toc.timeout_center(live.app)
    assert again.schedules.get("monthly") == monthly
    assert [one.id for one in again.get(monthly.next_id)] == [monthly.next_id]
    assert again.schedules.get("paused").state == "paused"
    assert live.toc.queues.paused() == {"later"}
    assert live.toc.queues.describe("celery").limits["rate"].value == "50/s"
    again.schedules.delete("often")
    names = [entry["name"] for entry in live.journal.entries("often@")]
    assert len(set(names)) == len(names)
    assert sorted(entry["name"] for entry in live.journal.entries("load-")) == sent
    assert (
        live.journal.entries("paused")
        == live.journal.entries("month")
        == live.journal.entries("held")
        == []
    )
    assert live.toc.counts("later").ready == 1


def kept(library: Any) -> set[str]:
    """The schedules that the library has."""
    databases = library.store.shards.databases
    return {row["name"] for one in databases for row in one.read(SCHEDULES.select())}
