"""A publish whose reply is lost, and which Kombu therefore repeats, stays one message (K7); a reply
that is none is an error, and loses nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import redis
from hypothesis import strategies as st
from kombu import Connection, Exchange, Producer, Queue

from kombu_toc import TimeoutCenter, TocError, center_for, unique_answer

from ..support.cases import night
from ..support.fixtures import drain
from ..support.proxy import Proxy
from ..support.servers import Server

pytestmark = [pytest.mark.one_server("the proxy that loses replies stands before one")]

POLICY = {"max_retries": 5, "interval_start": 0.3, "interval_step": 0}


@pytest.fixture
def connection(proxy: Proxy) -> Iterator[Connection]:
    with Connection(proxy.toc_url, transport_options={"socket_timeout": 1}) as made:
        made.connect()
        yield made


class Lost:
    """What Kombu calls as a reply is lost, and before it repeats what it has sent: the message is
    there, and somebody takes it, if that is so.

    request: what is in the call whose reply is lost; body: what is in the message
    """

    def __init__(
        self, proxy: Proxy, center: TimeoutCenter, request: bytes, taken: bool, body: bytes = b""
    ) -> None:
        self.times = 0
        self._center, self._taken, self._body = center, taken, body
        self._happened = proxy.drop_replies(request)

    def __call__(self, exc: Exception, interval: float) -> None:
        self.times += 1
        assert self._happened.wait(5)
        [message] = self._center.scan("mail", limit=9).messages
        assert self._body in message.body
        if self._taken:
            assert self._center.ack(self._center.pop("mail").messages) == 1


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
    options: dict[str, Any] = {"exchange": "post"} if exchange else {}
    # Loads the script, so that what is cut off is EVALSHA; and is what was published before.
    producer.publish("before", routing_key="mail", headers={"id": "0"}, **options)
    center.ack(center.pop("mail").messages)

    lost = Lost(proxy, center, b"the only one", taken)
    policy = {**POLICY, "errback": lost}
    options |= {"routing_key": "mail", "headers": {"id": "1"}}
    producer.publish("the only one", retry=True, retry_policy=policy, **options)
    assert lost.times == 1
    assert center.counts("mail").waiting == (0 if taken else 1)

    producer.publish("after", **options)
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
    lost = Lost(proxy, center, b"the only one", taken)
    assert sent_unique(producer, "1", "the only one", conflict, lost) == "1"
    assert lost.times == 1
    assert center.counts("mail").waiting == (0 if taken else 1)


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("conflict", ["replace", "push_back"])
def test_what_has_replaced_another_one_has_its_id_although_the_reply_was_lost(
    proxy: Proxy, connection: Connection, center: TimeoutCenter, conflict: str, taken: bool
) -> None:
    producer = connection.Producer()
    sent_unique(producer, "the-first", "before", conflict, None)
    sent_unique(producer, "another", "between", conflict, None)
    lost = Lost(proxy, center, b"the-first", taken, b"the new one")
    assert sent_unique(producer, "1", "the new one", conflict, lost) == "the-first"
    assert lost.times == 1
    assert center.counts("mail").waiting == (0 if taken else 1)


#: Replies of each type that no script gives, such that are cut, and what is no reply.
ODD = [
    b"+OK",
    b":1",
    b":-1",
    b"$-1",
    b"*-1",
    b"*0",
    b"$0\r\n",
    b"$2\r\n\xff\xfe",
    b"*1\r\n*0",
    b"_",
]
ODD += [b"*2\r\n:1\r\n$1\r\n1", b"*3\r\n:1\r\n:0\r\n*1\r\n:7", b"*99", b"$99", b"-ERR an odd one"]
ODD += [b"*4\r\n:1\r\n:1\r\n:1\r\n:1", b"-WRONGTYPE odd", b"-NOSCRIPT odd", b"*x", b"$-7", b":"]
ODD += [b"\0", b"HTTP/1.1 400 Bad Request", b"*1\r\n" * 50, b"*3\r\n*0\r\n*0\r\n*0", b"*1\r\n$-1"]

#: Which messages may be left of 1, which is delivered, and 2. A cancel looks first what there is.
LEFT = {"put": [{"1", "2", "3"}], "ack": [{"2"}], "cancel": [{"1"}, {"1", "2"}]}


def in_another_order(data: bytes, order: list[int]) -> bytes:
    lines = data.removesuffix(b"\r\n").split(b"\r\n")
    return b"\r\n".join(line for first in order for line in lines[first::4]) + b"\r\n"


spoils: st.SearchStrategy[Callable[[bytes], bytes]] = st.one_of(
    st.sampled_from(ODD).map(lambda odd: lambda data: odd + b"\r\n"),
    st.binary(max_size=20).map(lambda odd: lambda data: odd + b"\r\n"),
    st.integers(1, 60).map(lambda least: lambda data: data[:-least]),
    st.permutations(range(4)).map(lambda order: lambda data: in_another_order(data, order)),
)


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("examples", [40, night(4_000)])
def test_a_reply_that_no_script_gives_is_a_clear_error_and_loses_nothing(
    proxy: Proxy, client: redis.Redis, center: TimeoutCenter, examples: int
) -> None:
    """What was accepted is there once, in whatever state (K7); and no connection is left over."""
    doubtful = center_for(proxy.toc_url, toc_slots=8)
    center.put("mail", "1", b"body")  # the server knows the scripts
    center.ack(center.pop("mail").messages)
    center.cancel("1", topic="mail")

    @hypothesis.settings(
        max_examples=examples,
        derandomize=examples < 1_000,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.example("put", lambda data: b"-\r\n")
    @hypothesis.example("pop", lambda data: b"*3\r\n*0\r\n*0\r\n*0\r\n")
    @hypothesis.given(st.sampled_from(["put", "pop", "ack", "get", "cancel", "counts"]), spoils)
    def check(name: str, spoil: Callable[[bytes], bytes]) -> None:
        client.flushdb()
        center.put("mail", "1", b"first")
        [taken] = center.pop("mail").messages
        center.put("mail", "2", b"second")
        operations: dict[str, Callable[[], object]] = {
            "put": lambda: doubtful.put("mail", "3", b"third"),
            "pop": lambda: doubtful.pop("mail"),
            "ack": lambda: doubtful.ack([taken]),
            "get": lambda: doubtful.get("2", topic="mail"),
            "cancel": lambda: doubtful.cancel("2", topic="mail"),
            "counts": lambda: doubtful.counts("mail"),
        }
        with contextlib.suppress(redis.ConnectionError):  # what was spoilt before
            doubtful.counts("mail")
        doubtful.queues.declare("mail")
        proxy.spoil_reply(spoil)
        try:
            operations[name]()
        except (TocError, redis.RedisError) as exc:
            assert len(str(exc)) > 2
        proxy.spoil_reply(None)
        left = {id for id in ("1", "2", "3") if center.get(id, topic="mail")}
        assert left in LEFT.get(name, [{"1", "2"}])

    check()
    assert len(client.client_list()) < 10
    doubtful.client.close()
