"""A publish whose reply is lost, and which Kombu therefore repeats, stays one message (K7)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import redis
from kombu import Connection, Exchange, Producer, Queue

from kombu_toc import TimeoutCenter, unique_answer

from ..support.fixtures import drain
from ..support.proxy import Proxy
from ..support.servers import Server

pytestmark = [
    pytest.mark.one_server("the proxy that loses replies stands before one"),
]

POLICY = {"max_retries": 5, "interval_start": 0.3, "interval_step": 0}


@pytest.fixture
def connection(proxy: Proxy) -> Iterator[Connection]:
    with Connection(proxy.toc_url, transport_options={"socket_timeout": 1}) as made:
        made.connect()
        yield made


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("exchange", ["", "direct", "topic"])
def test_it_is_one_message_also_if_it_was_acknowledged_before_the_repetition(
    proxy: Proxy,
    connection: Connection,
    client: redis.Redis,
    center: TimeoutCenter,
    taken: bool,
    exchange: str,
) -> None:
    queue = Queue("mail", Exchange("post", exchange) if exchange else None, routing_key="mail")
    queue(connection.default_channel).declare()
    producer = connection.Producer()
    options = {"exchange": "post"} if exchange else {}
    # Loads the script, so that what is cut off is EVALSHA; and is what was published before.
    producer.publish("before", routing_key="mail", headers={"id": "0"}, **options)
    center.ack(center.pop("mail").messages)

    happened = proxy.drop_replies(b"the only one")
    attempts = []

    def errback(exc: Exception, interval: float) -> None:
        attempts.append(exc)
        assert happened.wait(5)
        if taken:
            assert center.ack(center.pop("mail").messages) == 1

    producer.publish(
        "the only one",
        routing_key="mail",
        headers={"id": "1"},
        retry=True,
        retry_policy={**POLICY, "errback": errback},
        **options,
    )
    assert len(attempts) == 1
    assert center.counts("mail").waiting == (0 if taken else 1)

    producer.publish("after", routing_key="mail", headers={"id": "1"}, **options)
    assert center.counts("mail").waiting == (1 if taken else 2)


@pytest.mark.versions
def test_a_broadcast_is_one_message_too(
    proxy: Proxy, connection: Connection, server: Server
) -> None:
    exchange = Exchange("news", "fanout")
    got: list[str] = []
    with (
        Connection(server.toc_url) as listener,
        listener.Consumer(
            Queue("reader", exchange, exclusive=True),
            callbacks=[lambda body, message: got.append(body)],
            no_ack=True,
        ),
    ):
        # As Celery publishes: with an exchange of the producer's own, Kombu 5.5 and 5.6 go on
        # declaring it on the channel that is gone.
        producer = connection.Producer()
        to_all = {"exchange": exchange, "declare": [exchange]}
        producer.publish("before", **to_all)
        happened = proxy.drop_replies(b"only once")
        producer.publish("only once", retry=True, retry_policy=POLICY, **to_all)
        assert happened.is_set()
        producer.publish("after", **to_all)
        drain(listener)
    assert got == ["before", "only once", "after"]


@pytest.mark.versions
@pytest.mark.parametrize("fault", ["cut", "freeze"])
def test_a_publish_during_a_fault_is_repeated_until_it_is_kept_once(
    proxy: Proxy, connection: Connection, center: TimeoutCenter, fault: str
) -> None:
    producer = connection.Producer()
    producer.publish("before", routing_key="mail", headers={"id": "0"})
    if fault == "cut":
        proxy.cut_replies_after(2)
    else:
        proxy.freeze_replies_after(2)
    producer.publish("x", routing_key="mail", headers={"id": "1"}, retry=True, retry_policy=POLICY)
    assert center.counts("mail").waiting == 2


@pytest.mark.versions
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_and_its_parent_publish_messages_of_their_own(
    connection: Connection, center: TimeoutCenter
) -> None:
    center.queues.declare("mail", slots=1)
    producer = connection.Producer()
    producer.publish("before", routing_key="mail")
    child = os.fork()
    if not child:
        try:
            producer.publish("of the child", routing_key="mail")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    producer.publish("of the parent", routing_key="mail")
    assert center.counts("mail").waiting == 3


@pytest.mark.parametrize("transport", ["ours", "another"])
def test_each_publish_that_sends_a_received_messages_properties_along_is_a_message(
    connection: Connection, server: Server, center: TimeoutCenter, transport: str
) -> None:
    with Connection(server.toc_url if transport == "ours" else "memory://") as source:
        source.Producer().publish("x", routing_key="from", declare=[Queue("from")])
        properties = source.default_channel.basic_get("from", no_ack=True).properties
    center.queues.declare("mail", slots=1)
    producer = connection.Producer()
    for body in ("first", "second"):
        producer.publish(body, routing_key="mail", **properties)
    assert center.counts("mail").waiting == 2


# -- unique keys


def sent_unique(producer: Producer, id: str, text: str, conflict: str, retry: object) -> str:
    """Publish a message with a unique key; return the id that it has."""
    with unique_answer(id) as answer:
        producer.publish(
            text,
            routing_key="mail",
            headers={"id": id, "x-unique": "k", "x-unique-conflict": conflict},
            retry=True,
            retry_policy={**POLICY, "errback": retry},
        )
    return answer.id


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("conflict", ["keep", "raise", "replace", "push_back"])
def test_a_unique_message_does_not_conflict_with_itself(
    proxy: Proxy, connection: Connection, center: TimeoutCenter, conflict: str, taken: bool
) -> None:
    producer = connection.Producer()
    sent_unique(producer, "0", "before", conflict, None)
    assert center.ack(center.pop("mail").messages) == 1
    happened = proxy.drop_replies(b"the only one")

    def errback(exc: Exception, interval: float) -> None:
        assert happened.wait(5)
        if taken:
            assert center.ack(center.pop("mail").messages) == 1

    assert sent_unique(producer, "1", "the only one", conflict, errback) == "1"
    assert happened.is_set()
    assert center.counts("mail").waiting == (0 if taken else 1)


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("conflict", ["replace", "push_back"])
def test_what_has_replaced_another_one_has_its_id_although_the_reply_was_lost(
    proxy: Proxy, connection: Connection, center: TimeoutCenter, conflict: str, taken: bool
) -> None:
    producer = connection.Producer()
    sent_unique(producer, "the-first", "before", conflict, None)
    sent_unique(producer, "another", "between", conflict, None)
    happened = proxy.drop_replies(b"the-first")

    def errback(exc: Exception, interval: float) -> None:
        assert happened.wait(5)
        [message] = center.scan("mail", limit=9).messages
        assert b"the new one" in message.body
        if taken:
            assert center.ack(center.pop("mail").messages) == 1

    assert sent_unique(producer, "1", "the new one", conflict, errback) == "the-first"
    assert happened.is_set()
    assert center.counts("mail").waiting == (0 if taken else 1)
