"""K10: a revoke takes the waiting message out of the broker at once, and tells workers only of what
could be running."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery, chord, group, signals, states
from celery.exceptions import ChordError, TaskRevokedError
from celery.result import AsyncResult
from kombu import Queue, pools
from kombu.exceptions import OperationalError

import kombu_toc
from kombu_toc import IN_FLIGHT, WAITING
from kombu_toc.scripts.call import load

from ..support import nursery
from ..support.fixtures import own_server
from ..support.inspection import calls_of, slot_keys
from ..support.ports import free_port
from ..support.proxy import Proxy
from ..support.tasks import make_app
from ..support.workers import POOLS, Live, environment_of, stop_when_done, wait_until

HOUR = 3600


@pytest.fixture(autouse=True)
def _new_connections(client: Any) -> None:
    """Kombu's pools outlive a test, and the topics that a channel has declared are flushed."""
    pools.reset()


def note(app: Celery, name: str, **options: Any) -> AsyncResult:
    return app.tasks["e2e.note"].apply_async((name,), **options)


def remembered(app: Celery) -> list[str]:
    """The ids that the workers drop when they come: what they tell one that has just started."""
    told = app.control.inspect().hello("nobody@test")
    return [id for answer in told.values() for id in answer["revoked"]]


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_revoked_countdown_task_is_gone_at_once_and_never_runs(live: Live, pool: str) -> None:
    """K10, X4"""
    workers = live.start_workers(1, *POOLS[pool])
    revoked, other = note(live.app, "revoked", countdown=2), note(live.app, "other", countdown=2)
    revoked.revoke()
    assert revoked.state == states.REVOKED
    assert live.toc.get(revoked.id) == []
    with pytest.raises(TaskRevokedError, match="revoked"):
        revoked.get(timeout=5)
    live.journal.wait_for("other", 1)
    other.get(timeout=5)
    assert remembered(live.app) == []
    stop_when_done(workers, lambda: slot_keys(live.toc.client) == [])
    assert live.journal.entries("revoked") == []


def test_without_any_worker_a_revoked_task_has_its_result_and_leaves_nothing(live: Live) -> None:
    sent = note(live.app, "x", countdown=HOUR)
    sent.revoke()
    assert (sent.state, sent.ready()) == (states.REVOKED, True)
    assert slot_keys(live.client) == []


def test_a_list_of_ids_and_a_group_are_revoked_wherever_they_wait(live: Live) -> None:
    sent = [
        note(live.app, "x", countdown=HOUR, queue=queue)
        for queue in ("celery", "urgent", "one-slot")
        for _ in range(50)
    ]
    kept = note(live.app, "kept", countdown=HOUR)
    live.app.control.revoke([one.id for one in sent])
    assert {one.state for one in sent} == {states.REVOKED}
    members = group(live.app.tasks["e2e.note"].s(f"{n}") for n in range(5)).apply_async(
        countdown=HOUR
    )
    members.revoke()
    assert {one.state for one in members.results} == {states.REVOKED}
    assert [one.id for one in live.toc.scan().messages] == [kept.id]


@own_server
@pytest.mark.one_server("whose commands are counted")
@pytest.mark.parametrize(("queues", "most"), [(20, 30), (1000, 1100)])
def test_a_revoke_asks_each_queue_once(server: Any, client: Any, queues: int, most: int) -> None:
    """Whether the task is in one of them or in none"""
    toc = kombu_toc.center_for(server.toc_url)
    app = make_app(server.toc_url, server.url.removesuffix("/0") + "/1")
    for number in range(queues):
        toc.queues.declare(f"queue-{number}")
    sent = note(app, "x", countdown=HOUR, queue="queue-7")
    for id in (sent.id, "none"):
        client.config_resetstat()
        app.control.revoke(id)
        assert calls_of(client) <= most
    assert sent.state == states.REVOKED
    assert slot_keys(client) == []
    app.close()


def test_a_task_in_a_workers_own_queue_is_revoked(live: Live) -> None:
    """As with `worker_direct`: the queue goes when the worker does."""
    queue = Queue("worker-1.dq", auto_delete=True, durable=False)
    sent = note(live.app, "x", countdown=HOUR, queue=queue)
    assert [one.topic for one in live.toc.get(sent.id)] == ["worker-1.dq"]
    sent.revoke()
    assert sent.state == states.REVOKED
    assert live.toc.get(sent.id) == []


def test_tasks_are_revoked_by_their_stamps(live: Live) -> None:
    def stamped(queue: str = "celery", **stamps: Any) -> AsyncResult:
        signature = live.app.tasks["e2e.note"].s("x").set(countdown=HOUR, queue=queue)
        signature.stamp(**stamps)
        return signature.apply_async()

    revoked = [stamped(order="7"), stamped(queue="urgent", order=["6", "7"]), stamped(shop="a")]
    kept = [stamped(order="8"), stamped(invoice="7"), note(live.app, "x", countdown=HOUR)]
    live.app.control.revoke_by_stamped_headers({"order": ["7", "9"], "shop": "a"})
    assert {one.state for one in revoked} == {states.REVOKED}
    assert {one.state for one in kept} == {states.PENDING}
    assert {one.id for one in live.toc.scan().messages} == {one.id for one in kept}
    kept[0].revoke_by_stamped_headers({"order": "8"})
    assert kept[0].state == states.REVOKED


@pytest.mark.parametrize("removes", [True, False])
def test_a_chord_with_a_revoked_member_fails_as_it_does_with_celery(
    live: Live, removes: bool
) -> None:
    """With the setting off, it is Celery itself that revokes."""
    live.app.conf.broker_transport_options = {"toc_revoke_removes": removes}
    live.start_workers(1, "-c", "2")
    add = live.app.tasks["e2e.add"]
    made = chord([add.s(1, 1), add.s(2, 2).set(countdown=2)])(live.app.tasks["e2e.total"].s())
    first, second = made.parent.results
    first.get(timeout=10)
    second.revoke()
    with pytest.raises((ChordError, TaskRevokedError), match=r"revoked|TaskRevokedError"):
        made.get(timeout=15)
    assert second.state == states.REVOKED
    wait_until(lambda: slot_keys(live.toc.client) == [])


def test_with_the_setting_off_the_message_waits_and_workers_remember_its_id(live: Live) -> None:
    live.app.conf.broker_transport_options = {"toc_revoke_removes": False}
    live.start_workers(1, "-c", "1")
    sent = note(live.app, "x", countdown=2)
    sent.revoke()
    assert [one.state for one in live.toc.get(sent.id)] == [WAITING]
    wait_until(lambda: remembered(live.app) == [sent.id])
    wait_until(lambda: live.toc.get(sent.id) == [])
    wait_until(lambda: sent.state == states.REVOKED)
    assert live.journal.entries() == []


def test_workers_are_told_of_what_is_in_flight_or_unknown(live: Live) -> None:
    """It may be running, or sent later: then it is dropped when it comes."""
    taken = note(live.app, "taken")
    live.toc.pop("celery", visibility=8)  # by a consumer that dies
    [worker] = live.start_workers(1, "-c", "1")
    waiting = note(live.app, "waiting", countdown=HOUR)
    live.app.control.revoke([taken.id, waiting.id, "not-sent-yet"])
    assert [one.state for one in live.toc.get(taken.id)] == [IN_FLIGHT]
    wait_until(lambda: sorted(remembered(live.app)) == sorted([taken.id, "not-sent-yet"]))
    note(live.app, "later", task_id="not-sent-yet")
    dropped = f"Discarding revoked task: e2e.note[{taken.id}]"
    wait_until(lambda: dropped in worker.logs(), 30)
    wait_until(lambda: slot_keys(live.toc.client) == [])
    assert {taken.state, live.app.AsyncResult("not-sent-yet").state} == {states.REVOKED}
    assert live.journal.entries() == []


def test_a_worker_is_told_of_what_it_may_have_begun_and_replies_where_that_is_asked_for(
    live: Live,
) -> None:
    """Of a retry, for one may have begun it before."""
    [worker] = live.start_workers(1, "-c", "1")
    again, first = (
        note(live.app, "again", countdown=HOUR, retries=1),
        note(live.app, "x", countdown=HOUR),
    )
    live.app.control.revoke([first.id, again.id])
    wait_until(lambda: remembered(live.app) == [again.id])
    assert live.toc.get([first.id, again.id]) == []

    sent = note(live.app, "x", countdown=HOUR)
    [reply] = live.app.control.revoke(sent.id, reply=True)  # as `celery control revoke` asks
    assert "flagged as revoked" in reply[worker.hostname()]["ok"]
    assert live.toc.get(sent.id) == []

    sent = live.begin("late_ack", "long", 60)
    sent.revoke(terminate=True)
    wait_until(lambda: sent.state == states.REVOKED)
    assert live.journal.entries("long-done") == []

    sent = live.app.tasks["e2e.again"].apply_async((3, 2.0))
    wait_until(lambda: sent.state == states.RETRY)
    sent.revoke()  # while it waits for its retry
    assert sent.state == states.REVOKED
    assert live.toc.get(sent.id) == []
    time.sleep(2.5)  # it would have been retried by now
    assert len(live.journal.entries("again-")) == 1
    assert sent.state == states.REVOKED


def test_tasks_revoked_in_the_moment_they_become_due_ran_or_are_revoked(live: Live) -> None:
    """X4: each has the state of what became of it, and none is left

    One after the other: Celery 5.7 marks what it is told to revoke also if another thread or
    process has begun it in that moment.
    """
    live.start_workers(1, "-P", "solo")
    begin = datetime.now(timezone.utc) + timedelta(seconds=2)
    due = [begin + timedelta(milliseconds=10 * number) for number in range(150)]
    sent = [note(live.app, f"{number}", eta=eta) for number, eta in enumerate(due)]
    # From 60 ms before it is due to 10 ms after; workers fetch what is due in 20 ms.
    early = [timedelta(milliseconds=60 - number * 37 % 70) for number in range(150)]
    for number in sorted(range(150), key=lambda number: due[number] - early[number]):
        wait = due[number] - early[number] - datetime.now(timezone.utc)
        time.sleep(max(wait.total_seconds(), 0))  # it is about that moment
        sent[number].revoke()
    wait_until(lambda: slot_keys(live.toc.client) == [])
    wait_until(lambda: all(one.ready() for one in sent), what=lambda: [one.state for one in sent])
    # Acknowledged early: its message is gone before it starts.
    ran = {entry["name"] for entry in live.journal.entries()}
    for number, one in enumerate(sent):
        assert one.state == (states.SUCCESS if f"{number}" in ran else states.REVOKED)
    assert 0 < len(ran) < 150


def test_a_revoke_that_names_its_workers_is_left_to_them(live: Live) -> None:
    sent = note(live.app, "x", countdown=HOUR)
    live.app.control.revoke(sent.id, destination=["worker@elsewhere"])
    assert [one.state for one in live.toc.get(sent.id)] == [WAITING]


def test_a_process_that_does_nothing_but_revoke_removes(live: Live) -> None:
    """Its first connection is the one that it revokes by; K1: nothing is imported for it."""
    sent = note(live.app, "x", countdown=HOUR)
    program = (
        "import sys; from celery import Celery; "
        "app = Celery(broker=sys.argv[1], backend=sys.argv[2]); "
        "app.AsyncResult(sys.argv[3]).revoke()"
    )
    urls = (live.server.toc_url, live.app.conf.result_backend)
    nursery.done(("-W", "ignore", "-c", program, *urls, sent.id), execute=True)
    assert live.toc.get(sent.id) == []
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
    live: Live, announced: list[tuple[str, str]]
) -> None:
    known = note(live.app, "x", countdown=HOUR)
    unknown = live.app.send_task("of.another.program", countdown=HOUR)
    live.app.control.revoke([known.id, unknown.id])
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


@pytest.fixture
def proxied(server: Any, app: Celery, client: Any) -> Iterator[tuple[Celery, Proxy]]:
    """An app whose connections to the broker can be cut; they have been used."""
    with Proxy(server.port) as proxy:
        made = make_app(proxy.toc_url, app.conf.result_backend)
        note(made, "x", countdown=HOUR).revoke()
        yield made, proxy
        made.close()
        pools.reset()


def test_a_revoke_whose_reply_is_lost_marks_the_result_all_the_same(
    proxied: tuple[Celery, Proxy], toc: kombu_toc.TimeoutCenter
) -> None:
    """X4: the message is gone, and the repeated call does not find it."""
    app, proxy = proxied
    sent = note(app, "x", countdown=HOUR)
    lost = proxy.drop_replies(load("cancel").sha.encode())
    sent.revoke()
    assert lost.is_set()
    assert toc.get(sent.id) == []
    assert sent.state == states.REVOKED


def test_a_connection_that_was_cut_while_idle_does_not_keep_a_revoke_from_removing(
    proxied: tuple[Celery, Proxy], toc: kombu_toc.TimeoutCenter
) -> None:
    app, proxy = proxied
    sent = note(app, "x", countdown=HOUR)
    proxy.cut()
    sent.revoke()
    assert toc.get(sent.id) == []
    assert sent.state == states.REVOKED


def test_a_result_backend_that_is_down_does_not_keep_the_message(live: Live) -> None:
    """Workers are told then, for the result is not what it should be."""
    live.start_workers(1, "-c", "1")
    # What fails below may keep this frame: its result would unsubscribe when its server is gone.
    id = note(live.app, "x", countdown=HOUR).id
    deaf = make_app(live.server.toc_url, f"redis://127.0.0.1:{free_port()}/0")
    deaf.conf.result_backend_transport_options = {"retry_policy": {"max_retries": 0}}
    deaf.control.revoke(id)
    assert live.toc.get(id) == []
    wait_until(lambda: remembered(live.app) == [id])
    deaf.close()


@pytest.mark.parametrize(
    "command",
    [["revoke"], pytest.param(["revoke_by_stamped_headers", "order=7"], marks=pytest.mark.nightly)],
)
def test_celerys_own_command_removes(live: Live, command: list[str]) -> None:
    """`celery control revoke ID`"""
    live.start_workers(1, "-c", "1")
    signature = live.app.tasks["e2e.note"].s("x")
    signature.stamp(order="7")
    sent = signature.apply_async(countdown=HOUR)
    arguments = command if command[1:] else [*command, sent.id]
    words = ("-m", "celery", "-A", "tests.support.tasks", "control", *arguments)
    environment = {**environment_of(live.app), "PYTHONWARNINGS": "ignore"}
    nursery.done(words, environment=environment)
    assert live.toc.get(sent.id) == []
    assert sent.state == states.REVOKED


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
