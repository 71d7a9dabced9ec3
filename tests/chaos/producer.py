"""A producer: ``python -m tests.chaos.producer NUMBER SEED SECONDS TASKS_PER_SECOND``."""

from __future__ import annotations

import random
import sys
import time
from datetime import datetime, timedelta, timezone

from . import ledger
from .app import app, work

#: As Celery's own, but patient enough for a server that restarts.
RETRY_POLICY = {**app.conf.task_publish_retry_policy, "max_retries": 40}


def main(number: int, seed: int, seconds: float, rate: float) -> None:
    rng = random.Random(f"{seed}-{number}")
    end = time.monotonic() + seconds
    sent = 0
    while time.monotonic() < end:
        time.sleep(rng.uniform(0.5, 1.5) / rate)  # the pace that was asked for
        id, sent = f"p{number}-{sent:05}", sent + 1
        ahead = rng.uniform(0.1, 10) if rng.random() < 0.5 else None
        takes = rng.uniform(0, 0.5)
        eta = None if ahead is None else datetime.now(timezone.utc) + timedelta(seconds=ahead)
        ledger.write("sending", id, eta=eta and eta.timestamp())
        try:
            work.apply_async((takes,), task_id=id, eta=eta, retry_policy=RETRY_POLICY)
        except Exception as exc:
            ledger.write("failed", id, error=f"{type(exc).__name__}: {exc}")
        else:
            ledger.write("sent", id)


main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
