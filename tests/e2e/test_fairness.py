"""No queue waits for another one's backlog, and no task for a worker while another worker idles."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
from celery import Celery, group

from ..support.workers import POOLS, Live

PREFORK = POOLS["prefork"]
ACKS = pytest.mark.parametrize(
    "late",
    [pytest.param(False, id="early"), pytest.param(True, id="late", marks=pytest.mark.nightly)],
)
PREFETCH = pytest.mark.parametrize(
    "prefetch",
    [pytest.param(1, marks=pytest.mark.nightly), 4, pytest.param(16, marks=pytest.mark.nightly)],
)


def send(app: Celery, name: str, number: int, seconds: float, queue: str = "celery") -> None:
    nap = app.signature("e2e.nap")
    group(nap.clone((f"{name}-{i}", seconds)).set(queue=queue) for i in range(number)).apply_async()


@ACKS
@PREFETCH
def test_long_tasks_are_spread_over_workers_as_evenly_as_can_be(
    live: Live, prefetch: int, late: bool
) -> None:
    """4 tasks of 1.2 seconds and, while they are executed, 6 of 0.9 on 4 processes: 3 seconds."""
    live.start_workers(2, *PREFORK, worker_prefetch_multiplier=prefetch, task_acks_late=late)
    send(live.app, "first", 4, 1.2)
    live.journal.wait_for("first", 4)
    send(live.app, "then", 6, 0.9)
    then = live.journal.wait_for("then", 6)
    # If one worker takes one of the 6 too many, one process executes three of them: 3.9 seconds.
    assert max(Counter(e["pid"] for e in then).values()) == 2
    took = max(e["at"] for e in then) + 0.9 - min(e["at"] for e in live.journal.entries("first"))
    assert took < 3.9


@ACKS
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_what_was_expected_to_be_short_and_is_long_is_left_to_who_idles(
    live: Live, pool: str, late: bool
) -> None:
    """A worker that has executed many short tasks has fetched some more ahead."""
    two = ("-P", pool, "-c", "2")
    live.start_workers(1, *two, task_acks_late=late)
    [other] = live.start_workers(1, *two, "-Q", "other", task_acks_late=late)
    send(live.app, "short", 200, 0)
    send(live.app, "long", 8, 2)
    live.journal.wait_for("short", 200)
    live.journal.wait_for("long", 2)
    live.app.control.add_consumer("celery", destination=[other.hostname()])
    began = sorted(entry["at"] for entry in live.journal.wait_for("long", 4))
    assert began[3] - began[0] < 1.9, "the other worker idled"


@ACKS
def test_a_process_that_was_killed_makes_room_for_no_more_than_one_task(
    live: Live, late: bool
) -> None:
    live.start_workers(2, *PREFORK, task_acks_late=late, task_reject_on_worker_lost=False)
    send(live.app, "first", 4, 1.5)
    victim = live.journal.wait_for("first", 4)[0]["pid"]
    send(live.app, "then", 6, 0.9)
    os.kill(victim, signal.SIGKILL)
    then = live.journal.wait_for("then", 6)
    # Three processes work at all events: Celery may take 5 seconds to replace the fourth.
    worst = max(e["at"] for e in live.journal.entries("first")) + 1.5 + 2 * 0.9
    # One task more than there is room for waits for another one of 0.9.
    assert max(e["at"] for e in then) + 0.9 < worst + 0.8


@ACKS
@PREFETCH
def test_a_queue_does_not_wait_for_the_backlog_of_another(
    live: Live, prefetch: int, late: bool
) -> None:
    live.start_workers(
        1,
        *(*PREFORK, "-Q", "celery,urgent"),
        worker_prefetch_multiplier=prefetch,
        task_acks_late=late,
    )
    send(live.app, "many", 100, 0.1)
    live.journal.wait_for("many", 4)
    send(live.app, "few", 5, 0.1, queue="urgent")
    sent = len(live.journal.entries())
    few = live.journal.wait_for("few", 5)
    # Every second start is one of them, as soon as they are heard of.
    assert len([one for one in live.journal.entries() if one["at"] < few[0]["at"]]) - sent <= 15
    before = [entry for entry in live.journal.entries() if entry["at"] <= few[-1]["at"]]
    assert len([entry for entry in before if entry["at"] > few[0]["at"]]) <= 12
