"""What a timeout center puts and pops is recorded as what Celery sends is (X12)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from kombu import Connection, Producer
from redis.exceptions import ConnectionError as ServerGone

from kombu_toc import (
    LibraryError,
    NewMessage,
    PutManyError,
    RateLimitedError,
    TimeoutCenter,
    center_for,
)
from kombu_toc.library import guard as guarding
from kombu_toc.library import statuses
from kombu_toc.library.putting import Putter
from kombu_toc.library.store import Store

from ..support.library import rebuilt, status_of
from ..support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("client")


@pytest.fixture
def recorded(server: Any, options: dict[str, Any]) -> Iterator[TimeoutCenter]:
    """A center with a library."""
    made = center_for(server.toc_url, **options)
    made.leases.grace = 0
    yield made
    recorder_of(made).close()
    made.client.close()


def recorder_of(center: TimeoutCenter) -> Any:
    return center.recorder.recorder


def flushed(center: TimeoutCenter) -> None:
    recorder_of(center).flush()


def test_what_is_put_has_a_row_and_comes_back(client, recorded, store):
    at = time.time() + 3600
    recorded.queues.declare("mail", slots=4, retries=3)
    recorded.put("mail", "order-1", b"one", at=at, priority=3, key="anna", visibility=5)
    recorded.put_many(
        "mail", [NewMessage(f"many-{n}", b"%d" % n, at=at + n, basis="b") for n in range(1200)]
    )
    assert store.count() == {"pending": 1201, "not put": 0}
    before = {one.id: one for one in recorded.scan("mail", limit=2000).messages}
    client.flushall()
    recorded.registry.forget("mail")
    done = recorded.library.rebuild()
    assert (done.put, done.rows) == (1201, 1201)
    after = {one.id: one for one in recorded.scan("mail", limit=2000).messages}
    assert after.keys() == before.keys()
    for id, found in after.items():
        assert found._replace(score=0) == before[id]._replace(score=0)
        assert found.time_us // 1000 == before[id].time_us // 1000
    assert recorded.registry.topic("mail").declaration.retries == 3
    assert recorded.library.rebuild().put == 0


def test_a_row_follows_what_is_popped_to_its_end(recorded, store):
    for id in ("acked", "released", "rejected", "dead", "buried"):
        recorded.put("mail", id, id.encode())
    messages = {one.id: one for one in recorded.pop("mail", 5).messages}
    flushed(recorded)
    assert {row.status for row in store.of_ids(list(messages))} == {statuses.TAKEN}
    recorded.ack(messages["acked"])
    recorded.release(messages["released"])
    recorded.reject(messages["rejected"], requeue=True, error="not now")
    recorded.reject(messages["dead"], requeue=False, error="never")
    recorded.bury(messages["buried"], reason="because")
    flushed(recorded)
    assert {id: status_of(store, id) for id in messages} == {
        "acked": ["done"],
        "released": ["pending"],
        "rejected": ["pending"],
        "dead": ["dead"],
        "buried": ["dead"],
    }
    [record] = store.history("dead")
    assert (record.attempts, record.error) == (1, "never")
    assert record.worker


def test_a_receipt_says_whose_row_it_is(recorded, store):
    recorded.put("mail", "order-1", b"one")
    [message] = recorded.pop("mail").messages
    flushed(recorded)
    receipt = message.receipt
    recorded.extend(receipt)
    recorded.ack(receipt)
    flushed(recorded)
    assert status_of(store, "order-1") == ["done"]


def test_a_loop_records_what_it_handles(recorded, store):
    recorded.put_many("mail", [(f"order-{n}", b"%d" % n) for n in range(20)])
    seen = []
    with recorded.consume("mail", limit=5, idle=0.1) as messages:
        for message in messages:
            seen.append(message.id)
    flushed(recorded)
    assert len(seen) == 20
    assert store.count() == {"done": 20, "not put": 0}


def test_a_list_that_is_put_again_with_its_token_has_one_row_for_each(recorded, store):
    messages = [(f"order-{n}", b"%d" % n, time.time() + 60) for n in range(10)]
    assert all(put.added for put in recorded.put_many("mail", messages, token="t"))
    again = recorded.put_many("mail", messages, token="t")
    assert {put.outcome for put in again} == {"repeated"}
    assert store.count() == {"pending": 10, "not put": 0}
    assert not recorded.put("mail", "order-1", b"other", if_exists="keep").added
    assert not recorded.put("mail", "order-1", b"other", if_exists="keep").added
    assert store.count() == {"pending": 10, "not put": 0}


def test_equal_puts_are_rows_of_their_own(client, recorded, store):
    """As a handler makes them that puts its job again and then acknowledges; and a rebuild knows
    each of them."""
    for _ in range(3):
        recorded.put("mail", "order-1", b"same", delay=60)
    [job] = recorded.pop("mail", ids=["order-1"], early=True, limit=1).messages
    assert recorded.put("mail", "order-1", b"same", delay=60).added
    recorded.ack([job])
    recorder_of(recorded).flush()
    assert store.count() == {"pending": 3, "done": 1, "not put": 0}
    assert recorded.library.check() == []
    assert recorded.library.rebuild().put == 0
    client.flushall()
    recorded.registry.forget("mail")
    assert recorded.library.rebuild().put == 3
    assert recorded.library.rebuild().put == 0
    assert len(recorded.cancel("order-1")) == 3
    assert sorted(status_of(store, "order-1")) == ["cancelled"] * 3 + ["done"]


def test_a_message_that_is_replaced_has_its_row(client, recorded, store):
    recorded.put("mail", "order-1", b"old", delay=3600)
    made = recorded.put("mail", "order-1", b"new", delay=60, if_exists="replace")
    assert made.outcome == "replaced"
    assert sorted(status_of(store, "order-1")) == ["cancelled", "pending"]
    client.flushall()
    recorded.registry.forget("mail")
    assert recorded.library.rebuild().put == 1
    [found] = recorded.get("order-1")
    assert found.body == b"new"
    assert recorded.library.check() == []


def test_a_put_with_a_token_that_is_repeated_when_it_is_done_leaves_no_row(recorded, store):
    for outcome in ("added", "repeated"):
        assert recorded.put("mail", "order-1", b"1", token="t").outcome == outcome
        recorded.ack(recorded.pop("mail").messages)
        recorder_of(recorded).flush()
    assert store.count() == {"done": 1, "not put": 0}


def test_two_messages_of_one_id_are_two_rows(client, recorded, store):
    kept = {recorded.put("mail", "order-1", body, delay=60).id for body in (b"one", b"two")}
    assert len(kept) == 2
    assert [one.deleted for one in recorded.cancel(kept - {"order-1"})] == [True]
    assert sorted(status_of(store, "order-1")) == ["cancelled", "pending"]
    assert rebuilt(recorded) == 1
    [found] = recorded.get("order-1")
    assert found.body == b"one"


def test_the_same_bytes_under_the_same_id_may_be_put_again_and_are_another_message(
    client, recorded, store
):
    for _ in range(2):
        recorded.put("mail", "order-1", b"one")
        recorded.ack(recorded.pop("mail").messages)
        flushed(recorded)
    recorded.put("mail", "order-1", b"one", delay=60)
    assert sorted(status_of(store, "order-1")) == ["done", "done", "pending"]
    assert rebuilt(recorded) == 1


def test_what_is_refused_has_no_row(recorded, store):
    recorded.queues.declare("mail", put_rate="3/h", slots=1)
    recorded.put("mail", "order-0", b"0")
    with pytest.raises(RateLimitedError):
        recorded.put_many("mail", [(f"order-{n}", b"%d" % n) for n in range(1, 9)])
    with pytest.raises(RateLimitedError):
        recorded.put("mail", "order-9", b"9")
    assert store.count() == {"pending": 3, "not put": 0}


def test_without_a_row_nothing_is_put(recorded, store, center, monkeypatch):
    def away(*_: Any) -> Any:
        raise LibraryError("gone")

    recorded.registry.topic("mail")
    monkeypatch.setattr(Store, "insert", away)
    with pytest.raises(LibraryError):
        recorded.put("mail", "order-1", b"one")
    with pytest.raises(LibraryError):
        recorded.put_many("mail", [("order-1", b"one")])
    assert not center.get("order-1")


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
def test_what_redis_did_not_answer_follows(recorded, store, center, monkeypatch, many):
    recorded.put("mail", "order-0", b"0", delay=60)
    with monkeypatch.context() as broken:

        def fail(*_: Any, **__: Any) -> Any:
            raise ServerGone("cut")

        broken.setattr(recorded.runner, "run_puts", fail)
        broken.setattr(recorded.runner, "run_each_put", fail)
        if many:
            with pytest.raises(PutManyError):
                recorded.put_many("mail", [("order-1", b"1", time.time() + 60)])
        else:
            assert recorded.put("mail", "order-1", b"1", delay=60).id == "order-1"
    wait_until(lambda: center.get("order-1"), 20)  # the recorder's thread puts it
    assert store.count()["pending"] == 2


def test_a_guarded_queue_gives_nothing_that_has_ended(recorded, store, center):
    recorded.queues.declare("mail", guard=True)
    recorded.put("mail", "order-1", b"one")
    rows = store.of_ids(["order-1"])
    recorded.ack(recorded.pop("mail").messages)
    flushed(recorded)
    Putter(store, center).put(rows)
    began = time.monotonic()
    assert recorded.pop("mail", 5, wait=0.3).messages == []
    assert time.monotonic() - began > 0.25
    assert sum(center.counts("mail")) == 0
    recorded.put("mail", "order-2", b"two")
    Putter(store, center).put(rows)
    found: list[str] = []
    while sum(center.counts("mail")[:2]):
        found += [one.id for one in recorded.pop(["mail", "sms"], 5).messages]
    assert found == ["order-2"]
    flushed(recorded)
    assert store.history("order-1")[0].error == guarding.AGAIN


def test_what_is_beyond_the_horizon_is_kept_in_the_library(recorded, store, client, center):
    recorded.queues.declare("mail", horizon=3600)
    recorded.put("mail", "far-1", b"1", delay=86_400)
    recorded.put("mail", "near-1", b"1", delay=60)
    put = recorded.put_many(
        "mail", [(f"{name}-{n}", b"2", time.time() + s) for n in (2, 3) for name, s in DELAYS]
    )
    assert [one.id for one in put] == ["far-2", "near-2", "far-3", "near-3"]
    assert all(one.added for one in put)
    assert sorted(one.id for one in center.scan("mail").messages) == ["near-1", "near-2", "near-3"]
    assert {row.place for row in store.of_ids([f"far-{n}" for n in (1, 2, 3)])} == {statuses.FAR}
    assert {row.place for row in store.of_ids(["near-1", "near-2"])} == {statuses.IN_REDIS}


#: Seconds from now beyond a horizon of an hour, and within it.
DELAYS = (("far", 86_400), ("near", 60))


def test_what_goes_away_by_itself_is_not_recorded(recorded, store):
    recorded.queues.declare("brief", expires=60_000)
    recorded.put("brief", "order-1", b"one")
    recorded.put_many("brief", [("order-2", b"two")])
    recorded.ack(recorded.pop("brief", 2).messages)
    flushed(recorded)
    assert store.count() == {"not put": 0}
    assert isinstance(recorded.client, redis.Redis) or recorded.clustered


def test_a_batch_of_publishes_writes_its_rows_with_one_statement(
    server, options, store, monkeypatch
):
    """Kombu 5.7's; and none where it is aborted."""
    with Connection(server.toc_url, transport_options=options) as connection:
        producer = Producer(connection.default_channel)
        if not hasattr(producer, "batch"):
            return
        recorder = connection.default_channel.recorder
        written: list[int] = []
        real = recorder.store.insert

        def insert(rows: Any) -> None:
            written.append(len(rows))
            real(rows)

        monkeypatch.setattr(recorder.store, "insert", insert)
        with producer.batch(max_size=50):
            for number in range(120):
                headers = {"id": f"order-{number}", "task": "remind", "x-delay": 60_000}
                producer.publish({}, routing_key="mail", headers=headers)
        assert sum(written) == 120
        assert len(written) <= 6, "one for each of two databases, three times"
        assert store.count() == {"pending": 120, "not put": 0}
        recorder.close()
