"""When acknowledgements leave, without a server and without a clock."""

from __future__ import annotations

from typing import Any

from kombu_toc.consumer.outbox import ACKS_WAIT, MAX_ACKS, Settlements


def of(*acks: Any) -> Settlements:
    settlements = Settlements()
    settlements.acks.extend(acks)
    return settlements


def test_an_acknowledgement_waits_some_milliseconds_for_the_next_pop() -> None:
    settlements = of("a")
    assert settlements.may_wait(10.0)
    assert settlements.may_wait(10.0 + ACKS_WAIT - 0.0001)
    assert not settlements.may_wait(10.0 + ACKS_WAIT)


def test_what_comes_later_does_not_make_the_first_wait_longer() -> None:
    settlements = of("a")
    assert settlements.may_wait(10.0)
    settlements.acks.append("b")
    assert settlements.may_wait(10.002)
    assert not settlements.may_wait(10.0 + ACKS_WAIT)


def test_many_acknowledgements_wait_for_nothing() -> None:
    assert of(*range(MAX_ACKS - 1)).may_wait(10.0)
    assert not of(*range(MAX_ACKS)).may_wait(10.0)


def test_a_rejection_leaves_at_once_and_takes_the_acknowledgements_along() -> None:
    settlements = of("a")
    assert settlements.may_wait(10.0)
    settlements.calls.append("reject")
    assert not settlements.may_wait(10.0)
    assert settlements.take() == (["a"], ["reject"])
    assert not settlements


def test_a_pop_that_takes_them_along_starts_the_wait_anew() -> None:
    settlements = of("a")
    assert settlements.may_wait(10.0)
    settlements.take()
    settlements.acks.append("b")
    assert settlements.may_wait(10.0 + ACKS_WAIT)
    settlements.leave_now()
    assert not settlements.may_wait(10.0 + ACKS_WAIT)


def test_what_is_to_be_marked_leaves_like_an_acknowledgement() -> None:
    settlements = Settlements()
    settlements.marks[1] = "a"  # type: ignore[assignment]
    assert settlements
    assert settlements.may_wait(10.0)
    assert not settlements.may_wait(10.0 + ACKS_WAIT)
    assert settlements.take_marks() == ["a"]
    assert not settlements
    settlements.marks.update(dict.fromkeys(range(MAX_ACKS), "m"))  # type: ignore[arg-type]
    assert not settlements.may_wait(10.0)
