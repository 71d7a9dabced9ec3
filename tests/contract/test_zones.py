"""Consumers of two zones, each of which takes its own slots first, by Kombu's own consumers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import redis
from kombu import Connection, Consumer, Producer, Queue

from kombu_toc import TimeoutCenter

from ..support.inspection import now_us
from ..support.waiting import wait_until

Connect = Callable[..., Connection]


class Zone(threading.Thread):
    """A consumer, in a thread of its own."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(daemon=True)
        self.connection = connection
        self._ends = threading.Event()
        Consumer(
            connection, [Queue("mail")], callbacks=[lambda body, message: message.ack()]
        ).consume()
        self.start()

    def run(self) -> None:
        while not self._ends.is_set():
            try:
                self.connection.drain_events(timeout=0.05)
            except TimeoutError:
                pass

    def end(self) -> None:
        self._ends.set()
        self.join()
        self.connection.release()


@pytest.mark.cluster
def test_what_was_passed_on_goes_when_its_time_has_passed(center: TimeoutCenter) -> None:
    key = center.keys.passed_on("mail", 5)
    now = now_us(center.client)
    pass_on = center.commands.pass_on
    assert center.runner.run(pass_on("mail", 5, now - 3_000_000)) == 0
    assert center.runner.run(pass_on("mail", 5, now + 60_000_000)) == 1
    assert center.runner.run(pass_on("mail", 5, now + 1_000_000)) == 2
    assert center.runner.run(pass_on("mail", 5, now + 1_000_000)) == 2
    assert 64_000 < center.client.pttl(key) <= 65_000
    center.client.zadd(key, {f"5:{number}": number for number in range(300)})
    assert (
        center.runner.run(pass_on("mail", 5, now)) == 203
    )  # a hundred of what is old go at a time


def test_what_was_passed_on_goes_with_its_topic(client: redis.Redis, center: TimeoutCenter) -> None:
    center.queues.declare("mail")
    center.runner.run(center.commands.pass_on("mail", 5, now_us(client) + 10**15))
    center.queues.delete("mail")
    assert not client.exists(center.keys.passed_on("mail", 5))


def test_a_consumer_leaves_nothing_behind(connect: Connect, center: TimeoutCenter) -> None:
    zone = Zone(connect(toc_slots=8, toc_prefer_slots="0-3"))
    sender = Producer(connect().default_channel)
    for number in range(12):
        headers = {"x-slot-basis": f"m{number}", "x-delay": 60_000}
        sender.publish(number, routing_key="mail", headers=headers)
    wait_until(lambda: not center.client.zcard(center.keys.wake("mail")))
    zone.end()
    assert center.client.zcard(center.keys.wake("mail")) >= 8  # all is announced again
