"""Dead letters come back as dead letters when Redis was lost (X12)."""

from __future__ import annotations

from typing import Any

import pytest
from kombu import Queue
from sqlalchemy import event

from kombu_toc import DEAD, LibraryError, TimeoutCenter
from kombu_toc.library import statuses
from kombu_toc.library.putting import DeadLetters
from kombu_toc.library.records import Event, now_us

from ..support.library import consume, publish, rebuilt, status_of

pytestmark = pytest.mark.usefixtures("client")


def die(broker: Any, *ids: str) -> None:
    for id in ids:
        publish(broker, id, priority=3)

    def refuse(message: Any) -> None:
        message.error = "ValueError: no"
        message.reject()

    consume(broker, len(ids), refuse)


def dead(center: TimeoutCenter) -> dict[str, Any]:
    center.registry.forget("mail")
    return {one.id: one for one in center.scan("mail", state=DEAD).messages}


def test_dead_letters_come_back_as_they_were(client, broker, store, center, recorded):
    die(broker, "order-1", "order-2")
    before = dead(center)
    assert store.count() == {"dead": 2, "not put": 0}
    assert status_of(store, "order-1") == ["dead"]
    assert [one.id for one in recorded.library.find(status="dead").records] == list(before)
    assert rebuilt(recorded) == 2
    assert recorded.library.rebuild().put == 0
    after = dead(center)
    assert {id: (one.body, one.error, one.slot, one.step) for id, one in after.items()} == {
        id: (one.body, one.error, one.slot, one.step) for id, one in before.items()
    }
    assert {one.reason for one in after.values()} == {"it was dead when Redis was lost"}
    assert recorded.library.check() == []
    assert recorded.dead.requeue("mail") == 2
    assert sorted(consume(broker, 2)) == ["order-1", "order-2"]
    assert store.count() == {"done": 2, "not put": 0}


def test_one_that_was_requeued_comes_back_to_be_run(client, broker, store, center, recorded):
    die(broker, "order-1", "order-2")
    assert recorded.dead.requeue("mail", ids=["order-1"]) == 1
    assert rebuilt(recorded) == 2
    assert dead(center).keys() == {"order-2"}
    assert consume(broker, 1) == ["order-1"]
    assert sorted(status_of(store, "order-1")) == ["done"]


def test_one_that_was_requeued_without_the_library_has_a_row_after_a_check(
    broker, store, center, recorded, monkeypatch
):
    monkeypatch.setattr("kombu_toc.library.rebuild.UNDER_WAY_US", 0)
    die(broker, "order-1")
    center.registry.forget("mail")
    assert center.dead.requeue("mail") == 1
    assert [one.kind for one in recorded.library.check(fix=True)] == ["no row"]
    assert recorded.library.check() == []
    [row] = store.of_ids(["order-1"])
    assert (row.status, row.place) == (statuses.PENDING, statuses.IN_REDIS)


def prune(store, before_us: int) -> None:
    assert not any(list(DeadLetters(store).pruning(s, before_us))[-1] for s in store.shards.all)


def test_what_was_deleted_of_deadqueue_stays_so(client, broker, store, center, recorded):
    die(broker, *(f"order-{n}" for n in range(5)))
    assert recorded.dead.purge("mail", ids=["order-0", "order-1"]) == 2
    assert [one.deleted for one in recorded.cancel("order-2")] == [True]
    prune(store, now_us() - 60_000_000)
    assert rebuilt(recorded) == 2
    assert dead(center).keys() == {"order-3", "order-4"}
    recorded.queues.delete("mail")
    assert recorded.library.rebuild().put == 0
    die(broker, "order-6")
    prune(store, now_us() + 1)
    assert all(not list(store.pages(s, statuses.IN_DEAD_QUEUE, size=9)) for s in store.shards.all)


def test_many_are_deleted_a_few_at_a_time(broker, store, monkeypatch):
    monkeypatch.setattr("kombu_toc.library.putting.CHUNK", 2)
    die(broker, *(f"order-{n}" for n in range(15)))
    deleted: list[int] = []

    def note(_: Any, cursor: Any, statement: str, *__: Any) -> None:
        if statement.startswith("DELETE"):
            deleted.append(cursor.rowcount)

    for database in store.shards.databases:
        event.listen(database._single, "after_cursor_execute", note)
    prune(store, now_us() + 1)
    assert sum(deleted) == 15
    assert max(deleted) == 2


def test_what_is_older_than_deadqueue_keeps_stays_away(client, broker, store, center, recorded):
    recorded.queues.declare("mail", dead_age=1000)
    die(broker, "order-1")
    for shard in store.shards.all:
        shard.database.execute(
            shard.tables.pending.update().values(modified_us=now_us() - 1_001_000_000)
        )
    assert rebuilt(recorded) == 0
    assert dead(center) == {}


def lose_its_worker(broker: Any, store: Any, center: TimeoutCenter) -> None:
    """Of a task that is to be dead then, and was acknowledged when it began."""
    Queue("mail", queue_arguments={"x-guard": True})(broker.default_channel).declare()
    publish(broker, "order-1", **{"x-biz-id": "7"})
    [message] = center.pop("mail").messages
    [row] = store.of_ids(["order-1"])
    store.record([Event(row.key, statuses.DONE, now_us(), 1, "w:1", "", ({}, 0))])
    assert center.bury(message, reason="the task failed", error="its worker is gone")


def test_one_whose_worker_was_lost_runs_when_it_is_requeued(broker, store, center, recorded):
    lose_its_worker(broker, store, center)
    recorded.registry.forget("mail")
    assert recorded.dead.requeue("mail") == 1
    assert status_of(store, "order-1") == ["dead", "pending"]
    [record] = store.history("order-1")[:1]
    assert (record.error, record.attempts, record.biz_id) == ("its worker is gone", 1, "7")
    assert consume(broker, 1) == ["order-1"]
    assert status_of(store, "order-1") == ["done"]


def test_check_leaves_what_was_requeued_so(client, broker, store, center, recorded, monkeypatch):
    monkeypatch.setattr("kombu_toc.library.rebuild.UNDER_WAY_US", 0)
    lose_its_worker(broker, store, center)
    recorded.registry.forget("mail")
    recorded.dead.requeue("mail", ids=["order-1"])
    assert recorded.library.check(fix=True) == []
    assert center.get("order-1")
    assert rebuilt(recorded) == 1
    assert consume(broker, 1) == ["order-1"]


def test_nothing_is_requeued_while_the_library_is_away(
    broker, store, center, recorded, monkeypatch
):
    die(broker, "order-1")

    def away(self: Any, rows: Any) -> None:
        raise LibraryError("it is away")

    with monkeypatch.context() as patched:
        patched.setattr("kombu_toc.library.store.Store.insert", away)
        with pytest.raises(LibraryError, match="away"):
            recorded.dead.requeue("mail")
    assert dead(center).keys() == {"order-1"}
    assert recorded.dead.requeue("mail") == 1


@pytest.mark.parametrize("late", [True, False], ids=["after", "before"])
def test_one_that_was_requeued_before_its_worker_could_say_that_it_died_comes_back_to_be_run(
    client, store, center, recorded, late
):
    """Its worker's database was away; then Redis is lost."""
    recorder = recorded.recorder.recorder
    recorded.put("mail", "order-1", b"1")
    [message] = recorded.pop("mail").messages
    recorder.flush()
    [row] = store.of_ids(["order-1"])
    recorded.bury(message, reason="no use")
    recorder.gathering.forget([row.key])
    died = Event(row.key, statuses.DEAD, now_us(), 1, "w:1", "no use", ({}, 0))
    if not late:
        store.record([died])
    assert recorded.dead.requeue("mail") == 1
    if late:
        store.record([died])
    [row] = store.of_ids(["order-1"])
    assert row.status == statuses.PENDING
    assert rebuilt(recorded) == 1
    [found] = center.get("order-1")
    assert found.state == "waiting"
    # One that dies after that is dead.
    [message] = recorded.pop("mail").messages
    recorded.bury(message, reason="no use")
    recorder.flush()
    assert store.of_ids(["order-1"]) == []
    assert store.history("order-1")[0].status == "dead"


def test_an_id_with_a_number_sign_is_purged_and_requeued_with_its_row(
    client, broker, store, center, recorded
):
    die(broker, "order#1", "order#2", "order#3")
    assert recorded.dead.purge("mail", ids=["order#1"]) == 1
    assert recorded.dead.requeue("mail", ids=["order#2"]) == 1
    assert rebuilt(recorded) == 2
    assert dead(center).keys() == {"order#3"}
    assert [one.id for one in center.scan("mail", state="waiting").messages] == ["order#2"]
