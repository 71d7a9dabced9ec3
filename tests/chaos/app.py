"""The app of producers and workers: an ordinary one, told by its environment.

Runs in peers' environments too, so it imports nothing but Celery and redis-py.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from typing import Any

from celery import Celery, Task
from celery.exceptions import Reject, Retry
from kombu import Queue

from . import ledger
from .app_queues import LIMITED, QUEUES

#: As Celery's own, but patient enough for a server that restarts.
RETRY_POLICY = {"max_retries": 40, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.2}

#: Seconds for which a task tries to put its own job.
PATIENCE = 10.0

BROKER = os.environ["CHAOS_BROKER"]
VISIBILITY_TIMEOUT = float(os.environ["CHAOS_VISIBILITY_TIMEOUT"])

if BROKER.startswith("valkey"):
    import celery_redis_plus  # noqa: F401 - registers the URL's scheme

OPTIONS: dict[str, Any] = {"visibility_timeout": VISIBILITY_TIMEOUT}
if BROKER.startswith("toc"):
    QUEUES = (*QUEUES, *LIMITED)
    TERMS = json.loads(os.environ.get("CHAOS_TERMS", "{}"))
    topics = {name: {**LIMITED.get(name, {}), **TERMS} for name in QUEUES}
    OPTIONS["toc_topics"] = {name: terms for name, terms in topics.items() if terms}

if "CHAOS_LIBRARY" in os.environ:
    OPTIONS.update(json.loads(os.environ["CHAOS_LIBRARY"]))
if "CHAOS_DEATHS" in os.environ:
    from . import deaths

    deaths.install()

app = Celery("chaos", broker=BROKER)
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_transport_options=OPTIONS,
    task_ignore_result=True,
    task_queues=[Queue(name) for name in QUEUES],
    task_default_queue=QUEUES[0],
)


@app.task(bind=True, name="chaos.work", acks_late=True, reject_on_worker_lost=True)
def work(self: Task, seconds: float) -> None:
    """Take that long, and write down start and end; one in eight is put off before, three times."""
    odd = zlib.crc32(self.request.id.encode()) % 8 == 0 and BROKER.startswith("toc")
    if odd and ledger.put_off(self.request.id) <= 3:
        raise Reject("not now", requeue=True)
    _started(self, time.time())
    time.sleep(seconds)
    _finished(self)
    ledger.note_end(self.request.id)


@app.task(bind=True, name="chaos.again", acks_late=False, max_retries=None)
def again(self: Task, seconds: float, times: int, countdown: float) -> None:
    """As `work`, but acknowledged before it begins, and sent again under its id so many times."""
    _started(self, time.time())
    time.sleep(seconds)
    if self.request.retries >= times:
        _finished(self)
        return
    ledger.write("retrying", self.request.id, again=self.request.retries + 1, countdown=countdown)
    while True:
        try:
            raise self.retry(countdown=countdown, retry_policy=RETRY_POLICY)
        except Retry:
            _finished(self)
            raise
        except Reject as exc:
            if "ReplicationError" in repr(exc.reason):  # it is kept, but not on another server
                _finished(self)
                raise
            time.sleep(0.2)  # it could not be sent: the server is full, or has been away for long


@app.task(bind=True, name="chaos.put", acks_late=True, reject_on_worker_lost=True)
def put(self: Task, seconds: float, delay: float, queue: str) -> None:
    """As `work`, and puts its own job once more for later: under its id, with its bytes."""
    _started(self, time.time())
    time.sleep(seconds)
    if ledger.puts_first(self.request.id):
        _put_own_job(self.request.id, delay, queue)
    _finished(self)


@app.task(bind=True, name="chaos.fire", acks_late=True, reject_on_worker_lost=True)
def fire(self: Task) -> None:
    """A schedule's task."""
    _started(self, time.time())


@app.task(name="chaos.tick")
def tick() -> None:
    """A schedule's task that nobody counts but the schedule."""


def _put_own_job(id: str, delay: float, queue: str) -> None:
    from kombu_toc import ReplicationError, Transport, center_for

    center = _centers.get(os.getpid())
    if center is None:
        center = _centers[os.getpid()] = center_for(BROKER, **OPTIONS)
    errors = Transport.connection_errors + Transport.channel_errors
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            mine = center.get(id, topic=queue)
            if not mine:  # it was delivered again meanwhile, and is gone
                return
            ledger.write("putting", id, delay=delay)
            center.put(queue, id, mine[0].body, delay=delay, token="again")
        except ReplicationError:  # it is kept, but not on another server
            return
        except errors:
            time.sleep(0.2)  # the server is full, or away
        else:
            ledger.write("put", id)
            return


_centers: dict[int, Any] = {}


def _started(task: Task, at: float) -> None:
    request = task.request
    info: dict[str, Any] = request.delivery_info or {}
    ledger.write(
        "started",
        request.id,
        at=at,
        worker=os.environ["CHAOS_WORKER"],
        eta=request.eta,
        retries=request.retries,
        redelivered=bool(info.get("redelivered")),
    )


def _finished(task: Task) -> None:
    request = task.request
    worker = os.environ["CHAOS_WORKER"]
    ledger.write("finished", request.id, worker=worker, retries=request.retries)
