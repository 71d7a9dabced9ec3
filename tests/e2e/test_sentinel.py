"""Sentinel under a real worker and a real producer: the primary is killed."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from ..support.commands import answer
from ..support.sentinels import Deployment
from ..support.tasks import make_app
from ..support.workers import Journal, StartWorkers, wait_until


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path, replicas=2).start()
    yield made
    made.stop()


@pytest.fixture
def sentinel_app(deployment: Deployment, journal: Journal) -> Iterator[Celery]:
    """What it is told is kept, the primary and a replica have: sentinels promote the one that
    has most."""
    options = {"toc_wait_replicas": 1, "toc_wait_timeout": 5}
    made = make_app(deployment.toc_url, "disabled://", broker_transport_options=options)
    yield made
    made.close()


class Producer(threading.Thread):
    """Sends tasks one after the other, each under its id until it is told that it is kept."""

    def __init__(self, app: Celery) -> None:
        super().__init__()
        self.app = app
        self.ending = threading.Event()
        self.kept: list[str] = []
        #: seconds between two that were kept
        self.longest = 0.0

    def run(self) -> None:
        while not self.ending.is_set():
            name, id, began = f"task-{len(self.kept)}", str(uuid.uuid4()), time.monotonic()
            while not self.ending.is_set():
                try:
                    self.app.tasks["e2e.note"].apply_async(
                        (name,), task_id=id, countdown=len(self.kept) % 3 * 0.2
                    )
                except Exception:  # whatever it is: it is not kept, as far as this side knows
                    time.sleep(0.05)  # or it would ask hundreds of times a second
                    continue
                self.kept.append(name)
                self.longest = max(self.longest, time.monotonic() - began)
                break
            time.sleep(0.01)  # about as many as the worker can take

    def end(self) -> list[str]:
        self.ending.set()
        self.join(60)
        return self.kept


def test_a_failover_loses_nothing_that_was_kept_and_the_worker_goes_on(
    deployment: Deployment, sentinel_app: Celery, start_workers: StartWorkers, journal: Journal
) -> None:
    """A task that executes meanwhile, and is acknowledged late, is neither lost nor run twice. And
    `celery toc` works over such a URL."""
    sent = sentinel_app.tasks["e2e.note"].apply_async(("later",), countdown=3600)
    status = answer(sentinel_app, "status", "--json")
    assert status.code == 0, status.err
    assert {t["queue"]: t["scheduled"] for t in status.json["topics"]} == {"celery": 1}
    assert status.json["broker"] == deployment.toc_url
    listed = answer(sentinel_app, "list", "--json").json["messages"]
    assert [message["id"] for message in listed] == [sent.id]
    assert answer(sentinel_app, "cancel", sent.id, "--yes").code == 0
    wrong = make_app(deployment.toc_url.replace("mymaster", "nosuch"), "disabled://")
    answer(wrong, "status").fails(1, "know no master 'nosuch', but 'mymaster'", "set master_name")
    wrong.close()
    [worker] = start_workers(
        1,
        *("-c", "3"),
        broker=deployment.toc_url,
        # The lease ends while the task still runs, unless it is renewed at the new master.
        broker_transport_options={"visibility_timeout": 8},
    )
    sentinel_app.tasks["e2e.late_ack"].delay("long", 20)
    journal.wait_for("long", 1)
    producer = Producer(sentinel_app)
    producer.start()
    try:
        wait_until(lambda: len(producer.kept) > 50)
        deployment.primary.kill()
        died = len(producer.kept)
        deployment.wait_for_failover()
        wait_until(lambda: len(producer.kept) > died + 50, 60)
    finally:
        kept = producer.end()
    assert producer.longest > 0.5, "there was no failover to be seen"

    def missing() -> set[str]:
        return set(kept) - {entry["name"] for entry in journal.entries("task-")}

    wait_until(lambda: not missing(), 60, missing)
    journal.wait_for("long-done", 1)
    with deployment.acting().client() as client:
        wait_until(lambda: not [*client.scan_iter("toc:{celery:*}:prepare")], 30)
    runs = journal.runs("long")
    assert runs == {"long": 1, "long-done": 1}
    assert worker.container.status == "running"
