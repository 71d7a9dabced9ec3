"""Messages of many megabytes: bounded in bytes where others are in number, and over slow lines."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
import redis
from kombu import Connection, Queue

from kombu_toc import MessageError, TimeoutCenter, center_for
from kombu_toc.center.reshard import reshard_topic
from kombu_toc.scripts.call import ScriptCall

from ..support.cases import night
from ..support.fixtures import drain, own_server
from ..support.inspection import check_slots, residue
from ..support.proxy import Proxy
from ..support.servers import Server

MB = 1_000_000

one_server = pytest.mark.one_server("the slow proxy stands before one server")


def fill(center: TimeoutCenter, sizes: list[int], slots: int = 1, **how: int) -> None:
    center.queues.declare("mail", slots=slots)
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
    center = TimeoutCenter(client, pop_bytes=1000, slots=8)
    fill(center, [400, 400, 300, 700, 0, 1, 1000, 1])
    assert sizes(center) == [[400, 400], [300, 700, 0], [1], [1000], [1]]
    assert residue(client) == []


def test_what_is_larger_than_a_pop_may_be_is_delivered_alone(client: redis.Redis) -> None:
    center = TimeoutCenter(client, pop_bytes=1000, slots=8)
    fill(center, [5000, 1, 5000, 5000, 1])
    assert sizes(center) == [[5000], [1], [5000], [5000], [1]]


def test_what_is_smaller_does_not_overtake_what_does_not_fit(client: redis.Redis) -> None:
    center = TimeoutCenter(client, pop_bytes=1000, slots=8)
    center.queues.declare("mail", slots=4)
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


@pytest.mark.usefixtures("client")
def test_what_redis_does_not_take_is_refused_before_it_is_sent(server: Server) -> None:
    """With both sizes, and by each way."""
    body = bytes((512 << 20) + 1)
    said = "it has 536,870,913 bytes, and Redis takes 536,870,912 at most"
    center = center_for(server.toc_url)
    with pytest.raises(MessageError, match=f"message 'm': {said}"):
        center.put("mail", "m", body)
    with pytest.raises(MessageError, match=said):
        center.put_many("mail", [("m", body)])
    with Connection(server.toc_url) as connection, pytest.raises(MessageError, match="and Redis"):
        connection.Producer().publish(
            body, routing_key="mail", content_type="application/data", content_encoding="binary"
        )
    assert center.counts("mail").waiting == 0
    center.client.close()


def test_twelve_messages_of_ten_megabytes_are_delivered_one_by_one(center: TimeoutCenter) -> None:
    fill(center, [10 * MB] * 4)
    assert sizes(center) == [[10 * MB]] * 4


def test_the_bound_is_an_option(server: Server, client: redis.Redis) -> None:
    center = center_for(f"{server.toc_url}?toc_pop_bytes=1000")
    fill(center, [600, 600])
    assert sizes(center) == [[600], [600]]
    center.client.close()


@own_server
def test_what_fits_is_not_asked_for_its_size_if_only_one_is_wanted(center: TimeoutCenter) -> None:
    fill(center, [10, 10])
    center.client.config_resetstat()
    assert len(center.pop("mail", 1).messages) == 1
    assert "cmdstat_hstrlen" not in center.client.info("commandstats")


# -- other operations


class Counted(TimeoutCenter):
    """A center that knows how long the longest reply was."""

    longest = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        run = self.runner.run

        def counted(call: ScriptCall) -> Any:
            def parse(raw: Any) -> Any:
                self.longest = max(self.longest, length(raw))
                return call.parse(raw)

            return run(call._replace(parse=parse))

        self.runner.run = counted  # type: ignore[method-assign]
        self.runner.run_each = lambda calls: [*map(counted, calls)]  # type: ignore[method-assign]


def length(raw: Any) -> int:
    """Bytes of a reply, about."""
    if isinstance(raw, list):
        return sum(map(length, raw))
    return len(raw) if isinstance(raw, bytes) else 0


def test_a_scan_reads_so_many_bytes_at_a_time(client: redis.Redis) -> None:
    center = Counted(client, pop_bytes=10_000)
    fill(center, [4000] * 20 + [30_000] * 3 + [1] * 20, slots=2)
    found = center.scan("mail", limit=100).messages
    assert sorted(len(one.body) for one in found) == [1] * 20 + [4000] * 20 + [30_000] * 3
    assert 30_000 <= center.longest < 31_000
    pages, after = [], None
    while True:
        page = center.scan("mail", limit=7, after=after)
        pages += [one.id for one in page.messages]
        after = page.after
        if after is None:
            break
    assert sorted(pages) == sorted(one.id for one in found)
    assert center.count("mail") == 43


def test_what_is_cancelled_is_read_in_bounded_parts_and_what_is_purged_is_not(
    client: redis.Redis,
) -> None:
    center = Counted(client, pop_bytes=10_000)
    fill(center, [4000] * 20)
    cancelled = center.cancel([f"{number}" for number in range(10)], topic="mail")
    assert [len(one.body) for one in cancelled] == [4000] * 10
    assert center.longest < 13_000
    cancelled = center.cancel(center.scan("mail").messages)
    assert [len(one.body) for one in cancelled] == [4000] * 10
    assert residue(client) == []

    fill(center, [4000] * 20)
    for message in [*center.pop("mail", 20).messages, *center.pop("mail", 20).messages]:
        center.reject(message, requeue=False)
    center.longest = 0
    assert center.dead.purge("mail") > 1
    assert center.longest < 1000


def test_check_looks_at_few_large_messages_at_a_time(client: redis.Redis) -> None:
    center = TimeoutCenter(client, pop_bytes=10_000, slots=8)
    fill(center, [5000] * 600)
    sizes: list[int] = []
    run = center.runner.run

    def counted(call: ScriptCall) -> Any:
        raw = run(call)
        if call.script.name == "check":
            sizes.append(raw[2])
        return raw

    center.runner.run = counted  # type: ignore[method-assign]
    assert center.admin.check("mail") == []
    assert sum(sizes) == 600 * 5000
    # Redis gives more than it was asked for, as much as lies in one place while its hash grows.
    assert max(sizes) < 40 * 5000  # of 200 at a time


@pytest.mark.one_server("messages are not moved from node to node")
def test_messages_are_moved_in_bounded_parts(client: redis.Redis) -> None:
    center = TimeoutCenter(client, pop_bytes=10_000, slots=8)
    fill(center, [4000] * 30, slots=8)
    moved: list[int] = []
    done = reshard_topic(
        center, "mail", 1, settle=0, on_progress=lambda done, of: moved.append(done)
    )
    assert done.done
    steps = [after - before for before, after in itertools.pairwise([0, *moved])]
    assert max(steps) <= 3
    assert center.queues.counts_by_slot("mail")[0].waiting == 30
    check_slots(center, "mail")


# -- slow lines


@one_server
@pytest.mark.parametrize(
    ("known", "options"),
    [
        (True, {}),
        (False, {"max_connections": 4}),
        night(True, {"max_connections": 4}),
        night(False, {}),
    ],
    ids=["script known", "script unknown, pool", "script known, pool", "script unknown"],
)
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
        assert time.monotonic() - began < 10
        proxy.thaw()


@one_server
def test_the_lease_of_what_is_on_its_way_is_held(proxy: Proxy, center: TimeoutCenter) -> None:
    """Another consumer looks for leases that have ended all the while."""
    with Connection(
        proxy.toc_url, transport_options={"socket_timeout": 2, "visibility_timeout": 3}
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
            direct.Producer().publish(b"x" * 5 * MB, routing_key="mail")
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
            assert time.monotonic() - began > 4
            assert rolled_back == []
            [message] = got
            assert "redelivered" not in message.delivery_info
            message.ack()
