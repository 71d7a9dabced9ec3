"""Back to a broker of Kombu's own Redis transport: nothing lost, nothing twice, each eta kept."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NamedTuple

import pytest
import redis
from kombu import Connection, Consumer, Exchange, Producer, Queue

import kombu_toc
from kombu_toc import Migrated, TimeoutCenter, migrate_back
from kombu_toc.consumer.lease_keeper import LeaseKeeper

from ..support.cases import night
from ..support.consuming import Inbox, deliver_until
from ..support.fixtures import drain
from ..support.servers import Server
from ..support.waiting import wait_until
from .test_migrate import NEWS, QUEUES, at, declare, ids, send, send_many, survives

# The fixtures come along with the tests of the other way.
from .test_migrate import move as move
from .test_migrate import old as old

pytestmark = pytest.mark.one_server("it looks at the broker and at the center by one client")

Connect = Callable[..., Connection]
Back = Callable[..., Migrated]


@pytest.fixture(autouse=True)
def _alone(client: redis.Redis) -> None:
    """Whoever else is connected, and has waited for something, would count as a consumer."""
    client.client_kill_filter(_type="normal", skipme=True)


@pytest.fixture
def back(server: Server, connect: Connect) -> Back:
    def moved(target: str = server.url, **options: Any) -> Migrated:
        return migrate_back(connect(), target, **options)

    return moved


@pytest.fixture
def new(connect: Connect) -> Connection:
    """A producer of the timeout center, whose queues are declared."""
    connection = connect()
    declare(connection)
    return connection


class Ways(NamedTuple):
    """The shared server as both brokers, and what moves back."""

    old: Connect
    new: Connection
    back: Back
    client: redis.Redis
    center: TimeoutCenter
    connect: Connect


@pytest.fixture
def ways(
    old: Connect,
    new: Connection,
    back: Back,
    client: redis.Redis,
    center: TimeoutCenter,
    connect: Connect,
) -> Ways:
    return Ways(old, new, back, client, center, connect)


@contextlib.contextmanager
def consuming(
    connection: Connection, client: redis.Redis, prefetch: int = 0, waits: bool = True
) -> Iterator[Inbox]:
    """Somebody consumes, and it is known; it waits for more."""
    with Inbox(connection, Queue("celery"), ack=False, prefetch_count=prefetch or None) as inbox:
        deliver_until(connection, lambda: inbox.messages, 5 if prefetch else 0)
        if waits:
            with pytest.raises(TimeoutError):
                connection.drain_events(timeout=0.2)
        wait_until(lambda: TimeoutCenter(client).queues.consumers())
        yield inbox


def somebody_waits(client: redis.Redis) -> bool:
    return "bzpopmin" in [one["cmd"] for one in client.client_list()]


def kept(client: redis.Redis) -> dict[str, list[dict[str, Any]]]:
    """What is in the broker's lists, the next one first."""
    found = {}
    for key in client.scan_iter(_type="list"):
        found[key.decode()] = [json.loads(raw) for raw in client.lrange(key, 0, -1)[::-1]]
    return found


def received(connection: Connection) -> list[tuple[Any, Any]]:
    """(body, message) of all that Kombu's transport delivers."""
    got: list[tuple[Any, Any]] = []

    def note(body: Any, message: Any) -> None:
        got.append((body, message))
        message.ack()

    with Consumer(connection, QUEUES, callbacks=[note]):
        drain(connection)
    return got


def due(message: Any) -> float:
    """Seconds until a message's eta, as Celery's worker reads it."""
    return datetime.fromisoformat(message.headers["eta"]).timestamp() - time.time()


def test_what_waits_is_kept_as_kombu_itself_keeps_it(ways: Ways) -> None:
    """Key by key and field by field, but for what names the publish."""

    def send_all(connection: Connection, eta: str) -> None:
        send(connection, "plain")
        send(connection, "urgent", priority=7)
        send(connection, "told", "news.today", exchange=NEWS, correlation_id="c", reply_to="r")
        send(connection, "later", headers={"eta": eta}, expiration=90)
        Producer(connection).publish(b"\x00\xff", routing_key="celery", headers={"id": "raw"})

    eta = at(3600)
    send_all(ways.old(), eta)
    by_kombu = kept(ways.client)
    for key in by_kombu:
        ways.client.delete(key)
    send_all(ways.new, eta)
    assert ways.back() == Migrated({"celery": 4, "news": 1}, 0, 1, 0, [], {})
    by_us = kept(ways.client)
    for lists in (by_kombu, by_us):
        for messages in lists.values():
            messages.sort(key=lambda message: message["headers"]["id"])
            for message in messages:
                assert len(message["properties"].pop("delivery_tag")) == 36
    assert by_us == by_kombu
    assert ids(TimeoutCenter(ways.client)) == []
    got = dict(received(ways.old()))
    assert 3590 < due(got["body of later"]) < 3600


def test_each_keeps_its_time_whatever_its_eta_said(ways: Ways) -> None:
    """After a reschedule, with a delay, for a retry that waits, and one that may run now."""
    later = at(3600)
    send(ways.new, "moved", headers={"eta": later})
    ways.center.reschedule("moved", delay=600)
    send(ways.new, "now", headers={"eta": later})
    ways.center.reschedule("now")
    send(ways.new, "delayed", headers={"x-delay": 600_000})
    send(ways.new, "same", headers={"eta": later})
    send(ways.new, "failed", headers={"eta": at(-5)})
    for one in ways.center.pop("celery", 10).messages:
        backoff = {"failed": 600}.get(one.id, 0)
        ways.center.reject(one, requeue=True, backoff=backoff)
    assert ways.back().moved == 5
    got = {body.removeprefix("body of "): message for body, message in received(ways.old())}
    for id in ("moved", "delayed", "failed"):
        assert 590 < due(got[id]) < 600, id
    assert got["now"].headers["eta"] is None
    assert got["same"].headers["eta"] == later
    assert got["failed"].delivery_info["redelivered"]
    assert "redelivered" not in got["same"].delivery_info


def test_order_and_priorities_are_kept(ways: Ways) -> None:
    """What a consumer had, and lost, comes first, as with Kombu."""
    ways.center.queues.declare("one", slots=1)
    for i in range(450):
        send(ways.new, f"{i:03}", "one")
    send(ways.new, "urgent", "one", priority=0)
    send(ways.new, "patient", "one", priority=9)
    assert [one.id for one in ways.center.pop("one", 3).messages] == ["000", "001", "002"]
    result = ways.back()
    assert (result.moved, result.unacknowledged, result.staying) == (452, 3, 0)
    connection = ways.old()
    got: list[str] = []
    queue = Queue("one")(connection.default_channel)
    while (message := queue.get(no_ack=True)) is not None:
        got.append(message.headers["id"])
    assert got == [*(f"{i:03}" for i in range(450)), "urgent", "patient"]


def test_what_has_no_place_there_stays_and_is_told(ways: Ways) -> None:
    send(ways.new, "dead")
    [dead] = ways.center.pop("celery").messages
    ways.center.reject(dead, requeue=False, reason="broken")
    ways.center.put("celery", "bytes", b"no envelope")
    Producer(ways.new).publish(
        "x", routing_key="celery", headers={"id": "no task", "x-delay": 60_000}
    )
    copies = Queue("copies", Exchange("everyone", "fanout"), durable=True)
    copies(ways.new.default_channel).declare()
    Producer(ways.new).publish("x", exchange=copies.exchange)
    ways.center.queues.declare("reply", slots=1, expires=60_000)
    ways.center.put("reply", "1", b"x")
    for dry_run in (True, False, False):
        result = ways.back(dry_run=dry_run)
        assert (result.moved, result.staying, result.dead) == (0, 3, 1)
        assert {one.what: one.reason.split(":")[0] for one in result.named} == {
            "bytes": "it is not a message of Kombu's",
            "no task": ("it is not due yet, and Kombu's transport delivers at once"),
        }
        assert sorted(result.skipped) == ["copies", "reply"]
    assert kept(ways.client) == {}
    assert len(ids(ways.center)) == 5
    assert ways.back(queues=["copeis"]).unknown == ["copeis"]


@pytest.mark.parametrize("worked", [True, night(False)])
def test_killed_at_any_step_nothing_is_lost_and_nothing_runs_twice(
    old: Connect, connect: Connect, server: Server, monkeypatch: pytest.MonkeyPatch, worked: bool
) -> None:
    """Also if the other broker's workers have done what was moved by then."""
    monkeypatch.setattr("kombu_toc.migrate.BATCH", 3)
    budget = 5
    client = server.client()
    while True:
        client.flushall()
        connection = connect()
        expected = send_many(connection, "later-", 4, headers={"eta": at(3600)})
        expected += send_many(connection, "ready-", 7)
        center = TimeoutCenter(client)
        assert len(center.pop("celery", 2).messages) == 2  # by a consumer that is gone
        ran: list[str] = []

        def work(ran: list[str] = ran) -> None:
            for raw in client.lpop("celery", 100) or ():
                ran.append(json.loads(raw)["headers"]["id"])

        target = connect()
        target.default_channel  # noqa: B018
        survived = survives(monkeypatch, budget, lambda to=target: migrate_back(to, server.url))
        if worked:
            work()
        assert migrate_back(connect(), server.url).staying == 0
        work()
        assert sorted(ran) == expected, budget
        assert ids(center) == []
        assert client.exists("toc-returned") == 0
        if survived:
            break
        budget += 1
    client.close()
    assert budget > 20


def test_it_is_refused_while_somebody_consumes_unless_it_is_meant(ways: Ways) -> None:
    """Then what a consumer has stays with it."""
    send(ways.new, "taken")
    consumer = ways.connect()
    with consuming(consumer, ways.client, prefetch=2) as inbox:
        send(ways.new, "later", headers={"eta": at(60)})
        wait_until(lambda: somebody_waits(ways.client))
        said = f"1 worker consumes from toc.*{os.getpid()}.*: stop its workers.*within a minute"
        with pytest.raises(kombu_toc.ConsumersError, match=said):
            ways.back()
        counted = ways.back(dry_run=True)
        assert counted.moved == 2
        assert "stop its workers" in counted.refused
        forced = ways.back(force=True)
        assert (forced.moved, forced.staying) == (1, 1)
        assert forced.named[0].reason == "a consumer has it"
        inbox.messages[0].ack()
        consumer.default_channel.poller.flush()
    assert ids(ways.center) == []


def test_it_is_refused_while_a_worker_of_another_release_consumes(
    connect: Connect, back: Back, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which does not tell, but waits."""
    monkeypatch.setattr(LeaseKeeper, "_announce_presence", lambda keeper, center: None)
    consumer = connect()
    with Consumer(consumer, [Queue("celery")], callbacks=[print]):
        with pytest.raises(TimeoutError):
            consumer.drain_events(timeout=0.2)
        wait_until(lambda: somebody_waits(client))
        with pytest.raises(kombu_toc.ConsumersError, match=r"connections? consumes? from toc"):
            back()


def test_a_consumer_that_waits_for_nothing_counts_too(ways: Ways) -> None:
    """Its connections were cut just now. Once it has stopped, nothing is refused."""
    for number in range(2):
        send(ways.new, f"{number}")
    consumer = ways.connect()
    with consuming(consumer, ways.client, prefetch=1, waits=False):
        for each in ways.client.client_list():
            if each["cmd"] in ("bzpopmin", "xread"):
                ways.client.client_kill_filter(_id=each["id"])
        with pytest.raises(kombu_toc.ConsumersError, match="1 worker consumes"):
            ways.back()
    consumer.release()
    wait_until(lambda: not TimeoutCenter(ways.client).queues.consumers())
    assert ways.back().moved == 2


def test_who_has_stopped_to_consume_is_no_consumer_although_it_is_connected(ways: Ways) -> None:
    """As a program that has asked workers something, and waits for no reply any more."""
    send(ways.new, "waits", headers={"eta": at(60)})
    with consuming(ways.connect(), ways.client):
        pass
    wait_until(lambda: not TimeoutCenter(ways.client).queues.consumers())
    assert ways.back().moved == 1


def test_a_dry_run_counts_and_changes_nothing(ways: Ways) -> None:
    for i in range(5):
        send(ways.new, f"{i}", headers={"eta": at(3600)} if i % 2 else {})
    ways.center.pop("celery", 1)

    def content() -> dict[bytes, Any]:
        return {
            key: ways.client.dump(key)
            for key in ways.client.scan_iter()
            if b":minutes:" not in key and b":counted:" not in key and b":scripts" not in key
        }

    before = content()
    result = ways.back(dry_run=True)
    assert (result.queues, result.scheduled, result.unacknowledged) == ({"celery": 5}, 2, 1)
    assert content() == before
    told: list[tuple[int, int]] = []
    assert ways.back(on_progress=lambda *n: told.append(n)) == result
    assert told[0] == (0, 5)
    assert told[-1] == (5, 5)


def test_there_and_back_and_there_again(ways: Ways, move: Any) -> None:
    times = {f"{i}": at(600 + i) for i in range(10)}
    for id, eta in times.items():
        send(ways.old(), id, headers={"eta": eta})
    send(ways.old(), "urgent", priority=0, exchange=NEWS, key="news.x")
    for _ in range(2):
        assert move().moved == 11
        assert ways.back().moved == 11
    assert move().queues == {"celery": 10, "news": 1}
    for id, eta in times.items():
        [found] = ways.center.get(id)
        assert abs(found.time_us / 1e6 - datetime.fromisoformat(eta).timestamp()) < 0.001


def test_a_prefix_and_a_separator_of_the_other_broker_are_used(ways: Ways, server: Server) -> None:
    names = {"global_keyprefix": "old_", "sep": ":", "priority_steps": [0, 5]}
    send(ways.new, "1", priority=9)
    assert ways.back(options=names).moved == 1
    assert [*kept(ways.client)] == ["old_celery:5"]
    assert [body for body, _ in received(ways.old(**names))] == ["body of 1"]


def test_a_target_that_cannot_be_used_is_named(back: Back, server: Server) -> None:
    with pytest.raises(kombu_toc.ConfigurationError, match="is a timeout center already"):
        back(server.toc_url)
    with pytest.raises(redis.exceptions.ConnectionError):
        back("redis://:secret@127.0.0.1:1/0")
    other = Connection(server.url)
    with other, pytest.raises(kombu_toc.ConfigurationError, match="not a timeout center"):
        migrate_back(other, server.url)


def test_what_waits_for_a_limit_goes_back_with_its_time(ways: Ways) -> None:
    """Due since some time, some of it in a lane, and what is not due yet."""
    center = kombu_toc.TimeoutCenter(ways.client)
    center.queues.alter("celery", key_concurrency=1, rate="1/h", rate_burst=2)
    eta = at(3600)
    for number in range(6):
        send(ways.new, f"m{number}", headers={"x-key": f"k{number % 2}"})
    send(ways.new, "later", headers={"x-key": "k0", "eta": eta})
    running = center.pop("celery", 10).messages
    assert len(running) == 2
    assert center.pop("celery", 10).messages == []
    center.release(running)
    done = ways.back()
    assert (done.queues, done.scheduled) == ({"celery": 7}, 1)
    assert center.count("celery") == 0
    left = [json.loads(raw) for raw in ways.client.lrange("celery", 0, -1)]
    assert len(left) == 7
    assert [one["headers"]["eta"] for one in left if one["headers"].get("eta")] == [eta]
