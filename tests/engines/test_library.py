"""The task library: rows in SQL behind Redis, on every engine that is installed (X12, W8)."""

from __future__ import annotations

import logging
import time
import traceback
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from kombu import Connection, Consumer, Queue
from sqlalchemy import text

from kombu_toc import ConfigurationError, LibraryError, LibraryStatus, center_for
from kombu_toc.library import statuses
from kombu_toc.library.keeper import Keeper
from kombu_toc.library.putting import DEAD, MISSING, THERE, Putter, states_in_redis
from kombu_toc.library.rebuild import Reconciler
from kombu_toc.library.records import Event, now_us
from kombu_toc.library.schema import REVISION
from kombu_toc.model import message as envelope

from ..support.library import consume, fill, publish, rebuilt, status_of

pytestmark = pytest.mark.usefixtures("client")


def test_a_publish_writes_a_row_and_puts_the_message(broker, store, center):
    publish(broker, "order-7", **{"x-biz-type": "order", "x-biz-id": 7, "x-delay": 60_000})
    [row] = store.of_ids(["order-7"])
    assert (row.topic, row.task, row.status) == ("mail", "remind", statuses.PENDING)
    assert (row.biz_type, row.biz_id, row.place) == ("order", "7", statuses.IN_REDIS)
    assert abs(row.action_us / 1e6 - time.time() - 60) < 30
    [found] = center.get("order-7")
    assert found.body == row.body


@pytest.mark.every_engine
def test_a_row_follows_its_message_to_its_end(broker, store):
    publish(broker, "order-1")
    seen = []

    def look(message: Any) -> None:
        broker.default_channel.recorder.flush()
        seen.append(status_of(store, "order-1"))
        message.ack()

    assert consume(broker, 1, look) == ["order-1"]
    assert seen == [["taken"]]
    [record] = store.history("order-1")
    assert (record.status, record.attempts, record.task) == ("done", 1, "remind")
    assert store.of_ids(["order-1"]) == []


@pytest.mark.parametrize(("after", "status"), [(1, "done"), (2, "pending")])
def test_history_misses_no_message_that_ends_while_it_is_read(
    broker, store, monkeypatch, after, status
):
    """It goes from one table to the other.

    after: which statement: the one that says where it is, or the one that reads it
    """
    publish(broker, "order-1")
    database = store.shards.of("order-1").database
    read, reads = database.read, [1, 2]

    def read_then_end(statement: Any) -> Any:
        found = read(statement)
        if reads.pop(0) == after:
            consume(broker, 1)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(database, "read", read_then_end)
        assert status_of(store, "order-1") == [status]
    assert status_of(store, "order-1") == ["done"]


@pytest.mark.every_engine
def test_what_no_database_can_keep_of_an_error_keeps_no_end_from_being_recorded(broker, store):
    fill(broker, 3)

    def end(message: Any) -> None:
        if message.headers["id"] == "order-1":
            message.error = "no file '\udcff\0'"
        message.ack()

    consume(broker, 3, end)
    broker.default_channel.recorder.flush()
    assert [status_of(store, f"order-{number}") for number in range(3)] == [["done"]] * 3


def test_a_retry_is_a_message_and_a_row_of_its_own(broker, store):
    publish(broker, "order-1")

    def retry(message: Any) -> None:
        if not message.headers.get("retries"):
            publish(broker, "order-1", retries=1)
        message.ack()

    assert consume(broker, 2, retry) == ["order-1", "order-1"]
    assert status_of(store, "order-1") == ["done", "done"]


def test_a_rejected_message_is_dead_and_a_requeued_one_pending(broker, store):
    publish(broker, "order-1")
    publish(broker, "order-2")

    def refuse(message: Any) -> None:
        message.error = "ValueError: no"
        if message.headers["id"] == "order-1":
            message.reject()
        elif message.delivery.redelivered:
            message.ack()
        else:
            message.requeue()
            broker.default_channel.recorder.flush()
            seen.extend(status_of(store, "order-2"))

    seen: list[str] = []
    consume(broker, 3, refuse)
    [record] = store.history("order-1")
    assert (record.status, record.error) == ("dead", "ValueError: no")
    assert seen == ["pending"]
    assert status_of(store, "order-2") == ["done"]


def test_a_cancelled_message_is_cancelled_in_the_library(broker, store, recorded):
    publish(broker, "order-1", **{"x-delay": 60_000})
    assert [one.deleted for one in recorded.cancel("order-1")] == [True]
    assert status_of(store, "order-1") == ["cancelled"]


def test_what_is_in_the_library_only_can_be_cancelled(client, broker, store, recorded):
    publish(broker, "order-1", **{"x-delay": 60_000})
    client.flushall()
    [one] = recorded.cancel("order-1")
    assert (one.id, one.topic, one.deleted) == ("order-1", "mail", True)
    assert status_of(store, "order-1") == ["cancelled"]


def test_a_rescheduled_message_has_its_new_time_in_the_library(broker, store, recorded):
    publish(broker, "order-1", **{"x-delay": 60_000})
    at = time.time() + 7200
    recorded.reschedule("order-1", at=at)
    [row] = store.of_ids(["order-1"])
    assert row.action_us == pytest.approx(at * 1e6, abs=2000)


def test_a_purged_queue_leaves_nothing_pending(broker, store, recorded):
    fill(broker, 700, **{"x-delay": 60_000})
    publish(broker, "other-1", queue="other", **{"x-delay": 60_000})
    assert recorded.queues.purge("mail") == 700
    assert store.count() == {"cancelled": 700, "pending": 1, "not put": 0}


@pytest.mark.every_engine
def test_tasks_are_found_cancelled_and_moved_by_their_business_id(broker, store, recorded):
    for number in range(5):
        publish(
            *(broker, f"job-{number}"),
            **{"x-biz-type": "order", "x-biz-id": number % 2, "x-delay": 60_000 + number},
        )
    publish(broker, "job-9", **{"x-biz-type": "invoice", "x-biz-id": "1"})
    consume(broker, 1)
    library = recorded.library

    def ids(**how: Any) -> list[str]:
        return [record.id for record in library.find(**how).records]

    assert ids(biz_id="0") == ["job-0", "job-2", "job-4"]
    assert ids(biz_id="1", biz_type="order") == ["job-1", "job-3"]
    assert ids(biz_id="1", status="done") == ["job-9"]
    first = library.find(status="pending", limit=3)
    second = library.find(status="pending", limit=3, after=first.after)
    assert [one.id for one in first.records + second.records] == [f"job-{n}" for n in range(5)]
    assert second.after is None
    assert [one.moved for one in library.reschedule(biz_id="0", delay=7200)] == [True] * 3
    assert [one.deleted for one in library.cancel(biz_id="1")] == [True] * 2
    assert ids(status="cancelled") == ["job-1", "job-3"]
    assert ids(between=(time.time() + 3600, None)) == ["job-0", "job-2", "job-4"]


def test_what_becomes_of_messages_without_rows_is_not_recorded(broker, store):
    channel = broker.default_channel
    Queue("replies", expires=60)(channel).declare()
    for number in range(3):
        publish(broker, f"reply-{number}", queue="replies")
    queue = Queue("replies", expires=60)(channel)
    queue.get(no_ack=True)
    queue.get().ack()
    queue.get().reject()
    channel.recorder.flush()
    assert store.count() == {"not put": 0}


# -- rebuild


@pytest.mark.every_engine
def test_a_rebuild_puts_everything_back_in_the_order_of_time(
    client, broker, store, center, recorded
):
    """A10"""
    Queue("mail", queue_arguments={"x-slots": 4})(broker.default_channel).declare()
    soon = datetime.now(timezone.utc) + timedelta(minutes=5)
    for number in range(300):
        eta = (soon + timedelta(seconds=number * 7 % 300)).isoformat()
        publish(broker, f"order-{number}", priority=number % 3 * 3, eta=eta)
    before = {one.id: one for one in center.scan("mail", limit=1000).messages}
    client.flushall()
    seen: list[tuple[int, int]] = []
    done = recorded.library.rebuild(lambda *how_far: seen.append(how_far))
    assert (done.rows, done.put, done.taken, done.ended) == (300, 300, 0, 0)
    assert seen[-1] == (300, 300)
    center.registry.forget("mail")
    after = {one.id: one for one in center.scan("mail", limit=1000).messages}
    assert center.registry.topic("mail").slots == 4
    assert after.keys() == before.keys()
    for id, found in after.items():
        assert found.body == before[id].body
        assert (found.slot, found.step) == (before[id].slot, before[id].step)
        assert found.time_us // 1000 == before[id].time_us // 1000
    assert recorded.library.rebuild().put == 0


def test_a_rebuild_runs_nothing_again_that_has_ended_or_is_being_done(
    client, broker, store, recorded
):
    fill(broker, 3)
    held: list[Any] = []

    def keep(message: Any) -> None:
        held.append(message)
        if len(held) == 1:
            message.ack()

    with Consumer(broker.channel(), Queue("mail"), on_message=keep, accept=["json"]) as consumer:
        consumer.qos(prefetch_count=2)
        while len(held) < 3:
            broker.drain_events(timeout=10)
        broker.default_channel.recorder.flush()
        client.flushall()
        done = recorded.library.rebuild()
        assert (done.rows, done.put, done.taken) == (2, 0, 2)
        for message in held[1:]:
            message.ack()
    broker.default_channel.recorder.flush()
    assert store.count() == {"done": 3, "not put": 0}


def test_a_rebuild_may_be_stopped_anywhere_and_repeated(
    client, broker, store, center, monkeypatch, recorded
):
    monkeypatch.setattr("kombu_toc.library.rebuild.TOGETHER", 50)
    fill(broker, 200, **{"x-delay": 60_000})
    client.flushall()

    class Stopped(BaseException): ...

    def stop(done: int, of: int) -> None:
        raise Stopped

    library = recorded.library
    with pytest.raises(Stopped):
        library.rebuild(stop)
    publish(broker, "order-x", **{"x-delay": 60_000})
    assert center.counts("mail").waiting == 51
    assert library.rebuild().put == 150
    assert center.counts("mail").waiting == 201


def test_two_messages_of_one_id_are_both_put_back(client, broker, store, center, recorded):
    for n in range(2):
        publish(broker, "order-1", retries=n, **{"x-delay": 60_000})
    assert rebuilt(recorded) == 2
    assert len(center.get("order-1")) == 2


# -- schema


@pytest.mark.every_engine
def test_history_is_dropped_by_days(broker, store, monkeypatch, recorded):
    day, today = 86_400_000_000, now_us()
    for ahead in (0, 5, 38):
        key, at = (f"order-{ahead}", "t", "mail"), today + ahead * day
        store.record([Event(key, statuses.DONE, at, 1, "", "", ({"task": "remind"}, at))])
    library = recorded.library
    assert library.prune(30) == 0
    monkeypatch.setattr("kombu_toc.library.library.now_us", lambda: today + 40 * day)
    assert library.prune(30) >= 1
    assert [record.id for record in library.find().records] == ["order-38"]


def test_the_upkeep_drops_history_by_itself(store, center, broker, monkeypatch):
    key, day = ("order-1", "t", "mail"), 86_400_000_000
    store.record([Event(key, statuses.DONE, now_us(), 1, "", "", ({}, 0))])
    keeper = Keeper(store, center, "test", 30 * 86_400)
    keeper.turn()
    assert status_of(store, "order-1") == ["done"]
    later = ("order-2", "t", "mail")
    store.record([Event(later, statuses.DONE, now_us() + 31 * day, 1, "", "", ({}, 0))])
    now = now_us()
    monkeypatch.setattr("kombu_toc.library.keeper.now_us", lambda: now + 32 * day)
    assert list(keeper.pruning())
    assert store.count() == {"done": 1, "not put": 0}


@pytest.mark.every_engine
def test_tables_are_created_once_and_told_apart(server, new_url):
    urls = [new_url(), new_url()]
    library = center_for(server.toc_url, toc_library=urls).library
    assert {one.version for one in library.status()} == {None}
    assert all("library create" in one.problem for one in library.status())
    assert len(library.create()) == 2
    assert library.create() == library.upgrade() == []
    assert library.status() == [LibraryStatus(one.url, REVISION, "") for one in library.status()]
    turned = center_for(server.toc_url, toc_library=urls[::-1]).library
    assert all("as database" in one.problem for one in turned.status())
    with pytest.raises(LibraryError, match="set them as they were"):
        turned.find()
    fewer = center_for(server.toc_url, toc_library=urls, toc_library_tables=3).library
    with pytest.raises(LibraryError, match="set them as they were"):
        fewer.find()


def test_a_newer_schema_is_refused_and_an_older_one_names_the_command(store, recorded):
    database = store.shards.databases[0]
    library = recorded.library
    for version, said in (("0000", "does not know"), ("9999", "does not know")):
        database.execute(text(f"UPDATE toc_library_version SET version_num = '{version}'"))
        with pytest.raises(LibraryError, match=said):
            library.counts()


def test_no_password_is_shown_anywhere(server, options, caplog):
    caplog.set_level(logging.DEBUG)
    wrong = ["postgresql://toc:sesame@127.0.0.1:1/x", "mariadb://toc:sesame@127.0.0.1:1/x"]
    shown = []
    for url in (*wrong, "postgresql://toc:sesame@[/x", "oracle://toc:sesame@host/x", ["a", "a"]):
        try:
            center = center_for(server.toc_url, toc_library=url, toc_library_timeout=2)
            shown += [repr(one) for one in center.library.status()]
            center.library.create()
        except (LibraryError, ConfigurationError) as exc:
            shown += ["".join(traceback.format_exception(exc)), repr(exc)]
    with Connection(server.toc_url, transport_options=options) as connection:
        connection.default_channel  # noqa: B018 - made here
        shown += [str(connection.info()), repr(connection), repr(connection.transport.settings)]
        publish(connection.clone(), "order-1")  # the masked options mean the same
    assert len(shown) > 8
    for said in (*shown, caplog.text):
        assert "sesame@" not in said and "se%40same" not in said and "se@same" not in said
    with pytest.raises(ConfigurationError, match="env:NAME") as raised:
        center_for("toc+redis://localhost/0?toc_library=postgresql://toc:sesame@host/x")
    assert "sesame" not in str(raised.value)


def test_a_database_may_be_named_by_an_environment_variable(server, options, monkeypatch):
    monkeypatch.setenv("SHOP_LIBRARY", options["toc_library"][0])
    url = f"{server.toc_url}?toc_library=env:SHOP_LIBRARY"
    assert "database 1 of 2" in center_for(url).library.status()[0].problem
    with pytest.raises(ConfigurationError, match="'NO_SUCH'"):
        center_for(f"{server.toc_url}?toc_library=env:NO_SUCH")


@pytest.mark.parametrize(
    "headers",
    [{"x-biz-id": "x" * 256}, {"x-biz-type": "x" * 65}, {"x-biz-id": "a\0b"}, {"id": "i" * 256}],
    ids=["long id", "long type", "nul", "long task id"],
)
def test_what_no_row_can_have_is_refused_and_nothing_is_sent(broker, store, center, headers):
    with pytest.raises(LibraryError, match="nothing was sent"):
        publish(broker, **{"id": "order-1", **headers})
    assert store.count() == {"not put": 0}
    assert not center.get("order-1")


def test_without_a_library_there_is_none_to_ask(center):
    with pytest.raises(ConfigurationError, match="toc_library"):
        center.library  # noqa: B018 - raises


# -- reconciling


@pytest.fixture
def at_once(monkeypatch) -> None:
    """Nothing is on its way, and what is missing once is missing."""
    monkeypatch.setattr("kombu_toc.library.rebuild.UNDER_WAY_US", 0)
    monkeypatch.setattr("kombu_toc.library.rebuild.CONFIRM", 0.0)


def lose(client: Any, center: Any, id: str) -> None:
    """Delete a message by hand."""
    [found] = center.get(id)
    slot = center.registry.topic(found.topic).slot(found.slot)
    client.hdel(slot.body, id)
    client.zrem(slot.stores[found.step], id)


def test_check_finds_and_mends_every_disagreement(client, broker, store, center, at_once, recorded):
    fill(broker, 4, **{"x-delay": 60_000})
    lose(client, center, "order-0")
    [found] = center.get("order-1")
    body = found.body
    rows = {row.id: row for row in store.of_ids([f"order-{n}" for n in range(4)])}
    store.forget([rows["order-2"].key])  # a message without a row
    done = Event(rows["order-3"].key, statuses.DONE, now_us(), 1, "", "", ({}, 0))
    store.record([done])  # and one that has ended
    library = recorded.library
    expected = {("not in Redis", "order-0"), ("no row", "order-2"), ("has ended", "order-3")}
    assert {(one.kind, one.id) for one in library.check()} == expected
    assert {(one.kind, one.id) for one in library.check(fix=True)} == expected
    assert library.check() == []
    assert center.get("order-0")[0].body == rows["order-0"].body
    assert center.get("order-1")[0].body == body
    assert not center.get("order-3")
    assert status_of(store, "order-2") == ["pending"]
    assert status_of(store, "order-3") == ["done"]


def test_check_moves_what_is_dead_in_redis_to_history(
    client, broker, store, center, at_once, recorded
):
    publish(broker, "order-1")
    [message] = center.pop("mail").messages
    center.reject(message, requeue=False, reason="no")
    library = recorded.library
    assert [one.kind for one in library.check(fix=True)] == ["dead in Redis"]
    assert status_of(store, "order-1") == ["dead"]
    assert library.check() == []


def test_where_a_message_is_is_known_also_of_two_of_one_id(broker, store, center):
    fill(broker, 4, **{"x-delay": 60_000})
    publish(broker, "order-1", retries=1)  # a copy, known by a name of its own
    rows = sorted(store.of_ids([f"order-{number}" for number in range(4)]), key=lambda r: r.id)
    [first, copy] = rows[1:3]
    assert states_in_redis(center, rows) == [THERE] * 5
    center.cancel("order-0")
    assert states_in_redis(center, rows) == [MISSING] + [THERE] * 4
    consume(broker, 1, lambda message: message.reject())
    states = dict(zip((row.key for row in rows), states_in_redis(center, rows), strict=True))
    dead = first if "retries" not in envelope.unpack(first.body, first.id)["headers"] else copy
    other = copy if dead is first else first
    assert states[other.key] == DEAD and states[dead.key] == THERE
    assert states[rows[3].key] == states[rows[4].key] == THERE
    assert states_in_redis(center, []) == []


def test_what_is_overdue_and_lost_is_put_again_by_the_upkeep(
    client, broker, store, center, at_once
):
    fill(broker, 30)
    publish(broker, "later", **{"x-delay": 60_000})
    lose(client, center, "order-7")
    lose(client, center, "later")
    reconciler = Reconciler(Putter(store, center))
    assert reconciler.look() == 0  # it is looked at twice
    assert reconciler.look() == 1
    assert center.get("order-7")
    assert not center.get("later")  # when it is overdue
    assert reconciler.look() == 0
    # It has ended after all, in a worker that could not say so before.
    [row] = store.of_ids(["order-7"])
    store.record([Event(row.key, statuses.DONE, now_us(), 1, "", "", ({}, 0))])
    reconciler.look()
    assert not center.get("order-7")


def test_what_a_worker_has_taken_is_put_again_when_it_says_so_no_more(
    client, broker, store, center, at_once
):
    publish(broker, "order-1")
    [row] = store.of_ids(["order-1"])
    center.pop("mail")
    store.record([Event(row.key, statuses.TAKEN, now_us(), 1, "gone:1", "", ({}, 0))])
    client.flushall()
    center.registry.forget("mail")
    reconciler = Reconciler(Putter(store, center))
    assert reconciler.look() == reconciler.look() == 0
    long_ago = now_us() - 61_000_000
    store.record([Event(row.key, statuses.TAKEN, long_ago, 1, "gone:1", "", ({}, 0))])
    reconciler.look()
    assert reconciler.look() == 1
    assert status_of(store, "order-1") == ["pending"]
    assert [one.id for one in center.pop("mail").messages] == ["order-1"]


def test_a_look_is_bounded_and_the_next_one_goes_on(broker, store, center, at_once, monkeypatch):
    monkeypatch.setattr("kombu_toc.library.rebuild.CHUNK", 10)
    monkeypatch.setattr("kombu_toc.library.rebuild.ROWS_PER_LOOK", 40)
    fill(broker, 100)
    center.queues.purge("mail")  # this center has no library
    reconciler = Reconciler(Putter(store, center))
    seen = [reconciler.look() for _ in range(8)]
    assert sum(seen) == 100
    assert max(seen) <= 40
