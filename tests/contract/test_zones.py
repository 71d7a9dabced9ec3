"""Consumers of two zones, each of which takes its own slots first, by Kombu's own consumers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from zlib import crc32

import pytest
import redis
from kombu import Connection, Consumer, Producer, Queue

from kombu_toc import TimeoutCenter

from ..support.inspection import now_us

Connect = Callable[..., Connection]

#: The slots of the zones, and the slot of the message with this number.
ZONES = {"A": "0-3", "B": "4-7"}


def zone_of(basis: str) -> str:
    return "A" if crc32(basis.encode()) % 8 < 4 else "B"


class Zone(threading.Thread):
    """A consumer, in a thread of its own."""

    def __init__(self, connection: Connection, name: str) -> None:
        super().__init__(daemon=True)
        self.connection = connection
        self.zone = name
        #: slot basis, and seconds by which it came late
        self.got: dict[str, float] = {}
        self._ends = threading.Event()
        Consumer(connection, [Queue("mail")], callbacks=[self._take]).consume()
        self.start()

    def _take(self, body: Any, message: Any) -> None:
        self.got[body] = time.time() - message.delivery.action_us / 1e6
        message.ack()

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


def wait_for(zones: list[Zone], number: int, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while sum(len(zone.got) for zone in zones) < number:
        assert time.monotonic() < deadline, [zone.got for zone in zones]
        time.sleep(0.01)


@pytest.mark.alone
@pytest.mark.parametrize("delay", [0, 300])
def test_each_zone_starts_its_own_and_one_starts_what_the_other_leaves_for_a_second(
    connect: Connect, center: TimeoutCenter, delay: int
) -> None:
    zones = [Zone(connect(toc_prefer_slots=slots), name) for name, slots in ZONES.items()]
    time.sleep(1.2)  # what they know nothing of is looked into
    sender = Producer(connect().default_channel)

    def send(numbers: range) -> None:
        for number in numbers:
            body = f"m{number}"
            headers = {"x-slot-basis": body, "x-delay": delay}
            sender.publish(body, routing_key="mail", headers=headers)
            time.sleep(0.01)  # each finds them idle

    send(range(40))
    wait_for(zones, 40)
    for zone in zones:
        assert {zone_of(body) for body in zone.got} == {zone.zone}
        assert max(zone.got.values()) < 0.5
    gone = zones.pop()
    gone.end()
    zones[0].got.clear()
    send(range(40, 60))
    wait_for(zones, 20)
    for body, late in zones[0].got.items():
        assert late < 0.5 if zone_of(body) == "A" else 1.0 <= late < 1.7, (body, late)
    zones[0].end()
    assert center.counts("mail") == (0, 0, 0, 0)


def test_what_was_passed_on_goes_when_its_time_has_passed(
    client: redis.Redis, center: TimeoutCenter
) -> None:
    key = center.keys.passed_on("mail", 5)
    now = now_us(client)
    pass_on = center.commands.pass_on
    assert center.runner.run(pass_on("mail", 5, now - 3_000_000)) == 0
    assert center.runner.run(pass_on("mail", 5, now + 60_000_000)) == 1
    assert center.runner.run(pass_on("mail", 5, now + 1_000_000)) == 2
    assert center.runner.run(pass_on("mail", 5, now + 1_000_000)) == 2
    assert 64_000 < client.pttl(key) <= 65_000
    client.zadd(key, {f"5:{number}": number for number in range(300)})
    assert (
        center.runner.run(pass_on("mail", 5, now)) == 203
    )  # a hundred of what is old go at a time


def test_what_was_passed_on_goes_with_its_topic(client: redis.Redis, center: TimeoutCenter) -> None:
    center.queues.declare("mail")
    center.runner.run(center.commands.pass_on("mail", 5, now_us(client) + 10**15))
    center.queues.delete("mail")
    assert not client.exists(center.keys.passed_on("mail", 5))


def test_a_consumer_leaves_nothing_behind(
    connect: Connect, client: redis.Redis, center: TimeoutCenter
) -> None:
    zone = Zone(connect(toc_prefer_slots="0-3"), "A")
    sender = Producer(connect().default_channel)
    for number in range(12):
        headers = {"x-slot-basis": f"m{number}", "x-delay": 60_000}
        sender.publish(number, routing_key="mail", headers=headers)
    deadline = time.monotonic() + 10
    while client.zcard(center.keys.wake("mail")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    zone.end()
    assert client.zcard(center.keys.wake("mail")) >= 8  # all is announced again
