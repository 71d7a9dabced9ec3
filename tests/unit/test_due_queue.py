"""Claims and held messages in the order in which they come due, without a server or a clock."""

from __future__ import annotations

import random

from kombu_toc.consumer.state import DueQueue
from kombu_toc.model.results import Delivery


def message(topic: str, id: str = "m") -> Delivery:
    return Delivery(topic, 0, 0, id, 0, b"", 16)


def drained(queue: DueQueue) -> list[int]:
    return [entry[0] for entry in queue.take_all()]


def test_claims_and_messages_come_in_the_order_of_their_times() -> None:
    queue, chance = DueQueue(), random.Random(7)
    times = [chance.randrange(1000) for _ in range(200)]
    for n, us in enumerate(times):
        if n % 2:
            queue.push_claim(us, (n, 0, 0), "c", ("t", 0, us))
        else:
            queue.push((us, (n, 0, 0), "c", message("t")))
    assert drained(queue) == sorted(times)
    assert not queue
    assert queue.first is None
    assert queue.pop() is None


def test_messages_of_one_time_keep_their_order_and_are_never_compared() -> None:
    queue = DueQueue()
    for n in (2, 0, 1):
        queue.push((5, (0, n, 0), object(), message("t", str(n))))
    assert [entry[3].id for entry in queue.take_all()] == ["0", "1", "2"]


def test_the_claims_of_a_slot_are_counted_however_they_leave() -> None:
    queue = DueQueue()
    for us in range(4):
        queue.push_claim(us, (us, 0, 0), "c", ("t", 3, us))
    queue.push_claim(9, (9, 0, 0), "c", ("other", 3, 9))
    queue.push((5, (5, 0, 0), "c", message("t")))
    assert queue.count_claims("t", 3) == 4
    queue.pop()
    assert queue.count_claims("t", 3) == 3
    assert queue.take_claims(lambda claim: claim[2] == 2) == [("t", 3, 2)]
    assert queue.count_claims("t", 3) == 2
    assert sorted(queue.take_claims()) == [("other", 3, 9), ("t", 3, 1), ("t", 3, 3)]
    assert queue.count_claims("t", 3) == queue.count_claims("other", 3) == 0
    assert len(queue) == 1  # the message


def test_what_is_taken_of_one_consumer_leaves_the_others_theirs() -> None:
    queue = DueQueue()
    for n, owner in enumerate("abab"):
        queue.push((n, (n, 0, 0), owner, message("t", f"{owner}{n}")))
    taken = queue.take(lambda entry: entry[2] == "a")
    assert sorted(entry[3].id for entry in taken) == ["a0", "a2"]
    assert drained(queue) == [1, 3]
