"""examples/async_views does what it says, in one event loop, as an ASGI server runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from kombu_toc import TimeoutCenter

from ..support.servers import Server

pytestmark = pytest.mark.one_server("the example names one server")

FOLDER = Path(__file__).parents[2] / "examples" / "async_views"

VISITS = """
import asyncio, json
import reminders
from django.test import AsyncClient
from celery_toc import aio

async def visit():
    client = AsyncClient()
    many = [client.post(f"/orders/{n}/reminder?minutes=60") for n in range(20)]
    ids = [answer.json()["id"] for answer in await asyncio.gather(*many)]
    moved = await client.post(f"/reminders/{ids[0]}/move?minutes=5")
    cancelled = await client.post(f"/reminders/{ids[1]}/cancel")
    await aio.aclose(reminders.app)
    print(json.dumps([ids, moved.json(), cancelled.json()]))

asyncio.run(visit())
"""


def test_the_example_schedules_moves_and_cancels(
    server: Server, client: redis.Redis, center: TimeoutCenter
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", VISITS],
        cwd=FOLDER,
        env={**os.environ, "BROKER": server.toc_url},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"') == 2 * 20 + 4
    assert '{"moved": 1}, {"cancelled": 1}' in done.stdout
    assert center.counts("celery").scheduled == 19
    times = sorted(one.time_us for one in center.scan("celery").messages)
    assert times[1] - times[0] > 50 * 60 * 1_000_000
