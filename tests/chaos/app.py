"""The app of producers and workers: an ordinary one, told by its environment.

Runs in peers' environments too, so it imports nothing but Celery and redis-py.
"""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery, Task

from . import ledger

BROKER = os.environ["CHAOS_BROKER"]
VISIBILITY_TIMEOUT = float(os.environ["CHAOS_VISIBILITY_TIMEOUT"])

if BROKER.startswith("valkey"):
    import celery_redis_plus  # noqa: F401 - registers the URL's scheme

app = Celery("chaos", broker=BROKER)
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_transport_options={"visibility_timeout": VISIBILITY_TIMEOUT},
    task_ignore_result=True,
)


@app.task(bind=True, name="chaos.work", acks_late=True, reject_on_worker_lost=True)
def work(self: Task, seconds: float) -> None:
    """Take that long, and write down start and end."""
    now = time.time()
    request = self.request
    info: dict[str, Any] = request.delivery_info or {}
    worker = os.environ["CHAOS_WORKER"]
    ledger.write(
        "started",
        request.id,
        at=now,
        worker=worker,
        eta=request.eta,
        redelivered=bool(info.get("redelivered")),
    )
    time.sleep(seconds)
    ledger.write("finished", request.id, worker=worker)
