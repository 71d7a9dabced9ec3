"""docs/monitoring.md with Sentry's own SDK, and a server in Sentry's place."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kombu_toc import TimeoutCenter

from ..meta.test_readme import named
from ..support import nursery
from ..support.servers import Server
from ..support.workers import ALONE, wait_until

pytestmark = [pytest.mark.versions, pytest.mark.one_server("the page names one server")]

Items = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def sentry() -> Iterator[tuple[int, Items]]:
    """A port, and what was sent there: its type, and what it says."""
    items: Items = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers["content-encoding"] == "gzip":
                body = gzip.decompress(body)
            _, *lines = body.splitlines()
            for head, said in zip(lines[::2], lines[1::2], strict=False):
                items.append((json.loads(head)["type"], json.loads(said)))
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *said: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port, items
        server.shutdown()
        thread.join()


def test_sentry_has_what_failed_in_the_trace_of_its_sender(
    server: Server, toc: TimeoutCenter, sentry: tuple[int, Items], tmp_path: Path
) -> None:
    port, items = sentry
    shop = named("docs/monitoring.md", "sentry_sdk.init(")
    shop = shop.replace("https://KEY@sentry.example.com", f"http://key@127.0.0.1:{port}")
    shop = shop.replace("toc+redis://localhost:6379/0", server.toc_url)
    shop = shop.replace("traces_sample_rate=0.1", "traces_sample_rate=1.0")
    (tmp_path / "shop.py").write_text(shop)
    environment = {**os.environ, **nursery.importing(tmp_path)}
    how: dict[str, Any] = {"cwd": tmp_path, "env": environment}
    send = (
        "import sentry_sdk, shop\n"
        "with sentry_sdk.start_transaction(name='order'):\n"
        "    print(shop.charge.apply_async((7,), countdown=2).id)\n"
        "sentry_sdk.flush()"
    )

    def said(kind: str, of: str) -> list[dict[str, Any]]:
        return [one for type, one in list(items) if type == kind and of in json.dumps(one)]

    words = ("-m", "celery", "-A", "shop", "worker", "-c", "1", *ALONE)
    with nursery.running(words, tmp_path / "worker.log", **how):
        id = nursery.done(("-c", send), **how).stdout.strip()
        wait_until(lambda: said("event", id) and said("transaction", id), 60, lambda: items)
        wait_until(lambda: toc.failures.get(id), 20)
    [event] = said("event", id)
    [exception] = event["exception"]["values"]
    assert (exception["type"], exception["value"]) == ("ValueError", "order 7 has no card")
    assert event["tags"]["celery_task_id"] == id
    assert event["extra"]["celery-job"]["task_name"] == "shop.charge"
    [sent], [ran] = said("transaction", '"order"'), said("transaction", "queue.task.celery")
    traces = {one["contexts"]["trace"]["trace_id"] for one in (sent, ran, event)}
    assert len(traces) == 1
    latencies = [one["data"].get("messaging.message.receive.latency", 0) for one in ran["spans"]]
    assert max(latencies) >= 2000  # milliseconds: the countdown is in it
    assert {one["status"] for one in said("check_in", "charge")} == {"in_progress", "error"}
