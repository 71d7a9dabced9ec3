"""arq: the worker's settings, and the producer."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import commands
from arq import create_pool
from arq.connections import RedisSettings
from notes import note

_redis = RedisSettings.from_dsn(os.environ["BENCH_BROKER"])


async def tick(_: dict[str, Any], number: int) -> None:
    note(number)


class WorkerSettings:
    functions = [tick]
    redis_settings = _redis
    keep_result = 0


if __name__ == "__main__":
    loop = asyncio.new_event_loop()
    pool = loop.run_until_complete(create_pool(_redis))

    def send(number: int, wait: float | None = None) -> None:
        loop.run_until_complete(pool.enqueue_job("tick", number, _defer_by=wait))

    def warm_up(tasks: int) -> None:
        for _ in range(tasks):
            send(commands.WARM_UP)

    commands.serve(warm_up=warm_up, sparse=lambda **options: commands.sparse(send, **options))
