"""Scheduled tasks are seen, cancelled, moved and replayed by their ids (W1, D1, D5, Y2)."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import Any

import psutil
import pytest
from celery import Celery
from kombu import pools

from celery_toc import TaskCenter, timeout_center
from kombu_toc import DEAD, WAITING

from ..support.inspection import slot_keys
from ..support.proxy import Proxy
from ..support.tasks import make_app
from ..support.waiting import at_once
from ..support.workers import Live, wait_until

HOUR = 3600


@pytest.fixture
def center(app: Celery, client: Any) -> TaskCenter:
    """The center of the app; Kombu's pools outlive a test, and the server has been emptied."""
    pools.reset()
    return timeout_center(app)


def test_a_scheduled_task_is_seen_with_all_that_was_sent(app: Celery, center: TaskCenter) -> None:
    """D1: no queue is named"""
    sent = app.tasks["e2e.add"].apply_async((1, 2), countdown=HOUR, queue="urgent", expires=9000)
    [found] = center.get(sent.id)
    task = center.task(found)
    assert (found.topic, found.state) == ("urgent", WAITING)
    assert (task.id, task.name, task.args, task.kwargs) == (sent.id, "e2e.add", [1, 2], {})
    assert abs(task.eta - datetime.now(timezone.utc) - timedelta(hours=1)) < timedelta(seconds=5)
    assert task.headers["expires"]


@pytest.mark.parametrize("protocol", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_task_is_found_by_its_id_in_either_protocol(
    live: Live, center: TaskCenter, protocol: int
) -> None:
    """Y2"""
    live.app.conf.task_protocol = protocol
    live.start_workers(1, "-c", "1")
    gone, moved = (
        live.app.tasks["e2e.note"].apply_async((name,), countdown=HOUR)
        for name in ("gone", "moved")
    )
    assert [center.task(one).name for one in center.get(gone.id)] == ["e2e.note"]
    assert [one.deleted for one in center.cancel(gone.id)] == [True]
    assert [one.moved for one in center.run_now(moved.id)] == [True]
    live.journal.wait_for("moved", 1)
    wait_until(lambda: slot_keys(center.client) == [])
    assert live.journal.entries("gone") == []


def test_a_task_runs_at_the_time_it_is_moved_to(live: Live, center: TaskCenter) -> None:
    """D5, W1: earlier or later, whatever its header says; Celery takes a time without zone for
    UTC, whatever the app's is"""
    live.app.conf.timezone = "Asia/Tokyo"
    live.start_workers(1, "-c", "2")
    note = live.app.tasks["e2e.note"]
    later = note.apply_async(("later",), countdown=1)
    earlier = note.apply_async(("earlier",), countdown=HOUR)
    by_eta = note.apply_async(("by-eta",), countdown=HOUR)
    naive = note.apply_async(("naive",), countdown=HOUR)
    due = time.time() + 2.5
    center.reschedule(later.id, countdown=2.5)
    center.reschedule(earlier.id, eta=due)
    center.reschedule(by_eta.id, eta=datetime.fromtimestamp(due, timezone.utc))
    center.reschedule(naive.id, eta=datetime.fromtimestamp(due, timezone.utc).replace(tzinfo=None))
    for name in ("later", "earlier", "by-eta", "naive"):
        [entry] = live.journal.wait_for(name, 1)
        assert 0 <= entry["by_redis"] - due < 5


def test_a_task_that_was_due_before_the_machine_started_waits_for_the_time_it_is_moved_to(
    live: Live, center: TaskCenter
) -> None:
    """Celery itself uses no timer for such an eta."""
    long_ago = datetime.fromtimestamp(psutil.boot_time() - HOUR, timezone.utc)
    note = live.app.tasks["e2e.note"]
    ids = [note.apply_async((f"moved-{i}",), eta=long_ago).id for i in range(8)]
    first = time.time() + 6  # the worker is idle by then
    for i, id in enumerate(ids):
        center.reschedule(id, eta=first + i * 0.2)
    live.start_workers(1, "-c", "2")
    for i in range(len(ids)):
        [entry] = live.journal.wait_for(f"moved-{i}", 1)
        assert 0 <= entry["by_redis"] - (first + i * 0.2) < 5


def test_of_many_that_ensure_a_task_one_sends_it(app: Celery, center: TaskCenter) -> None:
    """D3"""
    sent = []

    def ensure(number: int) -> None:
        for order in range(20):
            signature = app.tasks["e2e.note"].s(f"{order} by {number}")
            if center.ensure_task(signature, task_id=f"order-{order}", countdown=HOUR):
                sent.append((order, number))

    at_once(ensure, range(4))
    assert sorted(order for order, _ in sent) == list(range(20))
    found = center.tasks(center.scan().messages)
    assert sorted(task.args[0] for task in found) == sorted(f"{o} by {n}" for o, n in sent)


def test_a_task_that_is_dead_or_elsewhere_is_not_sent_again(
    app: Celery, center: TaskCenter
) -> None:
    """D3: in any state, in any queue"""
    note = app.tasks["e2e.note"]
    assert center.ensure_task(note.s("x"), task_id="1", queue="urgent")
    assert not center.ensure_task(note.s("x"), task_id="1")
    center.reject(center.pop("urgent").messages[0], requeue=False)
    assert not center.ensure_task(note.s("x"), task_id="1")
    center.dead.purge()
    assert center.ensure_task(note.s("x"), task_id="1")


@pytest.mark.one_server("the proxy that loses the reply stands before one server")
def test_a_task_that_is_ensured_by_a_publish_whose_reply_is_lost_was_sent(
    app: Celery, server: Any, center: TaskCenter
) -> None:
    """K7: Kombu repeats it, and it is there already, by itself"""
    with Proxy(server.port) as proxy:
        made = make_app(proxy.toc_url, app.conf.result_backend)
        made.tasks["e2e.note"].apply_async(("first",), countdown=HOUR)
        lost = proxy.drop_replies(b"ensured-1")
        outer = TaskCenter(made, center)  # its own connection is not cut
        assert outer.ensure_task(made.tasks["e2e.note"].s("x"), task_id="ensured-1", countdown=60)
        assert lost.is_set()
        made.close()
    assert len(center.get("ensured-1")) == 1


def test_tasks_are_picked_by_name_arguments_and_headers(app: Celery, center: TaskCenter) -> None:
    """D6"""
    for number in range(20):
        app.tasks["e2e.note"].apply_async((f"{number}",), countdown=HOUR)
        app.tasks["e2e.add"].apply_async((number, 1), countdown=HOUR, headers={"shop": number % 2})
    page = center.scan(where=lambda task: task.name == "e2e.add" and task.args[0] > 17)
    assert [task.args for task in center.tasks(page.messages)] == [[18, 1], [19, 1]]
    assert page.after is None
    assert len(center.scan(where=lambda task: task.headers.get("shop") == 1).messages) == 10


def test_dead_tasks_are_replayed(live: Live, center: TaskCenter) -> None:
    """A6: a deployment that knows the task runs what an earlier one could not"""
    live.start_workers(1, "-c", "1")
    live.app.tasks["e2e.refuse"].delay("no room")
    live.app.send_task("e2e.unheard_of")
    wait_until(lambda: center.counts("celery").dead == 2)
    assert center.dead.purge(where=lambda task: task.name == "e2e.unheard_of") == 1
    assert center.dead.requeue(where=lambda task: task.name == "e2e.refuse") == 1
    live.journal.wait_for("refused", 2)
    wait_until(lambda: center.counts("celery").dead == 1)
    assert [one.error for one in center.scan(state=DEAD).messages] == ["no room"]


def test_a_task_that_a_program_takes_is_run_by_no_worker_until_it_is_given_back(
    live: Live, center: TaskCenter
) -> None:
    """D1: one is handled by the program, one is given back to wait for its time, one to be run"""
    live.start_workers(1, "-c", "2")
    note = live.app.tasks["e2e.note"]
    began = time.time()
    for name, countdown in (("mine", 2), ("timely", 2), ("failed", HOUR), ("other", 1)):
        note.apply_async((name,), countdown=countdown)
    taken = center.pop(
        "celery",
        limit=9,
        where=lambda task: task.args[0] in ("mine", "timely", "failed"),
        early=True,
        visibility=300,
    ).messages
    by_name = {center.task(message).args[0]: message for message in taken}
    assert sorted(by_name) == ["failed", "mine", "timely"]
    assert center.release([by_name["timely"].receipt]) == 1
    assert center.reject(by_name["failed"].receipt, requeue=True) == WAITING
    live.journal.wait_for("failed", 1)
    assert time.time() - began < 60
    for name in ("other", "timely"):
        live.journal.wait_for(name, 1)
    assert center.ack([by_name["mine"].receipt]) == 1
    wait_until(lambda: slot_keys(center.client) == [])
    assert live.journal.entries("mine") == []
    assert [len(live.journal.entries(name)) for name in ("failed", "other", "timely")] == [1, 1, 1]
    assert time.time() - began >= 2
