"""Leases: renewed while the worker lives, whatever its tasks do; ended while it stands still."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kombu import Queue

import kombu_toc

from ..support.inspection import slot_keys
from ..support.nodes import Worker
from ..support.servers import Server
from ..support.tasks import make_app
from ..support.workers import ALONE, EACH_POOL, POOLS, Live, wait_until

VISIBILITY = 1.0


def stop(*workers: Worker) -> None:
    """All at once: it takes each some seconds."""
    with ThreadPoolExecutor() as threads:
        list(threads.map(Worker.teardown, workers))


@pytest.mark.parametrize("pool", EACH_POOL)
def test_a_task_that_blocks_its_process_runs_once_and_so_does_what_waits_behind_it(
    live: Live, tmp_path: Path, pool: str
) -> None:
    """A5: four leases long, in C code and in a loop, while another worker idles beside it.

    The visibility timeout is the connection's in one queue and the topic's own in the other.
    """
    with live.app.connection_for_write() as connection:
        Queue("brief", queue_arguments={"x-visibility": VISIBILITY})(connection).declare()
    ways = {"celery": "loop", "brief": "sleep"}
    for queue, how in ways.items():
        live.app.tasks["e2e.late_ack"].apply_async((f"first-{how}", 0.1), queue=queue)
        stalled = (f"stalled-{how}", 4 * VISIBILITY, how, str(tmp_path / "heard"))
        live.app.tasks["e2e.stall"].apply_async(stalled, queue=queue)
        live.fill("late_ack", 2, f"behind-{how}-", 0, queue=queue)
    options = (*POOLS[pool][:2], "-c", "1", *ALONE)
    short = {"broker_transport_options": {"visibility_timeout": VISIBILITY}}
    [beside] = live.start_workers(1, "-P", "solo", "-Q", "urgent", *ALONE, **short)
    with ThreadPoolExecutor() as threads:  # both at once: each begins to stall as it starts
        made = [
            threads.submit(live.start_workers, 1, *options, "-Q", "brief"),
            threads.submit(live.start_workers, 1, *options, "-Q", "celery", **short),
        ]
    busy = [worker for one in made for worker in one.result()]
    for how in ways.values():
        live.journal.wait_for(f"stalled-{how}", 1)
    # What waits behind it is given back, but for a solo worker, whose loop stands still: only a
    # lease that ends gives that to another.
    for queue in ways:
        wait_until(lambda queue=queue: live.toc.counts(queue).in_flight >= 1, what=queue)
        [reply] = live.app.control.add_consumer(queue, destination=[beside.hostname()], reply=True)
        assert "ok" in reply[beside.hostname()]
    (tmp_path / "heard").touch()
    live.journal.wait_for("", 16)
    runs = live.journal.runs()
    assert set(runs.values()) == {1}, runs
    assert len(runs) == 16
    assert not any("may be delivered again" in worker.logs() for worker in busy)
    stop(beside, *busy)


def test_a_solo_worker_settles_each_task_before_it_starts_the_next(live: Live) -> None:
    """A5: if it is killed, no task that has ended runs again."""
    live.fill("late_ack", 5, "in-turn-", 0.4)
    live.start_workers(1, "-P", "solo", *ALONE)
    for i in range(5):
        wait_until(
            lambda i=i: any(e["name"] == f"in-turn-{i}" for e in live.journal.entries()), what=i
        )
        counts = live.toc.counts("celery")
        assert counts.in_flight + counts.waiting == 5 - i


def suspend(worker: Worker) -> Callable[[], None]:
    """Stop a worker's processes as SIGSTOP does; returns what lets them go on."""
    processes = worker.container.processes()
    for process in processes:
        process.suspend()

    def resume() -> None:
        for process in processes:
            process.resume()

    return resume


def test_a_killed_workers_message_comes_back_to_whoever_asks_first_afterwards(live: Live) -> None:
    """A5, Y3: nobody has asked since the worker was killed, and the process that asks is new."""
    visibility = 6.0
    options = {"broker_transport_options": {"visibility_timeout": visibility}}
    [victim] = live.start_workers(1, "-P", "solo", *ALONE, **options)
    task = live.begin("late_ack", "killed", 60)
    victim.container.kill("SIGKILL")
    time.sleep(visibility + 0.5)  # its lease ends
    [looked, back] = [time.monotonic(), []]
    wait_until(
        lambda: back.extend(live.toc.pop("celery").messages) or back, 10, "it never came back"
    )
    assert time.monotonic() - looked < 3
    assert back[0].id == task.id


@pytest.mark.nightly(
    guarded_by="tests/e2e/test_reconnect.py::"
    "test_a_task_runs_once_although_the_server_was_away_for_longer_than_its_lease"
)
@pytest.mark.parametrize("how", ["frozen", "restarted"])
def test_a_process_that_asks_first_after_the_server_was_away_takes_nothing_from_a_live_worker(
    live: Live, tmp_path: Path, how: str
) -> None:
    """A5, X10: nobody but the worker has asked before, and its lease has ended meanwhile."""
    visibility = 6.0
    own = Server(tmp_path, "--appendonly", "yes", "--appendfsync", "always").start()
    try:
        options = {"broker_transport_options": {"visibility_timeout": visibility}}
        live.start_workers(1, "-P", "solo", *ALONE, broker=own.toc_url, **options)
        with make_app(own.toc_url, "disabled://") as app:
            app.tasks["e2e.late_ack"].delay("once", 3 * visibility)
        [began] = live.journal.wait_for("once", 1)
        if how == "frozen":
            os.kill(own.pid, signal.SIGSTOP)
        else:
            own.stop()
        time.sleep(visibility + 0.5)  # the lease ends
        if how == "frozen":
            os.kill(own.pid, signal.SIGCONT)
        else:
            own.start()
        center = kombu_toc.center_for(own.toc_url)
        while time.time() < began["at"] + 3 * visibility:
            assert center.pop("celery").messages == []
            time.sleep(0.1)  # as one who looks now and then
        live.journal.wait_for("once-done", 1)
        wait_until(lambda: center.counts("celery").in_flight == 0)
        assert len(live.journal.entries()) == 2
        center.client.close()
    finally:
        own.stop()


SUSPENDED = {"prefork": ("-P", "prefork", "-c", "1"), "solo": ("-P", "solo")}


@pytest.mark.parametrize("pool", list(SUSPENDED))
def test_the_late_acknowledgement_of_a_suspended_worker_does_no_harm(live: Live, pool: str) -> None:
    """A5, Y4: another worker has taken its message meanwhile, and is executing it."""
    options = {"broker_transport_options": {"visibility_timeout": VISIBILITY}}
    [worker] = live.start_workers(1, *SUSPENDED[pool], *ALONE, **options)
    [beside] = live.start_workers(1, "-P", "solo", "-Q", "urgent", *ALONE, **options)
    live.app.tasks["e2e.late_ack"].delay("twice", 3 * VISIBILITY)
    [first] = live.journal.wait_for("twice", 1)
    resume = suspend(worker)
    try:
        live.app.control.add_consumer("celery", destination=[beside.hostname()])
        [_, second] = live.journal.wait_for("twice", 2)
        time.sleep(max(first["at"] + 3 * VISIBILITY - time.time(), 0))  # suspended so long
    finally:
        resume()
    assert second["pid"] == beside.container.pid
    live.journal.wait_for("twice-done", 2)
    live.app.tasks["e2e.late_ack"].delay("afterwards", 0)
    live.journal.wait_for("afterwards-done", 1)
    wait_until(lambda: slot_keys(live.client) == [], what=lambda: slot_keys(live.client))
    runs = live.journal.runs()
    assert runs == {"twice": 2, "twice-done": 2, "afterwards": 1, "afterwards-done": 1}
    assert "Traceback" not in worker.logs() + beside.logs()
    stop(worker, beside)


@pytest.mark.parametrize("pool", list(SUSPENDED))
def test_the_late_acknowledgement_of_a_suspended_worker_cancels_a_second_run(
    live: Live, brisk: kombu_toc.TimeoutCenter, tmp_path: Path, pool: str
) -> None:
    """A5: its message waits again, and nobody has taken it."""
    options = {"broker_transport_options": {"visibility_timeout": VISIBILITY}}
    [worker] = live.start_workers(1, *SUSPENDED[pool], *ALONE, **options)
    ends = tmp_path / "ends"
    sent = live.begin("stall", "once", 0, "sleep", str(ends))
    resume = suspend(worker)
    try:
        wait_until(lambda: brisk.pop("celery", 0).rolled_back != [], what="its lease has not ended")
        assert live.toc.counts("celery").waiting == 1
    finally:
        resume()
    wait_until(lambda: "may be delivered again" in worker.logs(), what=worker.logs)
    ends.touch()
    live.journal.wait_for("once-done", 1)
    [another] = live.start_workers(1, "-P", "solo", *ALONE, **options)
    wait_until(lambda: slot_keys(live.client) == [], what=lambda: slot_keys(live.client))
    live.begin("note", "afterwards")
    runs = live.journal.runs()
    assert runs == {"once": 1, "once-done": 1, "afterwards": 1}
    line = f"may be delivered again: {sent.id} of celery (task e2e.stall)"
    assert worker.logs().count("may be delivered again") == worker.logs().count(line) == 1
    stop(worker, another)


def test_a_worker_that_was_suspended_does_not_take_its_own_messages_again(live: Live) -> None:
    """A5: nobody else was there, and it has processes to spare."""
    options = {"broker_transport_options": {"visibility_timeout": VISIBILITY}}
    [worker] = live.start_workers(1, "-P", "prefork", "-c", "4", *ALONE, **options)
    live.fill("late_ack", 2, "own-", 5 * VISIBILITY)
    live.journal.wait_for("own-", 2)
    resume = suspend(worker)
    time.sleep(2 * VISIBILITY)  # its leases end
    resume()
    live.journal.wait_for("own-", 4)
    wait_until(lambda: slot_keys(live.client) == [], what=lambda: slot_keys(live.client))
    runs = live.journal.runs("own-")
    assert set(runs.values()) == {1}, runs
