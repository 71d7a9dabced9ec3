"""What workers that end, and pools that shrink, do with messages: those that they had not begun
return at once and unchanged, those that they had are settled as Celery says.

Leases last ten minutes here: what comes back in a second was given back.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import celery.worker
import pytest
from celery import Celery

import kombu_toc

from ..support.inspection import slot_keys
from ..support.nodes import Worker
from ..support.workers import EACH_POOL, POOLS, QUICK, Journal, Live, StartWorkers, wait_until

#: Pools of one process, thread or greenlet.
ONE_AT_A_TIME = {
    name: ("-P", "solo") if name == "solo" else ("-P", name, "-c", "1") for name in POOLS
}

#: Pools whose workers could be given more than they can start: greenlets never are.
QUEUING = ("prefork", "threads", "solo")


def wait_for_what_is_kept(toc: kombu_toc.TimeoutCenter, pool: str, executing: int) -> None:
    """Until a worker has no more of "next-0" to "next-2" than it keeps while it executes "long".

    The first task was short, so it took some. It gives them back when they have waited for a
    moment, but for a solo worker, whose loop stands still.
    """

    def kept() -> bool:
        in_flight = toc.counts("celery").in_flight
        return in_flight >= executing if pool == "solo" else in_flight == executing

    wait_until(kept)


#: Seconds within which another worker has to start what was given back.
AT_ONCE = 1.0

#: Before 5.5, Celery acknowledges what a cold shutdown killed, as it does a lost process's task.
KILLED_RETURNS = hasattr(celery.worker.WorkController, "wait_for_soft_shutdown")

COLD_AT_NIGHT = pytest.mark.nightly(
    guarded_by="tests/e2e/test_shutdown.py::"
    "test_a_cold_shutdown_gives_back_at_once_what_was_not_begun"
)

SOFT = pytest.mark.skipif(not KILLED_RETURNS, reason="Celery has a soft shutdown since 5.5")


def start(workers: StartWorkers, *options: str, **settings: Any) -> Worker:
    """A worker with long leases and a prefetch window of four tasks a process.

    transport: more of the transport's options
    """
    transport = {"visibility_timeout": 600, **settings.pop("transport", {})}
    settings.setdefault("worker_prefetch_multiplier", 4)
    [worker] = workers(1, *QUICK, *options, broker_transport_options=transport, **settings)
    return worker


def start_busy(
    workers: StartWorkers, app: Celery, journal: Journal, *options: str, **settings: Any
) -> Worker:
    """A worker that executes "long", and has taken "next-0" to "next-2" if it queues any.

    What has been due for a while when a task ends is taken as far as the window goes: so there
    is a backlog before the worker comes, and a first task in it that ends.
    """
    seconds = settings.pop("seconds", 2.0)
    app.tasks["e2e.told"].delay("first")
    app.tasks["e2e.told"].delay("long", seconds)
    for i in range(3):
        app.tasks["e2e.told"].delay(f"next-{i}")
    worker = start(workers, *options, **settings)
    journal.wait_for("long", 1)
    return worker


def start_aside(workers: StartWorkers) -> Worker:
    """Another worker, which is ready and takes nothing before :func:`let_in`."""
    return start(workers, "-P", "solo", "-Q", "aside")


def let_in(app: Celery, other: Worker) -> None:
    """Have that worker take tasks too."""
    told = {"destination": [other.hostname()], "reply": True, "timeout": 5}
    [reply] = app.control.add_consumer("celery", **told)
    assert "ok" in reply[other.hostname()]


def tell(worker: Worker, number: int) -> float:
    """Send a worker's main process a signal; return when."""
    os.kill(worker.container.pid, number)
    return time.time()


def ended(worker: Worker, seconds: float = 20) -> bool:
    """Whether a worker ends by itself in that time."""
    deadline = time.monotonic() + seconds
    while worker.container.status == "running" and time.monotonic() < deadline:
        time.sleep(0.02)  # nothing tells when a process ends
    return worker.container.status == "exited"


def assert_returned_at_once(journal: Journal, other: Worker, since: float) -> None:
    """The other worker starts "next-0" to "next-2", and sees no trace of the first."""
    journal.wait_for("next-", 6)
    entries = [e for e in journal.entries("next-") if not e["name"].endswith("-done")]
    assert {e["worker"] for e in entries} == {other.hostname()}
    assert max(e["at"] for e in entries) - since < AT_ONCE
    assert_unchanged(entries)


def assert_unchanged(entries: list[dict[str, Any]]) -> None:
    assert {(e["redelivered"], e["count"]) for e in entries} == {(False, None)}, entries


def assert_each_once(journal: Journal) -> None:
    assert set(journal.runs().values()) == {1}, journal.runs()


@pytest.mark.parametrize("pool", EACH_POOL)
def test_a_warm_shutdown_gives_back_at_once_what_was_not_begun(live: Live, pool: str) -> None:
    """However long it waits for what was; that is acknowledged, once, when it is done."""
    other = start_aside(live.start_workers)
    worker = start_busy(
        live.start_workers, live.app, live.journal, *ONE_AT_A_TIME[pool], task_acks_late=True
    )
    wait_for_what_is_kept(live.toc, pool, 1)
    let_in(live.app, other)
    assert_returned_at_once(live.journal, other, tell(worker, signal.SIGTERM))
    assert not live.journal.entries("long-done")
    assert ended(worker)
    assert live.journal.entries("long-done")
    assert_each_once(live.journal)
    assert slot_keys(live.client) == []


@pytest.mark.parametrize(
    ("pool", "late"),
    [("prefork", True), *(pytest.param(pool, False, marks=pytest.mark.nightly) for pool in POOLS)],
)
def test_a_cold_shutdown_gives_back_at_once_what_was_not_begun(
    live: Live, pool: str, late: bool
) -> None:
    """What was is killed in prefork's processes, and returns if it is acknowledged late."""
    other = start_aside(live.start_workers)
    worker = start_busy(
        live.start_workers, live.app, live.journal, *ONE_AT_A_TIME[pool], task_acks_late=late
    )
    wait_for_what_is_kept(live.toc, pool, int(late))
    let_in(live.app, other)
    assert_returned_at_once(live.journal, other, tell(worker, signal.SIGQUIT))
    assert ended(worker)
    if pool == "prefork" and late and KILLED_RETURNS:
        live.journal.wait_for("long-done", 1)
        expected = {"long": 2, "long-done": 1}
        told = [
            (e["redelivered"], e["count"]) for e in live.journal.entries("long") if "count" in e
        ]
        assert told == [(False, None), (True, None)], "it had begun, and nothing has failed"
    elif pool == "prefork":
        expected = {"long": 1}
    else:  # Celery cannot kill threads, and is not at one with itself about the others
        expected = {name: 1 for name in live.journal.runs() if name.startswith("long")}
    counted = live.journal.runs()
    assert {name: counted[name] for name in counted if name.startswith("long")} == expected
    wait_until(lambda: slot_keys(live.client) == [])


@SOFT
def test_a_cold_shutdown_ends_although_a_process_has_been_written_half_a_task(live: Live) -> None:
    """What it is told next it would take for the other half, and wait for the rest."""
    worker = start(live.start_workers, "-c", "1", task_acks_late=True)
    live.app.tasks["e2e.told"].delay("first")
    [entry] = live.journal.wait_for("first-done", 1)
    wait_until(lambda: slot_keys(live.client) == [])
    os.kill(entry["pid"], signal.SIGSTOP)
    live.app.tasks["e2e.told"].delay(f"large-{'x' * 200_000}")
    wait_until(lambda: worker.logs().count(" received") == 2)
    # Its event loop answers when it has written what a pipe holds.
    assert live.app.control.ping([worker.hostname()], timeout=10)
    tell(worker, signal.SIGQUIT)
    wait_until(lambda: "Ctrl+C" in worker.logs())
    os.kill(entry["pid"], signal.SIGCONT)
    assert ended(worker)
    start(live.start_workers, "-P", "solo")
    wait_until(lambda: slot_keys(live.client) == [])
    assert_each_once(live.journal)


@SOFT
@pytest.mark.parametrize("pool", [pytest.param("gevent", marks=pytest.mark.every_pool), "eventlet"])
def test_a_greenlet_that_a_cold_shutdown_kills_is_not_acknowledged(live: Live, pool: str) -> None:
    """The signal is handled in whichever greenlet runs: most of the time one of the tasks."""
    worker = start(live.start_workers, *POOLS[pool])
    live.fill("toil", 3, "toil-", 6)
    live.journal.wait_for("toil-", 3)
    tell(worker, signal.SIGQUIT)
    assert ended(worker, 40)
    start(live.start_workers, *POOLS["prefork"])
    wait_until(lambda: slot_keys(live.client) == [])
    assert set(live.journal.runs()) == {f"toil-{n}{end}" for n in range(3) for end in ("", "-done")}


@SOFT
@COLD_AT_NIGHT
@pytest.mark.parametrize("pool", QUEUING)
def test_a_soft_shutdown_gives_back_at_once_what_was_not_begun(
    live: Live, monkeypatch: pytest.MonkeyPatch, pool: str
) -> None:
    """Not after the seconds in which what was begun may still end."""
    monkeypatch.setenv("REMAP_SIGTERM", "SIGQUIT")
    settings = {"task_acks_late": True, "worker_soft_shutdown_timeout": 2.5}
    other = start_aside(live.start_workers)
    worker = start_busy(
        live.start_workers, live.app, live.journal, *ONE_AT_A_TIME[pool], seconds=2.5, **settings
    )
    wait_for_what_is_kept(live.toc, pool, 1)
    let_in(live.app, other)
    assert_returned_at_once(live.journal, other, tell(worker, signal.SIGTERM))
    assert ended(worker)
    if pool != "solo":  # its task cannot go on while Celery waits for it in a signal handler
        live.journal.wait_for("long-done", 1)
        assert_each_once(live.journal)
    wait_until(lambda: slot_keys(live.client) == [])


@SOFT
@COLD_AT_NIGHT
@pytest.mark.parametrize("remap", [False, True], ids=["SIGQUIT", "REMAP_SIGTERM"])
def test_a_task_that_has_succeeded_does_not_run_again_after_a_cold_shutdown(
    live: Live, monkeypatch: pytest.MonkeyPatch, remap: bool
) -> None:
    """With worker_deduplicate_successful_tasks, which asks whether a task is delivered again."""
    if remap:
        monkeypatch.setenv("REMAP_SIGTERM", "SIGQUIT")
    worker = start(live.start_workers, "-c", "1")
    sent = live.app.tasks["e2e.linger"].delay("once")
    sent.get(timeout=20)
    tell(worker, signal.SIGTERM if remap else signal.SIGQUIT)
    assert ended(worker)
    assert slot_keys(live.client), "it was not acknowledged"
    start(live.start_workers, "-P", "solo", worker_deduplicate_successful_tasks=True)
    wait_until(lambda: slot_keys(live.client) == [])
    assert len(live.journal.entries("once")) == 1


@SOFT
@COLD_AT_NIGHT
def test_a_second_ctrl_c_gives_back_what_was_begun_too(live: Live) -> None:
    """The first is a warm shutdown, the second a cold one."""
    other = start_aside(live.start_workers)
    worker = start_busy(
        live.start_workers, live.app, live.journal, "-c", "1", seconds=6, task_acks_late=True
    )
    wait_until(lambda: live.toc.counts("celery").in_flight == 1)
    let_in(live.app, other)
    assert_returned_at_once(live.journal, other, tell(worker, signal.SIGINT))
    told_at = tell(worker, signal.SIGINT)
    [_, second] = live.journal.wait_for("long", 2)
    assert second["worker"] == other.hostname()
    # Celery waits for the end of the process that it has killed.
    assert second["at"] - told_at < AT_ONCE + 2
    assert ended(worker)
    other.container.kill()


@pytest.mark.alone
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGQUIT, marks=pytest.mark.nightly)]
)
def test_what_a_stopped_worker_holds_or_has_claimed_starts_on_time_elsewhere(
    live: Live, number: int
) -> None:
    """A message that it had fetched ahead of its time, and the promise to fetch another."""
    # The one fetches two seconds ahead; the other never looks by itself.
    worker = start(live.start_workers, "-c", "2", transport={"toc_lookahead": 2.0})
    live.app.tasks["e2e.told"].apply_async(("claimed",), countdown=4)
    wait_until(lambda: live.client.zcard("toc:{toc}:wake:celery") == 0)
    other = start(live.start_workers, "-P", "solo", transport={"toc_poll_interval": 60})
    live.app.tasks["e2e.told"].apply_async(("held",), countdown=1.9)
    wait_until(lambda: live.toc.counts("celery").in_flight == 1)
    tell(worker, number)
    for name in ("held", "claimed"):
        entry = live.journal.wait_for(name, 2)[0]
        assert entry["worker"] == other.hostname()
        assert 0 <= entry["at"] - entry["due"] < 0.2
        assert_unchanged([entry])
    assert ended(worker)
    assert_each_once(live.journal)


def test_processes_that_are_replaced_after_each_task_or_two_lose_and_repeat_nothing(
    live: Live,
) -> None:
    for late, each in (True, 1), (False, 2):
        settings = {"task_acks_late": late, "worker_max_tasks_per_child": each}
        worker = start(live.start_workers, "-c", "2", **settings)
        live.fill("told", 12, f"task-{each}-")
        live.journal.wait_for(f"task-{each}-", 24, timeout=60)
        wait_until(lambda: slot_keys(live.client) == [])
        worker.container.kill()
    entries = [e for e in live.journal.entries("task-") if not e["name"].endswith("-done")]
    assert len({e["pid"] for e in entries}) >= 12 + 6
    assert_unchanged(entries)
    assert_each_once(live.journal)


def test_a_worker_takes_what_its_autoscaled_pool_may_start(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows for four, shrinks by itself, grows again, and takes one if it is told to."""
    monkeypatch.setenv("AUTOSCALE_KEEPALIVE", "1")
    worker = start(live.start_workers, "--autoscale", "4,1", task_acks_late=True)
    told = {"destination": [worker.hostname()], "timeout": 5}

    def processes() -> int:
        """As Celery counts them: it may tell one to end twice, and none in place of another."""
        [stats] = (live.app.control.inspect(**told).stats() or {"": {}}).values()
        return stats.get("autoscaler", {}).get("current", 0)

    for burst in range(2):
        live.fill("told", 4, f"burst-{burst}-", 3.0)
        entries = live.journal.wait_for(f"burst-{burst}-", 4)
        assert not any(e["name"].endswith("-done") for e in entries[:4]), "they wait for another"
        live.journal.wait_for(f"burst-{burst}-", 8)
        wait_until(lambda: processes() == 1)
    live.app.control.autoscale(1, 1, reply=True, **told)
    live.fill("told", 4, "single-", 0.5)
    live.journal.wait_for("single-", 1)
    assert live.toc.counts("celery") == (3, 0, 1, 0)
    live.journal.wait_for("single-", 8)
    assert_each_once(live.journal)
    wait_until(lambda: slot_keys(live.client) == [])


def test_what_was_taken_of_a_cancelled_queue_is_executed_and_the_rest_left(live: Live) -> None:
    """As basic.cancel of AMQP has it: what a consumer was delivered stays with it."""
    worker = start_busy(
        live.start_workers, live.app, live.journal, "-c", "1", seconds=1.5, task_acks_late=True
    )
    wait_until(lambda: live.toc.counts("celery").in_flight == 1)
    told = {"destination": [worker.hostname()], "reply": True, "timeout": 5}
    assert len(live.app.control.cancel_consumer("celery", **told)) == 1
    live.app.tasks["e2e.told"].delay("later")
    live.journal.wait_for("long-done", 1)
    assert live.toc.counts("celery").ready == 4
    assert len(live.app.control.add_consumer("celery", **told)) == 1
    live.journal.wait_for("next-", 6)
    live.journal.wait_for("later-done", 1)
    entries = [e for e in live.journal.entries() if not e["name"].endswith("-done")]
    assert {e["worker"] for e in entries} == {worker.hostname()}
    assert_unchanged(entries)
    assert_each_once(live.journal)
    wait_until(lambda: slot_keys(live.client) == [])


@pytest.mark.parametrize(
    ("late", "reject", "again"),
    [
        (True, True, True),
        pytest.param(True, False, False, marks=pytest.mark.nightly),
        pytest.param(False, True, False, marks=pytest.mark.nightly),
    ],
    ids=["late and rejected", "late", "early"],
)
def test_a_killed_process_costs_what_was_taken_with_it_nothing(
    live: Live, late: bool, reject: bool, again: bool
) -> None:
    """What it executed runs again, and is told so, with task_reject_on_worker_lost alone."""
    settings = {"task_acks_late": late, "task_reject_on_worker_lost": reject}
    worker = start_busy(
        live.start_workers, live.app, live.journal, "-c", "1", seconds=1, **settings
    )
    wait_until(lambda: live.toc.counts("celery").in_flight == int(late))
    os.kill(live.journal.entries("long")[0]["pid"], signal.SIGKILL)
    live.journal.wait_for("next-", 6)
    wait_until(lambda: slot_keys(live.client) == [])
    assert_unchanged([e for e in live.journal.entries("next-") if not e["name"].endswith("-done")])
    told = [(e["redelivered"], e["count"]) for e in live.journal.entries("long") if "count" in e]
    assert told == [(False, None), (True, 1)][: 1 + again]
    assert len(live.journal.entries("long-done")) == again
    assert {n: c for n, c in live.journal.runs().items() if "long" not in n and c != 1} == {}
    worker.container.kill()
