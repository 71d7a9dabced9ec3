"""A pop of slots that are on several nodes of a Cluster: in the order of one pop, and nothing that
a node has given is dropped because another one fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from redis.exceptions import RedisError

from kombu_toc import Popped, TimeoutCenter, center_for
from kombu_toc.center.runner import Runner

from ..support.cluster import Cluster, Node
from ..support.inspection import check_slots, put_some

HOUR = 3600.0

IDS = [f"m{number}" for number in range(60)]


@pytest.fixture
def center(across: TimeoutCenter) -> TimeoutCenter:
    return across


def order(popped: Popped) -> list[tuple[int, int]]:
    return [(message.step, message.score) for message in popped.messages]


# -- order


@pytest.mark.parametrize("slots", [2, 8])
@pytest.mark.parametrize("limit", [1, 2, 7, 50])
def test_messages_of_several_nodes_come_in_the_order_of_one_pop(
    center: TimeoutCenter, slots: int, limit: int
) -> None:
    center.queues.declare("mail", slots=slots)
    for number, id in enumerate(IDS):
        center.put("mail", id, b"", priority=(0, 9, 3)[number % 3])
    found = []
    while popped := center.pop("mail", limit):
        assert len(popped.messages) == min(limit, len(IDS) - len(found))
        found += order(popped)
        assert popped.more is (len(found) < len(IDS))
        center.ack(popped.messages)
        if not popped.more:
            break
    assert found == sorted(found)
    assert center.pop("mail", limit).messages == []


def test_what_came_back_goes_before_what_is_due_on_other_nodes(center: TimeoutCenter) -> None:
    put_some(center, "mail", IDS)
    back = center.pop("mail", 20).messages[5:8]
    for message in back:
        center.reject(message, requeue=True)
    [first] = center.pop("mail").messages
    others = center.pop("mail", 3).messages
    assert {first.id, *(message.id for message in others[:2])} == {message.id for message in back}


def put_mostly_in_one_slot(center: TimeoutCenter) -> None:
    topic = center.queues.declare("mail", slots=8)
    one = next(id for id in IDS if topic.slot_for(id).number == 5)
    put_some(center, "mail", 150, "n", basis=one)
    put_some(center, "mail", IDS)


def test_a_slot_with_most_of_what_is_due_gives_most(center: TimeoutCenter) -> None:
    """However much more than its share a slot has to give, it is all in its turn."""
    put_mostly_in_one_slot(center)
    popped = center.pop("mail", 160)
    assert [message.id for message in popped.messages[:150]] == [f"n{n}" for n in range(150)]
    assert [message.id for message in popped.messages[150:]] == IDS[:10]


def test_what_has_expired_takes_the_place_of_nothing(center: TimeoutCenter) -> None:
    for number, id in enumerate(IDS):
        center.put("mail", id, b"", delay=-1, expiration=0.001 if number % 2 else None)
    popped = center.pop("mail", 20)
    assert [message.id for message in popped.messages] == IDS[:40:2]


def test_a_waiting_pop_gives_what_is_due_first(center: TimeoutCenter) -> None:
    put_some(center, "mail", IDS)
    popped = center.pop(["mail", "sms"], 5, wait=5)
    assert [message.id for message in popped.messages] == IDS[:5]


# -- a node that fails


@contextmanager
def refusing(node: Node, command: str) -> Iterator[None]:
    """A node on which a pop that would take a message fails, before it has written anything."""
    node("ACL", "SETUSER", "default", f"-{command}")
    try:
        yield
    finally:
        node("ACL", "SETUSER", "default", f"+{command}")


def of_others(cluster: Cluster, center: TimeoutCenter, node: Node) -> list[str]:
    topic = center.registry.topic("mail")
    return [id for id in IDS if cluster.node_of(topic.slot_for(id).body) is not node]


@pytest.mark.parametrize("how", [{}, {"wait": 0}, {"wait": 5.0}])
def test_what_other_nodes_gave_is_returned_with_the_error_of_one_that_fails(
    cluster: Cluster, center: TimeoutCenter, how: Any, caplog: pytest.LogCaptureFixture
) -> None:
    put_some(center, "mail", IDS)
    failing = cluster.node_of(center.registry.topic("mail").slot(3).body)
    others = of_others(cluster, center, failing)
    with refusing(failing, "hmget"), caplog.at_level(logging.WARNING, "kombu_toc"):
        popped = center.pop("mail", 100, **how)
        assert [message.id for message in popped.messages] == others
        [error] = {str(error) for error in popped.errors}
        assert "hmget" in error
        assert "'mail'" in caplog.text
        assert center.counts("mail").in_flight == len(others)
        with pytest.raises(RedisError, match="hmget"):
            center.pop("mail", 100)
    rest = center.pop("mail", 100)
    assert (len(rest.messages), rest.errors) == (len(IDS) - len(others), [])
    center.ack([*popped.messages, *rest.messages])
    check_slots(center, "mail")


def test_a_node_that_has_died_keeps_nothing_back_that_others_have(
    start_cluster: Callable[..., Cluster],
) -> None:
    cluster = start_cluster()
    center = center_for(cluster.toc_url)
    put_some(center, "mail", IDS)
    home = cluster.node_of(center.keys.topics)
    topic = center.registry.topic("mail")
    nodes = [cluster.node_of(slot.body) for slot in topic.all_slots()]
    dead = next(node for node in nodes if node is not home)  # no topic is found without that
    others = of_others(cluster, center, dead)
    cluster.kill(dead)
    popped = center.pop("mail", 100)
    assert [message.id for message in popped.messages] == others
    assert popped.errors
    with pytest.raises(RedisError):
        center.pop("mail", 100)


def test_what_a_pop_had_when_it_was_interrupted_is_given_back(
    cluster: Cluster, center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt cannot be timed from outside: it comes with the reply of the first slots."""
    put_mostly_in_one_slot(center)
    run_each, rounds = Runner.run_each, 0

    def interrupted(self: Runner, calls: Any) -> Any:
        nonlocal rounds
        if any(getattr(call.script, "name", "") == "pop" for call in calls):
            rounds += 1
            if rounds == 3:
                raise KeyboardInterrupt
        return run_each(self, calls)

    monkeypatch.setattr(Runner, "run_each", interrupted)
    with pytest.raises(KeyboardInterrupt):
        center.pop("mail", 160)
    assert rounds == 3
    monkeypatch.undo()
    counts = center.counts("mail")
    assert (counts.in_flight, counts.ready) == (0, 210)
    assert [message.id for message in center.pop("mail", 3).messages] == ["n0", "n1", "n2"]
    check_slots(center, "mail")
