"""The task library while Redis or a database is away (X12)."""

from __future__ import annotations

import logging
import socket
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Connection, Exchange, Producer, Queue

from kombu_toc import LibraryError, center_for
from kombu_toc.library import statuses
from kombu_toc.library.recorder import Recorder

from ..support.library import close_libraries, consume, fill, publish, status_of
from ..support.library import own_engine as engine
from ..support.servers import Server
from ..support.waiting import wait_until

__all__ = ("engine",)  # a fixture


#: For tests of databases that are servers.
SERVERS = pytest.mark.parametrize(
    "engine", ["postgresql", "mariadb"], indirect=True, scope="session"
)


@pytest.fixture
def redis_server(tmp_path) -> Iterator[Server]:
    """A server that may be stopped."""
    made = Server(tmp_path).start()
    yield made
    made.stop()


@pytest.fixture
def connect(redis_server) -> Iterator[Any]:
    """Opens connections with a library."""
    opened: list[Connection] = []

    def connect(options: dict[str, Any], **more: Any) -> Connection:
        made = Connection(redis_server.toc_url, transport_options={**options, **more})
        opened.append(made)
        return made

    yield connect
    recorders = {made.default_channel.recorder for made in opened if made.connected}
    for made in opened:
        made.release()
    for recorder in recorders:
        recorder.close()


def test_publishing_goes_on_without_redis_and_the_messages_follow(
    redis_server, connect, options, store
):
    connection = connect(options)
    publish(connection, "before")
    redis_server.stop()
    for number in range(5):
        publish(connection, f"while-{number}")
    assert {row.place for row in store.of_ids([f"while-{n}" for n in range(5)])} == {
        statuses.NOT_PUT
    }
    redis_server.start()  # empty
    taken = consume(connect(options), 5)
    assert sorted(taken) == [f"while-{number}" for number in range(5)]
    assert status_of(store, "while-3") == ["done"]
    assert status_of(store, "before") == ["pending"]


def test_a_producer_that_starts_without_redis_publishes(redis_server, connect, options, store):
    redis_server.stop()
    connection = connect(options)
    queue = Queue("mail", queue_arguments={"x-slots": 4})
    queue(connection.default_channel).declare()
    publish(connection, "order-1")
    assert store.of_ids(["order-1"])[0].place == statuses.NOT_PUT
    redis_server.start()
    # Its thread looks once a second.
    wait_until(lambda: store.of_ids(["order-1"])[0].place != statuses.NOT_PUT, 30)
    assert consume(connect(options), 1) == ["order-1"]


def test_a_reply_sent_while_redis_seems_away_has_no_row_and_goes_with_its_queue(
    redis_server, connect, options, store, monkeypatch
):
    """As workers answer remote control: it was away a moment ago, and a publish has noted that."""
    monkeypatch.setattr(Recorder, "_start", lambda _: None)  # nobody sees that it is back
    asks, answers = connect(options), connect(options)
    replies = Queue(
        *("1234.reply.pidbox", Exchange("replies"), "1234"),
        **{"durable": False, "auto_delete": True, "expires": 10},
    )
    replies(asks.default_channel).declare()
    channel = answers.default_channel
    publish(answers, "warm-up")
    channel.recorder.away_until = time.monotonic() + 60
    publish(answers, "order-1")
    assert store.of_ids(["order-1"])[0].place == statuses.NOT_PUT, "Redis seems to be away"
    channel.recorder.away_until = time.monotonic() + 60
    Producer(channel).publish({"ok": "pong"}, exchange="replies", routing_key="1234")
    assert replies(asks.default_channel).get(no_ack=True).payload == {"ok": "pong"}
    assert store.count() == {"pending": 2, "not put": 1}, "those of orders"
    redis_server.stop()
    with pytest.raises(answers.connection_errors):
        Producer(channel).publish({"ok": "late"}, exchange="replies", routing_key="1234")
    assert store.count() == {"pending": 2, "not put": 1}


@SERVERS
def test_without_a_database_a_publish_fails_and_sends_nothing(
    redis_server, connect, options, store, engine
):
    connection = connect(options, toc_library_timeout=2)
    publish(connection, "order-1")
    engine.kill()
    began = time.monotonic()
    with pytest.raises(LibraryError, match="cannot be used") as raised:
        publish(connection, "order-2")
    assert time.monotonic() - began < 30
    assert "sesame" not in str(raised.value) and "se@same" not in str(raised.value)
    assert "se%40same" not in str(raised.value)
    engine.start()
    publish(connection, "order-3")
    assert consume(connect(options), 2) == ["order-1", "order-3"]
    assert status_of(store, "order-2") == []


@SERVERS
def test_a_database_that_stands_still_holds_up_nobody_for_long(
    redis_server, connect, options, store, engine
):
    connection = connect(options, toc_library_timeout=1)
    publish(connection, "order-1")
    engine.pause()
    try:
        began = time.monotonic()
        with pytest.raises(LibraryError, match="cannot be used"):
            publish(connection, "order-2")
        assert 0.5 < time.monotonic() - began < 6
    finally:
        engine.resume()
    publish(connection, "order-3")
    assert "order-3" in consume(connect(options), 2)


@pytest.fixture(params=["postgresql", "mysql"])
def silent(request) -> Iterator[str]:
    """The URL of a database that accepts every connection, and never says anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield f"{request.param}://toc:sesame@127.0.0.1:{server.getsockname()[1]}/library"


def test_a_database_that_never_answers_fails_a_publish_in_time(redis_server, connect, silent):
    connection = connect({"toc_library": silent, "toc_library_timeout": 2})
    began = time.monotonic()
    with pytest.raises(LibraryError, match="cannot be used") as raised:
        publish(connection, "order-1")
    # psycopg waits two seconds for a connection at least; nothing is tried again after that.
    assert 1 < time.monotonic() - began < 8
    assert "sesame" not in str(raised.value)
    assert connection.default_channel.center.get("order-1") == []


def test_a_database_that_never_answers_holds_up_who_does_not_require_it_once(
    redis_server, connect, silent, caplog
):
    connection = connect(
        {"toc_library": silent, "toc_library_timeout": 2, "toc_library_required": False}
    )
    began = time.monotonic()
    fill(connection, 200, **{"x-delay": 60_000})
    assert time.monotonic() - began < 10
    recorder = connection.default_channel.recorder
    assert recorder.backlog == 200
    assert len(connection.default_channel.center.scan("mail", limit=500).messages) == 200
    began = time.monotonic()
    recorder.close()
    assert time.monotonic() - began < 15
    assert "sesame" not in caplog.text


@SERVERS
def test_where_the_library_is_not_required_rows_are_written_later(
    redis_server, connect, options, store, engine, caplog
):
    connection = connect(options, toc_library_timeout=2, toc_library_required=False)
    publish(connection, "order-1")
    engine.kill()
    caplog.set_level(logging.WARNING)
    publish(connection, "order-2", **{"x-delay": 60_000})
    assert "without a record" in caplog.text
    assert "same@" not in caplog.text
    engine.start()
    connection.default_channel.recorder.flush()
    assert status_of(store, "order-2") == ["pending"]


@SERVERS
def test_workers_go_on_without_a_database_and_record_later(
    redis_server, connect, options, store, engine
):
    connection = connect(options, toc_library_timeout=2)
    fill(connection, 20)
    taken: list[str] = []

    def handle(message: Any) -> None:
        if not taken:
            engine.kill()
        taken.append(message.headers["id"])
        message.ack()
        if len(taken) == 20:
            engine.start()

    consume(connection, 20, handle)
    assert store.count() == {"done": 20, "not put": 0}


@SERVERS
def test_what_may_take_long_says_at_once_that_a_database_stands_still(
    redis_server, engine, new_url
):
    center = center_for(redis_server.toc_url, toc_library=new_url(), toc_library_timeout=0.5)
    center.library.create()
    store = center.recorder.recorder.store
    assert store.count() == {"not put": 0}
    engine.pause()
    try:
        begin = time.monotonic()
        for ask in (store.count, store.count_pending, lambda: list(store.of_topic("mail", 1))):
            with pytest.raises(LibraryError, match="cannot be used"):
                ask()
        assert time.monotonic() - begin < 60
    finally:
        engine.resume()


@SERVERS
def test_one_database_is_stopped_and_the_business_ids_of_the_other_work(
    engine, new_url, connect, redis_server, tmp_path
):
    """Of a library whose other database is a file; a process that starts meanwhile works, too."""
    urls = [f"sqlite:///{tmp_path / 'first.db'}", new_url()]
    options = {"toc_library": urls, "toc_library_tables": 2, "toc_library_timeout": 2}
    center_for(redis_server.toc_url, **options).library.create()
    close_libraries()
    spread = {f"c-{n}": (zlib.crc32(b"c-%d" % n) & 0xFFFFF) % 4 // 2 for n in range(12)}
    here = [biz for biz, number in spread.items() if number == 0]
    there = [biz for biz, number in spread.items() if number == 1]
    later = {"eta": "2099-01-01T00:00:00+00:00"}
    connection = connect(options)
    for biz in spread:
        for n in range(3):
            publish(connection, f"{biz}/{n}", **later, **{"x-biz-id": biz})
    engine.kill()
    try:
        for another in (connection, connect(options)):
            library = another.default_channel.center.library
            for biz in here:
                assert len(library.find(biz_id=biz).records) == 3
                assert [one.moved for one in library.reschedule(biz_id=biz, delay=60)] == [True] * 3
            with pytest.raises(LibraryError):
                library.find(biz_id=there[0])
            page = library.find(status="pending", limit=99)
            assert {record.biz_id for record in page.records} == set(here)
            assert [url.split(":")[0] for url in page.away] == [urls[1].split(":")[0]]
            if another is connection:
                another.default_channel.recorder.flush()
                close_libraries()
        for biz in here:
            assert [one.deleted for one in library.cancel(biz_id=biz)] == [True] * 3
            publish(another, f"{biz}/3", **{"x-biz-id": biz})
        assert sorted(consume(another, len(here))) == sorted(f"{biz}/3" for biz in here)
        found = [library.find(biz_id=biz).records for biz in here]
        ended = [sorted(one.status for one in some) for some in found]
        assert ended == [["cancelled"] * 3 + ["done"]] * len(here)
    finally:
        engine.start()
