"""``toc_otel`` with real workers: traces of tasks, also with Celery's own instrumentation."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from kombu_toc import TimeoutCenter, unpack

from ..meta.test_readme import blocks_of
from ..support import nursery
from ..support.cluster import Cluster
from ..support.http_server import HttpServer
from ..support.nodes import ROOT
from ..support.servers import Server
from ..support.workers import EVENT_LOOP, LOOPS, wait_until

PAGE = "docs/opentelemetry.md"

APP = """
import os

from celery import Celery
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult


class Files(SpanExporter):
    '''A file of each process.'''

    def export(self, spans):
        with open(f"{folder}/spans.{{os.getpid()}}", "a") as file:
            for span in spans:
                file.write(span.to_json(indent=None) + "\\n")
        return SpanExportResult.SUCCESS


provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(Files()))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("shop")

if {instrumented}:
    from opentelemetry.instrumentation.celery import CeleryInstrumentor

    CeleryInstrumentor().instrument()

app = Celery("shop", broker={broker!r})
app.conf.broker_transport_options = {{"toc_otel": {mode!r}}}
app.conf.task_acks_late = {late}


@app.task(name="shop.remind", bind=True, shared=False)
def remind(self, order):
    with tracer.start_as_current_span(f"remind {{order}}") as span:
        span.set_attribute("traceparent", self.request.traceparent)


@app.task(name="shop.again", bind=True, shared=False, max_retries=1)
def again(self):
    if not self.request.retries:
        self.retry(countdown=0.2)
"""

POOLS = {
    "prefork": ("-P", "prefork", "-c", "1"),
    "threads": ("-P", "threads", "-c", "1"),
    "gevent": ("-P", "gevent", "-c", "2"),
    "solo": ("-P", "solo"),
}


class Shop:
    """An app in a folder, its worker, and the spans of all of its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "worker.log"
        self._worker: subprocess.Popen[bytes] | None = None
        self.environment = {**os.environ, **nursery.importing(folder)}

    def start(self, pool: str, *options: str) -> None:
        words = ["-m", "celery", "-A", "traced_shop", "worker", *POOLS[pool], *options]
        with open(self.log, "wb") as out:
            self._worker = nursery.Popen(
                [sys.executable, *words, "-l", "INFO", "--without-mingle", "--without-gossip"],
                cwd=self.folder,
                env=self.environment,
                stdout=out,
                stderr=out,
            )

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.terminate()
            self._worker.wait(60)
            self._worker = None

    def run(self, program: str) -> str:
        """Run a program that has the app; returns what it prints."""
        words = ("-c", "from traced_shop import *\n" + textwrap.dedent(program))
        how: dict[str, Any] = {"cwd": self.folder, "env": self.environment}
        return nursery.done(words, **how).stdout.strip()

    @property
    def spans(self) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for file in self.folder.glob("spans.*")
            for line in file.read_text().splitlines()
            if line.endswith("}")
        ]

    def wait_for(self, *names: str) -> dict[str, dict[str, Any]]:
        """The spans of these names, as soon as there is each; the first of each name."""

        def found() -> dict[str, dict[str, Any]]:
            ordered = sorted(self.spans, key=lambda span: str(span["start_time"]), reverse=True)
            return {span["name"]: span for span in ordered}

        wait_until(
            lambda: found().keys() >= set(names),
            60,
            lambda: f"{sorted(found())}\n{self.log.exists() and self.log.read_text()[-3000:]}",
        )
        return found()


MakeShop = Callable[..., Shop]

INSTRUMENTED = pytest.mark.parametrize(
    "instrumented",
    [
        pytest.param(False, id="alone", marks=pytest.mark.nightly),
        pytest.param(True, id="instrumented"),
    ],
)


@pytest.fixture
def make_shop(server: Server | Cluster, client: redis.Redis, tmp_path: Path) -> Iterator[MakeShop]:
    made = []

    def make(*, instrumented: bool = False, mode: str = "links", late: bool = False) -> Shop:
        text = APP.format(
            folder=tmp_path, broker=server.toc_url, instrumented=instrumented, mode=mode, late=late
        )
        (tmp_path / "traced_shop.py").write_text(text)
        made.append(Shop(tmp_path))
        return made[-1]

    yield make
    for shop in made:
        shop.stop()


def trace_of(span: dict[str, Any]) -> str:
    return str(span["context"]["trace_id"])


def id_of(span: dict[str, Any]) -> str:
    return str(span["context"]["span_id"])


def links_of(span: dict[str, Any]) -> list[str]:
    return [link["context"]["span_id"] for link in span["links"]]


SEND = """
with tracer.start_as_current_span("request"):
    print(remind.apply_async((7,), **{options}).id)
"""


@pytest.mark.parametrize(
    "late",
    [pytest.param(False, id="early", marks=pytest.mark.nightly), pytest.param(True, id="late")],
)
@pytest.mark.parametrize("pool", LOOPS)
def test_a_task_has_two_traces_and_a_link(make_shop: MakeShop, pool: str, late: bool) -> None:
    """Also one that is handed to the pool a few milliseconds ahead of its time."""
    shop = make_shop(late=late)
    shop.start(pool)
    id = shop.run(SEND.format(options={"countdown": 2}))
    spans = shop.wait_for("send celery", "receive celery", "ack celery", "remind 7")
    send, receive, ack = (spans[f"{name} celery"] for name in ("send", "receive", "ack"))
    assert send["parent_id"] == id_of(spans["request"])
    assert receive["parent_id"] is None
    assert trace_of(receive) != trace_of(send)
    assert links_of(receive) == links_of(ack) == [id_of(send)]
    assert ack["parent_id"] == id_of(receive)
    assert receive["attributes"]["messaging.message.id"] == id
    assert receive["attributes"]["celery.task_name"] == "shop.remind"
    assert receive["attributes"]["celery_toc.action_time"][:4].isdigit()
    assert 0 <= receive["attributes"]["celery_toc.lateness"] < 30
    context = spans["remind 7"]["attributes"]["traceparent"]
    assert trace_of(receive)[2:] in context
    assert id_of(receive)[2:] in context


@pytest.mark.parametrize("pool", EVENT_LOOP)
def test_beside_celerys_instrumentation_a_task_goes_on_in_the_trace_that_received_it(
    make_shop: MakeShop, center: TimeoutCenter, pool: str
) -> None:
    """A week later, too: the run of the task is no child of who has sent it."""
    shop = make_shop(instrumented=True)
    id = shop.run(SEND.format(options={"countdown": 7 * 86_400}))
    center.run_now(id)
    shop.start(pool)
    spans = shop.wait_for("receive celery", "run/shop.remind", "ack celery")
    apply, send, receive = (
        spans[name] for name in ("apply_async/shop.remind", "send celery", "receive celery")
    )
    run = spans["run/shop.remind"]
    assert apply["parent_id"] == id_of(spans["request"])
    assert send["parent_id"] == id_of(apply)
    assert links_of(receive) == [id_of(apply)]
    assert run["parent_id"] == id_of(receive)
    assert spans["remind 7"]["parent_id"] == id_of(run)
    assert len({trace_of(one) for one in (apply, send, spans["request"])}) == 1
    assert len({trace_of(one) for one in (receive, run, spans["ack celery"])}) == 1
    assert trace_of(run) != trace_of(apply)


@pytest.mark.nightly(
    guarded_by="tests/e2e/test_opentelemetry.py::"
    "test_beside_celerys_instrumentation_a_task_goes_on_in_the_trace_that_received_it"
)
def test_with_parents_a_task_that_is_due_at_once_stays_in_its_request(make_shop: MakeShop) -> None:
    shop = make_shop(instrumented=True, mode="parents")
    shop.start("prefork")
    shop.run(SEND.format(options={}))
    spans = shop.wait_for("receive celery", "run/shop.remind", "ack celery")
    names = ("request", "send celery", "receive celery", "run/shop.remind", "remind 7")
    assert len({trace_of(spans[name]) for name in names}) == 1
    assert spans["run/shop.remind"]["parent_id"] == id_of(spans["receive celery"])


@INSTRUMENTED
def test_a_retry_links_to_the_try_before(make_shop: MakeShop, instrumented: bool) -> None:
    shop = make_shop(instrumented=instrumented)
    shop.start("prefork")
    shop.run("again.delay()")
    wait_until(lambda: len([s for s in shop.spans if s["name"] == "ack celery"]) >= 2, 60)
    received = sorted(
        (span for span in shop.spans if span["name"] == "receive celery"),
        key=lambda span: str(span["start_time"]),
    )
    by_id = {id_of(span): span for span in shop.spans}
    first, second = received
    [sender] = links_of(second)
    assert trace_of(second) != trace_of(first)
    assert trace_of(by_id[sender]) == trace_of(first)


@INSTRUMENTED
def test_a_task_that_is_sent_over_http_is_sent_in_the_trace_of_its_request(
    make_shop: MakeShop, center: TimeoutCenter, instrumented: bool
) -> None:
    shop = make_shop(instrumented=instrumented)
    command = ("-m", "celery", "-A", "traced_shop", "toc", "web", "--allow", "*")
    with HttpServer("", command=command, environment=shop.environment) as api:
        context = {"traceparent": f"00-{'7' * 32}-{'9' * 16}-01"}
        task = {"task": "shop.remind", "args": [7], "countdown": 600}
        made = api.post("/v1/apps/shop/tasks", task, headers=context)
        assert made.status == 201, made
    spans = shop.wait_for("send celery")
    assert {trace_of(span) for span in shop.spans} == {f"0x{'7' * 32}"}
    first = spans["apply_async/shop.remind" if instrumented else "send celery"]
    assert first["parent_id"] == f"0x{'9' * 16}"
    # Whoever receives it links to that.
    [found] = center.get(made.json["id"])
    carried = unpack(found.body, found.id)["headers"]["traceparent"].split("-")
    assert carried[1] == "7" * 32
    assert carried[2] == (id_of(first)[2:] if instrumented else "9" * 16)


FOLLOWED = """


@app.task
def remind(order):
    follow.delay(order)


@app.task
def follow(order):
    pass
"""


def test_a_process_of_the_pool_counts_what_it_does_itself(
    server: Server | Cluster, client: redis.Redis, tmp_path: Path
) -> None:
    """Each runs one task and is replaced, so that later ones are forked from a main process that
    has counted. What they report together is what has happened."""
    [example] = [one for one in blocks_of(PAGE) if "add_metric_reader" in one]
    out = f'open(f"{tmp_path}/metrics.{{os.getpid()}}", "a")'
    exporter = f"ConsoleMetricExporter({out}, lambda data: data.to_json(indent=None) + '\\n')"
    text = example.replace("ConsoleMetricExporter()", exporter)
    text = text.replace("toc+redis://localhost:6379/0?toc_otel=true", server.toc_url)
    assert exporter in text and server.toc_url in text
    options = "app.conf.broker_transport_options = {'toc_otel': True}"
    (tmp_path / "traced_shop.py").write_text(f"import os\n{text}\n{options}{FOLLOWED}")
    shop = Shop(tmp_path)
    shop.environment["OTEL_METRIC_EXPORT_INTERVAL"] = "100"
    shop.start("prefork", "--max-tasks-per-child", "1")
    try:
        shop.run("for order in range(2): remind.delay(order)")

        def of_process(file: Path, name: str) -> float:
            *_, last = [line for line in file.read_text().splitlines() if line.endswith("}")]
            return sum(
                point["value"]
                for resource in json.loads(last)["resource_metrics"]
                for scope in resource["scope_metrics"]
                for metric in scope["metrics"]
                if metric["name"] == name
                for point in metric["data"]["data_points"]
            )

        def counted() -> dict[str, list[float]]:
            files = [one for one in tmp_path.glob("metrics.*") if "}" in one.read_text()]
            names = ("sent", "consumed")
            found = {
                name: [of_process(one, f"messaging.client.{name}.messages") for one in files]
                for name in names
            }
            return {name: [one for one in each if one] for name, each in found.items()}

        # The last to say something is the process that has run the last task.
        wait_until(
            lambda: sum(counted()["sent"]) >= 4 and sum(counted()["consumed"]) >= 4,
            60,
            lambda: f"{counted()}\n{shop.log.read_text()[-3000:]}",
        )
    finally:
        shop.stop()
    # The program has sent two; each of two processes of the pool has sent one.
    assert sorted(counted()["sent"]) == [1, 1, 2]
    assert counted()["consumed"] == [4]  # by the main process


def test_the_example_of_the_page_runs(
    server: Server | Cluster, client: redis.Redis, tmp_path: Path
) -> None:
    """With the commands that it shows."""
    [example, *_] = blocks_of(PAGE)
    shown = re.findall(r"^celery (-A shop .*)", (ROOT / PAGE).read_text(), re.MULTILINE)
    begin, call = (shlex.split(line.rstrip("& ")) for line in shown)
    url = "toc+embedded://"
    assert url in example
    text = example.replace(url, server.toc_url)
    (tmp_path / "shop.py").write_text(text)
    how: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, **nursery.importing(tmp_path)}}
    log = tmp_path / "worker.log"
    said = log.read_text
    with nursery.running(("-m", "celery", *begin, "--without-mingle"), log, **how):
        sent = nursery.done(("-m", "celery", *call), **how).stdout
        assert '"name": "send celery"' in sent
        assert '"celery_toc.action_time"' in sent
        wait_until(lambda: '"name": "ack celery"' in said() and "remind 7" in said(), 60, said)
        assert '"name": "receive celery"' in said()
        assert '"celery_toc.lateness"' in said()
