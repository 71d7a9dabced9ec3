"""What becomes of deliveries and of their messages in a channel, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kombu_toc.center.exchanges import Subscription
from kombu_toc.consumer.state import WorkerPolicy
from kombu_toc.model import message as envelope
from kombu_toc.model.results import Delivery
from kombu_toc.transport.receiving import QoS, Receiver


class Poller:
    """Notes what it is to send."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def ack(self, delivery: Delivery) -> None:
        self.sent.append(("ack", delivery.id))

    def reject(self, delivery: Delivery, requeue: bool, reason: str = "", error: str = "") -> None:
        self.sent.append(("reject", delivery.id, requeue, reason))

    def release(self, deliveries: list[Delivery], *, handed: bool = False) -> None:
        ids = [delivery.id for delivery in deliveries]
        self.sent.append(("give back" if handed else "release", *ids))


class Worker(WorkerPolicy):
    """Executes "kept", and wants what begins with "early" early."""

    accepts_early = True

    def keeps(self, message: Any) -> bool:
        return bool(message.delivery.id == "kept")

    def wants_early(self, message: Any) -> bool:
        return bool(message.delivery.id.startswith("early"))


class Site:
    """A receiver and what is around it."""

    def __init__(self) -> None:
        self.poller = Poller()
        self.channel: Any = SimpleNamespace(
            **{"poller": self.poller, "policy": Worker(), "center": None},
            **{"do_restore": True, "body_encoding": None, "observers": ()},
        )
        self.channel.qos = self.qos = QoS(self.channel)
        self.receiver = Receiver(self.channel)
        self.got: list[Any] = []

    def consume(self, no_ack: bool = False) -> None:
        self.receiver.add("mail", self.got.append, no_ack)


@pytest.fixture
def site() -> Site:
    return Site()


def packed(id: str, **headers: str) -> bytes:
    message = {
        "headers": {"id": id, **headers},
        "properties": {"delivery_info": {}, "delivery_tag": "t"},
        "content-type": "text/plain",
        "content-encoding": "utf-8",
        "body": "x",
    }
    return envelope.pack(message, deflate=False)


def delivery(id: str, body: bytes | None = None) -> Delivery:
    return Delivery("mail", 0, 0, id, 16, packed(id) if body is None else body, 16)


def test_a_message_is_acknowledged_once(site: Site) -> None:
    site.consume()
    site.receiver.receive(delivery("a"))
    [message] = site.got
    assert site.qos.unsettled() == [message.delivery_tag]
    site.qos.ack(message.delivery_tag)
    site.qos.ack(message.delivery_tag)
    site.qos.reject(message.delivery_tag)
    assert site.poller.sent == [("ack", "a")]


def test_what_nobody_consumes_any_more_is_released(site: Site) -> None:
    site.consume()
    site.receiver.remove("mail")
    site.receiver.receive(delivery("a"))
    assert site.poller.sent == [("release", "a")]


def test_what_the_worker_executes_is_kept_when_the_channel_closes(site: Site) -> None:
    site.consume()
    for id in ("a", "kept", "b"):
        site.receiver.receive(delivery(id))
    site.qos.restore_unacked()
    assert site.poller.sent == [("give back", "a", "b")]
    assert [message.given_back for message in site.got] == [True, False, True]
    site.qos.ack(site.got[1].delivery_tag)
    assert site.poller.sent[-1] == ("ack", "kept")


def test_an_early_message_does_what_it_is_to_do_when_it_is_given_back(site: Site) -> None:
    site.consume()
    assert site.receiver.take_early(delivery("a")) is None, "the worker does not want it"
    message = site.receiver.take_early(delivery("early"))
    assert message is not None
    assert message.is_early
    site.receiver.deliver_early(message)
    done: list[str] = []
    site.got[0].call_when_due(lambda: done.append("due"), lambda: done.append("given back"))
    assert site.receiver.take_back(message)
    assert not site.receiver.take_back(message)
    assert done == ["given back"]


def test_a_firing_is_handed_over_early_if_it_is_known_that_it_runs(site: Site) -> None:
    site.consume()
    known = {"early": True, "early too": False}
    site.receiver.on_firing = lambda delivery, name: known[delivery.id]
    body = packed("a", **{envelope.SCHEDULE: "nightly"})
    taken = [site.receiver.take_early(delivery(id, body)) for id in known]
    assert [message is not None for message in taken] == [True, False]


def test_a_broadcast_that_is_given_back_is_delivered_again(site: Site) -> None:
    subscription = Subscription("mail", "news", "", {})
    assert not site.receiver.receive_broadcast(subscription, "key", packed("a"))
    site.consume()
    assert site.receiver.receive_broadcast(subscription, "key", packed("a"))
    site.qos.reject(site.got[0].delivery_tag, requeue=True)
    assert subscription.returned == [("key", packed("a"))]
