"""The wake protocol: who wakes for an action time, and how often Redis is asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import redis
from kombu import Connection, Consumer, Message, Producer, Queue

from kombu_toc.scripts import load

from .inspection import keys_left

Connect = Callable[..., Connection]


class Fleet:
    """Idle consumers, each in a thread with a connection of its own."""

    def __init__(self, connect: Connect, number: int, topic: str = "mail") -> None:
        self.got: list[tuple[int, float]] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(i, connect(), topic)) for i in range(number)
        ]

    def _run(self, number: int, connection: Connection, topic: str) -> None:
        def received(body: float, message: Message) -> None:
            self.got.append((number, time.time() - body))
            message.ack()

        with Consumer(connection, [Queue(topic)], callbacks=[received], prefetch_count=1):
            connection.transport.poller.steady = True
            while not self._stop.is_set():
                try:
                    connection.drain_events(timeout=0.5)
                except TimeoutError:
                    pass

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()


def scripts_run(client: redis.Redis) -> int:
    stats = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval"))


def send(connection: Connection, number: int, first: float, step: float) -> None:
    now = time.time()
    producer = Producer(connection)
    for i in range(number):
        due = now + first + i * step
        producer.publish(due, routing_key="mail", headers={"x-delay": (due - time.time()) * 1000})


def wait_until_claimed(connection: Connection, client: redis.Redis) -> None:
    """Drain a consumer's connection until it has claimed all that is announced."""
    deadline = time.monotonic() + 5
    while client.exists("toc:{toc}:wake:mail"):
        assert time.monotonic() < deadline, "nobody has claimed it"
        with suppress(TimeoutError):
            connection.drain_events(timeout=0.05)


@pytest.mark.alone
def test_each_action_time_wakes_about_one_consumer(connect: Connect, client: redis.Redis) -> None:
    """W3, Y5: 20 idle consumers, 200 distinct times: about one script a message, not twenty."""
    fleet = Fleet(connect, 20)
    with fleet.running():
        time.sleep(1.5)  # the fleet's start is over
        send(connect(), 200, first=0.5, step=0.02)
        before, began = scripts_run(client), time.monotonic()
        while len(fleet.got) < 200:
            assert time.monotonic() - began < 20, len(fleet.got)
            time.sleep(0.01)  # the consumers are threads of their own
        seconds = time.monotonic() - began
        used = scripts_run(client) - before
    # Every consumer looks into all slots once a second; on a Cluster a script can do no more than
    # one of the eight.
    looks = 20 * (seconds + 1) * (8 if hasattr(client, "run_keyed") else 1)
    pops = used - 200 - looks  # one acknowledgement a message, too
    assert pops < 2 * 200
    assert max(late for _, late in fleet.got) < 0.5


def test_a_time_that_a_dead_consumer_had_claimed_is_served_by_the_others(
    connect: Connect, client: redis.Redis
) -> None:
    """A8, W6: the backstop bounds the lateness after a crash."""
    dead = connect()
    Consumer(dead, [Queue("mail")], callbacks=[lambda body, message: None]).consume()
    dead.transport.poller.steady = True
    send(connect(), 1, first=1.0, step=0)
    wait_until_claimed(dead, client)
    # From here on, nobody drains the first consumer: it may as well be dead.
    fleet = Fleet(connect, 1)
    deadline = time.monotonic() + 5
    with fleet.running():
        while not fleet.got:
            assert time.monotonic() < deadline, "the message is stuck"
            time.sleep(0.01)  # the consumer is a thread of its own
    assert 0 <= fleet.got[0][1] < 1.5


def test_a_consumer_that_ends_hands_back_what_it_claimed(
    connect: Connect, client: redis.Redis
) -> None:
    leaving = connect()
    consumer = Consumer(leaving, [Queue("mail")], callbacks=[lambda body, message: None])
    consumer.consume()
    leaving.transport.poller.steady = True
    send(connect(), 1, first=60, step=0)
    wait_until_claimed(leaving, client)
    leaving.release()
    assert client.zcard("toc:{toc}:wake:mail") == 1


def test_a_consumer_that_stops_draining_hands_back_what_it_claimed(
    connection: Connection, client: redis.Redis
) -> None:
    queue = connection.SimpleQueue("mail")
    queue.put("later", headers={"x-delay": 60_000})
    try:
        queue.get(timeout=0.3)
    except queue.Empty:
        pass
    assert client.zcard("toc:{toc}:wake:mail") == 1
    queue.close()


def test_a_slot_is_popped_by_sha_after_the_servers_scripts_were_flushed(
    connection: Connection, client: redis.Redis
) -> None:
    with connection.SimpleQueue("mail") as queue:
        queue.put(1)
        queue.get(timeout=5).ack()
        client.script_flush()
        queue.put(2)
        assert queue.get(timeout=5).payload == 2
        assert client.script_exists(load("pop").sha) == [True]


def test_what_was_cancelled_is_not_handed_back(connect: Connect, client: redis.Redis) -> None:
    leaving = connect()
    Consumer(leaving, [Queue("mail")], callbacks=[lambda body, message: None]).consume()
    leaving.transport.poller.steady = True
    center = leaving.transport.center
    center.put("mail", "m1", b"", delay=60)
    wait_until_claimed(leaving, client)
    center.cancel("m1", topic="mail")
    leaving.release()
    assert keys_left(client, "*mail*") == []


def test_expired_leases_are_rolled_back_in_every_queue_of_a_consumer(connect: Connect) -> None:
    """A5: however many queues it serves, and however few of them it asks at a time."""
    connection = connect(visibility_timeout=1)
    center = connection.transport.center
    for i in range(4):
        center.put(f"q{i}", "m", b'{"h":{},"p":{},"t":null,"e":null}\nx')
        assert center.pop(f"q{i}", visibility=0.01).messages
    got: list[str] = []

    def received(body: object, message: Message) -> None:
        got.append(message.delivery.topic)
        message.ack()

    queues = [Queue(f"q{i}") for i in range(4)]
    with Consumer(connection, queues, callbacks=[received], prefetch_count=1):
        deadline = time.monotonic() + 8
        while len(got) < 4:
            assert time.monotonic() < deadline, got
            try:
                connection.drain_events(timeout=0.5)
            except TimeoutError:
                pass
    assert sorted(got) == ["q0", "q1", "q2", "q3"]
