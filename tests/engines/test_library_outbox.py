"""The outbox: a task and the data that it is about are committed together, or not at all (X12)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy
from kombu import Connection, Queue
from sqlalchemy.orm import Session

from kombu_toc import LibraryError, RateLimitedError, TimeoutCenter, center_for, outbox
from kombu_toc.client.options import DatabaseURL
from kombu_toc.library import outbox as outboxes
from kombu_toc.library import statuses
from kombu_toc.library.putting import Putter
from kombu_toc.library.store import Store

from ..support import nursery
from ..support.django_project import DATABASE
from ..support.library import (
    be_old,
    consume,
    create_tables,
    end,
    publish,
    rebuilt,
    shards_of,
    status_of,
)
from ..support.ports import free_port
from ..support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("client")


@pytest.fixture
def url(new_url: Callable[[], str]) -> str:
    return new_url()


@pytest.fixture
def options(url: str) -> dict[str, Any]:
    """A library in the database of the application, which has a table of its own."""
    with shards_of([url], create=True) as shards:
        shards.databases[0].execute(sqlalchemy.text("CREATE TABLE orders (id INTEGER PRIMARY KEY)"))
    return {"toc_library": url}


@pytest.fixture
def store(options: dict[str, Any], url: str) -> Iterator[Store]:
    with shards_of([url]) as shards:
        yield Store(shards)


@pytest.fixture
def database(url: str, options: dict[str, Any]) -> Iterator[sqlalchemy.Engine]:
    """The application's own engine."""
    made = sqlalchemy.create_engine(DatabaseURL(url).reveal())
    yield made
    made.dispose()


ORDER = sqlalchemy.text("INSERT INTO orders (id) VALUES (:id)")


def wait_for(center: TimeoutCenter, id: str) -> None:
    wait_until(lambda: center.get(id), 30)


@pytest.mark.parametrize("how", ["connection", "session"])
def test_a_task_is_sent_when_the_transaction_is_committed(broker, store, center, database, how):
    opened: Any = database.connect() if how == "connection" else Session(database)
    with opened as connection:
        with outbox(connection):
            connection.execute(ORDER, {"id": 42})
            publish(broker, "order-42", **{"x-delay": 60_000})
        assert status_of(store, "order-42") == []  # for nobody else
        assert not center.get("order-42")
        connection.commit()
    wait_for(center, "order-42")
    [row] = store.of_ids(["order-42"])
    assert row.place == statuses.IN_REDIS
    publish(broker, "order-43")  # the outbox has ended
    assert center.get("order-43")


def test_a_task_is_not_sent_when_the_transaction_is_rolled_back(broker, store, center, database):
    with database.connect() as connection, outbox(connection):
        connection.execute(ORDER, {"id": 1})
        publish(broker, "order-1")
        connection.rollback()
    with database.begin() as connection, outbox(connection):
        publish(broker, "order-2")
    wait_for(center, "order-2")
    assert status_of(store, "order-1") == []
    assert not center.get("order-1")


@pytest.mark.every_engine
@pytest.mark.parametrize("how", ["connection", "session"])
def test_what_a_savepoint_has_sent_goes_with_it(broker, store, center, database, how):
    opened: Any = database.connect() if how == "connection" else Session(database)
    with opened as connection, outbox(connection):
        publish(broker, "outside", **{"x-delay": 60_000})
        with connection.begin_nested():
            publish(broker, "released", **{"x-delay": 60_000})
        with pytest.raises(KeyError), connection.begin_nested():
            publish(broker, "rolled-back", **{"x-delay": 60_000})
            raise KeyError
        # Its thread looks for what is committed every so often.
        recorder = broker.default_channel.recorder
        looked = len(recorder._expected)
        recorder._bell.set()
        assert looked == 3 and not center.get(["outside", "released"])
        connection.commit()
    wait_for(center, "outside")
    wait_for(center, "released")
    assert not center.get("rolled-back") and store.of_ids(["rolled-back"]) == []


def test_what_is_far_ahead_is_there_after_the_commit_and_only_then(broker, store, center, database):
    Queue("mail", queue_arguments={"x-horizon": 60})(broker.default_channel).declare()
    with database.connect() as connection, outbox(connection):
        publish(broker, "order-1", **{"x-delay": 120_000})
        connection.rollback()
        publish(broker, "order-2", **{"x-delay": 120_000})
        connection.commit()
    assert store.of_ids(["order-1"]) == []
    [row] = store.of_ids(["order-2"])
    assert row.place == statuses.FAR
    wait_until(lambda: "mail" in store.topics(), 30)
    assert store.topics()["mail"].horizon == 60
    assert not center.get("order-2")


def test_a_center_puts_after_the_commit(server, options, center, database):
    recorded = center_for(server.toc_url, **options)
    recorded.queues.declare("mail")
    with pytest.raises(KeyError), database.begin() as connection, outbox(connection):
        recorded.put("mail", "order-0", b"0", delay=60)
        raise KeyError
    with database.begin() as connection, outbox(connection):
        assert recorded.put("mail", "order-1", b"1", delay=60).id == "order-1"
        recorded.put_many("mail", [("order-2", b"2", time.time() + 60)])
        with pytest.raises(LibraryError, match="put it after the commit; nothing was sent"):
            recorded.put("mail", "order-3", b"3", if_exists="keep")
        assert not center.get(["order-1", "order-2"])
    wait_for(center, "order-1")
    wait_for(center, "order-2")
    assert not center.get("order-0")
    recorded.recorder.recorder.close()


def test_an_outbox_refuses_what_has_no_row(broker, store, center, database):
    with (
        pytest.raises(LibraryError, match="send it after the commit; nothing was sent"),
        database.begin() as connection,
        outbox(connection),
    ):
        publish(broker, "order-1", **{"x-unique": "order-1", "x-unique-conflict": "replace"})
    assert center.get("order-1") == []


def test_a_unique_task_is_sent_with_the_transaction_and_kept_back_if_another_has_its_key(
    broker, store, center, database
):
    Queue("mail", queue_arguments={"x-library": "outbox"})(broker.default_channel).declare()
    unique = {"x-unique": "42", "x-delay": 60_000}
    with database.connect() as connection, outbox(connection):
        publish(broker, "order-0", **unique)
        connection.rollback()
        publish(broker, "order-1", **unique)
        assert not center.get("order-1")
        connection.commit()
    wait_for(center, "order-1")
    assert not center.get("order-0")
    with database.begin() as connection, outbox(connection):
        publish(broker, "order-2", **unique)
    wait_until(lambda: status_of(store, "order-2") == ["cancelled"], 30)
    assert not center.get("order-2")
    with pytest.raises(LibraryError, match="declared with library='outbox'"):
        publish(broker, "order-3", **unique)


def test_what_a_batch_had_not_sent_when_it_was_aborted_has_no_row(broker, store):
    with broker.Producer() as producer, pytest.raises(KeyError), producer.batch():
        producer.publish({}, routing_key="mail", headers={"id": "order-1", "task": "remind"})
        raise KeyError
    assert store.of_ids(["order-1"]) == []


def test_an_outbox_needs_a_connection_to_its_library(server, broker, database, new_url):
    for nothing, said in ((None, "NoneType"), ("a string", "str"), (database, "Engine")):
        with pytest.raises(LibraryError, match=f"not a {said}"), outbox(nothing):
            publish(broker, "order-1")
    options = {"toc_library": [new_url(), new_url()]}
    create_tables(options["toc_library"])
    with (
        Connection(server.toc_url, transport_options=options) as other,
        database.connect() as connection,
        outbox(connection),
        pytest.raises(LibraryError, match="needs the transaction of a database of the library"),
    ):
        publish(other, "order-1")


def test_who_cannot_put_a_message_keeps_it_from_nobody(
    store, database, options, monkeypatch: pytest.MonkeyPatch
):
    claims: list[str] = []
    claim = Store.claim

    def claiming(self: Store, shard: Any, keys: Any, by: str) -> Any:
        claims.append(by)
        return claim(self, shard, keys, by)

    monkeypatch.setattr(Store, "claim", claiming)
    nobody = f"toc+redis://127.0.0.1:{free_port()}/0"
    with Connection(nobody, transport_options=options) as away:
        tried: list[float] = []
        with database.begin() as connection, outbox(connection):
            publish(away, "order-42")
        recorder = away.default_channel.recorder
        keep = recorder._keep
        monkeypatch.setattr(recorder, "_keep", lambda: (keep(), tried.append(time.monotonic())))
        wait_until(lambda: len(tried) >= 3, 30)
        recorder.close()
    assert claims == []
    [row] = store.of_ids(["order-42"])
    assert row.place == statuses.NOT_PUT and row.worker is None


DJANGO = """
import os, signal, sys
import django
from django.conf import settings
from kombu import Connection, Producer

broker, library, end = sys.argv[1:]
settings.configure(DATABASES={"default": database(library)})
django.setup()
from django.db import connection, transaction
import kombu_toc

def publish(id):
    with Connection(broker, transport_options={"toc_library": library}) as sender:
        Producer(sender.default_channel).publish(
            {"n": 1}, routing_key="mail", headers={"id": id, "task": "expire"}
        )

try:
    with transaction.atomic(), kombu_toc.outbox(connection):
        if end == "kill":
            transaction.on_commit(lambda: os.kill(os.getpid(), signal.SIGKILL))
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO orders (id) VALUES (%s)", [7])
        publish("order-7")
        if end == "roll back":
            raise ValueError
except ValueError:
    pass
"""


@pytest.mark.parametrize("end", ["commit", "roll back", "kill"])
def test_it_works_with_djangos_connection_whatever_happens_after_the_commit(
    server, broker, store, database, options, url, tmp_path: Path, end: str
):
    script = tmp_path / "sends.py"
    script.write_text(DATABASE + DJANGO)
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = (script, server.toc_url, url, end)
    nursery.done(words, code=-9 if end == "kill" else 0, execute=True, environment=paths)
    with database.connect() as connection:
        orders = connection.execute(sqlalchemy.text("SELECT id FROM orders")).all()
    assert len(orders) == (end != "roll back")
    if end == "roll back":
        assert store.count() == {"not put": 0}
        return
    # If the process was killed in between, a consumer finds what it has not put.
    assert consume(broker, 1) == ["order-7"]
    assert status_of(store, "order-7") == ["done"]


@pytest.mark.parametrize("way", ["channel", "center"])
def test_what_a_queue_is_declared_with_decides_whether_an_outbox_may_send_to_it(
    broker, store, center, database, way, recorded
):
    for mode in ("off", "outbox", "behind"):
        Queue(mode, queue_arguments={"x-library": mode})(broker.default_channel).declare()

    def send(id: str, queue: str) -> None:
        if way == "channel":
            publish(broker, id, queue=queue, **{"x-delay": 60_000})
        else:
            recorded.put(queue, id, b"body", delay=60)

    refused = pytest.raises(LibraryError, match=r"library='off'.* cannot send it to 'off'")
    with database.begin() as connection, refused, outbox(connection):
        send("order-1", "off")
    with pytest.raises(LibraryError, match=r"'outbox' is declared with .* send to it within"):
        send("order-2", "outbox")
    assert not center.get(["order-1", "order-2"])
    with database.begin() as connection, outbox(connection):
        for queue in ("outbox", "behind"):
            send(f"to-{queue}", queue)
        assert not center.get(["to-outbox", "to-behind"])
    for queue in ("outbox", "behind"):
        wait_for(center, f"to-{queue}")
    assert len(store.of_ids(["to-outbox", "to-behind"])) == 2
    send("order-3", "behind")
    assert store.of_ids(["order-3"]) == []
    send("order-4", "off")
    assert len(center.get(["order-3", "order-4"])) == 2


@pytest.mark.parametrize("way", ["channel", "center"])
def test_what_an_outbox_sends_is_counted_and_not_refused(
    broker, store, center, database, client, way, recorded
):
    """By ``x-put-rate``; what a rebuild puts back is not counted again."""
    arguments = {"x-put-rate": "5/h", "x-key-put-rate": "4/h"}
    Queue("mail", queue_arguments=arguments)(broker.default_channel).declare()

    def send(id: str, key: str) -> None:
        if way == "channel":
            publish(broker, id, **{"x-delay": 60_000, "x-key": key})
        else:
            recorded.put("mail", id, b"body", delay=60, key=key)

    with database.begin() as connection, outbox(connection):
        for number in range(3):
            send(f"order-{number}", "anna")
    wait_for(center, "order-2")
    send("order-3", "anna")
    with pytest.raises(RateLimitedError, match="each key of queue 'mail' takes 4/h"):
        send("more", "anna")
    send("order-4", "bob")
    with pytest.raises(RateLimitedError, match="queue 'mail' takes 5/h"):
        send("more", "bob")
    with database.begin() as connection, outbox(connection):
        for number in range(5, 20):
            send(f"order-{number}", "anna")
    wait_for(center, "order-19")
    with pytest.raises(RateLimitedError) as raised:
        send("more", "bob")
    assert raised.value.retry_after == pytest.approx(720, abs=20)
    assert rebuilt(recorded) == 20
    for number in range(5):
        send(f"after-{number}", f"customer-{number}")
    with pytest.raises(RateLimitedError):
        send("more", "bob")


def test_what_was_perhaps_put_after_the_commit_is_not_put_again_when_it_has_run(
    broker, store, center, database, monkeypatch
):
    turn = (recorder := broker.default_channel.recorder)._turn
    monkeypatch.setattr(recorder, "_start", lambda: None)  # its thread leaves it to the test
    with database.begin() as connection, outbox(connection):
        publish(broker, "order-1")
    put = Putter.put

    def cut(self: Putter, *args: Any, **how: Any) -> int:
        monkeypatch.setattr(Putter, "put", put)
        put(self, *args, **how)
        raise redis.exceptions.ConnectionError("it was cut")

    monkeypatch.setattr(Putter, "put", cut)
    turn()
    [row] = store.of_ids(["order-1"])
    assert row.place == statuses.NOT_PUT
    center.ack(center.pop("mail").messages)  # by a worker that has not said so yet
    be_old(store, "order-1")
    turn()
    assert not center.get("order-1")
    end(store, row)
    turn()
    assert not center.get("order-1")
    assert status_of(store, "order-1") == ["done"]


@pytest.mark.parametrize("how", ["connection", "session"])
def test_a_connection_that_stays_open_is_listened_to_once(broker, store, center, database, how):
    opened: Any = database.connect() if how == "connection" else Session(database)
    with opened as connection:
        for number in range(5):
            with outbox(connection):
                for copy in range(3):
                    publish(broker, f"order-{number}-{copy}", **{"x-delay": 60_000})
            if number % 2:
                connection.rollback()
            else:
                connection.commit()
        dispatch = connection.dispatch
        committed = dispatch.commit if how == "connection" else dispatch.after_commit
        assert len(list(committed)) == 1
        assert not outboxes._waiting[connection]
    for number in (0, 2, 4):
        wait_for(center, f"order-{number}-2")
    assert not center.get("order-1-0")
