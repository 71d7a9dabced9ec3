"""A limited queue: what runs has a place, which comes free when the task has ended, however."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import redis
from celery import Celery

import kombu_toc
from kombu_toc.model.traits import trait

from .conftest import POOLS, Journal, wait_until
from .nodes import Worker

StartWorkers = Callable[..., list[Worker]]


def give_places(toc: kombu_toc.TimeoutCenter) -> None:
    topic = toc.topic("celery")
    for n in range(topic.slots):
        slot = topic.slot(n)
        for store in slot.stores:
            for id in toc.client.zrange(store, 0, -1):
                toc.client.hset(slot.tokens, id, ";p1")


def in_flight(toc: kombu_toc.TimeoutCenter) -> int:
    return toc.counts("celery").in_flight


def marked(toc: kombu_toc.TimeoutCenter) -> list[str]:
    """Tokens of what is acknowledged and runs on."""
    topic = toc.topic("celery")
    tokens = [
        t.decode() for n in range(topic.slots) for t in toc.client.hvals(topic.slot(n).tokens)
    ]
    return [token for token in tokens if trait(token, "a")]


@pytest.mark.parametrize("pool", list(POOLS))
def test_a_place_is_held_until_the_task_has_ended_however(
    start_workers: StartWorkers,
    app: Celery,
    journal: Journal,
    toc: kombu_toc.TimeoutCenter,
    pool: str,
) -> None:
    def send(name: str, *args: Any, **options: Any) -> Any:
        sent = app.tasks[f"e2e.{name}"].apply_async(args, countdown=0.7, **options)
        give_places(toc)
        return sent

    [worker] = start_workers(1, *POOLS[pool])
    send("nap", "early", 1.5)
    send("late_ack", "late", 1.5)
    journal.wait_for("early", 1)
    if pool != "solo":
        wait_until(lambda: len(marked(toc)) == 1, 1.4, what=worker.logs)
    journal.wait_for("late-done", 1)
    wait_until(lambda: in_flight(toc) == 0, what=worker.logs)
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
    journal.wait_for("again", 6)
    wait_until(lambda: toc.counts("celery")[:3] == (0, 0, 0), what=worker.logs)
    assert marked(toc) == []


@pytest.mark.parametrize("how", ["soft", "hard", "killed", "terminated"])
def test_a_place_is_free_when_its_process_is_ended(
    start_workers: StartWorkers,
    app: Celery,
    journal: Journal,
    toc: kombu_toc.TimeoutCenter,
    how: str,
) -> None:
    limit = {"soft": {"soft_time_limit": 1}, "hard": {"time_limit": 1}}.get(how, {})
    [worker] = start_workers(1, *POOLS["prefork"])
    sent = [
        app.tasks[f"e2e.{name}"].apply_async((name, 60), countdown=0.7, **limit)
        for name in ("nap", "late_ack")
    ]
    give_places(toc)
    pids = [journal.wait_for(name, 1)[0]["pid"] for name in ("nap", "late_ack")]
    assert in_flight(toc) == 2
    for one, pid in zip(sent, pids, strict=True):
        if how == "killed":
            os.kill(pid, signal.SIGKILL)
        elif how == "terminated":
            one.revoke(terminate=True)
    wait_until(lambda: in_flight(toc) == 0, what=worker.logs)
    assert marked(toc) == []


@pytest.mark.parametrize("pool", [name for name in POOLS if name != "solo"])
def test_while_a_worker_waits_for_its_tasks_to_end_each_leaves_its_place(
    start_workers: StartWorkers,
    app: Celery,
    journal: Journal,
    toc: kombu_toc.TimeoutCenter,
    pool: str,
) -> None:
    [worker] = start_workers(1, *POOLS[pool])
    app.tasks["e2e.nap"].apply_async(("short", 2), countdown=0.7)
    app.tasks["e2e.nap"].apply_async(("long", 6), countdown=0.7)
    give_places(toc)
    journal.wait_for("short", 1)
    journal.wait_for("long", 1)
    wait_until(lambda: len(marked(toc)) == 2, 1)
    os.kill(worker.container.pid, signal.SIGTERM)
    wait_until(lambda: in_flight(toc) == 1, 5, what=worker.logs)
    assert worker.container.status == "running"
    worker.teardown()
    assert in_flight(toc) == 0


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGTERM], ids=["cold", "warm"])
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_worker_that_ends_leaves_no_place_behind(
    start_workers: StartWorkers,
    app: Celery,
    journal: Journal,
    toc: kombu_toc.TimeoutCenter,
    pool: str,
    number: int,
) -> None:
    [worker] = start_workers(1, *POOLS[pool])
    app.tasks["e2e.nap"].apply_async(("short", 2), countdown=0.7)
    give_places(toc)
    journal.wait_for("short", 1)
    wait_until(lambda: len(marked(toc)) == 1, 1)
    worker.container.kill(number)
    assert (in_flight(toc), marked(toc)) == (0, []), worker.logs()


def test_places_are_freed_although_the_connection_was_cut_meanwhile(
    start_workers: StartWorkers,
    app: Celery,
    journal: Journal,
    toc: kombu_toc.TimeoutCenter,
    client: redis.Redis,
) -> None:
    [worker] = start_workers(1, *POOLS["prefork"])
    app.tasks["e2e.nap"].apply_async(("short", 2), countdown=0.7)
    give_places(toc)
    journal.wait_for("short", 1)
    client.client_kill_filter(_type="normal", skipme=True)
    wait_until(lambda: in_flight(toc) == 0, 5, what=worker.logs)
    assert marked(toc) == []
