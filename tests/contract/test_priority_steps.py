"""Priority steps belong to a topic: nothing is put where its consumers do not look."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import redis
from kombu import Connection, Consumer, Producer, Queue

from kombu_toc import PriorityStepsError, TimeoutCenter
from kombu_toc.center.reshard import reshard_topic
from kombu_toc.errors import ConfigurationError
from kombu_toc.model.results import OTHER_STEP, WAITING

from ..support.fixtures import drain
from ..support.inspection import announced, check_slots, residue

TEN = tuple(range(10))


def kept(client: redis.Redis) -> dict[str, object]:
    return json.loads(client.hget("toc:{toc}:topics", "mail"))


def test_who_says_nothing_uses_the_steps_that_a_topic_was_declared_with(
    client: redis.Redis,
) -> None:
    sender, consumer = TimeoutCenter(client, steps=TEN), TimeoutCenter(client)
    for priority in (5, 4, 9):
        sender.put("mail", f"at {priority}", b"", priority=priority)
    assert consumer.counts("mail").ready == 3
    assert [found.state for found in consumer.get("at 5")] == [WAITING]
    assert len(consumer.scan("mail").messages) == 3
    assert consumer.admin.repair("mail") == []
    popped = consumer.pop("mail", 10).messages
    assert [message.id for message in popped] == ["at 4", "at 5", "at 9"]
    assert consumer.ack(popped) == 3
    consumer.put("mail", "x", b"", priority=5)
    assert [message.id for message in sender.pop("mail").messages] == ["x"]


@pytest.mark.parametrize("first", [None, (0, 5)])
def test_other_steps_than_the_declared_ones_are_an_error_that_names_both(
    client: redis.Redis, first: tuple[int, ...] | None
) -> None:
    TimeoutCenter(client, steps=first).put("mail", "x", b"")
    other = TimeoutCenter(client, steps=TEN)
    declared = "0,3,6,9" if first is None else "0,5"
    for use in (
        lambda: other.queues.declare("mail"),
        lambda: other.put("mail", "y", b""),
        lambda: other.pop("mail"),
        lambda: TimeoutCenter(client).queues.declare("mail", steps=TEN),
    ):
        for _ in range(2):
            with pytest.raises(PriorityStepsError) as told:
                use()
            assert isinstance(told.value, ConfigurationError)
            assert f"with priority_steps {declared}, not 0,1,2,3,4,5,6,7,8,9;" in str(told.value)
            assert f"set priority_steps to {declared}, or leave it out" in str(told.value)
    assert other.counts("mail").ready == 1, "tools use the topic's own"


def test_kombu_tells_who_declares_or_publishes_with_other_steps(
    connect: Callable[..., Connection],
) -> None:
    ten, silent, default = connect(priority_steps=TEN), connect(), connect(priority_steps="0,3,6,9")
    Queue("mail").bind(ten.default_channel).declare()
    with pytest.raises(PriorityStepsError, match="0,3,6,9"):
        Queue("mail").bind(default.default_channel).declare()
    for _ in range(2):
        with pytest.raises(PriorityStepsError, match="0,3,6,9"):
            Producer(default).publish("y", routing_key="mail")
    Producer(silent).publish("x", routing_key="mail", priority=5)
    got = []
    with Consumer(silent, [Queue("mail")], callbacks=[lambda body, _: got.append(body)]):
        drain(silent)
    assert got == ["x"]


def test_the_options_of_one_queue_may_name_its_steps(connect: Callable[..., Connection]) -> None:
    connection = connect(toc_topics={"mail": {"steps": [0, 5]}}, priority_steps=TEN)
    for name in ("mail", "news"):
        Queue(name).bind(connection.default_channel).declare()
    center = connection.transport.center
    assert center.registry.declared("mail").steps == (0, 5)
    assert center.registry.declared("news").steps == TEN
    assert center.registry.declared("mail").slot(0).stores[1].endswith("store:5")


def test_queues_that_go_away_by_themselves_are_used_whatever_their_steps(
    connect: Callable[..., Connection],
) -> None:
    """Replies: who asks and who answers are set up apart."""
    asks, answers = connect(), connect(priority_steps=(0, 1))
    got = []
    queue = Queue("reply", exclusive=True)
    with Consumer(asks, [queue], callbacks=[lambda body, _: got.append(body)]):
        Producer(answers).publish("answer", routing_key="reply", priority=1)
        Queue("reply", exclusive=True).bind(answers.default_channel).declare()
        drain(asks)
    assert got == ["answer"]


def test_resharding_keeps_the_steps(client: redis.Redis) -> None:
    center = TimeoutCenter(client, steps=TEN)
    center.queues.declare("mail", slots=1)
    center.put("mail", "x", b"", priority=7)
    reshard_topic(TimeoutCenter(client), "mail", 4, settle=0)
    assert kept(client)["steps"] == list(TEN)
    assert [message.id for message in TimeoutCenter(client).pop("mail").messages] == ["x"]


# -- what waits under another step


@pytest.mark.parametrize("step", [5, 42])
def test_repair_does_not_bury_what_waits_under_another_step(
    client: redis.Redis, center: TimeoutCenter, step: int
) -> None:
    """Put by somebody of an older release, who was told other steps."""
    slot = center.queues.declare("mail", slots=1).slot(0)
    center.put("mail", "now", b"", priority=3)
    center.put("mail", "later", b"", priority=3, delay=3600)
    client.rename(slot.stores[1], slot.store(step))
    client.delete(slot.announced_times, center.keys.wake("mail"))
    place = (slot.store(step),)
    for _ in range(2):  # check changes nothing
        faults = {(fault.kind, fault.id, fault.places) for fault in center.admin.check("mail")}
        assert faults == {(OTHER_STEP, "now", place), (OTHER_STEP, "later", place)}
    center.admin.repair("mail")
    assert center.admin.check("mail") == []
    assert (center.counts("mail").ready, center.counts("mail").scheduled) == (1, 1)
    assert len(announced(center, "mail")) == 1
    [message] = center.pop("mail", 5).messages
    assert message.id == "now"
    assert center.registry.topic("mail").steps[message.step] == {5: 3, 42: 9}[step]
    check_slots(center, "mail")


def test_of_an_id_under_two_steps_the_one_that_is_looked_at_stays(center: TimeoutCenter) -> None:
    slot = center.queues.declare("mail", slots=1).slot(0)
    center.put("mail", "x", b"")
    center.client.zadd(slot.store(5), {"x": 40})
    center.admin.repair("mail")
    assert center.admin.check("mail") == []
    assert not center.client.exists(slot.store(5))
    assert center.ack(center.pop("mail").messages) == 1


def test_what_waits_under_another_step_is_deleted_with_its_topic(center: TimeoutCenter) -> None:
    slot = center.queues.declare("mail", slots=1).slot(0)
    center.put("mail", "x", b"", priority=3)
    center.client.rename(slot.stores[1], slot.store(5))
    center.queues.delete("mail")
    assert residue(center.client) == []
