"""Sends tasks from an event loop, beside the same by apply_async; prints what was measured as JSON.

Arguments: how many tasks, and for how many seconds a loaded handler is measured. The app is that
of `app`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

from app import app, tick

from celery_toc import aio

#: How often apply_async and the loop take turns.
TURNS = 5

#: Tasks of the loop that send at a time.
SENDERS = 64

#: Requests a second that the handler gets.
REQUESTS = 500


def one_by_one(number: int, **options: float) -> float:
    """Seconds that apply_async takes for so many tasks."""
    with app.producer_or_acquire() as producer:
        began = time.perf_counter()
        for n in range(number):
            tick.apply_async((n,), producer=producer, **options)
        return time.perf_counter() - began


async def at_once(number: int, **options: float) -> float:
    """Seconds that a loop takes for so many tasks, which several tasks of its own send, as the
    requests that a server handles at a time do."""
    numbers = iter(range(number))

    async def send() -> None:
        for n in numbers:
            await aio.send(tick.s(n), **options)

    began = time.perf_counter()
    await asyncio.gather(*[send() for _ in range(SENDERS)])
    return time.perf_counter() - began


async def rates(number: int) -> dict[str, float]:
    """Tasks a second, by turns."""
    found: dict[str, float] = {}
    for name, options in (("now", {}), ("later", {"countdown": 86_400.0})):
        one_by_one(50, **options)
        await at_once(200, **options)
        each = number // TURNS
        alone = together = 0.0
        for _ in range(TURNS):
            alone += one_by_one(each, **options)
            together += await at_once(each, **options)
        found[name], found[f"{name}_sync"] = number / together, number / alone
        found[f"{name}_times"] = alone / together
    return found


async def handler(seconds: float) -> dict[str, float]:
    """Milliseconds from when a request should come in to its answer, by percentile.

    A handler reads JSON, sends a task with a countdown, and answers, as one of FastAPI's does.
    """
    chance = random.Random(1)
    body = json.dumps({"order": 7, "items": [{"id": n, "name": f"item {n}"} for n in range(20)]})
    took: list[float] = []

    async def handle(number: int, due: float) -> None:
        order = json.loads(body)
        result = await aio.send(tick.s(number), countdown=60.0 + order["order"])
        json.dumps({"id": result.id})
        took.append(time.perf_counter() - due)

    waiting = set()
    began = due = time.perf_counter()
    number = 0
    while due < began + seconds:
        due += chance.expovariate(REQUESTS)
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        task = asyncio.create_task(handle(number, due))
        waiting.add(task)
        task.add_done_callback(waiting.discard)
        number += 1
    await asyncio.gather(*waiting)
    took.sort()
    return {
        "p50": took[len(took) // 2] * 1000,
        "p99": took[len(took) * 99 // 100] * 1000,
    }


async def main(number: int, seconds: float) -> None:
    found = await rates(number)
    found.update(await handler(seconds))
    await aio.aclose(app)
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
