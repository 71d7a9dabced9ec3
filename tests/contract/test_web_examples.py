"""The examples of Django, Flask and FastAPI schedule, move and cancel a task from a request."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import redis

from kombu_toc import TimeoutCenter

from ..meta.test_readme import named
from ..support import nursery
from ..support.servers import Server
from ..support.workers import wait_until

pytestmark = pytest.mark.one_server("the example names one server")

ROOT = Path(__file__).parents[2]

DJANGO = """
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


FLASK = """
import json
import reminders

client = reminders.application.test_client()
ids = [client.post(f"/orders/{n}/reminder?minutes=60").json["id"] for n in range(20)]
moved = client.post(f"/reminders/{ids[0]}/move?minutes=0")
cancelled = client.post(f"/reminders/{ids[1]}/cancel")
print(json.dumps([ids, moved.json, cancelled.json]))
"""

#: The app and the task that the page talks of, and a request.
FASTAPI = """
import asyncio, os
from celery import Celery

app = Celery("shop", broker=os.environ["BROKER"])

@app.task(name="shop.remind")
def remind(order): ...

{block}

async def visit():
    sent = []
    ways = {{"type": "http", "method": "POST", "path": "/orders/7/reminder", "headers": []}}
    async def receive():
        return {{"type": "http.request", "body": b""}}
    async def send(event):
        sent.append(event)
    async with lifespan(api):
        await api({{**ways, "query_string": b"minutes=30"}}, receive, send)
    print(sent[0]["status"], sent[1]["body"].decode())

asyncio.run(visit())
"""


def run(program: str, folder: Path, server: Server) -> str:
    """What a program prints."""
    done = nursery.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "BROKER": server.toc_url},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("folder, visits", [("async_views", DJANGO), ("flask_views", FLASK)])
def test_the_example_schedules_moves_and_cancels(
    server: Server, client: redis.Redis, center: TimeoutCenter, folder: str, visits: str
) -> None:
    printed = run(visits, ROOT / "examples" / folder, server)
    assert printed.count('"') == 2 * 20 + 4
    assert '{"moved": 1}, {"cancelled": 1}' in printed
    left = center.scan("celery").messages
    assert len(left) == 19
    times = sorted(one.time_us for one in left)
    assert times[1] - times[0] > 50 * 60 * 1_000_000


def test_a_task_of_flask_runs_in_the_context_of_its_application(
    server: Server, client: redis.Redis, tmp_path: Path
) -> None:
    folder, log = ROOT / "examples" / "flask_views", tmp_path / "log"
    with log.open("wb") as out:
        worker = nursery.Popen(
            [sys.executable, "-m", "celery", "-A", "reminders", "worker", "-P", "solo"],
            cwd=folder,
            env={**os.environ, "BROKER": server.toc_url, "PYTHONPATH": str(folder)},
            stdout=out,
            stderr=out,
        )
    try:
        run(FLASK, folder, server)
        wait_until(lambda: "order 0 has not been paid" in log.read_text(), 60, log.read_text)
    finally:
        worker.terminate()
        worker.wait(60)


def test_the_example_of_fastapi_sends_from_its_event_loop(
    server: Server, client: redis.Redis, center: TimeoutCenter
) -> None:
    printed = run(FASTAPI.format(block=named("docs/asyncio.md", "FastAPI(")), ROOT, server)
    [waiting] = center.scan("celery").messages
    assert printed.split() == ["200", f'{{"id":"{waiting.id}"}}']
