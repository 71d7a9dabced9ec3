"""RQ: the job, and its producer."""

from __future__ import annotations

import os
import time
from datetime import datetime, timezone

import commands
from notes import note


def tick(number: int) -> None:
    note(number)


if __name__ == "__main__":
    from redis import Redis
    from rq import Queue

    queue = Queue(connection=Redis.from_url(os.environ["BENCH_BROKER"]))

    def warm_up(tasks: int) -> None:
        for _ in range(tasks):
            queue.enqueue("jobs_rq.tick", commands.WARM_UP)

    commands.serve(
        warm_up=warm_up,
        sparse=lambda **options: commands.sparse(
            lambda number, wait: queue.enqueue_at(
                # Its times are whole seconds: the next one is the first that is not early.
                datetime.fromtimestamp(-int(-(time.time() + wait) // 1), timezone.utc),
                "jobs_rq.tick",
                number,
                result_ttl=0,
            ),
            **options,
        ),
    )
