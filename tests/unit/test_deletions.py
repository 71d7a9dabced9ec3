"""What may still delete a queue that is declared again, under a simulated clock."""

from __future__ import annotations

import threading

from kombu_toc.consumer.holdings import CALL_EXPIRES, MARGIN, OwedDeletions

LATEST = CALL_EXPIRES + MARGIN


def owed_deletions(*queues: str) -> OwedDeletions:
    made = OwedDeletions(threading.RLock)
    for queue in queues:
        made.owe(queue, {"reply": [f"binding of {queue}"]})
    return made


def test_what_is_owed_is_tried_until_it_is_done() -> None:
    owed = owed_deletions("a", "b")
    a, b = owed.pending()
    assert (a.queue, b.queue) == ("a", "b")
    owed.done(a)
    assert owed.pending() == [b]
    owed.done(b)
    assert not owed


def test_who_declares_the_queue_waits_for_nothing_if_nothing_was_sent() -> None:
    owed = owed_deletions("a")
    assert owed.withdraw("a", 100.0) == 0
    assert owed.withdraw("unknown", 100.0) == 0
    assert not owed


def test_nothing_is_sent_of_a_deletion_that_is_withdrawn() -> None:
    owed = owed_deletions("a")
    [deletion] = owed.pending()
    owed.withdraw("a", 100.0)
    assert not owed.may_send(deletion, 100.1)
    owed.owe("a", {})  # the new queue is left as well
    assert not owed.may_send(deletion, 100.2)
    owed.done(deletion)
    [newer] = owed.pending()
    assert owed.may_send(newer, 100.3)


def test_who_declares_the_queue_waits_for_a_call_until_the_server_refuses_it() -> None:
    owed = owed_deletions("a")
    [deletion] = owed.pending()
    assert owed.may_send(deletion, 100.0)
    assert owed.withdraw("a", 100.5) == 100 + LATEST - 100.5
    assert owed.withdraw("a", 101.0) > 0  # so does another thread
    assert owed.withdraw("a", 100 + LATEST) == 0


def test_who_declares_the_queue_waits_no_longer_than_until_the_answer() -> None:
    owed = owed_deletions("a")
    [deletion] = owed.pending()
    owed.may_send(deletion, 100.0)
    assert owed.withdraw("a", 100.001) > 0
    owed.answered(deletion)
    assert owed.withdraw("a", 100.002) == 0
    assert not owed.may_send(deletion, 100.003)


def test_a_call_that_was_lost_is_waited_for_although_the_queue_was_left_once_more() -> None:
    owed = owed_deletions("a")
    [deletion] = owed.pending()
    owed.may_send(deletion, 100.0)
    owed.owe("a", {"news": ["another"]})
    [newer] = owed.pending()
    assert newer.bindings == {"reply": ["binding of a"], "news": ["another"]}
    assert not owed.may_send(deletion, 100.1)
    assert owed.withdraw("a", 100.2) > 0
