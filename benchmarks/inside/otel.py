"""Sends tasks, and receives and acknowledges them, with one kind of tracing; prints as JSON how
long each takes of the processor, in microseconds.

Arguments: the broker's URL, how many tasks, and the kind: off, api (without an SDK), unsampled (an
SDK whose sampler takes nothing) or spans (and metrics, of an SDK that exports to nowhere).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from celery import Celery
from kombu import Connection, Consumer, Queue
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON


class Nowhere(SpanExporter):
    """Takes spans, and throws them away."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def set_up(kind: str) -> None:
    if kind in ("unsampled", "spans"):
        provider = TracerProvider(sampler=ALWAYS_ON if kind == "spans" else ALWAYS_OFF)
        provider.add_span_processor(BatchSpanProcessor(Nowhere(), max_queue_size=1 << 20))
        trace.set_tracer_provider(provider)
        metrics.set_meter_provider(MeterProvider([InMemoryMetricReader()]))


def main(url: str, number: int, kind: str) -> None:
    set_up(kind)
    options = {} if kind == "off" else {"toc_otel": True}
    app = Celery("bench", broker=url)
    app.conf.update(task_ignore_result=True, broker_transport_options=options)

    @app.task(name="bench.tick")
    def tick(number: int) -> None: ...

    def send(number: int) -> None:
        for n in range(number):
            tick.apply_async((n,))

    def receive(number: int) -> None:
        left = [number]

        def take(message: Any) -> None:
            message.ack()
            left[0] -= 1

        with Connection(url, transport_options=options) as connection:
            consumer = Consumer(connection, [Queue("celery")], on_message=take)
            consumer.qos(prefetch_count=100)
            with consumer:
                while left[0]:
                    connection.drain_events(timeout=10)

    found = {}
    for name, do in (("send", send), ("receive", receive)):
        if name == "send":
            send(100)  # to warm up
        else:
            receive(100)
        began = time.process_time()
        do(number)
        found[name] = (time.process_time() - began) / number * 1e6
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
