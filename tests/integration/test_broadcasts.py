"""Broadcasts on a real server: who gets which, and when."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import redis
from kombu import Connection, Consumer, Exchange, Message, Producer, Queue

from kombu_toc import TimeoutCenter, envelope

from ..proxy import Proxy
from ..servers import Server
from .conftest import drain
from .inspection import keys_left

Connect = Callable[..., Connection]

EVERYONE = Exchange("everyone", "fanout")


class Inbox:
    """What a consumer got."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def __call__(self, body: Any, message: Message) -> None:
        self.messages.append(message)
        message.ack()

    @property
    def bodies(self) -> list[Any]:
        return [message.payload for message in self.messages]


def consume(connection: Connection, *queues: Queue) -> Inbox:
    """Consume on a channel of its own, until the connection is released."""
    inbox = Inbox()
    Consumer(connection.channel(), list(queues), callbacks=[inbox]).consume()
    return inbox


def broadcast(
    connection: Connection, body: Any, exchange: Exchange = EVERYONE, key: str = ""
) -> None:
    Producer(connection, exchange).publish(body, routing_key=key)


def as_before(connection: Connection, body: Any, exchange: str = "everyone", key: str = "") -> None:
    """Broadcast as the first release did: all into one stream, and nothing beside it."""
    center = connection.transport.center
    channel = connection.default_channel
    message = channel.prepare_message(
        json.dumps(body), content_type="application/json", content_encoding="utf-8"
    )
    message["properties"]["delivery_info"] = {"exchange": exchange, "routing_key": key}
    packed = envelope.pack(message, deflate=False)
    center.client.xadd(center.keys.fanout(exchange), {"r": key, "m": packed})


# -- queues that keep what is broadcast


def test_a_queue_keeps_what_is_broadcast_before_it_is_consumed(connect: Connect) -> None:
    queues = [Queue("first", EVERYONE), Queue("second", EVERYONE)]
    with connect() as producer:
        Producer(producer, EVERYONE).publish("early", declare=list(queues))
    consumer = connect()
    for queue in queues:
        with Consumer(consumer, [queue], callbacks=[inbox := Inbox()]):
            consumer.drain_events(timeout=5)
        assert inbox.bodies == ["early"]
        assert inbox.messages[0].delivery_info["exchange"] == "everyone"


def test_the_consumers_of_a_queue_that_keeps_broadcasts_share_them(connect: Connect) -> None:
    consumers = [connect(), connect()]
    inboxes = [consume(connection, Queue("shared", EVERYONE)) for connection in consumers]
    other = connect()
    listener = consume(other, Queue("own", EVERYONE, exclusive=True))
    for number in range(20):
        broadcast(other, number)
    for connection in (*consumers, other):
        drain(connection)
    assert sorted(inboxes[0].bodies + inboxes[1].bodies) == list(range(20))
    assert listener.bodies == list(range(20))


def test_a_kept_broadcast_that_was_not_acknowledged_is_delivered_again(connect: Connect) -> None:
    first = connect()
    Queue("kept", EVERYONE)(first.default_channel).declare()
    broadcast(first, "once")
    assert first.default_channel.basic_get("kept").payload == "once"
    first.release()
    second = connect()
    message = second.default_channel.basic_get("kept")
    assert message.payload == "once"
    message.ack()
    assert second.default_channel.basic_get("kept") is None


@pytest.mark.parametrize("arguments", [{"exclusive": True}, {"auto_delete": True}, {"expires": 9}])
def test_a_queue_that_goes_away_keeps_nothing_for_later(
    connect: Connect, center: TimeoutCenter, arguments: dict[str, Any]
) -> None:
    connection = connect()
    Queue("passing", EVERYONE, **arguments)(connection.default_channel).declare()
    broadcast(connection, "one")
    assert center.declared("passing") is None
    assert center.client.xlen(center.keys.fanout("everyone")) == 1


def test_what_is_kept_needs_no_stream(connect: Connect, center: TimeoutCenter) -> None:
    connection = connect()
    inbox = consume(connection, Queue("kept", EVERYONE))
    broadcast(connection, "one")
    drain(connection)
    assert inbox.bodies == ["one"]
    assert not center.client.exists(center.keys.fanout("everyone"))


def test_a_binding_s_pattern_holds_for_what_is_kept(connect: Connect) -> None:
    connection = connect()
    bound = Queue("workers", EVERYONE, "worker.#")
    bound(connection.default_channel).declare()
    bound(connection.default_channel).bind_to(EVERYONE, "host.#")
    for key in ("worker.online", "task.sent", "host.up"):
        broadcast(connection, key, key=key)
    inbox = consume(connection, bound)
    drain(connection)
    assert sorted(inbox.bodies) == ["host.up", "worker.online"]


def test_unbinding_and_deleting_end_the_keeping(connect: Connect, client: redis.Redis) -> None:
    connection = connect()
    queue = Queue("kept", EVERYONE)(connection.default_channel)
    queue.declare()
    queue.unbind_from(EVERYONE)
    broadcast(connection, "nobody")
    assert connection.default_channel.basic_get("kept") is None
    queue.bind_to(EVERYONE)
    broadcast(connection, "kept")
    assert queue.delete() == 1
    broadcast(connection, "gone")
    assert keys_left(client) == []


def test_a_kept_broadcast_waits_for_its_action_time(connect: Connect) -> None:
    connection = connect()
    Queue("kept", EVERYONE)(connection.default_channel).declare()
    Producer(connection, EVERYONE).publish("later", headers={"x-delay": 300_000})
    counts = connection.transport.center.counts("kept")
    assert (counts.ready, counts.scheduled) == (0, 1)


def test_a_batch_reaches_the_queues_that_keep(connect: Connect) -> None:
    connection = connect()
    Queue("kept", EVERYONE)(connection.default_channel).declare()
    channel = connection.default_channel
    batch = channel.create_publish_batch(10)
    for number in range(3):
        message = channel.prepare_message(str(number), content_type="text/plain")
        batch.publish(message, exchange="everyone", routing_key="")
    assert connection.transport.center.counts("kept").waiting == 0
    batch.flush()
    inbox = consume(connection, Queue("kept", EVERYONE))
    drain(connection)
    assert [int(body) for body in inbox.bodies] == [0, 1, 2]


@pytest.mark.one_server("the proxy that loses replies stands before one")
def test_a_broadcast_that_is_repeated_is_kept_once(server: Server, connect: Connect) -> None:
    """The reply is lost when the stream has it, and when the queue has it."""
    listener = connect()
    own = consume(listener, Queue("own", EVERYONE, exclusive=True))
    kept = Queue("kept", EVERYONE)
    kept(listener.default_channel).declare()
    policy = {"max_retries": 5, "interval_start": 0.1, "interval_step": 0}
    with Proxy(server.port) as proxy, Connection(proxy.toc_url) as connection:
        producer = connection.Producer()
        to_all = {"exchange": EVERYONE, "declare": [EVERYONE]}
        producer.publish("before", **to_all)
        for body, where in (("cut in the stream", b"cut in the"), ("cut in the queue", b'"k":"')):
            happened = proxy.drop_replies(where)
            producer.publish(body, retry=True, retry_policy=policy, **to_all)
            assert happened.is_set()
        producer.publish("after", **to_all)
    drain(listener)
    inbox = consume(listener, kept)
    drain(listener)
    assert (
        inbox.bodies == own.bodies == ["before", "cut in the stream", "cut in the queue", "after"]
    )


# -- side by side with the first release


def test_a_queue_that_keeps_gets_what_a_producer_of_the_first_release_broadcasts(
    connect: Connect,
) -> None:
    connection = connect()
    inbox = consume(connection, Queue("kept", EVERYONE))
    own = consume(connection, Queue("own", EVERYONE, exclusive=True))
    as_before(connection, "old")
    broadcast(connection, "new")
    drain(connection)
    assert sorted(inbox.bodies) == ["new", "old"]
    assert own.bodies == ["old", "new"]
    as_before(connection, "older")
    drain(connection)
    assert inbox.bodies[2:] == own.bodies[2:] == ["older"]


# -- the server's clock


def test_a_binding_made_after_the_clock_stepped_back_gets_what_follows(
    connect: Connect, center: TimeoutCenter
) -> None:
    connection = connect()
    inbox = consume(connection, Queue("own", EVERYONE, exclusive=True))
    # The first broadcast has an id of long ago: the binding was made by a clock that is ahead.
    packed = envelope.pack(
        {"body": b"1", "content-type": "application/json", "content-encoding": "utf-8"},
        deflate=False,
    )
    center.client.xadd(center.keys.fanout("everyone"), {"r": "", "m": packed}, id="1000-1")
    drain(connection)
    assert inbox.bodies == [1]
