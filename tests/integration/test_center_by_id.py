"""Looking up, cancelling and rescheduling single messages (Y2, W1, D1, D5, X4)."""

from __future__ import annotations

import pytest

from kombu_toc import DEAD, IN_FLIGHT, WAITING, ActionTimeError

from .inspection import announced, check_slots, now_us, residue

HOUR = 3600.0


def in_flight(center, topic, id, body=b""):
    center.put(topic, id, body)
    [message] = center.pop(topic).messages
    return message


def dead(center, topic, id, body=b""):
    center.reject(in_flight(center, topic, id, body), requeue=False, reason="why")


def done(cancelled):
    return [(one.id, one.state, one.deleted) for one in cancelled]


def moved(rescheduled):
    return [(one.id, one.state, one.moved) for one in rescheduled]


# -- get


def test_a_message_is_found_in_every_state(center, client):
    """D1"""
    center.put("mail", "w", b"1", at=2e9, priority=6)
    [found] = center.get("w", topic="mail")
    assert found[0] == "mail"
    assert (found.id, found.state, found.step, found.body) == ("w", WAITING, 2, b"1")
    assert found.time_us == 2_000_000_000_000_000

    in_flight(center, "mail", "f", b"2")
    [found] = center.get("f", topic="mail")
    assert (found.state, found.step, found.body) == (IN_FLIGHT, 0, b"2")
    assert 59_000_000 < found.time_us - now_us(client) <= 60_000_000

    dead(center, "mail", "d", b"3")
    [found] = center.get("d", topic="mail")
    assert (found.state, found.body, found.reason) == (DEAD, b"3", "why")
    assert abs(found.time_us - now_us(client)) < 5_000_000


def test_what_is_not_there_is_not_found(center):
    assert center.get("x", topic="mail") == []
    assert center.cancel("x", topic="mail") == []
    assert center.reschedule("x", topic="mail", delay=1) == []


def test_looking_up_declares_nothing(center, client):
    center.get("x", topic="mail")
    center.cancel("x", topic="mail")
    center.reschedule("x", topic="mail")
    center.counts("mail")
    center.purge("mail")
    assert client.keys() == []


def test_copies_are_found_by_the_id_they_share(center):
    center.put("mail", "x", b"1")
    copy = center.put("mail", "x", b"2", delay=HOUR)
    found = center.get("x", topic="mail")
    assert {(one.id, one.body) for one in found} == {("x", b"1"), (copy, b"2")}
    assert [one.body for one in center.get(copy, topic="mail")] == [b"2"]


@pytest.mark.parametrize("basis", ["order-7", None])
def test_a_message_with_a_slot_basis_is_found_with_it_and_without(center, basis):
    """A2"""
    for number in range(10):
        center.put("mail", f"{number}", b"", delay=HOUR, basis="order-7")
    for number in range(10):
        [found] = center.get(f"{number}", topic="mail", basis=basis)
        assert found.id == f"{number}"
    [one] = center.reschedule("4", topic="mail", basis=basis)
    assert (one.topic, one.id, one.state, one.moved) == ("mail", "4", WAITING, True)
    assert done(center.cancel("5", topic="mail", basis=basis)) == [("5", WAITING, True)]
    check_slots(center, "mail")


# -- cancel


def test_a_waiting_message_can_be_cancelled(center, client):
    """Y2, X4"""
    center.put("mail", "x", b"", delay=HOUR, priority=3)
    assert done(center.cancel("x", topic="mail")) == [("x", WAITING, True)]
    assert residue(client) == []


def test_a_message_in_flight_is_cancelled_too_late_and_says_so(center):
    """X4"""
    message = in_flight(center, "mail", "x")
    assert done(center.cancel("x", topic="mail")) == [("x", IN_FLIGHT, False)]
    assert center.ack([message]) == 1


def test_a_message_in_flight_can_be_deleted_all_the_same(center, client):
    """Y2: at any time, waiting or in flight"""
    message = in_flight(center, "mail", "x")
    assert done(center.cancel("x", topic="mail", in_flight=True)) == [("x", IN_FLIGHT, True)]
    assert residue(client) == []
    assert center.ack([message]) == 0
    assert center.reject(message, requeue=True) is None
    assert center.release([message]) == 0
    assert center.extend([message]) == [message]
    assert residue(client) == []


def test_a_dead_message_can_be_cancelled(center, client):
    dead(center, "mail", "x")
    assert done(center.cancel("x", topic="mail")) == [("x", DEAD, True)]
    assert residue(client) == []


def test_a_message_cannot_be_cancelled_twice(center):
    """X4"""
    center.put("mail", "x", b"")
    assert done(center.cancel("x", topic="mail")) == [("x", WAITING, True)]
    assert center.cancel("x", topic="mail") == []


def test_cancelling_reaches_the_copies_that_share_the_id(center, client):
    first = in_flight(center, "mail", "x", b"1")
    copy = center.put("mail", "x", b"2", delay=HOUR)
    assert done(center.cancel("x", topic="mail")) == [
        ("x", IN_FLIGHT, False),
        (copy, WAITING, True),
    ]
    center.ack([first])
    assert residue(client) == []


@pytest.mark.parametrize("copy_first", [False, True])
def test_a_copy_cancelled_by_its_own_id_leaves_nothing_behind(center, client, copy_first):
    center.put("mail", "x", b"1", delay=HOUR)
    copy = center.put("mail", "x", b"2", delay=HOUR)
    ids = [copy, "x"] if copy_first else ["x", copy]
    if copy_first:
        assert done(center.cancel(copy, topic="mail")) == [(copy, WAITING, True)]
        assert [found.id for found in center.get("x", topic="mail")] == ["x"]
        check_slots(center, "mail")
    for id in ids:
        center.cancel(id, topic="mail")
    assert residue(client) == []


def test_cancelling_one_message_leaves_the_others_announced(center):
    """A8"""
    center.declare("one", slots=1)
    center.put("one", "a", b"", at=2e9)
    center.put("one", "b", b"", at=2.1e9)
    center.cancel("a", topic="one")
    check_slots(center, "one")
    center.cancel("b", topic="one")
    assert announced(center, "one") == set()


# -- reschedule


@pytest.mark.parametrize("first", [2e9, 2.2e9])
def test_a_waiting_message_gets_another_time(center, first):
    """D5, W1: earlier or later"""
    center.put("mail", "x", b"", at=first, priority=9)
    assert moved(center.reschedule("x", topic="mail", at=2.1e9)) == [("x", WAITING, True)]
    [found] = center.get("x", topic="mail")
    assert (found.time_us, found.step) == (2_100_000_000_000_000, 3)
    check_slots(center, "mail")


def test_rescheduled_without_a_time_a_message_is_due_now(center):
    center.put("mail", "x", b"", delay=HOUR)
    assert moved(center.reschedule("x", topic="mail")) == [("x", WAITING, True)]
    assert [message.id for message in center.pop("mail").messages] == ["x"]


def test_a_message_that_was_tried_and_is_rescheduled_to_now_is_due_now(center):
    """Without a wait for the next millisecond."""
    for number in range(20):
        message = in_flight(center, "mail", f"{number}")
        center.reject(message, requeue=True, backoff=HOUR)
        assert moved(center.reschedule(message.id, topic="mail")) == [(message.id, WAITING, True)]
        [again] = center.pop("mail").messages
        assert again.retries_left == 15
        center.ack([again])


def test_a_message_that_was_tried_keeps_its_retries_and_is_not_due_early(center):
    """A3, A6"""
    message = in_flight(center, "mail", "x")
    center.reject(message, requeue=True)
    [one] = center.reschedule("x", topic="mail", at=2_000_000_000.0004)
    assert one.moved
    [found] = center.get("x", topic="mail")
    assert found.time_us == one.time_us == 2_000_000_000_001_000
    center.reschedule("x", topic="mail")
    assert center.pop("mail").messages[0].retries_left == 15


def test_a_delay_counts_from_now(center, client):
    center.put("mail", "x", b"")
    before = now_us(client)
    assert moved(center.reschedule("x", topic="mail", delay=HOUR)) == [("x", WAITING, True)]
    [found] = center.get("x", topic="mail")
    assert before <= found.time_us - 3_600_000_000 <= now_us(client) + 3


def test_what_is_in_flight_or_dead_stays_where_it_is(center):
    """X4"""
    in_flight(center, "mail", "f")
    dead(center, "mail", "d")
    for id, state in (("f", IN_FLIGHT), ("d", DEAD)):
        before = center.get(id, topic="mail")
        assert moved(center.reschedule(id, topic="mail", delay=1)) == [(id, state, False)]
        assert center.get(id, topic="mail") == before


def test_a_new_time_beyond_2255_is_refused(center):
    center.put("mail", "x", b"", at=2e9)
    for when in ({"at": 9.1e9}, {"delay": 9e9}):
        with pytest.raises(ActionTimeError):
            center.reschedule("x", topic="mail", **when)
    assert center.get("x", topic="mail")[0].time_us == 2_000_000_000_000_000


def test_an_announced_time_that_was_rescheduled_away_leaves_nothing_behind(center, client):
    center.put("mail", "x", b"", delay=HOUR)
    center.reschedule("x", topic="mail")
    center.ack(center.pop("mail").messages)
    assert residue(client) == []


def test_nothing_depends_on_how_much_else_waits(center):
    """Y2: by id, in the slots of the topic, not by looking through them"""
    topic = center.topic("mail")
    center.run_all([center.putting(topic, f"{n}", b"", delay_us=10**9 + n) for n in range(2000)])
    assert done(center.cancel("1234", topic="mail")) == [("1234", WAITING, True)]
    assert center.counts("mail").scheduled == 1999
