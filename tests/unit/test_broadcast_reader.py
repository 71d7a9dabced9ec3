"""When broadcasts are read that nobody is woken for, under a simulated clock."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kombu_toc.center.exchanges import Subscription
from kombu_toc.consumer.blocking import STREAM_PAUSE, BroadcastReader
from kombu_toc.consumer.loop import Loop


class Hub:
    """Notes when the only timer goes off."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.timer_at = float("inf")

    def call_later(self, wait: float, function: Callable[[], None]) -> Any:
        self.timer_at = self.clock.now + wait
        return SimpleNamespace(canceled=False, cancel=lambda: None)


class Clock:
    now = 100.0


class Work:
    """A connection that notes when something was sent."""

    busy = False

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.sent_at: list[float] = []

    def send(self, items: Any, **options: Any) -> None:
        self.sent_at.append(self.clock.now)


def test_what_is_to_come_again_waits_while_the_first_of_it_cancels_its_consumer() -> None:
    loop, connections = Loop(lambda: None), SimpleNamespace(busy=False)
    wiring: Any = SimpleNamespace(blocking=lambda *_: connections, reads=lambda _: True)
    dispatcher: Any = SimpleNamespace(enough=False, delivered=0)
    poller = SimpleNamespace(center=None, loop=loop, work=connections, dispatcher=dispatcher)
    reader = BroadcastReader(poller, wiring)
    subscription = Subscription("q", "events", "", {})
    got: list[bytes] = []

    def receive(_: Subscription, routing_key: str, packed: bytes) -> bool:
        got.append(packed)
        reader.subscriptions.remove(subscription)
        return len(got) == 1  # it has no consumer then

    qos = SimpleNamespace(can_consume=lambda: True)
    sink: Any = SimpleNamespace(qos=qos, receive_broadcast=receive)
    reader.subscriptions.add(sink, subscription)
    subscription.returned += [("", b"first"), ("", b"second")]
    reader.read(1.0)
    assert (got, subscription.returned) == ([b"first"], [("", b"second")])


def test_what_is_not_urgent_is_read_in_the_turn_that_its_timer_brings_about() -> None:
    """The hub calls the poller when the wait for a timer is over, and runs that after this: a timer
    that is early brings about a turn in which nothing is read, and the next is a second later."""
    clock = Clock()
    loop = Loop(lambda: None)
    loop.now = lambda: clock.now  # type: ignore[method-assign]
    loop.hub = hub = Hub(clock)
    work = Work(clock)
    wiring: Any = SimpleNamespace(blocking=lambda *_: Work(clock), reads=lambda _: True)
    dispatcher: Any = SimpleNamespace(enough=False, delivered=0)
    poller = SimpleNamespace(center=None, loop=loop, work=work, dispatcher=dispatcher)
    reader = BroadcastReader(poller, wiring)
    sink: Any = SimpleNamespace(qos=SimpleNamespace(can_consume=lambda: True))
    reader.subscriptions.unhurried.add("events")
    reader.subscriptions.add(sink, Subscription("q", "events", "", {"stream": "0-0"}))
    for turn in range(1, 5):
        reader.read(1.0)
        assert len(work.sent_at) == turn
        clock.now = hub.timer_at
    assert work.sent_at[-1] - work.sent_at[0] <= 3 * STREAM_PAUSE + 0.01
