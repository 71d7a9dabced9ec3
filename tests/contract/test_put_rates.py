"""How many messages may be put, of a queue and of each key: what is refused, and what is not
counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection, Producer

from celery_toc import aio
from kombu_toc import (
    AsyncTimeoutCenter,
    NewMessage,
    Put,
    PutManyError,
    RateLimitedError,
    ServerError,
    TimeoutCenter,
    Unique,
    read_metrics,
    reshard_topic,
)

from ..support.cluster import Cluster
from ..support.inspection import check_slots, full_server, residue
from ..support.loops import in_loop
from ..support.proxy import Proxy
from ..support.servers import Server
from .test_center_put_many import replies_lost

Connect = Callable[..., Connection]


def accepted(put: Callable[[int], Any], attempts: int) -> list[int]:
    """Which of some puts are not refused."""
    done = []
    for number in range(attempts):
        try:
            put(number)
        except RateLimitedError:
            continue
        done.append(number)
    return done


def put_to(center: TimeoutCenter, topic: str = "mail", **how: Any) -> Callable[[int], Any]:
    return lambda number: center.put(topic, f"m-{number}", b"x", **how)


def ids(center: TimeoutCenter, topic: str = "mail") -> list[str]:
    return sorted(found.id for found in center.scan(topic, limit=1000).messages)


# -- what is refused


@pytest.mark.cluster
def test_so_many_are_put_as_the_rate_says_and_the_next_is_told_when(center: TimeoutCenter) -> None:
    """W4"""
    center.queues.declare("mail", put_rate="3/h")
    assert accepted(put_to(center), 5) == [0, 1, 2]
    with pytest.raises(RateLimitedError) as raised:
        center.put("mail", "more", b"x")
    error = raised.value
    assert error.limit == "put_rate"
    assert error.retry_after == pytest.approx(1200, abs=20)
    assert str(error).startswith("queue 'mail' takes 3/h (put_rate), and has got as many; the mess")
    assert ids(center) == ["m-0", "m-1", "m-2"]
    assert center.counts("mail").ready == 3
    check_slots(center, "mail")


def test_what_is_refused_is_counted(center: TimeoutCenter) -> None:
    center.queues.declare("mail", put_rate="2/h")
    accepted(put_to(center), 5)
    with pytest.raises(RateLimitedError):
        center.put_many("mail", [("x", b""), ("y", b"")])
    center.metrics.send(center.runner)
    totals = read_metrics(center)["mail"].totals
    assert (totals["put"], totals["refused"]) == (2, 5)


def test_what_is_taken_makes_no_room(center: TimeoutCenter) -> None:
    """Puts are counted, and not what waits."""
    center.queues.declare("mail", put_rate="2/h")
    assert accepted(put_to(center), 2) == [0, 1]
    center.ack(center.pop("mail", 10).messages)
    assert accepted(put_to(center), 2) == []


def test_one_more_may_be_put_when_it_was_said(center: TimeoutCenter) -> None:
    center.queues.declare("mail", put_rate="1/s")
    assert accepted(put_to(center), 2) == [0]
    with pytest.raises(RateLimitedError) as raised:
        center.put("mail", "more", b"x")
    assert 0 < raised.value.retry_after <= 1
    time.sleep(raised.value.retry_after)  # the server's own clock must advance
    center.put("mail", "more", b"x")


@pytest.mark.cluster
def test_each_key_is_counted_by_itself_and_what_has_none_is_not(center: TimeoutCenter) -> None:
    center.queues.declare("mail", key_put_rate="2/h")
    keys = ["a", "b", None]

    def put(number: int) -> None:
        center.put("mail", f"m-{number}", b"x", key=keys[number % 3])

    assert accepted(put, 12) == [0, 1, 2, 3, 4, 5, 8, 11]
    with pytest.raises(RateLimitedError) as raised:
        center.put("mail", "more", b"x", key="a")
    assert raised.value.limit == "key_put_rate"
    assert "each key of queue 'mail' takes 2/h (key_put_rate)" in str(raised.value)


def test_what_one_limit_refuses_is_not_counted_by_the_other(center: TimeoutCenter) -> None:
    center.queues.declare("mail", put_rate="4/h", key_put_rate="2/h", slots=1)
    assert accepted(put_to(center, key="a"), 50) == [0, 1]
    assert accepted(lambda n: center.put("mail", f"b-{n}", b"x", key="b"), 50) == [0, 1]
    with pytest.raises(RateLimitedError, match="put_rate"):
        center.put("mail", "c", b"x", key="c")


@pytest.mark.cluster
def test_a_rate_holds_over_all_slots(center: TimeoutCenter) -> None:
    center.queues.declare("mail", put_rate="20/h")
    assert len(accepted(put_to(center), 50)) == 20
    if not center.clustered:
        reshard_topic(center, "mail", 2, settle=0)
        assert accepted(lambda n: center.put("mail", f"n-{n}", b"x"), 50) == []


def test_a_queue_without_a_rate_keeps_nothing_of_it(center: TimeoutCenter) -> None:
    center.put("mail", "x", b"", key="a")
    assert not [key for key in center.client.scan_iter() if b"put-pace" in key]
    center.queues.declare("other", put_rate="1/h", key_put_rate="5/h")
    center.put("other", "x", b"", key="a")
    [pace] = [key for key in center.client.scan_iter() if b"put-pace" in key]
    assert 0 < center.client.ttl(pace) <= 3602
    center.queues.delete("mail")
    center.queues.delete("other")
    assert residue(center.client) == []


@pytest.mark.cluster
def test_keys_that_are_used_no_more_are_forgotten(center: TimeoutCenter) -> None:
    center.queues.declare("mail", key_put_rate="1000000/s", slots=1)
    for number in range(50):
        center.put("mail", f"m-{number}", b"x", key=f"k-{number}")
    assert center.client.zcard(center.registry.topic("mail").slot(0).put_pace) < 5


# -- what is not counted


def test_what_is_there_already_is_not_counted(center: TimeoutCenter) -> None:
    center.queues.declare("mail", put_rate="3/h")
    for _ in range(5):
        center.put("mail", "same", b"x", token="t")
        assert center.put("mail", "same", b"y", if_exists="keep").added is False
    assert center.put("mail", "same", b"other").id != "same"
    center.put("mail", "third", b"x")
    with pytest.raises(RateLimitedError):
        center.put("mail", "fourth", b"x", if_exists="keep")
    with pytest.raises(RateLimitedError):
        center.put("mail", "same", b"yet another")
    center.put("mail", "same", b"x", token="t")
    assert center.put("mail", "third", b"y", if_exists="replace").outcome == "replaced"
    assert center.admin.check("mail") == []
    center.cancel("same")
    center.cancel("third")
    assert ids(center) == []


@pytest.mark.cluster
def test_a_publish_that_is_repeated_is_counted_once(center: TimeoutCenter) -> None:
    center.queues.declare("mail", put_rate="2/h")
    for _ in range(5):
        center.put("mail", "one", b"x", token="me.1")
        center.ack(center.pop("mail").messages)
    center.put("mail", "two", b"x", token="me.2")
    with pytest.raises(RateLimitedError):
        center.put("mail", "three", b"x", token="me.3")


@pytest.mark.one_server("the proxy is before one server")
def test_a_publish_whose_reply_was_lost_is_counted_once(
    server: Server, center: TimeoutCenter
) -> None:
    center.queues.declare("mail", put_rate="2/h")
    with Proxy(server.port) as proxy, Connection(proxy.toc_url) as connection:
        producer = Producer(connection.channel())
        producer.publish("a", routing_key="other", retry=True)
        lost = proxy.drop_replies(b"first")
        producer.publish("x", routing_key="mail", headers={"id": "first"}, retry=True)
        assert lost.is_set()
        producer.publish("x", routing_key="mail", headers={"id": "second"}, retry=True)
        with pytest.raises(RateLimitedError):
            producer.publish("x", routing_key="mail", headers={"id": "third"}, retry=True)
    assert ids(center) == ["first", "second"]


def test_a_tasks_retry_is_neither_counted_nor_refused(
    connect: Connect, center: TimeoutCenter
) -> None:
    center.queues.declare("mail", put_rate="1/h")
    producer = Producer(connect().default_channel)
    producer.publish("x", routing_key="mail", headers={"id": "a", "retries": 1})
    producer.publish("x", routing_key="mail", headers={"id": "b"})
    producer.publish("x", routing_key="mail", headers={"id": "c", "retries": 2})
    with pytest.raises(RateLimitedError):
        producer.publish("x", routing_key="mail", headers={"id": "d", "retries": 0})
    assert ids(center) == ["a", "b", "c"]


@pytest.mark.cluster
def test_a_unique_message_that_is_refused_claims_nothing_and_one_that_is_there_is_not_counted(
    center: TimeoutCenter,
) -> None:
    center.queues.declare("mail", put_rate="3/h")
    for _ in range(5):
        assert center.put("mail", "a", b"", unique="weekly").id == "a"
        assert center.put("mail", "b", b"", unique="weekly").id == "a"
    assert accepted(put_to(center), 5) == [0, 1]
    with pytest.raises(RateLimitedError):
        center.put("mail", "c", b"", unique="daily")
    with pytest.raises(RateLimitedError):
        center.put("mail", "c", b"", unique="weekly-2", key="k")
    center.queues.alter("mail", put_rate=None)
    assert center.put("mail", "d", b"", unique="daily").id == "d"
    assert center.admin.check("mail") == []


@pytest.mark.parametrize("conflict", ["replace", "push_back"])
def test_what_takes_the_place_of_another_is_not_counted(
    center: TimeoutCenter, conflict: str
) -> None:
    center.queues.declare("mail", put_rate="1/h", key_put_rate="1/h")
    unique = Unique("weekly", conflict=conflict)
    for number in range(3):
        assert center.put("mail", f"m-{number}", b"%d" % number, key="k", unique=unique).id == "m-0"
    [found] = center.get("m-0")
    assert found.body == b"2"
    with pytest.raises(RateLimitedError):
        center.put("mail", "other", b"", key="k")
    assert center.admin.check("mail") == []


# -- while it is in use


@pytest.mark.cluster
def test_a_rate_is_changed_and_taken_away_at_once(center: TimeoutCenter) -> None:
    center.queues.declare("mail", put_rate="1/d")
    put = put_to(center)
    assert accepted(put, 3) == [0]
    center.queues.alter("mail", put_rate="600/m")
    time.sleep(0.11)  # the server's own clock must advance: one in 0.1 s
    center.put("mail", "soon", b"x")
    center.queues.alter("mail", put_rate=None)
    assert accepted(lambda n: center.put("mail", f"n-{n}", b"x"), 50) == list(range(50))


# -- many at once


@pytest.mark.cluster
def test_of_many_those_that_are_too_many_are_named(center: TimeoutCenter) -> None:
    center.queues.declare("mail", key_put_rate="3/h")
    messages = [NewMessage(f"m-{n}", b"x", key="ab"[n % 2]) for n in range(10)]
    messages.append(NewMessage("free", b"x"))
    with pytest.raises(RateLimitedError, match="4 of 11 messages were not put: each key of") as e:
        center.put_many("mail", messages, token="t")
    refused = [n for n, one in enumerate(e.value.results) if isinstance(one, RateLimitedError)]
    assert refused == [6, 7, 8, 9]
    assert [one.added for one in e.value.results[:6]] == [True] * 6
    assert e.value.retry_after == pytest.approx(1200, abs=20)
    assert len(ids(center)) == 7
    with pytest.raises(RateLimitedError) as again:
        center.put_many("mail", messages, token="t")
    assert [one.added for one in again.value.results[:6]] == [False] * 6
    check_slots(center, "mail")


@pytest.mark.cluster
def test_of_many_so_many_are_put_as_the_queue_takes(center: TimeoutCenter) -> None:
    """In the order of the list; over slots, and over many calls."""
    center.queues.declare("mail", put_rate="1200/d")
    with pytest.raises(RateLimitedError, match="300 of 1500 messages were not put"):
        center.put_many("mail", [(f"m-{n}", b"x") for n in range(1500)])
    assert center.counts("mail").ready == 1200


@pytest.mark.cluster
def test_of_many_with_ids_that_are_taken_none_is_put_beyond_the_rate(center: TimeoutCenter) -> None:
    center.queues.declare("mail", put_rate="4/h", slots=1)
    center.put("mail", "a", b"1")
    with pytest.raises(RateLimitedError, match="2 of 5") as raised:
        center.put_many("mail", [("a", b"1"), ("a", b"2"), ("a", b"3"), ("b", b""), ("a", b"4")])
    refused = [n for n, one in enumerate(raised.value.results) if isinstance(one, RateLimitedError)]
    assert refused == [2, 4]
    assert center.counts("mail").ready == 4
    assert center.admin.check("mail") == []


def test_a_list_whose_reply_was_lost_is_put_again_and_what_was_refused_is_not_taken_for_there(
    center: TimeoutCenter,
) -> None:
    center.queues.declare("mail", put_rate="3/h", slots=1)
    messages = [(f"m-{number}", b"x") for number in range(5)]
    with replies_lost(center), pytest.raises(PutManyError):
        center.put_many("mail", messages, token="t")
    with pytest.raises(RateLimitedError, match="2 of 5") as raised:
        center.put_many("mail", messages, token="t")
    assert [isinstance(one, RateLimitedError) for one in raised.value.results] == [
        *(False, False, False),
        *(True, True),
    ]
    center.queues.alter("mail", put_rate=None)
    again = center.put_many("mail", messages, token="t")
    assert [one.added for one in again] == [False] * 3 + [True] * 2


def test_a_server_that_is_away_is_said_before_a_rate(
    center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    center.queues.declare("mail", put_rate="1/h", slots=1)
    center.put("mail", "x", b"")
    run_each_put = center.runner.run_each_put
    replies: Iterator[Any] = iter([run_each_put, None])

    def run(calls: Any) -> Any:
        real = next(replies)
        return real(calls) if real else ([ServerError("no memory")] * len(calls), None)

    monkeypatch.setattr(center.runner, "run_each_put", run)
    monkeypatch.setattr("kombu_toc.center.put.MESSAGES_TOGETHER", 1)
    monkeypatch.setattr("kombu_toc.center.put.MESSAGES_PER_CALL", 1)
    with pytest.raises(PutManyError, match="no memory") as raised:
        center.put_many("mail", [("a", b""), ("b", b"")])
    assert [type(one) for one in raised.value.results] == [RateLimitedError, ServerError]


# -- senders


def test_who_sends_a_task_sees_it_at_once_and_it_is_not_sent_again(
    app: Celery, center: TimeoutCenter
) -> None:
    center.queues.declare("celery", put_rate="3/h")
    began = time.monotonic()
    remind = app.tasks["shop.remind"]
    send = lambda n: remind.apply_async((n,), retry=True, task_id=f"t-{n}")  # noqa: E731
    assert accepted(send, 8) == [0, 1, 2]
    assert time.monotonic() - began < 10  # five refusals, and no pause of a retry policy
    with pytest.raises(RateLimitedError) as raised:
        remind.apply_async((9,), countdown=5)
    assert raised.value.retry_after == pytest.approx(1200, abs=20)
    assert ids(center, "celery") == ["t-0", "t-1", "t-2"]


async def test_who_sends_tasks_in_an_event_loop_sees_it_too(
    app: Celery, center: TimeoutCenter
) -> None:
    center.queues.declare("celery", key_put_rate="2/h")
    remind = app.tasks["shop.remind"]
    refused = []

    for number in range(12):
        try:
            await aio.send(remind.s(number), headers={"x-key": f"c-{number % 2}"})
        except RateLimitedError as exc:
            refused.append((number, exc.limit))
    await aio.aclose(app)
    assert refused == [(number, "key_put_rate") for number in range(4, 12)]
    assert center.counts("celery").ready == 4


@pytest.mark.cluster
async def test_the_asynchronous_center_says_it(
    client: redis.Redis, server: Server | Cluster
) -> None:
    async with AsyncTimeoutCenter.from_url(server.toc_url) as center:
        await center.queues.declare("mail", put_rate="2/h")
        await center.put("mail", "a", b"")
        with pytest.raises(RateLimitedError, match="1 of 2 messages"):
            await center.put_many("mail", [("b", b""), ("c", b"")])
        with pytest.raises(RateLimitedError) as raised:
            await center.put("mail", "d", b"")
        assert raised.value.retry_after == pytest.approx(1800, abs=20)


@pytest.mark.cluster
def test_a_batch_that_is_refused_names_it_and_may_be_published_again(
    connection: Connection, center: TimeoutCenter
) -> None:
    """What of it was kept is neither kept twice nor counted twice."""
    if not hasattr(Producer(connection), "batch"):
        return  # Kombu before 5.7 has no batches
    from kombu.exceptions import BatchPublishError

    center.queues.declare("mail", put_rate="3/h")
    channel = connection.default_channel
    messages = [channel.prepare_message("x", headers={"id": f"m-{n}"}) for n in range(4)]

    def publish() -> None:
        batch = channel.create_publish_batch(10)
        for message in messages:
            batch.publish(message, exchange="", routing_key="mail")
        batch.flush()
        batch.close()

    with pytest.raises(BatchPublishError) as raised:
        publish()
    assert isinstance(raised.value.__cause__, RateLimitedError)
    assert ids(center) == ["m-0", "m-1", "m-2"]
    connection.transport.center.queues.alter("mail", put_rate="86400/d")
    time.sleep(1.01)  # the server's own clock must advance: one a second
    publish()
    assert ids(center) == ["m-0", "m-1", "m-2", "m-3"]


@pytest.mark.cluster
def test_of_puts_that_leave_together_each_is_told_by_itself(
    client: redis.Redis, server: Server | Cluster, center: TimeoutCenter
) -> None:
    center.queues.declare("mail", put_rate="5/h")

    async def put() -> list[Any]:
        async with AsyncTimeoutCenter.from_url(server.toc_url) as behind:
            await behind.queues.declare("mail")
            puts = (behind.put("mail", f"m-{number}", b"") for number in range(12))
            return await asyncio.gather(*puts, return_exceptions=True)

    told = in_loop(put())
    kept = {one.id for one in told if isinstance(one, Put)}
    assert len(kept) == 5
    assert [type(one) for one in told if not isinstance(one, Put)] == [RateLimitedError] * 7
    assert set(ids(center)) == kept


@pytest.mark.one_server("its memory is set on one server")
def test_a_server_without_memory_refuses_a_put_whole(center: TimeoutCenter) -> None:
    """And nothing is counted."""
    center.queues.declare("mail", put_rate="2/h", key_put_rate="2/h", slots=1)
    with full_server(center.client):
        for put in (center.put, lambda *args, **how: center.put_many("mail", [("x", b"")])):
            with pytest.raises((redis.exceptions.ResponseError, PutManyError)):
                put("mail", "a", b"", key="k")
    assert accepted(put_to(center, key="k"), 4) == [0, 1]
