"""A task that fails for good goes to DeadQueue, where the app or the task asks for it."""

from __future__ import annotations

import pytest
from celery import chord
from celery.exceptions import TimeLimitExceeded, WorkerLostError

import kombu_toc

from ..support.commands import answer
from ..support.workers import LOOPS, POOLS, Live, wait_until
from .test_dead_letters import dead
from .test_limits import marked

ON = {"broker_transport_options": {"toc_dead_on_failure": True}}

REASON = "the task failed"


def nothing_is_left(toc: kombu_toc.TimeoutCenter, number: int) -> None:
    """Nothing waits or is in flight, and so many are dead."""
    wait_until(lambda: toc.counts("celery")[:3] == (0, 0, 0), what=lambda: toc.counts("celery"))
    assert toc.counts("celery").dead == number


@pytest.mark.parametrize("pool", list(POOLS))
def test_a_task_that_has_failed_for_good_is_dead_and_can_be_run_again(
    live: Live, pool: str
) -> None:
    """Acknowledged before it ran, or after; after its last retry only"""
    live.start_workers(1, *POOLS[pool], **ON)
    tasks = live.app.tasks
    early, late = (tasks[f"e2e.{name}"].delay("disk full") for name in ("fail", "fail_late"))
    again = tasks["e2e.fail_again"].delay("thrice")
    others = [tasks["e2e.fail_gone"].delay("disk full"), tasks["e2e.add"].delay(1, 2)]
    tasks["e2e.ignore"].delay()
    for sent in (early, late):
        found = dead(live.toc, sent.id)
        assert found.reason == REASON
        assert found.error.startswith("ValueError: disk full\nTraceback (most recent call last):")
        assert found.error.endswith("ValueError: disk full")
        with pytest.raises(ValueError, match="disk full"):
            sent.get(timeout=10)
    found = dead(live.toc, again.id)
    assert [entry["retries"] for entry in live.journal.entries("thrice")] == [0, 1, 2]
    content = kombu_toc.unpack(found.body, found.id)
    assert (content["headers"]["retries"], b"thrice" in content["body"]) == (2, True)
    assert others[1].get(timeout=10) == 3
    with pytest.raises(ValueError, match="disk full"):
        others[0].get(timeout=10)
    nothing_is_left(live.toc, 3)

    assert live.toc.dead.requeue("celery", ids=[again.id]) == 1
    live.journal.wait_for("thrice", 4)
    assert dead(live.toc, again.id).reason == REASON
    nothing_is_left(live.toc, 3)


@pytest.mark.versions
def test_it_is_off_unless_the_app_or_the_task_asks_for_it(live: Live) -> None:
    live.start_workers(1, "-c", "1")
    off = [live.app.tasks[f"e2e.{name}"].delay("x") for name in ("fail", "fail_late", "fail_gone")]
    kept = live.app.tasks["e2e.fail_kept"].delay("x")
    assert dead(live.toc, kept.id).error.startswith("ValueError: x\nTraceback")
    shown = answer(live.app, "dead", "show", kept.id).out.splitlines()
    error = next(line for line in shown if line.startswith("error"))
    assert error.split(maxsplit=1)[1] == "ValueError: x"
    assert shown[shown.index(error) + 1].strip() == "Traceback (most recent call last):"
    [listed] = [
        line for line in answer(live.app, "dead", "list").out.splitlines() if kept.id in line
    ]
    assert "ValueError: x" in listed and "Traceback" not in listed
    for sent in off:
        with pytest.raises(ValueError, match="x"):
            sent.get(timeout=10)
    nothing_is_left(live.toc, 1)


def test_a_time_limit_and_a_lost_process_are_failures_and_a_revoke_and_an_expiry_are_not(
    live: Live,
) -> None:
    live.start_workers(1, "-P", "prefork", "-c", "2", **ON)
    tasks = live.app.tasks
    running = [tasks[f"e2e.{name}"].delay("running", 60) for name in ("nap", "late_ack")]
    live.journal.wait_for("running", 2)
    tasks["e2e.nap"].apply_async(("never", 0), expires=0.01, countdown=0.5)
    for sent in running:
        sent.revoke(terminate=True, signal="SIGKILL")
    wait_until(lambda: {sent.state for sent in running} == {"REVOKED"})
    assert tasks["e2e.add"].delay(1, 2).get(timeout=10) == 3
    nothing_is_left(live.toc, 0)
    assert live.journal.entries("never") == []

    limits = {"args": ("long", 60), "time_limit": 1}
    slow = [tasks[f"e2e.{name}"].apply_async(**limits) for name in ("nap", "late_ack")]
    lost = [tasks[f"e2e.{name}"].delay() for name in ("end", "end_late")]
    for sent in slow:
        found = dead(live.toc, sent.id)
        assert (found.reason, found.error.partition("\n")[0]) == (
            REASON,
            "TimeLimitExceeded: TimeLimitExceeded(1,)",
        )
        with pytest.raises(TimeLimitExceeded):
            sent.get(timeout=10)
    for sent in lost:
        found = dead(live.toc, sent.id)
        assert (found.reason, found.error.partition(":")[0]) == (REASON, "WorkerLostError")
        with pytest.raises(WorkerLostError):
            sent.get(timeout=10)
    nothing_is_left(live.toc, 4)

    # A member of a chord dies, and the chord fails as ever.
    members = [tasks["e2e.add"].s(1, 2), tasks["e2e.fail"].s("disk full")]
    with pytest.raises(Exception, match="disk full"):
        chord(members)(tasks["e2e.total"].s()).get(timeout=10)
    wait_until(lambda: live.toc.counts("celery").dead == 5)
    nothing_is_left(live.toc, 5)


@pytest.mark.parametrize("pool", LOOPS)
def test_what_a_killed_worker_had_acknowledged_and_ran_is_dead(live: Live, pool: str) -> None:
    """What it had not acknowledged runs again."""
    live.toc.queues.declare("celery", visibility=2)
    [first] = live.start_workers(1, *POOLS[pool], **ON)
    sent = live.app.tasks["e2e.nap"].delay("early", 60)
    live.app.tasks["e2e.hang"].delay("late", 0.5)
    live.journal.wait_for("early", 1)
    wait_until(lambda: len(marked(live.toc)) == 1, what=first.logs)
    live.journal.wait_for("late", 1)
    first.container.end()
    live.start_workers(1, *POOLS[pool], **ON)
    found = dead(live.toc, sent.id)
    assert found.reason == REASON
    assert found.error == "the worker that ran it is gone: its lease ended"
    nothing_is_left(live.toc, 1)
    assert [len(live.journal.entries(name)) for name in ("early", "late")] == [1, 2]


def test_a_task_that_does_not_ask_for_it_is_gone_when_it_is_acknowledged(live: Live) -> None:
    live.start_workers(1, *POOLS["prefork"])
    sent = live.begin("nap", "early", 60)
    nothing_is_left(live.toc, 0)
    sent.revoke(terminate=True)
    wait_until(lambda: sent.state == "REVOKED")
    nothing_is_left(live.toc, 0)
