"""Which broadcasts are read from where on, and when, without a server and without a clock."""

from __future__ import annotations

from typing import Any

from kombu_toc.center.exchanges import BEGINNING, PAGE, Subscription
from kombu_toc.consumer.blocking import RESTART_PAUSE, STREAM_PAUSE, Subscriptions, restart


class Sink:
    """A channel, as far as broadcasts go."""

    def __init__(self, room: bool = True) -> None:
        self.qos = self
        self.room = room

    def can_consume(self) -> bool:
        return self.room


def subscription(queue: str, exchange: str = "ex", **last: str) -> Subscription:
    return Subscription(queue, exchange, "", last or {"s": "5-0"})


def entries(*ids: str) -> list[tuple[bytes, list[bytes]]]:
    return [(id.encode(), [b"key", id.encode()]) for id in ids]


def read(subscriptions: Subscriptions, reply: Any) -> list[tuple[str, str]]:
    return [(one.queue, entry.id) for _, one, entry in subscriptions.entries(reply)]


def test_of_several_readers_of_a_stream_the_one_furthest_behind_counts() -> None:
    subscriptions = Subscriptions()
    subscriptions.add(Sink(), subscription("a", s="10-0"))
    subscriptions.add(Sink(), subscription("b", s="9-5"))
    subscriptions.add(Sink(room=False), subscription("full", s="1-0", t="1-0"))
    subscriptions.add(Sink(), subscription("late", exchange="events", u="3-0"))
    subscriptions.unhurried.add("events")
    assert subscriptions.positions() == ({"s": "9-5"}, {"u": "3-0"})


def test_each_reader_gets_what_it_has_not_read_and_once() -> None:
    subscriptions = Subscriptions()
    subscriptions.add(Sink(), subscription("a", s="10-0"))
    subscriptions.add(Sink(), subscription("b", s="9-0"))
    reply = [(b"s", entries("10-0", "11-0")), (b"unknown", entries("1-0"))]
    assert read(subscriptions, reply) == [("b", "10-0"), ("a", "11-0"), ("b", "11-0")]
    assert read(subscriptions, reply) == []


def test_an_entry_may_end_the_subscription_of_those_that_follow() -> None:
    subscriptions = Subscriptions()
    ends = subscription("a", s="1-0")
    subscriptions.add(Sink(), ends)
    given = []
    for _, _, entry in subscriptions.entries([(b"s", entries("2-0", "3-0"))]):
        given.append(entry.id)
        assert subscriptions.remove(ends) is ends
    assert given == ["2-0"]
    assert ends.last == {"s": "2-0"}  # whoever comes back goes on behind it
    assert subscriptions.remove(ends) is None


def test_streams_of_one_exchange_are_read_in_the_order_of_their_entries() -> None:
    subscriptions = Subscriptions()
    subscriptions.add(Sink(), subscription("a", s="1-0", t="1-0"))
    reply = [(b"s", entries("2-0", "5-0")), (b"t", entries("3-0"))]
    assert [id for _, id in read(subscriptions, reply)] == ["2-0", "3-0", "5-0"]


def test_what_is_not_urgent_is_read_every_now_and_then_and_at_once_if_there_is_more() -> None:
    subscriptions = Subscriptions()
    assert subscriptions.begin_reading(100.0)
    assert not subscriptions.begin_reading(100.0 + STREAM_PAUSE / 2)
    assert subscriptions.begin_reading(100.0 + STREAM_PAUSE)
    assert not subscriptions.may_have_more([(b"s", [None] * (PAGE - 1))])
    assert not subscriptions.may_have_more(None)
    assert subscriptions.may_have_more([(b"s", [None] * PAGE)])
    assert subscriptions.begin_reading(100.0 + STREAM_PAUSE)


def test_a_stream_that_was_made_anew_is_read_from_its_beginning() -> None:
    subscriptions = Subscriptions()
    one = subscription("a", s="500-0", fresh=BEGINNING)
    subscriptions.add(Sink(), one)
    assert subscriptions.looks_for_restarts(100.0) == [(one, "s", "500-0")]
    assert subscriptions.looks_for_restarts(100.0 + RESTART_PAUSE / 2) == []
    assert subscriptions.looks_for_restarts(100.0 + RESTART_PAUSE) != []
    restart(one, "s", "500-0", [(b"600-0", [])])  # it goes on
    assert one.last["s"] == "500-0"
    restart(one, "s", "400-0", [(b"300-0", [])])  # it was read meanwhile
    assert one.last["s"] == "500-0"
    restart(one, "s", "500-0", [(b"300-0", [])])
    assert one.last["s"] == BEGINNING
