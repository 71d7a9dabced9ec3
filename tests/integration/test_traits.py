"""What holds for one message and not for its topic: visibility, max lease, expiration."""

from __future__ import annotations

import time

import pytest

from kombu_toc import DEAD, IN_FLIGHT, Delivery, Limits, TimeoutCenter, TraitError
from kombu_toc.center.requests import PopRequest

from .inspection import aged, check_slots, now_us, residue, slot_keys, time_passes

HOUR = 3600.0


def lease_of(center: TimeoutCenter, delivery: Delivery) -> float:
    """Seconds until its lease ends."""
    [found] = center.get(delivery.id, topic=delivery.topic)
    assert found.state == IN_FLIGHT
    return (found.time_us - now_us(center.client)) / 1e6


def pop_one(center: TimeoutCenter, topic: str = "mail", **how: float) -> Delivery:
    [delivery] = center.pop(topic, **how).messages
    return delivery


# -- visibility


@pytest.mark.parametrize(
    "asked, own, topic, seconds",
    [
        (300.0, 200.0, 100.0, 300),
        (None, 200.0, 100.0, 200),
        (None, None, 100.0, 100),
        (None, None, None, 50),
        (300.0, None, 100.0, 300),
        (None, 200.0, None, 200),
    ],
)
def test_the_caller_says_how_long_a_lease_lasts_then_the_message_then_its_topic_then_the_center(
    center: TimeoutCenter, asked, own, topic, seconds
) -> None:
    center = TimeoutCenter(center.client, limits=Limits(visibility=50))
    center.declare("mail", visibility=topic)
    center.put("mail", "x", b"", visibility=own)
    delivery = pop_one(center, visibility=asked)
    assert delivery.visibility == own
    assert lease_of(center, delivery) == pytest.approx(seconds, abs=5)
    center.extend([delivery], 1000)
    assert lease_of(center, delivery) == pytest.approx(1000, abs=5)
    assert center.extend([delivery], asked) == []
    assert lease_of(center, delivery) == pytest.approx(seconds, abs=5)
    center.run(center.commands.recall(center.topic("mail"), None, "another.1", remember=0))
    assert center.ack([delivery]) == 1
    assert slot_keys(center.client) == []


def test_a_message_keeps_its_visibility_through_every_way_back(center: TimeoutCenter) -> None:
    center.declare("mail", retries=5)
    center.put("mail", "x", b"", visibility=200)
    center.put("mail", "y", b"")
    for back in (
        lambda one: center.release([one]),
        lambda one: center.reject(one, requeue=True),
        lambda one: center.extend([one], 0),
    ):
        popped = {one.id: one for one in center.pop("mail", 2).messages}
        assert popped["x"].visibility == 200
        assert popped["y"].visibility is None
        assert lease_of(center, popped["x"]) == pytest.approx(200, abs=5)
        assert lease_of(center, popped["y"]) == pytest.approx(60, abs=5)
        for one in popped.values():
            back(one)
    popped = {one.id: one for one in center.pop("mail", 2).messages}
    assert popped["x"].visibility == 200
    center.reject(popped["x"], requeue=False)
    assert center.requeue_dead("mail") == 1
    again = pop_one(center)
    assert again.visibility == 200
    assert center.ack([popped["x"], popped["y"]]) == 2  # late, and it counts: the same message
    assert slot_keys(center.client) == []


def test_a_namesake_has_traits_of_its_own_only(center: TimeoutCenter) -> None:
    center.put("mail", "x", b"first", visibility=200, expiration=HOUR)
    copy = center.put("mail", "x", b"second")
    third = center.put("mail", "x", b"third", visibility=300)
    popped = {one.id: one for one in center.pop("mail", 9).messages}
    assert {id: one.visibility for id, one in popped.items()} == {"x": 200, copy: None, third: 300}
    assert [one.expires_us is None for one in popped.values()] == [False, True, True]
    center.ack(popped.values())
    center.put("mail", "x", b"first")
    assert pop_one(center).visibility is None
    center.put("mail", "y", b"", visibility=200)
    center.cancel("y", topic="mail")
    center.put("mail", "y", b"")
    assert pop_one(center).visibility is None


def test_what_goes_away_by_itself_leaves_no_traits_to_a_namesake(center: TimeoutCenter) -> None:
    """The body has a time to live there, the traits have none"""
    center.declare("reply", slots=1, expires=100_000)
    center.put("reply", "x", b"", visibility=200)
    slot = center.topic("reply").slot(0)
    center.client.delete(slot.body, *slot.stores)
    center.put("reply", "x", b"")
    assert pop_one(center, "reply").visibility is None


@pytest.mark.parametrize(
    "trait, error",
    [
        ({"visibility": 0}, "message 'x': visibility must be a number of seconds from 1 up, not 0"),
        ({"visibility": "soon"}, "visibility must be a number of seconds from 1 up, not 'soon'"),
        ({"visibility": float("inf")}, "visibility must be .* not inf"),
        ({"visibility": 1e30}, "visibility must be"),
        ({"max_lease": -1}, "max_lease must be a number of seconds from 1 up, or 0 for none"),
        ({"expiration": float("nan")}, "expiration must be a number of seconds from 0 up, not nan"),
    ],
)
def test_a_trait_that_makes_no_sense_is_refused_and_nothing_is_put(
    center: TimeoutCenter, trait, error
) -> None:
    with pytest.raises(TraitError, match=error):
        center.put("mail", "x", b"", **trait)
    assert residue(center.client) == []


# -- max lease


def test_a_delivery_ends_when_its_max_lease_has_passed_although_it_is_renewed(
    center: TimeoutCenter,
) -> None:
    center = TimeoutCenter(center.client, grace=0)
    center.declare("mail", max_lease=100, retries=3)
    center.put("mail", "x", b"")
    center.put("mail", "mine", b"", max_lease=30)
    center.put("mail", "free", b"", max_lease=0)
    first = {one.id: one for one in center.pop("mail", 3).messages}
    assert center.extend(first.values(), HOUR) == []
    leases = {id: round(lease_of(center, one), -1) for id, one in first.items()}
    assert leases == {"x": 100, "mine": 30, "free": HOUR}

    time_passes(center, "mail", 99)
    first = {id: aged(one, 99) for id, one in first.items()}
    assert [one.id for one in center.extend(first.values(), HOUR)] == ["mine"]
    time_passes(center, "mail", 2)
    first = {id: aged(one, 2) for id, one in first.items()}
    assert {one.id for one in center.extend(first.values(), HOUR)} == {"mine", "x"}
    counts = center.metrics.counts(center.topic("mail"))
    assert counts.overran == 3

    popped = center.pop("mail", 3)
    assert sorted(popped.rolled_back) == ["mine", "x"]
    second = {one.id: one for one in popped.messages}
    assert {one.retries_left for one in second.values()} == {2}
    assert lease_of(center, second["x"]) == pytest.approx(60, abs=5)
    assert first["x"].ends_us < second["x"].ends_us
    assert center.reject(first["x"], requeue=True) is None  # another has it by now
    assert center.release([first["x"]]) == 0
    assert center.extend([second["x"]]) == []
    # As any late acknowledgement: it is the same message.
    assert center.ack([first["x"]]) == 1
    assert center.ack([second["x"], second["mine"], first["free"]]) == 2
    assert slot_keys(center.client) == []


def test_a_pop_that_is_recalled_does_not_outlive_its_max_lease(center: TimeoutCenter) -> None:
    topic = center.declare("mail", slots=1, visibility=50)
    center.put("mail", "x", b"", max_lease=1)
    center.put("mail", "y", b"", visibility=20)
    request = PopRequest("me.1", [0], ready_limit=2, remember=60)
    given = center.run(center.commands.pop(topic, request)).messages
    recall = center.commands.recall(topic, [0], "me.1")
    assert center.run(recall).messages == given
    x, y = given
    assert lease_of(center, x) <= 1
    assert lease_of(center, y) == pytest.approx(20, abs=5)
    while now_us(center.client) <= x.ends_us:  # the server's clock
        time.sleep(0.05)
    assert center.run(recall).messages == [y]
    assert center.extend(given) == [x]


# -- expiration


def test_a_message_is_not_delivered_once_it_has_been_due_for_longer_than_its_expiration(
    center: TimeoutCenter,
) -> None:
    center.put("mail", "early", b"", delay=HOUR, expiration=60)
    time_passes(center, "mail", HOUR + 59)
    center.ack([pop_one(center)])
    center.put("mail", "x", b"", delay=HOUR, expiration=60)
    center.put("mail", "stays", b"", delay=HOUR)
    time_passes(center, "mail", HOUR + 61)
    popped = center.pop("mail", 9)
    assert popped.expired == ["x"]
    assert [one.id for one in popped.messages] == ["stays"]
    [found] = center.get("x", topic="mail")
    assert (found.state, found.reason) == (DEAD, "expired")
    check_slots(center, "mail")
    counts = center.metrics.counts(center.topic("mail"))
    assert (counts.expired, counts.dead) == (1, 1)


def test_the_shorter_of_a_messages_expiration_and_its_topics_holds(center: TimeoutCenter) -> None:
    center.declare("mail", message_ttl=60_000)
    center.put("mail", "longer", b"", expiration=HOUR)
    center.put("mail", "shorter", b"", expiration=10)
    center.put("mail", "plain", b"")
    time_passes(center, "mail", 11)
    popped = center.pop("mail", 9)
    assert popped.expired == ["shorter"]
    assert {one.id for one in popped.messages} == {"longer", "plain"}
    center.release(popped.messages)
    time_passes(center, "mail", 50)
    popped = center.pop("mail", 9)
    assert sorted(popped.expired) == ["longer", "plain"]
    assert popped.messages == []
    check_slots(center, "mail")


def test_a_message_that_comes_back_keeps_the_time_when_it_expires(center: TimeoutCenter) -> None:
    center.declare("mail", retries=9)
    center.put("mail", "x", b"", expiration=100)
    first = pop_one(center)
    assert (first.expires_us - now_us(center.client)) / 1e6 == pytest.approx(100, abs=5)
    center.reject(first, requeue=True)
    second = pop_one(center)
    assert second.expires_us == first.expires_us
    center.release([second])
    third = pop_one(center)
    center.extend([third], 0)
    fourth = pop_one(center)
    assert fourth.expires_us == first.expires_us
    center.reject(fourth, requeue=True, backoff=200)
    time_passes(center, "mail", 201)
    popped = center.pop("mail")
    assert (popped.expired, popped.messages) == (["x"], [])


@pytest.mark.parametrize("own", [True, False])
def test_where_expired_messages_are_not_kept_they_go_without_a_trace(
    center: TimeoutCenter, own: bool
) -> None:
    center.declare("mail", dead_expired=False, message_ttl=None if own else 60_000)
    for body in (b"1", b"2", b"3"):
        center.put("mail", "x", body, priority=len(body), expiration=60 if own else None)
    time_passes(center, "mail", 61)
    assert len(center.pop("mail", 2).expired) == 3
    assert center.counts("mail") == (0, 0, 0, 0)
    assert slot_keys(center.client) == []
    counts = center.metrics.counts(center.topic("mail"))
    assert (counts.expired, counts.dead) == (3, 0)


def test_a_pop_finds_what_is_due_behind_many_that_have_expired(center: TimeoutCenter) -> None:
    center.declare("mail", slots=1)
    for number in range(350):
        center.put("mail", f"{number}", b"", expiration=60)
    center.put("mail", "x", b"")
    time_passes(center, "mail", 61)
    popped = center.pop("mail")
    assert [one.id for one in popped.messages] == ["x"]
    assert len(popped.expired) == 350
    check_slots(center, "mail")
