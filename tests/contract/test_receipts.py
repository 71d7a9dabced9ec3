"""What ends a delivery takes messages or their receipts, in any process, and tells which of them
were stale."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from kombu_toc import DEAD, WAITING, Delivery, ReceiptError, Settled, TimeoutCenter
from kombu_toc.center.reshard import reshard_topic

from ..support import nursery
from ..support.cluster import Cluster
from ..support.inspection import check_slots, put_some, residue
from ..support.servers import Server

HOUR = 3600.0


@pytest.fixture
def other(center: TimeoutCenter) -> TimeoutCenter:
    """A center that has heard of no topic, as in another process."""
    return TimeoutCenter(center.client, grace=0)


def deliver(center: TimeoutCenter, *ids: str) -> list[Delivery]:
    put_some(center, "mail", ids, body=b"first")
    found = center.pop("mail", len(ids)).messages
    return sorted(found, key=lambda message: ids.index(message.id))


def lose(center: TimeoutCenter, delivery: Delivery) -> None:
    """Its lease ends, and it is rolled back."""
    assert center.extend(delivery, 0) == []
    assert center.pop("mail", 0).rolled_back == [delivery.id]


def test_another_process_ends_a_delivery_by_its_receipt(
    center: TimeoutCenter, server: Server | Cluster
) -> None:
    """A5"""
    center.queues.declare("mail", slots=2, steps=(0, 5))
    one, two, three, four = deliver(center, *"abcd")
    program = """if True:
        import json, sys
        from kombu_toc import center_for
        center = center_for(sys.argv[1])
        ack, extend, release, reject = sys.argv[2:]
        print(json.dumps([
            center.extend([extend], 5000), center.ack(ack), center.release([release]),
            center.reject(reject, requeue=False, reason="by another"),
        ]))
    """
    receipts = [message.receipt for message in (one, two, three, four)]
    run = nursery.run(
        [sys.executable, "-c", program, server.toc_url, *receipts], capture_output=True, check=True
    )
    assert json.loads(run.stdout) == [[], 1, 1, DEAD]
    found = {found.id: found for found in center.scan("mail").messages}
    assert {id: one.state for id, one in found.items()} == {
        "b": "in flight",
        "c": WAITING,
        "d": DEAD,
    }
    assert found["d"].reason == "by another"
    lease = found["b"].time_us / 1e6 - center.client.time()[0] if not center.clustered else 5000
    assert lease > 4000
    check_slots(center, "mail")


def test_messages_and_receipts_are_taken_mixed_and_the_stale_ones_named_as_they_were_given(
    center: TimeoutCenter, other: TimeoutCenter
) -> None:
    ids = [f"m{number}" for number in range(20)]
    messages = deliver(center, *ids)
    given: list[Any] = [m.receipt if at % 2 else m for at, m in enumerate(messages)]
    gone = [given[at] for at in (2, 3, 11, 16)]
    assert center.ack(gone) == 4
    acked = other.ack(given)
    assert acked == 16 and isinstance(acked, int) and json.dumps(acked) == "16"
    assert isinstance(acked, Settled)
    assert acked.stale == gone
    again = other.ack(given)
    assert again == 0
    assert again.stale == given
    assert residue(center.client) == []


def test_what_is_given_twice_is_acknowledged_once_and_is_not_stale(center: TimeoutCenter) -> None:
    [message] = deliver(center, "a")
    lose(center, message)
    [again] = center.pop("mail").messages
    acked = center.ack([message, again.receipt, again, message.receipt])
    assert acked == 1
    assert acked.stale == []


def test_of_thousands_the_stale_are_found(center: TimeoutCenter) -> None:
    """More than Redis's Lua can unpack at once, and in every part of them."""
    center.queues.declare("mail", slots=2)
    messages = deliver(center, *(f"m{number}" for number in range(2500)))
    gone = {message.id for message in messages[::97]}
    center.ack(message for message in messages if message.id in gone)
    acked = center.ack([message.receipt for message in messages])
    assert acked == len(messages) - len(gone)
    assert {Delivery.of_receipt(receipt).id for receipt in acked.stale} == gone
    assert residue(center.client) == []


def test_thousands_are_released_in_calls_of_a_bounded_size(center: TimeoutCenter) -> None:
    center.queues.declare("mail", slots=1)
    messages = deliver(center, *(f"m{number}" for number in range(1200)))
    calls = center.commands.release(messages)
    assert [(len(call.args) - 2) // 5 for call in calls] == [500, 500, 200]
    gone = messages[::97]
    center.ack(gone)
    released = center.release([message.receipt for message in messages])
    assert released == len(messages) - len(gone)
    assert released.stale == [message.receipt for message in gone]
    assert center.counts("mail") == (released, 0, 0, 0)
    check_slots(center, "mail")


def test_a_late_ack_counts_until_the_message_is_gone(
    center: TimeoutCenter, other: TimeoutCenter
) -> None:
    """A5: the lease has ended; then nobody has the message, then somebody else has"""
    first, second = deliver(center, "a", "b")
    for message in (first, second):
        lose(center, message)
    assert (other.ack(first.receipt), other.ack(first.receipt).stale) == (1, [first.receipt])
    [again] = center.pop("mail").messages
    assert again.id == "b" and again.receipt != second.receipt
    assert other.ack(second.receipt) == 1
    assert center.ack([again]).stale == [again]
    assert residue(center.client) == []


def test_a_renewal_a_release_and_a_retry_need_the_very_delivery(
    center: TimeoutCenter, other: TimeoutCenter
) -> None:
    [message] = deliver(center, "a")
    lose(center, message)
    [again] = center.pop("mail").messages
    stale, good = message.receipt, again.receipt
    assert other.extend([stale, good], HOUR) == [stale]
    assert other.extend([message, good], HOUR) == [message]
    assert other.reject(stale, requeue=True) is None
    released = other.release([stale, good, message])
    assert released == 1
    assert released.stale == [stale, message]
    assert other.release(good).stale == [good]
    check_slots(center, "mail")


def test_a_stale_receipt_never_touches_a_namesake(
    center: TimeoutCenter, other: TimeoutCenter
) -> None:
    [message] = deliver(center, "a")
    receipt = message.receipt
    center.ack(receipt)
    for delay in (HOUR, None):  # waiting for its first delivery, and in flight
        center.cancel("a")
        center.put("mail", "a", b"first", delay=delay)
        center.pop("mail", 1 if delay is None else 0)
        before = center.get("a")
        assert other.ack([receipt]) == 0
        assert other.ack([receipt]).stale == [receipt]
        assert other.release([receipt]).stale == [receipt]
        assert other.extend([receipt]) == [receipt]
        assert other.reject(receipt, requeue=True) is None
        assert other.reject(receipt, requeue=False) is None
        assert center.get("a") == before
        check_slots(center, "mail")


def test_a_receipt_outlives_a_reshard(center: TimeoutCenter, other: TimeoutCenter) -> None:
    center.queues.declare("mail", slots=8)
    messages = deliver(center, *(f"m{number}" for number in range(20)))
    reshard_topic(center, "mail", 2, settle=0)
    acked = other.ack([message.receipt for message in messages])
    assert (acked, acked.stale) == (20, [])


def bad_receipts(message: Delivery) -> dict[str, Any]:
    receipt = message.receipt
    return {
        "cut": receipt[:-3],
        "later": "toc2." + receipt[5:],
        "garbage": "order-7",
        "id": message.id,
        "bytes": receipt.encode(),
        "nothing": None,
        "number": 7,
        "elsewhere": message._replace(topic="nowhere").receipt,
    }


@pytest.mark.parametrize("kind", [*bad_receipts(Delivery("", 0, 0, "", 0, b"", 0))])
def test_a_bad_receipt_is_named_and_nothing_is_done_or_lost(
    center: TimeoutCenter, other: TimeoutCenter, kind: str
) -> None:
    one, two = deliver(center, "a", "b")
    bad = bad_receipts(two)[kind]
    for act in (
        lambda: other.ack([one, bad]),
        lambda: other.extend([one.receipt, bad]),
        lambda: other.release([one, bad]),
        lambda: other.reject(bad, requeue=True),
    ):
        with pytest.raises(ValueError) as caught:
            act()
        assert isinstance(caught.value, ReceiptError)
        assert str(caught.value).startswith(repr(bad)[:20])
    assert other.queues.names() == ["mail"]  # none was declared by that
    assert center.ack([one, two]) == 2


def test_a_receipt_of_another_prefix_is_refused_or_stale(center: TimeoutCenter) -> None:
    [message] = deliver(center, "a")
    elsewhere = TimeoutCenter(center.client, "other:", grace=0)
    with pytest.raises(ReceiptError, match="which does not exist here: it was deleted, or the"):
        elsewhere.ack([message.receipt])
    elsewhere.put("mail", "a", b"first")
    [namesake] = elsewhere.pop("mail").messages
    assert elsewhere.ack([message.receipt]).stale == [message.receipt]
    assert elsewhere.ack([namesake]) == 1
    assert center.ack([message.receipt]) == 1


def test_a_receipt_of_a_queue_that_has_other_priority_steps_since_is_refused(
    center: TimeoutCenter, other: TimeoutCenter
) -> None:
    center.queues.declare("mail", steps=(0, 3, 6))
    center.put("mail", "a", b"", priority=6)
    [message] = center.pop("mail").messages
    center.queues.delete("mail")
    other.queues.declare("mail", steps=(0,))
    with pytest.raises(ReceiptError, match="when it had other priority steps"):
        other.release([message.receipt])


def test_a_message_of_another_process_goes_back_to_its_own_priority_step(
    center: TimeoutCenter, other: TimeoutCenter
) -> None:
    """The process that gives it back has not heard of the topic's steps."""
    center.queues.declare("mail", slots=1, steps=(0, 1, 2, 3, 4, 5))
    center.put("mail", "a", b"", priority=5)
    [message] = center.pop("mail").messages
    assert other.release([message]) == 1
    assert center.pop("mail").messages[0].step == 5
