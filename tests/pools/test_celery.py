"""K1, K4: with nothing but the URL changed, Celery works; in every pool."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from itertools import pairwise

import pytest
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError
from pytest_celery import CeleryTestSetup

from ..support.workers import Journal, wait_until

pytestmark = pytest.mark.versions

TIMEOUT = 30


@pytest.mark.every_pool
def test_delay_and_apply_async_run(setup: CeleryTestSetup) -> None:
    add = setup.app.tasks["e2e.add"]
    assert add.delay(1, 2).get(timeout=TIMEOUT) == 3
    assert add.apply_async((3, 4)).get(timeout=TIMEOUT) == 7


def test_a_task_by_name_runs(setup: CeleryTestSetup) -> None:
    assert setup.app.send_task("e2e.mul", (3, 4)).get(timeout=TIMEOUT) == 12


@pytest.mark.every_pool
def test_a_countdown_task_starts_at_its_time_and_not_before(setup: CeleryTestSetup) -> None:
    note = setup.app.tasks["e2e.note"]
    sent = time.time()
    started = note.apply_async(("countdown",), countdown=0.7).get(timeout=TIMEOUT)
    assert 0.7 <= started - sent < 10


@pytest.mark.parametrize("hours", [0, -5, 9, None])
def test_an_eta_is_in_its_zone_or_in_the_apps(setup: CeleryTestSetup, hours: int | None) -> None:
    due = datetime.now(timezone(timedelta(hours=hours or 0))) + timedelta(seconds=0.5)
    eta = due.replace(tzinfo=None) if hours is None else due
    found = setup.app.tasks["e2e.stamp"].apply_async(eta=eta).get(timeout=TIMEOUT)
    assert 0 <= found["at"] - due.timestamp() < 10
    assert found["eta"] == eta.isoformat()


def test_an_eta_in_the_past_means_now(setup: CeleryTestSetup) -> None:
    past = datetime.now(timezone.utc) - timedelta(days=1)
    sent = time.time()
    started = setup.app.tasks["e2e.note"].apply_async(("past",), eta=past).get(timeout=TIMEOUT)
    assert started - sent < 10


@pytest.mark.every_pool
def test_a_retry_waits_for_its_countdown(setup: CeleryTestSetup, journal: Journal) -> None:
    result = setup.app.tasks["e2e.again"].delay(2, 0.4)
    assert result.get(timeout=TIMEOUT) == 2
    times = [entry["at"] for entry in journal.entries(f"again-{result.id}")]
    assert len(times) == 3
    assert all(b - a >= 0.4 for a, b in pairwise(times))


def test_a_chain_with_countdowns_runs_in_order(setup: CeleryTestSetup) -> None:
    add = setup.app.tasks["e2e.add"]
    sent = time.time()
    work = chain(add.s(1, 1), add.s(2).set(countdown=0.3), add.s(4))
    assert work.apply_async().get(timeout=TIMEOUT) == 8
    assert time.time() - sent >= 0.3


def test_a_group_runs(setup: CeleryTestSetup) -> None:
    add = setup.app.tasks["e2e.add"]
    work = group(add.s(i, i).set(countdown=0.2) for i in range(6))
    assert work.apply_async().get(timeout=TIMEOUT) == [0, 2, 4, 6, 8, 10]


@pytest.mark.every_pool
def test_a_chord_with_countdowns_runs_its_body(setup: CeleryTestSetup) -> None:
    add, total = setup.app.tasks["e2e.add"], setup.app.tasks["e2e.total"]
    work = chord((add.s(i, i).set(countdown=0.2) for i in range(4)), total.s().set(countdown=0.2))
    assert work.apply_async().get(timeout=TIMEOUT) == 12


def test_link_and_link_error_are_called(setup: CeleryTestSetup, journal: Journal) -> None:
    tasks = setup.app.tasks
    linked = tasks["e2e.note"].si("linked")
    tasks["e2e.add"].apply_async((1, 1), link=linked).get(timeout=TIMEOUT)
    journal.wait_for("linked", 1)
    tasks["e2e.fail"].apply_async(("boom",), link_error=tasks["e2e.note_error"].s())
    assert "boom" in journal.wait_for("errback", 1)[0]["text"]


def test_a_task_that_waits_past_its_expiry_is_revoked(
    setup: CeleryTestSetup, journal: Journal
) -> None:
    note = setup.app.tasks["e2e.note"]
    result = note.apply_async(("expired",), countdown=0.6, expires=0.2)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=TIMEOUT)
    assert journal.entries("expired") == []


def test_topic_routing_reaches_the_queue_that_matches(setup: CeleryTestSetup) -> None:
    found = setup.app.tasks["e2e.stamp"].apply_async(
        exchange="news", exchange_type="topic", routing_key="news.sports.chess", queue=None
    )
    assert found.get(timeout=TIMEOUT)["routing_key"] == "news.sports.chess"


@pytest.mark.every_pool
def test_a_broadcast_task_runs(setup: CeleryTestSetup, journal: Journal) -> None:
    setup.app.tasks["e2e.note"].apply_async(("broadcast",), queue="everyone")
    assert len(journal.wait_for("broadcast", 1)) == 1


def test_a_broadcast_task_with_a_countdown_waits(setup: CeleryTestSetup, journal: Journal) -> None:
    sent = time.time()
    setup.app.tasks["e2e.note"].apply_async(("later",), queue="everyone", countdown=0.5)
    assert journal.wait_for("later", 1)[0]["at"] - sent >= 0.5


def test_priorities_reach_the_task(setup: CeleryTestSetup) -> None:
    found = setup.app.tasks["e2e.stamp"].apply_async(priority=6).get(timeout=TIMEOUT)
    assert found["priority"] == 6


@pytest.mark.every_pool
def test_remote_control_answers(setup: CeleryTestSetup) -> None:
    app, name = setup.app, setup.worker.hostname()
    control = app.control
    assert control.ping(timeout=3, limit=1) == [{name: {"ok": "pong"}}]
    inspect = control.inspect([name], timeout=3)
    assert inspect.stats()[name]["broker"]["transport"].startswith("toc")
    assert "e2e.add" in inspect.registered()[name]
    assert any(q["name"] == "celery" for q in inspect.active_queues()[name])
    [answer] = control.rate_limit("e2e.mul", "100/s", destination=[name], reply=True, timeout=3)
    assert "ok" in answer[name]
    [answer] = control.rate_limit("e2e.mul", "0", destination=[name], reply=True, timeout=3)
    assert "ok" in answer[name]


def test_a_worker_forgets_the_countdown_tasks_that_have_ended(setup: CeleryTestSetup) -> None:
    app, name = setup.app, setup.worker.hostname()
    sent = [app.tasks["e2e.add"].apply_async((i, 1), countdown=0.2) for i in range(20)]
    for result in sent:
        result.get(timeout=TIMEOUT)
    inspect = app.control.inspect([name], timeout=3, limit=1)
    # A result is there a moment before the worker is done with its task.
    wait_until(lambda: not inspect.query_task(*(result.id for result in sent))[name], 5)


@pytest.mark.every_pool
def test_a_queue_is_added_and_cancelled_while_the_worker_runs(
    setup: CeleryTestSetup, journal: Journal
) -> None:
    app, name = setup.app, setup.worker.hostname()
    note = app.tasks["e2e.note"]
    [answer] = app.control.add_consumer("extra", destination=[name], reply=True, timeout=3)
    assert "ok" in answer[name]
    note.apply_async(("added",), queue="extra").get(timeout=TIMEOUT)
    [answer] = app.control.cancel_consumer("extra", destination=[name], reply=True, timeout=3)
    assert "ok" in answer[name]
    inspect = app.control.inspect([name], timeout=3, limit=1)
    wait_until(lambda: "extra" not in [q["name"] for q in inspect.active_queues()[name]], 5)
    note.apply_async(("cancelled",), queue="extra")
    note.delay("other").get(timeout=TIMEOUT)
    assert journal.entries("cancelled") == []


@pytest.mark.every_pool
def test_a_revoked_task_does_not_run(setup: CeleryTestSetup, journal: Journal) -> None:
    note = setup.app.tasks["e2e.note"]
    result = note.apply_async(("revoked",), countdown=1.0)
    result.revoke(wait=True, timeout=3)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=TIMEOUT)
    assert journal.entries("revoked") == []


@pytest.mark.every_pool
def test_countdown_tasks_under_a_rate_limit_run(setup: CeleryTestSetup) -> None:
    app, name = setup.app, setup.worker.hostname()
    app.control.rate_limit("e2e.mul", "20/s", destination=[name], reply=True, timeout=3)
    try:
        results = [app.tasks["e2e.mul"].apply_async((i, 2), countdown=0.2) for i in range(10)]
        assert [r.get(timeout=TIMEOUT) for r in results] == [i * 2 for i in range(10)]
    finally:
        app.control.rate_limit("e2e.mul", "0", destination=[name], reply=True, timeout=3)
