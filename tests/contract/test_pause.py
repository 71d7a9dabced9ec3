"""A topic that is paused, and who consumes what: on a real server, by Kombu's own consumers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from typing import Any

import redis
from kombu import Connection, Consumer, Producer, Queue

import kombu_toc
from kombu_toc import TimeoutCenter
from kombu_toc.center.calls import announce_presence
from kombu_toc.consumer import poller

from ..support.inspection import announced, check_slots, forget_late, now_us, put_call
from ..support.waiting import running, wait_until

Connect = Callable[..., Connection]

HOUR = 3600.0


class Listener:
    """Consumes topics, and notes what comes."""

    def __init__(self, connection: Connection, *topics: str) -> None:
        self.connection = connection
        self.got: list[Any] = []
        queues = [Queue(name) for name in topics]
        self.consumer = Consumer(connection, queues, callbacks=[self._take])
        self.consumer.consume()

    def _take(self, body: Any, message: Any) -> None:
        self.got.append(body)
        message.ack()

    def listen(self, holds: Callable[[], Any], seconds: float = 10) -> None:
        """Until it holds."""
        for _ in running(seconds):
            if holds():
                return
            with contextlib.suppress(TimeoutError):
                self.connection.drain_events(timeout=0.05)
        assert holds(), self.got

    @property
    def knows(self) -> set[str]:
        """The topics that it knows to be paused."""
        states = self.connection.default_channel.poller.states
        return {topic for one in states.values() for topic in one.pending.paused}


def publish(connection: Connection, body: Any, queue: str, **options: Any) -> None:
    Producer(connection.default_channel).publish(body, routing_key=queue, **options)


def test_a_consumer_takes_nothing_of_what_is_paused_and_all_of_it_afterwards(
    connect: Connect, center: TimeoutCenter
) -> None:
    listener, sender = Listener(connect(), "mail", "news"), connect()
    publish(sender, "before", "mail")
    listener.listen(lambda: listener.got == ["before"])
    assert center.queues.pause("mail")
    assert not center.queues.pause("mail")  # it is by now
    listener.listen(lambda: listener.knows == {"mail"}, poller.REREAD + 1.5)
    publish(sender, "now", "mail")
    publish(sender, "soon", "mail", headers={"x-delay": 300})
    publish(sender, "other", "news", headers={"x-delay": 1500})  # later than those, and two looks
    listener.listen(lambda: "other" in listener.got)
    assert listener.got == ["before", "other"]
    assert center.counts("mail") == (2, 0, 0, 0)
    check_slots_of(center, "mail")
    assert center.queues.resume("mail")
    listener.listen(lambda: len(listener.got) == 4)
    assert set(listener.got) == {"before", "other", "now", "soon"}
    assert listener.knows == set()


def check_slots_of(center: TimeoutCenter, topic: str) -> None:
    """Nobody holds a claim of it: what comes next is announced to whoever is first."""
    forget_late(center, topic)
    check_slots(center, topic)


def test_what_was_claimed_when_it_is_paused_is_announced_again(
    connect: Connect, center: TimeoutCenter, client: redis.Redis
) -> None:
    # It finds nothing by looking, and nobody mends what is not announced.
    listener = Listener(connect(toc_poll_interval=60), "mail")
    # As a worker: it keeps its claims.
    listener.connection.default_channel.poller.long_running = True
    publish(connect(), "x", "mail", headers={"x-delay": 6000})
    [(slot, us)] = announced(center, "mail")
    listener.listen(lambda: not announced(center, "mail"))  # it has the claim
    center.queues.pause("mail")
    listener.listen(lambda: listener.knows)
    listener.listen(lambda: now_us(client) > us and announced(center, "mail"))
    assert announced(center, "mail") == {(slot, us)}
    assert center.counts("mail").ready == 1


def test_who_begins_to_consume_a_paused_topic_takes_nothing(
    connect: Connect, center: TimeoutCenter
) -> None:
    publish(connect(), "x", "mail")
    center.queues.pause("mail")
    listener = Listener(connect(), "mail", "news")
    publish(connect(), "other", "news", headers={"x-delay": 1200})
    listener.listen(lambda: listener.got)
    assert listener.got == ["other"]
    assert center.counts("mail").ready == 1
    assert len(center.pop("mail").messages) == 1  # who asks for a message gets it


def test_a_pause_outlives_a_reshard_and_goes_with_the_topic(center: TimeoutCenter) -> None:
    center.queues.declare("mail", slots=2)
    center.queues.pause("mail")
    center.queues.declare("mail", slots=2)
    if not center.clustered:
        kombu_toc.reshard_topic(center, "mail", 4, settle=0)
    assert center.queues.paused() == {"mail"}
    center.queues.delete("mail")
    center.queues.declare("mail")
    assert center.queues.paused() == set()


# -- who consumes


def here(center: TimeoutCenter) -> dict[str, list[Any]]:
    me = (socket.gethostname(), os.getpid())
    return {
        topic: [one for one in some if one == me]
        for topic, some in center.queues.consumers().items()
    }


def test_who_consumes_what_is_known_until_it_ends(connect: Connect, center: TimeoutCenter) -> None:
    first, second = Listener(connect(), "mail", "news"), Listener(connect(), "news")
    transient = Queue("reply", exclusive=True)
    Consumer(connect(), [transient], callbacks=[lambda *_: None]).consume()
    me = kombu_toc.Consumer(socket.gethostname(), os.getpid())
    wait_until(lambda: here(center) == {"mail": [me], "news": [me]})  # one process
    assert center.client.zcard(center.keys.consumers) == 1
    first.consumer.cancel()
    wait_until(lambda: here(center) == {"news": [me]})
    assert center.client.zcard(center.keys.consumers) == 1
    second.connection.release()
    wait_until(lambda: not center.client.exists(center.keys.consumers))


def test_who_died_consumes_no_more(connect: Connect, center: TimeoutCenter) -> None:
    gone = json.dumps(["elsewhere", 7, "mail"])
    center.runner.run(announce_presence(center.keys, gone, (), 300))
    assert center.queues.consumers() == {"mail": [("elsewhere", 7)]}
    wait_until(lambda: not center.queues.consumers())
    center.runner.run(announce_presence(center.keys, gone, (), 1))
    Listener(connect(), "news")
    wait_until(lambda: "news" in center.queues.consumers())
    assert center.client.zcard(center.keys.consumers) == 1  # who comes forgets who went


def test_the_memory_of_topics_is_estimated(center: TimeoutCenter) -> None:
    body = os.urandom(1000)
    for topic, number in (("many", 400), ("few", 4)):
        declared = center.queues.declare(topic)
        center.runner.run_all([put_call(center, declared, f"{i}", body) for i in range(number)])
    center.queues.declare("none")
    sizes = kombu_toc.estimate_memory(center, ["many", "few", "none"])
    assert sizes["none"] == 0
    assert 4_000 < sizes["few"] < 12_000
    assert 400_000 < sizes["many"] < 800_000
    # From a slot of each.
    rough = kombu_toc.estimate_memory(center, ["many", "none"], sampled=2)
    assert 200_000 < rough["many"] < 1_600_000
