"""The Celery app of all peers: tiny tasks that write down when they started."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from celery import Celery, signals
from notes import note

_broker = os.environ["BENCH_BROKER"]

if _broker.startswith("valkey"):
    import celery_redis_plus  # noqa: F401 - it registers its URL scheme

app = Celery("bench", broker=_broker)
app.conf.update(
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    **json.loads(os.environ.get("BENCH_SETTINGS", "{}")),
)


@app.task
def tick(number: int) -> None:
    note(number)


@app.task
def nap(number: int, seconds: float) -> None:
    note(number)
    time.sleep(seconds)


@signals.worker_ready.connect(weak=False)
def _ready(**_: object) -> None:
    Path(os.environ["BENCH_NOTES"], f"{os.getpid()}.ready").touch()
