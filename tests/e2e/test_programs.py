"""K1: Celery's own programs and the rest of remote control; X7: the embedded server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
from celery import Celery

from kombu_toc import EmbeddedServer

from ..support import nursery
from ..support.nodes import ROOT
from ..support.workers import Live, wait_until


def test_celery_events_dump_shows_tasks_with_their_eta(live: Live, tmp_path: Path) -> None:
    live.start_workers(1, "-c", "1", "-E")
    command = [sys.executable, "-m", "celery", "-b", live.server.toc_url, "events", "--dump"]
    shown = (tmp_path / "dump").read_text
    with open(tmp_path / "dump", "wb") as dump:
        process = nursery.Popen(
            command, cwd=ROOT, stdout=dump, stderr=dump, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
        try:
            wait_until(lambda: "heartbeat" in shown(), 30, shown)  # one comes every two seconds
            result = live.app.tasks["e2e.add"].apply_async((1, 2), countdown=0.5)
            assert result.get(timeout=10) == 3
            wait_until(lambda: "task succeeded" in shown(), 30, shown)
        finally:
            process.terminate()
            process.wait(10)
    [received] = [line for line in shown().splitlines() if "task received" in line]
    assert result.id in received
    assert "eta=None" not in received


def test_beat_sends_periodic_tasks(live: Live, tmp_path: Path) -> None:
    schedule = {"every": {"task": "e2e.note", "schedule": 0.5, "args": ["tick"]}}
    beat = ("-B", "-s", str(tmp_path / "schedule"))
    live.start_workers(1, "-c", "1", *beat, beat_schedule=schedule)
    assert len(live.journal.wait_for("tick", 4)) >= 4


def test_the_pool_grows_and_shrinks(live: Live) -> None:
    [worker] = live.start_workers(1, "-c", "1")
    name = worker.hostname()
    [answer] = live.app.control.pool_grow(2, destination=[name], reply=True, timeout=5)
    assert "ok" in answer[name]
    for attempt in range(10):  # new processes take a while until they take tasks
        results = [live.app.tasks["e2e.nap"].delay(f"grown-{attempt}-{i}", 0.5) for i in range(3)]
        times = [result.get(timeout=10) for result in results]
        if max(times) - min(times) < 0.4:
            break
    else:
        raise AssertionError("the three processes never worked side by side")
    [answer] = live.app.control.pool_shrink(1, destination=[name], reply=True, timeout=5)
    assert "ok" in answer[name]
    assert live.app.tasks["e2e.add"].delay(1, 1).get(timeout=10) == 2


def test_disabled_prefetch_takes_only_what_can_start(live: Live) -> None:
    live.start_workers(1, "-c", "1", "--disable-prefetch")
    live.fill("nap", 5, "single-", 0.4)
    live.journal.wait_for("single-", 1)
    time.sleep(0.1)  # what would be prefetched would be so by now
    assert live.toc.counts("celery").ready == 4
    live.journal.wait_for("single-", 5)


def test_early_and_late_acknowledgement_both_drain(live: Live) -> None:
    live.start_workers(1, "-c", "2", task_acks_late=True)
    for i in range(20):
        live.app.tasks["e2e.note"].delay(f"late-{i}")
        live.app.tasks["e2e.late_ack"].delay(f"late-ack-{i}", 0.01)
    live.journal.wait_for("late-ack-", 40)
    wait_until(
        lambda: live.toc.counts("celery") == (0, 0, 0, 0), 5, lambda: live.toc.counts("celery")
    )


def test_a_killed_workers_messages_come_back_within_the_visibility_timeout(live: Live) -> None:
    """A5, W6"""
    options = {"broker_transport_options": {"visibility_timeout": 1}}
    [victim] = live.start_workers(1, "-P", "solo", **options)
    live.begin("late_ack", "killed", 3)
    victim.container.kill("SIGKILL")
    began = time.monotonic()
    live.start_workers(1, "-P", "solo", **options)
    live.journal.wait_for("killed", 2, timeout=10)
    assert time.monotonic() - began < 8


def embedded_app(tmp_path: Path) -> tuple[Celery, str]:
    from ..support.tasks import make_app

    broker = f"toc+embedded://{tmp_path / 'data'}"
    EmbeddedServer.join(str(tmp_path / "data"))
    # No results: Celery's would look for the server long after it is gone.
    return make_app(broker, "disabled://"), broker


def test_an_embedded_server_serves_producer_and_worker(tmp_path: Path, live: Live) -> None:
    """X7"""
    app, broker = embedded_app(tmp_path)
    try:
        live.start_workers(1, "-c", "1", broker=broker)
        sent = time.time()
        app.tasks["e2e.note"].apply_async(("embedded",), countdown=0.5)
        assert live.journal.wait_for("embedded", 1)[0]["at"] - sent >= 0.5
    finally:
        app.close()
        EmbeddedServer.join(str(tmp_path / "data")).leave()


JOIN = """
import sys, time
from kombu_toc import EmbeddedServer, TimeoutCenter
server = EmbeddedServer.join(sys.argv[1])
client = server.client()
client.incr("joined")
print(client.info("server")["process_id"], flush=True)
sys.stdin.read()
"""


def test_the_embedded_server_stops_with_the_last_process_and_keeps_its_data(tmp_path: Path) -> None:
    """Also when that process is killed; the next one finds the data again. Who has started it and
    ends is warned of nothing."""
    directory = str(tmp_path / "data")

    def join() -> tuple[subprocess.Popen[str], int]:
        process = subprocess.Popen(
            [sys.executable, "-W", "default::ResourceWarning", "-c", JOIN, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        return process, int(process.stdout.readline())

    first, pid = join()
    second, same = join()
    assert pid == same
    assert first.communicate("") == ("", "")
    assert psutil.pid_exists(pid)
    second.kill()
    second.communicate()
    wait_until(lambda: not psutil.pid_exists(pid), 10, "the server outlives its users")
    server = EmbeddedServer.join(directory)
    try:
        assert server.client().get("joined") == b"2"
        assert server.client().config_get("appendonly") == {"appendonly": "yes"}
    finally:
        server.leave()


def test_who_joins_an_embedded_server_finds_it_with_its_data_read(tmp_path: Path) -> None:
    directory = str(tmp_path / "data")
    server = EmbeddedServer.join(directory)
    with server.client() as client:
        client.eval("for i = 1, 300000 do redis.call('SET', 'key' .. i, i) end", 0)
        pid = client.info("server")["process_id"]
    server.leave()
    wait_until(lambda: not psutil.pid_exists(pid))
    again = EmbeddedServer.join(directory)
    try:
        with again.client() as client:
            assert client.dbsize() == 300000
    finally:
        again.leave()
