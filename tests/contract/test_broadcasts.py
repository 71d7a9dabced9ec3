"""Broadcasts on a real server: who gets which, and when."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Connection, Exchange, Producer, Queue

from kombu_toc import TimeoutCenter
from kombu_toc.center.exchanges import PAGE, PARTS, part_of_key
from kombu_toc.consumer import blocking
from kombu_toc.model import message as envelope

from ..support.consuming import Inbox, Loop, deliver_until
from ..support.fixtures import drain
from ..support.inspection import keys_left
from ..support.proxy import Proxy
from ..support.servers import Server, SteppedServer

Connect = Callable[..., Connection]

EVERYONE = Exchange("everyone", "fanout")


def consume(connection: Connection, *queues: Queue) -> Inbox:
    """Consume on a channel of its own, until the connection is released."""
    return Inbox(connection.channel(), *queues)


def bound_to(channel: Any, *bindings: Any, name: str = "q", **lives: Any) -> Queue:
    """A queue of the events of workers, and of what else is named: exchanges, or keys of events."""
    queue = Queue(name, EVENTS, "worker.#", **lives)(channel)
    queue.declare()
    for one in bindings:
        if isinstance(one, str):
            queue.bind_to(EVENTS, one)
        else:
            one(channel).declare()
            queue.bind_to(one, "mine" if one is LETTERS else "")
    return queue


def broadcast(
    connection: Connection, body: Any, exchange: Exchange = EVERYONE, key: str = ""
) -> None:
    Producer(connection, exchange).publish(body, routing_key=key)


# -- queues that keep what is broadcast


def test_a_queue_keeps_what_is_broadcast_before_it_is_consumed(connect: Connect) -> None:
    queues = [Queue("first", EVERYONE), Queue("second", EVERYONE)]
    with connect() as producer:
        Producer(producer, EVERYONE).publish("early", declare=list(queues))
    consumer = connect()
    for queue in queues:
        with Inbox(consumer, queue) as inbox:
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
    connection: Connection, center: TimeoutCenter, arguments: dict[str, Any]
) -> None:
    Queue("passing", EVERYONE, **arguments)(connection.default_channel).declare()
    broadcast(connection, "one")
    # One that expires is a topic at once, which says when: it has no message all the same.
    assert (center.registry.declared("passing") is not None) == ("expires" in arguments)
    assert "expires" not in arguments or center.counts("passing") == (0, 0, 0, 0)
    assert center.client.xlen(center.keys.fanout("everyone")) == 1


def test_what_is_kept_needs_no_stream(connection: Connection, center: TimeoutCenter) -> None:
    inbox = consume(connection, Queue("kept", EVERYONE))
    broadcast(connection, "one")
    drain(connection)
    assert inbox.bodies == ["one"]
    assert not center.client.exists(center.keys.fanout("everyone"))


def test_a_binding_s_pattern_holds_for_what_is_kept(connection: Connection) -> None:
    bound = Queue("workers", EVERYONE, "worker.#")
    bound(connection.default_channel).declare()
    bound(connection.default_channel).bind_to(EVERYONE, "host.#")
    for key in ("worker.online", "task.sent", "host.up"):
        broadcast(connection, key, key=key)
    inbox = consume(connection, bound)
    drain(connection)
    assert sorted(inbox.bodies) == ["host.up", "worker.online"]


def test_unbinding_and_deleting_end_the_keeping(
    connection: Connection, client: redis.Redis
) -> None:
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


def test_a_kept_broadcast_waits_for_its_action_time(connection: Connection) -> None:
    Queue("kept", EVERYONE)(connection.default_channel).declare()
    Producer(connection, EVERYONE).publish("later", headers={"x-delay": 300_000})
    counts = connection.transport.center.counts("kept")
    assert (counts.ready, counts.scheduled) == (0, 1)


def test_a_batch_reaches_the_queues_that_keep(connection: Connection) -> None:
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
    assert sorted(int(body) for body in inbox.bodies) == [0, 1, 2]


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
    sent = ["before", "cut in the stream", "cut in the queue", "after"]
    assert inbox.bodies == own.bodies == sent


# -- the server's clock


def test_a_binding_made_after_the_clock_stepped_back_gets_what_follows(
    connection: Connection, center: TimeoutCenter
) -> None:
    inbox = consume(connection, Queue("own", EVERYONE, exclusive=True))
    # The first broadcast has an id of long ago: the binding was made by a clock that is ahead.
    kind = {"content-type": "application/json", "content-encoding": "utf-8"}
    packed = envelope.pack({"body": b"1", **kind}, deflate=False)
    center.client.xadd(center.keys.fanout("everyone"), {"": packed}, id="1000-1")
    drain(connection)
    assert inbox.bodies == [1]


@pytest.mark.one_server("whose clock is stepped")
@pytest.mark.parametrize("key", ["", "worker.online"])
def test_broadcasts_go_on_when_the_server_s_clock_steps_back(tmp_path: Path, key: str) -> None:
    """To who was bound before and to who is bound after, of a stream that there was and of one
    that there was not."""
    quiet = Exchange("quiet", "fanout")
    with SteppedServer(tmp_path) as server, Connection(server.toc_url) as connection:
        before = consume(connection, Queue("before", EVERYONE, "worker.#", exclusive=True))
        silent = consume(connection, Queue("silent", quiet, "worker.#", exclusive=True))
        broadcast(connection, "one", EVERYONE, key)
        drain(connection)
        server.step(-3600)
        after = consume(connection, Queue("after", EVERYONE, "worker.#", exclusive=True))
        for exchange in (EVERYONE, quiet):
            broadcast(connection, "two", exchange, key)
            broadcast(connection, "three", exchange, key)
        drain(connection)
        assert before.bodies == ["one", "two", "three"]
        assert after.bodies == silent.bodies == ["two", "three"]


def test_a_stream_that_was_made_anew_by_a_clock_that_stepped_back_is_read(
    connection: Connection, center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kombu_toc.consumer.blocking.RESTART_PAUSE", 0.0)
    inbox = consume(connection, Queue("own", EVERYONE, exclusive=True))
    broadcast(connection, "before")
    drain(connection)
    [stream] = center.client.keys("*:fanout:*")
    [(_, fields)] = center.client.xrange(stream)
    center.client.delete(stream)  # as it goes when nothing was added for long
    center.client.xadd(stream, fields, id="1000-1")
    deliver_until(connection, lambda: len(inbox.bodies) == 2, 10)
    drain(connection)
    assert inbox.bodies == ["before", "before"]


# -- parts of an exchange

EVENTS, LETTERS = Exchange("events", "fanout"), Exchange("letters", "direct")


def reader(connection: Connection, name: str, key: str) -> Inbox:
    return consume(connection, Queue(name, EVENTS, key, exclusive=True))


def streams_in(client: redis.Redis) -> dict[str, int]:
    """How many messages each stream has."""
    return {
        key.decode().partition("{toc}:")[2]: client.xlen(key)
        for pattern in ("*:fanout:*", "*:part:*")
        for key in client.keys(pattern)
    }


def test_who_is_bound_to_a_first_word_reads_nothing_else(
    connection: Connection, client: redis.Redis
) -> None:
    workers = reader(connection, "w", "worker.#")
    for key in ("task.received", "worker.online", "task.started", "worker.heartbeat"):
        broadcast(connection, key, EVENTS, key)
    assert streams_in(client) == {f"part:{part_of_key('worker.')}:events": 2}
    drain(connection)
    assert workers.bodies == ["worker.online", "worker.heartbeat"]


def test_who_is_bound_to_no_first_word_gets_all_in_order(
    connection: Connection, client: redis.Redis
) -> None:
    """Also with readers of parts beside, and messages without a routing key among the rest."""
    bindings = ["#", "", "*.received", "worker.#", "task.received", "task.#"]
    inboxes = {key: reader(connection, f"q{n}", key) for n, key in enumerate(bindings)}
    sent = []
    for number in range(400):
        key = ["task.received", "worker.online", "", "solo", "task.started"][number % 5]
        sent.append((number, key))
        broadcast(connection, number, EVENTS, key)
    drain(connection)

    def of(*keys: str) -> list[int]:
        return [number for number, key in sent if key in keys]

    everything = list(range(400))
    assert inboxes["#"].bodies == everything
    assert inboxes[""].bodies == everything
    assert inboxes["*.received"].bodies == of("task.received", "")
    assert inboxes["worker.#"].bodies == of("worker.online", "")
    assert inboxes["task.received"].bodies == of("task.received", "")
    assert inboxes["task.#"].bodies == of("task.received", "task.started", "")


def test_the_order_holds_from_page_to_page_of_a_long_and_a_short_stream(
    connection: Connection,
) -> None:
    inbox = reader(connection, "all", "#")
    for number in range(3 * PAGE):
        broadcast(connection, number, EVENTS, "" if number % 50 == 49 else "task.sent")
    drain(connection)
    assert inbox.bodies == list(range(3 * PAGE))


def test_first_words_share_a_bounded_number_of_parts(connection: Connection) -> None:
    keys = [f"word{number}.x" for number in range(200)]
    inboxes = [reader(connection, f"q{n}", f"word{n}.#") for n in range(0, 200, 20)]
    for key in keys:
        broadcast(connection, key, EVENTS, key)
    drain(connection)
    assert [inbox.bodies for inbox in inboxes] == [[f"word{n}.x"] for n in range(0, 200, 20)]
    streams = streams_in(connection.transport.center.client)
    assert len(streams) <= PARTS


def test_a_part_is_kept_as_long_as_somebody_may_read_it(
    connect: Connect, client: redis.Redis
) -> None:
    first, second = connect(), connect()
    tasks, workers = reader(first, "t", "task.#"), reader(second, "w", "worker.#")
    broadcast(first, "one", EVENTS, "task.sent")
    drain(first)
    first.release()
    broadcast(second, "two", EVENTS, "worker.online")
    drain(second)
    assert (tasks.bodies, workers.bodies) == (["one"], ["two"])
    second.release()
    assert keys_left(client) == []


def test_a_reader_that_reconnects_goes_on_in_each_part(connect: Connect) -> None:
    first, producer = connect(), connect()
    queue = Queue("w", EVENTS, "worker.#", expires=60)
    inbox = consume(first, queue)
    broadcast(producer, "one", EVENTS, "worker.online")
    broadcast(producer, "for all", EVENTS)
    drain(first)
    first.collect()  # as Celery does with a connection that broke
    broadcast(producer, "two", EVENTS, "worker.online")
    broadcast(producer, "for all, too", EVENTS)
    second = connect()
    again = consume(second, queue)
    drain(second)
    assert inbox.bodies == ["one", "for all"]
    assert again.bodies == ["two", "for all, too"]


@pytest.mark.parametrize("part", ["the same", "another"])
def test_a_broadcast_is_added_although_the_clock_has_stepped_back(
    connection: Connection, center: TimeoutCenter, part: str
) -> None:
    inbox = reader(connection, "w", "worker.#")
    broadcast(connection, "one", EVENTS, "worker.online")
    [stream] = center.client.keys("*:part:*")
    [(_, fields)] = center.client.xrange(stream)
    ahead = f"{(center.client.time()[0] + 3600) * 1000}-5"
    center.client.xadd(stream, fields, id=ahead)
    key = "worker.offline" if part == "the same" else ""
    broadcast(connection, "two", EVENTS, key)
    drain(connection)
    assert sorted(inbox.bodies) == ["one", "one", "two"]


def test_events_that_come_faster_than_a_page_a_pause_are_read_without_falling_behind(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read unhurriedly is read until there is no more; with tasks in between. A pause would
    last longer than the test."""
    monkeypatch.setattr(blocking, "STREAM_PAUSE", 60.0)
    connection, other = connect(), connect()
    with Loop(connection) as loop:
        inbox = reader(connection, "all", "#")
        connection.transport.poller.unhurried.add("events")
        tasks = consume(connection, Queue("tasks"))
        read_before: list[int] = []
        tasks.consumer.callbacks.append(lambda *_: read_before.append(len(inbox.messages)))
        poller = connection.transport.poller
        reading = poller._reader.subscriptions
        # A reply that is read late shows Redis's clock as late: the first pop's is read before.
        loop.until(lambda: reading.next_reading and poller._listener.connection.busy)
        for number in range(20 * PAGE):
            broadcast(other, number, EVENTS, "task.sent")
        Producer(other).publish("task", routing_key="tasks")
        reading.next_reading = time.monotonic() + 0.5  # the pause before the first page is over
        loop.until(lambda: len(inbox.messages) == 20 * PAGE, 30)
        assert inbox.bodies == list(range(20 * PAGE))
        assert read_before[0] < 20 * PAGE


# -- a queue with several bindings


@pytest.fixture(params=["exclusive", "auto_delete", "expires", "durable"])
def lives(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What is said of a queue when it is declared."""
    return {request.param: {"expires": 60}.get(request.param, True)}


def test_a_queue_gets_what_any_of_its_bindings_asks_for_once(
    connection: Connection, lives: dict[str, Any]
) -> None:
    queue = bound_to(connection.channel(), "task.#", "#.sent", **lives)
    inbox = Inbox(queue.channel, queue)
    keys = ["worker.online", "task.sent", "host.up", "task.received", "mail.sent", ""]
    for number, key in enumerate(keys):
        broadcast(connection, number, EVENTS, key)
    drain(connection)
    # The order of a topic is that of the slots.
    assert (sorted(inbox.bodies) if "durable" in lives else inbox.bodies) == [0, 1, 3, 4, 5]


def test_a_queue_gets_what_all_exchanges_broadcast_that_it_is_bound_to(
    connection: Connection, lives: dict[str, Any]
) -> None:
    queue = bound_to(connection.channel(), EVERYONE, **lives)
    inbox = Inbox(queue.channel, queue)
    broadcast(connection, 1, EVENTS, "worker.online")
    broadcast(connection, 2, EVERYONE, "worker.online")
    broadcast(connection, 3, EVENTS, "task.sent")
    drain(connection)
    assert sorted(inbox.bodies) == [1, 2]
    queue.delete()
    broadcast(connection, 4, EVENTS, "worker.online")
    broadcast(connection, 5, EVERYONE)
    drain(connection)
    assert sorted(inbox.bodies) == [1, 2]


Consuming = tuple[Connection, Queue, Inbox]


@pytest.fixture
def consuming(connection: Connection, lives: dict[str, Any]) -> Consuming:
    """A queue that is consumed, and gets what happens to workers."""
    queue = Queue("q", EVENTS, "worker.#", **lives)(connection.channel())
    return connection, queue, Inbox(queue.channel, queue)


def test_a_queue_that_is_consumed_gets_what_it_is_bound_to_afterwards(consuming: Consuming) -> None:
    connection, queue, inbox = consuming
    EVERYONE(queue.channel).declare()
    queue.bind_to(EVERYONE)
    queue.bind_to(EVENTS, "task.#")
    broadcast(connection, 1, EVENTS, "worker.online")
    broadcast(connection, 2)
    broadcast(connection, 3, EVENTS, "task.sent")
    drain(connection)
    assert sorted(inbox.bodies) == [1, 2, 3]


def test_a_queue_gets_no_more_of_what_it_is_unbound_from(consuming: Consuming) -> None:
    connection, queue, inbox = consuming
    EVERYONE(queue.channel).declare()
    queue.bind_to(EVERYONE)
    queue.bind_to(EVENTS, "task.#")
    # Somebody else is bound, so that the exchanges have streams.
    all_ = consume(connection, Queue("all", EVENTS, "#", exclusive=True))
    both = consume(connection, Queue("both", EVERYONE, exclusive=True))
    queue.unbind_from(EVENTS, "task.#")
    queue.unbind_from(EVERYONE)
    for number, key in enumerate(("worker.online", "task.sent")):
        broadcast(connection, number, EVENTS, key)
    broadcast(connection, 2)
    drain(connection)
    assert (all_.bodies, both.bodies, inbox.bodies) == ([0, 1], [2], [0])
    queue.unbind_from(EVENTS, "worker.#")
    broadcast(connection, 3, EVENTS, "worker.online")
    drain(connection)
    assert (all_.bodies, inbox.bodies) == ([0, 1, 3], [0])


def test_an_exchange_that_is_deleted_has_no_bindings_any_more(
    consuming: Consuming, client: redis.Redis
) -> None:
    connection, queue, inbox = consuming
    broadcast(connection, 1, EVENTS, "worker.online")
    drain(connection)
    queue.channel.exchange_delete("events")
    connection.transport.lease_keeper.beat(connection.transport.center, time.monotonic())
    broadcast(connection, 2, EVENTS, "worker.online")
    drain(connection)
    assert inbox.bodies == [1]
    assert not [key for key in keys_left(client) if "events" in key]


def test_a_reader_that_reconnects_goes_on_in_each_of_its_exchanges(connect: Connect) -> None:
    first, second, producer = connect(), connect(), connect()

    def reading(connection: Connection) -> Inbox:
        channel = connection.channel()
        return Inbox(channel, bound_to(channel, EVERYONE, name="w", expires=60))

    inbox = reading(first)
    broadcast(producer, 1, EVENTS, "worker.online")
    broadcast(producer, 2)
    drain(first)
    first.collect()
    broadcast(producer, 3, EVENTS, "worker.online")
    broadcast(producer, 4)
    again = reading(second)
    drain(second)
    assert sorted(inbox.bodies) == [1, 2]
    assert sorted(again.bodies) == [3, 4]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_queue_gets_what_is_broadcast_and_what_is_sent_to_it_alone(
    connection: Connection, lives: dict[str, Any], when: str, client: redis.Redis
) -> None:
    """It is bound to an exchange of each kind, before it is consumed or after."""
    channel = connection.channel()
    LETTERS(channel).declare()
    queue = bound_to(channel, *([LETTERS] if when == "before" else []), **lives)
    inbox = Inbox(channel, queue, auto_declare=False)
    if when == "after":
        queue.bind_to(LETTERS, "mine")
    broadcast(connection, 1, EVENTS, "worker.online")
    broadcast(connection, 2, LETTERS, "mine")
    drain(connection)
    assert sorted(inbox.bodies) == [1, 2]
    queue.delete()
    connection.release()
    assert keys_left(client) == []


def test_a_shared_queue_stays_when_one_of_its_consumers_goes(connect: Connect) -> None:
    """It goes with the last one, and is bound to a fanout exchange and to another."""
    first, second = connect(), connect()
    inboxes = []
    for connection in (first, second):
        channel = connection.channel()
        queue = bound_to(channel, LETTERS, name="shared", auto_delete=True)
        inboxes.append(Inbox(channel, queue, auto_declare=False))
    broadcast(second, 1, LETTERS, "mine")
    first.release()
    broadcast(second, 2, LETTERS, "mine")
    drain(second)
    assert sorted(inboxes[1].bodies) == [1, 2]
