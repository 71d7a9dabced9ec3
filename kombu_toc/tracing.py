"""Spans and metrics of OpenTelemetry: messages that are sent, received and settled.

It is loaded only where ``toc_otel`` is set, and needs opentelemetry-api. What is exported, where to
and how much of it is up to the SDK that the program has set up. docs/opentelemetry.md lists spans,
attributes and metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any, NamedTuple

from .client.options import PARENTS, Address, Settings
from .errors import ConfigurationError, KeptError
from .model.results import Delivery
from .version import __version__

try:
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode
except ImportError as exc:
    raise ConfigurationError(
        "toc_otel needs the package opentelemetry-api: pip install 'celery-toc[otel]'"
    ) from exc

#: What the semantic conventions call ``messaging.system``.
SYSTEM = "celery_toc"

#: Whose spans and metrics these are.
SCOPE = "celery-toc"

#: Links that a span has, at most: the SDK drops more, the first ones first.
MAX_LINKS = 128

#: Bounds of the histograms, in seconds.
_OPERATION_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LATENESS_BOUNDS = (*_OPERATION_BOUNDS, 30, 60, 300, 900, 3600)

#: What is counted: names, and what they mean.
_COUNTERS = (
    ("messaging.client.sent.messages", "Messages that were sent."),
    ("messaging.client.consumed.messages", "Messages that were received."),
    ("celery_toc.settled.messages", "Messages that were acknowledged, rejected or released."),
)
_WAITED = "How long a sender has waited for the broker."
_LATE = "How much later than its action time a message was received."
_HISTOGRAMS = (
    ("messaging.client.operation.duration", _WAITED, _OPERATION_BOUNDS),
    ("celery_toc.lateness", _LATE, _LATENESS_BOUNDS),
)


@lru_cache(maxsize=8)
def _instruments(provider: Any) -> tuple[Any, ...]:
    """What is measured in a process: sent, consumed, settled, duration, lateness. To make one twice
    is an error.

    provider: of metrics; None for the one that the program has set up, also if it does so later
    """
    meter = metrics.get_meter(SCOPE, __version__, provider)
    counters = [meter.create_counter(name, "{message}", text) for name, text in _COUNTERS]
    histograms = [
        meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=bounds)
        for name, text, bounds in _HISTOGRAMS
    ]
    return (*counters, *histograms)


class Received(NamedTuple):
    """What is known of a received message until it is settled.

    context: of the span that received it
    links: to whoever sent it
    settled: whether there is a span of that
    """

    context: SpanContext
    links: tuple[Link, ...]
    attributes: dict[str, Any]
    settled: bool = False


@dataclass(eq=False, slots=True)
class Reception:
    """The span of a message that is handed to its consumer. It is not late until it is due.

    due_us: its action time, in microseconds since the epoch; 0: it is not known any more
    """

    _span: Span
    received: Received
    _due_us: int
    _lateness: Any
    _common: dict[str, Any]

    def begins(self, now_us: int) -> None:
        """Its time has come; now_us: microseconds since the epoch, by the server's clock"""
        if self._due_us:
            late = max(now_us - self._due_us, 0) / 1e6
            self._span.set_attribute("celery_toc.lateness", late)
            self._lateness.record(late, self._common)

    @contextmanager
    def current(self) -> Iterator[None]:
        """While its consumer is called: what that begins belongs to this span."""
        with trace.use_span(self._span, record_exception=False, set_status_on_exception=False):
            try:
                yield
            except BaseException as exc:
                _fail(self._span, exc)
                raise

    def end(self) -> None:
        self._span.end()


class Tracing:
    """Makes the spans of a connection.

    mode: the option ``toc_otel``
    server: host and port, as far as they are known
    tracer_provider, meter_provider: those that the program has set up unless given
    """

    def __init__(
        self,
        mode: str,
        server: tuple[str, int | None] = ("", None),
        tracer_provider: Any = None,
        meter_provider: Any = None,
    ) -> None:
        self._continues = mode == PARENTS
        self._tracer = trace.get_tracer(SCOPE, __version__, tracer_provider)
        self._sent, self._consumed, self._settled, self._duration, self._lateness = _instruments(
            meter_provider
        )
        host, port = server
        self._common: dict[str, Any] = {"messaging.system": SYSTEM}
        if host:
            self._common["server.address"] = host
        if port:
            self._common["server.port"] = port

    # -- sending

    @contextmanager
    def sending(
        self,
        queue: str,
        id: str,
        headers: Mapping[str, Any],
        due_us: int | None = None,
        *,
        batched: bool = False,
    ) -> Iterator[tuple[dict[str, str], SpanContext]]:
        """While a message is sent. Gives headers that are to go along, and the span's context.

        headers: of the message. If they have the context of a trace, that stays: whoever receives
            the message links to it
        due_us: its action time, in microseconds since the epoch; None: now
        batched: whether it leaves later, with others
        """
        operation = "create" if batched else "send"
        common = self._attributes(operation, operation, queue)
        task = _of_task(headers)
        if due_us is not None:
            task["celery_toc.delay"] = max(due_us / 1e6 - time.time(), 0.0)
        current = trace.get_current_span().get_span_context()
        carried, origin = _carried(headers)
        is_other = current.is_valid and origin.is_valid and origin.span_id != current.span_id
        links = (Link(origin),) if is_other else ()
        kind = SpanKind.CLIENT if origin.is_valid else SpanKind.PRODUCER
        parent = None if current.is_valid else carried
        span = self._start(common, task, parent, links, kind=kind, id=id, due_us=due_us)
        along: dict[str, str] = {}
        if not origin.is_valid:
            propagate.inject(along, trace.set_span_in_context(span))
        with self._running(span, common, None if batched else 1):
            yield along, span.get_span_context()

    @contextmanager
    def flushing(self, created: Sequence[SpanContext], queues: Sequence[str]) -> Iterator[None]:
        """While messages are sent together.

        created: the contexts of the spans that made them
        queues: where they go
        """
        common = self._attributes("send", "send", *queues)
        links = [Link(one) for one in created[:MAX_LINKS] if one.is_valid]
        span = self._start(common, links=links, number=len(created))
        with self._running(span, common, len(created)):
            yield

    @contextmanager
    def putting(
        self, queue: str, messages: Iterable[Mapping[str, Any]], number: int, due_us: int | None
    ) -> Iterator[None]:
        """While messages are put that somebody else has made.

        messages: the headers of each. If all have the same context, the span goes on there;
            else it links to them
        due_us: when the first is due, in microseconds since the epoch; None: now
        """
        common = self._attributes("send", "send", queue)
        current = trace.get_current_span().get_span_context()
        links = [one for one in _links_of(messages) if one.context.span_id != current.span_id]
        parent = None
        if len(links) == 1 and not current.is_valid:
            parent = trace.set_span_in_context(trace.NonRecordingSpan(links.pop().context))
        kind = SpanKind.CLIENT if parent or links else SpanKind.PRODUCER
        span = self._start(common, {}, parent, links, kind=kind, number=number, due_us=due_us)
        with self._running(span, common, number):
            yield

    @contextmanager
    def _running(self, span: Span, common: dict[str, Any], sent: int | None = 0) -> Iterator[None]:
        """While what a span stands for goes on.

        sent: how many messages it tries to send; None: it does not ask the broker
        """
        began = time.perf_counter()
        try:
            with trace.use_span(
                span, end_on_exit=True, record_exception=False, set_status_on_exception=False
            ):
                try:
                    yield
                except KeptError as exc:  # as its unique key says
                    span.set_attribute("celery_toc.kept", exc.id)
                    sent = 0
                    raise
                except BaseException as exc:
                    common["error.type"] = _fail(span, exc)
                    raise
        finally:
            if sent is not None:
                self._duration.record(time.perf_counter() - began, common)
            if sent:
                self._sent.add(sent, common)

    # -- receiving

    def receive(
        self,
        queue: str,
        id: str,
        headers: dict[str, Any],
        *,
        due_us: int = 0,
        failures: int = 0,
        waited: bool = False,
    ) -> Reception:
        """Begin the span of a message that is about to be handed to its consumer.

        headers: of the message; they get this span's context instead of its sender's, so that what
            handles the message goes on in this trace
        due_us: its action time, in microseconds since the epoch; 0: it is not known any more
        failures: how often it was delivered before
        waited: whether it was due later than it was sent
        """
        common = self._attributes("receive", "receive", queue)
        more = {"celery_toc.delivery": failures + 1, **_of_task(headers)}
        carried, origin = _carried(headers)
        links = (Link(origin),) if origin.is_valid else ()
        current = trace.get_current_span()
        parent = carried
        if current.get_span_context().is_valid:  # somebody has asked for the message
            parent = trace.set_span_in_context(current, carried)
        elif waited or not self._continues:
            parent = trace.set_span_in_context(trace.INVALID_SPAN, carried)
        span = self._start(common, more, parent, links, id=id, due_us=due_us or None)
        context = span.get_span_context()
        if context.is_valid:
            along: dict[str, str] = {}
            propagate.inject(along, trace.set_span_in_context(span, carried))
            for name in propagate.get_global_textmap().fields:
                headers.pop(name, None)
            headers.update(along)
        self._consumed.add(1, common)
        named = {"messaging.destination.name": queue, "messaging.message.id": id}
        received = Received(context, links, {**self._common, **named})
        return Reception(span, received, due_us, self._lateness, common)

    def settled(self, operation: str, received: Received, reason: str = "") -> None:
        """A message is acknowledged (``ack``), rejected (``reject``, ``requeue``), released, or put
        into DeadQueue although it was acknowledged (``bury``).

        It is a child of the span that received the message.
        """
        named = {"messaging.operation.name": operation, "messaging.operation.type": "settle"}
        common = {**received.attributes, **named}
        id = common.pop("messaging.message.id")
        self._settled.add(1, common)
        parent = trace.set_span_in_context(trace.NonRecordingSpan(received.context), _nowhere())
        self._start(common, _reason(reason), parent, received.links, id=id).end()

    def pulled(
        self, messages: Sequence[tuple[Delivery, Mapping[str, Any]]], now_us: int, began_ns: int
    ) -> None:
        """Somebody has asked for messages, and has got these.

        messages: each with its headers
        now_us: microseconds since the epoch, by the server's clock
        began_ns: when it began, in nanoseconds since the epoch
        """
        late = [0.0]
        for one, _ in messages:
            common = self._attributes("receive", "receive", one.topic)
            self._consumed.add(1, common)
            if one.action_us:
                late.append(max(now_us - one.action_us, 0) / 1e6)
                self._lateness.record(late[-1], common)
        more = {"celery_toc.lateness": max(late)} if len(late) > 1 else {}
        (first, _), number = messages[0], len(messages)
        if number == 1:
            more["celery_toc.delivery"] = first.failures + 1
        self._start(
            self._attributes("receive", "receive", *(one.topic for one, _ in messages)),
            more,
            links=_links_of(headers for _, headers in messages),
            id=first.id,
            number=number,
            due_us=min((one.action_us for one, _ in messages if one.action_us), default=None),
            began_ns=began_ns,
        ).end()

    @contextmanager
    def settling(
        self, operation: str, messages: Sequence[tuple[str, str, Mapping[str, Any]]], reason: str
    ) -> Iterator[Callable[[int], None]]:
        """While messages are acknowledged, rejected or released. Gives what is told how many were.

        messages: queue, id and headers of each
        """
        queues, ids, headers = zip(*messages, strict=True) if messages else ((), ("",), ())
        common = self._attributes(operation, "settle", *queues)
        span = self._start(
            common, _reason(reason), links=_links_of(headers), id=ids[0], number=len(messages)
        )
        with self._running(span, common):
            yield lambda number: self._settled.add(int(number), common)

    def _attributes(self, name: str, kind: str, *queues: str) -> dict[str, Any]:
        """The attributes of a span that its metrics have too, few values each. Of several queues
        none is named."""
        made = {**self._common, "messaging.operation.name": name, "messaging.operation.type": kind}
        if len(set(queues)) == 1 and queues[0]:
            made["messaging.destination.name"] = queues[0]
        return made

    def _start(
        self,
        common: dict[str, Any],
        more: Mapping[str, Any] | None = None,
        parent: Context | None = None,
        links: Sequence[Link] = (),
        *,
        kind: SpanKind = SpanKind.CLIENT,
        id: str = "",
        number: int | None = None,
        due_us: int | None = None,
        began_ns: int | None = None,
    ) -> Span:
        """Start the span of an operation.

        common, more: attributes, as :meth:`_attributes` gives them, and others
        id: of the message, unless it is one of several
        number: of messages, where there may be several
        due_us: the action time, in microseconds since the epoch
        """
        attributes = {**common, **(more or {})}
        if number is None or (number == 1 and id):
            attributes["messaging.message.id"] = id
        else:
            attributes["messaging.batch.message_count"] = number
        if due_us is not None:
            attributes["celery_toc.action_time"] = shown_time(due_us)
        queue = common.get("messaging.destination.name", "")
        name = f"{common['messaging.operation.name']} {queue}".rstrip()
        return self._tracer.start_span(name, parent, kind, attributes, links, began_ns)


def tracing_of(settings: Settings, address: Address) -> Tracing:
    """What traces the messages of a connection."""
    server: tuple[str, int | None] = (address.host, address.port)
    if address.kind in ("unix", "embedded"):
        server = address.path, None
    elif address.hosts:
        server = address.hosts[0]
    return Tracing(settings.toc_otel, server)


def _reason(reason: str) -> dict[str, str]:
    return {"celery_toc.reason": reason} if reason else {}


def _fail(span: Span, exc: BaseException) -> str:
    """Note an error, and return what it is called."""
    name = type(exc).__qualname__
    span.set_attribute("error.type", name)
    span.record_exception(exc)
    span.set_status(Status(StatusCode.ERROR, str(exc)))
    return name


def _nowhere() -> Context:
    """A context in which nothing is: without one, that of the caller would be meant."""
    return Context()


def _carried(headers: Mapping[str, Any]) -> tuple[Context, SpanContext]:
    """The context that headers have, and that of its span. They may hold anything: only a text is
    taken for the context of a trace."""
    texts = {name: said for name, said in headers.items() if isinstance(said, str)}
    carried = propagate.extract(texts, _nowhere())
    return carried, trace.get_current_span(carried).get_span_context()


def _links_of(messages: Iterable[Mapping[str, Any]]) -> list[Link]:
    """Links to those who have sent messages with these headers, one each, as far as there is
    room."""
    found: dict[tuple[int, int], Link] = {}
    for headers in messages:
        _, origin = _carried(headers)
        if origin.is_valid:
            found.setdefault((origin.trace_id, origin.span_id), Link(origin))
            if len(found) == MAX_LINKS:
                break
    return list(found.values())


def _of_task(headers: Mapping[str, Any]) -> dict[str, Any]:
    """What a task of Celery is called, as its own instrumentation says it."""
    name = headers.get("task")
    return {"celery.task_name": name} if isinstance(name, str) else {}


def shown_time(us: int) -> str:
    """Microseconds since the epoch as RFC 3339; empty beyond the year 9999, or before the first."""
    try:
        moment = datetime.fromtimestamp(us // 1_000_000, timezone.utc)
    except (ValueError, OverflowError, OSError):  # whoever is asked to keep it says so
        return ""
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{us % 1_000_000:06d}Z"
