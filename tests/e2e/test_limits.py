"""A limited queue: what runs has a place, which comes free when the task has ended, however."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from celery import Celery

import kombu_toc
from kombu_toc.model.delivery import trait

from ..support.inspection import now_us
from ..support.workers import EACH_POOL, LOOPS, POOLS, Journal, Live, wait_until


def taken(toc: kombu_toc.TimeoutCenter, queue: str = "celery") -> int:
    """How many places are taken."""
    topic = toc.registry.topic(queue)
    return sum(int(toc.client.hget(topic.slot(n).busy, "") or 0) for n in range(topic.slots))


def nothing_is_left(toc: kombu_toc.TimeoutCenter) -> bool:
    return toc.counts("celery")[:3] == (0, 0, 0) and not taken(toc) and not marked(toc)


def most_at_once(entries: list[dict[str, Any]]) -> int:
    """How many of the tasks ran at once, by what e2e.told and e2e.late_ack write down."""
    run = most = 0
    for entry in sorted(entries, key=lambda entry: entry["by_redis"]):
        run += -1 if entry["name"].endswith("-done") else 1
        most = max(most, run)
    return most


def marked(toc: kombu_toc.TimeoutCenter) -> list[str]:
    """Tokens of what is acknowledged and runs on."""
    topic = toc.registry.topic("celery")
    tokens = [
        t.decode() for n in range(topic.slots) for t in toc.client.hvals(topic.slot(n).tokens)
    ]
    return [token for token in tokens if trait(token, "a")]


@pytest.mark.parametrize("pool", EACH_POOL)
def test_a_place_is_held_until_the_task_has_ended_however(live: Live, pool: str) -> None:
    def send(name: str, *args: Any, **options: Any) -> Any:
        return live.app.tasks[f"e2e.{name}"].apply_async(args, **options)

    live.toc.queues.declare("celery", concurrency=10, requeue_limit=3)
    [worker] = live.start_workers(1, *POOLS[pool])
    send("nap", "early", 1.5)
    send("late_ack", "late", 1.5)
    live.journal.wait_for("early", 1)
    if pool != "solo":
        wait_until(lambda: len(marked(live.toc)) == 1, 1.4, what=worker.logs)
    live.journal.wait_for("late-done", 1)
    wait_until(lambda: taken(live.toc) == 0, what=worker.logs)
    for name, args in (
        ("fail", ()),
        ("fail_late", ()),
        ("fail_unacknowledged", ()),
        ("fail_kept", ()),
        ("fail_again", ("again",)),
        ("ignore", ()),
        ("refuse", ("no",)),
        ("refuse", ("no", True)),
        ("add", (1, 2)),
        ("again", (2, 0.1)),
    ):
        send(name, *args)
    live.journal.wait_for("again", 6)
    wait_until(lambda: nothing_is_left(live.toc), what=worker.logs)


def test_a_place_is_free_when_its_process_is_ended(live: Live) -> None:
    """By a time limit, by who revokes the task, or by anybody else."""
    live.toc.queues.declare("celery", concurrency=10)
    [worker] = live.start_workers(1, *POOLS["prefork"])
    limits = {"soft": {"soft_time_limit": 1}, "hard": {"time_limit": 1}}
    for how in ("soft", "hard", "terminated", "killed"):
        sent = {
            f"{name}-{how}": live.app.tasks[f"e2e.{name}"].apply_async(
                (f"{name}-{how}", 60), **limits.get(how, {})
            )
            for name in ("nap", "late_ack")
        }
        pids = [live.journal.wait_for(name, 1)[0]["pid"] for name in sent]
        assert how in limits or taken(live.toc) == 2
        for one, pid in zip(sent.values(), pids, strict=True):
            if how == "killed":
                os.kill(pid, signal.SIGKILL)
            elif how == "terminated":
                one.revoke(terminate=True)
        wait_until(lambda: taken(live.toc) == 0, what=worker.logs)
        assert marked(live.toc) == []


@pytest.mark.parametrize(
    "task", ["persist", pytest.param("late_persist", marks=pytest.mark.nightly)]
)
def test_a_task_that_goes_on_when_it_is_terminated_keeps_its_place(live: Live, task: str) -> None:
    """Celery takes it for ended as soon as it has sent the signal."""
    live.toc.queues.declare("celery", concurrency=1)
    live.start_workers(1, *POOLS["prefork"])
    sent = live.begin(task, "stubborn", 3)
    live.app.tasks["e2e.note"].delay("next")
    sent.revoke(terminate=True, signal="SIGUSR1")
    live.journal.wait_for("stubborn-told", 1)
    [done] = live.journal.wait_for("stubborn-done", 1)
    [following] = live.journal.wait_for("next", 1)
    assert following["by_redis"] > done["by_redis"]
    wait_until(lambda: nothing_is_left(live.toc))


@pytest.mark.parametrize("pool", [name for name in POOLS if name != "solo"])
def test_while_a_worker_waits_for_its_tasks_to_end_each_leaves_its_place(
    live: Live, pool: str
) -> None:
    live.toc.queues.declare("celery", concurrency=10)
    [worker] = live.start_workers(1, *POOLS[pool])
    live.app.tasks["e2e.nap"].apply_async(("short", 2))
    live.app.tasks["e2e.nap"].apply_async(("long", 6))
    live.journal.wait_for("short", 1)
    live.journal.wait_for("long", 1)
    wait_until(lambda: len(marked(live.toc)) == 2, 1)
    os.kill(worker.container.pid, signal.SIGTERM)
    wait_until(lambda: taken(live.toc) == 1, 5, what=worker.logs)
    assert worker.container.status == "running"
    worker.teardown()
    assert taken(live.toc) == 0


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_places_are_freed_although_the_connection_was_cut_or_the_worker_ends_at_once(
    live: Live, pool: str
) -> None:
    live.toc.queues.declare("celery", concurrency=10)
    [worker] = live.start_workers(1, *POOLS[pool])
    live.begin("nap", "cut", 2)
    live.client.client_kill_filter(_type="normal", skipme=True)
    wait_until(lambda: taken(live.toc) == 0, 5, what=worker.logs)
    assert marked(live.toc) == []
    live.begin("nap", "ended", 3)
    wait_until(lambda: len(marked(live.toc)) == 1, 1, worker.logs)
    worker.container.kill(signal.SIGQUIT)
    assert (taken(live.toc), marked(live.toc)) == (0, []), worker.logs()


@pytest.mark.cluster
def test_no_more_run_at_once_than_the_queue_allows_over_all_workers(live: Live) -> None:
    """Acknowledged before they run, or after"""
    live.toc.queues.declare("celery", concurrency=3)
    for i in range(24):
        live.app.tasks["e2e.told" if i % 2 else "e2e.late_ack"].delay(f"run-{i}", 0.1)
    live.start_workers(2, *POOLS["prefork"])
    entries = live.journal.wait_for("run-", 48)
    assert most_at_once(entries) == 3
    wait_until(lambda: nothing_is_left(live.toc))


def test_a_worker_takes_no_more_of_a_limited_queue_than_it_can_start(live: Live) -> None:
    live.toc.queues.declare("celery", concurrency=10)
    live.fill("late_ack", 8, "run-", 0.3)
    live.start_workers(1, "-P", "prefork", "-c", "2")
    seen = set()
    while len(live.journal.entries("run-")) < 16:
        seen.add(live.toc.counts("celery").in_flight)
    assert max(seen) == 2


@pytest.mark.parametrize(
    "late",
    [pytest.param(False, marks=pytest.mark.nightly), True],
    ids=["acknowledged", "not-acknowledged"],
)
def test_what_a_killed_worker_ran_leaves_its_place_when_its_lease_ends(
    live: Live, late: bool
) -> None:
    """What was acknowledged before it ran does not run again."""
    live.toc.queues.declare("celery", concurrency=1, visibility=2)
    [first] = live.start_workers(1, *POOLS["prefork"])
    live.app.tasks["e2e.hang" if late else "e2e.nap"].delay("long", 60)
    live.journal.wait_for("long", 1)
    if not late:
        wait_until(lambda: len(marked(live.toc)) == 1)
    live.start_workers(1, *POOLS["prefork"])
    live.app.tasks["e2e.note"].delay("next")
    first.container.end()
    live.journal.wait_for("next", 1)
    wait_until(lambda: nothing_is_left(live.toc))
    assert len(live.journal.entries("long")) == 1 + late


@pytest.mark.parametrize("pool", LOOPS)
def test_no_more_start_than_the_rate_and_its_burst_allow(live: Live, pool: str) -> None:
    number, interval, burst = 150, 0.02, 5
    live.toc.queues.declare("celery", rate=f"{1 / interval:g}/s", rate_burst=burst)
    live.start_workers(2, *POOLS[pool])
    begins = now_us(live.toc.client) / 1e6
    live.fill("note", number, "start-")
    starts = sorted(entry["by_redis"] for entry in live.journal.wait_for("start-", number))
    allowed = [begins + max(i - burst + 1, 0) * interval for i in range(number)]
    early = [allowed[i] - at for i, at in enumerate(starts) if at < allowed[i]]
    assert early == []
    wait_until(lambda: nothing_is_left(live.toc))


def test_limits_are_taken_away_and_set_while_a_worker_runs(live: Live) -> None:
    live.toc.queues.declare("celery", rate="1/h")
    live.start_workers(1, *POOLS["prefork"])
    note = live.app.tasks["e2e.note"]
    for i in range(3):
        note.delay(f"before-{i}")
    live.journal.wait_for("before-", 1)
    live.toc.queues.alter("celery", rate=None)
    live.journal.wait_for("before-", 3)
    live.toc.queues.alter("celery", concurrency=1)
    time.sleep(5)  # by then every worker has read it
    long = live.begin("nap", "long", 60)
    note.delay("beside")
    time.sleep(0.5)  # in which an idle process would have started it
    raised = now_us(live.toc.client) / 1e6
    live.toc.queues.alter("celery", concurrency=2)
    [beside] = live.journal.wait_for("beside", 1)
    assert beside["by_redis"] >= raised
    long.revoke(terminate=True)
    wait_until(lambda: nothing_is_left(live.toc))


def test_a_worker_that_stood_still_loses_its_places_and_leaves_none(live: Live) -> None:
    live.toc.queues.declare("celery", concurrency=1, visibility=2)
    [first] = live.start_workers(1, *POOLS["prefork"])
    live.begin("told", "stopped", 1)
    wait_until(lambda: len(marked(live.toc)) == 1)
    live.start_workers(1, *POOLS["prefork"])
    live.app.tasks["e2e.told"].delay("next", 1)
    processes = first.container.processes()
    for process in processes:
        process.suspend()
    live.journal.wait_for("next", 1)
    for process in processes:
        process.resume()
    live.journal.wait_for("stopped-done", 1)
    live.journal.wait_for("next-done", 1)
    wait_until(lambda: nothing_is_left(live.toc))
    assert len(live.journal.entries("stopped")) == 2


def test_celerys_own_rate_limit_of_a_task_holds_too(live: Live) -> None:
    """It is of each worker, which keeps the task meanwhile, with its place."""
    live.toc.queues.declare("celery", concurrency=3)
    [worker] = live.start_workers(1, *POOLS["prefork"])
    told = {"destination": [worker.hostname()], "reply": True, "timeout": 3}
    [answer] = live.app.control.rate_limit("e2e.note", "5/s", **told)
    assert "ok" in answer[worker.hostname()]
    live.fill("note", 8, "slow-")
    most = 0
    while len(live.journal.entries("slow-")) < 8:
        most = max(most, taken(live.toc))
    starts = sorted(entry["by_redis"] for entry in live.journal.entries("slow-"))
    assert starts[-1] - starts[0] > 1
    assert most <= 3
    wait_until(lambda: nothing_is_left(live.toc))


# -- keys


def of_key(journal: Journal, key: str) -> list[str]:
    """What the tasks of a key have written down, in the order of time."""
    entries = sorted(journal.entries(f"{key}-"), key=lambda entry: entry["by_redis"])
    return [entry["name"].partition("-")[2] for entry in entries]


def send(app: Celery, name: str, key: str, number: int, *args: Any) -> None:
    app.tasks[f"e2e.{name}"].apply_async((f"{key}-{number}", *args), headers={"x-key": key})


@pytest.mark.cluster
def test_of_a_key_no_more_run_at_once_than_it_may_and_no_key_waits_for_another(live: Live) -> None:
    live.toc.queues.declare("celery", key_concurrency=1)
    for number in range(6):
        for key in "ab":
            send(live.app, "told" if number % 2 else "late_ack", key, number, 0.1)
    live.start_workers(2, *POOLS["prefork"])
    for key in "ab":
        assert most_at_once(live.journal.wait_for(f"{key}-", 12)) == 1
    assert most_at_once(live.journal.entries()) == 2
    wait_until(lambda: nothing_is_left(live.toc))


@pytest.mark.parametrize("pool", LOOPS)
def test_keys_take_turns_so_that_a_large_one_delays_a_small_one_by_a_few(
    live: Live, pool: str
) -> None:
    live.toc.queues.declare("celery", key_fair=True, concurrency=2)
    for number in range(600):
        send(live.app, "nap", "large", number, 0.01)
    live.start_workers(2, *POOLS[pool])
    live.journal.wait_for("large-", 20)
    sent = {}
    for number in range(10):
        key = f"small{number % 3}"
        sent[f"{key}-{number}"] = now_us(live.toc.client) / 1e6
        send(live.app, "note", key, number)
        live.journal.wait_for(f"{key}-{number}", 1)
    large = [entry["by_redis"] for entry in live.journal.entries("large-")]
    assert len(large) < 600
    for entry in live.journal.entries("small"):
        before = [at for at in large if sent[entry["name"]] < at < entry["by_redis"]]
        assert len(before) <= 10, entry
    live.toc.queues.purge("celery")


@pytest.mark.cluster
@pytest.mark.parametrize("pool", LOOPS)
@pytest.mark.parametrize("task", [pytest.param("step", marks=pytest.mark.nightly), "late_step"])
def test_what_is_rejected_or_retried_keeps_its_place_in_a_serial_key(
    live: Live, task: str, pool: str
) -> None:
    """Celery acknowledges the one task before it runs, and has rejected the other when it does."""
    live.toc.queues.declare("celery", key_order="serial")
    again = {1: "retry"} if task == "step" else {1: "retry", 3: "reject", 4: "retry"}
    for number in range(6):
        for key in "abc":
            send(live.app, task, key, number, again.get(number, ""))
    live.start_workers(2, *POOLS[pool])
    expected: list[str] = []
    for number in range(6):
        tries = 2 if number in again else 1
        expected += [*[f"{number}"] * tries, f"{number}-done"]
    for key in "abc":
        live.journal.wait_for(f"{key}-", len(expected))
        assert of_key(live.journal, key) == expected
    wait_until(lambda: nothing_is_left(live.toc))


@pytest.mark.parametrize("task", [pytest.param("step", marks=pytest.mark.nightly), "late_step"])
def test_a_serial_key_keeps_its_order_although_workers_are_killed(live: Live, task: str) -> None:
    """What was acknowledged before is not run again; what was not, is, and before the others."""
    live.toc.queues.declare("celery", key_order="serial", visibility=2)
    keys, number = "abcdef", 12
    for i in range(number):
        for key in keys:
            send(live.app, task, key, i)
    workers = live.start_workers(2, *POOLS["prefork"])
    live.journal.wait_for("", 30)
    workers[0].container.end()
    for key in keys:
        wait_until(lambda key=key: f"{number - 1}-done" in of_key(live.journal, key), 30)
        seen = of_key(live.journal, key)
        ran = [int(name.removesuffix("-done")) for name in seen]
        assert ran == sorted(ran)
        assert set(ran) == set(range(number))
        ended = [name for name in seen if name.endswith("-done")]
        assert len(ended) >= (number if task == "late_step" else number - 1)
    wait_until(lambda: nothing_is_left(live.toc))
