"""Exchanges that route: the table of their bindings is kept, and never out of date."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kombu import Connection, Exchange, Producer, Queue

from kombu_toc import TimeoutCenter
from kombu_toc.center.exchanges import MAX_FOUND, MAX_TABLES, Bindings, Table, binding
from kombu_toc.transport.queues import TopicExchange

from ..support.fixtures import own_server
from ..support.inspection import keys_left
from ..support.waiting import at_once

Connect = Callable[..., Connection]

KINDS = ("direct", "topic")


def waiting(center: TimeoutCenter, *queues: str) -> list[int]:
    return [center.counts(queue).waiting for queue in queues]


def publish(connection: Connection, exchange: Exchange, key: str) -> None:
    Producer(connection.default_channel, exchange, auto_declare=False).publish("x", routing_key=key)


def commands(client: redis.Redis) -> dict[str, int]:
    return {name[8:]: of["calls"] for name, of in client.info("commandstats").items()}


@pytest.mark.parametrize("kind", KINDS)
def test_what_another_process_binds_or_unbinds_counts_from_the_next_publish_on(
    connect: Connect, center: TimeoutCenter, kind: str
) -> None:
    exchange = Exchange("work", kind)
    producer, other = connect(), connect()
    first = Queue("first", exchange, "key")(other.default_channel)
    second = Queue("second", exchange, "key")(other.default_channel)
    first.declare()
    publish(producer, exchange, "key")
    second.declare()
    publish(producer, exchange, "key")
    assert waiting(center, "first", "second") == [2, 1]
    first.unbind_from(exchange, "key")
    publish(producer, exchange, "key")
    assert waiting(center, "first", "second") == [2, 2]
    first.bind_to(exchange, "other")
    second.delete()
    publish(producer, exchange, "key")
    publish(producer, exchange, "other")
    assert waiting(center, "first") == [3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_binding_that_goes_stale_ends_the_routing(
    connection: Connection, center: TimeoutCenter, kind: str
) -> None:
    exchange = Exchange("work", kind)
    Queue("stays", exchange, "key")(connection.default_channel).declare()
    center.queues.declare("brief")
    pattern = TopicExchange(None).key_to_pattern("key")
    member = binding(kind, "key", pattern, "brief")
    Bindings(center).add("work", member, 60_000)
    publish(connection, exchange, "key")
    assert waiting(center, "stays", "brief") == [1, 1]
    center.client.zadd(center.keys.bindings("work"), {member: 1})  # its time has come
    publish(connection, exchange, "key")
    assert waiting(center, "stays", "brief") == [2, 1]
    assert center.client.zcard(center.keys.bindings("work")) == 1


@pytest.mark.parametrize("ttl_ms", [0, 60_000])
def test_as_many_bindings_as_before_are_seen_to_be_others(
    connection: Connection, center: TimeoutCenter, ttl_ms: int
) -> None:
    """One goes and one comes between two publishes, and the routing key leads somewhere still."""
    exchange = Exchange("work", "direct")
    for queue in ("stays", "goes", "comes"):
        center.queues.declare(queue)
    stays, goes, comes = (binding("direct", "a", None, name) for name in ("stays", "goes", "comes"))
    Bindings(center).add("work", stays)
    Bindings(center).add("work", goes)
    publish(connection, exchange, "a")
    Bindings(center).remove("work", goes)
    Bindings(center).add("work", comes, ttl_ms)
    publish(connection, exchange, "a")
    assert waiting(center, "stays", "goes", "comes") == [2, 1, 1]


@own_server
@pytest.mark.parametrize("options", [{"exclusive": True}, {"auto_delete": True}, {"expires": 60}])
def test_to_delete_a_transient_queue_looks_through_no_keys(
    connection: Connection, client: redis.Redis, options: dict[str, Any]
) -> None:
    queue = Queue("reply", Exchange("replies", "direct"), "key", **options)
    queue(connection.default_channel).declare()
    before = commands(client).get("scan", 0)
    for _ in range(2):  # as Kombu does with the queue of replies to remote control
        connection.default_channel.queue_delete("reply")
    assert commands(client).get("scan", 0) == before
    assert keys_left(client) == []


def test_an_exchange_that_was_deleted_and_is_bound_again_routes_as_it_is_bound_now(
    connect: Connect, center: TimeoutCenter, client: redis.Redis
) -> None:
    exchange = Exchange("work", "direct")
    producer, other = connect(), connect()
    Queue("first", exchange, "key")(other.default_channel).declare()
    publish(producer, exchange, "key")
    exchange(other.default_channel).delete()
    publish(producer, exchange, "key")
    Queue("second", exchange, "key")(other.default_channel).declare()
    publish(producer, exchange, "key")
    assert waiting(center, "first", "second") == [1, 1]
    for queue in ("first", "second"):
        other.default_channel.queue_delete(queue)
    assert keys_left(client) == []


@own_server
@pytest.mark.one_server("what is sent to it is counted there")
@pytest.mark.parametrize("kind", KINDS)
def test_a_publish_asks_for_the_version_and_reads_no_bindings(
    connection: Connection, center: TimeoutCenter, client: redis.Redis, kind: str
) -> None:
    exchange = Exchange("work", kind)
    exchange(connection.default_channel).declare()
    pattern = TopicExchange(None).key_to_pattern
    members = {
        binding(kind, f"key{n}.x", pattern(f"key{n}.x"), f"queue{n}"): "inf" for n in range(1000)
    }
    client.zadd(center.keys.bindings("work"), members)
    center.queues.declare("queue7")
    publish(connection, exchange, "key7.x")
    before, sent = commands(client), client.info("stats")["total_net_output_bytes"]
    for _ in range(50):
        publish(connection, exchange, "key7.x")
    after = commands(client)
    assert after["evalsha"] - before["evalsha"] == 2 * 50  # the version, and the put
    # 1,000 bindings are some 40,000 bytes.
    assert client.info("stats")["total_net_output_bytes"] - sent < 50 * 1000
    assert waiting(center, "queue7") == [51]


def test_a_refreshed_binding_is_no_new_one(connect: Connect, center: TimeoutCenter) -> None:
    member = binding("direct", "key", None, "brief")
    client, bound = center.client, center.keys.bound("work")
    Bindings(center).add("work", member, 60_000)
    version = client.get(bound)
    Bindings(center).add("work", member, 90_000)
    assert client.get(bound) == version
    Bindings(center).add("work", member)  # for good
    assert client.get(bound) != version


def test_versions_are_never_the_same_again_although_the_clock_steps_back(
    center: TimeoutCenter,
) -> None:
    bound, client = center.keys.bound("work"), center.client
    Bindings(center).add("work", binding("direct", "a", None, "a"))
    ahead = int(client.get(bound)) + 3_600_000_000
    client.set(bound, ahead)
    seen = {client.get(bound)}
    for number in range(20):
        Bindings(center).add("work", binding("direct", f"b{number}", None, "b"))
        seen.add(client.get(bound))
    assert len(seen) == 21
    assert all(int(version) >= ahead for version in seen)


def test_threads_that_publish_see_each_binding_at_once(
    connect: Connect, center: TimeoutCenter
) -> None:
    exchange = Exchange("work", "direct")
    connection, other = connect(), connect()

    def run(number: int) -> None:
        for turn in range(20):
            name = f"q{number}-{turn}"
            with connection.channel() as channel:
                Queue(name, exchange, name)(channel).declare()
            with other.channel() as channel:
                Producer(channel, exchange, auto_declare=False).publish("x", routing_key=name)
            assert waiting(center, name) == [1]

    at_once(run, range(4))


def test_what_is_kept_of_exchanges_and_routing_keys_is_bounded(
    connection: Connection, center: TimeoutCenter
) -> None:
    routes = connection.transport.routes
    for number in range(MAX_TABLES + 10):
        routes.of(f"exchange{number}")
    assert len(routes._tables) <= MAX_TABLES
    table = Table("1", [json.dumps(["#", "^.*?$", "all", "topic"]), 0])
    for number in range(MAX_FOUND + 10):
        assert table.topic(f"key{number}") == ["all"]
    assert len(table._found) <= MAX_FOUND


def test_a_message_that_nobody_is_bound_to_goes_to_the_queue_for_such(
    connect: Connect, center: TimeoutCenter
) -> None:
    connection = connect(deadletter_queue="lost")
    exchange = Exchange("work", "direct")
    Queue("first", exchange, "key")(connection.default_channel).declare()
    with pytest.warns(UserWarning, match="could not be delivered"):
        publish(connection, exchange, "nobody")
    assert waiting(center, "first", "lost") == [0, 1]


words = st.sampled_from(["news", "sport", "x", "", "a+b", "*", "#", "ne*s"])
keys = st.lists(words, min_size=1, max_size=4).map(".".join)
plain = keys.map(lambda key: key.replace("*", "s").replace("#", "h"))


@settings(max_examples=300, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.lists(st.tuples(keys, st.sampled_from("abc")), max_size=8), st.lists(plain, max_size=5))
def test_a_table_finds_what_kombu_would(bound: list[tuple[str, str]], sent: list[str]) -> None:
    exchange = TopicExchange(None)
    rows = [exchange.prepare_bind(queue, "e", key, None) for key, queue in bound]
    raw = [part for row in rows for part in (binding("topic", *row), 0)]
    table = Table("1", raw)
    for key in sent:
        for _ in range(2):  # looked up, and remembered
            assert sorted(table.topic(key)) == sorted(exchange.lookup(rows, "e", key, None))
        direct = {queue for routing_key, _, queue in rows if routing_key == key}
        assert set(table.direct(key)) == direct
