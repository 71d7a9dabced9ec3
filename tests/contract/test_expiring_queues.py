"""A queue with x-expires goes to the second when nobody uses it, and not before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from kombu import Connection, Queue
from kombu.exceptions import ChannelError

from kombu_toc import ConfigurationError, TimeoutCenter
from kombu_toc.center import topics
from kombu_toc.consumer.upkeeper import sweep
from kombu_toc.model.topic import Declaration

from ..support.consumers import keeps_up
from ..support.consuming import Inbox
from ..support.fixtures import drain
from ..support.inspection import keys_left
from ..support.servers import Server, frozen
from ..support.waiting import running, wait_until
from .test_transport import publish

Connect = Callable[..., Connection]

#: Seconds after which a queue expires here, and within which it has gone then.
EXPIRES = 2.0
GONE = 1.0


def declared(connection: Connection, name: str = "brief", expires: float = EXPIRES) -> Queue:
    queue = Queue(name, expires=expires)(connection.default_channel)
    queue.declare()
    return queue


def is_there(client: redis.Redis, name: str = "brief") -> bool:
    return bool(client.hexists("toc:{toc}:topics", name))


def wait_until_gone(client: redis.Redis, since: float, name: str = "brief") -> None:
    """It goes no earlier than it may, and no later than a second after that."""
    assert any(not is_there(client, name) or time.sleep(0.01) for _ in running(EXPIRES + GONE))
    assert time.monotonic() - since > EXPIRES - 0.05


def test_a_queue_that_nobody_uses_goes_to_the_second_with_its_messages(
    connection: Connection, client: redis.Redis
) -> None:
    declared(connection)
    began = time.monotonic()
    publish(connection, "x", "brief", headers={"x-delay": 60_000})
    channel = connection.default_channel
    assert channel.queue_declare("brief", passive=True).message_count == 1
    wait_until_gone(client, began)
    with pytest.raises(ChannelError, match="NOT_FOUND"):
        channel.queue_declare("brief", passive=True)
    assert any(not keys_left(client) or time.sleep(0.01) for _ in running(GONE))


def test_who_asks_for_one_that_has_expired_need_not_wait_for_another(
    connection: Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not there for who asks, and new for who declares it, also to stay from now on."""
    keeper = connection.transport.lease_keeper
    monkeypatch.setattr(keeper, "look_after", lambda queue, expires_ms: None)
    declared(connection)
    for queue in ("again", "stays"):
        declared(connection, queue)
        publish(connection, "old", queue)
    time.sleep(EXPIRES + 0.6)  # the server's own clock decides what has expired
    channel = connect().default_channel
    assert channel.queue_declare("stays").message_count == 0
    assert channel.center.registry.topic("stays").declaration.expires is None
    with pytest.raises(ChannelError, match="NOT_FOUND"):
        connection.default_channel.queue_declare("brief", passive=True)
    assert declared(connection, "again").queue_declare(passive=True).message_count == 0


def test_whoever_uses_it_has_it_expire_that_much_later(
    connect: Connect, client: redis.Redis
) -> None:
    """It is declared again, put to, also by another process, or asked for a message."""
    connection, elsewhere = connect(), connect()
    queues = {use: declared(connection, use) for use in ("declare", "put", "elsewhere", "get")}
    until = time.monotonic() + 1.5 * EXPIRES
    last: dict[str, float] = {}
    number = 0
    while time.monotonic() < until:
        number += 1
        for use, queue in queues.items():
            last[use] = time.monotonic()
            if use == "declare":
                queue.declare()
            elif use == "get":
                queue.get()
            else:
                publish(connection if use == "put" else elsewhere, number, use)
            assert is_there(client, use)
        time.sleep(EXPIRES / 5)
    for use in ("put", "elsewhere"):
        assert connection.transport.center.counts(use).ready == number
    gone: dict[str, float] = {}
    for _ in running(EXPIRES + GONE):
        for use in queues.keys() - gone.keys():
            if not is_there(client, use):
                gone[use] = time.monotonic()
        if len(gone) == len(queues):
            break
        time.sleep(0.01)
    assert gone.keys() == queues.keys(), "a second after its time"
    assert all(gone[use] - last[use] > EXPIRES - 0.05 for use in queues)


@pytest.mark.cluster
def test_a_consumer_keeps_it_and_it_expires_when_the_last_one_leaves(
    connect: Connect, client: redis.Redis
) -> None:
    """Each message, whenever it was put: the keys live for as long as the queue."""
    first, second = connect(), connect()
    brief = Queue("brief", expires=EXPIRES)
    with Inbox(first, brief) as inbox:
        with Inbox(second, brief):
            publish(first, "late", "brief", headers={"x-delay": int(1.8 * EXPIRES * 1000)})
        second.release()
        until = time.monotonic() + 1.5 * EXPIRES
        while time.monotonic() < until:
            assert sweep(TimeoutCenter(client)) == []
            assert is_there(client)
            drain(first, timeout=0.1)
        assert len(TimeoutCenter(client).queues.consumers()["brief"]) == 1
        drain(first, timeout=EXPIRES)
        assert inbox.bodies == ["late"]
    left = time.monotonic()
    wait_until_gone(client, left)


def test_two_processes_that_consume_it_do_not_take_it_from_each_other(
    connect: Connect, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = connect()
    with Inbox(ours, Queue("brief", expires=EXPIRES)):
        other = TimeoutCenter(client)
        topic = other.registry.declared("brief")
        assert topic is not None
        with other_process(monkeypatch):
            other.expiring.hold(topic)
            other.expiring.leave(topic)
        time.sleep(1.5 * EXPIRES)  # the server's own clock decides what has expired
        assert sweep(other) == []
        assert is_there(client)


def test_a_queue_that_is_declared_again_while_what_expired_is_deleted_stays(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    center, other = TimeoutCenter(client), TimeoutCenter(client)
    center.queues.declare("brief", slots=1, expires=1, kept=60_000)
    time.sleep(0.05)  # the server's own clock decides what has expired
    take = center.expiring.stale

    def take_and_be_late(most: int) -> list[str]:
        names = take(most)
        other.queues.declare("brief", slots=1, expires=60_000, kept=60_000)
        other.put("brief", "new", b"", delay=60)
        return names

    monkeypatch.setattr(center.expiring, "stale", take_and_be_late)
    assert sweep(center) == ["topic:brief"]
    assert is_there(client)
    assert [one.id for one in other.get("new")] == ["new"]


@contextmanager
def other_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(topics, "_user", lambda pid: "another")
        yield


@pytest.mark.one_server("a Cluster's node would be replaced")
def test_a_server_that_stands_still_takes_nothing_from_its_consumers(
    connection: Connection, client: redis.Redis, single_server: Server
) -> None:
    with Inbox(connection, Queue("brief", expires=EXPIRES)) as inbox:
        publish(connection, "kept", "brief", headers={"x-delay": int(2 * EXPIRES * 1000)})
        drain(connection, timeout=0.1)
        with frozen(single_server):
            time.sleep(1.25 * EXPIRES)  # it stands still
        assert sweep(TimeoutCenter(client)) == []
        drain(connection, timeout=1.5 * EXPIRES)
        assert inbox.bodies == ["kept"]


def test_of_a_consumer_that_was_killed_it_is_known_for_as_long_as_of_others(
    connect: Connect, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """toc_stale_after, and not the queue's own time: a process may also stand still."""
    center = TimeoutCenter(client)
    topic = center.queues.declare("brief", slots=1, expires=200, kept=3000)
    center.put("brief", "x", b"", delay=60)
    with other_process(monkeypatch):
        center.expiring.hold(topic)
    time.sleep(0.7)  # the server's own clock decides what has expired
    assert sweep(center) == []
    assert len(center.get("x")) == 1
    assert wait_until(lambda: sweep(center)) == ["topic:brief"]
    assert keys_left(client) == []


@pytest.mark.cluster
def test_a_worker_deletes_what_others_have_left(connect: Connect, client: redis.Redis) -> None:
    """The elected one looks every second, if there is such a queue."""
    worker = connect()
    with Inbox(worker):
        worker.transport.poller.long_running = True
        center = TimeoutCenter(client)
        while not keeps_up(worker.transport.lease_keeper):
            drain(worker, timeout=0.05)
        topic = center.queues.declare("brief", slots=1, expires=int(EXPIRES * 1000), kept=60_000)
        center.expiring.touch(topic)
        turns = running(EXPIRES + 3)  # it reads what is declared every two
        assert any(not is_there(client) or drain(worker, timeout=0.05) for _ in turns)


@pytest.mark.parametrize("expires", [0, -5, "soon", 1.5])
def test_a_time_that_is_none_is_an_error(connect: Connect, expires: Any) -> None:
    channel = connect().default_channel
    with pytest.raises(ConfigurationError, match="queue 'brief': x-expires must be a whole number"):
        channel.queue_declare("brief", arguments={"x-expires": expires})
    assert channel.center.queues.names() == []


def test_a_declaration_without_it_stands(connect: Connect, client: redis.Redis) -> None:
    """Who asks for a queue that expires does not have the messages of one that stays go."""
    with connect() as first:
        first.default_channel.queue_declare("stays")
        publish(first, "x", "stays", headers={"x-delay": 60_000})
    connection = connect(toc_stale_after=EXPIRES)
    with Inbox(connection, Queue("stays", expires=EXPIRES)):
        drain(connection, timeout=0.5)
    connection.release()
    center = TimeoutCenter(client)
    center.queues.declare("stays", expires=100)
    center.expiring.refresh("stays", 100)
    time.sleep(EXPIRES + 0.3)  # the server's own clock decides what has expired
    assert sweep(center) == []
    assert center.counts("stays").scheduled == 1
    assert {client.pttl(slot.body) for slot in center.registry.topic("stays").all_slots()} <= {
        -1,
        -2,
    }


def test_a_queue_that_is_gone_when_its_process_goes_on_is_declared_again(
    client: redis.Redis,
) -> None:
    """K6: it stood still for long, or the server has lost its memory. Else who sends there would
    declare one that stays."""
    now = time.monotonic()
    center = TimeoutCenter(client)
    center.registry.clock = lambda: now
    center.queues.declare("mine", slots=1, expires=60_000)
    client.flushall()
    now += 60
    center.expiring.refresh("mine", 60_000)
    topic = TimeoutCenter(client).registry.declared("mine")
    assert topic is not None
    assert (topic.declaration.expires, topic.slots) == (60_000, 1)


def test_who_declares_a_queue_to_stay_is_told_that_it_was_declared_to_expire(
    connect: Connect,
) -> None:
    """A1: a worker warns of it when it starts."""
    declared(connect())
    channel = connect().default_channel
    for queue in ("brief", "stays"):
        channel.queue_declare(queue)
    [said] = channel.ignored["brief"]
    assert said.startswith("no x-expires (it was declared with 2000, which stands: it goes with")
    assert channel.ignored["stays"] == []


def test_what_is_kept_by_its_consumers_is_told_apart_in_its_declaration() -> None:
    kept = Declaration(slots=1, expires=2000, kept=60_000)
    assert Declaration.from_json(kept.to_json()) == kept
    assert (kept.keys_ms, Declaration(expires=2000).keys_ms, Declaration().keys_ms) == (
        60_000,
        2000,
        0,
    )


@pytest.mark.cluster
def test_one_that_is_deleted_and_declared_to_stay_stays_whoever_has_used_the_former(
    connect: Connect, client: redis.Redis
) -> None:
    """K6: a process that has not read that yet is told of it when it next says what it uses."""
    old, other = connect(), TimeoutCenter(client)
    with Inbox(old, Queue("brief", expires=EXPIRES)):
        drain(old, timeout=0.1)
        expiring, before = TimeoutCenter(client).expiring, other.registry.declared("brief")
        assert before is not None
        other.queues.delete("brief")
        other.queues.declare("brief", slots=before.slots)
        other.put("brief", "kept", b"", delay=60)
        for still_uses in (expiring.touch, expiring.hold, expiring.leave):
            still_uses(before)
            keys = [key for slot in before.all_slots() for key in slot.all()]
            assert {client.pttl(key) for key in keys} == {-1, -2}
    assert client.zrange("toc:{toc}:expiring", 0, -1) == []
    assert [one.id for one in other.get("kept")] == ["kept"]


@pytest.mark.parametrize("is_away", [False, True], ids=["now", "later"])
def test_an_exclusive_queue_that_somebody_has_declared_to_stay_does_not_go_with_its_connection(
    connect: Connect, client: redis.Redis, is_away: bool
) -> None:
    """K6: nor when what is owed is done after the server was away."""
    old, other = connect(), TimeoutCenter(client)
    old.default_channel.queue_declare("brief", exclusive=True)
    publish(old, "x", "brief")
    other.queues.delete("brief")
    other.queues.declare("brief", slots=1)
    other.put("brief", "kept", b"")
    keeper = old.transport.lease_keeper
    if is_away:
        keeper.delete_later("brief", {})
    old.release()
    wait_until(lambda: not keeper.deletions)
    assert [one.id for one in other.get("kept")] == ["kept"]
