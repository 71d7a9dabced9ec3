"""What is further away than the horizon of its queue is in the task library only (X12)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Producer, Queue
from redis.exceptions import ConnectionError as RedisConnectionError
from sqlalchemy import select

import celery_toc
from celery_toc.worker import remote_control
from kombu_toc import ConfigurationError, LibraryError, MessageError, Put, TimeoutCenter, center_for
from kombu_toc.library import horizon, statuses
from kombu_toc.library.horizon import FarStore, Loader
from kombu_toc.library.keeper import Keeper
from kombu_toc.library.putting import Putter
from kombu_toc.library.rebuild import Comparison, Reconciler
from kombu_toc.library.records import Row, now_us
from kombu_toc.library.store import Store

from ..support.library import consume, publish, status_of

pytestmark = pytest.mark.usefixtures("client")

HORIZON = 3600
DAY = 86_400_000  # milliseconds


@pytest.fixture
def queue(broker: Connection) -> Connection:
    """A connection that has declared the queue with a horizon of an hour."""
    Queue("mail", queue_arguments={"x-horizon": HORIZON})(broker.default_channel).declare()
    return broker


@pytest.fixture
def asked(server, options) -> Iterator[TimeoutCenter]:
    """A center that asks the library."""
    center = center_for(server.toc_url, **options)
    yield center
    center.client.close()


@pytest.fixture
def load(store: Store, center: TimeoutCenter) -> Callable[[], int]:
    """Puts what is within the horizon, as the upkeep does; returns how many."""

    def load() -> int:
        one = loader_of(store, center)
        while one.turn(time.monotonic() + 60):
            pass
        return one.loaded

    return load


def loader_of(store: Store, center: TimeoutCenter, doubtful: Any = lambda rows: None) -> Loader:
    return Loader(FarStore(store), Putter(store, center), doubtful)


def send(connection: Connection, id: str, delay_ms: int = DAY, **headers: Any) -> None:
    publish(connection, id, **{"x-delay": delay_ms, **headers})


def row_of(store: Store, id: str) -> Row:
    [row] = store.of_ids([id])
    return row


def time_passes(store: Store, *ids: str, until_due: float = 60.0) -> None:
    """As if it were later: so many seconds are left until these are due."""
    rows = store.of_ids(ids)
    FarStore(store).move(rows, {"action_us": now_us() + int(until_due * 1e6)})


def test_what_is_far_ahead_is_not_in_redis_until_its_time_comes(queue, store, center, load):
    send(queue, "far")
    send(queue, "near", 60_000)
    assert row_of(store, "far").place == statuses.FAR
    assert row_of(store, "near").place == statuses.IN_REDIS
    assert [one.id for one in center.get(["far", "near"])] == ["near"]
    assert load() == 0
    time_passes(store, "far", until_due=HORIZON - 5)
    assert load() == 1
    row = row_of(store, "far")
    assert row.place == statuses.IN_REDIS
    [found] = center.get("far")
    assert found.body == row.body
    assert abs(found.time_us - row.action_us) <= 3
    assert load() == 0


def test_it_runs_on_time_and_once(queue, store, load):
    for number in range(20):
        send(queue, f"far-{number}")
    time_passes(store, *(f"far-{number}" for number in range(20)), until_due=0.5)
    due = row_of(store, "far-0").action_us
    assert load() == 20
    taken = consume(queue, 20)
    assert sorted(taken) == sorted(f"far-{number}" for number in range(20))
    assert time.time_ns() // 1000 >= due
    assert all(status_of(store, id) == ["done"] for id in taken)


def test_the_soonest_is_put_first_whatever_its_queue_and_table(
    queue, store, center, load, monkeypatch
):
    Queue("other", queue_arguments={"x-horizon": 7200})(queue.default_channel).declare()
    ids = [f"far-{number:02d}" for number in range(40)]
    for number, id in enumerate(ids):
        publish(queue, id, "other" if number % 2 else "mail", **{"x-delay": DAY})
        time_passes(store, id, until_due=60 + number)
    monkeypatch.setattr(horizon, "TOGETHER", 1)
    put: list[str] = []
    plain = Putter.put

    def noting(self: Putter, rows: Any) -> int:
        put.extend(row.id for row in rows)
        return plain(self, rows)

    monkeypatch.setattr(Putter, "put", noting)
    assert load() == 40
    assert put == ids


def test_hours_away_are_caught_up_in_bounded_steps(queue, store, center, monkeypatch):
    ids = [f"far-{number}" for number in range(30)]
    for id in ids:
        send(queue, id)
    time_passes(store, *ids, until_due=-7200)
    monkeypatch.setattr(horizon, "BYTES", 4 * len(row_of(store, ids[0]).body))
    sizes: list[int] = []
    plain = Putter.put

    def noting(self: Putter, rows: Any) -> int:
        sizes.append(len(rows))
        return plain(self, rows)

    monkeypatch.setattr(Putter, "put", noting)
    one = loader_of(store, center)
    while one.turn(time.monotonic() + 60):
        pass
    assert sum(sizes) == 30
    assert 0 < max(sizes) <= 4
    assert sorted(consume(queue, 30)) == sorted(ids)


def test_a_turn_ends_soon_and_says_that_there_is_more(queue, store, center, monkeypatch):
    ids = [f"far-{number}" for number in range(8)]
    for id in ids:
        send(queue, id)
    time_passes(store, *ids)
    monkeypatch.setattr(horizon, "TURN", 0.0)
    monkeypatch.setattr(horizon, "TOGETHER", 3)
    one = loader_of(store, center)
    assert one.turn(time.monotonic() + 60)
    assert 0 < one.loaded < len(ids)
    monkeypatch.setattr(horizon, "TURN", 60.0)
    assert not one.turn(time.monotonic() + 60)
    assert one.loaded == 8


@pytest.fixture(params=["few", "many"])
def as_many(request, monkeypatch) -> None:
    """A thread puts what is many."""
    monkeypatch.setattr(horizon, "WORTH_A_THREAD", {"few": 10**9, "many": 0}[request.param])


@pytest.mark.parametrize("when", ["before the put", "after the put"])
def test_a_loader_that_dies_has_put_nothing_twice_and_forgotten_nothing(
    queue, store, center, load, monkeypatch, when, as_many
):
    send(queue, "far")
    time_passes(store, "far", until_due=0.2)
    plain = Putter.put
    doubtful: list[str] = []

    class Killed(BaseException):
        pass

    def dies(self: Putter, rows: Any) -> int:
        if when == "after the put":
            plain(self, rows)
        raise Killed

    monkeypatch.setattr(Putter, "put", dies)
    with pytest.raises(Killed):
        loader_of(store, center, lambda rows: doubtful.extend(row.id for row in rows)).turn(
            time.monotonic() + 60
        )
    assert doubtful == ["far"]
    monkeypatch.setattr(Putter, "put", plain)
    assert row_of(store, "far").place == statuses.FAR
    if when == "after the put":
        assert consume(queue, 1) == ["far"]
        assert status_of(store, "far") == ["done"]
        assert load() == 0
    else:
        assert load() == 1
        assert consume(queue, 1) == ["far"]
    assert center.counts("mail") == (0, 0, 0, 0)


def test_a_message_that_is_there_already_is_not_put_twice(queue, store, center, load):
    send(queue, "far")
    time_passes(store, "far", until_due=60)
    Putter(store, center).put(store.of_ids(["far"]))
    assert load() == 1
    assert len(center.get("far")) == 1
    assert row_of(store, "far").place == statuses.IN_REDIS


def test_a_loader_that_is_elected_no_longer_puts_nothing(queue, store, center):
    send(queue, "far")
    time_passes(store, "far")
    one = loader_of(store, center)
    one.turn(time.monotonic())
    assert not center.get("far")
    assert row_of(store, "far").place == statuses.FAR


def test_each_turn_puts_something_however_slow_the_looks_are(
    queue, store, center, monkeypatch, as_many
):
    """A turn ended before it had put anything, if its looks took as long as a turn may."""
    send(queue, "far")
    time_passes(store, "far")
    monkeypatch.setattr(horizon, "TURN", 0.05)
    ahead = FarStore.ahead

    def slow(*args: Any) -> Any:
        time.sleep(0.06)
        return ahead(*args)

    monkeypatch.setattr(FarStore, "ahead", slow)
    one = loader_of(store, center)
    one.turn(time.monotonic() + 60)
    assert one.loaded == 1


def test_redis_may_be_away_for_a_while(queue, store, center, load, monkeypatch, as_many):
    send(queue, "far")
    time_passes(store, "far")

    def away(self: Putter, rows: Any) -> int:
        raise RedisConnectionError("away")

    with monkeypatch.context() as patch:
        patch.setattr(Putter, "put", away)
        with pytest.raises(RedisConnectionError):
            load()
    assert row_of(store, "far").place == statuses.FAR
    assert load() == 1


def test_a_fleet_has_one_loader_and_another_follows_it(queue, store, center, server, options):
    send(queue, "far")
    first, second = (
        Keeper(store, center_for(server.toc_url), name, 86_400) for name in ("one", "two")
    )
    first.turn()
    time_passes(store, "far")
    second.turn()
    assert row_of(store, "far").place == statuses.FAR
    for key in center.client.scan_iter("*speak*"):
        center.client.delete(key)  # as when the first has died
    second._next["attempt"] = 0.0
    while row_of(store, "far").place == statuses.FAR:
        second.turn()
    assert len(center.get("far")) == 1
    for one in (first, second):
        one.close()


def test_a_database_that_is_away_holds_up_no_other(queue, store, center, load, monkeypatch):
    ids = [f"far-{number}" for number in range(12)]
    for id in ids:
        send(queue, id)
    time_passes(store, *ids)
    first, second = store.shards.databases
    there = {id for id in ids if store.shards.of(id).database is second}
    assert 0 < len(there) < len(ids)

    def away(work: Any) -> Any:
        first._rests_until = time.monotonic() + 60
        raise LibraryError("away")

    with monkeypatch.context() as patch:
        patch.setattr(first, "run_single", away)
        patch.setattr(first, "run", away)
        one = loader_of(store, center)
        while one.loaded < len(there):
            with suppress(LibraryError):
                one.turn(time.monotonic() + 60)
    assert {one.id for one in center.get(ids)} == there
    first._rests_until = 0.0
    assert load() == len(ids) - len(there)
    assert len(center.get(ids)) == len(ids)


@pytest.mark.every_engine
def test_what_somebody_else_has_locked_holds_up_no_other_row(queue, store, center, load, engine):
    if engine is None:
        return  # SQLite has one writer: there are no locked rows beside it
    for id in ("locked", "free"):
        send(queue, id)
    time_passes(store, "locked", "free")
    shard = store.shards.of("locked")
    table = shard.tables.pending
    with shard.database.engine.begin() as connection:
        connection.execute(select(table.c.id).where(table.c.id == "locked").with_for_update())
        assert load() == 1
        assert [one.id for one in center.get(["locked", "free"])] == ["free"]
    assert load() == 1


@pytest.mark.parametrize("what", ["cancel", "reschedule", "purge"])
def test_what_is_done_while_it_is_put_is_done(
    queue, asked, store, center, load, monkeypatch, what, as_many
):
    """Somebody sees it far ahead, and then it is put: what they do about it holds."""
    send(queue, "far")
    time_passes(store, "far")
    seen, done = threading.Event(), []
    plain, change = Putter.put, {"cancel": "end", "purge": "end", "reschedule": "put_now"}[what]
    changing = getattr(FarStore, change)

    def noting(self: FarStore, *args: Any) -> Any:
        seen.set()
        return changing(self, *args)

    def act() -> None:
        if what == "cancel":
            done.append(asked.cancel("far"))
        elif what == "purge":
            done.append(asked.queues.purge("mail"))
        else:
            done.append(asked.reschedule("far", delay=1000))

    other = threading.Thread(target=act)

    def putting(self: Putter, rows: Any) -> int:
        if not other.ident:
            other.start()
            assert seen.wait(10)
        return plain(self, rows)

    monkeypatch.setattr(FarStore, change, noting)
    monkeypatch.setattr(Putter, "put", putting)
    assert load() == 1
    other.join(20)
    if what == "cancel":
        assert [one.deleted for one in done[0]] == [True]
    if what == "reschedule":
        [found] = center.get("far")
        assert abs(found.time_us / 1e6 - time.time() - 1000) < 60
        assert abs(row_of(store, "far").action_us - found.time_us) <= 3
    else:
        assert not center.get("far")
        assert status_of(store, "far") == ["cancelled"]


def test_a_retry_of_tomorrow_is_far_ahead(queue, store, load):
    publish(queue, "order-1")

    def retry(message: Any) -> None:
        send(queue, "order-1", retries=1)
        message.ack()

    assert consume(queue, 1, retry) == ["order-1"]
    assert status_of(store, "order-1") == ["done", "pending"]
    assert row_of(store, "order-1").place == statuses.FAR
    time_passes(store, "order-1", until_due=0.1)
    assert load() == 1
    assert consume(queue, 1) == ["order-1"]
    assert status_of(store, "order-1") == ["done", "done"]


def test_a_batch_that_is_aborted_takes_it_back(queue, store):
    if not hasattr(Producer, "batch"):
        return  # Kombu before 5.7 publishes no batches
    headers = {"task": "remind", "x-delay": DAY}
    with queue.Producer() as producer:
        with pytest.raises(KeyError), producer.batch():
            producer.publish({}, routing_key="mail", headers={"id": "aborted", **headers})
            raise KeyError
        with producer.batch():
            producer.publish({}, routing_key="mail", headers={"id": "sent", **headers})
    assert store.of_ids(["aborted"]) == []
    assert row_of(store, "sent").place == statuses.FAR


def test_what_has_a_unique_key_is_put(queue, store, center):
    send(queue, "unique", **{"x-unique": "order-1"})
    assert len(center.get("unique")) == 1


def test_it_is_found_by_its_id(queue, asked, store):
    send(queue, "far")
    [found] = asked.get("far")
    assert (found.far, found.state, found.topic, found.id) == (True, "waiting", "mail", "far")
    assert found.body == row_of(store, "far").body
    assert abs(found.time_us - row_of(store, "far").action_us) <= 3
    assert asked.get("far", topic="mail") == [found]
    assert asked.get(["none", "far"]) == [found]
    assert not asked.get("far", topic="other")
    time_passes(store, "far")
    Putter(store, asked).put(store.of_ids(["far"]))
    [there] = asked.get("far")
    assert not there.far


def test_it_is_listed_in_the_order_of_time_page_by_page(queue, asked, store):
    for number in range(6):
        send(queue, f"near-{number}", 60_000 + number)
    ids = [f"far-{number:02d}" for number in range(24)]
    for id in ids:
        send(queue, id)
    rows = {row.id: row for row in store.of_ids(ids)}
    at = now_us() + 7_200_000_000
    for number, id in enumerate(ids):  # three at a time have one time, and the next are just after
        FarStore(store).move([rows[id]], {"action_us": at + number // 3})
    whole = asked.scan("mail", limit=100).messages
    assert [one.id for one in whole][:6] == [f"near-{number}" for number in range(6)]
    assert [one.id for one in whole][6:] == ids
    for limit in (1, 4, 7):
        seen, after = [], None
        while True:
            page = asked.scan("mail", limit=limit, after=after)
            seen += [one.id for one in page.messages]
            after = page.after
            if after is None:
                break
        assert seen == [one.id for one in whole]
    assert asked.count("mail") == asked.count() == 30
    later = asked.scan(since=at / 1e6 - 1, state="waiting", limit=5).messages
    assert [one.id for one in later] == ids[:5]
    assert asked.count("mail", until=at / 1e6 - 1) == 6
    assert asked.count("mail", where=lambda found: found.far) == 24
    assert asked.count(state="dead") == 0
    assert not asked.scan("mail", state="in flight").messages
    assert asked.library.counts() == {"pending": 30, "not put": 0, "far": 24}


def test_it_is_counted_apart_up_to_a_limit(queue, asked, center):
    for number in range(5):
        send(queue, f"m{number}")
    send(queue, "near", 1000)
    asked.queues.declare("other")
    asked.put("other", "x", b"x", delay=60)
    assert asked.queues.count_far() == asked.queues.count_far("mail") == {"mail": 5}
    assert asked.queues.count_far("other") == {}
    assert asked.queues.count_far("mail", limit=1)["mail"] < 5
    assert asked.counts("mail").scheduled == 1
    with pytest.raises(LibraryError, match="'mail' has a horizon, and this process no task"):
        center.queues.count_far()
    assert center.queues.count_far("other") == {}


@pytest.mark.every_engine
def test_many_of_one_time_are_listed_each_once(queue, asked, store, monkeypatch):
    ids = [f"far-{number:03d}" for number in range(60)]
    for id in ids:
        send(queue, id)
    FarStore(store).move(store.of_ids(ids), {"action_us": now_us() + 7_200_000_000})
    monkeypatch.setattr(horizon, "CHUNK", 8)
    seen, after = [], None
    while True:
        page = asked.scan(limit=7, after=after)
        seen += [one.id for one in page.messages]
        after = page.after
        if after is None:
            break
    assert seen == ids


def test_it_is_cancelled(queue, asked, store, load):
    send(queue, "far")
    send(queue, "other")
    [cancelled] = asked.cancel("far")
    assert (cancelled.deleted, cancelled.state, cancelled.topic) == (True, "waiting", "mail")
    assert status_of(store, "far") == ["cancelled"]
    assert [one.deleted for one in asked.cancel(asked.get("other"))] == [True]
    assert status_of(store, "other") == ["cancelled"]
    assert not asked.cancel(["far", "other"])
    assert load() == 0


def test_one_is_cancelled_that_a_loader_has_put_before_it_died(queue, asked, center, store):
    send(queue, "far")
    Putter(store, center).put(store.of_ids(["far"]))
    [cancelled] = asked.cancel("far")
    assert cancelled.deleted
    assert not center.get("far")
    assert status_of(store, "far") == ["cancelled"]


def test_of_one_id_the_far_and_the_near_one_are_cancelled(queue, asked, center, store):
    send(queue, "twice", 60_000)
    send(queue, "twice", DAY)
    assert len(asked.get("twice")) == 2
    asked.cancel("twice")
    assert not asked.get("twice")
    assert status_of(store, "twice") == ["cancelled"] * 2


def test_it_is_rescheduled_within_the_horizon_and_beyond(queue, asked, center, store):
    send(queue, "far")
    at = time.time() + 3 * 86_400
    [moved] = asked.reschedule("far", at=at)
    assert moved.moved
    assert abs(moved.time_us / 1e6 - at) < 0.001
    assert row_of(store, "far").place == statuses.FAR
    assert row_of(store, "far").action_us == moved.time_us
    assert not center.get("far")
    [moved] = asked.reschedule("far", delay=100)
    assert row_of(store, "far").place == statuses.IN_REDIS
    [found] = center.get("far")
    assert abs(found.time_us - moved.time_us) <= 3
    assert abs(row_of(store, "far").action_us - moved.time_us) <= 3
    # What is in Redis stays there.
    [moved] = asked.reschedule("far", delay=86_400)
    assert row_of(store, "far").place == statuses.IN_REDIS
    [found] = center.get("far")
    assert found.time_us == moved.time_us


def test_it_is_run_now(queue, asked, store):
    send(queue, "far")
    send(queue, "found")
    assert [one.moved for one in asked.run_now("far")] == [True]
    assert [one.moved for one in asked.reschedule(asked.get("found"))] == [True]
    assert sorted(consume(queue, 2)) == ["far", "found"]
    assert status_of(store, "far") == status_of(store, "found") == ["done"]


def test_one_is_rescheduled_that_a_loader_has_put_before_it_died(queue, asked, center, store, load):
    send(queue, "far")
    Putter(store, center).put(store.of_ids(["far"]))
    asked.reschedule("far", delay=2 * 86_400)
    [found] = center.get("far")
    assert abs(found.time_us / 1e6 - time.time() - 2 * 86_400) < 60
    asked.run_now("far")
    assert consume(queue, 1) == ["far"]


def test_tasks_are_cancelled_and_moved_by_their_business_id(queue, asked, store):
    headers = {"x-biz-type": "order", "x-biz-id": "42"}
    send(queue, "far", **headers)
    send(queue, "later", **headers)
    assert {one.moved for one in asked.library.reschedule(biz_id="42", delay=2 * 86_400)} == {True}
    assert {row.place for row in store.of_ids(["far", "later"])} == {statuses.FAR}
    assert len(asked.library.cancel(biz_id="42")) == 2
    assert status_of(store, "far") == ["cancelled"]


def test_it_is_purged_with_its_queue_and_goes_with_it(queue, asked, store, load):
    for id in ("far", "further"):
        send(queue, id)
    send(queue, "near", 60_000)
    assert asked.queues.purge("mail") == 3
    assert {status_of(store, id)[0] for id in ("far", "further", "near")} == {"cancelled"}
    send(queue, "left")
    assert not asked.queues.delete("mail", if_empty=True, settle=0)
    assert asked.queues.names() == ["mail"]
    assert asked.queues.delete("mail")
    assert status_of(store, "left") == ["cancelled"]
    assert load() == 0


def test_nothing_is_missing_in_redis_or_left_without_a_row(queue, store, center):
    send(queue, "far")
    send(queue, "put")
    Putter(store, center).put(store.of_ids(["put"]))
    assert not list(Comparison(store, center, sleep=lambda seconds: None).run())
    time_passes(store, "far", until_due=-600)
    reconciler = Reconciler(Putter(store, center))
    assert reconciler.look() == 0


def test_a_rebuild_leaves_it_in_the_library(queue, asked, store, client):
    send(queue, "far")
    send(queue, "near", 60_000)
    client.flushdb()
    assert asked.library.rebuild().put == 1
    assert row_of(store, "far").place == statuses.FAR


def test_when_redis_is_lost_it_is_put_all_the_same(queue, store, client, center, load):
    send(queue, "far")
    client.flushdb()
    center.registry.forget("mail")
    time_passes(store, "far", until_due=HORIZON - 5)
    assert load() == 1
    assert center.registry.declared("mail").declaration.horizon == HORIZON
    assert len(center.get("far")) == 1


def test_a_horizon_may_be_changed_and_taken_away(queue, asked, center, store, load):
    send(queue, "far")
    asked.queues.alter("mail", horizon=2 * 86_400)
    assert load() == 1
    asked.queues.alter("mail", horizon=60)
    assert row_of(store, "far").place == statuses.IN_REDIS
    center.registry.forget("mail")
    queue.default_channel.center.registry.forget("mail")
    send(queue, "again", 120_000)
    assert row_of(store, "again").place == statuses.FAR
    asked.queues.alter("mail", horizon=None)
    queue.default_channel.center.registry.forget("mail")
    send(queue, "direct")
    assert row_of(store, "direct").place == statuses.IN_REDIS
    assert asked.registry.declared("mail").declaration.far
    assert [one.far for one in asked.get("again")] == [True]
    assert load() == 1
    send(queue, "last")
    assert not [one for one in center.get(["again", "last"]) if one.far]


def test_a_publish_needs_no_redis_if_it_is_far_ahead(queue, store, monkeypatch):
    recorder = queue.default_channel.recorder
    recorder.away_until = time.monotonic() + 60
    send(queue, "far")
    recorder.away_until = 0.0
    assert row_of(store, "far").place == statuses.FAR


def test_what_was_sent_without_knowing_the_queue_goes_back_to_the_library(
    queue, store, center, options, server, monkeypatch
):
    monkeypatch.setattr("kombu_toc.library.store.DOUBT_US", 0)
    send(queue, "far")
    FarStore(store).store.place([row_of(store, "far").key], statuses.NOT_PUT)
    keeper = Keeper(store, center_for(server.toc_url), "one", 86_400)
    assert keeper.put_missing() == 0
    assert row_of(store, "far").place == statuses.FAR
    assert not center.get("far")
    keeper.close()


def test_a_database_that_is_away_is_an_error_or_not_as_rows_are_required(
    queue, center, store, monkeypatch
):
    recorder = queue.default_channel.recorder

    def away(*args: Any) -> None:
        raise LibraryError("away")

    monkeypatch.setattr(recorder.store, "insert", away)
    with pytest.raises(LibraryError):
        send(queue, "far")
    assert not center.get("far")
    monkeypatch.setattr(recorder, "required", False)
    send(queue, "far")
    assert len(center.get("far")) == 1


@pytest.mark.parametrize(
    "value, said",
    [
        (59, "a number of seconds from 60 up"),
        ("soon", "a number of seconds from 60 up"),
        (-1, "a number of seconds from 60 up"),
    ],
)
def test_a_horizon_that_makes_no_sense_is_refused(broker, value, said):
    with pytest.raises(ConfigurationError, match=said):
        Queue("mail", queue_arguments={"x-horizon": value})(broker.default_channel).declare()


def test_a_queue_without_rows_has_no_horizon(asked):
    with pytest.raises(ConfigurationError, match="leave one of them out"):
        asked.queues.declare("mail", horizon=60, library="off")
    asked.queues.declare("mail", horizon=60, library="through")
    with pytest.raises(ConfigurationError, match="leave one of them out"):
        asked.queues.alter("mail", library="off")
    asked.queues.alter("mail", library="off", horizon=None)
    with pytest.raises(ConfigurationError, match="leave one of them out"):
        asked.queues.alter("mail", horizon=60)


@pytest.mark.parametrize("near", [False, True])
def test_what_is_far_ahead_is_replaced_in_the_library(queue, asked, store, load, near):
    """Body and time, in one step; near: it is put into Redis at once."""
    asked.put("mail", "order-7", b"old", delay=DAY / 1000)
    assert asked.counts("mail").scheduled == 0
    delay = 60 if near else 2 * DAY / 1000
    made = asked.put("mail", "order-7", b"new", delay=delay, if_exists="replace")
    assert made == Put("order-7", "replaced")
    [row] = store.of_ids(["order-7"])
    assert (row.body, row.status) == (b"new", statuses.PENDING)
    assert asked.counts("mail").scheduled == near
    [found] = asked.get("order-7")
    assert (found.body, found.far) == (b"new", not near)
    assert asked.library.check() == []
    assert len(asked.cancel("order-7")) == 1
    assert status_of(store, "order-7") == ["cancelled"]


def test_equal_puts_that_are_far_ahead_are_rows_of_their_own(queue, asked, store):
    for token in (None, None, "t", "t"):
        asked.put("mail", "order-7", b"same", delay=DAY / 1000, token=token)
    assert store.count()["pending"] == 3
    with pytest.raises(MessageError, match="slot basis 'order-7'"):
        asked.put("mail", "order-7", b"new", basis="other", if_exists="replace")
    assert len(asked.cancel("order-7")) == 3


def test_a_center_puts_what_is_far_ahead_into_the_library(queue, asked, store, load):
    asked.put("mail", "one", b"x", delay=86_400)
    asked.put_many("mail", [{"id": f"many-{n}", "body": b"y", "delay": 86_400} for n in range(3)])
    ids = ["one", "many-0", "many-1", "many-2"]
    assert {row.place for row in store.of_ids(ids)} == {statuses.FAR}
    assert {one.far for one in asked.get(ids)} == {True}
    time_passes(store, *ids)
    assert load() == 4
    assert {one.far for one in asked.get(ids)} == {False}


def test_a_queue_that_is_written_behind_has_a_horizon(broker, store, load):
    arguments = {"x-horizon": HORIZON, "x-library": "behind"}
    Queue("mail", queue_arguments=arguments)(broker.default_channel).declare()
    send(broker, "far")
    assert row_of(store, "far").place == statuses.FAR
    time_passes(store, "far", until_due=0.1)
    assert load() == 1
    assert consume(broker, 1) == ["far"]


def test_without_a_library_a_horizon_is_refused(server, center):
    with Connection(server.toc_url) as connection, pytest.raises(ConfigurationError) as caught:
        Queue("mail", queue_arguments={"x-horizon": 60})(connection.default_channel).declare()
    assert "queue 'mail': horizon needs a task library: set toc_library" in str(caught.value)
    with pytest.raises(ConfigurationError, match="needs a task library"):
        center.queues.declare("mail", horizon=60)
    center.queues.declare("mail")
    with pytest.raises(ConfigurationError, match="needs a task library"):
        center.queues.alter("mail", horizon=60)
    assert center.queues.alter("mail", horizon=None)


def test_what_a_worker_lists_is_in_redis(server, options, queue, store, monkeypatch):
    app = Celery("shop", broker=server.toc_url)
    app.conf.broker_transport_options = options
    app.conf.task_default_queue = "mail"

    @app.task(name="shop.add")
    def add() -> None: ...

    far = add.apply_async(countdown=86_400)
    near = add.apply_async(countdown=60)
    tasks = celery_toc.timeout_center(app)
    assert [one.id for one in tasks.scheduled(["mail"], 9)] == [near.id, far.id]
    state = SimpleNamespace(app=app, hostname="w", consumer=SimpleNamespace())
    state.consumer.task_consumer = SimpleNamespace(queues=[Queue("mail")])
    step = SimpleNamespace(center=tasks.center)
    monkeypatch.setattr(remote_control, "_step", lambda state: step)
    celerys = SimpleNamespace(scheduled=lambda state, **how: [])
    monkeypatch.setattr(remote_control, "_celerys", celerys)

    def refuse(*how: Any, **more: Any) -> None:
        raise AssertionError("a database was asked")

    monkeypatch.setattr("kombu_toc.library.horizon.FarMessages.read", refuse)
    listed = remote_control.scheduled(state)
    assert [one["request"]["id"] for one in listed] == [near.id]
    app.close()
