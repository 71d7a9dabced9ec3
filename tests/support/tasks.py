"""The Celery app that the end-to-end tests run: an ordinary one, told by its environment.

Nothing here knows of a timeout center but the broker's URL. What tasks saw, they write down
in a list in Redis, apart from broker and results.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import signal
import time
from datetime import datetime
from typing import Any

import redis
from celery import Celery, Task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from kombu import Exchange, Queue
from kombu.common import Broadcast


def make_app(broker: str, backend: str, **settings: Any) -> Celery:
    """An app with the tests' tasks."""
    app = Celery("e2e", broker=broker, backend=backend)
    app.conf.update(
        broker_connection_retry_on_startup=True,
        result_expires=600,
        worker_hijack_root_logger=True,
        task_queues=(
            Queue("celery"),
            Queue("urgent"),
            Queue("news", Exchange("news", type="topic"), routing_key="news.#"),
            Queue("one-slot", queue_arguments={"x-slots": 1}),
            Broadcast("everyone"),
        ),
        task_default_queue="celery",
    )
    app.conf.update(settings)
    for function in (add, fail, mul, nap, note, note_error, total):
        app.task(name=f"e2e.{function.__name__}")(function)
    app.task(name="e2e.again", bind=True, max_retries=5)(again)
    app.task(name="e2e.again_at", bind=True)(again_at)
    app.task(name="e2e.stamp", bind=True)(stamp)
    app.task(name="e2e.late_ack", bind=True, acks_late=True)(late_ack)
    app.task(name="e2e.refuse", bind=True, acks_late=True)(refuse)
    app.task(name="e2e.fail_unacknowledged", acks_late=True, acks_on_failure_or_timeout=False)(fail)
    app.task(name="e2e.hang", bind=True, acks_late=True)(hang)
    app.task(name="e2e.toil", bind=True, acks_late=True)(toil)
    app.task(name="e2e.fail_late", acks_late=True)(fail)
    app.task(name="e2e.flaky")(flaky)
    app.task(name="e2e.flaky_late", acks_late=True)(flaky)
    app.task(name="e2e.flaky_kept", dead_on_failure=True)(flaky)
    app.task(name="e2e.fail_kept", dead_on_failure=True)(fail)
    app.task(name="e2e.fail_gone", dead_on_failure=False)(fail)
    app.task(name="e2e.fail_expected", throws=(ValueError,))(fail)
    app.task(name="e2e.fail_unlisted", keep_failures=False)(fail)
    app.task(
        name="e2e.fail_again",
        bind=True,
        autoretry_for=(ValueError,),
        max_retries=2,
        default_retry_delay=0.1,
    )(fail_again)
    app.task(name="e2e.end")(end)
    app.task(name="e2e.end_late", acks_late=True)(end)
    app.task(name="e2e.ignore")(ignore)
    app.task(name="e2e.linger", acks_late=True, on_success=linger)(note)
    app.task(
        name="e2e.told_late",
        bind=True,
        acks_late=True,
        acks_on_failure_or_timeout=False,
        reject_on_worker_lost=True,
    )(told)
    app.task(name="e2e.told", bind=True)(told)
    app.task(name="e2e.stall", acks_late=True)(stall)
    app.task(name="e2e.step", bind=True)(step)
    app.task(name="e2e.persist")(persist)
    app.task(name="e2e.late_persist", acks_late=True)(persist)
    app.task(name="e2e.late_step", bind=True, acks_late=True)(step)
    app.task(name="e2e.tick", bind=True)(tick)
    app.task(name="e2e.tick_late", bind=True, acks_late=True)(tick)
    return app


#: The name of the connections over which tasks write down what they saw.
LOG = "log-of-tasks"


@functools.cache
def log() -> redis.Redis:
    """Where tasks write down what they saw."""
    return redis.Redis.from_url(os.environ["E2E_LOG"], client_name=LOG)


def redis_time() -> float:
    try:
        seconds, us = log().time()
    except redis.ConnectionError:  # a test has cut it while nobody used it
        seconds, us = log().time()
    return seconds + us / 1_000_000


def write(**entry: Any) -> None:
    """Write something down, with the time by this machine's clock and by Redis's."""
    entry.setdefault("at", time.time())
    entry["pid"] = os.getpid()
    entry["by_redis"] = redis_time()
    log().rpush("log", json.dumps(entry))


def add(x: float, y: float) -> float:
    return x + y


def mul(x: float, y: float) -> float:
    return x * y


def total(numbers: list[float]) -> float:
    return sum(numbers)


def fail(text: str = "on purpose") -> None:
    raise ValueError(text)


def flaky(name: str, seconds: float = 0) -> str:
    """Fail until somebody has mended what it needs."""
    time.sleep(seconds)
    if not log().exists("mended"):
        raise ValueError(f"{name} is broken")
    write(name=name)
    return name


def fail_again(self: Task, name: str) -> None:
    """Write down each attempt."""
    write(name=name, retries=self.request.retries)
    raise ValueError(name)


def end() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def ignore() -> None:
    raise Ignore


def note(name: str, due: float | None = None) -> float:
    """Write down when it started."""
    now = time.time()
    write(name=name, at=now, due=due)
    return now


def note_error(request: Any, exc: Any, traceback: Any) -> None:
    write(name="errback", text=str(exc))


def nap(name: str, seconds: float, due: float | None = None) -> float:
    """Write down when it started, and take that long."""
    now = time.time()
    write(name=name, at=now, due=due)
    time.sleep(seconds)
    return now


def again(self: Task, times: int, countdown: float) -> list[float]:
    """Fail and be retried some times; return when each attempt ran."""
    write(name=f"again-{self.request.id}", retries=self.request.retries)
    if self.request.retries < times:
        raise self.retry(countdown=countdown)
    return self.request.retries


def again_at(self: Task, due: str) -> None:
    """Fail once, and be retried at that time."""
    write(name=f"again-{self.request.id}", retries=self.request.retries)
    if not self.request.retries:
        raise self.retry(eta=datetime.fromisoformat(due))


def stamp(self: Task) -> dict[str, Any]:
    """What the task is told about itself."""
    return {
        "eta": self.request.eta,
        "redelivered": self.request.delivery_info.get("redelivered"),
        "priority": self.request.delivery_info.get("priority"),
        "routing_key": self.request.delivery_info.get("routing_key"),
        "at": time.time(),
        "kept": gc.get_freeze_count(),
    }


def refuse(self: Task, reason: str, requeue: bool = False) -> None:
    """Reject the message, the first time back into the queue if told to."""
    write(name="refused", redelivered=self.request.delivery_info.get("redelivered"))
    raise Reject(reason, requeue=requeue)


def late_ack(self: Task, name: str, seconds: float) -> None:
    """As nap, acknowledged when it is done."""
    write(name=name)
    time.sleep(seconds)
    write(name=f"{name}-done")


def hang(self: Task, name: str, seconds: float) -> str:
    """As late_ack; take that long if it is not delivered again."""
    redelivered = bool(self.request.delivery_info.get("redelivered"))
    write(name=name, redelivered=redelivered)
    if not redelivered:
        time.sleep(seconds)
    write(name=f"done-{name}")
    return name


def linger(self: Task, *_: Any) -> None:
    """The task has succeeded, and is not acknowledged yet."""
    time.sleep(60)


def toil(self: Task, name: str, seconds: float) -> None:
    """Keep the processor busy for that long, if it is not delivered again."""
    end = time.monotonic() + seconds
    write(name=name)
    while not self.request.delivery_info.get("redelivered") and time.monotonic() < end:
        sum(range(200_000))
        time.sleep(0)
    write(name=f"{name}-done")


def told(self: Task, name: str, seconds: float = 0.0) -> None:
    """As late_ack, acknowledged as the app is set; write down how often it was delivered.

    seconds: below 0, its process is killed
    """
    write(
        name=name,
        due=self.request.eta and datetime.fromisoformat(self.request.eta).timestamp(),
        redelivered=bool(self.request.delivery_info.get("redelivered")),
        count=self.request.get("x-delivery-count"),
        worker=self.request.hostname,
    )
    if seconds < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(seconds)
    write(name=f"{name}-done")


def persist(name: str, seconds: float) -> None:
    """As late_ack, and go on when told to end."""
    write(name=name)
    end = time.monotonic() + seconds
    while (rest := end - time.monotonic()) > 0:
        try:
            time.sleep(rest)
        except SoftTimeLimitExceeded:
            write(name=f"{name}-told")
    write(name=f"{name}-done")


def step(self: Task, name: str, how: str = "") -> None:
    """As late_ack. The first time, it is rejected or retried instead if `how` says so."""
    write(name=name)
    if how == "reject" and not self.request.delivery_info.get("redelivered"):
        raise Reject("on purpose", requeue=True)
    if how == "retry" and not self.request.retries:
        raise self.retry(countdown=0.2)
    time.sleep(0.05)
    write(name=f"{name}-done")


def stall(name: str, seconds: float, how: str, until: str = "/") -> None:
    """As late_ack, and nothing else that is green runs meanwhile.

    how: "sleep", in C code that nobody has patched, or "loop", which never yields
    until: goes on until there is this file, too
    """
    write(name=name)
    end = time.monotonic() + seconds
    while (rest := end - time.monotonic()) > 0 or not os.path.exists(until):
        if how == "sleep":  # a signal would end it early
            ctypes.CDLL(None).usleep(int(max(rest, 0.02) * 1_000_000))
    write(name=f"{name}-done")


def tick(self: Task, seconds: float = 0.0) -> None:
    """Write down under which id this runs, and when it was to."""
    info = self.request.delivery_info or {}
    eta = datetime.fromisoformat(self.request.eta).timestamp()
    write(name=self.request.id, eta=eta, redelivered=bool(info.get("redelivered")))
    time.sleep(seconds)
    write(name=f"done-{self.request.id}")


if "E2E_SKEW" in os.environ:
    # The clock of this process, and of those that it forks, is that many seconds ahead.
    import time_machine

    time_machine.travel(time.time() + float(os.environ["E2E_SKEW"]), tick=True).start()

if "E2E_MORTAL" in os.environ:
    from . import mortal

    mortal.install(float(os.environ["E2E_MORTAL"]))

if "E2E_BROKER" in os.environ:
    app = make_app(
        os.environ["E2E_BROKER"],
        os.environ["E2E_BACKEND"],
        **json.loads(os.environ.get("E2E_SETTINGS", "{}")),
    )
