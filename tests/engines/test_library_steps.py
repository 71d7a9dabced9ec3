"""What is between two steps of the task library when something else happens: a reply is lost, or
what a worker has done is not said yet (X12)."""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis
from kombu import Connection

from kombu_toc import LibraryError
from kombu_toc.library import statuses
from kombu_toc.library import store as statements
from kombu_toc.library.keeper import Keeper
from kombu_toc.library.records import Event, now_us
from kombu_toc.library.shards import Database
from kombu_toc.library.store import Store

from ..support.library import be_old, end, fill, publish, status_of

pytestmark = pytest.mark.usefixtures("client")


@pytest.fixture
def keeper(store, center) -> Keeper:
    return Keeper(store, center, "test", 86_400)


def lose_the_reply(broker: Any, monkeypatch: pytest.MonkeyPatch, *, arrives: bool) -> None:
    """Of the next publish."""
    publisher = broker.default_channel.publisher
    run = publisher.run

    def cut(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(publisher, "run", run)
        if arrives:
            run(*args, **kwargs)
        raise redis.exceptions.ConnectionError("it was cut")

    monkeypatch.setattr(publisher, "run", cut)
    # Its own thread leaves it to the test.
    monkeypatch.setattr(broker.default_channel.recorder, "_start", lambda: None)


def done(store: Any, id: str) -> None:
    end(store, *store.of_ids([id]))


def test_what_has_run_before_its_publish_was_answered_is_not_put_again(
    broker, store, center, keeper, monkeypatch
):
    monkeypatch.setattr(statements, "DOUBT_US", 1 << 50)
    lose_the_reply(broker, monkeypatch, arrives=True)
    publish(broker, "order-1")
    assert store.of_ids(["order-1"])[0].place == statuses.NOT_PUT
    [message] = center.pop("mail").messages  # a worker that has not said so yet
    center.ack([message])
    assert keeper.put_missing() == 0
    assert keeper.doubts
    done(store, "order-1")
    monkeypatch.setattr(statements, "DOUBT_US", 0)
    assert keeper.put_missing() == 0
    assert not keeper.doubts
    assert not center.get("order-1")


@pytest.mark.parametrize("had", ["before the look", "before the put"])
def test_what_is_run_about_when_it_would_be_put_again_is_not(
    broker, store, center, keeper, monkeypatch, had
):
    """It was there all the time; its worker has had it for a moment, and has not said so yet."""
    lose_the_reply(broker, monkeypatch, arrives=True)
    publish(broker, "order-1")
    be_old(store, "order-1")
    claim = store.claim

    def run(*args: Any) -> Any:
        claimed = claim(*args) if args else None
        center.ack(center.pop("mail").messages)
        return claimed

    if had == "before the look":
        run()
    else:
        monkeypatch.setattr(store, "claim", run)
    assert keeper.put_missing() == 0
    assert not center.get("order-1")
    assert keeper.doubts == (had == "before the look")
    done(store, "order-1")
    assert keeper.put_missing() == 0
    assert not keeper.doubts
    assert not center.get("order-1")


def test_what_did_not_arrive_is_put_when_nobody_can_have_it(
    broker, store, center, keeper, monkeypatch
):
    monkeypatch.setattr(statements, "DOUBT_US", 1 << 50)
    lose_the_reply(broker, monkeypatch, arrives=False)
    publish(broker, "order-1")
    assert keeper.put_missing() == 0
    monkeypatch.setattr(statements, "DOUBT_US", 0)
    time.sleep(0.001)  # its row was changed before now
    assert keeper.put_missing() == 1
    assert [one.id for one in center.pop("mail").messages] == ["order-1"]


def test_what_was_never_tried_is_put_at_once(broker, store, center, keeper, monkeypatch):
    recorder = broker.default_channel.recorder
    publish(broker, "order-0")
    monkeypatch.setattr(recorder, "_start", lambda: None)
    recorder.away_until = time.monotonic() + 60
    publish(broker, "order-1")
    assert store.of_ids(["order-1"])[0].place == statuses.NOT_PUT
    assert keeper.put_missing() == 1


@pytest.mark.parametrize("place", [statuses.IN_REDIS, statuses.NOT_PUT])
def test_a_rebuild_waits_for_what_workers_have_not_said_yet(
    broker, store, center, monkeypatch, place, recorded
):
    for number in range(3):
        publish(broker, f"order-{number}")
        store.place([row.key for row in store.of_ids([f"order-{number}"])], place)
        be_old(store, f"order-{number}")
    messages = center.pop("mail", 2).messages
    center.ack(messages)  # they run, and it is not said yet
    one, other = (message.id for message in messages)

    moments = Store.moments

    def said(self: Store, keys: Any) -> Any:
        monkeypatch.setattr(Store, "moments", moments)
        done(store, one)  # now it is said
        [row] = store.of_ids([other])
        store.record([Event(row.key, statuses.TAKEN, now_us(), 1, "w:1", "", ({}, 0))])
        return moments(self, keys)

    monkeypatch.setattr(Store, "moments", said)
    library = recorded.library
    made = library.rebuild()
    assert made.put == 0
    assert len(center.scan("mail", limit=9).messages) == 1


def test_a_rebuild_puts_back_what_is_overdue_and_claims_what_is_not_put(
    client, broker, store, center, monkeypatch, recorded
):
    monkeypatch.setattr(statements, "DOUBT_US", 1 << 50)
    fill(broker, 20)
    client.flushall()
    row = store.of_ids(["order-3"])[0]
    store.place([row.key], statuses.NOT_PUT)
    mine = store.claim(store.shards.of(row.id), [row.key])
    assert mine == []  # it is in doubt
    made = recorded.library.rebuild()
    # What is in doubt is put by those who look after it.
    assert (made.rows, made.put) == (20, 19)
    assert len(center.pop("mail", 30).messages) == 19


def test_a_publish_that_raises_leaves_no_row_behind(broker, store, center, monkeypatch):
    publish(broker, "order-0")
    recorder = broker.default_channel.recorder
    recorder.store.shards.make_sure()
    monkeypatch.setattr(recorder, "_start", lambda: None)
    attempt = Database._attempt

    def cut(database: Database, *args: Any) -> Any:
        attempt(database, *args)
        raise database._unusable(ConnectionError("it was cut"))

    with monkeypatch.context() as patched:
        patched.setattr(Database, "_attempt", cut)
        with pytest.raises(LibraryError, match="it was cut"):
            publish(broker, "order-1")
    assert status_of(store, "order-1") == ["pending"]
    assert not center.get("order-1")
    recorder.flush()
    assert status_of(store, "order-1") == []
    assert status_of(store, "order-0") == ["pending"]
    publish(broker, "order-1")
    recorder.flush()
    assert status_of(store, "order-1") == ["pending"]


def test_the_upkeep_goes_on_when_the_connection_it_began_with_is_closed(
    server, store, center, options, monkeypatch
):
    """A worker makes another one when its connection breaks; Kombu empties the first."""
    monkeypatch.setattr("kombu_toc.library.recorder.Recorder._start", lambda _: None)
    with Connection(server.toc_url, transport_options=options) as connection:
        publish(connection, "order-1")
        recorder = connection.default_channel.recorder
    store.place([store.of_ids(["order-1"])[0].key], statuses.NOT_PUT)
    center.queues.purge("mail")
    monkeypatch.setattr(statements, "DOUBT_US", 0)
    recorder._not_put = True
    recorder._turn()
    assert center.get("order-1")
    recorder.close()


def test_what_redis_does_not_take_during_a_look_follows(broker, store, center, monkeypatch):
    publish(broker, "order-0")
    recorder = broker.default_channel.recorder
    put_missing = Keeper.put_missing

    def while_another_sends(keeper: Keeper) -> int:
        monkeypatch.setattr(Keeper, "put_missing", put_missing)
        put = keeper.put_missing()
        publish(broker, "order-1")
        return put

    monkeypatch.setattr(statements, "DOUBT_US", 0)
    lose_the_reply(broker, monkeypatch, arrives=False)
    monkeypatch.setattr(Keeper, "put_missing", while_another_sends)
    recorder._not_put = True
    for _ in range(3):
        recorder._turn()
    assert center.get("order-1")
