"""SAQ: the worker's settings, and the producer."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import commands
from notes import note
from saq import Queue

queue = Queue.from_url(os.environ["BENCH_BROKER"])


async def tick(_: dict[str, Any], *, number: int) -> None:
    note(number)


settings = {"queue": queue, "functions": [tick], "concurrency": 2}


if __name__ == "__main__":
    loop = asyncio.new_event_loop()
    loop.run_until_complete(queue.connect())

    def send(number: int, wait: float | None = None) -> None:
        # Its times are whole seconds: the next one is the first that is not early.
        at = {} if wait is None else {"scheduled": -int(-(time.time() + wait) // 1)}
        loop.run_until_complete(queue.enqueue("tick", number=number, **at))

    def warm_up(tasks: int) -> None:
        for _ in range(tasks):
            send(commands.WARM_UP)

    commands.serve(warm_up=warm_up, sparse=lambda **options: commands.sparse(send, **options))
