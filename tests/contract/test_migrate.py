"""From a broker of Kombu's own Redis transport: nothing lost, nothing twice, each eta kept."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

import pytest
import redis
from kombu import Connection, Consumer, Exchange, Producer, Queue

import kombu_toc
from kombu_toc import TimeoutCenter
from kombu_toc.migrate import BATCH, Migrated, migrate_broker

from ..support.cases import night
from ..support.fixtures import drain
from ..support.inspection import keys_left
from ..support.servers import Server
from .test_reshard import Killed

pytestmark = pytest.mark.one_server("it looks at the source and at the center by one client")

Connect = Callable[..., Connection]
Move = Callable[..., Migrated]

NEWS = Exchange("news", type="topic")
QUEUES = [Queue("celery"), Queue("news", NEWS, routing_key="news.#")]


def at(seconds: float) -> str:
    return (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat()


def declare(connection: Connection) -> None:
    for queue in QUEUES:
        queue(connection.default_channel).declare()


@pytest.fixture
def old(server: Server, client: redis.Redis) -> Iterator[Callable[..., Connection]]:
    """Connect to the shared server as Kombu's own transport does."""
    made: list[Connection] = []

    def connect(**options: Any) -> Connection:
        made.append(Connection(server.url, transport_options=options))
        declare(made[-1])
        return made[-1]

    yield connect
    for connection in made:
        connection.release()


@pytest.fixture
def move(server: Server, connect: Connect) -> Move:
    def moved(source: str = server.url, **options: Any) -> Migrated:
        return migrate_broker(source, connect(), **options)

    return moved


class Both(NamedTuple):
    """The shared server as a broker of Kombu's own and as a timeout center, and what moves."""

    old: Connect
    connect: Connect
    move: Move
    client: redis.Redis
    center: TimeoutCenter


@pytest.fixture
def both(
    old: Connect, connect: Connect, move: Move, client: redis.Redis, center: TimeoutCenter
) -> Both:
    return Both(old, connect, move, client, center)


def send(connection: Connection, id: str, key: str = "celery", **options: Any) -> None:
    headers = {"id": id, "task": "t", **options.pop("headers", {})}
    Producer(connection).publish(f"body of {id}", routing_key=key, headers=headers, **options)


def send_many(connection: Connection, prefix: str, number: int, **options: Any) -> list[str]:
    """So many tasks: their ids."""
    ids = [f"{prefix}{n}" for n in range(number)]
    for id in ids:
        send(connection, id, **options)
    return ids


def hold(connection: Connection, number: int) -> Connection:
    """Take so many messages and acknowledge none, as a worker that is killed then."""
    got: list[Any] = []
    with Consumer(connection, QUEUES, callbacks=[lambda body, m: got.append(m)]) as consumer:
        consumer.qos(prefetch_count=number)
        while len(got) < number:
            connection.drain_events(timeout=5)
    # Its sockets close, and nothing of what it says at an orderly end is said.
    channel = connection.default_channel
    channel.qos._delivered.clear()
    connection.transport.cycle.close()
    channel._disconnect_pools()
    return connection


def ids(center: TimeoutCenter) -> list[str]:
    return sorted(found.id for found in center.scan(limit=10_000).messages)


def source_keys(client: redis.Redis) -> list[str]:
    """What is left of the old broker's messages."""
    keys = (key.decode() for key in client.keys("*"))
    return sorted(key for key in keys if not key.startswith(("toc:", "_kombu", "old__kombu")))


def test_what_is_ready_and_what_a_worker_held_is_moved_as_it_was(both: Both) -> None:
    connection = both.old()
    etas = {f"eta-{i}": at(3600 + i) for i in range(5)}
    for id, eta in etas.items():
        send(connection, id, headers={"eta": eta})
    hold(both.old(), 5)
    send(connection, "plain")
    send(connection, "urgent", priority=3)
    send(connection, "told", "news.today", exchange=NEWS)
    send(connection, "past", headers={"eta": at(-60)})
    result = both.move()
    assert result == Migrated({"celery": 8, "news": 1}, 5, 5, 0, [], {})
    assert source_keys(both.client) == []
    assert ids(both.center) == sorted([*etas, "plain", "urgent", "told", "past"])
    for id, eta in etas.items():
        [found] = both.center.get(id)
        assert abs(found.time_us / 1e6 - datetime.fromisoformat(eta).timestamp()) < 0.001
    assert both.center.get("urgent")[0].step == 1
    got = []
    target = both.connect()
    with Consumer(target, QUEUES, callbacks=[lambda body, m: (got.append((body, m)), m.ack())]):
        drain(target)
    bodies = [f"body of {id}" for id in ("past", "plain", "told", "urgent")]
    assert sorted(body for body, _ in got) == bodies
    assert {m.delivery_info["routing_key"] for _, m in got} == {"celery", "news.today"}


def test_what_is_moved_is_counted_for_each_queue(both: Both) -> None:
    connection = both.old()
    queues = {f"queue-{i}": i + 1 for i in range(9)}
    for queue, number in queues.items():
        for i in range(number):
            send(connection, f"{queue}-{i}", queue)
    assert both.move(queues=list(queues)).queues == queues
    measured = kombu_toc.read_metrics(both.center)
    assert {name: one.totals["put"] for name, one in measured.items()} == queues


def test_moved_again_nothing_is_moved_twice(both: Both) -> None:
    """And nothing of it is left once all has run."""
    for i in range(20):
        send(both.old(), f"{i}", headers={"eta": at(3600)} if i % 2 else {})
    assert both.move().moved == 20
    assert both.move() == Migrated({}, 0, 0, 0, [], {})
    assert len(ids(both.center)) == 20
    assert not [key for key in both.client.scan_iter() if b":sent:moved" in key]
    send(both.old(), "later")
    assert both.move().queues == {"celery": 1}
    assert both.center.ack(both.center.pop("celery", 100, where=bool, early=True).messages) == 21
    assert keys_left(both.client, "toc:{celery:*}:*") == []


def test_the_order_of_a_queue_is_kept(both: Both) -> None:
    both.center.queues.declare("celery", slots=1)
    connection = both.old()
    for i in range(3 * BATCH):
        send(connection, f"{i:05}")
    both.move()
    popped = both.center.pop("celery", 1000).messages
    assert [one.id for one in popped] == [f"{i:05}" for i in range(3 * BATCH)]


def test_two_live_messages_of_one_id_stay_two(both: Both) -> None:
    """A task that runs and its retry."""
    connection = both.old()
    send(connection, "a")
    hold(both.old(), 1)
    send(connection, "a", headers={"eta": at(3600), "retries": 1})
    assert both.move().moved == 2
    assert len(both.center.get("a")) == 2


def let_die(patch: pytest.MonkeyPatch, lives: int) -> None:
    """Have this thread die when it has sent something to a server so many times."""
    send_packed = redis.connection.AbstractConnection.send_packed_command
    mortal = threading.get_ident()

    def send_or_die(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal lives
        if threading.get_ident() == mortal:
            lives -= 1
            if lives < 0:
                raise Killed
        return send_packed(self, *args, **options)

    patch.setattr(redis.connection.AbstractConnection, "send_packed_command", send_or_die)


def survives(patch: pytest.MonkeyPatch, lives: int, run: Callable[[], object]) -> bool:
    """Whether it came to its end with that."""
    with patch.context() as within:
        let_die(within, lives)
        try:
            run()
        except Killed:
            return False
    return True


@pytest.mark.parametrize("worked", [True, night(False)])
def test_killed_at_any_step_nothing_is_lost_and_nothing_runs_twice(
    old: Connect, move: Move, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, worked: bool
) -> None:
    """Also if workers have done what was moved by then."""
    monkeypatch.setattr("kombu_toc.migrate.BATCH", 3)
    budget = 5
    while True:
        client.flushall()
        connection = old()
        held = send_many(connection, "held-", 4, headers={"eta": at(3600)})
        hold(old(), 4)
        ready = send_many(connection, "ready-", 7)
        ran: list[str] = []

        def work(ran: list[str] = ran) -> None:
            center = TimeoutCenter(client)
            if center.queues.names():
                popped = center.pop("celery", 100).messages
                ran += [one.id for one in popped]
                center.ack(popped)

        survived = survives(monkeypatch, budget, move)
        if worked:
            work()
        assert move().staying == 0
        work()
        assert sorted(ran) == ready, budget
        assert ids(TimeoutCenter(client)) == held
        assert source_keys(client) == []
        if survived:
            break
        budget += 1
    assert budget > 20


def test_a_dry_run_counts_and_changes_nothing(both: Both) -> None:
    connection = both.old()
    send_many(connection, "held-", 5, headers={"eta": at(3600)})
    hold(both.old(), 5)
    send_many(connection, "ready-", 2 * BATCH + 1)
    both.client.lpush("celery", "nonsense")
    before = {key: both.client.dump(key) for key in keys_left(both.client)}
    result = both.move(dry_run=True)
    assert (result.queues, result.unacknowledged) == ({"celery": 2 * BATCH + 6}, 5)
    assert (result.scheduled, result.staying) == (5, 1)
    assert {key: both.client.dump(key) for key in keys_left(both.client)} == before
    told: list[tuple[int, int]] = []
    assert both.move(on_progress=lambda *n: told.append(n))[:4] == result[:4]
    assert told[0] == (0, 2 * BATCH + 7)
    assert told[-1] == (2 * BATCH + 7, 2 * BATCH + 7)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_what_cannot_be_read_stays_and_is_named(both: Both) -> None:
    connection = both.old()
    for i in range(3):
        send(connection, f"{i}")
        both.client.lpush("celery", f"nonsense {i}")
    send(connection, "far", headers={"eta": "9999-01-01T00:00:00+00:00"})
    both.client.hset("unacked", "tag", json.dumps([{"body": "x", "properties": {}}, "gone", "key"]))
    both.client.hset("unacked", "other", "[]")
    for _ in range(2):
        result = both.move()
        assert result.staying == 6
        told = sorted((one.place, one.what, one.reason.split(":")[0]) for one in result.named)
        held = ["[]", '[{"body": "x", "properties": {}}, "gone", "key"]']
        nonsense = [f"nonsense {i}" for i in range(3)]
        assert [what for _, what, _ in told] == ["far", *nonsense, *held]
        assert told[-1][2] == "no queue is bound to exchange 'gone' with the key 'key'"
    assert both.client.llen("celery") == 4
    assert ids(both.center) == ["0", "1", "2"]


def test_what_is_nobodys_queue_and_what_expires_stays(both: Both) -> None:
    both.client.rpush("shopping", "milk", "bread")
    both.client.rpush("json", '{"a": 1}')
    connection = both.old()
    reply = Queue("abc.reply.celery.pidbox", expires=60)
    reply(connection.default_channel).declare()
    send(connection, "answer", "abc.reply.celery.pidbox")
    send(connection, "1")
    result = both.move()
    assert result.queues == {"celery": 1}
    assert [*result.skipped] == ["abc.reply.celery.pidbox"]
    assert both.client.lrange("shopping", 0, -1) == [b"milk", b"bread"]
    assert both.client.llen("json") == 1
    assert both.center.queues.names() == ["celery"]


def test_a_broadcast_that_a_worker_held_stays(old: Connect, move: Move) -> None:
    connection = old()
    with connection.channel() as channel:
        members = channel.keyprefix_queue % "everyone"
        channel.client.sadd(members, channel.sep.join(["", "", "bcast.1"]))
        message = {"body": "", "properties": {"delivery_tag": "t"}, "headers": {}}
        channel.client.hset("unacked", "t", json.dumps([message, "everyone", ""]))
    result = move(fanout=["everyone"])
    assert (result.moved, result.staying) == (0, 1)
    assert "broadcast" in result.named[0].reason


def test_only_the_queues_that_are_named_are_moved(both: Both) -> None:
    connection = both.old()
    for i in range(3):
        send(connection, f"{i}")
        send(connection, f"news-{i}", "news.x", exchange=NEWS)
    hold(both.old(), 6)
    send(connection, "more")
    send(connection, "more", "news.x", exchange=NEWS)
    assert both.move(queues=["news"]).queues == {"news": 4}
    assert both.client.hlen("unacked") == 3
    assert both.move().queues == {"celery": 4}


def test_a_key_prefix_and_other_names_are_found(both: Both, server: Server) -> None:
    names = {"global_keyprefix": "old_", "unacked_key": "mine", "sep": ":"}
    connection = both.old(**names)
    send(connection, "held")
    send(connection, "held-too", "news.x", exchange=NEWS)
    hold(both.old(**names), 2)
    send(connection, "ready", priority=9)
    assert {b"old_celery:9", b"old_mine"} < set(both.client.keys())
    for dry_run in (True, False):
        result = both.move(dry_run=dry_run)  # without a word of the prefix
        assert (result.moved, list(result.skipped)) == (0, ["old_celery:9"])
        assert "global_keyprefix" in result.skipped["old_celery:9"]
        assert result.staying == 1
    result = both.move(options=names)
    assert result.queues == {"celery": 2, "news": 1}
    assert source_keys(both.client) == []
    send(connection, "more")
    del names["sep"]
    assert both.move(f"{server.url}?global_keyprefix=old_", options=names).queues == {"celery": 1}


def test_it_is_refused_while_somebody_consumes_unless_it_is_meant(old: Connect, move: Move) -> None:
    consumer = old()
    send(old(), "1")
    with Consumer(consumer, [Queue("other")], callbacks=[print]):
        consumer.default_channel.connection.cycle.on_poll_start()  # it waits with BRPOP
        time.sleep(0.1)  # until the server has read that
        said = "1 connection consumes from redis://"
        with pytest.raises(kombu_toc.ConsumersError, match=said):
            move()
        counted = move(dry_run=True)
        assert counted.moved == 1
        assert counted.refused.startswith(said)
        assert not move(dry_run=True, force=True).refused
        assert move(force=True).moved == 1


def test_messages_under_a_prefix_that_was_not_given_stay_and_are_counted(both: Both) -> None:
    """Also if workers had them all."""
    names = {"global_keyprefix": "old_"}
    for i in range(3):
        send(both.old(**names), f"{i}")
    hold(both.old(**names), 3)
    for dry_run in (True, False):
        result = both.move(dry_run=dry_run)
        assert (result.moved, result.staying) == (0, 3)
        assert "global_keyprefix" in result.skipped["old_unacked"]
    assert both.move(options=names).moved == 3
    assert both.move().staying == 0


def test_a_prefix_that_nobody_uses_is_an_error_that_names_those_in_use(both: Both) -> None:
    wrong = {"global_keyprefix": "odl_"}
    assert both.move(options=wrong).moved == 0  # there is no broker at all
    send(both.old(global_keyprefix="old_"), "1")
    send(both.old(), "2")
    for dry_run in (True, False):
        said = r"'odl_'; in use there: no prefix and 'old_'"
        with pytest.raises(kombu_toc.MigrationError, match=said):
            both.move(options=wrong, dry_run=dry_run)


def test_a_queue_that_is_not_there_is_told(old: Connect, move: Move, client: redis.Redis) -> None:
    send(old(), "1")
    for dry_run in (True, False):
        result = move(queues=["celry", "news"], dry_run=dry_run)
        assert (result.moved, result.unknown) == (0, ["celry"])  # news is there, and empty
    assert move(queues=["celery"]).moved == 1
    assert move(queues=["celery"]).unknown == []


def test_what_is_moved_has_its_key_and_is_not_counted_among_what_may_be_put(both: Both) -> None:
    center = TimeoutCenter(both.client)
    center.queues.declare("celery", put_rate="1/h", key_put_rate="1/h")
    connection = both.old()
    for number in range(3):
        send(connection, f"t-{number}", headers={"id": f"t-{number}", "x-key": "c"})
    assert both.move().moved == 3
    assert {found.key for found in center.scan("celery").messages} == {"c"}
    center.put("celery", "one", b"", key="c")


def test_a_dry_run_tells_what_the_center_would_not_take(old: Connect, move: Move) -> None:
    send(old(), "far", headers={"eta": "9999-01-01T00:00:00+00:00"})
    send(old(), "odd", headers={"eta": "tomorrow"})
    counted, moved = move(dry_run=True), move()
    assert counted == moved
    assert counted.staying == 2
    assert sorted(one.what for one in counted.named) == ["far", "odd"]


def test_a_source_that_cannot_be_used_is_named(move: Move, server: Server) -> None:
    with pytest.raises(kombu_toc.ConfigurationError, match="is a timeout center already"):
        move(server.toc_url)
    with pytest.raises(kombu_toc.ConfigurationError, match="redis://, rediss://"):
        move("amqp://localhost")
    with pytest.raises(redis.exceptions.ConnectionError):
        move("redis://:secret@127.0.0.1:1/0")
    other = Connection(server.url)
    with other, pytest.raises(kombu_toc.ConfigurationError, match="not a timeout center"):
        migrate_broker(server.url, other)


def test_nothing_of_it_is_left_once_all_has_run(
    old: Connect, move: Move, client: redis.Redis, center: TimeoutCenter
) -> None:
    for i in range(30):
        send(old(), f"{i}")
    move()
    assert center.ack(center.pop("celery", 100).messages) == 30
    assert keys_left(client, "toc:{celery:*}:*") == []
