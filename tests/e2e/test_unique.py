"""Unique tasks and a worker: until when a key is held, whatever becomes of the task."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from celery import Celery

import kombu_toc
from celery_toc import unique
from kombu_toc.model.delivery import trait

from ..support.workers import LOOPS, POOLS, Live, wait_until


def holder(app: Celery, key: str = "k") -> str:
    """The id of the task that has the key; of the one that is sent here, if there is none."""
    sent = app.tasks["e2e.note"].apply_async(("asked",), countdown=3600, **unique(key))
    found: str = sent.id
    return found


def is_held(app: Celery, toc: kombu_toc.TimeoutCenter, id: str) -> bool:
    """Whether a task has the key; who asks leaves nothing behind."""
    found = holder(app)
    if found != id:
        toc.cancel(found)
    return found == id


def is_marked(toc: kombu_toc.TimeoutCenter, id: str) -> bool:
    """Whether a task is acknowledged and runs on."""
    [found] = toc.get(id)
    return trait(found.token, "a") == 1


@pytest.mark.parametrize("pool", LOOPS)
def test_a_key_is_held_until_the_task_is_done_or_until_it_starts(live: Live, pool: str) -> None:
    """Acknowledged before it runs, or after."""
    live.start_workers(1, *POOLS[pool])
    for name in ("nap", "late_ack"):
        task = live.app.tasks[f"e2e.{name}"]
        done = task.apply_async((f"done-{name}", 2), **unique("k"))
        start = task.apply_async((f"start-{name}", 2), **unique("s", until="start"))
        live.journal.wait_for(f"done-{name}", 1)
        live.journal.wait_for(f"start-{name}", 1)
        assert is_held(live.app, live.toc, done.id)
        assert holder(live.app, "s") != start.id
        wait_until(lambda id=done.id: not is_held(live.app, live.toc, id))
        live.toc.queues.purge("celery")
        wait_until(lambda: live.toc.counts("celery")[:3] == (0, 0, 0))


@pytest.mark.parametrize(
    "late", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["early", "late"]
)
def test_a_key_is_held_over_retries_until_the_last_is_done(live: Live, late: bool) -> None:
    [worker] = live.start_workers(1, *POOLS["prefork"], task_acks_late=late)
    sent = live.app.tasks["e2e.again"].apply_async((3, 0.3), **unique("k"))
    for number in (1, 2, 3, 4):
        live.journal.wait_for(f"again-{sent.id}", number)
        held = is_held(live.app, live.toc, sent.id)
        # The last one may have begun before it was asked.
        assert held or len(live.journal.entries("again-")) == 4, worker.logs()
    wait_until(lambda: not is_held(live.app, live.toc, sent.id), what=worker.logs)
    assert sent.get(timeout=10) == 3
    assert len(live.journal.entries("again-")) == 4


@pytest.mark.parametrize(
    "name",
    [
        "fail",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("fail_late", "fail_kept")),
    ],
)
def test_a_task_that_has_failed_does_not_hold_its_key(live: Live, name: str) -> None:
    [worker] = live.start_workers(1, *POOLS["prefork"])
    sent = live.app.tasks[f"e2e.{name}"].apply_async(countdown=0.3, **unique("k"))
    assert is_held(live.app, live.toc, sent.id)
    wait_until(lambda: not is_held(live.app, live.toc, sent.id), what=worker.logs)
    if name == "fail_kept":
        wait_until(lambda: live.toc.counts("celery").dead == 1, what=worker.logs)
        assert not is_held(live.app, live.toc, sent.id)


def test_the_key_of_the_only_worker_is_free_when_it_is_killed(
    live: Live, brisk: kombu_toc.TimeoutCenter
) -> None:
    """Nobody consumes or asks until its lease has ended; then the first who asks has it."""
    options: dict[str, Any] = {"broker_transport_options": {"visibility_timeout": 1}}
    [worker] = live.start_workers(1, *POOLS["prefork"], **options)
    live.app.conf.update(options)
    sent = live.begin("nap", "slow", 60, **unique("k"))
    wait_until(lambda: is_marked(brisk, sent.id), what=worker.logs)
    assert is_held(live.app, brisk, sent.id)
    worker.container.end()
    time.sleep(1.5)  # the lease ends
    assert not is_held(live.app, brisk, sent.id)


@pytest.mark.parametrize(
    "name", [pytest.param("nap", marks=pytest.mark.nightly), "late_ack"], ids=["early", "late"]
)
def test_a_killed_worker_holds_no_key_but_its_task_does_if_it_comes_back(
    live: Live, brisk: kombu_toc.TimeoutCenter, name: str
) -> None:
    options: dict[str, Any] = {"broker_transport_options": {"visibility_timeout": 1}}
    [worker] = live.start_workers(1, *POOLS["prefork"], **options)
    sent = live.begin(name, "slow", 60, **unique("k"))
    if name == "nap":
        wait_until(lambda: is_marked(brisk, sent.id), what=worker.logs)
    assert is_held(live.app, brisk, sent.id)
    worker.container.end()
    [other] = live.start_workers(1, *POOLS["prefork"], **options)
    if name == "nap":  # it was acknowledged: nothing comes back
        wait_until(lambda: not is_held(live.app, brisk, sent.id), 20, what=other.logs)
        assert len(live.journal.entries("slow")) == 1
    else:
        [_, again] = live.journal.wait_for("slow", 2)
        assert is_held(live.app, brisk, sent.id)
        os.kill(again["pid"], signal.SIGKILL)
