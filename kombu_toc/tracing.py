"""Spans and metrics of OpenTelemetry: messages that are sent, received and settled.

It is loaded only where ``toc_otel`` is set, and needs opentelemetry-api. What is exported, where to
and how much of it is up to the SDK that the program has set up. docs/opentelemetry.md lists spans,
attributes and metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any, NamedTuple

from .client.options import PARENTS, Settings
from .client.urls import Address
from .errors import ConfigurationError, KeptError
from .model.results import Delivery
from .version import __version__

try:
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.propagators.textmap import Getter
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


class _TextGetter(Getter[Mapping[str, Any]]):
    """Reads headers, which may hold anything: only a text is taken for the context of a trace."""

    def get(self, carrier: Mapping[str, Any], key: str) -> list[str] | None:
        value = carrier.get(key)
        return [value] if isinstance(value, str) else None

    def keys(self, carrier: Mapping[str, Any]) -> list[str]:
        return list(carrier)


_getter = _TextGetter()


class Instruments(NamedTuple):
    """What is measured."""

    sent: Any
    consumed: Any
    settled: Any
    duration: Any
    lateness: Any


@lru_cache(maxsize=8)
def _instruments(provider: Any) -> Instruments:
    """The instruments of a process: to make one twice is an error.

    provider: of metrics; None for the one that the program has set up, also if it does so later
    """
    meter = metrics.get_meter(SCOPE, __version__, provider)
    return Instruments(
        meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Messages that were sent."
        ),
        meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages that were received."
        ),
        meter.create_counter(
            "celery_toc.settled.messages",
            "{message}",
            "Messages that were acknowledged, rejected or released.",
        ),
        meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "How long a sender has waited for the broker.",
            explicit_bucket_boundaries_advisory=_OPERATION_BOUNDS,
        ),
        meter.create_histogram(
            "celery_toc.lateness",
            "s",
            "How much later than its action time a message was received.",
            explicit_bucket_boundaries_advisory=_LATENESS_BOUNDS,
        ),
    )


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


class Reception:
    """The span of a message that is handed to its consumer. It is not late until it is due.

    due_us: its action time, in microseconds since the epoch; 0: it is not known any more
    """

    __slots__ = ("_common", "_due_us", "_lateness", "_span", "received")

    def __init__(
        self, span: Span, received: Received, due_us: int, lateness: Any, common: dict[str, Any]
    ) -> None:
        self._span = span
        self.received = received
        self._due_us = due_us
        self._lateness = lateness
        self._common = common

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
        self._instruments = _instruments(meter_provider)
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
        attributes = {**common, "messaging.message.id": id, **_of_task(headers)}
        if due_us is not None:
            attributes["celery_toc.action_time"] = shown_time(due_us)
            attributes["celery_toc.delay"] = max(due_us / 1e6 - time.time(), 0.0)
        current = trace.get_current_span().get_span_context()
        carried, origin = _carried(headers)
        links: tuple[Link, ...] = ()
        if current.is_valid and origin.is_valid and origin.span_id != current.span_id:
            links = (Link(origin),)
        kind = SpanKind.CLIENT if origin.is_valid else SpanKind.PRODUCER
        span = self._tracer.start_span(
            f"{operation} {queue}", None if current.is_valid else carried, kind, attributes, links
        )
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
        queue = _one_of(set(queues))
        common = self._attributes("send", "send", queue)
        span = self._tracer.start_span(
            f"send {queue}".rstrip(),
            None,
            SpanKind.CLIENT,
            {**common, "messaging.batch.message_count": len(created)},
            [Link(one) for one in created[:MAX_LINKS] if one.is_valid],
        )
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
        attributes = {**common, "messaging.batch.message_count": number}
        if due_us is not None:
            attributes["celery_toc.action_time"] = shown_time(due_us)
        current = trace.get_current_span().get_span_context()
        links = [one for one in _links_of(messages) if one.context.span_id != current.span_id]
        parent = None
        if len(links) == 1 and not current.is_valid:
            parent = trace.set_span_in_context(trace.NonRecordingSpan(links.pop().context))
        kind = SpanKind.CLIENT if parent or links else SpanKind.PRODUCER
        span = self._tracer.start_span(f"send {queue}", parent, kind, attributes, links)
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
                self._instruments.duration.record(time.perf_counter() - began, common)
            if sent:
                self._instruments.sent.add(sent, common)

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
        attributes = {
            **common,
            "messaging.message.id": id,
            "celery_toc.delivery": failures + 1,
            **_of_task(headers),
        }
        if due_us:
            attributes["celery_toc.action_time"] = shown_time(due_us)
        carried, origin = _carried(headers)
        links = (Link(origin),) if origin.is_valid else ()
        current = trace.get_current_span()
        parent = carried
        if current.get_span_context().is_valid:  # somebody has asked for the message
            parent = trace.set_span_in_context(current, carried)
        elif waited or not self._continues:
            parent = trace.set_span_in_context(trace.INVALID_SPAN, carried)
        span = self._tracer.start_span(
            f"receive {queue}", parent, SpanKind.CLIENT, attributes, links
        )
        context = span.get_span_context()
        if context.is_valid:
            along: dict[str, str] = {}
            propagate.inject(along, trace.set_span_in_context(span, carried))
            for name in propagate.get_global_textmap().fields:
                headers.pop(name, None)
            headers.update(along)
        self._instruments.consumed.add(1, common)
        named = {"messaging.destination.name": queue, "messaging.message.id": id}
        received = Received(context, links, {**self._common, **named})
        return Reception(span, received, due_us, self._instruments.lateness, common)

    def settled(self, operation: str, received: Received, reason: str = "") -> None:
        """A message is acknowledged (``ack``), rejected (``reject``, ``requeue``), released, or put
        into DeadQueue although it was acknowledged (``bury``).

        It is a child of the span that received the message.
        """
        named = {"messaging.operation.name": operation, "messaging.operation.type": "settle"}
        attributes = {**received.attributes, **named}
        queue = attributes["messaging.destination.name"]
        common = {**attributes}
        del common["messaging.message.id"]
        self._instruments.settled.add(1, common)
        if reason:
            attributes["celery_toc.reason"] = reason
        parent = trace.set_span_in_context(trace.NonRecordingSpan(received.context), _nowhere())
        self._tracer.start_span(
            f"{operation} {queue}", parent, SpanKind.CLIENT, attributes, received.links
        ).end()

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
            self._instruments.consumed.add(1, common)
            if one.action_us:
                late.append(max(now_us - one.action_us, 0) / 1e6)
                self._instruments.lateness.record(late[-1], common)
        queue = _one_of({one.topic for one, _ in messages})
        attributes = self._attributes("receive", "receive", queue)
        if len(late) > 1:
            attributes["celery_toc.lateness"] = max(late)
        if due := [one.action_us for one, _ in messages if one.action_us]:
            attributes["celery_toc.action_time"] = shown_time(min(due))
        if len(messages) > 1:
            attributes["messaging.batch.message_count"] = len(messages)
        else:
            attributes["messaging.message.id"] = messages[0][0].id
            attributes["celery_toc.delivery"] = messages[0][0].failures + 1
        links = _links_of(headers for _, headers in messages)
        self._tracer.start_span(
            f"receive {queue}".rstrip(), None, SpanKind.CLIENT, attributes, links, began_ns
        ).end()

    @contextmanager
    def settling(
        self, operation: str, messages: Sequence[tuple[str, str, Mapping[str, Any]]], reason: str
    ) -> Iterator[Callable[[int], None]]:
        """While messages are acknowledged, rejected or released. Gives what is told how many were.

        messages: queue, id and headers of each
        """
        queue = _one_of({one[0] for one in messages})
        common = self._attributes(operation, "settle", queue)
        attributes = {**common}
        if len(messages) == 1:
            attributes["messaging.message.id"] = messages[0][1]
        else:
            attributes["messaging.batch.message_count"] = len(messages)
        if reason:
            attributes["celery_toc.reason"] = reason
        span = self._tracer.start_span(
            f"{operation} {queue}".rstrip(),
            None,
            SpanKind.CLIENT,
            attributes,
            _links_of(one[2] for one in messages),
        )
        with self._running(span, common):
            yield lambda number: self._instruments.settled.add(int(number), common)

    def _attributes(self, name: str, kind: str, queue: str) -> dict[str, Any]:
        """The attributes of a span that its metrics have too: few values each."""
        made = {**self._common, "messaging.operation.name": name, "messaging.operation.type": kind}
        if queue:
            made["messaging.destination.name"] = queue
        return made


def tracing_of(settings: Settings, address: Address) -> Tracing:
    """What traces the messages of a connection."""
    if address.kind in ("unix", "embedded"):
        return Tracing(settings.toc_otel, (address.path, None))
    return Tracing(
        settings.toc_otel, address.hosts[0] if address.hosts else (address.host, address.port)
    )


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


def _one_of(queues: set[str]) -> str:
    """The queue, if it is one."""
    return next(iter(queues)) if len(queues) == 1 else ""


def _carried(headers: Mapping[str, Any]) -> tuple[Context, SpanContext]:
    """The context that headers have, and that of its span."""
    carried = propagate.extract(headers, _nowhere(), _getter) if headers else _nowhere()
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
