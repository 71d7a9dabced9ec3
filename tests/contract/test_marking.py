"""What is acknowledged while its task runs on stays in flight until that has ended."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_toc import Delivery, TimeoutCenter
from kombu_toc.center.calls import PutRequest
from kombu_toc.center.clock import MAY
from kombu_toc.center.pop import mark_calls
from kombu_toc.center.upkeep import Part, keep
from kombu_toc.model.delivery import trait

from ..support.inspection import announced, check_slots, put_some, residue, slot_keys, time_passes

pytestmark = pytest.mark.cluster


def delivered(center: TimeoutCenter, id: str, **put: Any) -> Delivery:
    center.queues.declare("mail", slots=1)
    center.put("mail", id, id.encode(), **put)
    [delivery] = center.pop("mail").messages
    return delivery


def mark(center: TimeoutCenter, *deliveries: Delivery) -> list[Delivery]:
    """Which of them are not marked."""
    calls = mark_calls(center.registry.topic_of, deliveries)
    return [one for refused in center.runner.run_all(calls) for one in refused]


def token_of(center: TimeoutCenter, delivery: Delivery) -> str:
    slot = center.registry.topic(delivery.topic).slot(delivery.slot)
    return (center.client.hget(slot.tokens, delivery.id) or b"").decode()


@pytest.mark.parametrize(
    "traits",
    [{}, {"visibility": 30}, {"visibility": 30, "max_lease": 600, "expiration": 60}],
    ids=["none", "visibility", "all"],
)
def test_what_is_marked_says_so_in_its_token_and_keeps_all_else(
    center: TimeoutCenter, traits: dict[str, float]
) -> None:
    first = delivered(center, "x", **traits)
    center.release(first)
    [delivery] = center.pop("mail").messages  # its token names a second pop
    assert mark(center, delivery) == []
    token = token_of(center, delivery)
    assert trait(token, "a") == 1
    assert token.replace(";a1", "").replace(",a1", "") == delivery.birth
    assert mark(center, delivery) == []  # its reply was lost, and it is said again
    assert token_of(center, delivery) == token
    check_slots(center, "mail")


def test_what_is_marked_is_renewed_and_acknowledged_as_before(center: TimeoutCenter) -> None:
    delivery = delivered(center, "x")
    mark(center, delivery)
    assert center.extend([delivery]) == []
    [found] = center.get("x")
    assert found.state == "in flight"
    settled = center.ack([delivery])
    assert (settled, settled.stale) == (1, [])
    assert not residue(center.client)


def test_what_another_delivery_has_or_nobody_is_not_marked(center: TimeoutCenter) -> None:
    before = delivered(center, "x")
    center.reject(before, requeue=True)
    assert mark(center, before) == [before]
    [now] = center.pop("mail").messages
    gone = delivered(center, "y")
    center.ack([gone])
    assert mark(center, before, gone, now) == [before, gone]
    assert trait(token_of(center, now), "a") == 1
    assert token_of(center, gone) == ""


def test_what_is_marked_may_be_buried(center: TimeoutCenter) -> None:
    delivery = delivered(center, "x")
    mark(center, delivery)
    center.bury(delivery, reason="the task failed")
    [found] = center.get("x")
    assert (found.state, found.reason) == ("dead", "the task failed")
    assert center.ack([delivery]) == 0
    assert len(center.get("x")) == 1


def test_the_calls_keep_to_one_slot_each(center: TimeoutCenter) -> None:
    center.queues.declare("many", slots=4)
    put_some(center, "many", 40, "id-")
    held = center.pop("many", 40).messages
    calls = mark_calls(center.registry.topic_of, held)
    assert len(calls) == len({one.slot for one in held})
    assert mark(center, *held) == []
    assert center.ack(held) == 40
    assert not [key for key in slot_keys(center.client) if "tokens" in key]


# -- of a limited topic


@pytest.mark.parametrize("how", ["ack", "bury", "reject", "marked"])
@pytest.mark.one_server("on a cluster such a topic has one slot")
def test_the_last_message_of_its_slot_leaves_its_place_to_those_of_others(
    center: TimeoutCenter, how: str
) -> None:
    """Where the places of the whole topic are announced, nothing else may wait."""
    center.queues.declare("mail", slots=2, concurrency=1)
    topic = center.registry.topic("mail")
    names = [f"m{number}" for number in range(40)]
    first = next(name for name in names if topic.slot_for(name).number == 0)
    others = [name for name in names if topic.slot_for(name).number == 1]
    put_some(center, "mail", (first, *others))
    [delivery] = center.pop("mail", 5).messages
    assert (delivery.id, center.pop("mail", 5).messages) == (first, [])
    assert announced(center, "mail") == set()
    if how == "marked":
        mark(center, delivery)
    if how == "bury":
        center.bury(delivery, reason="failed")
    elif how == "reject":
        center.reject(delivery, requeue=False)
    else:
        center.ack([delivery])
    assert len(announced(center, "mail")) == 1
    assert len(center.pop("mail", 5).messages) == 1


@pytest.mark.parametrize("limit", ["rate", "key_rate"])
def test_a_rate_that_is_raised_does_not_wait_for_what_the_former_one_has_used(
    center: TimeoutCenter, limit: str
) -> None:
    center.queues.declare("mail", slots=1, **{limit: "1/h"})
    for number in range(3):
        request = PutRequest(f"m{number}", b"", basis="cust", traits=";kcust")
        center.runner.run(center.commands.put(center.registry.topic("mail"), request))
    assert len(center.pop("mail", 5).messages) == 1
    assert center.pop("mail", 5).messages == []
    center.queues.alter("mail", **{limit: "1000/s"})
    found = [one.id for one in center.pop(["mail"], 5, wait=10).messages]
    while len(found) < 2:
        found += [one.id for one in center.pop(["mail"], 5, wait=10).messages]
    assert found == ["m1", "m2"]


# -- what is to be dead if its worker is lost


def mark_to_bury(center: TimeoutCenter, *deliveries: Delivery) -> None:
    calls = mark_calls(center.registry.topic_of, deliveries, buries=True)
    assert not any(center.runner.run_all(calls))


@pytest.mark.parametrize("limits", [{}, {"key_concurrency": 1}], ids=["plain", "limited"])
@pytest.mark.parametrize("by", ["pop", "upkeep"])
def test_what_is_lost_while_it_runs_is_dead_if_that_was_said(
    center: TimeoutCenter, limits: dict[str, Any], by: str
) -> None:
    center.queues.declare("mail", slots=1, **limits)
    center.put("mail", "x", b"x", key="ab1", visibility=30)
    [delivery] = center.pop("mail").messages
    mark_to_bury(center, delivery)
    mark_to_bury(center, delivery)  # its reply was lost, and it is said again
    assert center.extend([delivery]) == []
    time_passes(center, "mail", 100)
    if by == "pop":
        assert center.pop("mail").died == ["x"]
    else:
        part = Part(center.registry.topic("mail"), (0,))
        center.runner.run(keep(center.context, [(part, MAY)], grace=0))
    [found] = center.get("x")
    assert (found.state, found.reason) == ("dead", "the task failed")
    assert found.error == "the worker that ran it is gone: its lease ended"
    assert center.admin.check("mail") == []
    # It can be run again, as what it was.
    assert center.dead.requeue("mail") == 1
    [again] = center.pop("mail").messages
    assert (again.key, again.visibility, again.has_place) == ("ab1", 30.0, bool(limits))
    assert trait(token_of(center, again), "a") is trait(token_of(center, again), "b") is None
    center.ack([again])
    assert not residue(center.client)


def test_who_lives_although_its_lease_ended_acknowledges_what_is_dead(
    center: TimeoutCenter,
) -> None:
    delivery = delivered(center, "x")
    mark_to_bury(center, delivery)
    time_passes(center, "mail", 100)
    assert center.pop("mail").died == ["x"]
    assert center.ack([delivery]) == 1
    assert not residue(center.client)


def test_what_is_marked_to_be_dead_is_buried_once(center: TimeoutCenter) -> None:
    delivery = delivered(center, "x", visibility=30)
    mark_to_bury(center, delivery)
    center.bury(delivery, reason="the task failed", error="ValueError: no")
    [found] = center.get("x")
    assert (found.state, found.error) == ("dead", "ValueError: no")
    assert token_of(center, delivery) == ";v30000"
    assert center.ack([delivery]) == 0
    assert center.bury(delivery, reason="once more") == "x"
    assert len(center.get("x")) == 1
