"""Messages of many megabytes: bounded in bytes where others are in number, and over slow lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import redis
from kombu import Connection, Queue

from kombu_toc import TimeoutCenter, center_for

from ..proxy import Proxy
from ..servers import Server
from .conftest import drain
from .inspection import check_slots, residue

MB = 1_000_000

one_server = pytest.mark.one_server("the slow proxy stands before one server")


def fill(center: TimeoutCenter, sizes: list[int], slots: int = 1, **how: int) -> None:
    center.declare("mail", slots=slots)
    for number, size in enumerate(sizes):
        center.put("mail", f"{number}", b"x" * size, **how)


def sizes(center: TimeoutCenter, limit: int = 100) -> list[list[int]]:
    """Of the messages of each pop, until there are no more."""
    found = []
    while True:
        popped = center.pop("mail", limit)
        found.append([len(message.body) for message in popped.messages])
        center.ack(popped.messages)
        if not popped.more:
            return found
        assert popped.messages


# -- pop


def test_a_pop_delivers_so_many_bytes_and_the_next_one_the_rest(client: redis.Redis) -> None:
    center = TimeoutCenter(client, pop_bytes=1000)
    fill(center, [400, 400, 300, 700, 0, 1, 1000, 1])
    assert sizes(center) == [[400, 400], [300, 700, 0], [1], [1000], [1]]
    assert residue(client) == []


def test_what_is_larger_than_a_pop_may_be_is_delivered_alone(client: redis.Redis) -> None:
    center = TimeoutCenter(client, pop_bytes=1000)
    fill(center, [5000, 1, 5000, 5000, 1])
    assert sizes(center) == [[5000], [1], [5000], [5000], [1]]


def test_what_is_smaller_does_not_overtake_what_does_not_fit(client: redis.Redis) -> None:
    center = TimeoutCenter(client, pop_bytes=1000)
    center.declare("mail", slots=4)
    for number, (size, priority) in enumerate([(900, 0), (200, 0), (1, 0), (1, 9)]):
        center.put("mail", f"{number}", b"x" * size, priority=priority)
    popped = center.pop("mail", 10)
    assert [message.id for message in popped.messages][:1] == ["0"]
    check_slots(center, "mail")
    while popped.more:
        more = center.pop("mail", 10)
        popped = more._replace(messages=popped.messages + more.messages)
    if not center.clustered:
        assert [message.id for message in popped.messages] == ["0", "1", "2", "3"]
    check_slots(center, "mail")


def test_twelve_messages_of_ten_megabytes_are_delivered_one_by_one(
    center: TimeoutCenter, client: redis.Redis
) -> None:
    fill(center, [10 * MB] * 4)
    assert sizes(center) == [[10 * MB]] * 4


def test_the_bound_is_an_option(server: Server, client: redis.Redis) -> None:
    center = center_for(f"{server.toc_url}?toc_pop_bytes=1000")
    fill(center, [600, 600])
    assert sizes(center) == [[600], [600]]
    center.client.close()


def test_what_fits_is_not_asked_for_its_size_if_only_one_is_wanted(
    center: TimeoutCenter, client: redis.Redis
) -> None:
    fill(center, [10, 10])
    client.config_resetstat()
    assert len(center.pop("mail", 1).messages) == 1
    assert "cmdstat_hstrlen" not in client.info("commandstats")


# -- slow lines


@pytest.fixture
def proxy(server: Server, client: redis.Redis) -> Iterator[Proxy]:
    with Proxy(server.port) as made:
        yield made


@one_server
@pytest.mark.parametrize("known", [True, False], ids=["script known", "script unknown"])
@pytest.mark.parametrize("options", [{}, {"max_connections": 4}], ids=["", "pool"])
def test_what_takes_longer_than_the_sockets_timeout_is_published(
    proxy: Proxy, center: TimeoutCenter, client: redis.Redis, known: bool, options: dict[str, int]
) -> None:
    options = {**options, "socket_timeout": 2}
    with Connection(proxy.toc_url, transport_options=options) as connection:
        producer = connection.Producer()
        producer.publish(b"before", routing_key="mail")
        if not known:
            client.script_flush()
        proxy.throttle(4 * MB)
        began = time.monotonic()
        producer.publish(b"x" * 16 * MB, routing_key="mail")
        assert time.monotonic() - began > 3
    before, after = sizes(center)
    assert before[0] < MB < 16 * MB < after[0]


@one_server
def test_silence_is_still_noticed(proxy: Proxy, center: TimeoutCenter) -> None:
    options = {"socket_timeout": 0.5}
    with Connection(proxy.toc_url, transport_options=options) as connection:
        producer = connection.Producer()
        producer.publish(b"before", routing_key="mail")
        proxy.freeze()
        began = time.monotonic()
        with pytest.raises(connection.connection_errors):
            producer.publish(b"after", routing_key="mail")
        assert time.monotonic() - began < 1.5
        proxy.thaw()


@one_server
def test_the_lease_of_what_is_on_its_way_is_held(
    proxy: Proxy, center: TimeoutCenter, client: redis.Redis
) -> None:
    """Another consumer looks for leases that have ended all the while."""
    with Connection(
        proxy.toc_url, transport_options={"socket_timeout": 2, "visibility_timeout": 1}
    ) as connection:
        queue = Queue("mail")(connection.default_channel)
        queue.declare()
        connection.Producer().publish(b"before", routing_key="mail")
        got = []
        with connection.Consumer(queue, callbacks=[lambda _, message: got.append(message)]):
            drain(connection)
            got.pop().ack()
            drain(connection)
            proxy.throttle(MB)
            direct = Connection(f"toc+redis://127.0.0.1:{proxy.target_port}/0")
            direct.Producer().publish(b"x" * 4 * MB, routing_key="mail")
            direct.release()
            rolled_back = []
            stop = threading.Event()

            def look() -> None:
                with redis.Redis(port=proxy.target_port, protocol=2) as own:
                    other = TimeoutCenter(own, grace=0)
                    while not stop.is_set():
                        rolled_back.extend(other.pop("mail", 0).rolled_back)
                        stop.wait(0.05)

            looking = threading.Thread(target=look)
            looking.start()
            began = time.monotonic()
            try:
                connection.drain_events(timeout=10)
            finally:
                stop.set()
                looking.join()
            assert time.monotonic() - began > 2
            assert rolled_back == []
            [message] = got
            assert "redelivered" not in message.delivery_info
            message.ack()
