"""A message that was delivered goes to DeadQueue, although it may be acknowledged already."""

from __future__ import annotations

import zlib

import pytest

from kombu_toc import DEAD, ReceiptError, TimeoutCenter

from ..support.inspection import (
    aged,
    announced,
    check_slots,
    delivered,
    full_server,
    residue,
    time_passes,
)

HOUR = 3600.0


@pytest.mark.parametrize("acknowledged", [True, False])
def test_it_is_dead_whether_it_was_acknowledged_or_not(one, client, acknowledged):
    message = delivered(one, body=b"body", priority=9)
    if acknowledged:
        assert one.ack(message) == 1
    assert one.bury(message, reason="failed", error="ValueError: boom\nTraceback") == "x"
    [found] = one.get("x", topic="one")
    assert (found.state, found.body, found.step) == (DEAD, b"body", 3)
    assert (found.reason, found.error) == ("failed", "ValueError: boom\nTraceback")
    check_slots(one, "one")
    assert one.admin.check("one") == []
    assert announced(one, "one") == set()
    assert one.ack(message) == 0  # what was on its way for long
    assert one.counts("one").dead == 1
    assert one.dead.requeue("one") == 1
    [again] = one.pop("one").messages
    assert (again.id, again.body, again.step) == ("x", b"body", 3)
    assert one.ack([again]) == 1
    assert residue(client) == []


@pytest.mark.parametrize("acknowledged", [True, False])
def test_it_may_be_said_twice(one, acknowledged):
    """Its reply was lost"""
    message = delivered(one)
    if acknowledged:
        one.ack(message)
    before = one.metrics.counts(one.registry.topic("one")).dead
    for _ in range(2):
        assert one.bury(message, reason="failed") == "x"
    assert one.counts("one") == (0, 0, 0, 1)
    assert one.metrics.counts(one.registry.topic("one")).dead == before + 1
    one.dead.requeue("one")
    assert one.bury(message, reason="failed") == "x"
    assert one.counts("one").ready == 1  # it was replayed meanwhile, and that stays


def test_a_replayed_message_that_fails_again_is_dead_again(one):
    message = delivered(one)
    for _ in range(3):
        one.ack(message)
        one.bury(message, reason="failed")
        one.dead.requeue("one")
        [message] = one.pop("one").messages
    assert one.bury(message, reason="failed at last") == "x"
    assert [found.reason for found in one.get("x", topic="one")] == ["failed at last"]


def test_it_is_taken_from_where_a_rollback_has_put_it(one):
    message = delivered(one)
    time_passes(one, "one", HOUR)
    one.pop("one", 0)
    assert one.counts("one").ready == 1
    assert one.bury(message, reason="failed") == "x"
    assert one.counts("one") == (0, 0, 0, 1)
    check_slots(one, "one")


def test_what_has_its_id_since_stays_and_it_is_found_beside_that(one, client):
    message = delivered(one, body=b"body")
    one.ack(message)
    one.put("one", "x", b"another", delay=HOUR)
    copy = f"x#{zlib.crc32(b'body'):08x}"
    assert one.bury(message, reason="failed") == copy
    assert {(f.id, f.state, f.body) for f in one.get("x", topic="one")} == {
        ("x", "waiting", b"another"),
        (copy, DEAD, b"body"),
    }
    assert one.bury(message, reason="failed") == copy
    check_slots(one, "one")
    assert one.dead.purge("one") == 1
    assert len(one.cancel("x", topic="one")) == 1
    assert residue(client) == []


def test_a_copy_dies_as_a_copy(one, client):
    one.put("one", "x", b"1")
    copy = one.put("one", "x", b"2").id
    messages = one.pop("one", 2).messages
    one.ack(messages)
    for message in messages:
        assert one.bury(message, reason="failed") == message.id
    assert {found.id for found in one.get("x", topic="one")} == {"x", copy}
    check_slots(one, "one")
    assert one.dead.purge("one") == 2
    assert residue(client) == []


def test_what_it_had_of_its_own_it_has_again_but_does_not_expire_at_once(one):
    message = delivered(one, visibility=7, expiration=60)
    one.ack(message)
    message = aged(message, HOUR)  # it has expired since
    one.bury(message, reason="failed")
    one.dead.requeue("one")
    [again] = one.pop("one").messages
    assert again.visibility == 7
    assert again.expires_us > message.expires_us + 3_000_000_000


def test_what_expires_by_its_topic_can_be_run_again(center, client):
    center.queues.declare("one", slots=1, message_ttl=60_000)
    message = delivered(center)
    center.ack(message)
    center.bury(aged(message, HOUR), reason="failed")
    center.dead.requeue("one")
    [again] = center.pop("one").messages
    assert again.expires_us > message.expires_us - 1_000_000
    assert center.ack(again) == 1
    assert residue(client) == []


def test_a_full_server_keeps_it(one, client):
    message = delivered(one)
    one.ack(message)
    with full_server(client):
        assert one.bury(message, reason="failed") == "x"


def test_dead_letters_are_limited_as_others(center):
    center.queues.declare("one", slots=1, dead_limit=2)
    for id in "abcd":
        center.bury(delivered(center, id=id), reason="failed")
    center.pop("one", 1)
    assert center.counts("one").dead == 2


def test_a_slot_that_the_topic_has_no_more_gets_none(one):
    gone = delivered(one)._replace(slot=5)
    assert one.bury(gone, reason="failed") == "x"
    assert len(one.get("x", topic="one")) == 1


def test_a_receipt_is_refused(one):
    message = delivered(one)
    with pytest.raises(ReceiptError, match="has no body; bury the message itself"):
        one.bury(message.receipt, reason="failed")
    assert one.counts("one").in_flight == 1


def test_a_center_that_has_not_used_the_topic_can_too(one, client):
    message = delivered(one)
    one.ack(message)
    assert TimeoutCenter(client).bury(message, reason="failed") == "x"
    assert one.counts("one").dead == 1
