"""K7, A5: what a pool has been given runs once, however its worker ends or loses its connection.

Processes of a pool are stopped here for a moment: that is how a machine with much to do looks
to a worker, only longer.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import psutil
import pytest
import redis

import kombu_toc

from ..e2e.test_reconnect import cut_connections
from ..support.inspection import slot_keys
from ..support.nodes import Worker
from ..support.proxy import Proxy
from ..support.workers import Journal, Live, wait_until


def pool_of(worker: Worker) -> list[int]:
    """Its processes. They say that they are up while it mingles, which takes a second."""
    return [child.pid for child in psutil.Process(worker.container.pid).children()]


def send_to_all(pids: list[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def wait_until_in_flight(toc: kombu_toc.TimeoutCenter, number: int) -> None:
    wait_until(lambda: toc.counts("celery").in_flight >= number)
    time.sleep(0.3)  # and writes them to its processes, of which nobody can tell


def wait_until_empty(client: redis.Redis) -> None:
    wait_until(lambda: not slot_keys(client), what=lambda: slot_keys(client))


def assert_each_ran_once(journal: Journal) -> None:
    assert journal.runs("sent-") == Counter(["sent-0", "sent-0-done", "sent-1", "sent-1-done"])


def test_what_processes_were_sent_runs_once_although_their_worker_stops(live: Live) -> None:
    [worker] = live.start_workers(1, "-c", "2", mingle=True)
    processes = pool_of(worker)
    send_to_all(processes, signal.SIGSTOP)
    live.fill("late_ack", 2, "sent-", 0.1)
    wait_until_in_flight(live.toc, 2)
    os.kill(worker.container.pid, signal.SIGTERM)
    time.sleep(0.3)  # the worker is shutting down
    send_to_all(processes, signal.SIGCONT)
    worker.teardown()
    assert_each_ran_once(live.journal)
    assert slot_keys(live.client) == []


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(signal.SIGCONT, id="slow"),
        pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.nightly),
    ],
)
def test_what_processes_were_sent_runs_once_although_the_connection_is_cut(
    live: Live, end: signal.Signals
) -> None:
    """Killed processes have not started it; those that replace them do."""
    [worker] = live.start_workers(
        1, "-c", "2", mingle=True, broker_transport_options={"visibility_timeout": 2}
    )
    processes = pool_of(worker)
    send_to_all(processes, signal.SIGSTOP)
    live.fill("late_ack", 2, "sent-", 0.1)
    wait_until_in_flight(live.toc, 2)
    if end is signal.SIGKILL:
        send_to_all(processes, end)
    connected = worker.logs().count("Connected to")
    cut_connections(live.client)
    wait_until(lambda: worker.logs().count("Connected to") > connected, what=worker.logs)
    if end is signal.SIGCONT:
        send_to_all(processes, end)
    live.journal.wait_for("sent-", 4)
    wait_until_empty(live.client)
    assert_each_ran_once(live.journal)


def test_what_a_killed_process_was_sent_runs_once_although_the_connection_is_cut(
    live: Live,
) -> None:
    """After a reconnect, Celery notices only within five seconds that a process was killed, and
    writes to its pipe until then."""
    [worker] = live.start_workers(
        1, "-c", "2", mingle=True, broker_transport_options={"visibility_timeout": 2}
    )
    cut_connections(live.client)
    live.app.tasks["e2e.late_ack"].delay("connected", 0)
    live.journal.wait_for("connected-done", 1)
    send_to_all(pool_of(worker)[:1], signal.SIGKILL)
    live.fill("late_ack", 2, "sent-", 0.1)
    # What was sent to a process that lives may have been executed by now.
    wait_until(lambda: live.toc.counts("celery").waiting == 0)
    cut_connections(live.client)
    live.journal.wait_for("sent-", 4)
    wait_until_empty(live.client)
    assert_each_ran_once(live.journal)


def test_a_task_that_ends_while_the_connection_is_given_up_runs_once(
    live: Live, proxy: Proxy
) -> None:
    [worker] = live.start_workers(1, "-P", "threads", "-c", "1", broker=proxy.toc_url)
    live.begin("late_ack", "ending", 1)
    proxy.cut()
    proxy.freeze()  # whoever closes the connection waits for an answer
    live.journal.wait_for("ending-done", 1)
    time.sleep(0.3)  # the task has ended, for its worker too
    proxy.thaw()
    wait_until_empty(live.client)
    assert len(live.journal.entries("ending")) == 2
    live.begin("note", "afterwards")
    worker.teardown()  # while there is a proxy: Celery's mingle would look for it for ever


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_stopping_worker_acknowledges_what_has_ended_while_another_task_goes_on(
    live: Live, pool: str
) -> None:
    """Else its lease ends, and another worker runs it again."""
    [worker] = live.start_workers(
        1, "-P", pool, "-c", "2", broker_transport_options={"visibility_timeout": 1}
    )
    live.app.tasks["e2e.late_ack"].delay("long", 5)
    live.begin("late_ack", "short", 1)
    live.journal.wait_for("long", 1)
    os.kill(worker.container.pid, signal.SIGTERM)
    live.journal.wait_for("short-done", 1)
    # Celery looks for results every half second then.
    wait_until(
        lambda: live.toc.counts("celery").in_flight < 2, 3, "it is acknowledged when it ends"
    )
    assert live.journal.entries("long-done") == []
    worker.teardown()
    assert live.toc.counts("celery").in_flight == 0


def test_what_a_worker_has_loaded_is_not_looked_through_for_garbage(live: Live) -> None:
    """That holds up a due task for tens of milliseconds, now and then."""
    live.start_workers(1, "-P", "threads", execute=True)
    assert live.app.tasks["e2e.stamp"].delay().get(timeout=30)["kept"] > 10_000
