"""What a timeout center promises beyond an ordinary broker, on real workers."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import psutil
import pytest
import redis

import kombu_toc
from kombu_toc.scripts.call import load

from ..support.inspection import slot_keys
from ..support.proxy import Proxy
from ..support.servers import Server
from ..support.workers import Live, StartWorkers, stop_when_done, wait_until


def at(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


@pytest.mark.alone
def test_countdown_tasks_start_on_time_and_never_early(live: Live) -> None:
    """A3, X2. The bound is loose; benchmarks show how late they are. And W7, X1: four tasks that
    are due at once start at once on four idle one-process workers, again and again."""
    live.start_workers(4, "-c", "1")
    for i in range(100):
        due = at(1 + i * 0.03)
        live.app.tasks["e2e.note"].apply_async((f"sparse-{i}", due.timestamp()), eta=due)
    lateness = [e["at"] - e["due"] for e in live.journal.wait_for("sparse-", 100)]
    assert min(lateness) >= 0
    assert statistics.median(lateness) < 0.1
    rounds, nap = 5, 0.7
    first = at(2)
    for i in range(rounds):
        due = first + timedelta(seconds=i * 1.0)
        live.fill("nap", 4, f"burst-{i}-", nap, due.timestamp(), eta=due)
    entries = live.journal.wait_for("burst-", rounds * 4)
    assert min(e["at"] - e["due"] for e in entries) >= 0
    # What waits for another is late by a nap; benchmarks and other tests bound what is less.
    assert max(e["at"] - e["due"] for e in entries) < nap


def test_tasks_far_beyond_the_visibility_timeout_run_exactly_once(live: Live) -> None:
    """A4, A5: 200 tasks, their ETA three visibility timeouts away."""
    options = {"broker_transport_options": {"visibility_timeout": 1}}
    workers = live.start_workers(2, "-c", "2", **options)
    live.fill("note", 200, "far-", countdown=3)
    live.journal.wait_for("far-", 200)
    stop_when_done(workers, lambda: slot_keys(live.client) == [])
    runs = live.journal.runs("far-")
    assert len(runs) == 200
    assert set(runs.values()) == {1}


def test_scheduled_tasks_cost_a_worker_no_memory(live: Live) -> None:
    """X3: 50,000 tasks an hour ahead."""
    [worker] = live.start_workers(1, "-c", "1")
    live.app.tasks["e2e.add"].delay(1, 1).get(timeout=10)
    main = psutil.Process(worker.container.pid)
    before = main.memory_info().rss
    sent = live.app.tasks["e2e.note"].apply_async(("later",), countdown=3600)
    [one] = live.toc.get(sent.id, topic="celery")
    # The same message under other ids: what apply_async would send, sent faster.
    due = {"body": one.body, "at": one.time_us / 1e6}
    live.toc.put_many("celery", [{"id": f"copy-{i}", **due} for i in range(1, 50_000)])
    live.app.tasks["e2e.add"].delay(1, 1).get(timeout=10)
    time.sleep(1.5)  # the worker has looked into all slots at least once
    assert main.memory_info().rss - before < 2 * 1024 * 1024
    assert live.toc.counts("celery").scheduled == 50_000
    assert live.toc.queues.purge("celery") == 50_000


def test_one_producers_tasks_start_in_the_order_in_which_they_were_sent(live: Live) -> None:
    """K5: 1,000 tasks through one slot to a worker of one process."""
    live.start_workers(1, "-c", "1", "-Q", "one-slot")
    for i in range(1000):
        live.app.tasks["e2e.note"].apply_async((f"order-{i:04}",), queue="one-slot")
    names = [entry["name"] for entry in live.journal.wait_for("order-", 1000, timeout=60)]
    assert names == sorted(names)


@pytest.mark.one_server("one process is the server")
@pytest.mark.parametrize("who", ["worker", pytest.param("server", marks=pytest.mark.nightly)])
def test_tasks_start_in_order_although_somebody_stands_still_now_and_then(
    live: Live, single_server: Server, who: str
) -> None:
    """K5: what has waited too long for the process is given back, and starts before what came
    later all the same."""
    [worker] = live.start_workers(1, "-c", "1", "-Q", "one-slot")
    pid = worker.container.pid if who == "worker" else single_server.pid
    due = at(1)
    for i in range(300):
        live.app.tasks["e2e.note"].apply_async((f"still-{i:04}",), queue="one-slot", eta=due)
    over = threading.Event()

    def stand_still() -> None:
        while not over.wait(0.03):
            os.kill(pid, signal.SIGSTOP)
            over.wait(0.1)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stand_still)
    thread.start()
    try:
        names = [entry["name"] for entry in live.journal.wait_for("still-", 300, timeout=60)]
    finally:
        over.set()
        thread.join()
    assert names == sorted(names)


def test_a_drained_topic_leaves_no_slot_keys(live: Live) -> None:
    """K6"""
    [worker] = live.start_workers(1, "-c", "2")
    for i in range(50):
        live.app.tasks["e2e.note"].apply_async(
            (f"drain-{i}",), countdown=(i % 5) * 0.2, priority=i % 10
        )
    again = live.app.tasks["e2e.again"].delay(2, 0.1)
    live.journal.wait_for("drain-", 50)
    again.get(timeout=10)
    worker.teardown()
    assert slot_keys(live.client) == []


@pytest.mark.parametrize("pings", [100, pytest.param(1000, marks=pytest.mark.nightly)])
def test_remote_control_and_workers_that_come_and_go_leave_nothing(live: Live, pings: int) -> None:
    """K6: many pings, and two workers that end."""
    workers = live.start_workers(2, "-P", "solo", "-E", mingle=True)
    for _ in range(pings):
        assert len(live.app.control.ping(timeout=2, limit=2)) == 2
    for worker in workers:
        worker.teardown()
    left = sorted(key.decode() for key in live.client.keys("*"))
    # What stays was declared to stay: durable queues and their bindings.
    assert [key for key in left if "pidbox" in key or "celeryev" in key] == []
    assert [key for key in left if ":wake:" in key or ":fanout:" in key] == []
    assert slot_keys(live.client) == []
    topics = {name.decode() for name in live.client.hkeys("toc:{toc}:topics")}
    assert topics == {"celery", "urgent", "news", "one-slot"}
    assert live.client.exists("toc:{toc}:expiring") == 0


@pytest.mark.alone
def test_no_short_task_waits_behind_a_long_one_while_a_worker_idles(live: Live) -> None:
    """X1: two one-process workers, default prefetch, one of them busy for 4 seconds."""
    live.start_workers(2, "-c", "1")
    live.begin("nap", "long", 4)
    for i in range(50):
        live.app.tasks["e2e.nap"].apply_async((f"short-{i}", 0.01, time.time()))
        time.sleep(0.05)  # a stream of tasks, not a backlog
    waits = [e["at"] - e["due"] for e in live.journal.wait_for("short-", 50)]
    assert max(waits) < 0.5


def test_an_idle_worker_is_quiet(start_workers: StartWorkers, tmp_path: Path) -> None:
    """Y5: a handful of commands a second, and next to no CPU; it has nothing to count but empty
    pops, which are told once a minute."""
    own = Server(tmp_path).start()  # nobody else's commands are counted
    quiet = ("--without-heartbeat", "--without-gossip")
    [worker] = start_workers(1, "-c", "1", *quiet, broker=own.toc_url)
    with own.client() as client:
        time.sleep(6)  # its start is over, and what it has counted then is told
        main = psutil.Process(worker.container.pid)
        client.config_resetstat()
        cpu, commands, began = _cpu(main), _received(client), time.monotonic()
        time.sleep(6)  # idleness takes time to measure
        seconds = time.monotonic() - began
        assert (_cpu(main) - cpu) / seconds < 0.03
        assert (_received(client) - commands) / seconds < 5
        assert "cmdstat_hincrby" not in client.info("commandstats")
    own.stop()


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _received(client: redis.Redis) -> int:
    """Commands that came over connections; those within scripts do not."""
    stats = client.info("commandstats")
    outer = ("evalsha", "eval", "bzpopmin", "xread", "zadd", "hget", "ping", "xrevrange")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in outer)


@pytest.mark.one_server("the proxy that loses the reply stands before one server")
def test_a_retry_survives_although_the_ack_of_the_run_before_is_repeated(live: Live) -> None:
    """The task is acknowledged when it starts, the connection is cut before the reply has come, and
    the task is retried, in an hour, before the worker says again what it is owed."""
    sha = load("ack").sha.encode()
    with Proxy(live.server.port) as proxy:
        [worker] = live.start_workers(1, "-c", "1", broker=proxy.toc_url)
        again = live.app.tasks["e2e.again"]
        again.delay(1, 0.01)
        live.journal.wait_for("again-", 2)  # what the pool's process needs to publish is loaded
        wait_until(lambda: not slot_keys(live.client))  # and no other ack is on its way
        live.client.config_set("slowlog-max-len", 10_000)
        live.client.config_set("slowlog-log-slower-than", 0)
        try:
            lost = proxy.drop_replies(sha)
            result = again.delay(1, 3600)
            assert lost.wait(10)

            def acks() -> list[bytes]:
                entries = [entry["command"] for entry in live.client.slowlog_get(10_000)]
                return [one for one in entries if sha in one and result.id.encode() in one]

            wait_until(lambda: len(acks()) == 2, what=acks)
        finally:
            live.client.config_set("slowlog-log-slower-than", 10_000)
        center = kombu_toc.TimeoutCenter(live.client)
        assert [found.state for found in center.get(result.id, topic="celery")] == [
            kombu_toc.WAITING
        ]
        worker.teardown()
