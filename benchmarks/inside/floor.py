"""What Celery costs without a broker: prints one JSON object.

A producer and a solo worker in this process, on Kombu's transport within its memory.
"""

from __future__ import annotations

import json
import sys
import time

from celery import Celery
from celery.exceptions import WorkerShutdown

NUMBER = int(sys.argv[1])

app = Celery("floor", broker="memory://localhost")
app.conf.update(task_ignore_result=True, worker_redirect_stdouts=False)
starts: list[float] = []


@app.task
def tick(number: int) -> None:
    starts.append(time.perf_counter())
    if len(starts) == NUMBER:
        raise WorkerShutdown(0)


def send(**when: float) -> float:
    """Seconds that it takes to send all."""
    began = time.perf_counter()
    for number in range(NUMBER):
        tick.apply_async((number,), **when)
    return time.perf_counter() - began


def main() -> None:
    channel = app.connection_for_write().default_channel
    queue = app.amqp.queues["celery"](channel)
    tick.apply_async((0,))
    later = send(countdown=3600.0)
    queue.purge()
    send()
    worker = app.Worker(
        pool="solo", without_heartbeat=True, without_gossip=True, without_mingle=True, quiet=True
    )
    worker.start()
    times = starts[NUMBER // 10 :]
    found = {"send": NUMBER / later, "drain": (len(times) - 1) / (times[-1] - times[0])}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
