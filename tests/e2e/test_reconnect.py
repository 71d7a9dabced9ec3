"""K7, X5: a server that restarts under a worker, in every pool."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..servers import Server
from .conftest import POOLS, Journal
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
        while client.keys("toc:{celery:*"):
            assert time.monotonic() < deadline, client.keys("toc:{celery:*")
            time.sleep(0.05)  # the acknowledgements are on their way
    runs = Counter(entry["name"] for entry in journal.entries())
    assert set(runs.values()) == {1}, runs
    assert "may lose messages" not in worker.container.logs()
    app.close()


def test_a_worker_warns_once_of_a_server_that_forgets(start_workers: StartWorkers) -> None:
    """Y9"""
    [worker] = start_workers(1, "-P", "solo")
    assert worker.container.logs().count("may lose messages") == 1
