"""What a pop has delivered whose reply was lost reaches a consumer soon, and costs no retry."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from kombu import Connection, Message, Queue

from kombu_toc import IN_FLIGHT, WAITING, Delivery, TimeoutCenter
from kombu_toc.center.calls import PopRequest
from kombu_toc.consumer.holdings import KEPT, UnansweredPop, UnansweredPops
from kombu_toc.consumer.lease_keeper import LeaseKeeper
from kombu_toc.model.topic import Topic
from kombu_toc.scripts.call import ScriptCall

from ..support.inspection import check_slots, slot_keys
from ..support.proxy import Proxy
from ..support.servers import Server
from ..support.waiting import wait_until


@pytest.fixture
def topic(center: TimeoutCenter) -> Topic:
    return center.queues.declare("mail", slots=1, retries=5)


def popping(center: TimeoutCenter, topic: Topic, name: str, **how: Any) -> ScriptCall:
    return center.commands.pop(topic, PopRequest(name, ready_limit=10, remember=60, **how))


def recalled(center: TimeoutCenter, topic: Topic, name: str, **how: Any) -> list[Delivery]:
    return center.runner.run(center.commands.recall(topic, None, name, **how)).messages


def test_a_pop_that_is_asked_again_by_its_name_gives_the_same(
    center: TimeoutCenter, topic: Topic
) -> None:
    for number in range(5):
        center.put("mail", f"{number}", b"body", priority=3 * (number % 2))
    [tried] = center.pop("mail", 1).messages
    center.reject(tried, requeue=True)
    given = center.runner.run(popping(center, topic, "me.1")).messages
    assert len(given) == 5
    for _ in range(3):  # that reply may be lost as well
        assert recalled(center, topic, "me.1") == given
    assert [one.body for one in recalled(center, topic, "me.1", bodies=False)] == [b""] * 5
    assert center.ack(given[:2]) == 2
    assert recalled(center, topic, "me.1") == given[2:]
    assert recalled(center, topic, "me.2") == []
    assert center.ack(given) == 3
    assert center.counts("mail").waiting == 0


def test_what_is_asked_again_has_a_lease_from_then_on(center: TimeoutCenter, topic: Topic) -> None:
    center.put("mail", "x", b"")
    [given] = center.runner.run(popping(center, topic, "me.1", visibility=1)).messages
    assert recalled(center, topic, "me.1", visibility=60) == [given]
    time.sleep(1.1)  # the first lease would have ended
    assert center.pop("mail").rolled_back == []
    assert center.extend([given]) == []


def of_another(center: TimeoutCenter, given: Delivery) -> None:
    center.extend([given], 0)
    assert len(center.pop("mail").messages) == 1


def of_a_namesake(center: TimeoutCenter, given: Delivery) -> None:
    center.cancel("x", topic="mail", in_flight=True)
    center.put("mail", "x", b"another")
    assert len(center.pop("mail").messages) == 1


def waiting(center: TimeoutCenter, given: Delivery) -> None:
    center.release([given])


def test_what_several_pops_gave_to_nobody_comes_back_although_the_first_attempt_breaks_off(
    server: Server, center: TimeoutCenter
) -> None:
    """K7: it was given back when its lease ended; the consumer had gone."""
    asked = TimeoutCenter(server.client())
    heartbeat, now = LeaseKeeper(lambda: asked), [0.0]
    heartbeat.flights = UnansweredPops(threading.RLock, lambda: now[0])
    broken = redis.ConnectionError("the server is away")
    for queue in ("mail", "sms"):
        topic = center.queues.declare(queue, slots=1)
        center.put(queue, "x", b"body")
        assert center.runner.run(popping(center, topic, f"me.{queue}")).messages
        heartbeat.flights.lose(UnansweredPop(topic, None, f"me.{queue}", 30.0))
    now[0] = KEPT
    with pytest.MonkeyPatch.context() as patched, pytest.raises(redis.ConnectionError):
        patched.setattr(asked.runner, "run", lambda call: (_ for _ in ()).throw(broken))
        heartbeat.beat(asked, time.monotonic())
    heartbeat.beat(asked, time.monotonic())
    assert [center.counts(queue).ready for queue in ("mail", "sms")] == [1, 1]


@pytest.mark.parametrize("become", [of_another, of_a_namesake, waiting])
def test_what_is_in_other_hands_is_not_given_again(
    center: TimeoutCenter, topic: Topic, become: Callable[[TimeoutCenter, Delivery], None]
) -> None:
    center.put("mail", "x", b"")
    [given] = center.runner.run(popping(center, topic, "me.1")).messages
    become(center, given)
    assert recalled(center, topic, "me.1") == []
    check_slots(center, "mail")


@pytest.mark.parametrize("first", ["asked again", "popped"])
def test_a_pop_that_runs_after_nobody_waits_for_it_any_more_gives_nothing(
    center: TimeoutCenter, topic: Topic, first: str
) -> None:
    """It was on its way while its connection was cut, and arrives behind the next one."""
    for number in range(5):
        center.put("mail", f"{number}", b"", delay=-number - 1)
    late = popping(center, topic, "me.1")
    if first == "asked again":
        assert recalled(center, topic, "me.1") == []
        given: list[Delivery] = []
    else:
        given = center.runner.run(popping(center, topic, "me.1")).messages
        assert len(given) == 5
        center.put("mail", "new", b"")
    before = center.get([f"{number}" for number in range(5)] + ["new"], topic="mail")
    assert center.runner.run(late).messages == []
    assert center.get([f"{number}" for number in range(5)] + ["new"], topic="mail") == before
    check_slots(center, "mail")
    assert recalled(center, topic, "me.1") == given
    assert len(center.pop("mail", 10).messages) == 5 if not given else 1


def test_looks_and_pops_without_a_consumer_leave_nothing(
    center: TimeoutCenter, topic: Topic
) -> None:
    center.runner.run(center.commands.pop(topic, PopRequest("me.1", ready_limit=0)))
    center.runner.run(popping(center, topic, "me.2"))  # there is nothing
    center.put("mail", "x", b"")
    center.ack(center.pop("mail").messages)
    assert center.client.keys("*:sent:to:*") == []
    center.put("mail", "x", b"")
    center.ack(center.runner.run(popping(center, topic, "me.3")).messages)
    [key] = center.client.keys("*:sent:to:*")
    assert 0 < center.client.ttl(key) <= 60


# -- consumers


@pytest.fixture(params=["pop", "pop_limited"])
def script(request: pytest.FixtureRequest) -> str:
    """By what a consumer pops."""
    return request.param


@pytest.fixture
def mail(server: Server, center: TimeoutCenter, script: str) -> TimeoutCenter:
    """A center whose queue 'mail' holds a message."""
    if script == "pop_limited":
        center.queues.declare("mail", concurrency=1)
    center.pop("mail")
    with Connection(server.toc_url) as connection:
        queue = Queue("mail")(connection.default_channel)
        queue.declare()
        connection.Producer().publish("x", routing_key="mail", headers={"id": "the-one"})
    return center


one_server = pytest.mark.one_server("the proxy that loses the reply stands before one server")


def lose_the_reply(proxy: Proxy, connection: Connection) -> tuple[list[Message], float]:
    """Consume of 'mail' until the reply that has the message is cut off; what is delivered later,
    and when it was asked for."""
    got: list[Message] = []
    lost = proxy.drop_replies(b"the-one", said=True)
    sent = time.monotonic()
    with pytest.raises(connection.connection_errors):
        consume(connection, got)
        while True:
            connection.drain_events(timeout=2)
    assert lost.is_set() and not got
    return got, sent


def consume(connection: Connection, got: list[Message]) -> None:
    take = [lambda body, message: got.append(message)]
    connection.Consumer(Queue("mail"), callbacks=take).consume()


def assert_held_for_half_a_second(mail: TimeoutCenter, sent: float) -> None:
    """Then it is given back, not before."""
    [found] = mail.scan("mail").messages
    assert found.state == IN_FLIGHT or time.monotonic() - sent > 0.5


@one_server
@pytest.mark.parametrize("again", ["the same connection", "another", "a revived one"])
def test_a_consumer_that_reconnects_is_given_what_was_on_its_way(
    server: Server, mail: TimeoutCenter, again: str
) -> None:
    """Another connection of the process, or this one."""
    with Proxy(server.port) as proxy:
        connection = Connection(proxy.toc_url)
        got, sent = lose_the_reply(proxy, connection)
        assert_held_for_half_a_second(mail, sent)
        if again != "the same connection":
            connection.close()
            if again == "another":
                connection = Connection(proxy.toc_url)
            consume(connection, got)
        connection.drain_events(timeout=10)
        [message] = got
        assert message.payload == "x"
        assert "redelivered" not in message.delivery_info
        message.ack()
        connection.close()
    assert mail.scan("mail").messages == []
    assert [key for key in slot_keys(mail.client) if ":sent:" not in key] == []


@one_server
def test_what_no_consumer_asks_for_is_given_back(server: Server, mail: TimeoutCenter) -> None:
    with Proxy(server.port) as proxy:
        with Connection(proxy.toc_url) as connection:
            _, sent = lose_the_reply(proxy, connection)
        assert_held_for_half_a_second(mail, sent)
        # The heartbeat gives them back in a while.
        assert wait_until(lambda: [m.state for m in mail.scan("mail").messages] == [WAITING], 10)
    assert [one.failures for one in mail.pop("mail").messages] == [0]
