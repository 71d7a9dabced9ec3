"""What is put back from the library: not what has ended, expired, or is kept without one (X12)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kombu_toc import TimeoutCenter, center_for
from kombu_toc.consumer.poller import REREAD
from kombu_toc.library import statuses
from kombu_toc.library.keeper import Keeper
from kombu_toc.library.putting import LOST, Putter
from kombu_toc.library.rebuild import Reconciler
from kombu_toc.library.records import Event, Row, now_us
from kombu_toc.library.store import Store

from ..support.library import end, publish, status_of
from ..support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("client")

LATER = {"x-delay": 60_000}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is on its way, and what is missing once is missing."""
    monkeypatch.setattr("kombu_toc.library.rebuild.UNDER_WAY_US", 0)
    monkeypatch.setattr("kombu_toc.library.rebuild.CONFIRM", 0.0)
    monkeypatch.setattr("kombu_toc.library.store.DOUBT_US", 0)


@pytest.fixture
def recorded(server: Any, options: dict[str, Any]) -> Iterator[TimeoutCenter]:
    made = center_for(server.toc_url, **options)
    made.leases.grace = 0
    yield made
    made.recorder.recorder.close()


@pytest.fixture
def look(store: Store, center: TimeoutCenter) -> Callable[[], int]:
    """Two looks of the upkeep: what is missing is looked at twice."""
    reconciler = Reconciler(Putter(store, center))
    return lambda: reconciler.look() + reconciler.look()


def lost(
    broker: Any, store: Store, center: TimeoutCenter, id: str, biz: str = "", **changes: Any
) -> Row:
    """A row whose message is not in Redis.

    changes: to the row
    """
    publish(broker, id, **LATER, **({"x-biz-id": biz} if biz else {}))
    center.cancel(id)  # this center has no library
    [row] = store.of_ids([id])
    store.forget([row.key])
    row = row._replace(**{"action_us": now_us() - 1_000_000, **changes})
    store.insert([row])
    return row


def switch_off(recorded: TimeoutCenter, center: TimeoutCenter) -> None:
    recorded.queues.alter("mail", library="off")
    center.registry.forget("mail")


# -- check


def test_check_puts_nothing_that_has_ended(broker, store, center, recorded):
    row = lost(broker, store, center, "order-1")
    end(store, row)
    store.insert([row])
    assert [one.kind for one in recorded.library.check(fix=True)] == ["not in Redis"]
    assert not center.get("order-1")
    assert status_of(store, "order-1") == ["done"]
    assert recorded.library.check() == []


def test_check_puts_nothing_that_has_expired(broker, store, center, recorded):
    lost(broker, store, center, "order-1", traits=";e500")
    recorded.library.check(fix=True)
    assert not center.get("order-1")
    assert status_of(store, "order-1") == ["expired"]


def test_what_check_puts_is_pending(broker, store, center, recorded):
    long_ago = now_us() - 600_000_000
    lost(broker, store, center, "order-1", status=statuses.TAKEN, modified_us=long_ago)
    recorded.library.check(fix=True)
    assert center.get("order-1")
    assert status_of(store, "order-1") == ["pending"]


@pytest.mark.parametrize("status", [statuses.TAKEN, statuses.PENDING], ids=["taken", "at once"])
def test_what_kills_its_workers_is_dead_after_as_many_retries_as_its_queue_has(
    broker, store, center, recorded, look, status
):
    """An early acknowledgement: Redis has nothing, and the worker never says what became of it, or
    even that it had it."""
    long_ago = now_us() - 600_000_000
    lost(broker, store, center, "order-1", status=status, modified_us=long_ago)
    recorded.queues.alter("mail", retries=2)
    center.registry.forget("mail")
    for _ in range(2):
        assert look() == 1
        [message] = center.pop("mail").messages
        center.ack(message)
        [row] = store.of_ids(["order-1"])
        store.forget([row.key])
        store.insert([row._replace(status=status, modified_us=long_ago)])
    assert look() == 0
    [dead] = center.get("order-1")
    assert (dead.state, dead.reason) == ("dead", LOST)
    assert dead.error == "3 workers, one after the other"
    assert status_of(store, "order-1") == ["dead"]
    assert look() == 0
    assert recorded.dead.requeue("mail") == 1
    assert [one.state for one in center.get("order-1")] == ["waiting"]


@pytest.mark.parametrize("how", ["rebuild", "check"])
def test_nothing_is_put_back_before_workers_know_what_is_paused(
    client, store, center, recorded, monkeypatch, caplog, how
):
    """They look every four seconds, and Redis has just said that nothing is."""
    recorded.put("mail", "order-1", b"one")
    recorded.queues.alter("mail", rate="50/s")
    recorded.queues.pause("mail")
    client.flushdb()
    center.queues.declare("mail")  # this center has no library
    began, put = time.monotonic(), list[float]()
    before_put(monkeypatch, lambda: put.append(time.monotonic()))
    recorded.library.rebuild() if how == "rebuild" else recorded.library.check(fix=True)
    assert put[0] > began + REREAD
    assert recorded.queues.describe("mail").limits["rate"].value == "50/s"
    # Nothing that an operator has done is undone silently.
    assert "queue mail is paused again" in caplog.text and "mail is limited again" in caplog.text
    caplog.clear()
    recorded.library.rebuild()
    assert caplog.text == ""
    center.queues.resume("mail")
    assert Keeper(store, center, "one", 86_400).is_restored()
    assert not center.queues.is_paused("mail")


def test_a_lost_pause_is_restored_before_anything_is_put_and_not_once_it_is_lifted(
    client, store, center, recorded
):
    one, other = (Keeper(store, center, name, 86_400) for name in ("one", "other"))
    assert one.is_restored() and other.is_restored(), "there is nothing"
    recorded.queues.declare("mail")
    recorded.queues.alter("mail", rate="50/s")
    recorded.queues.pause("mail")
    client.flushdb()
    began = time.monotonic()
    assert not one.is_restored() and not other.is_restored()
    assert recorded.queues.is_paused("mail")
    assert recorded.queues.describe("mail").limits["rate"].value == "50/s"
    store.declarations.pause("mail", center.registry.topic("mail").declaration, False)
    wait_until(one.is_restored)  # who resumes it had written that, and Redis was lost just then
    assert time.monotonic() > began + REREAD
    assert other.is_restored() and not recorded.queues.is_paused("mail")
    store.declarations.pause("mail", center.registry.topic("mail").declaration, True)
    assert one.is_restored() and not recorded.queues.is_paused("mail"), "an old row"


def test_check_deletes_no_bytes_that_were_put_again(store, center, recorded):
    recorded.put("mail", "order-1", b"one")
    recorded.ack(recorded.pop("mail").messages)
    recorded.recorder.recorder.flush()
    center.put("mail", "order-1", b"one", delay=60)  # this center has no library
    assert [one.kind for one in recorded.library.check(fix=True)] == ["no row"]
    assert center.get("order-1")
    assert status_of(store, "order-1") == ["done", "pending"]


def test_check_gives_no_row_to_what_is_handled_meanwhile(store, center, recorded, monkeypatch):
    center.put("mail", "order-1", b"one")
    insert = Store.insert

    def handled(self: Store, rows: Any) -> None:
        center.ack(center.pop("mail").messages)
        insert(self, rows)

    monkeypatch.setattr(Store, "insert", handled)
    recorded.library.check(fix=True)
    assert store.of_ids(["order-1"]) == []


# -- queues that are kept without a library by now


def test_what_a_queue_without_a_library_has_lost_is_not_put_again(
    broker, store, center, recorded, look
):
    lost(broker, store, center, "order-1")
    switch_off(recorded, center)
    assert recorded.library.check() == []
    assert look() == 0
    assert not center.get("order-1")
    assert store.of_ids(["order-1"]) == []


def test_what_was_sent_to_it_while_redis_was_away_is_put_once(broker, store, center, recorded):
    lost(broker, store, center, "order-1", place=statuses.NOT_PUT)
    switch_off(recorded, center)
    keeper = Keeper(store, center, "test", 86_400)
    assert keeper.put_missing() == 1
    assert center.get("order-1")
    assert store.of_ids(["order-1"]) == []
    assert keeper.put_missing() == 0


def test_what_is_cancelled_there_is_cancelled_once(broker, store, center, recorded):
    publish(broker, "order-1", **LATER)
    recorded.queues.alter("mail", library="off")
    assert [one.deleted for one in recorded.cancel("order-1")] == [True]
    assert status_of(store, "order-1") == ["cancelled"]


# -- what expires


def test_what_expires_by_its_queue_is_not_put_again(broker, store, center, recorded, look):
    recorded.queues.declare("mail", message_ttl=500)
    lost(broker, store, center, "order-1")
    assert look() == 0
    assert status_of(store, "order-1") == ["expired"]
    lost(broker, store, center, "order-2", place=statuses.NOT_PUT)
    Keeper(store, center, "test", 86_400).put_missing()
    assert status_of(store, "order-2") == ["expired"]
    lost(broker, store, center, "order-3")
    assert recorded.library.rebuild().put == 0
    assert status_of(store, "order-3") == ["expired"]
    assert not center.get(["order-1", "order-2", "order-3"])


@pytest.mark.parametrize("traits", ["", ";v90000", ";v90000,e900000"])
def test_what_is_overdue_expires_when_it_would_have(broker, store, center, recorded, traits):
    recorded.queues.declare("mail", message_ttl=600_000)
    row = lost(broker, store, center, "order-1", traits=traits, action_us=now_us() - 300_000_000)
    assert recorded.library.rebuild().put == 1
    [message] = center.pop("mail").messages
    assert message.expires_us == pytest.approx(row.action_us + 600_000_000, abs=10_000_000)
    assert message.visibility == (90 if traits else None)


# -- what happens between a look and a put


def before_put(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Do something just before the next put."""
    put = Putter.put

    def done(self: Putter, rows: Any, **how: Any) -> int:
        monkeypatch.setattr(Putter, "put", put)
        do()
        return put(self, rows, **how)

    monkeypatch.setattr(Putter, "put", done)


def test_a_cancel_before_the_put_of_a_rebuild_holds(
    broker, store, center, recorded, options, server, monkeypatch
):
    lost(broker, store, center, "order-1", action_us=now_us() + 60_000_000)
    before_put(monkeypatch, lambda: recorded.cancel("order-1"))
    assert center_for(server.toc_url, **options).library.rebuild().put == 0
    assert not center.get("order-1")
    assert status_of(store, "order-1") == ["cancelled"]


def test_a_cancel_before_a_late_put_holds(broker, store, center, recorded, monkeypatch):
    row = lost(broker, store, center, "order-1", place=statuses.NOT_PUT)
    before_put(monkeypatch, lambda: end(store, row, statuses.CANCELLED))
    assert Keeper(store, center, "test", 86_400).put_missing() == 0
    assert not center.get("order-1")


def put_in_the_middle(
    broker: Any, store: Store, center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost message comes back just when somebody has looked for its row."""
    row = lost(broker, store, center, "order-1", action_us=now_us() + 60_000_000)
    of_ids = Store.of_ids

    def put_back(self: Store, *given: Any) -> list[Row]:
        found = of_ids(self, *given)
        monkeypatch.setattr(Store, "of_ids", of_ids)
        assert Putter(store, center).put([row]) == (1, set())
        return found

    monkeypatch.setattr(Store, "of_ids", put_back)


def test_a_put_in_the_middle_of_a_cancel_is_undone(broker, store, center, recorded, monkeypatch):
    put_in_the_middle(broker, store, center, monkeypatch)
    assert [one.id for one in recorded.cancel("order-1")] == ["order-1"]
    assert not center.get("order-1")
    assert status_of(store, "order-1") == ["cancelled"]


def test_a_rebuild_says_nothing_else_of_what_has_ended_meanwhile(
    broker, store, center, recorded, monkeypatch
):
    row = lost(broker, store, center, "order-1", action_us=now_us() + 60_000_000)
    before_put(monkeypatch, lambda: end(store, row))
    recorded.library.rebuild()
    assert not center.get("order-1")
    assert status_of(store, "order-1") == ["done"]


def test_bytes_that_were_put_again_are_not_taken_for_those_that_were_put_back(
    store, center, recorded
):
    recorded.put("mail", "order-1", b"one")
    rows = store.of_ids(["order-1"])
    reconciler = Reconciler(Putter(store, center))
    reconciler.watch(rows)
    recorded.ack(recorded.pop("mail").messages)
    recorded.recorder.recorder.flush()
    recorded.put("mail", "order-1", b"one", delay=60)
    reconciler.look()
    assert center.get("order-1")


# -- purged and deleted queues


def test_a_purge_ends_what_had_come_back_from_a_lost_worker(broker, store, center, recorded, look):
    long_ago = now_us() - 600_000_000
    row = lost(*(broker, store, center, "order-1"), status=statuses.TAKEN, modified_us=long_ago)
    publish(broker, "order-2")
    [held] = center.pop("mail").messages
    [other] = store.of_ids(["order-2"])
    store.record([Event(other.key, statuses.TAKEN, long_ago, 1, "w:1", "", ({}, 0))])
    assert Putter(store, center).put([row]) == (1, set())
    assert recorded.queues.purge("mail") == 1
    assert status_of(store, "order-1") == ["cancelled"]
    assert status_of(store, "order-2") == ["taken"], "it is in flight"
    assert look() == 0
    assert held.id == "order-2"


def test_a_deleted_queue_does_not_come_back(broker, store, center, recorded, look):
    publish(broker, "order-1")
    center.pop("mail")
    [row] = store.of_ids(["order-1"])
    long_ago = now_us() - 600_000_000
    store.record([Event(row.key, statuses.TAKEN, long_ago, 1, "gone:1", "", ({}, 0))])
    assert recorded.queues.delete("mail")
    center.registry.forget("mail")
    assert look() == 0
    assert recorded.library.rebuild().put == 0
    assert center.registry.declared("mail") is None
    assert status_of(store, "order-1") == ["cancelled"]
    assert "mail" not in store.topics()


def test_a_deleted_queue_that_is_declared_again_is_known_again(
    broker, store, center, recorded, monkeypatch
):
    """Also to a process that did not delete it, after a minute."""
    publish(broker, "order-1")
    assert "mail" in store.topics()
    store.declarations.forget("mail")  # as another process does that deletes it
    assert center.queues.delete("mail")
    center.registry.forget("mail")
    before = broker.default_channel.center.registry.topic("mail").declaration
    center.queues.declare("mail", **{name: getattr(before, name) for name in ("slots", "retries")})
    publish(broker, "order-2")
    assert "mail" not in store.topics(), "it has written that already"
    monkeypatch.setattr("kombu_toc.library.store.AGAIN", 0.0)
    publish(broker, "order-3")
    assert store.topics()["mail"] == before


# -- the thread that does it


def test_what_is_not_put_keeps_the_thread_from_nothing_else(broker, store, center, monkeypatch):
    monkeypatch.setattr("kombu_toc.library.keeper.TURN", 0.0)
    monkeypatch.setattr("kombu_toc.library.keeper.CHUNK", 10)
    for number in range(120):
        lost(broker, store, center, f"order-{number}", place=statuses.NOT_PUT)
    keeper = Keeper(store, center, "test", 86_400)
    assert keeper.put_missing() <= 10 * len(store.shards.all) < 120
    assert keeper.doubts
    assert keeper.turn()
    while keeper.turn():
        pass
    assert sum(center.counts("mail")[:2]) == 120
    assert not keeper.doubts


# -- what is rescheduled while it is not in Redis


@pytest.mark.parametrize("by", ["id", "business id"])
@pytest.mark.parametrize("place", [statuses.IN_REDIS, statuses.NOT_PUT])
def test_what_is_not_in_redis_is_rescheduled_in_the_library(
    broker, store, center, recorded, place, by
):
    at = now_us() + 60_000_000
    lost(broker, store, center, "order-1", biz="42", action_us=at, place=place)
    if by == "id":
        [moved] = recorded.reschedule("order-1", delay=3600)
    else:
        [moved] = recorded.library.reschedule(biz_id="42", delay=3600)
    assert (moved.topic, moved.id, moved.moved) == ("mail", "order-1", True)
    assert moved.time_us > now_us() + 3000_000_000
    assert not center.get("order-1")
    assert recorded.library.rebuild().put == 1
    [found] = center.get("order-1")
    assert abs(found.time_us - moved.time_us) < 1000
    [row] = store.of_ids(["order-1"])
    assert row.action_us == moved.time_us


def test_a_put_in_the_middle_of_a_reschedule_has_the_new_time(
    broker, store, center, recorded, monkeypatch
):
    put_in_the_middle(broker, store, center, monkeypatch)
    [moved] = recorded.reschedule("order-1", delay=3600)
    [found] = center.get("order-1")
    assert found.time_us > now_us() + 3000_000_000
    assert abs(found.time_us - moved.time_us) < 1000


def test_what_may_have_run_is_not_said_to_be_rescheduled(broker, store, center, recorded):
    lost(broker, store, center, "order-1", action_us=now_us() - 100_000)
    assert recorded.reschedule("order-1", delay=3600) == []
    lost(broker, store, center, "order-2", status=statuses.TAKEN)
    assert recorded.reschedule("order-2", delay=3600) == []


def test_of_two_messages_of_one_id_the_one_that_is_moved_has_another_time(
    broker, store, center, recorded
):
    publish(broker, "order-1", **{"x-delay": 60_000})
    publish(broker, "order-1", **{"x-delay": 90_000})
    rows = {row.body: row.action_us for row in store.of_ids(["order-1"])}
    for number, one in enumerate(center.get("order-1")):
        [moved] = recorded.reschedule([one], delay=3600 * (number + 1))
        rows[one.body] = moved.time_us
        assert {row.body: row.action_us for row in store.of_ids(["order-1"])} == rows
    # Of both, the one that a worker has keeps its time.
    [taken] = center.pop("mail", where=lambda one: one.id == "order-1", early=True).messages
    [moved] = [one for one in recorded.reschedule("order-1", delay=7200) if one.moved]
    [waits] = [body for body in rows if body != taken.body]
    rows[waits] = moved.time_us
    assert {row.body: row.action_us for row in store.of_ids(["order-1"])} == rows


def test_an_id_with_a_number_sign_is_moved_and_cancelled_with_its_row(broker, store, recorded):
    for id in ("order", "order#1"):
        publish(broker, id, **LATER)
    [row] = store.of_ids(["order#1"])
    assert [one.moved for one in recorded.reschedule("order#1", delay=7200)] == [True]
    [moved] = store.of_ids(["order#1"])
    assert moved.action_us > row.action_us + 7_000_000_000
    assert [one.deleted for one in recorded.cancel("order#1")] == [True]
    assert status_of(store, "order#1") == ["cancelled"]
    assert status_of(store, "order") == ["pending"]


def test_what_is_not_in_redis_is_cancelled_beside_an_id_with_a_number_sign(
    broker, store, center, recorded
):
    publish(broker, "order#1", **LATER)
    lost(broker, store, center, "order")
    assert len(recorded.cancel(["order#1", "order"])) == 2
    assert status_of(store, "order") == ["cancelled"]
