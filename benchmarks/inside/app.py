"""The Celery app of all peers: tiny tasks that write down when they started."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from celery import Celery, signals
from notes import note

_broker = os.environ["BENCH_BROKER"]

if _broker.startswith("valkey"):
    import celery_redis_plus  # noqa: F401 - it registers its URL scheme

#: By what the number of a schedule is multiplied, in the number of a firing.
SCHEDULE = 10**14

app = Celery("bench", broker=_broker)
app.conf.update(
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    **json.loads(os.environ.get("BENCH_SETTINGS", "{}")),
)


@app.task
def tick(number: int) -> None:
    note(number)


@app.task(bind=True)
def fire(self: Any, schedule: int) -> None:
    """A firing: notes its schedule, and for which millisecond it was planned."""
    planned = datetime.fromisoformat(self.request.id.rpartition("@")[2].replace("Z", "+00:00"))
    note(schedule * SCHEDULE + round(planned.timestamp() * 1000))


@app.task
def nap(number: int, seconds: float) -> None:
    note(number)
    time.sleep(seconds)


def _note_what_gossip_hears(gossip: Any, heard: Path) -> None:
    """Write down the age of each heartbeat when it comes in."""
    update, lines = gossip.update_state, heard.open("a", buffering=1)

    def update_state(event: dict[str, Any]) -> Any:
        if event["type"] == "worker-heartbeat":
            lines.write(f"{time.time() - event['timestamp']:.4f}\n")
        return update(event)

    gossip.update_state = update_state


@signals.worker_ready.connect(weak=False)
def _ready(sender: Any, **_: object) -> None:
    heard = Path(os.environ["BENCH_NOTES"], "gossip")
    if heard.exists():
        _note_what_gossip_hears(sender.gossip, heard)
    Path(os.environ["BENCH_NOTES"], f"{os.getpid()}.ready").touch()
