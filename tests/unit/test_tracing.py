"""Spans and metrics: how they belong together, and that nobody pays for them who has none."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu import Connection
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes
from opentelemetry.semconv._incubating.metrics import messaging_metrics
from opentelemetry.semconv.attributes import error_attributes, server_attributes
from opentelemetry.trace import SpanKind

from kombu_toc import Channel, ConfigurationError, center_for
from kombu_toc.center.pop import Deliveries
from kombu_toc.center.put import Puts
from kombu_toc.center.traced import TracedDeliveries, TracedPuts
from kombu_toc.client.options import read, read_url
from kombu_toc.errors import KeptError
from kombu_toc.tracing import Reception, Tracing, shown_time, tracing_of
from kombu_toc.transport.traced import TracedChannel, traced

from ..support import nursery
from ..support.cases import each

WEEK = 7 * 86_400 * 1_000_000


class Seen:
    """What the SDK was given."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])

    def tracing(self, mode: str = "links") -> Tracing:
        return Tracing(mode, ("redis", 6379), self.provider, self.meters)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}

    @property
    def tracer(self) -> Any:
        return self.provider.get_tracer("test")

    def measured(self) -> dict[str, Any]:
        """Metric -> its only point."""
        data = self.reader.get_metrics_data()
        assert data is not None
        return {
            metric.name: metric.data.data_points[0]
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@pytest.fixture
def seen() -> Iterator[Seen]:
    made = Seen()
    yield made
    made.provider.shutdown()
    made.meters.shutdown()


def sent(tracing: Tracing, headers: dict[str, Any] | None = None, **how: Any) -> dict[str, Any]:
    """The headers that a message has when it was sent."""
    given = headers or {}
    with tracing.sending("mail", "order-7", given, **how) as (along, _):
        return {**given, **along}


def received(tracing: Tracing, headers: dict[str, Any], **how: Any) -> Reception:
    reception = tracing.receive("mail", "order-7", headers, **how)
    reception.begins(how.get("due_us", 0) + 250_000)
    with reception.current():
        pass
    reception.end()
    return reception


def linked(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


@pytest.mark.versions
def test_who_receives_begins_a_trace_and_links_to_the_sender(seen: Seen) -> None:
    tracing = seen.tracing()
    headers = sent(tracing, due_us=WEEK)
    reception = received(tracing, headers, due_us=WEEK, waited=True)
    tracing.settled("ack", reception.received)
    send, receive, ack = (seen.spans[f"{name} mail"] for name in ("send", "receive", "ack"))
    assert (send.parent, receive.parent) == (None, None)
    assert receive.context.trace_id != send.context.trace_id
    assert linked(receive) == linked(ack) == [send.context.span_id]
    assert ack.parent is not None
    assert ack.parent.span_id == receive.context.span_id
    assert ack.context.trace_id == receive.context.trace_id
    assert (send.kind, receive.kind, ack.kind) == (
        SpanKind.PRODUCER,
        SpanKind.CLIENT,
        SpanKind.CLIENT,
    )


@pytest.mark.versions
def test_who_handles_the_message_goes_on_in_the_trace_that_received_it(seen: Seen) -> None:
    tracing = seen.tracing()
    headers = {**sent(tracing), "tracestate": "vendor=1"}
    received(tracing, headers)
    receive = seen.spans["receive mail"].context
    assert headers["traceparent"].split("-")[1:3] == [
        f"{receive.trace_id:032x}",
        f"{receive.span_id:016x}",
    ]
    assert "tracestate" not in headers, "it belongs to the sender's trace"


def test_what_a_consumer_begins_belongs_to_the_span_that_received_its_message(seen: Seen) -> None:
    reception = seen.tracing().receive("mail", "order-7", {})
    with reception.current(), seen.tracer.start_as_current_span("SELECT"):
        pass
    reception.end()
    assert seen.spans["SELECT"].parent == seen.spans["receive mail"].context


def test_the_context_that_a_message_has_already_stays(seen: Seen) -> None:
    """Of Celery's instrumentation, or of who has sent it over HTTP."""
    theirs = {"traceparent": f"00-{7:032x}-{9:016x}-01"}
    tracing = seen.tracing()
    assert sent(tracing, theirs) == theirs
    send = seen.spans["send mail"]
    assert send.kind == SpanKind.CLIENT
    assert send.parent is not None
    assert (send.context.trace_id, send.parent.span_id) == (7, 9)
    seen.exporter.clear()
    with seen.tracer.start_as_current_span("request"):
        assert sent(tracing, theirs) == theirs
    assert seen.spans["send mail"].parent == seen.spans["request"].context
    assert linked(seen.spans["send mail"]) == [9]


@given(
    st.dictionaries(
        st.sampled_from(["traceparent", "tracestate", "baggage", "task"]),
        st.one_of(
            st.none(),
            st.integers(),
            st.text(),
            st.binary(),
            st.lists(st.text()),
            st.floats(),
            st.just("00-00000000000000000000000000000000-0000000000000000-01"),
        ),
    )
)
def test_headers_may_hold_anything(headers: dict[str, Any]) -> None:
    seen = Seen()
    tracing = seen.tracing()
    reception = received(tracing, sent(tracing, headers), due_us=WEEK)
    tracing.settled("reject", reception.received, "no reason")
    assert len(seen.spans) == 3


def test_the_attributes_are_those_of_the_semantic_conventions(seen: Seen) -> None:
    tracing = seen.tracing()
    headers = sent(tracing, {"task": "shop.remind"}, due_us=WEEK)
    reception = received(tracing, headers, due_us=WEEK, failures=2, waited=True)
    tracing.settled("reject", reception.received, "no such order")
    common = {
        "messaging.system": "celery_toc",
        "messaging.destination.name": "mail",
        "messaging.message.id": "order-7",
        "server.address": "redis",
        "server.port": 6379,
    }

    def attributes(name: str) -> dict[str, Any]:
        return dict(seen.spans[f"{name} mail"].attributes or {})

    assert attributes("send") == {
        **common,
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "celery.task_name": "shop.remind",
        "celery_toc.action_time": "1970-01-08T00:00:00.000000Z",
        "celery_toc.delay": 0.0,
    }
    assert attributes("receive") == {
        **common,
        "messaging.operation.name": "receive",
        "messaging.operation.type": "receive",
        "celery.task_name": "shop.remind",
        "celery_toc.action_time": "1970-01-08T00:00:00.000000Z",
        "celery_toc.delivery": 3,
        "celery_toc.lateness": 0.25,
    }
    assert attributes("reject") == {
        **common,
        "messaging.operation.name": "reject",
        "messaging.operation.type": "settle",
        "celery_toc.reason": "no such order",
    }


def test_every_name_that_looks_like_one_of_the_conventions_is_one(seen: Seen) -> None:
    """Of attributes, kinds of operations and metrics; and none is on its way out."""
    tracing = seen.tracing()
    with tracing.sending("mail", "1", {}, batched=True) as (headers, made):
        pass
    with pytest.raises(OSError), tracing.flushing([made], ["mail"]):
        raise OSError
    with tracing.putting("mail", [], 2, None):
        pass
    reception = received(tracing, sent(tracing, {"task": "t", **headers}), due_us=WEEK)
    tracing.settled("reject", reception.received, "x")
    with tracing.settling("ack", [("mail", "1", {}), ("sms", "2", {})], "") as count:
        count(2)
    said = [dict(span.attributes or {}) for span in seen.exporter.get_finished_spans()]
    own = ("celery_toc.", "celery.")
    names = {name for one in said for name in one if not name.startswith(own)}
    known = {
        value: documentation_of(module, name)
        for module in (messaging_attributes, server_attributes, error_attributes)
        for name, value in vars(module).items()
        if name.isupper()
    }
    assert len(names) >= 8
    for name in names:
        assert name in known
        assert "Deprecated" not in known[name]
    types = {str(one["messaging.operation.type"]) for one in said}
    assert types <= {"create", "send", "receive", "process", "settle"}
    metrics = {name for name in seen.measured() if not name.startswith(own)}
    for name in metrics:
        constant = name.replace(".", "_").upper()
        assert getattr(messaging_metrics, constant) == name
        assert "Deprecated" not in documentation_of(messaging_metrics, constant)


def documentation_of(module: Any, name: str) -> str:
    """The text behind a constant of a module."""
    found = re.search(rf'^{name}: .*\n"""((?:.|\n)*?)"""', inspect.getsource(module), re.MULTILINE)
    return found[1] if found else ""


def test_what_is_measured_has_few_attributes(seen: Seen) -> None:
    """An id or a time among them would make a series of each message."""
    tracing = seen.tracing()
    reception = received(tracing, sent(tracing, {"task": "t"}), due_us=WEEK)
    tracing.settled("ack", reception.received)
    measured = seen.measured()
    assert {name: getattr(point, "value", None) for name, point in measured.items()} == {
        "messaging.client.sent.messages": 1,
        "messaging.client.consumed.messages": 1,
        "celery_toc.settled.messages": 1,
        "messaging.client.operation.duration": None,
        "celery_toc.lateness": None,
    }
    assert measured["celery_toc.lateness"].sum == 0.25
    few = {
        "messaging.system",
        "messaging.destination.name",
        "messaging.operation.name",
        "messaging.operation.type",
        "server.address",
        "server.port",
    }
    assert {name for point in measured.values() for name in point.attributes} == few


def test_an_error_is_in_its_span_and_raised(seen: Seen) -> None:
    tracing = seen.tracing()
    with pytest.raises(OSError), tracing.sending("mail", "1", {}):
        raise OSError("gone")
    reception = tracing.receive("mail", "1", {})
    with pytest.raises(KeyError), reception.current():
        raise KeyError("x")
    reception.end()
    for name, error in (("send mail", "OSError"), ("receive mail", "KeyError")):
        span = seen.spans[name]
        assert (span.attributes or {})["error.type"] == error
        assert span.status.status_code.name == "ERROR"
    measured = seen.measured()
    for name in ("sent.messages", "operation.duration"):
        assert measured[f"messaging.client.{name}"].attributes["error.type"] == "OSError"


def test_what_a_unique_key_keeps_from_being_sent_is_not_counted(seen: Seen) -> None:
    tracing = seen.tracing()
    with pytest.raises(KeptError), tracing.sending("mail", "2", {}):
        raise KeptError("1")
    assert (seen.spans["send mail"].attributes or {})["celery_toc.kept"] == "1"
    assert "messaging.client.sent.messages" not in seen.measured()


@pytest.mark.versions
def test_a_batch_links_to_each_of_its_messages_as_far_as_a_span_has_room(seen: Seen) -> None:
    tracing = seen.tracing()
    contexts = []
    for number in range(300):
        with tracing.sending("mail", str(number), {}, batched=True) as (_, context):
            contexts.append(context)
    with tracing.flushing(contexts, ["mail"] * 300):
        pass
    span = seen.spans["send mail"]
    assert (span.attributes or {})["messaging.batch.message_count"] == 300
    assert linked(span) == [one.span_id for one in contexts[:128]]
    assert seen.measured()["messaging.client.sent.messages"].value == 300


@each(
    ("us", "text"),
    [
        (0, "1970-01-01T00:00:00.000000Z"),
        (1_767_225_600_123_456, "2026-01-01T00:00:00.123456Z"),
        (9_000_000_000_000_000, "2255-03-14T16:00:00.000000Z"),
    ],
)
def test_a_time_is_shown_to_the_microsecond(us: int, text: str) -> None:
    assert shown_time(us) == text


# -- without it


@pytest.mark.versions
def test_a_channel_without_the_option_has_the_classes_and_methods_that_it_ever_had() -> None:
    """So there is nothing in the way of a message: neither a layer nor a question."""
    transport = Connection("toc+embedded://").transport
    assert transport.Channel is Channel
    both = Connection("toc+embedded://?toc_otel=true").transport
    assert issubclass(both.Channel, TracedChannel)
    assert both.Channel is traced(Channel)
    own = {"basic_publish", "basic_ack", "basic_reject", "capacity"}
    assert all(getattr(both.Channel, name) is getattr(Channel, name) for name in own)


def test_a_center_without_the_option_has_its_parts_alone() -> None:
    plain = center_for("toc+redis://localhost:1/0")
    assert (type(plain.puts), type(plain.deliveries)) == (Puts, Deliveries)
    both = center_for("toc+redis://localhost:1/0", toc_otel=True)
    assert (type(both.puts), type(both.deliveries)) == (TracedPuts, TracedDeliveries)
    both.deliveries.sleep = sleep = object()
    assert both.deliveries._part.sleep is sleep, "what is set there is the part's"


def test_a_part_that_is_traced_has_the_methods_of_the_part() -> None:
    """With their first arguments: the others are handed on."""
    for plain, own in ((Puts, TracedPuts), (Deliveries, TracedDeliveries)):
        for name, method in vars(own).items():
            if not name.startswith("_"):
                wanted = list(inspect.signature(getattr(plain, name)).parameters)
                given = [one for one in inspect.signature(method).parameters if one != "how"]
                assert [one for one in wanted if one in given] == given, name


def test_nothing_that_traces_is_imported_without_the_option() -> None:
    program = """
import sys
from kombu import Connection
import celery_toc

with Connection("toc+embedded://") as connection:
    connection.SimpleQueue("mail").put("x")
    connection.SimpleQueue("mail").get(timeout=5).ack()
# (redis-py looks for OpenTelemetry by itself.)
assert not {"kombu_toc.transport.traced", "kombu_toc.tracing"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_without_opentelemetry_all_works_but_the_option_which_says_what_to_install() -> None:
    program = """
import asyncio, os, sys
sys.modules["opentelemetry"] = None
import celery_toc, celery_toc.aio, celery_toc.web, kombu_toc.notify
from celery import Celery
from kombu import Connection
from kombu_toc import AsyncTimeoutCenter, center_for
from kombu_toc.http import api_for

with Celery("shop", broker="toc+embedded://") as app:
    queue = f"absent-{os.getpid()}"  # others may use the same server
    app.send_task("shop.remind", countdown=600, queue=queue)
    center = center_for("toc+embedded://")
    center.put_many(queue, [("one", b"x")])
    assert center.ack(center.pop(queue).messages) == 1

    async def main():
        async with AsyncTimeoutCenter.from_url("toc+embedded://") as center:
            await center.put(queue, "two", b"x")
        await api_for("toc+embedded://").aclose()

    asyncio.run(main())
    center.queues.delete(queue)
mine = {name for name in sys.modules if name.endswith((".tracing", ".traced"))}
assert not {name for name in mine if name.startswith(("kombu_toc", "celery_toc"))}, mine
Connection("toc+embedded://?toc_otel=true").transport
"""
    said = nursery.done(("-c", program), code=1, execute=True).stderr
    assert "toc_otel needs the package opentelemetry-api: pip install 'celery-toc[otel]'" in said


@each(
    ("value", "mode"),
    [
        (True, "links"),
        ("true", "links"),
        ("1", "links"),
        ("links", "links"),
        ("parents", "parents"),
        (False, ""),
        ("no", ""),
    ],
)
def test_the_option_says_how_traces_belong_together(value: Any, mode: str) -> None:
    assert read({}, {"toc_otel": value}).toc_otel == mode
    assert read({"toc_otel": str(value)}, {}).toc_otel == mode


def test_an_option_that_makes_no_sense_is_named() -> None:
    with pytest.raises(ConfigurationError, match="toc_otel must be true, false, 'links' or"):
        read({"toc_otel": "children"}, {})


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("toc+redis://h:7000/1", ("h", 7000)),
        ("toc+cluster://a:7001,b:7002", ("a", 7001)),
        ("toc+unix:///run/redis.sock", ("/run/redis.sock", None)),
    ],
)
def test_the_server_is_named(url: str, server: tuple[str, int | None], seen: Seen) -> None:
    tracing = tracing_of(read({}, {"toc_otel": True}), read_url(url))
    common = tracing._common
    assert (common.get("server.address"), common.get("server.port")) == server


def test_without_an_sdk_nothing_is_changed() -> None:
    """Its API makes spans that do nothing, in processes that have set up no provider."""
    tracing = Tracing("links", tracer_provider=trace.NoOpTracerProvider())
    headers = sent(tracing, {"x": 1})
    assert headers == {"x": 1}
    received(tracing, headers)
    assert headers == {"x": 1}
