"""A producer: ``python -m tests.chaos.producer NUMBER SEED SECONDS TASKS_PER_SECOND``; of a
backlog, ``python -m tests.chaos.producer flood NUMBER QUEUE TASKS``; of calls of remote control,
``python -m tests.chaos.producer ask SECONDS``.
"""

from __future__ import annotations

import os
import random
import sys
import time
import zlib
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta, timezone
from typing import Any

from celery.app.control import Control

from . import ledger
from .app import BROKER, QUEUES, RETRY_POLICY, again, app, put, work
from .app_queues import HORIZON, KEYS, LIMITED

#: What a run with a task library looks at beyond the others: see `modes`.
MODE = os.environ.get("CHAOS_MODE", "")

#: Whether tasks put their own jobs. Of what a library keeps, it has no row.
PUTS = BROKER.startswith("toc") and "CHAOS_LIBRARY" not in os.environ

#: Seconds after which it has been said that a task has ended.
SETTLED = 4.0


def main(number: int, seed: int, seconds: float, rate: float) -> None:
    rng = random.Random(f"{seed}-{number}")
    end = time.monotonic() + seconds
    sent = 0
    worked: list[tuple[str, str]] = []
    while time.monotonic() < end:
        time.sleep(rng.uniform(0.5, 1.5) / rate)  # the pace that was asked for
        id, sent = f"p{number}-{sent:05}", sent + 1
        ahead = rng.uniform(0.1, 10) if rng.random() < 0.5 else None
        if MODE == "far" and ahead is not None and rng.random() < 0.5:
            ahead += HORIZON + 2
        takes = rng.uniform(0, 0.5)
        eta = None if ahead is None else datetime.now(timezone.utc) + timedelta(seconds=ahead)
        queue = rng.choice(QUEUES)
        if rng.random() < 0.15:
            args = (takes / 5, rng.randint(1, 2), rng.uniform(0.1, 3))
            send(again, args, id, queue, eta, times=args[1])
        elif PUTS and queue not in LIMITED and rng.random() < 0.15:
            send(put, (takes / 5, rng.uniform(0.1, 3), queue), id, queue, eta)
        else:
            send(work, (takes,), id, queue, eta)
            worked.append((id, queue))
        if MODE == "guard" and worked and rng.random() < 0.3:
            send_again(*rng.choice(worked))


def send_again(id: str, queue: str) -> None:
    """Send a task under the id of one that has ended, and has been said to have."""
    at = ledger.ended(id)
    if at is None or at > time.time() - SETTLED:
        return
    ledger.write("sent again", id)
    headers = {"headers": {"x-key": key_of(id)}} if queue in LIMITED else {}
    try:
        work.apply_async((0.1,), task_id=id, queue=queue, retry_policy=RETRY_POLICY, **headers)
    except Exception as exc:
        ledger.write("not sent again", id, error=f"{type(exc).__name__}: {exc}")


def key_of(id: str) -> str:
    return f"key-{zlib.crc32(id.encode()) % KEYS}"


def about(id: str) -> AbstractContextManager[None]:
    """The transaction of what a task is about, if there is one."""
    if MODE != "outbox":
        return nullcontext()
    from .orders import Orders

    global _orders
    _orders = _orders or Orders()
    return _orders.committed(id)


_orders: Any = None


def send(task: Any, args: Any, id: str, queue: str, eta: datetime | None, times: int = 0) -> None:
    """Send a task that sends itself again so many times, and write down how that ended."""
    key = key_of(id) if queue in LIMITED else ""
    headers = {"headers": {"x-key": key}} if key else {}
    ledger.write("sending", id, eta=eta and eta.timestamp(), queue=queue, times=times, key=key)
    try:
        with about(id):
            task.apply_async(
                args, task_id=id, queue=queue, eta=eta, retry_policy=RETRY_POLICY, **headers
            )
    except Exception as exc:
        ledger.write("failed", id, error=f"{type(exc).__name__}: {exc}")
    else:
        ledger.write("sent", id)


def flood(number: int, queue: str, tasks: int) -> None:
    """Send so many short tasks to one queue at once."""
    for sent in range(tasks):
        send(work, (0.1,), f"f{number}-{sent:05}", queue, None)


def ask(seconds: float) -> None:
    """Ask all workers for an answer, again and again, into reply queues on all nodes."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        answers = Control(app).ping(timeout=1)  # each has a reply queue of its own
        print(f"{time.time():.3f} {len(answers)} answers", flush=True)


if sys.argv[1] == "ask":
    ask(float(sys.argv[2]))
elif sys.argv[1] == "flood":
    flood(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
else:
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
