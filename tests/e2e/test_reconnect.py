"""K7, X5: connections that break under a worker; see test_faults for the rest."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import redis
from celery import Celery

from ..support.inspection import slot_keys
from ..support.nodes import Worker
from ..support.proxy import Proxy
from ..support.servers import Server
from ..support.tasks import LOG, make_app
from ..support.workers import Live, StartWorkers, wait_until


def test_a_task_runs_once_although_the_server_was_away_for_longer_than_its_lease(
    live: Live, tmp_path: Path
) -> None:
    """A5: whoever connects first leaves the others the time to renew."""
    options = {"broker_transport_options": {"visibility_timeout": 1.5}}
    durable = Server(tmp_path, "--appendonly", "yes", "--appendfsync", "always").start()
    try:
        workers = live.start_workers(3, "-c", "2", broker=durable.toc_url, **options)
        app = make_app(durable.toc_url, "disabled://")
        for i in range(3):
            app.tasks["e2e.late_ack"].delay(f"long-{i}", 9)
        live.journal.wait_for("long-", 3)
        durable.stop()
        time.sleep(3)  # the leases end
        durable.start()
        # A worker that knows nothing of the others' tasks comes along as well.
        live.start_workers(1, "-P", "solo", broker=durable.toc_url, **options)
        live.journal.wait_for("long-", 6)
        app.tasks["e2e.note"].delay("afterwards")
        live.journal.wait_for("afterwards", 1)
        runs = live.journal.runs()
        assert set(runs.values()) == {1}, runs
        for worker in workers:
            worker.teardown()
        app.close()
    finally:
        durable.stop()


def cut_connections(client: redis.Redis) -> None:
    """All but those over which tasks write down what they saw."""
    with client.pipeline(transaction=False) as pipe:
        for one in client.client_list(_type="normal"):
            if one["name"] != LOG:
                pipe.client_kill_filter(_id=one["id"], skipme=True)
        pipe.execute(raise_on_error=False)  # one may have ended meanwhile


def test_what_a_thread_pool_was_given_runs_once_although_the_connection_was_cut(live: Live) -> None:
    """X5: a pool of threads starts what it has queued, whatever becomes of the connection."""
    live.start_workers(1, "-P", "threads", "-c", "1")
    live.fill("late_ack", 6, "queued-", 0.6)
    live.journal.wait_for("queued-1", 1)
    cut_connections(live.client)
    live.journal.wait_for("queued-", 12)
    live.begin("note", "afterwards")
    runs = live.journal.runs("queued-")
    assert set(runs.values()) == {1}, runs


def test_an_only_process_goes_on_after_the_connection_was_cut_and_keeps_its_time_limit(
    live: Live,
) -> None:
    """X5: the worker hears of the task's end, acknowledges it, and takes the next."""
    live.start_workers(1, "-c", "1")
    live.begin("late_ack", "first", 3)
    cut_connections(live.client)
    live.journal.wait_for("first-done", 1)
    live.app.tasks["e2e.late_ack"].apply_async(("limited", 60), time_limit=4)
    live.journal.wait_for("limited", 1, timeout=10)
    cut_connections(live.client)
    live.app.tasks["e2e.note"].delay("afterwards")
    live.journal.wait_for("afterwards", 1, timeout=15)
    runs = live.journal.runs()
    assert runs == {"first": 1, "first-done": 1, "limited": 1, "afterwards": 1}


@pytest.mark.one_server("the proxy stands before one server")
@pytest.mark.parametrize(
    "pool", [pytest.param("solo", marks=pytest.mark.every_pool), "prefork", "threads"]
)
def test_a_task_that_ends_while_the_server_is_away_is_acknowledged_afterwards_without_alarm(
    live: Live, pool: str
) -> None:
    """X5: also where the loop stands still while the task runs."""
    with Proxy(live.server.port) as proxy:
        [worker] = live.start_workers(1, "-P", pool, "-c", "1", broker=proxy.toc_url)
        live.begin("late_ack", "ends", 1)
        proxy.refuse()
        proxy.cut()
        live.journal.wait_for("ends-done", 1)
        wait_until(lambda: "Connection to broker lost" in worker.logs())
        proxy.accept()
        wait_until(lambda: slot_keys(live.client) == [])
        live.begin("note", "afterwards")
        assert "Couldn't ack" not in worker.logs()
        assert "CRITICAL" not in worker.logs()
        assert len(live.journal.entries("ends")) == 2


def test_a_task_that_celery_cancels_at_a_lost_connection_runs_again(live: Live) -> None:
    """Its message is not kept, for nobody would ever acknowledge it."""
    options = {"worker_cancel_long_running_tasks_on_connection_loss": True}
    live.start_workers(1, "-c", "1", **options)
    live.begin("late_ack", "cancelled", 2)
    cut_connections(live.client)
    live.journal.wait_for("cancelled-done", 1)
    assert len(live.journal.wait_for("cancelled", 3)) == 3


def test_a_worker_warns_once_of_a_server_that_forgets(start_workers: StartWorkers) -> None:
    """Y9"""
    [worker] = start_workers(1, "-P", "solo")
    assert worker.container.logs().count("may lose tasks") == 1


@contextmanager
def half_written(app: Celery, worker: Worker) -> Iterator[None]:
    """The worker's only process has written half of a result, and stands still meanwhile."""
    main = psutil.Process(worker.container.pid)
    [process] = main.children()
    does = Path(f"/proc/{process.pid}/wchan")
    app.tasks["e2e.flaky"].delay("x" * 5_000_000, 1)
    wait_until(lambda: "nanosleep" in does.read_text())
    main.suspend()
    wait_until(lambda: "pipe_write" in does.read_text())
    process.suspend()
    before = main.io_counters().read_chars
    main.resume()
    wait_until(lambda: main.io_counters().read_chars > before + 60_000)  # what is in the pipe
    yield
    process.resume()


def test_a_result_that_was_half_read_when_the_connection_broke_is_read_to_its_end(
    live: Live,
) -> None:
    """Else its process would count as busy for ever, and its message stay with the worker."""
    [worker] = live.start_workers(1, "-c", "1")
    for times in (1, 2, 3):
        with half_written(live.app, worker):
            cut_connections(live.client)
            wait_until(lambda n=times: worker.logs().count("Connection to broker lost") >= n)
    live.app.tasks["e2e.note"].delay("afterwards")
    live.journal.wait_for("afterwards", 1, timeout=30)
    wait_until(lambda: slot_keys(live.client) == [], what=lambda: slot_keys(live.client))


@pytest.mark.one_server("the proxy stands before one server")
def test_a_worker_that_has_half_read_a_result_ends_while_the_server_is_away(live: Live) -> None:
    """It would take the rest for another result, and wait for the end of that for ever."""
    with Proxy(live.server.port) as proxy:
        [worker] = live.start_workers(1, "-c", "1", broker=proxy.toc_url)
        with half_written(live.app, worker):
            proxy.refuse()
            proxy.cut()
            wait_until(lambda: "Connection to broker lost" in worker.logs())
        os.kill(worker.container.pid, signal.SIGTERM)
        wait_until(lambda: worker.container.status == "exited", what=worker.logs)
