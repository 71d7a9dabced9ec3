"""Publishes tasks to a queue whose rows are written behind, and to one without a library, in turns;
prints what each took as JSON.

Arguments: ``publish``, the broker's URL, which ends with database 0, the library's URL, and how
many tasks of each. One process sends both, to two databases of one server: of two processes or
servers, one is faster by some percent, whatever they do.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from typing import Any

from celery import Celery
from redis import Redis

#: Tasks that are sent before it is the other's turn, and before anything is timed.
TOGETHER, WARM_UP = 100, 300


class Sender:
    """Sends immediate tasks through an app of its own."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        app = Celery("bench", broker=url, set_as_current=False)
        app.conf.update(task_ignore_result=True, broker_transport_options=options)

        @app.task(name="bench.tick")
        def tick(number: int) -> None:
            """It is never run."""

        with app.connection_for_write() as connection:
            for queue in app.amqp.queues.consume_from.values():
                queue(connection.default_channel).declare()
        self._task = tick
        self._producer = app.producer_pool.acquire()
        #: seconds that each turn took, and seconds of processor time of this process and of Redis
        self.took: list[tuple[float, float, float]] = []

    def send(self, number: int, server: Redis) -> None:
        redis, own, began = _used(server), time.process_time(), time.perf_counter()
        for n in range(number):
            self._task.apply_async((n,), producer=self._producer)
        took, own = time.perf_counter() - began, time.process_time() - own
        self.took.append((took, own, _used(server) - redis))


def _used(server: Redis) -> float:
    """Seconds of processor time that it has used."""
    told = server.info("cpu")
    return float(told["used_cpu_sys"] + told["used_cpu_user"])


def main(url: str, library: str, tasks: int) -> None:
    other = f"{url.removesuffix('/0')}/1"
    options = {"toc_library": library, "toc_topics": {"celery": {"library": "behind"}}}
    senders = {"none": Sender(url, {}), "behind": Sender(other, options)}
    server = Redis.from_url(url.removeprefix("toc+"))
    for sender in senders.values():
        sender.send(WARM_UP, server)
        sender.took.clear()
    chance = random.Random(tasks)
    for _ in range(tasks // TOGETHER):
        for sender in chance.sample(list(senders.values()), len(senders)):
            sender.send(TOGETHER, server)
    found = {}
    for name, sender in senders.items():
        took, own, redis = (statistics.median(some) for some in zip(*sender.took, strict=True))
        found[f"{name}_publish"] = TOGETHER / took
        found[f"{name}_publish_sender"] = 1e6 * own / TOGETHER
        found[f"{name}_publish_redis"] = 1e6 * redis / TOGETHER
    pairs = zip(senders["none"].took, senders["behind"].took, strict=True)
    found["behind_publish_ratio"] = statistics.median(one[0] / two[0] for one, two in pairs)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[2], sys.argv[3], int(sys.argv[4]))
