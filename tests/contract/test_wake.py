"""The wake protocol: who wakes for an action time, and how often Redis is asked."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import redis
from kombu import Connection, Consumer, Message, Producer, Queue

from kombu_toc import TimeoutCenter
from kombu_toc.consumer.state import MAX_CLAIMS
from kombu_toc.model.scores import action_time
from kombu_toc.scripts.call import load

from ..support.inspection import (
    announced,
    calls_of,
    check_slots,
    keys_left,
    now_us,
    put_call,
    put_some,
    slot_keys,
    time_passes,
)
from ..support.waiting import wait_until

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
            connection.transport.poller.long_running = True
            while not self._stop.is_set():
                with suppress(TimeoutError):
                    connection.drain_events(timeout=0.5)

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
        before, began = calls_of(client), time.monotonic()
        while len(fleet.got) < 200:
            assert time.monotonic() - began < 20, len(fleet.got)
            time.sleep(0.01)  # the consumers are threads of their own
        seconds = time.monotonic() - began
        used = calls_of(client) - before
    # Every consumer looks into all slots once a second; on a Cluster a script can do no more than
    # one of the eight.
    looks = 20 * (seconds + 1) * (8 if hasattr(client, "run_keyed") else 1)
    pops = used - 200 - looks  # one acknowledgement a message, too
    assert pops < 2 * 200
    assert max(late for _, late in fleet.got) < 0.5


@pytest.mark.alone
def test_a_time_that_a_dead_consumer_had_claimed_is_served_by_the_others(
    connect: Connect, client: redis.Redis
) -> None:
    """A8, W6: the backstop bounds the lateness after a crash."""
    dead = connect()
    Consumer(dead, [Queue("mail")], callbacks=[lambda body, message: None]).consume()
    dead.transport.poller.long_running = True
    send(connect(), 1, first=1.0, step=0)
    wait_until_claimed(dead, client)
    # From here on, nobody drains the first consumer: it may as well be dead.
    fleet = Fleet(connect, 1)
    with fleet.running():
        wait_until(lambda: fleet.got, 5, "the message is stuck")
    assert 0 <= fleet.got[0][1] < 1.5


def test_a_consumer_that_ends_hands_back_what_it_claimed(
    connect: Connect, client: redis.Redis
) -> None:
    leaving = connect()
    consumer = Consumer(leaving, [Queue("mail")], callbacks=[lambda body, message: None])
    consumer.consume()
    leaving.transport.poller.long_running = True
    send(connect(), 1, first=60, step=0)
    wait_until_claimed(leaving, client)
    leaving.release()
    assert client.zcard("toc:{toc}:wake:mail") == 1


def test_a_consumer_that_stops_draining_hands_back_what_it_claimed(
    connection: Connection, client: redis.Redis
) -> None:
    queue = connection.SimpleQueue("mail")
    queue.put("later", headers={"x-delay": 60_000})
    with suppress(queue.Empty):
        queue.get(timeout=0.3)
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
    leaving.transport.poller.long_running = True
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
            with suppress(TimeoutError):
                connection.drain_events(timeout=0.5)
    assert sorted(got) == ["q0", "q1", "q2", "q3"]


# -- times that come before what is announced

#: More than one slot's announcements that a script takes back at once.
MANY = 2000


def sizes(center: TimeoutCenter, topic: str) -> tuple[int, int]:
    """How many announcements nobody has claimed, and how many the fullest slot remembers."""
    client = center.client
    armed = max(
        client.zcard(slot.announced_times) for slot in center.registry.topic(topic).all_slots()
    )
    return client.zcard(center.keys.wake(topic)), armed


def test_puts_with_descending_times_leave_one_announcement_a_slot(center: TimeoutCenter) -> None:
    """Y5: nothing grows, and no script takes longer."""
    topic = center.registry.topic("mail")
    calls = [
        put_call(center, topic, f"m{i}", b"", at_us=2 * 10**15 - i * 1000) for i in range(3 * MANY)
    ]
    for start in range(0, len(calls), 500):
        center.runner.run_all(calls[start : start + 500])
    unclaimed, armed = sizes(center, "mail")
    # On a Cluster a script cannot see what is claimed, and leaves one that may be.
    each = 2 if center.clustered else 1
    assert unclaimed <= each * 8
    assert armed <= each
    check_slots(center, "mail")
    center.queues.purge("mail")
    assert slot_keys(center.client) == []


def test_a_consumer_of_descending_times_holds_a_few_claims_of_a_slot(
    connection: Connection, center: TimeoutCenter
) -> None:
    poller = connection.transport.poller
    with Consumer(connection, [Queue("mail", queue_arguments={"x-slots": 1})], callbacks=[print]):
        poller.long_running = True
        center.queues.declare("mail", slots=1)
        first = time.time() + 3600
        for i in range(40):
            center.put("mail", f"m{i}", b"", at=first - i)
            wait_until_claimed(connection, center.client)
            assert len(poller.dispatcher.due) <= MAX_CLAIMS
            assert sizes(center, "mail")[1] <= 2
        deadline = time.monotonic() + 5
        # Among them is the earliest, if perhaps handed back and claimed once more.
        while (
            min((us for *_, (_, _, us) in poller.dispatcher.due), default=9e15)
            > (first - 38.5) * 1e6
        ):
            assert time.monotonic() < deadline, "nobody wakes for it"
            with suppress(TimeoutError):
                connection.drain_events(timeout=0.01)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_announced_and_claimed_the_first_time_is_known(
    one: TimeoutCenter, seed: int
) -> None:
    """A8: a slot's first time, or an earlier one, is announced, or claimed by a consumer that pops
    then, whoever claimed what before, and in whatever order times come and go."""
    client, wake = one.client, one.keys.wake("one")
    slot = one.registry.topic("one").slot(0)
    some = random.Random(seed)
    first, ids, claims = time.time() + 3600, [], set[int]()

    def hand_back(times: list[int]) -> None:
        one.runner.run_all(
            one.commands.reannounce(one.registry.resolved("one"), [(0, us) for us in times])
        )

    for number in range(150):
        action = some.choice(["put", "put", "put", "claim", "cancel", "pop", "hand back", "pass"])
        if action == "put":
            ids.append(f"m{number}")
            one.put("one", ids[-1], b"", at=first + some.randrange(100))
        elif action == "claim" and (claimed := client.zpopmin(wake)):
            claims.add(int(claimed[0][0].partition(b":")[2]))
            if len(claims) > MAX_CLAIMS:
                hand_back(sorted(claims))
                claims.clear()
        elif action == "hand back" and claims:
            hand_back([claims.pop()])
        elif action == "cancel" and ids:
            one.cancel(ids.pop(some.randrange(len(ids))), topic="one")
        elif action == "pop":  # somebody looks, and holds no claim
            one.ack(one.pop("one").messages)
        elif action == "pass" and claims:
            # The earliest claim comes due, and its holder pops.
            ms = max((min(claims) - now_us(client)) // 1000 + 1, 0)
            time_passes(one, "one", (ms + 0.5) / 1000)
            shift = ms * 1000
            first -= shift / 1_000_000
            claims = {us - shift for us in claims}
            claims.discard(min(claims))
            for message in one.pop("one", 3).messages:
                one.ack([message])
                ids.remove(message.id)
        heads = [client.zrange(key, 0, 0, withscores=True) for key in slot.stores]
        times = [action_time(int(head[0][1])) for head in heads if head]
        if times:
            known = claims | {us for _, us in announced(one, "one")}
            armed = [int(us) for us in client.zrange(slot.announced_times, 0, -1)]
            assert min(armed) <= max(min(times), now_us(client)), (number, action)
            assert min(armed) in known, (number, action)
            assert len(armed) <= 2


def test_what_one_script_announces_and_takes_back_is_not_announced(center: TimeoutCenter) -> None:
    """Of what is released together, the latest first."""
    center.queues.declare("mail", slots=1)
    put_some(center, "mail", 5, "")
    popped = center.pop("mail", 5).messages
    center.release(popped[::-1])
    check_slots(center, "mail")


def test_a_full_pop_announces_what_is_due_in_further_steps(center: TimeoutCenter) -> None:
    center.queues.declare("mail", slots=2)
    basis = {center.registry.topic("mail").slot_for(name).number: name for name in "abcdefgh"}
    center.put("mail", "first", b"", basis=basis[0])
    center.put("mail", "second", b"", basis=basis[0])
    center.put("mail", "later", b"", basis=basis[1], delay=3600)
    center.put("mail", "low", b"", basis=basis[1], priority=9)
    center.client.delete(center.keys.wake("mail"))  # as if consumers had claimed them, and died
    assert [message.id for message in center.pop("mail").messages] == ["first"]
    assert {slot for slot, us in announced(center, "mail") if us <= now_us(center.client)} == {0, 1}
