"""The transport on a real server: Kombu's operations, one promise each."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import redis
import time_machine
from kombu import Connection, Consumer, Exchange, Message, Producer, Queue
from kombu.exceptions import ChannelError

import kombu_toc
from kombu_toc import TimeoutCenter
from kombu_toc.center.exchanges import Bindings, Routes, binding
from kombu_toc.consumer.state import WorkerPolicy
from kombu_toc.consumer.upkeeper import sweep
from kombu_toc.model import message as envelope
from kombu_toc.transport.publisher import BatchPublishError

from ..support.cases import each
from ..support.consuming import Inbox, Loop
from ..support.fixtures import drain, failure, own_server
from ..support.inspection import calls_of, keys_left, now_us, slot_keys
from ..support.proxy import Proxy
from ..support.servers import Server
from ..support.waiting import in_thread

Connect = Callable[..., Connection]


def publish(connection: Connection, body: Any, queue: str = "mail", **options: Any) -> None:
    Producer(connection.default_channel).publish(body, routing_key=queue, **options)


# -- publishing and consuming


@pytest.mark.versions
def test_a_message_arrives_with_its_headers_and_properties(connection: Connection) -> None:
    with Inbox(connection) as inbox:
        publish(connection, {"a": 1}, headers={"h": [1, None]}, correlation_id="c", priority=3)
        connection.drain_events(timeout=5)
    [message] = inbox.messages
    assert message.payload == {"a": 1}
    assert message.headers == {"h": [1, None]}
    assert message.properties["correlation_id"] == "c"
    assert message.delivery_info["routing_key"] == "mail"
    assert message.content_type == "application/json"


@pytest.mark.versions
@pytest.mark.parametrize(
    ("body", "how"),
    [
        (b"\x00\xff raw", {}),
        ("text \N{SNOWMAN}", {}),
        ({"k": [1, 2]}, {}),
        ({"x": "y" * 500}, {"compression": "zlib"}),
    ],
    ids=["bytes", "text", "JSON", "compressed"],
)
def test_bodies_of_every_kind_arrive(connection: Connection, body: Any, how: Any) -> None:
    with connection.SimpleQueue("kinds") as queue:
        queue.put(body, **how)
        message = queue.get(timeout=5)
        assert message.payload == body
        message.ack()


def test_a_queue_that_is_declared_is_not_bound_again_with_each_message(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery has it declared with each. One that may be gone is declared anew, as Kombu has it."""
    producer, lasting, brief = connection.Producer(), Queue("mail"), Queue("sms", auto_delete=True)
    producer.publish("x", routing_key="mail", declare=[lasting])
    monkeypatch.setattr(Queue, "bind", None)
    producer.publish("x", routing_key="mail", declare=[lasting])
    connection.declared_entities.clear()
    for queue in (lasting, brief):
        with pytest.raises(TypeError, match="NoneType"):
            producer.publish("x", routing_key=queue.name, declare=[queue])


@pytest.mark.versions
def test_acknowledging_several_at_once(connection: Connection, client: redis.Redis) -> None:
    with Inbox(connection, ack=False, prefetch_count=10) as inbox:
        for i in range(3):
            publish(connection, i)
        drain(connection)
        inbox.messages[1].ack(multiple=True)
        inbox.messages[2].ack()
    assert slot_keys(client) == []


@pytest.mark.versions
def test_a_rejected_message_goes_to_dead_queue(connection: Connection) -> None:
    with connection.SimpleQueue("mail") as queue:
        queue.put("x", headers={"id": "m1"})
        queue.get(timeout=5).reject()
    [found] = connection.transport.center.get("m1", topic="mail")
    assert (found.state, found.reason) == ("dead", "rejected")


def redelivery(message: Message) -> tuple[Any, Any, Any]:
    """What it says of earlier deliveries: in its delivery info, in its headers, of its failures."""
    told = (message.delivery_info.get("redelivered"), message.headers.get("redelivered"))
    return (*told, message.headers.get("x-delivery-count"))


@pytest.mark.versions
def test_a_requeued_message_comes_again_and_says_so(connection: Connection) -> None:
    with connection.SimpleQueue("mail") as queue:
        queue.put("x")
        first = queue.get(timeout=5)
        assert redelivery(first) == (None, None, None)
        first.requeue()
        second = queue.get(timeout=5)
        assert redelivery(second) == (True, True, None)
        second.ack()


@pytest.mark.versions
@pytest.mark.parametrize("ended", ["channel", "connection"])
def test_what_was_delivered_and_comes_back_says_so_and_keeps_its_place_and_its_retries(
    connect: Connect, ended: str
) -> None:
    """A6: also when it has come back from another one since, which had only fetched it"""
    publisher = connect()
    eta = datetime.now(timezone.utc).isoformat()
    for body in ("first", "second", "third"):
        publish(publisher, body, headers={"eta": eta})
    former = connect(toc_retries=1)
    channel = former.channel()
    inbox = Inbox(channel, ack=False, prefetch_count=2)
    drain(former, 0.1)
    assert [redelivery(message) for message in inbox.messages] == [(None, None, None)] * 2
    (channel if ended == "channel" else former).close()
    fetched = publisher.transport.center.pop("mail", 2).messages
    assert [(one.redelivered, one.failures) for one in fetched] == [(True, 0)] * 2
    assert publisher.transport.center.release(fetched) == 2
    inbox = Inbox(publisher.channel())
    drain(publisher)
    assert inbox.bodies == ["first", "second", "third"]
    told = [redelivery(message) for message in inbox.messages]
    assert told == [(True, True, None)] * 2 + [(None, None, None)]


def test_what_was_only_fetched_comes_back_as_not_delivered(connect: Connect) -> None:
    """A6: no consumer was handed it"""
    former = connect()
    for body in range(3):
        publish(former, body)
    first = Inbox(former.channel(), ack=False)
    with former.channel() as fetching:
        fetching.basic_qos(0, 3, False)
        former.drain_events(timeout=10)  # one event a call: the others wait
        assert len(first.messages) == 1
        former.close()
    other = connect()
    inbox = Inbox(other.channel())
    drain(other)
    assert [redelivery(message)[0] for message in inbox.messages] == [True, None, None]


def put_off(connection: Connection, times: int, how: Callable[[Message], Any]) -> list[Message]:
    """What comes of the queue "mail": all but the last of so many are put off."""
    with connection.SimpleQueue("mail") as queue:
        got: list[Message] = []
        while len(got) < times:
            got.append(queue.get(timeout=5))
            got[-1].came_at = time.monotonic()
            if len(got) < times:
                how(got[-1])
        return got


@pytest.mark.parametrize("limited", [{}, {"x-key-order": "serial"}], ids=["plain", "keys"])
@pytest.mark.parametrize(
    "how", [lambda m: m.requeue(), lambda m: m.reject(requeue=True)], ids=["requeue", "reject"]
)
def test_to_put_a_message_off_costs_no_retry_and_pauses_longer_each_time(
    connection: Connection, how: Callable[[Message], Any], limited: dict[str, Any]
) -> None:
    """A6: at once, then after 50 ms, 100 ms, 200 ms"""
    with connection.channel() as channel:
        channel.queue_declare("mail", arguments={"x-retries": 1, **limited})
    publish(connection, "x", headers={"id": "m", "x-key": "k"})
    got = put_off(connection, 5, how)
    waits = [b.came_at - a.came_at for a, b in itertools.pairwise(got)]
    assert [least <= wait for least, wait in zip((0, 0.05, 0.1, 0.2), waits, strict=True)] == (
        [True] * 4
    ), waits
    assert got[1].delivery.action_us == 0  # at once
    assert {message.delivery.retries_left for message in got} == {1}
    assert [message.delivery.requeues for message in got] == [0, 1, 2, 3, 4]
    got[-1].ack()
    assert slot_keys(connection.transport.center.client) == []


def test_a_failure_of_what_was_put_off_costs_a_retry_all_the_same(connection: Connection) -> None:
    """A6: nothing that kills its worker goes on for ever"""
    with connection.channel() as channel:
        channel.queue_declare("mail", arguments={"x-retries": 1})
    publish(connection, "x", headers={"id": "m"})
    center = connection.transport.center
    [message] = put_off(connection, 3, lambda message: message.requeue())[-1:]
    message.requeue_lost()
    [message] = put_off(connection, 2, lambda message: message.requeue())[-1:]
    assert (message.delivery.retries_left, message.delivery.requeues) == (0, 3)
    assert redelivery(message) == (True, True, 1)
    message.requeue_lost()
    [found] = center.get("m", topic="mail")
    assert (found.state, found.reason) == ("dead", "no retries left: rejected again and again")


def test_while_a_message_is_put_off_its_key_is_held(connection: Connection) -> None:
    with connection.channel() as channel:
        channel.queue_declare("mail", arguments={"x-key-order": "serial", "x-slots": 1})
    for body in ("first", "second"):
        publish(connection, body, headers={"x-key": "a"})
    publish(connection, "other", headers={"x-key": "b"})
    got: list[Any] = []
    with connection.SimpleQueue("mail") as queue:
        while len(got) < 6:
            message = queue.get(timeout=5)
            got.append(message.payload)
            if message.payload == "first" and got.count("first") < 4:
                message.requeue()
            else:
                message.ack()
    assert [body for body in got if body != "other"] == ["first"] * 4 + ["second"]


def test_a_queue_may_limit_how_often_a_message_is_put_off(
    connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    with connection.channel() as channel:
        channel.queue_declare("mail", arguments={"x-requeue-limit": 2})
        assert channel.ignored["mail"] == []
    center = connection.transport.center
    for number in range(2):
        publish(connection, "x", headers={"id": "m"})
        put_off(connection, 3, lambda message: message.requeue())[-1].requeue()
        [found] = center.get("m", topic="mail")
        reason = "requeued 2 times, and x-requeue-limit allows no more"
        assert (found.state, found.reason) == ("dead", reason)
        if not number:
            assert center.dead.requeue("mail") == 1  # and counts anew
            put_off(connection, 3, lambda message: message.requeue())[-1].ack()
    assert reason in caplog.text
    center.queues.alter("mail", requeue_limit=None)
    center.dead.requeue("mail")
    put_off(connection, 4, lambda message: message.requeue())[-1].ack()


@pytest.mark.versions
def test_recover_gives_back_what_is_not_settled(connection: Connection) -> None:
    channel = connection.default_channel
    with Inbox(channel, ack=False) as inbox:
        publish(connection, "x")
        connection.drain_events(timeout=5)
        channel.basic_recover(requeue=True)
        connection.drain_events(timeout=5)
        inbox.messages[1].ack()
    assert inbox.bodies == ["x", "x"]
    assert redelivery(inbox.messages[1]) == (True, True, None)


@pytest.mark.versions
def test_a_no_ack_consumer_leaves_nothing_behind(
    connection: Connection, client: redis.Redis
) -> None:
    with Inbox(connection, ack=False, no_ack=True) as inbox:
        publish(connection, "x")
        connection.drain_events(timeout=5)
    assert inbox.bodies == ["x"]
    assert slot_keys(client) == []


@pytest.mark.versions
@pytest.mark.one_server("on a Cluster priorities hold within a slot")
def test_priorities_go_by_steps_zero_first(connection: Connection) -> None:
    """K3"""
    for priority in (9, 5, 0, 3, 7, 0):
        publish(connection, priority, priority=priority)
    with Inbox(connection) as inbox:
        drain(connection)
    assert inbox.bodies == [0, 0, 5, 3, 7, 9]


@pytest.mark.versions
def test_one_call_of_drain_events_delivers_one_event(connection: Connection) -> None:
    """Kombu's remote control counts replies by its calls of drain_events."""
    everyone = Exchange("everyone", "fanout")
    queues = [Queue("mail"), Queue("f", everyone)]
    with Inbox(connection, *queues, prefetch_count=10) as inbox:
        for i in range(3):
            publish(connection, i)
            Producer(connection, everyone).publish(i)
        for number in range(1, 7):
            connection.drain_events(timeout=5)
            assert len(inbox.messages) == number


@pytest.mark.versions
def test_one_consumer_serves_many_queues(connection: Connection) -> None:
    queues = [Queue(f"q{i}") for i in range(5)]
    with Inbox(connection, *queues) as inbox:
        for i in range(5):
            publish(connection, i, f"q{i}")
        drain(connection)
    assert sorted(inbox.bodies) == list(range(5))


def test_two_messages_of_one_task_id_live_side_by_side(connection: Connection) -> None:
    """Celery's retry republishes the id of the task that is still running."""
    with connection.SimpleQueue("mail") as queue:
        queue.put("first", headers={"id": "m1"})
        first = queue.get(timeout=5)
        queue.put("second", headers={"id": "m1"})
        first.ack()
        second = queue.get(timeout=5)
        assert second.payload == "second"
        second.ack()


# -- action times


@pytest.mark.versions
def test_x_delay_holds_a_message_back(connection: Connection) -> None:
    with connection.SimpleQueue("mail") as queue:
        sent = time.monotonic()
        queue.put("x", headers={"x-delay": 400})
        queue.get(timeout=5).ack()
        assert time.monotonic() - sent >= 0.4


@pytest.mark.versions
def test_the_eta_header_goes_before_x_delay(connection: Connection) -> None:
    publish(connection, "x", headers={"id": "m1", "eta": "2100-01-01T00:00:00Z", "x-delay": 1})
    [found] = connection.transport.center.get("m1", topic="mail")
    assert found.time_us == 4_102_444_800_000_000


@each(
    "headers",
    [
        {"eta": "tomorrow"},
        {"eta": ""},
        {"eta": 7},
        {"eta": "x" * 10_000},
        {"x-delay": "soon"},
        {"x-delay": []},
        {"x-delay": "nan"},
    ],
)
def test_a_time_that_cannot_be_read_is_an_error_to_the_sender(
    connection: Connection, headers: dict[str, Any]
) -> None:
    """Which names the task and the time; nothing is sent."""
    with pytest.raises(
        kombu_toc.ActionTimeError, match=r"m-17: its (eta|x-delay) .* is not a "
    ) as caught:
        publish(connection, "x", headers={"id": "m-17", **headers})
    assert len(str(caught.value)) < 300
    assert connection.transport.center.get("m-17") == []


def countdown(connection: Connection, eta: datetime) -> float:
    """Publish what is due then, as a countdown: when Redis's clock has it due."""
    headers = {"id": "m1", "eta": eta.isoformat()}
    publish(connection, "x", headers=headers, **{kombu_toc.COUNTDOWN: True})
    [found] = connection.transport.center.get("m1", topic="mail")
    return found.time_us / 1_000_000


def in_a_minute() -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=60)


@pytest.mark.parametrize("skew", [300, -300])
def test_a_countdown_is_due_by_redis_clock_whatever_the_senders_shows(
    connection: Connection, client: redis.Redis, skew: int
) -> None:
    before = now_us(client) / 1_000_000
    with time_machine.travel(time.time() + skew):
        due = countdown(connection, in_a_minute())
    assert 60 <= due - before < 61


def test_a_countdown_that_is_published_late_is_due_no_later(
    connection: Connection, client: redis.Redis
) -> None:
    """Kombu repeats a publish until the broker is there again, with the message as it was."""
    eta = in_a_minute()
    with time_machine.travel(time.time() + 45):
        # Repeated 45 seconds later: 15 are left.
        before = client.time()[0]
        due = countdown(connection, eta)
    assert 14 <= due - before < 17


@pytest.mark.one_server("the clocks of nodes differ: nobody knows which one will count")
def test_a_countdown_begins_when_it_is_asked_for_not_when_it_gets_there(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X2: what was published just before has told what Redis's clock shows."""
    publish(connection, "before")
    pack = envelope.pack

    def slowly(*args: Any, **kwargs: Any) -> bytes:
        time.sleep(1)  # stands for whatever lies between the sender and the server
        return pack(*args, **kwargs)

    monkeypatch.setattr(envelope, "pack", slowly)
    eta = in_a_minute()
    assert -0.000_002 <= countdown(connection, eta) - eta.timestamp() < 1


def test_the_mark_of_a_countdown_is_not_kept(connection: Connection) -> None:
    """It says something about the publish, not about the message."""
    eta = datetime.now(timezone.utc).isoformat()
    publish(connection, "x", headers={"eta": eta}, **{kombu_toc.COUNTDOWN: True})
    message = connection.default_channel.basic_get("mail", no_ack=True)
    assert message.headers["eta"] == eta
    assert kombu_toc.COUNTDOWN not in message.properties


def test_a_time_beyond_every_score_is_an_error_to_the_sender(connection: Connection) -> None:
    with pytest.raises(kombu_toc.ActionTimeError, match="2255"):
        publish(connection, "x", headers={"eta": "9999-01-01T00:00:00+00:00"})


def test_x_slot_basis_names_the_slot(connect: Connect) -> None:
    """A2, A7"""
    connection = connect(toc_slots=8)
    for i in range(20):
        publish(connection, i, headers={"x-slot-basis": "customer-7", "x-delay": 60_000})
    by_slot = connection.transport.center.queues.counts_by_slot("mail")
    assert sorted(counts.scheduled for counts in by_slot) == [0] * 7 + [20]


# -- exchanges and bindings


@pytest.mark.versions
@each(
    "kind, key, arrives",
    [
        ("direct key-a", "key-a", True),
        ("direct key-a", "key-c", False),
        ("topic news.*", "news.sports", True),
        ("topic news.*", "news.sports.chess", False),
        ("topic news.#", "news.sports.chess", True),
        ("topic *.sports", "news.sports", True),
        ("topic news.sports", "news.weather", False),
        ("fanout worker.#", "worker.online", True),  # as Celery's events
        ("fanout worker.#", "task.received", False),
    ],
)
def test_an_exchange_routes_by_key_or_pattern(
    connect: Connect, kind: str, key: str, arrives: bool
) -> None:
    (kind, binding), name = kind.split(), f"{kind} {key}"
    with connect() as connection:
        exchange = Exchange(name, kind)
        queue = Queue(f"reader of {name}", exchange, binding, exclusive=True)
        with Inbox(connection, queue) as inbox:
            Producer(connection, exchange).publish(1, routing_key=key)
            drain(connection)
    assert len(inbox.messages) == arrives


def test_a_producer_that_declares_nothing_still_routes_by_pattern(connect: Connect) -> None:
    consumer, producer = connect(), connect()
    queue = Queue("reader", Exchange("press", "topic"), "news.#")
    with Inbox(consumer, queue) as inbox:
        channel = producer.default_channel
        Producer(channel, auto_declare=False).publish(1, exchange="press", routing_key="news.x.y")
        drain(consumer)
    assert len(inbox.messages) == 1


@pytest.mark.versions
def test_a_fanout_exchange_reaches_every_queue(connect: Connect) -> None:
    """K2"""
    exchange = Exchange("everyone", "fanout")
    connections = [connect() for _ in range(3)]
    inboxes = [
        Inbox(connection, Queue(f"f{number}", exchange, exclusive=True))
        for number, connection in enumerate(connections)
    ]
    for i in range(5):
        Producer(connections[0], exchange).publish(i)
    for connection in connections:
        drain(connection)
    assert [inbox.bodies for inbox in inboxes] == [list(range(5))] * 3


def test_a_broadcast_before_the_binding_is_not_seen(connection: Connection) -> None:
    exchange = Exchange("everyone", "fanout")
    Inbox(connection, Queue("early", exchange, exclusive=True))
    Producer(connection, exchange).publish("before")
    with Inbox(connection.channel(), Queue("late", exchange, exclusive=True)) as inbox:
        Producer(connection, exchange).publish("after")
        drain(connection)
    assert inbox.bodies == ["after"]


def test_broadcasts_survive_a_reconnect_of_the_consumer(connect: Connect) -> None:
    """K2: fanout loses nothing across a reconnect."""
    exchange = Exchange("everyone", "fanout")
    first, producer = connect(), connect()
    own = Queue("me", exchange, expires=60)
    before = Inbox(first, own)
    Producer(producer, exchange).publish("one")
    drain(first)
    first.collect()  # as Celery does with a connection that broke
    Producer(producer, exchange).publish("meanwhile")
    second = connect()
    after = Inbox(second, own)
    Producer(producer, exchange).publish("two")
    drain(second)
    assert (before.bodies, after.bodies) == (["one"], ["meanwhile", "two"])


@pytest.mark.versions
def test_unbinding_and_deleting_end_the_routing(
    connection: Connection, client: redis.Redis
) -> None:
    exchange = Exchange("work", "direct")(connection.default_channel)
    queue = Queue("a", exchange, "key")(connection.default_channel)
    queue.declare()
    for change, waiting in ((queue.unbind_from, 0), (queue.bind_to, 1)):
        change(exchange, "key")
        Producer(connection, exchange).publish(1, routing_key="key")
        assert connection.transport.center.counts("a").waiting == waiting
    assert queue.delete() == 1
    exchange.delete()
    assert keys_left(client) == []


def test_deleting_a_queue_ends_bindings_that_other_processes_have_made(
    connect: Connect, client: redis.Redis
) -> None:
    """A message would else declare the queue anew, for nobody to consume."""
    other = connect()
    odd = 'a","*[b]?\\'
    for name in (odd, "b"):
        for exchange, key in (("work", "key"), ("news", "a.#")):
            kind = "topic" if exchange == "news" else "direct"
            Queue(name, Exchange(exchange, kind), key)(other.default_channel).declare()
    Bindings(other.transport.center).add("far", binding("direct", "key", None, odd))
    other.default_channel.state.clear()  # the state of Kombu is the process's
    connection = connect()
    assert connection.default_channel.queue_delete(odd) == 0
    left = {
        e: [b[2] for b in Routes(connection.transport.center).of(e).rows]
        for e in ("work", "news", "far")
    }
    assert left == {"work": ["b"], "news": ["b"], "far": []}
    Producer(connection, Exchange("work", "direct")).publish(1, routing_key="key")
    assert connection.transport.center.registry.declared(odd) is None


# -- queues


@pytest.mark.versions
def test_an_exclusive_queue_goes_with_its_connection(
    connection: Connection, client: redis.Redis
) -> None:
    """K6"""
    queue = Queue("mine", Exchange("work", "direct"), "key", exclusive=True)
    queue(connection.default_channel).declare()
    Producer(connection, queue.exchange).publish(1, routing_key="key")
    assert connection.transport.center.counts("mine").waiting == 1
    connection.release()
    assert keys_left(client) == []


def test_what_is_published_is_found_by_its_id_in_whichever_slot_and_kind_of_queue(
    connect: Connect, client: redis.Redis
) -> None:
    """A worker's own queue goes with the worker, and so does one for replies, whose ids nobody
    knows: that is not asked."""
    sender, looker = connect(), connect()
    with looker.channel() as channel:
        for queue in (Queue("mail"), Queue("worker-1.dq", auto_delete=True), Queue("reply")):
            bound = Queue(queue.name, expires=60, auto_delete=queue.auto_delete)(channel)
            bound.queue_declare()
            channel.queues.topic(queue.name)
        center = TimeoutCenter(client)
        publish(sender, "answer", queue="reply", correlation_id="x")
        assert center.registry.declared("reply").declaration.named is False
        headers = {"id": "x", "x-delay": 60_000}
        for number in range(5):
            basis = {"x-slot-basis": f"order-{number}"} if number else {}
            publish(sender, "task", queue="mail", headers={**headers, **basis})
        publish(sender, "task", queue="worker-1.dq", headers=headers)
        found = looker.transport.center.get("x")
        assert sorted(one.topic for one in found) == ["mail"] * 5 + ["worker-1.dq"]


@pytest.mark.versions
def test_an_auto_delete_queue_goes_after_its_last_consumer(
    connect: Connect, client: redis.Redis
) -> None:
    """K6"""
    first, second = connect(toc_stale_after=2.5), connect(toc_stale_after=2.5)
    queue = Queue("brief", Exchange("work", "direct"), "key", auto_delete=True)
    with Inbox(second, queue) as inbox:
        with Inbox(first, queue):
            publish(first, "kept", "brief", headers={"x-delay": 3500})
        first.release()
        time.sleep(3)  # the server's own clock decides what is stale
        assert sweep(second.transport.center) == []
        drain(second, timeout=1.5)
    assert inbox.bodies == ["kept"]
    second.release()
    time.sleep(2.6)  # as above
    with connect() as third:
        assert set(sweep(third.transport.center)) == {"topic:brief", "exchange:work"}
    assert keys_left(client) == []


def test_a_queue_keeps_its_slots_whatever_a_connection_gives_to_new_ones(
    connect: Connect, center: TimeoutCenter
) -> None:
    """A1: also one with the default of a Cluster, or of an earlier release"""
    center.queues.declare("mail", slots=16)
    channel = connect().default_channel
    for queue, slots in (("mail", 16), ("news", 8 if center.clustered else 1)):
        channel.queue_declare(queue)
        assert (center.queues.describe(queue).slots, channel.ignored[queue]) == (slots, [])
    both = r"'mail' .*16 slots, not 2.*reshard mail --slots 2"
    with pytest.raises(kombu_toc.SlotCountError, match=both):
        connect(toc_slots=2).default_channel.queue_declare("mail")
    for queue, slots, said in (("mail", 2, both), ("other", 6, "power of two")):
        with pytest.raises(kombu_toc.SlotCountError, match=said):
            channel.queue_declare(queue, arguments={"x-slots": slots})


@pytest.mark.parametrize("how", ["auto_delete", "exclusive"])
def test_a_queue_that_was_declared_to_stay_stays_whoever_declares_it_otherwise(
    connect: Connect, client: redis.Redis, how: str
) -> None:
    first = connect()
    first.default_channel.queue_declare("mail", arguments={"x-slots": 8})
    for number in range(3):
        publish(first, f"m{number}", "mail")
    second = connect(toc_stale_after=1)
    queue = Queue("mail", Exchange("work", "direct"), "key", **{how: True})
    with Inbox(second, queue, prefetch_count=1) as inbox:
        while not inbox.bodies:
            second.drain_events(timeout=5)
        inbox.consumer.channel.close()
    second.release()
    center = first.transport.center
    time.sleep(1.2)  # the server's own clock decides what is stale
    sweep(center)
    assert center.registry.declared("mail").slots == 8
    assert center.counts("mail").waiting == 3 - len(inbox.bodies)
    with pytest.raises(kombu_toc.SlotCountError, match="8 slots, not 2"):
        arguments = {"x-slots": 2}
        channel = connect().default_channel
        channel.queue_declare("mail", arguments=arguments, **{how: True})


def test_a_brief_queue_outlives_who_publishes_and_settling_does_not_declare_it_again(
    connect: Connect, client: redis.Redis
) -> None:
    with connect() as connection:
        publish(connection, "kept", "brief", declare=[Queue("brief", auto_delete=True)])
    other = connect()
    assert other.transport.center.counts("brief").ready == 1
    message = other.default_channel.basic_get("brief")
    other.transport.center.queues.delete("brief")
    message.ack()
    assert keys_left(client) == []


def test_a_queue_lives_while_any_connection_of_the_process_uses_it(connect: Connect) -> None:
    consumer, producer = connect(toc_stale_after=2.5), connect(toc_stale_after=2.5)
    queue = Queue("living", expires=2.5)
    with Inbox(consumer, queue) as inbox:
        publish(producer, "x", "living", declare=[queue], headers={"x-delay": 3500})
        producer.release()
        drain(consumer, timeout=4)
    assert inbox.bodies == ["x"]


def test_messages_of_a_pop_on_its_way_are_given_back_when_the_connection_closes(
    connect: Connect,
) -> None:
    connection = connect()
    connection.transport.center.pop("other")  # the server knows the script: it runs when asked
    for i in range(5):
        publish(connection, i)
    Inbox(connection, prefetch_count=5)
    connection.transport.poller.tick()  # asks, and does not wait for the answer
    connection.release()
    assert connect().transport.center.counts("mail") == (5, 0, 0, 0)


@pytest.mark.versions
def test_a_consumer_goes_on_after_its_links_broke(connect: Connect, client: redis.Redis) -> None:
    connection = connect()
    with Inbox(connection) as inbox:
        connection.transport.poller.long_running = True  # as a worker, which goes on listening
        drain(connection)
        client.client_kill_filter(_type="normal", skipme=True)
        errors = 0
        for _ in range(4):  # each of its links may tell once, if it waits for a reply
            try:
                drain(connection, timeout=0.1)
            except connection.connection_errors:
                errors += 1
        # On a Cluster it opens them again by itself.
        assert (0 if connection.transport.center.clustered else 1) <= errors <= 3
        with connect() as producer:
            publish(producer, "afterwards")
        drain(connection, timeout=1.5)
    assert inbox.bodies == ["afterwards"]


@own_server
def test_a_claim_goes_to_the_channel_that_has_room(connection: Connection) -> None:
    full, idle = (Inbox(connection.channel(), ack=ack, prefetch_count=1) for ack in (False, True))
    publish(connection, 0)
    drain(connection)
    assert len(full.messages) + len(idle.messages) == 1
    before = connection.transport.center.client.info("stats")["total_commands_processed"]
    publish(connection, 1)
    drain(connection)
    after = connection.transport.center.client.info("stats")["total_commands_processed"]
    assert after - before < 500


def test_an_expiring_queue_goes_when_nobody_refreshes_it(
    connect: Connect, client: redis.Redis
) -> None:
    """K6: also when its process was killed."""
    connection = connect(toc_stale_after=0.05)
    queue = Queue("dying", Exchange("work", "direct"), "key", expires=0.05)
    queue(connection.default_channel).declare()
    Producer(connection, queue.exchange).publish(1, routing_key="key")
    center = connection.transport.center
    connection.transport.lease_keeper.leave_all(connection.default_channel.channel_key)
    while keys_left(client):
        time.sleep(0.01)
        sweep(center)


@pytest.mark.versions
def test_a_simple_buffer_works(connection: Connection) -> None:
    """And whether a queue is there is told to who declares it passively."""
    channel = connection.default_channel
    with pytest.raises(ChannelError, match="NOT_FOUND"):
        channel.queue_declare("buffer", passive=True)
    with connection.SimpleBuffer("buffer") as buffer:
        buffer.put({"a": 1})
        assert channel.queue_declare("buffer", passive=True).message_count == 1
        assert buffer.get(timeout=5).payload == {"a": 1}


def test_what_a_queues_declaration_asks_for_without_effect_is_named(connect: Connect) -> None:
    with connect() as first:
        first.default_channel.queue_declare("mail", arguments={"x-slots": 4, "x-retries": 3})
    channel = connect(toc_retries=5).default_channel
    channel.queue_declare(
        "mail",
        arguments={
            "x-slots": 4,
            "x-visibilty": 30,
            "x-max-length": 1000,
            "x-max-priority": 10,
            "x-zzz": 1,
        },
    )
    channel.queue_declare("other", arguments={"x-retries": 3})
    channel.queue_declare("reply", auto_delete=True, arguments={"x-max-length": 1000})
    assert channel.ignored == {
        "mail": [
            "x-visibilty (no such argument; did you mean 'x-visibility'?)",
            "x-max-length (an argument of RabbitMQ's)",
            "x-zzz (no such argument)",
        ],
        "other": [],
    }


def test_a_declaration_that_contradicts_the_stored_one_is_one_warning(
    connect: Connect, caplog: pytest.LogCaptureFixture, forgotten: None
) -> None:
    """Options, arguments and toc_topics alike; it names both, and the command that settles it."""
    with connect() as first:
        first.default_channel.queue_declare("a b", arguments={"x-slots": 4, "x-retries": 3})
        first.default_channel.queue_declare("agreed", arguments={"x-visibility": 90})
    topics = {"a b": {"visibility": 30}, "agreed": {"visibility": 90.0}}
    for _ in range(2):
        channel = connect(toc_retries=5, toc_topics=topics).default_channel
        channel.queue_declare("a b", arguments={"x-slots": 4, "x-dead-limit": 10})
        channel.queue_declare("agreed", arguments={"x-retries": 16})
        channel.queue_declare("passing", auto_delete=True, arguments={"x-retries": 4})
    assert [record.getMessage() for record in caplog.records] == [
        "queue 'a b' was declared with retries=3, visibility=default, dead_limit=default, and this "
        "process asks for retries=5, visibility=30, dead_limit=10: the former stands; 'celery toc "
        "topic set 'a b' --retries 5 --visibility 30 --dead-limit 10' changes it"
    ]
    assert channel.ignored["a b"] == []
    with pytest.raises(kombu_toc.SlotCountError, match="4 slots, not 2"):
        channel.queue_declare("a b", arguments={"x-slots": 2})


@pytest.mark.versions
def test_purging_deletes_what_waits_and_leaves_what_is_in_flight(connection: Connection) -> None:
    channel = connection.default_channel
    for i in range(5):
        publish(connection, i, headers={"x-delay": 60_000 * (i % 2)})
    message = channel.basic_get("mail")
    assert channel.queue_purge("mail") == 4
    assert connection.transport.center.counts("mail") == (0, 0, 1, 0)
    message.ack()


@pytest.mark.versions
def test_basic_get_returns_one_message_that_is_due(connection: Connection) -> None:
    """K4"""
    channel = connection.default_channel
    assert channel.basic_get("mail") is None
    publish(connection, "later", headers={"x-delay": 60_000})
    assert channel.basic_get("mail") is None
    publish(connection, "now")
    message = channel.basic_get("mail")
    assert message.payload == "now"
    message.ack()
    publish(connection, "unacknowledged")
    assert channel.basic_get("mail", no_ack=True).payload == "unacknowledged"
    assert connection.transport.center.counts("mail") == (0, 1, 0, 0)


# -- prefetch


@pytest.mark.versions
def test_prefetch_bounds_what_is_unsettled_and_may_change_meanwhile(connection: Connection) -> None:
    inbox = Inbox(connection, ack=False, prefetch_count=2)
    for i in range(10):
        publish(connection, i, headers={"x-slot-basis": "one"})
    drain(connection)
    assert inbox.bodies == [0, 1]
    inbox.consumer.qos(prefetch_count=5)
    drain(connection)
    assert inbox.bodies == [0, 1, 2, 3, 4]
    inbox.messages[0].ack()
    drain(connection)
    assert inbox.bodies == [0, 1, 2, 3, 4, 5]
    inbox.consumer.qos(prefetch_count=0)
    drain(connection)
    assert inbox.bodies == list(range(10))
    for message in inbox.messages[1:]:
        message.ack()


@pytest.mark.versions
def test_a_replaced_can_consume_is_heeded(connection: Connection) -> None:
    """Celery's worker_disable_prefetch replaces the method on the channel's QoS."""
    inbox = Inbox(connection)
    connection.default_channel.qos.can_consume = lambda: False
    publish(connection, 1)
    drain(connection, timeout=1.3)
    assert inbox.bodies == []
    connection.default_channel.qos.can_consume = lambda: True
    drain(connection)
    assert inbox.bodies == [1]


# -- the event loop


@pytest.mark.versions
def test_messages_arrive_in_an_event_loop(connection: Connection) -> None:
    due = [time.time() + 0.3 + i * 0.01 for i in range(30)]
    started: list[float] = []
    with Loop(connection) as loop:
        inbox = Inbox(connection)
        inbox.consumer.callbacks.append(lambda body, message: started.append(time.time()))
        for i, moment in enumerate(due):
            publish_at(connection, str(i), moment)
        loop.until(lambda: len(inbox.messages) == 30)
        loop.hub.run_once()  # acknowledgements leave with the next turn
        # On a Cluster the order is that of time only within a slot.
        got, center = [int(body) for body in inbox.bodies], connection.transport.center
        order = got if center.clustered else list(range(30))
        assert sorted(got) == list(range(30)) and got == order
        assert all(at >= due[i] for at, i in zip(started, order, strict=True))
        connection.transport.poller.flush()
        assert center.counts("mail") == (0, 0, 0, 0)


@pytest.mark.versions
def test_what_was_delivered_goes_back_at_once_although_all_connections_were_cut(
    connection: Connection, client: redis.Redis, center: TimeoutCenter
) -> None:
    """K7, A5: and not when its lease ends"""
    inbox = Inbox(connection, ack=False)
    publish(connection, "x", "mail")
    drain(connection)
    assert len(inbox.messages) == 1
    assert connection.transport.center.counts("mail").in_flight == 1  # by a connection that is kept
    client.client_kill_filter(_type="normal", skipme=True)
    with contextlib.suppress(redis.ConnectionError):
        connection.default_channel.close()
    assert center.counts("mail").ready == 1


@own_server
@pytest.mark.alone
def test_broadcasts_that_are_not_urgent_are_read_together_and_keep_nobody_waiting(
    connect: Connect, client: redis.Redis
) -> None:
    """Y5: the events of a large fleet do not wake each of its workers all the time."""
    connection, other = connect(), connect()
    urgent, idle = Exchange("orders", "fanout"), Exchange("events", "fanout")
    late: list[float] = []

    def send() -> None:
        for number in range(40):
            Producer(other, idle).publish(number)
            time.sleep(0.05)  # events come one by one
            if number % 10 == 9:
                Producer(other, urgent).publish(time.monotonic())

    def all_came() -> bool:
        now = time.monotonic()
        late.extend(now - sent for sent in orders.bodies[len(late) :])
        return len(events.messages) == 40 and len(late) == 4

    before = calls_of(client, "xread")
    with Loop(connection) as loop:
        events = Inbox(connection, Queue("e", idle, exclusive=True))
        orders = Inbox(connection.channel(), Queue("o", urgent, exclusive=True))
        connection.transport.poller.unhurried.add("events")
        with in_thread(send):
            loop.until(all_came, 20, lambda: (events.bodies, orders.bodies))
        read = calls_of(client, "xread") - before
    assert events.bodies == list(range(40))
    assert max(late) < 1  # it is not kept waiting for the others' pause
    assert read < 20


def test_a_loop_that_has_just_connected_leaves_others_the_time_to_renew_their_leases(
    connect: Connect, center: TimeoutCenter
) -> None:
    """A5: all leases have ended while the server was away, and their holders live."""
    publish(connect(), "x")
    held = center.pop("mail", visibility=12).messages
    assert center.extend(held, 0.05) == []
    time.sleep(0.1)  # the lease ends
    connection = connect(visibility_timeout=12)
    with Loop(connection) as loop:
        inbox = Inbox(connection)
        loop.turn_for(1)  # a grace is four seconds
        assert inbox.bodies == []
        assert center.extend(held, 1) == []  # the holder is back
        center.extend(held, 0)  # and now it is gone
        loop.until(lambda: inbox.bodies, 20)
        [message] = inbox.messages
        assert message.headers["x-delivery-count"] == 1


class AllEarlyButPlain(WorkerPolicy):
    accepts_early = True

    def wants_early(self, message: Message) -> bool:
        return message.headers.get("id") != "plain"


class Prepared(Loop):
    """A consumer that may have messages ahead of their time: what it got and began, and when."""

    def __init__(self, connection: Connection, prefetch: int = 0) -> None:
        super().__init__(connection)
        self.channel = connection.channel()
        self.channel.policy = AllEarlyButPlain()
        self.got: list[tuple[str, float]] = []
        self.begun: list[tuple[str, float]] = []
        self.consumer = Consumer(self.channel, [Queue("mail")], callbacks=[self.take])
        if prefetch:
            self.consumer.qos(prefetch_count=prefetch)
        self.consumer.consume()

    def take(self, body: Any, message: Message) -> None:
        id = message.headers["id"]
        self.got.append((id, time.time()))

        def begin() -> None:
            self.begun.append((id, time.time()))
            message.ack()

        message.call_when_due(begin)


@pytest.fixture
def ahead(connect: Connect) -> Connection:
    """A connection whose messages may be fetched three seconds ahead of their time."""
    return connect(toc_lookahead=3.0)


@pytest.fixture
def prepared(ahead: Connection) -> Iterator[Prepared]:
    with Prepared(ahead) as made:
        yield made


def publish_at(connection: Connection, id: str, moment: float) -> None:
    eta = datetime.fromtimestamp(moment, timezone.utc).isoformat()
    publish(connection, id, headers={"id": id, "eta": eta})


def test_what_may_be_handed_over_ahead_is_and_begins_when_it_is_due(
    ahead: Connection, prepared: Prepared
) -> None:
    """X2: the time until then is used for getting it ready; nothing begins early."""
    due = {id: time.time() + 2.5 + 0.01 * i for i, id in enumerate(("a", "plain", "b", "c"))}
    for id, moment in due.items():
        publish_at(ahead, id, moment)
    prepared.until(lambda: len(prepared.begun) == 4)
    assert {id for id, at in prepared.got if at < min(due.values())} == {"a", "b", "c"}
    assert sorted(prepared.got) == sorted(set(prepared.got))
    assert len(prepared.got) == 4
    assert all(at >= due[id] for id, at in prepared.begun)
    ahead.transport.poller.flush()
    assert ahead.transport.center.counts("mail") == (0, 0, 0, 0)


@pytest.mark.versions
def test_what_is_acknowledged_leaves_although_nothing_else_happens(
    connect: Connect, center: TimeoutCenter
) -> None:
    """It waits for company, but not until the next look."""
    connection = connect(toc_poll_interval=60)
    poller = connection.transport.poller
    with Loop(connection) as loop:
        inbox = Inbox(connection, ack=False)
        publish(connection, "x")
        loop.until(lambda: inbox.messages)
        loop.hub.call_later(0.3, inbox.messages[0].ack)  # as when a task ends long after
        loop.until(lambda: poller.outbox.settlements.acks)
        loop.until(lambda: not poller.outbox.settlements.acks)
        loop.until(lambda: not poller.work.busy)
        assert center.counts("mail") == (0, 0, 0, 0)


def test_an_acknowledgement_of_an_idle_consumer_leaves_within_three_milliseconds(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several the quickest counts: what this machine does beside it is not asked."""
    work = connection.transport.poller.work
    left: list[float] = []
    acked: list[float] = []

    def note(*args: Any, owed: int = 0, send: Any = work.send) -> None:
        if owed:
            left.append(time.monotonic())
        send(*args, owed=owed)

    def ack() -> None:
        acked.append(time.monotonic())
        inbox.messages[-1].ack()

    monkeypatch.setattr(work, "send", note)
    with Loop(connection) as loop:
        inbox = Inbox(connection, ack=False)
        for number in range(1, 21):
            publish(connection, number)
            loop.until(lambda n=number: len(inbox.messages) == n)
            loop.hub.call_later(0.02, ack)
            loop.until(lambda n=number: len(left) == n)
    assert min(gone - asked for gone, asked in zip(left, acked, strict=True)) <= 0.003


@pytest.mark.parametrize("given_back", [True, False])
def test_what_was_handed_over_ahead_begins_once_when_it_is_given_back_or_its_consumer_is_cancelled(
    ahead: Connection, prepared: Prepared, given_back: bool
) -> None:
    for id in ("a",) if given_back else ("a", "plain"):
        publish_at(ahead, id, time.time() + 2.5)
    prepared.until(lambda: prepared.got)
    if given_back:
        prepared.channel.qos.restore_unacked()  # it is not begun until it comes again
    else:
        center = ahead.transport.center
        prepared.until(lambda: center.counts("mail").in_flight == 2)
        prepared.consumer.cancel()
        assert center.counts("mail").in_flight == 1  # the other one is given back
    prepared.until(lambda: prepared.begun)
    prepared.turn_for(0.3)
    assert [id for id, _ in prepared.got] == ["a"] * (1 + given_back)
    assert [id for id, _ in prepared.begun] == ["a"]


def test_who_ends_while_its_loop_stands_still_gives_back_what_it_was_handed_ahead(
    ahead: Connection, center: TimeoutCenter
) -> None:
    with Prepared(ahead) as prepared:
        for id in ("a", "plain"):
            publish_at(ahead, id, time.time() + 2.5)
        prepared.until(lambda: prepared.got and center.counts("mail").in_flight == 2)
        ahead.transport.poller.release_all()
        assert center.counts("mail").in_flight == 0
        assert center.counts("mail").waiting == 2
        assert prepared.channel.qos.unsettled() == []
        prepared.consumer.cancel()
    assert prepared.begun == []


def test_what_was_handed_over_ahead_fills_the_window_once(ahead: Connection) -> None:
    due = time.time() + 2.5
    with Prepared(ahead, prefetch=3) as prepared:
        for i in range(3):
            publish_at(ahead, f"{i}", due)
            prepared.until(lambda i=i: len(prepared.got) == i + 1)
        publish_at(ahead, "3", due)
        prepared.turn_for(0.3)
        assert len(prepared.got) == 3
        assert prepared.got[-1][1] < due
        prepared.until(lambda: len(prepared.begun) == 4)
        assert all(at >= due for _, at in prepared.begun)


def test_an_error_of_who_is_handed_a_message_ahead_does_not_bring_it_twice(
    ahead: Connection, prepared: Prepared
) -> None:
    calls: list[Any] = []

    def fail(body: Any, message: Message) -> None:
        calls.append(body)
        raise KeyError("of the consumer")

    prepared.consumer.callbacks.insert(0, fail)
    publish_at(ahead, "a", time.time() + 0.6)
    with pytest.raises(KeyError, match="of the consumer"):
        prepared.until(lambda: calls)
    prepared.turn_for(1.0)
    assert calls == ["a"]


@pytest.mark.versions
def test_the_event_loops_timer_never_holds_more_than_a_few_entries(connection: Connection) -> None:
    """A thousand due times, one timer: Kombu's hub runs only ten due timers a turn."""
    with Loop(connection) as loop:
        Inbox(connection)
        for i in range(300):
            publish(connection, i, headers={"x-delay": 300 + i * 2})
        most = 0
        while connection.transport.center.counts("mail").waiting:
            loop.hub.run_once()
            most = max(most, sum(not entry[2].canceled for entry in loop.hub.timer._queue))
    assert most <= 3


def test_basic_get_logs_what_dead_queue_drops(
    connect: Callable[..., Connection],
    center: kombu_toc.TimeoutCenter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    connection = connect(toc_dead_limit=1)
    center.queues.declare("mail", slots=1)
    for id in ("first", "second"):
        center.put("mail", id, b"")
        center.reject(center.pop("mail").messages[0], requeue=False)
        time.sleep(0.002)  # so that one of them is the older
    with caplog.at_level(logging.WARNING):
        assert connection.default_channel.basic_get("mail") is None
    assert "DeadQueue of mail: 1 messages dropped" in caplog.text
    assert "first" in caplog.text


# -- batch publishing


def test_a_batch_takes_nothing_that_another_thread_publishes_on_its_channel(
    connection: Connection, center: kombu_toc.TimeoutCenter
) -> None:
    channel = connection.default_channel
    channel.queue_declare("mail")
    batch = channel.create_publish_batch(10)
    in_batch, done = threading.Event(), threading.Event()

    class Passing:
        """Encoded when the message is: then both threads are within a publish."""

        def __init__(self, pass_: Callable[[], Any]) -> None:
            self.pass_ = pass_

        def __json__(self) -> str:
            self.pass_()
            return ""

    def publish(publisher: Any, id: str, pass_: Callable[[], Any]) -> None:
        message = channel.prepare_message("", headers={"id": id, "x": Passing(pass_)})
        publisher(message, exchange="", routing_key="mail")

    def publish_alone() -> None:
        publish(channel.basic_publish, "alone", lambda: in_batch.wait(5))
        done.set()

    with in_thread(publish_alone):
        publish(batch.publish, "batched", lambda: (in_batch.set(), done.wait(5)))
    batch.discard()
    assert [center.get(id, topic="mail") != [] for id in ("alone", "batched")] == [True, False]


@pytest.mark.versions
def test_a_batch_is_published_as_a_whole(connection: Connection) -> None:
    producer = Producer(connection)
    if not hasattr(producer, "batch"):
        with pytest.raises(AttributeError):  # Kombu before 5.7 has no batches
            producer.batch()
        return
    with producer.batch(max_size=7):
        for i in range(20):
            producer.publish(i, routing_key="mail")
        assert connection.transport.center.counts("mail").waiting == 14
    assert connection.transport.center.counts("mail").waiting == 20
    with pytest.raises(ZeroDivisionError), producer.batch():
        producer.publish("not sent", routing_key="mail")
        raise ZeroDivisionError
    assert connection.transport.center.counts("mail").waiting == 20


@pytest.mark.one_server("the proxy that loses replies stands before one")
def test_a_batch_that_is_repeated_as_a_whole_adds_nothing_twice(
    server: Server, connect: Connect, client: redis.Redis
) -> None:
    """The reply to its second part is lost when that has been put, and all of it was consumed."""
    listener, center = connect(), TimeoutCenter(client)
    news = Exchange("news", type="fanout")
    own = Queue("own", news, exclusive=True)
    with (
        Proxy(server.port) as proxy,
        Connection(proxy.toc_url) as connection,
        Inbox(listener, own, ack=False, no_ack=True) as heard,
    ):
        channel = connection.default_channel
        channel.queue_declare("mail", arguments={"x-slots": 1})
        news(channel).declare()
        ids = [f"id-{number}" for number in range(5)]
        messages = [channel.prepare_message("", headers={"id": id}) for id in ids]
        told = [channel.prepare_message("", headers={"id": id}) for id in ids]

        def publish() -> None:
            batch = channel.create_publish_batch(4)
            for message, broadcast in zip(messages, told, strict=True):
                batch.publish(message, exchange="", routing_key="mail")
                batch.publish(broadcast, exchange="news", routing_key="")
            batch.flush()
            batch.close()

        lost = proxy.drop_replies(b"id-3")
        with pytest.raises(BatchPublishError):
            publish()
        assert lost.is_set()
        taken = center.pop("mail", 10).messages
        assert [one.id for one in taken] == ids[:4]
        center.ack(taken)
        publish()
        assert [one.id for one in center.pop("mail", 10).messages] == ids[4:]
        drain(listener)
        assert [message.headers["id"] for message in heard.messages] == ids
        assert client.keys("*:sent:*") == [], "it is complete"


# -- bad input


def test_a_queue_whose_name_is_no_text_is_refused_with_the_reason(connection: Connection) -> None:
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    with connection.channel() as channel:
        for use in (
            lambda: channel.queue_declare(name),
            lambda: channel.queue_declare(name, passive=True),
            lambda: publish(connection, "x", queue=name),
            lambda: channel.basic_get(name),
            lambda: channel.queue_purge(name),
            lambda: channel.queue_bind(name, "amq.direct", "x"),
            lambda: connection.transport.center.get("x", topic=name),
        ):
            with pytest.raises(kombu_toc.ConfigurationError, match=r"'caf\\udce9' cannot name"):
                use()


@pytest.mark.versions
@pytest.mark.one_server("test_cluster does the same")
def test_a_wrong_password_is_a_connection_error_that_does_not_print_it(
    server: Server, client: redis.Redis
) -> None:
    client.config_set("requirepass", "right")
    try:
        connection = Connection(f"toc+redis://:wr0ng-pw@127.0.0.1:{server.port}/0")
        assert "wr0ng-pw" not in str(failure(connection))
        assert "wr0ng-pw" not in repr(connection)
        assert "wr0ng-pw" not in str(
            {k: v for k, v in connection.info().items() if k != "password"}
        )
        good = Connection(f"toc+redis://:right@127.0.0.1:{server.port}/0")
        good.connect()
        assert good.as_uri() == f"toc+redis://:**@127.0.0.1:{server.port}/0"
        assert good.clone().connect()
        good.release()
    finally:
        with redis.Redis(port=server.port, password="right") as admin:
            admin.config_set("requirepass", "")


@pytest.mark.versions
@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n", b"", None, "nobody"],
    ids=["HTTP", "SSH", "the end", "silence", "nobody"],
)
def test_what_is_not_a_redis_is_a_connection_error_and_never_a_hang(
    answer: bytes | str | None,
) -> None:
    """None: it accepts connections, and never answers. "nobody" listens at the port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if answer != "nobody":
            listener.listen()

        def serve() -> None:
            for _ in range(3):
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer:
                    peer.recv(4096)
                    peer.sendall(answer)

        if isinstance(answer, bytes):
            threading.Thread(target=serve, daemon=True).start()
        port = listener.getsockname()[1]
        failure(Connection(f"toc+redis://127.0.0.1:{port}/0?socket_timeout=0.3"))


def test_an_unknown_option_is_an_error_that_names_the_nearest(server: Server) -> None:
    with pytest.raises(kombu_toc.ConfigurationError, match=r"toc_slot'.*'toc_slots'"):
        Connection(server.toc_url, transport_options={"toc_slot": 4}).connect()
    with pytest.raises(kombu_toc.ConfigurationError, match="visibilty_timeout"):
        Connection(f"{server.toc_url}?visibilty_timeout=4").connect()


@pytest.mark.parametrize("damage", [b"\x07whatever", b"{broken", b"\x01\xff\xff", b"", None])
def test_a_damaged_body_goes_to_dead_queue_and_the_consumer_goes_on(
    connection: Connection,
    client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    damage: bytes | None,
) -> None:
    """None: an id without a body is removed, and logged once."""
    center = connection.transport.center
    body = center.registry.topic("mail").slot_for("m1").body
    publish(connection, "x", headers={"id": "m1"})
    client.hdel(body, "m1") if damage is None else client.hset(body, "m1", damage)
    with Inbox(connection) as inbox:
        publish(connection, "good")
        drain(connection)
    assert inbox.bodies == ["good"]
    if damage is None:
        assert "message m1 of mail had no body: removed" in caplog.text
        assert caplog.text.count("m1") == 1
        assert slot_keys(client) == []
    else:
        [found] = center.get("m1", topic="mail")
        assert (found.state, found.body) == ("dead", damage)
        assert "envelope" in found.reason


def test_what_is_sent_to_a_transient_queue_that_is_gone_does_not_stay_for_ever(
    connect: Connect, client: redis.Redis
) -> None:
    """K6: a reply that comes too late, for a caller that was killed."""
    caller, worker = connect(), connect()
    exchange = Exchange("replies", "direct")
    queue = Queue("caller", exchange, routing_key="caller", auto_delete=True)
    queue(caller.default_channel).declare()
    caller.transport.center.queues.delete("caller")
    Producer(worker, exchange).publish("too late", routing_key="caller")
    topic = worker.transport.center.registry.declared("caller")
    assert (topic.slots, topic.declaration.expires) == (1, 60_000)
    assert len(slot_keys(client)) > 0
    assert all(0 < client.ttl(key) <= 60 for key in slot_keys(client))
    assert client.zscore("toc:{toc}:expiring", "topic:caller") is not None


def test_a_queues_arguments_set_its_limits(connect: Connect) -> None:
    """W2"""
    arguments = {"x-retries": 2, "x-retry-backoff": 1.5, "x-dead-age": 60, "x-dead-limit": 8}
    connection = connect(toc_retry_backoff=7, toc_retry_backoff_max=9)
    Queue("strict", queue_arguments=arguments)(connection.default_channel).declare()
    center = connect().transport.center
    topic = center.registry.topic("strict")
    assert topic.declaration.retries == 2
    limits = topic.declaration.limits(connection.transport.center.limits)
    assert (limits.retry_backoff, limits.retry_backoff_max) == (1.5, 9)
    assert (limits.dead_age, limits.dead_limit, limits.visibility) == (60, 8, 60)


@pytest.mark.versions
@pytest.mark.parametrize("idle", [0.1, 1.2])
def test_a_connection_that_was_cut_while_nobody_used_it_is_as_good_as_new(
    connection: Connection, client: redis.Redis, idle: float
) -> None:
    """K7: one from a pool, the server having been restarted since."""
    for number in range(2):
        with Inbox(connection) as inbox:
            publish(connection, number)
            connection.drain_events(timeout=5)
        assert inbox.bodies == [number]
        client.client_kill_filter(_type="normal", skipme=True)
        time.sleep(idle)  # that long it lies in the pool


def test_what_is_of_use_for_moments_does_not_wait_for_replicas(
    server: Server, client: redis.Redis
) -> None:
    """A worker that cannot greet the others, or reply, would end."""
    options = {"toc_wait_replicas": 1, "toc_wait_timeout": 0.1}
    with Connection(server.toc_url, transport_options=options) as connection:
        producer = connection.Producer()
        everybody = Exchange("everybody", type="fanout")
        producer.publish({}, exchange=everybody, declare=[everybody])
        producer.publish({}, routing_key="replies", declare=[Queue("replies", expires=60)])
        with pytest.raises(kombu_toc.ReplicationError):
            producer.publish({}, routing_key="tasks", declare=[Queue("tasks")])
