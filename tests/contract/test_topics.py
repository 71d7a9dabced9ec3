"""Topics at run time: altered while they are in use, described, deleted if they are empty, and
declared again by whoever uses them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from kombu import Connection, Producer, Queue

from kombu_toc import (
    ConfigurationError,
    Description,
    Limit,
    PriorityStepsError,
    SlotCountError,
    TimeoutCenter,
    UnknownTopicError,
)
from kombu_toc.center import registry
from kombu_toc.center.registry import AGING, RELOAD
from kombu_toc.consumer.poller import REREAD

from ..support import nursery
from ..support.cases import each
from ..support.cluster import Cluster
from ..support.fixtures import drain
from ..support.inspection import check_slots, residue
from ..support.servers import Server
from ..support.waiting import at_once, running

TOPICS = "toc:{toc}:topics"

Connect = Callable[..., Connection]


def stored(client: redis.Redis, name: str = "mail") -> dict[str, Any]:
    return json.loads(client.hget(TOPICS, name))


def age(center: TimeoutCenter, seconds: float) -> None:
    """Let what this center knows be so much older."""
    clock = center.registry.clock
    center.registry.clock = lambda: clock() + seconds


# -- alter


def test_limits_are_changed_and_taken_back(center: TimeoutCenter, client: redis.Redis) -> None:
    center.queues.declare("mail", slots=2, retries=3, visibility=90)
    altered = center.queues.alter("mail", retries=5, visibility=30, retry_backoff=2, dead_limit=7)
    assert altered.declaration == center.registry.declared("mail").declaration
    assert (altered.slots, altered.declaration.retries) == (2, 5)
    center.put("mail", "x", b"")
    [message] = center.pop("mail").messages
    assert message.retries_left == 5
    back = center.queues.alter("mail", retries=None, visibility=None, dead_limit=None)
    assert stored(client) == {
        "slots": 2,
        "retries": 16,
        "retry_backoff": 2,
        "steps": [0, 3, 6, 9],
    } | {"bases": False}
    assert back.declaration.visibility is None
    assert center.queues.alter("mail") == back, "nothing is changed"


@each(
    ("limits", "error", "said"),
    [
        ({"retries": 99}, ConfigurationError, "retries must be a whole number from 0 to 31"),
        ({"visibility": 0}, ConfigurationError, "visibility timeout must be a number of seconds"),
        ({"steps": [3]}, ConfigurationError, "priority_steps must be increasing integers"),
        ({"retrys": None}, ConfigurationError, "unknown limit 'retrys'; there are retries,"),
        ({"slots": 4}, SlotCountError, "'celery toc reshard mail --slots 4'"),
        ({"expires": 4}, ConfigurationError, "settled when it is declared"),
    ],
)
def test_what_cannot_be_altered_changes_nothing(
    center: TimeoutCenter,
    client: redis.Redis,
    limits: dict[str, Any],
    error: type[Exception],
    said: str,
) -> None:
    center.queues.declare("mail", retries=3)
    before = stored(client)
    with pytest.raises(error, match=said):
        center.queues.alter("mail", **{"dead_age": 60, **limits})
    assert stored(client) == before


def test_a_topic_that_nobody_has_declared_is_neither_altered_nor_described(
    center: TimeoutCenter, client: redis.Redis
) -> None:
    for use in (
        lambda: center.queues.alter("mail", retries=3),
        lambda: center.queues.describe("mail"),
    ):
        with pytest.raises(UnknownTopicError, match="there is no queue 'mail'"):
            use()
    assert residue(client) == []


def test_what_several_alter_at_once_all_holds(client: redis.Redis) -> None:
    """Each names another limit, again and again; what newer releases have written stays."""
    names = (
        "retries",
        "visibility",
        "retry_backoff",
        "retry_backoff_max",
        "dead_age",
        "dead_limit",
    )
    TimeoutCenter(client).queues.declare("mail")
    client.hset(TOPICS, "mail", json.dumps({**stored(client), "of_tomorrow": [1]}))

    def alter(name: str) -> None:
        own = TimeoutCenter(client)
        for value in range(10, 31):
            own.queues.alter("mail", **{name: value})

    at_once(alter, names)
    assert {name: stored(client)[name] for name in names} == dict.fromkeys(names, 30)
    assert stored(client)["of_tomorrow"] == [1]


def test_messages_under_steps_that_are_removed_are_delivered(client: redis.Redis) -> None:
    """Those that wait, that are in flight and come back, that are dead, and that a producer puts
    who does not know yet; and nothing new is put there."""
    center, late, consumer = (TimeoutCenter(client) for _ in range(3))
    center.queues.declare("mail", slots=1, steps=(0, 3, 6, 9), retries=3)
    for priority in (9, 6, 3, 0):
        center.put("mail", f"{priority}", b"", priority=priority)
    taken = consumer.pop("mail", 2).messages
    late.registry.topic("mail")
    altered = center.queues.alter("mail", steps=(0, 5))
    assert (altered.steps, altered.open_steps) == ((0, 3, 5, 6, 9), (0, 5))
    late.put("mail", "late", b"", priority=9)
    center.put("mail", "new", b"", priority=9)
    assert client.zrange(altered.slot(0).store(5), 0, -1) == [b"new"]
    consumer.release(taken[:1])
    center.reject(taken[1], requeue=True)
    found = {message.id for message in TimeoutCenter(client).pop("mail", 10).messages}
    assert found == {"0", "3", "6", "9", "late", "new"}
    assert center.admin.check("mail") == []
    check_slots(center, "mail")
    assert center.queues.alter("mail", steps=None).open_steps == (0, 3, 6, 9)


def test_steps_that_were_altered_are_no_error_for_who_has_others(
    client: redis.Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else to alter them would stop who sends with the steps that the queue was declared with."""
    monkeypatch.setattr(registry, "_warned", set())
    sender = TimeoutCenter(client, steps=(0, 5))
    sender.put("mail", "x", b"", priority=5)
    with pytest.raises(PriorityStepsError, match="celery toc topic set mail --priority-steps 0,9"):
        TimeoutCenter(client, steps=(0, 9)).queues.declare("mail")
    TimeoutCenter(client).queues.alter("mail", steps=(0, 9))
    age(sender, RELOAD)
    sender.put("mail", "y", b"", priority=9)
    sender.queues.declare("mail")
    [line] = [record.getMessage() for record in caplog.records]
    assert "with steps=0,9, and this process asks for steps=0,5: the former stands" in line
    assert {message.id for message in sender.pop("mail", 5).messages} == {"x", "y"}


def test_more_steps_than_a_lease_can_name_are_refused(center: TimeoutCenter) -> None:
    center.queues.declare("mail")
    for first in (10, 20):
        center.queues.alter("mail", steps=(0, *range(first, first + 9)))
    with pytest.raises(ConfigurationError, match="has had 22 priority steps"):
        center.queues.alter("mail", steps=(0, *range(30, 39)))


# -- describe


def test_a_description_says_where_each_limit_comes_from(client: redis.Redis) -> None:
    center = TimeoutCenter(client, retries=4)
    center.queues.declare("mail", slots=2, visibility=90)
    center.put("mail", "x", b"")
    center.put("mail", "y", b"", delay=60)
    center.queues.pause("mail")
    found = center.queues.describe("mail")
    assert isinstance(found, Description)
    assert (found.topic, found.slots, found.paused, found.consumers) == ("mail", 2, True, [])
    assert found.counts == (1, 1, 0, 0)
    assert found.limits["retries"] == Limit(4, "declared")
    assert found.limits["visibility"] == Limit(90.0, "declared")
    assert found.limits["dead_age"] == Limit(7 * 86400.0, "default")
    assert found.limits["steps"] == Limit((0, 3, 6, 9), "declared")
    assert (found.closed_steps, found.expires_ms, found.draining_counts) == ((), None, ())
    center.queues.declare("reply", expires=5000)
    assert center.queues.describe("reply").expires_ms == 5000


# -- delete


@pytest.mark.parametrize("state", ["scheduled", "in flight", "dead"])
def test_a_topic_that_holds_a_message_is_not_deleted_if_it_is_to_be_empty(
    center: TimeoutCenter, client: redis.Redis, state: str
) -> None:
    center.put("mail", "x", b"", delay=60 if state == "scheduled" else None)
    if state != "scheduled":
        [message] = center.pop("mail").messages
        if state == "dead":
            center.reject(message, requeue=False)
    assert center.queues.delete("mail", if_empty=True) is False
    assert center.queues.names() == ["mail"]
    center.cancel("x", in_flight=True)
    assert center.queues.delete("mail", if_empty=True, settle=0) is True
    assert residue(client) == []


def test_a_message_that_is_put_while_its_topic_is_deleted_stays(
    center: TimeoutCenter, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    center.queues.declare("mail", slots=4, retries=3)
    center.queues.pause("mail")
    sender = TimeoutCenter(client)
    sender.registry.topic("mail")
    undeclare = center.queues._undeclare

    def undeclare_and_send(name: str) -> None:
        undeclare(name)
        sender.put("mail", "x", b"", delay=1)

    monkeypatch.setattr(center.queues, "_undeclare", undeclare_and_send)
    assert center.queues.delete("mail", if_empty=True) is False
    assert [found.id for found in center.get("x")] == ["x"]
    assert (stored(client)["retries"], center.queues.paused()) == (3, {"mail"})
    check_slots(center, "mail")


PUTS = """
import sys
from kombu_toc import center_for
center = center_for(sys.argv[1])
center.registry.topic("mail")
print("has read it", flush=True)
for line in sys.stdin:
    center.put("mail", line.strip(), b"", delay=0.1)
    print("has put it", flush=True)
"""


@contextmanager
def a_producer(url: str) -> Iterator[Callable[[str], None]]:
    """A process that has read how a topic is declared, and puts messages into it when told."""
    command = [sys.executable, "-c", PUTS, url]
    with nursery.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        try:
            assert process.stdout.readline() == "has read it\n"

            def put(id: str) -> None:
                process.stdin.write(f"{id}\n")
                assert process.stdout.readline() == "has put it\n"

            yield put
        finally:
            process.kill()


@pytest.mark.parametrize("anew", [None, 2, 16])
def test_what_another_process_puts_by_what_it_has_read_before_stays(
    server: Server | Cluster, center: TimeoutCenter, client: redis.Redis, anew: int | None
) -> None:
    """Although it puts nothing later, and whoever declares the topic anew."""
    center.queues.declare("mail", slots=4, retries=3)
    center.put("mail", "first", b"")
    with ThreadPoolExecutor() as pool, a_producer(server.toc_url) as put:
        center.ack(center.pop("mail").messages)
        deleted = pool.submit(TimeoutCenter(client).queues.delete, "mail", if_empty=True)
        while TimeoutCenter(client).registry.declared("mail") is not None:
            assert not deleted.done()
        if anew:
            TimeoutCenter(client).queues.declare("mail", slots=anew)
        put("x")
        assert deleted.result(timeout=10) is False
    looking = TimeoutCenter(client, grace=0)
    assert looking.registry.declared("mail").slots == (anew or 4)
    assert looking.registry.declared("mail").declaration.retries == (16 if anew else 3)
    assert [found.id for found in looking.get("x")] == ["x"]
    [message] = looking.pop(["mail"], wait=10).messages
    assert message.id == "x"
    assert looking.ack([message]) == 1


def test_an_empty_topic_is_deleted_when_nobody_can_have_it_read_any_more(
    center: TimeoutCenter, client: redis.Redis
) -> None:
    center.queues.declare("mail")
    began = time.monotonic()
    assert center.queues.delete("mail", if_empty=True) is True
    assert time.monotonic() - began >= 5
    assert (center.queues.names(), residue(client)) == ([], [])


# -- who uses a topic that is gone


@pytest.mark.parametrize("flush", [True, False])
def test_a_producer_declares_again_what_is_gone(
    client: redis.Redis, connection: Connection, flush: bool
) -> None:
    """So that its messages are found by their ids: within five seconds, with the next put."""
    sender, center = TimeoutCenter(client), TimeoutCenter(client)
    transports = connection.transport.center
    Queue("kombu", queue_arguments={"x-retries": 3})(connection.default_channel).declare()
    sender.queues.declare("mail", retries=3)
    if flush:
        client.flushall()
    else:
        center.queues.delete("mail")
        center.queues.delete("kombu")
    publisher = Producer(connection)

    def put(id: str) -> None:
        sender.put("mail", id, b"", delay=60)
        publisher.publish("x", routing_key="kombu", headers={"id": id, "x-delay": 60_000})

    put("first")
    assert center.get("first") == [], "they remember the declarations, and ask nobody"
    age(sender, RELOAD if sender.clustered else AGING)
    age(transports, RELOAD if sender.clustered else AGING)
    put("second")
    for id in ("first", "second"):
        assert sorted(found.topic for found in center.get(id)) == ["kombu", "mail"]
    assert stored(client)["retries"] == stored(client, "kombu")["retries"] == 3


def test_a_consumer_declares_again_what_is_gone(
    client: redis.Redis, connection: Connection
) -> None:
    got: list[Any] = []
    consumer = connection.Consumer(
        Queue("mail", queue_arguments={"x-retries": 3}),
        callbacks=[lambda body, message: (got.append(body), message.ack())],
    )
    with consumer:
        drain(connection, timeout=0.1)
        client.hdel(TOPICS, "mail")
        turns = running(REREAD + 1)
        assert any(client.hexists(TOPICS, "mail") or drain(connection, 0.05) for _ in turns)
        assert stored(client)["retries"] == 3


# -- how soon it is known, and what that costs


@pytest.mark.one_server("on a Cluster the declaration may be on another node")
def test_a_put_reads_the_declaration_along_with_the_message(
    client: redis.Redis, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer that sends all the time has no round trip for it."""
    center = TimeoutCenter(client)
    publisher = Producer(connection)
    for sender, put in (
        (center, lambda: center.put("mail", f"{time.monotonic_ns()}", b"")),
        (connection.transport.center, lambda: publisher.publish("x", routing_key="mail")),
    ):
        put()
        for older, visibility, reads in ((AGING, 45, 0), (RELOAD, None, 1)):
            TimeoutCenter(client).queues.alter("mail", visibility=visibility)
            age(sender, older)
            with monkeypatch.context() as patched:
                read = count_reads(patched, sender)
                put()
            assert sender.registry.known("mail").declaration.visibility == visibility
            assert len(read) == reads


def count_reads(patched: pytest.MonkeyPatch, center: TimeoutCenter) -> list[Any]:
    """The reads of declarations that take a round trip of their own from now on."""
    read: list[Any] = []
    hget = center.client.hget
    patched.setattr(center.client, "hget", lambda *args: read.append(args) or hget(*args))
    return read
