"""A transient queue whose deletion fails is deleted as soon as the server can be reached again."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import redis
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.pidbox import Mailbox
from redis.backoff import NoBackoff
from redis.retry import Retry

from kombu_toc import TimeoutCenter
from kombu_toc.consumer.lease_keeper import LeaseKeeper
from kombu_toc.scripts.call import ScriptCall

from ..support.inspection import keys_left, slot_keys
from ..support.proxy import Proxy
from ..support.waiting import wait_until

pytestmark = pytest.mark.one_server("the proxy that cuts connections stands before one")

REPLIES = Queue("me.reply", Exchange("reply", "direct"), "me", exclusive=True, expires=10)

Connect = Callable[..., Connection]


@pytest.fixture
def consumer(proxy: Proxy, client: redis.Redis) -> Iterator[Connection]:
    """A connection by way of the proxy; the server is empty."""
    with Connection(proxy.toc_url) as made:
        made.connect()
        yield made
        proxy.thaw()
        proxy.accept()


def reply(connection: Connection, body: str) -> None:
    Producer(connection, REPLIES.exchange).publish(body, routing_key="me")


def test_a_reply_that_comes_after_a_failed_deletion_does_not_stay(
    proxy: Proxy, consumer: Connection, connect: Connect, client: redis.Redis
) -> None:
    """K6: the queue, its binding, and what was put there until the server can be reached again."""
    worker = connect()
    with Consumer(consumer.default_channel, [REPLIES]):
        proxy.refuse()
    reply(worker, "late")
    assert slot_keys(client)
    proxy.accept()
    wait_until(lambda: not slot_keys(client), what=lambda: slot_keys(client))
    wait_until(lambda: worker.transport.center.registry.declared("me.reply") is None)
    reply(worker, "nobody is bound any more")
    assert keys_left(client) == []


def test_answers_that_have_come_are_not_lost_with_the_deletion_of_their_queue(
    proxy: Proxy, consumer: Connection, client: redis.Redis
) -> None:
    """Kombu deletes the queue when it has the answers, before it returns them."""
    mailbox = Mailbox("test")(consumer)
    channel = consumer.default_channel
    queue = mailbox.reply_queue
    queue(channel).declare()
    channel.basic_publish(
        channel.prepare_message(
            b'{"ticket": "T", "pong": 1}', content_type="application/json", content_encoding="utf-8"
        ),
        mailbox.reply_exchange.name,
        mailbox.oid,
    )

    def answered(body: object) -> None:
        proxy.refuse()

    assert mailbox._collect("T", limit=1, timeout=5, callback=answered, channel=channel)
    proxy.accept()
    wait_until(lambda: keys_left(client) == [], what=lambda: keys_left(client))


def test_a_queue_that_is_declared_anew_is_not_hit_by_the_deletion_of_the_one_before(
    proxy: Proxy, consumer: Connection, connect: Connect, client: redis.Redis
) -> None:
    """A worker's own queues have names that stay the same: it declares them when it reconnects."""
    heartbeat = consumer.transport.lease_keeper
    with Consumer(consumer.default_channel, [REPLIES]):
        proxy.refuse()
    assert heartbeat.deletions
    proxy.accept()
    with consumer.channel() as channel:
        REPLIES(channel).declare()
        assert not heartbeat.deletions
        reply(connect(), "kept")
        [waiting] = slot_keys(client)[:1]
        heartbeat.delete_later("another", {})
        wait_until(lambda: not heartbeat.deletions)
        assert client.exists(waiting)
        assert REPLIES(channel).get(no_ack=True).payload == "kept"


def test_a_deletion_that_is_cut_in_the_middle_is_done_to_its_end(client: redis.Redis) -> None:
    """The queue is not declared any more then, and what is in it is still there."""
    center = TimeoutCenter(client)
    cut = threading.Event()

    cutting = TimeoutCenter(client)
    run = cutting.runner.run

    def run_or_cut(call: ScriptCall) -> object:
        of_slot = call.script.name == "discard" and "{me.reply:0}" in call.keys[0]
        if of_slot and not cut.is_set():
            cut.set()
            raise redis.ConnectionError("cut")
        return run(call)

    cutting.runner.run = run_or_cut

    center.queues.declare("me.reply", slots=1, expires=60_000)
    center.put("me.reply", "old", b"x")
    keeper = LeaseKeeper(lambda: cutting)
    keeper.delete_later("me.reply", {})
    assert cut.wait(10)
    assert center.registry.declared("me.reply") is None
    wait_until(lambda: not keeper.deletions)
    assert keys_left(client) == []


def test_a_deletion_that_reaches_the_server_late_does_nothing(
    proxy: Proxy, client: redis.Redis
) -> None:
    """It was sent to a server that did not answer; when that does, there may be another queue of
    that name."""
    center = TimeoutCenter(client)
    sent = threading.Event()

    # Without redis-py's retries: the keeper's thread would go on with them, behind this test.
    through = redis.Redis(port=proxy.port, socket_timeout=0.3, retry=Retry(NoBackoff(), 0))
    hanging = TimeoutCenter(through)
    run = hanging.runner.run

    def freeze_and_run(call: ScriptCall) -> object:
        if call.script.name == "discard" and call.args[0] and not sent.is_set():
            proxy.freeze()
            sent.set()
        return run(call)

    hanging.runner.run = freeze_and_run
    keeper = LeaseKeeper(lambda: hanging)
    center.queues.declare("me.reply", slots=1, expires=60_000)
    center.put("me.reply", "old", b"x")
    keeper.delete_later("me.reply", {})
    assert sent.wait(10)
    began = time.monotonic()
    keeper.withdraw_deletion("me.reply")
    assert time.monotonic() - began > 1  # until the call that is on its way is too late
    center.put("me.reply", "new", b"x")
    proxy.thaw()
    with contextlib.closing(redis.Redis(port=proxy.port)) as other:
        other.ping()  # what had piled up has arrived
    wait_until(lambda: not keeper.deletions)
    assert center.counts("me.reply").waiting == 2
