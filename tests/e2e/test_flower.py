"""K1: Flower shows what it shows with any broker, in a real browser; docs/flower.md says what else.

It needs the extra ``test-flower``, Chromium and its driver. Where one is missing these tests are
skipped with a line that says so, unless TOC_TEST_FLOWER=required: then they fail with it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest
from celery import Celery
from pytest_celery import CeleryBackendCluster, CeleryBrokerCluster

from celery_toc import timeout_center
from kombu_toc import TimeoutCenter, center_for

from ..support import nursery
from ..support.browser import Browser, require_browser
from ..support.nodes import ROOT, Worker
from ..support.ports import free_port
from ..support.servers import Server
from ..support.tasks import make_app
from ..support.workers import environment_of, wait_until

pytestmark = pytest.mark.timeout(120)

#: Seconds that Flower, or the browser, may take to come up.
START_TIMEOUT = 30


@pytest.fixture(scope="module", autouse=True)
def needs() -> None:
    require_browser("flower")


class Pages(Browser):
    """Flower's pages, as a browser shows them."""

    def __init__(self, profile: Path, url: str) -> None:
        super().__init__(profile, "1600,1200")
        self.url = url

    def open(self, path: str) -> None:
        super().open(self.url + path)

    def wait_at(self, path: str, find: Callable[[], Any]) -> Any:
        """What is found on that page, which is loaded again until it is there."""
        deadline = time.monotonic() + 15
        while True:
            self.open(path)
            again = time.monotonic() + 2
            while time.monotonic() < again:
                found = find()
                if found:
                    return found
                time.sleep(0.05)  # tables are filled after the page has been loaded
            assert time.monotonic() < deadline, f"{path} shows:\n{self.text()}"

    def row(self, path: str, link: str, *texts: str) -> str:
        """The table row with a link to that page, once it has these texts."""

        def find() -> str | None:
            row = self.run(
                "const link = document.querySelector(`table a[href$='${arguments[0]}']`);"
                "return link && link.closest('tr').innerText",
                link,
            )
            return row if row and all(text in row for text in texts) else None

        return self.wait_at(path, find)

    def cells(self, path: str, row: str) -> list[str]:
        """What the cells of the row with that id show."""
        return self.wait_at(
            path,
            lambda: self.run(
                "const row = document.getElementById(arguments[0]);"
                "return row && Array.from(row.cells, cell => cell.innerText.trim())",
                row,
            ),
        )

    def detail(self, task_id: str) -> dict[str, str]:
        """What the page of a task says."""
        self.open(f"/task/{task_id}")
        return self.run(
            "return Object.fromEntries(Array.from("
            "document.querySelectorAll('dt'),"
            "dt => [dt.innerText.trim(), dt.nextElementSibling.innerText.trim()]))"
        )

    def post(self, path: str) -> Any:
        """What Flower's HTTP interface answers."""
        with urlopen(Request(self.url + path, method="POST"), timeout=10) as answer:
            return json.load(answer)

    def get(self, path: str) -> Any:
        with urlopen(self.url + path, timeout=10) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def toc(server: Server) -> TimeoutCenter:
    """The broker's timeout center, empty at first."""
    with server.client() as client:
        client.flushall()
    return center_for(server.toc_url)


@pytest.fixture(scope="module")
def app(
    toc: TimeoutCenter,
    celery_broker_cluster: CeleryBrokerCluster,
    celery_backend_cluster: CeleryBackendCluster,
) -> Iterator[Celery]:
    """An app that tells of what it sends."""
    broker, backend = celery_broker_cluster[0].config(), celery_backend_cluster[0].config()
    made = make_app(broker["url"], backend["url"], task_send_sent_event=True)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def worker(start_worker: Callable[..., Worker], toc: TimeoutCenter) -> Iterator[Worker]:
    """A worker that executes one task at a time and fetches no further one."""
    settings = {"worker_prefetch_multiplier": 1, "task_send_sent_event": True}
    made = start_worker("-P", "prefork", "-c", "1", "-E", **settings)
    try:
        made.ready()
        yield made
    finally:
        made.teardown()


@pytest.fixture(scope="module")
def flower_url(
    tmp_path_factory: pytest.TempPathFactory, app: Celery, log_url: str
) -> Iterator[str]:
    """A running Flower, set up as docs/flower.md says."""
    directory = tmp_path_factory.mktemp("flower")
    port = free_port()
    page = (ROOT / "docs" / "flower.md").read_text()
    [words] = re.findall("^celery -A shop (flower .*)", page, re.MULTILINE)
    command = ["-m", "celery", "-A", "tests.support.tasks", *words.split()]
    command += ["--address=127.0.0.1", f"--port={port}"]
    environment = {**os.environ, **environment_of(app), "FLOWER_UNAUTHENTICATED_API": "true"}
    url, log = f"http://127.0.0.1:{port}", directory / "log"
    with nursery.running(command, log, execute=True, cwd=ROOT, env=environment) as process:
        wait_until(lambda: answers(url, process), START_TIMEOUT, log.read_text)
        yield url


def answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "Flower has ended"
    try:
        with urlopen(f"{url}/healthcheck", timeout=5) as answer:
            return answer.read() == b"OK"
    except OSError:
        return False


@pytest.fixture(scope="module")
def pages(
    needs: None, flower_url: str, worker: Worker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pages]:
    """Flower in a browser; it has seen the worker."""
    made = Pages(tmp_path_factory.mktemp("browser"), flower_url)
    try:
        made.row("/workers", f"/worker/{quote(worker.hostname())}", "Online")
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def waiting(app: Celery, pages: Pages) -> dict[str, str]:
    """A task that is due in an hour: its id and its ETA."""
    eta = datetime.now(timezone.utc) + timedelta(hours=1)
    return {"id": app.tasks["e2e.add"].apply_async((1, 1), eta=eta).id, "eta": eta.isoformat()}


@pytest.fixture(scope="module")
def retried(app: Celery, pages: Pages) -> str:
    """The id of a task that has failed once and is tried again in an hour."""
    result = app.tasks["e2e.again"].delay(1, 3600)
    pages.row("/tasks", f"/task/{result.id}", "RETRY")
    return result.id


def test_the_worker_is_online(pages: Pages, worker: Worker) -> None:
    row = pages.row("/workers", f"/worker/{quote(worker.hostname())}", "Online")
    assert worker.hostname() in "".join(row.split())  # a narrow column breaks it


def test_a_waiting_task_is_listed_with_its_eta(pages: Pages, waiting: dict[str, str]) -> None:
    row = pages.row("/tasks", f"/task/{waiting['id']}", "PENDING", waiting["eta"])
    assert "e2e.add" in row


def test_a_waiting_task_has_a_page_that_tells_its_eta(
    pages: Pages, waiting: dict[str, str]
) -> None:
    pages.row("/tasks", f"/task/{waiting['id']}")
    detail = pages.detail(waiting["id"])
    assert detail["Status"] == "PENDING"
    assert detail["ETA"] == waiting["eta"]
    assert "Worker" not in detail


def test_a_waiting_task_is_listed_on_the_page_of_a_worker_of_its_queue(
    pages: Pages, worker: Worker, waiting: dict[str, str]
) -> None:
    """Among the scheduled ones, as one that a worker holds is with other brokers."""
    listed = functools.partial(_scheduled_at, pages, worker)
    wait_until(lambda: waiting["id"] in "".join(listed()), START_TIMEOUT, listed)


def test_a_recurring_task_is_listed_with_its_next_firing_and_those_that_have_run(
    pages: Pages, worker: Worker, app: Celery
) -> None:
    schedules = timeout_center(app).schedules
    nightly = schedules.put("nightly", "e2e.add", 3600, args=[1, 1])
    often = schedules.put("often", "e2e.add", 0.5, args=[2, 2], max_runs=2)
    pages.row("/tasks", f"/task/{quote(often.next_id, safe='')}", "SUCCESS")
    schedules.delete("often")
    listed = functools.partial(_scheduled_at, pages, worker)
    wait_until(lambda: nightly.next_id in "".join(listed()), START_TIMEOUT, listed)
    schedules.delete("nightly")


def _scheduled_at(pages: Pages, worker: Worker) -> list[str]:
    """The rows of a worker's page that list scheduled tasks."""
    # A newer Flower shows what it was told when it was last asked, and then asks the worker.
    pages.open(f"/worker/{quote(worker.hostname())}")
    return pages.run(
        "const tables = Array.from(document.querySelectorAll('#tab-tasks table'));"
        "const held = tables.find(t => t.caption.textContent.trim() == 'Scheduled tasks');"
        "return Array.from(held.tBodies[0].rows).map(row => row.textContent)"
    )


def test_a_finished_task_is_shown_with_its_eta_and_result(pages: Pages, app: Celery) -> None:
    result = app.tasks["e2e.mul"].apply_async((6, 7), countdown=0.2)
    assert result.get(timeout=10) == 42
    pages.row("/tasks", f"/task/{result.id}", "SUCCESS")
    detail = pages.detail(result.id)
    assert detail["Result"] == "42"
    assert datetime.fromisoformat(detail["ETA"])


def test_a_retry_that_waits_is_shown_with_its_eta(pages: Pages, retried: str) -> None:
    detail = pages.detail(retried)
    assert detail["Status"] == "RETRY"
    eta = datetime.fromisoformat(detail["ETA"])
    assert timedelta(minutes=59) < eta - datetime.now(timezone.utc) < timedelta(minutes=60)


def test_the_broker_page_counts_what_waits_what_is_due_and_what_is_executed(
    pages: Pages, app: Celery, toc: TimeoutCenter, server: Server
) -> None:
    for i in range(3):
        app.tasks["e2e.late_ack"].apply_async((f"busy-{i}", 3), queue="urgent")
    for _ in range(2):
        app.tasks["e2e.add"].apply_async((1, 1), countdown=3600, queue="urgent")
    try:
        wait_until(lambda: toc.counts("urgent")[:3] == (2, 2, 1), what=lambda: toc.counts("urgent"))
        name, messages, unacknowledged, ready, *_ = pages.cells("/broker", "urgent")
        assert (name, messages, unacknowledged, ready) == ("urgent", "5", "1", "2")
        assert server.toc_url in pages.text()
        queues = pages.get("/api/queues/length")["active_queues"]
        assert {queue["name"]: queue["messages"] for queue in queues}["urgent"] == 5
    finally:
        toc.queues.purge("urgent")


def test_revoking_over_http_takes_a_waiting_task_out_of_redis(
    pages: Pages, app: Celery, toc: TimeoutCenter, waiting: dict[str, str]
) -> None:
    assert [found.state for found in toc.get(waiting["id"])] == ["waiting"]
    answer = pages.post(f"/api/task/revoke/{waiting['id']}")
    assert answer == {"message": f"Revoked '{waiting['id']}'"}
    assert toc.get(waiting["id"]) == []
    assert app.AsyncResult(waiting["id"]).state == "REVOKED"
    assert pages.get(f"/api/task/result/{waiting['id']}")["state"] == "REVOKED"


def test_the_button_revoke_takes_a_waiting_retry_out_of_redis(
    pages: Pages, app: Celery, toc: TimeoutCenter, retried: str
) -> None:
    assert [found.state for found in toc.get(retried)] == ["waiting"]
    pages.open(f"/task/{retried}")
    pages.driver.find_element("id", "task-revoke").click()
    wait_until(lambda: f"Revoked '{retried}'" in pages.text(), what=pages.text)
    assert toc.get(retried) == []
    assert app.AsyncResult(retried).state == "REVOKED"
