"""K7, X5: a server that restarts under a worker, in every pool."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from celery import Celery

from ..servers import Server
from .conftest import POOLS, Journal, slot_keys
from .nodes import Worker
from .tasks import make_app

StartWorkers = Callable[..., list[Worker]]


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[Server]:
    """A server of this test's own, which forgets nothing."""
    server = Server(tmp_path, "--appendonly", "yes", "--appendfsync", "always").start()
    yield server
    server.stop()


@pytest.mark.parametrize("pool", list(POOLS))
def test_a_worker_goes_on_after_its_server_restarted(
    durable: Server,
    server: Server,
    start_workers: StartWorkers,
    journal: Journal,
    pool: str,
) -> None:
    """What was executing goes on and is not run again; what waited runs on time, once."""
    [worker] = start_workers(1, *POOLS[pool], broker=durable.toc_url)
    app = make_app(durable.toc_url, "disabled://")
    app.tasks["e2e.late_ack"].delay("executing", 4)
    journal.wait_for("executing", 1)
    for i in range(5):
        app.tasks["e2e.note"].apply_async((f"waiting-{i}",), countdown=3)
    durable.stop()
    time.sleep(0.5)  # the worker finds nobody there
    durable.start()
    journal.wait_for("executing-done", 1)
    journal.wait_for("waiting-", 5)
    app.tasks["e2e.note"].delay("afterwards")
    journal.wait_for("afterwards", 1)
    with durable.client() as client:
        deadline = time.monotonic() + 5
        while slot_keys(client):
            assert time.monotonic() < deadline, slot_keys(client)
            time.sleep(0.05)  # the acknowledgements are on their way
    runs = Counter(entry["name"] for entry in journal.entries())
    assert set(runs.values()) == {1}, runs
    assert "may lose messages" not in worker.container.logs()
    app.close()


def cut_connections(client: redis.Redis) -> None:
    client.client_kill_filter(_type="normal", skipme=True)


def test_what_a_thread_pool_was_given_runs_once_although_the_connection_was_cut(
    start_workers: StartWorkers, app: Celery, journal: Journal, client: redis.Redis
) -> None:
    """X5: a pool of threads starts what it has queued, whatever becomes of the connection."""
    start_workers(1, "-P", "threads", "-c", "1")
    for i in range(6):
        app.tasks["e2e.late_ack"].delay(f"queued-{i}", 0.6)
    journal.wait_for("queued-1", 1)
    cut_connections(client)
    journal.wait_for("queued-", 12)
    app.tasks["e2e.note"].delay("afterwards")
    journal.wait_for("afterwards", 1)
    runs = Counter(entry["name"] for entry in journal.entries("queued-"))
    assert set(runs.values()) == {1}, runs


def test_a_task_that_celery_cancels_at_a_lost_connection_runs_again(
    start_workers: StartWorkers, app: Celery, journal: Journal, client: redis.Redis
) -> None:
    """Its message is not kept, for nobody would ever acknowledge it."""
    options = {"worker_cancel_long_running_tasks_on_connection_loss": True}
    start_workers(1, "-c", "1", **options)
    app.tasks["e2e.late_ack"].delay("cancelled", 2)
    journal.wait_for("cancelled", 1)
    cut_connections(client)
    journal.wait_for("cancelled-done", 1)
    assert len(journal.wait_for("cancelled", 3)) == 3


def test_a_worker_warns_once_of_a_server_that_forgets(start_workers: StartWorkers) -> None:
    """Y9"""
    [worker] = start_workers(1, "-P", "solo")
    assert worker.container.logs().count("may lose messages") == 1
