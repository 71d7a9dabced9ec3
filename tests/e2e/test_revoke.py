"""K10: a revoke takes the waiting message out of the broker at once, and tells workers only of what
could be running."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, chord, group, signals, states
from celery.exceptions import ChordError, TaskRevokedError
from celery.result import AsyncResult
from kombu import pools
from kombu.exceptions import OperationalError

import kombu_toc
from kombu_toc import IN_FLIGHT, WAITING

from ..servers import free_port
from .conftest import POOLS, Journal, slot_keys, wait_until
from .nodes import ROOT, Worker
from .tasks import make_app

StartWorkers = Callable[..., list[Worker]]

HOUR = 3600


@pytest.fixture(autouse=True)
def _new_connections(client: Any) -> None:
    """Kombu's pools outlive a test, and the topics that a channel has declared are flushed."""
    pools.reset()


def note(app: Celery, name: str, **options: Any) -> AsyncResult:
    return app.tasks["e2e.note"].apply_async((name,), **options)


def remembered(app: Celery) -> list[str]:
    """The ids that the workers drop when they come."""
    return [id for ids in app.control.inspect().revoked().values() for id in ids]


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_revoked_countdown_task_is_gone_at_once_and_never_runs(
    start_workers: StartWorkers,
    app: Celery,
    journal: Journal,
    toc: kombu_toc.TimeoutCenter,
    pool: str,
) -> None:
    """K10, X4"""
    start_workers(1, *POOLS[pool])
    revoked, other = note(app, "revoked", countdown=2), note(app, "other", countdown=2)
    revoked.revoke()
    assert revoked.state == states.REVOKED
    assert toc.get(revoked.id) == []
    with pytest.raises(TaskRevokedError, match="revoked"):
        revoked.get(timeout=5)
    journal.wait_for("other", 1)
    other.get(timeout=5)
    time.sleep(0.5)  # the revoked one would have run by now: they were due together
    assert journal.entries("revoked") == []
    assert remembered(app) == []
    assert slot_keys(toc.client) == []


def test_without_any_worker_a_revoked_task_has_its_result_and_leaves_nothing(
    app: Celery, toc: kombu_toc.TimeoutCenter, client: Any
) -> None:
    sent = note(app, "x", countdown=HOUR)
    sent.revoke()
    assert (sent.state, sent.ready()) == (states.REVOKED, True)
    assert slot_keys(client) == []


def test_a_list_of_ids_and_a_group_are_revoked_wherever_they_wait(
    app: Celery, toc: kombu_toc.TimeoutCenter, client: Any
) -> None:
    sent = [
        note(app, "x", countdown=HOUR, queue=queue)
        for queue in ("celery", "urgent", "one-slot")
        for _ in range(50)
    ]
    kept = note(app, "kept", countdown=HOUR)
    app.control.revoke([one.id for one in sent])
    assert {one.state for one in sent} == {states.REVOKED}
    members = group(app.tasks["e2e.note"].s(f"{n}") for n in range(5)).apply_async(countdown=HOUR)
    members.revoke()
    assert {one.state for one in members.results} == {states.REVOKED}
    assert [one.id for one in toc.scan().messages] == [kept.id]


def test_tasks_are_revoked_by_their_stamps(
    app: Celery, toc: kombu_toc.TimeoutCenter, client: Any
) -> None:
    def stamped(queue: str = "celery", **stamps: Any) -> AsyncResult:
        signature = app.tasks["e2e.note"].s("x").set(countdown=HOUR, queue=queue)
        signature.stamp(**stamps)
        return signature.apply_async()

    revoked = [stamped(order="7"), stamped(queue="urgent", order=["6", "7"]), stamped(shop="a")]
    kept = [stamped(order="8"), stamped(invoice="7"), note(app, "x", countdown=HOUR)]
    app.control.revoke_by_stamped_headers({"order": ["7", "9"], "shop": "a"})
    assert {one.state for one in revoked} == {states.REVOKED}
    assert {one.state for one in kept} == {states.PENDING}
    assert {one.id for one in toc.scan().messages} == {one.id for one in kept}
    kept[0].revoke_by_stamped_headers({"order": "8"})
    assert kept[0].state == states.REVOKED


@pytest.mark.parametrize("removes", [True, False])
def test_a_chord_with_a_revoked_member_fails_as_it_does_with_celery(
    start_workers: StartWorkers,
    app: Celery,
    toc: kombu_toc.TimeoutCenter,
    removes: bool,
) -> None:
    """With the setting off, it is Celery itself that revokes."""
    app.conf.broker_transport_options = {"toc_revoke_removes": removes}
    start_workers(1, "-c", "2")
    add = app.tasks["e2e.add"]
    made = chord([add.s(1, 1), add.s(2, 2).set(countdown=2)])(app.tasks["e2e.total"].s())
    first, second = made.parent.results
    first.get(timeout=10)
    second.revoke()
    with pytest.raises((ChordError, TaskRevokedError), match=r"revoked|TaskRevokedError"):
        made.get(timeout=15)
    assert second.state == states.REVOKED
    wait_until(lambda: slot_keys(toc.client) == [])


def test_with_the_setting_off_the_message_waits_and_workers_remember_its_id(
    start_workers: StartWorkers, app: Celery, journal: Journal, toc: kombu_toc.TimeoutCenter
) -> None:
    app.conf.broker_transport_options = {"toc_revoke_removes": False}
    start_workers(1, "-c", "1")
    sent = note(app, "x", countdown=2)
    sent.revoke()
    assert [one.state for one in toc.get(sent.id)] == [WAITING]
    wait_until(lambda: remembered(app) == [sent.id])
    wait_until(lambda: toc.get(sent.id) == [])
    wait_until(lambda: sent.state == states.REVOKED)
    assert journal.entries() == []


def test_workers_are_told_of_what_is_in_flight_or_unknown(
    start_workers: StartWorkers, app: Celery, journal: Journal, toc: kombu_toc.TimeoutCenter
) -> None:
    """It may be running, or sent later: then it is dropped when it comes."""
    taken = note(app, "taken")
    toc.pop("celery", visibility=8)  # by a consumer that dies
    [worker] = start_workers(1, "-c", "1")
    waiting = note(app, "waiting", countdown=HOUR)
    app.control.revoke([taken.id, waiting.id, "not-sent-yet"])
    assert [one.state for one in toc.get(taken.id)] == [IN_FLIGHT]
    wait_until(lambda: sorted(remembered(app)) == sorted([taken.id, "not-sent-yet"]))
    note(app, "later", task_id="not-sent-yet")
    dropped = f"Discarding revoked task: e2e.note[{taken.id}]"
    wait_until(lambda: dropped in worker.logs(), 30)
    wait_until(lambda: slot_keys(toc.client) == [])
    assert {taken.state, app.AsyncResult("not-sent-yet").state} == {states.REVOKED}
    assert journal.entries() == []


def test_a_running_task_is_terminated(
    start_workers: StartWorkers, app: Celery, journal: Journal
) -> None:
    start_workers(1, "-c", "1")
    sent = app.tasks["e2e.late_ack"].delay("long", 60)
    journal.wait_for("long", 1)
    sent.revoke(terminate=True)
    wait_until(lambda: sent.state == states.REVOKED)
    assert journal.entries("long-done") == []


def test_a_task_that_waits_for_its_retry_is_revoked(
    start_workers: StartWorkers, app: Celery, journal: Journal, toc: kombu_toc.TimeoutCenter
) -> None:
    start_workers(1, "-c", "1")
    sent = app.tasks["e2e.again"].apply_async((3, 2.0))
    wait_until(lambda: sent.state == states.RETRY)
    sent.revoke()
    assert sent.state == states.REVOKED
    assert toc.get(sent.id) == []
    time.sleep(2.5)  # it would have been retried by now
    assert len(journal.entries("again-")) == 1
    assert sent.state == states.REVOKED


def test_workers_may_be_asked_to_reply_all_the_same(
    start_workers: StartWorkers, app: Celery, toc: kombu_toc.TimeoutCenter
) -> None:
    """As `celery control revoke` does."""
    [worker] = start_workers(1, "-c", "1")
    sent = note(app, "x", countdown=HOUR)
    [reply] = app.control.revoke(sent.id, reply=True)
    assert "flagged as revoked" in reply[worker.hostname()]["ok"]
    assert toc.get(sent.id) == []


def test_a_revoke_that_names_its_workers_is_left_to_them(
    app: Celery, toc: kombu_toc.TimeoutCenter, client: Any
) -> None:
    sent = note(app, "x", countdown=HOUR)
    app.control.revoke(sent.id, destination=["worker@elsewhere"])
    assert [one.state for one in toc.get(sent.id)] == [WAITING]


def test_a_process_that_does_nothing_but_revoke_removes(
    app: Celery, server: Any, journal: Journal, toc: kombu_toc.TimeoutCenter, client: Any
) -> None:
    """Its first connection is the one that it revokes by; K1: nothing is imported for it."""
    sent = note(app, "x", countdown=HOUR)
    program = (
        "import sys; from celery import Celery; "
        "app = Celery(broker=sys.argv[1], backend=sys.argv[2]); "
        "app.AsyncResult(sys.argv[3]).revoke()"
    )
    command = [sys.executable, "-c", program, server.toc_url, app.conf.result_backend, sent.id]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    subprocess.run(command, check=True, timeout=60, cwd=ROOT, env=environment)
    assert toc.get(sent.id) == []
    assert sent.state == states.REVOKED


@pytest.fixture
def announced() -> Iterator[list[tuple[str, str]]]:
    """(task, id) of every task_revoked signal."""
    seen = []

    def receive(sender: Any, request: Any, **_: Any) -> None:
        seen.append((sender.name, request.id))

    signals.task_revoked.connect(receive)
    yield seen
    signals.task_revoked.disconnect(receive)


def test_the_signal_is_sent_where_the_task_is_revoked(
    app: Celery, client: Any, announced: list[tuple[str, str]]
) -> None:
    known = note(app, "x", countdown=HOUR)
    unknown = app.send_task("of.another.program", countdown=HOUR)
    app.control.revoke([known.id, unknown.id])
    assert sorted(announced) == sorted([("e2e.note", known.id), ("of.another.program", unknown.id)])
    assert unknown.state == states.REVOKED


def test_an_ignored_result_is_not_stored(app: Celery, server: Any, client: Any) -> None:
    sent = note(app, "x", countdown=HOUR, ignore_result=True)
    sent.revoke()
    with server.client(1) as backend:
        assert backend.keys("celery-task-meta-*") == []


@pytest.mark.parametrize("removes", [True, False])
def test_a_broker_that_is_down_is_reported_as_celery_reports_it(removes: bool) -> None:
    app = make_app(f"toc+redis://127.0.0.1:{free_port()}/0", "cache+memory://")
    app.conf.broker_transport_options = {"toc_revoke_removes": removes, "max_retries": 1}
    with pytest.raises(OperationalError, match="111"):
        app.control.revoke("x")
    app.close()


def test_a_result_backend_that_is_down_does_not_keep_the_message(
    server: Any, toc: kombu_toc.TimeoutCenter, client: Any
) -> None:
    app = make_app(server.toc_url, f"redis://127.0.0.1:{free_port()}/0")
    app.conf.result_backend_transport_options = {"retry_policy": {"max_retries": 0}}
    sent = app.tasks["e2e.note"].apply_async(("x",), countdown=HOUR, ignore_result=True)
    assert [one.state for one in toc.get(sent.id)] == [WAITING]
    app.control.revoke(sent.id)
    assert toc.get(sent.id) == []
    app.close()


def test_apps_on_other_brokers_broadcast_as_ever() -> None:
    ours = Celery(broker="toc+redis://127.0.0.1:1/0")
    assert ours.control.mailbox is not None
    app = Celery(broker="memory://", set_as_current=False)
    heard = []
    with app.connection() as connection:
        node = app.control.mailbox(connection).Node("w", channel=connection.default_channel)
        node.handlers["revoke"] = lambda state, task_id, **_: heard.append(task_id)
        with node.listen():
            app.control.revoke(["a", "b"], connection=connection)
            connection.drain_events(timeout=5)
    assert heard == [["a", "b"]]
