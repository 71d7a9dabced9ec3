"""``toc_otel`` on a real server: what is sent, received and settled has spans that belong
together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from celery import Celery
from kombu import Connection, Consumer, Exchange, Message, Producer, Queue
from opentelemetry import propagate, trace

from celery_toc import aio, unique
from kombu_toc import (
    WAITING,
    ActionTimeError,
    AsyncTimeoutCenter,
    NewMessage,
    ReceiptError,
    TimeoutCenter,
    center_for,
    pack,
    unpack,
)
from kombu_toc.tracing import shown_time

from ..meta.test_readme import named
from ..support.cluster import Cluster
from ..support.http_server import HttpServer
from ..support.library import close_libraries
from ..support.servers import Server
from ..support.telemetry import Spans, attributes, linked, spans_of_this_process

Connect = Callable[..., Connection]

TRACER = trace.get_tracer("test")


@pytest.fixture
def spans() -> Spans:
    made = spans_of_this_process()
    made.clear()
    return made


@pytest.fixture
def connection(connect: Connect) -> Connection:
    return connect(toc_otel=True)


@pytest.fixture
def recording(connect: Connect, tmp_path: Path) -> Iterator[Connection]:
    """A connection whose tasks are recorded in a library as well."""
    yield connect(toc_otel=True, toc_library=f"sqlite:///{tmp_path / 'library.db'}")
    close_libraries()


@pytest.fixture
def traced_app(app: Celery) -> Celery:
    app.conf.broker_transport_options = {"toc_otel": True}
    return app


def publish(connection: Connection, body: Any = "x", queue: str = "mail", **options: Any) -> None:
    with Producer(connection.default_channel) as producer:
        producer.publish(body, routing_key=queue, declare=[Queue(queue)], **options)


def in_a_week() -> str:
    return (datetime.now(timezone.utc) + timedelta(days=7)).isoformat()


def take(connection: Connection, settle: Callable[[Message], Any], queue: str = "mail") -> Message:
    """Consume one message."""
    got: list[Message] = []

    def on_message(message: Message) -> None:
        got.append(message)
        settle(message)

    with Consumer(connection, [Queue(queue)], on_message=on_message):
        connection.drain_events(timeout=10)
    connection.default_channel.poller.flush()
    return got[0]


def test_a_task_for_next_week_makes_no_trace_that_lasts_a_week(
    connection: Connection, center: TimeoutCenter, spans: Spans
) -> None:
    with TRACER.start_as_current_span("request"):
        publish(connection, headers={"id": "order-7", "eta": in_a_week()})
    send = spans.one("send mail")
    assert send.parent == spans.one("request").context
    assert attributes(send)["celery_toc.delay"] == pytest.approx(7 * 86_400, abs=60)
    center.run_now("order-7")  # it is next week
    message = take(connection, Message.ack)
    receive, ack = spans.one("receive mail"), spans.one("ack mail")
    assert receive.parent is None
    assert receive.context.trace_id != send.context.trace_id
    assert linked(receive) == linked(ack) == [send.context.span_id]
    assert ack.parent == receive.context
    assert f"{receive.context.span_id:016x}" in message.headers["traceparent"]
    assert attributes(receive)["messaging.message.id"] == "order-7"
    assert 0 <= attributes(receive)["celery_toc.lateness"] < 60


def test_with_parents_what_was_due_at_once_goes_on_in_its_senders_trace(
    connect: Connect, center: TimeoutCenter, spans: Spans
) -> None:
    connection = connect(toc_otel="parents")
    publish(connection)
    take(connection, Message.ack)
    publish(connection, headers={"id": "later", "eta": in_a_week()}, queue="sms")
    center.run_now("later")
    take(connection, Message.ack, "sms")
    parent = spans.one("receive mail").parent
    assert parent is not None
    assert parent.span_id == spans.one("send mail").context.span_id
    assert spans.one("receive sms").parent is None
    assert linked(spans.one("receive sms")) == [spans.one("send sms").context.span_id]


def test_what_fails_and_comes_back_has_a_span_for_each_delivery(
    connection: Connection, spans: Spans
) -> None:
    publish(connection)
    take(connection, lambda message: message.requeue_lost())
    take(connection, lambda message: message.reject())
    first, second = spans.named("receive mail")
    assert attributes(first)["celery_toc.delivery"] == 1
    assert attributes(second)["celery_toc.delivery"] == 2
    assert "celery_toc.lateness" not in attributes(second), "it has no action time any more"
    assert spans.one("requeue mail").parent == first.context
    assert spans.one("reject mail").parent == second.context
    assert linked(first) == linked(second) == [spans.one("send mail").context.span_id]


def test_what_fails_after_it_was_acknowledged_has_a_span_of_that_too(
    connection: Connection, center: TimeoutCenter, spans: Spans
) -> None:
    publish(connection)
    message = take(connection, Message.ack)
    message.bury("it raised KeyError", "a traceback")
    connection.default_channel.poller.flush()
    bury = spans.one("bury mail")
    assert bury.parent == spans.one("receive mail").context == spans.one("ack mail").parent
    assert attributes(bury)["celery_toc.reason"] == "it raised KeyError"
    assert center.counts("mail").dead == 1


@pytest.mark.parametrize("taken_back", [False, True], ids=["left", "taken back"])
def test_what_nobody_has_handled_is_released_once(
    connection: Connection, spans: Spans, taken_back: bool
) -> None:
    """Taken back: as a worker does with what it cannot start in time."""
    publish(connection)
    message = take(connection, lambda message: None)
    if taken_back:
        connection.default_channel.qos.release(message)
    connection.release()
    assert spans.one("release mail").parent == spans.one("receive mail").context
    assert spans.names == ["receive mail", "release mail", "send mail"]


def test_what_is_taken_back_from_a_consumer_is_released_once(
    connection: Connection, spans: Spans
) -> None:
    """As a worker does with what it cannot start in time."""
    publish(connection)
    message = take(connection, lambda message: None)
    connection.default_channel.qos.release(message)
    assert len(spans.named("release mail")) == 1


def test_who_gets_a_message_within_a_span_has_it_there(
    connection: Connection, spans: Spans
) -> None:
    publish(connection)
    with TRACER.start_as_current_span("look"):
        message = connection.default_channel.basic_get("mail")
        message.ack()
    assert spans.one("receive mail").parent == spans.one("look").context
    assert spans.one("ack mail").parent == spans.one("receive mail").context


@pytest.mark.cluster
def test_a_publish_that_is_repeated_stays_one_message_of_one_trace(
    connection: Connection, center: TimeoutCenter, spans: Spans
) -> None:
    """As Kombu does when a reply is lost."""
    channel = connection.default_channel
    Queue("mail").bind(channel).declare()
    message = channel.prepare_message("x", headers={"id": "one"}, properties={})
    channel.basic_publish(message, "", "mail")
    channel.basic_publish(message, "", "mail")
    [found] = center.get("one")
    first, again = spans.named("send mail")
    context = unpack(found.body, "one")["headers"]["traceparent"]
    assert f"{first.context.span_id:016x}" in context
    assert again.context.trace_id == first.context.trace_id
    assert message["headers"] == {"id": "one"}, "they are the caller's"


@pytest.mark.cluster
def test_each_queue_that_an_exchange_leads_to_has_a_span(
    connection: Connection, spans: Spans
) -> None:
    orders = Exchange("orders", type="topic")
    queues = [Queue("mail", orders, "paid.*"), Queue("sms", orders, "paid.#")]
    with Producer(connection.default_channel) as producer:
        producer.publish("x", exchange=orders, routing_key="paid.7", declare=queues)
    for queue in ("mail", "sms"):
        take(connection, Message.ack, queue)
        receive, send = spans.one(f"receive {queue}"), spans.one(f"send {queue}")
        assert linked(receive) == [send.context.span_id]


@pytest.mark.cluster
def test_a_batch_has_a_span_that_links_to_each_of_its_messages(
    connection: Connection, spans: Spans
) -> None:
    channel = connection.default_channel
    Queue("mail").bind(channel).declare()
    batch = channel.create_publish_batch(10)
    for number in range(3):
        message = channel.prepare_message(str(number), properties={})
        batch.publish(message, exchange="", routing_key="mail")
    assert spans.names == ["create mail"] * 3
    batch.flush()
    batch.close()
    created = [span.context.span_id for span in spans.named("create mail")]
    assert linked(spans.one("send mail")) == created
    take(connection, Message.ack)
    assert linked(spans.one("receive mail"))[0] in created


def test_what_goes_away_by_itself_has_no_spans(connection: Connection, spans: Spans) -> None:
    """Replies, events and broadcasts would be most of all spans."""
    replies = Queue("replies", exclusive=True, auto_delete=True)
    fans = Queue("", Exchange("news", type="fanout"), exclusive=True, auto_delete=True)
    got: list[Any] = []
    with Consumer(connection, [replies, fans], callbacks=[lambda body, _: got.append(body)]):
        with Producer(connection.default_channel) as producer:
            producer.publish("reply", routing_key="replies")
            producer.publish("news", exchange="news")
        while len(got) < 2:
            connection.drain_events(timeout=10)
    assert spans.names == []


def test_a_publish_that_fails_says_why(connection: Connection, spans: Spans) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        publish(connection, headers={"id": "one", "eta": "soon"})
    send = spans.one("send mail")
    assert attributes(send)["error.type"] == "ActionTimeError"
    assert send.status.status_code.name == "ERROR"


def test_what_is_recorded_is_traced_as_well(recording: Connection, spans: Spans) -> None:
    publish(recording, headers={"id": "order-7", "task": "shop.remind"})
    take(recording, Message.ack)
    assert spans.names == ["ack mail", "receive mail", "send mail"]
    recording.default_channel.recorder.flush()
    [record] = recording.transport.center.library.history("order-7")
    assert record.status == "done"


def test_while_redis_is_away_nobody_asks_it_what_a_queue_is(
    recording: Connection, spans: Spans
) -> None:
    channel = recording.default_channel
    with (
        mock.patch.object(channel.recorder, "away_until", time.monotonic() + 60),
        mock.patch.object(channel.publisher, "_topic_of", side_effect=AssertionError("asked")),
    ):
        message = channel.prepare_message("x", headers={"id": "order-9"}, properties={})
        channel.basic_publish(message, "", "mail")
    assert attributes(spans.one("send mail"))["messaging.message.id"] == "order-9"
    [row] = channel.recorder.store.of_ids(["order-9"])
    context = unpack(row.body, "order-9")["headers"]["traceparent"]
    assert f"{spans.one('send mail').context.span_id:016x}" in context


def test_a_task_that_is_sent_from_an_event_loop_belongs_to_its_request(
    center: TimeoutCenter, traced_app: Celery, spans: Spans
) -> None:
    remind = traced_app.tasks["shop.remind"]

    async def handle(order: int) -> str:
        with TRACER.start_as_current_span(f"request {order}"):
            result = await aio.send(remind.s(order), countdown=600)
        return str(result.id)

    async def main() -> list[str]:
        try:
            return await asyncio.gather(*map(handle, range(20)))
        finally:
            await aio.aclose(traced_app)

    ids = asyncio.run(main())
    sent = {attributes(span)["messaging.message.id"]: span for span in spans.named("send celery")}
    for order, id in enumerate(ids):
        assert sent[id].parent == spans.one(f"request {order}").context
        [found] = center.get(id)
        context = unpack(found.body, id)["headers"]["traceparent"]
        assert f"{sent[id].context.span_id:016x}" in context


def test_a_task_that_is_not_sent_because_of_its_unique_key_is_no_error(
    traced_app: Celery, spans: Spans
) -> None:
    how = {"countdown": 60, **unique("invoice-42")}
    first, second = (traced_app.tasks["shop.remind"].apply_async(**how) for _ in range(2))
    assert second.id == first.id
    kept, sent = sorted(spans.named("send celery"), key=lambda one: len(attributes(one)))[::-1]
    assert attributes(kept)["celery_toc.kept"] == first.id
    assert "celery_toc.kept" not in attributes(sent)
    assert [one.status.status_code.name for one in (kept, sent)] == ["UNSET", "UNSET"]


def test_the_counters_agree_with_what_was_done(connection: Connection, spans: Spans) -> None:
    where = {"messaging__destination__name": "counted"}
    for _ in range(5):
        publish(connection, queue="counted")
    for _ in range(5):
        take(connection, Message.ack, "counted")
    assert spans.total("messaging.client.sent.messages", **where) == 5
    assert spans.total("messaging.client.operation.duration", **where) == 5
    assert spans.total("messaging.client.consumed.messages", **where) == 5
    assert spans.total("celery_toc.lateness", **where) == 5
    acked = {**where, "messaging__operation__name": "ack"}
    assert spans.total("celery_toc.settled.messages", **acked) == 5


def test_without_the_option_a_message_is_what_it_ever_was(
    connect: Connect, center: TimeoutCenter, spans: Spans
) -> None:
    connection = connect()
    with TRACER.start_as_current_span("request"):
        publish(connection, headers={"id": "one"})
    [found] = center.get("one")
    assert unpack(found.body, "one")["headers"] == {"id": "one"}
    take(connection, Message.ack)
    assert spans.names == ["request"]


# -- without Celery


@pytest.fixture
def traced(server: Server | Cluster, center: TimeoutCenter) -> Iterator[TimeoutCenter]:
    made = center_for(server.toc_url, toc_otel=True)
    made.leases.grace = 0
    with contextlib.closing(made.client):
        yield made


def enveloped() -> bytes:
    """A message with the context of a trace: the current one."""
    headers: dict[str, str] = {}
    propagate.inject(headers)
    parts = {"content-type": "text/plain", "content-encoding": "utf-8", "body": b"remind"}
    return pack({"headers": headers, "properties": {}, **parts}, deflate=False)


@pytest.mark.cluster
def test_a_center_links_a_pop_to_who_has_put_what_it_brings(
    traced: TimeoutCenter, spans: Spans
) -> None:
    with TRACER.start_as_current_span("request") as request:
        traced.put("mail", "one", enveloped(), delay=0)
    traced.put("mail", "two", b"bytes")
    with TRACER.start_as_current_span("look"):
        popped = traced.pop("mail", 10)
        traced.ack(popped.messages)
    put, _ = spans.named("send mail")
    assert put.parent == request.get_span_context()
    receive, ack = spans.one("receive mail"), spans.one("ack mail")
    assert receive.parent == ack.parent == spans.one("look").context
    assert linked(receive) == linked(ack) == [request.get_span_context().span_id]
    assert attributes(receive)["messaging.batch.message_count"] == 2
    assert attributes(receive)["celery_toc.lateness"] >= 0
    assert traced.counts("mail").in_flight == 0


def of_request(name: str) -> bytes:
    """A message that a request of this name has made."""
    with TRACER.start_as_current_span(name):
        return enveloped()


@pytest.mark.cluster
def test_many_messages_of_one_request_are_put_in_its_trace(
    traced: TimeoutCenter, spans: Spans
) -> None:
    """As the HTTP API puts those of a request."""
    body = of_request("request")
    traced.put_many("mail", [("one", body), NewMessage("two", body), {"id": "three", "body": body}])
    request = spans.one("request").context.span_id
    parent = spans.one("send mail").parent
    assert parent is not None
    assert parent.span_id == request
    assert linked(spans.one("send mail")) == []
    traced.pop("mail", 10)
    assert linked(spans.one("receive mail")) == [request]


def test_many_messages_of_several_requests_are_linked(traced: TimeoutCenter, spans: Spans) -> None:
    messages = [(name, of_request(name)) for name in ("one", "two")]
    traced.put_many("mail", [*messages, ("three", b"bytes")])
    send = spans.one("send mail")
    assert send.parent is None
    assert linked(send) == [spans.one(name).context.span_id for name in ("one", "two")]
    spans.clear()
    with TRACER.start_as_current_span("now"):
        traced.put_many("sms", [("four", enveloped()), *messages])
    assert spans.one("send sms").parent == spans.one("now").context
    assert linked(spans.one("send sms")) == linked(send)


def test_several_messages_have_the_time_of_the_first(traced: TimeoutCenter, spans: Spans) -> None:
    soon = time.time() + 60
    traced.put_many("mail", [("one", b"x", soon + 1), {"id": "two", "body": b"x", "at": soon}])
    time_of_first = shown_time(round(soon * 1e6))
    assert attributes(spans.one("send mail"))["celery_toc.action_time"] == time_of_first
    traced.put_many("sms", [("one", b"x", soon), ("two", b"x")])  # one is due at once
    assert "celery_toc.action_time" not in attributes(spans.one("send sms"))
    traced.run_now(["one", "two"], topic="mail")
    popped = traced.pop("mail", 10).messages
    first = shown_time(min(one.action_us for one in popped))
    assert attributes(spans.one("receive mail"))["celery_toc.action_time"] == first


def test_what_is_not_settled_is_not_counted(traced: TimeoutCenter, spans: Spans) -> None:
    where = {"messaging__destination__name": "stale"}
    traced.put("stale", "one", b"x")
    popped = traced.pop("stale").messages
    assert [traced.ack(popped), traced.ack(popped), traced.release(popped)] == [1, 0, 0]
    assert traced.reject(popped[0], requeue=False) is None
    assert spans.total("celery_toc.settled.messages", **where) == 1


def test_a_time_may_be_any_number(traced: TimeoutCenter, spans: Spans) -> None:
    traced.put("mail", "one", b"x", delay=Decimal("60"))
    assert attributes(spans.one("send mail"))["celery_toc.delay"] == pytest.approx(60, abs=1)
    [found] = traced.get("one")
    assert found.time_us > time.time_ns() // 1000 + 30_000_000


def test_a_message_alone_is_named(traced: TimeoutCenter, spans: Spans) -> None:
    traced.put("mail", "one", b"x")
    [message] = traced.pop("mail").messages
    assert traced.reject(message, requeue=True) == WAITING
    [message] = traced.pop("mail").messages
    traced.reject(message.receipt, requeue=False, reason="no such order")
    assert traced.bury(message, reason="again") == "one"
    first, second = spans.named("receive mail")
    assert attributes(first)["messaging.message.id"] == "one"
    assert attributes(first)["celery_toc.delivery"] == 1
    assert attributes(second)["celery_toc.delivery"] == 2
    assert attributes(spans.one("requeue mail"))["messaging.message.id"] == "one"
    assert attributes(spans.one("bury mail"))["celery_toc.reason"] == "again"
    reject = attributes(spans.one("reject mail"))
    assert (reject["messaging.message.id"], reject["celery_toc.reason"]) == ("one", "no such order")


def test_what_finds_or_settles_nothing_has_no_span(traced: TimeoutCenter, spans: Spans) -> None:
    assert (traced.ack([]), traced.release([]), traced.put_many("mail", [])) == (0, 0, [])
    traced.pop("mail")
    traced.pop(["mail", "sms"], wait=0.01)
    assert spans.names == []


def test_the_time_for_which_a_pop_waits_is_not_in_its_span(
    traced: TimeoutCenter, spans: Spans
) -> None:
    traced.put("mail", "one", b"x", delay=1)
    traced.pop("mail", wait=10)
    receive = spans.one("receive mail")
    assert receive.end_time - receive.start_time < 500_000_000


def test_a_loop_over_messages_is_traced_and_each_is_settled_once(
    traced: TimeoutCenter, spans: Spans
) -> None:
    with traced.consume("mail") as messages:
        results = traced.put_many("mail", [(str(number), b"x") for number in range(3)])
        assert [one.added for one in results] == [True] * 3
        for number, _ in enumerate(messages, 1):
            if number == 3:
                break
    assert attributes(spans.one("send mail"))["messaging.batch.message_count"] == 3
    received = [attributes(span) for span in spans.named("receive mail")]
    assert sum(one.get("messaging.batch.message_count", 1) for one in received) == 3
    assert spans.names.count("ack mail") == 2
    assert spans.names.count("release mail") == 1, "of the one at which the loop was left"


def test_what_is_refused_has_a_span_with_the_error(traced: TimeoutCenter, spans: Spans) -> None:
    with pytest.raises(ReceiptError):
        traced.ack("toc1.nonsense")
    assert attributes(spans.one("ack"))["error.type"] == "ReceiptError"
    with pytest.raises(ActionTimeError):
        traced.put("mail", "one", b"x", at=1e12)
    assert attributes(spans.one("send mail"))["error.type"] == "ActionTimeError"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"h":',
        b'{"h":[]}\n',
        b"\x01\xff",
        b"\x02",
        b'{"specversion":"1.0"',
        b"[" * 9999,
    ],
    ids=["empty", "brace", "cut", "list", "deflated", "id", "event", "deep"],
)
def test_bytes_of_any_kind_go_through(traced: TimeoutCenter, spans: Spans, body: bytes) -> None:
    traced.put("mail", "one", body)
    [message] = traced.pop("mail").messages
    assert message.body == body
    assert traced.ack(message) == 1
    assert spans.names == ["ack mail", "receive mail", "send mail"]


@pytest.mark.cluster
async def test_tasks_of_a_loop_have_their_own_traces(
    server: Server | Cluster, center: TimeoutCenter, spans: Spans
) -> None:
    async def handle(center: AsyncTimeoutCenter, number: int) -> None:
        with TRACER.start_as_current_span(f"request {number}"):
            await center.put("mail", str(number), b"x")

    async with AsyncTimeoutCenter.from_url(server.toc_url, toc_otel=True) as traced:
        await asyncio.gather(*(handle(traced, number) for number in range(20)))
    for span in spans.named("send mail"):
        number = attributes(span)["messaging.message.id"]
        assert span.parent == spans.one(f"request {number}").context
    assert len(spans.named("send mail")) == 20


HTTP = """
import os
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

out = open(os.environ["SPANS"], "a", buffering=1)
exporter = ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(indent=None) + "\\n")
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)

from kombu_toc.http.__main__ import main

raise SystemExit(main())
"""


def test_a_request_over_http_goes_on_in_the_trace_that_it_names(
    server: Server | Cluster, center: TimeoutCenter, tmp_path: Path
) -> None:
    file = tmp_path / "spans"
    context = f"00-{'7' * 32}-{'9' * 16}-01"
    parted = "&" if "?" in server.toc_url else "?"
    there, url = {"SPANS": str(file)}, f"{server.toc_url}{parted}toc_otel=true"
    with HttpServer(url, command=("-c", HTTP), environment=there) as api:
        put = {"id": "one", "text": "x"}
        api.post("/v1/queues/mail/tasks", put, headers={"traceparent": context})
        [leased] = api.post("/v1/queues/mail:lease", {"wait": 10}).json["tasks"]
        assert leased["headers"]["traceparent"] == context
        api.post("/v1/queues/mail:ack", {"receipts": [leased["receipt"]]})
        many = {"tasks": [{"text": "x"}, {"text": "y", "delay": 3600}]}
        api.post("/v1/queues/sms/tasks:batch", many, headers={"traceparent": context})
    found = {one["name"]: one for one in map(json.loads, file.read_text().splitlines())}
    assert set(found) == {"send mail", "receive mail", "ack mail", "send sms"}
    assert found["send mail"]["context"]["trace_id"] == f"0x{'7' * 32}"
    for name in ("send mail", "send sms"):
        assert found[name]["parent_id"] == f"0x{'9' * 16}"
    assert found["send sms"]["attributes"]["messaging.batch.message_count"] == 2
    receive = found["receive mail"]
    assert receive["parent_id"] is None
    assert [link["context"]["span_id"] for link in receive["links"]] == [f"0x{'9' * 16}"]
    assert found["ack mail"]["attributes"]["messaging.message.id"] == "one"


def test_the_example_of_a_center_runs(
    server: Server | Cluster, center: TimeoutCenter, spans: Spans
) -> None:
    text = named("docs/opentelemetry.md", "center_for(")
    text = text.replace("toc+redis://localhost:6379/0", server.toc_url)
    with TRACER.start_as_current_span("request"):
        exec(text, {})
    center.run_now("order-7")
    [message] = center.pop("mail").messages
    headers = unpack(message.body, "order-7")["headers"]
    assert f"{spans.one('request').context.span_id:016x}" in headers["traceparent"]
