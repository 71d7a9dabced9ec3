"""What is asked for when a claim is acted on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kombu_toc.consumer.consumer_state import ConsumerState
from kombu_toc.consumer.dispatcher import LATE_US, Dispatcher

NOW = 1_000_000


@pytest.mark.parametrize(
    "us, in_order, asked",
    [
        (NOW + 20_000, True, {3}),
        (NOW - LATE_US, True, {3}),
        (NOW - LATE_US - 1, True, None),
        (NOW - LATE_US - 1, False, {3}),
    ],
    ids=["ahead", "in time", "late", "late on a Cluster"],
)
def test_a_claim_that_is_acted_on_late_asks_for_whatever_is_due(
    us: int, in_order: bool, asked: set[int] | None
) -> None:
    """Of another slot something may have come due before it."""
    loop: Any = SimpleNamespace(now=lambda: 1.0, hub=None)
    clock: Any = SimpleNamespace(at=lambda now: NOW)
    sink: Any = SimpleNamespace(policy=SimpleNamespace(before_delivery=lambda: None))
    metrics: Any = None
    state = ConsumerState(sink, "round_robin")
    dispatcher = Dispatcher(loop, clock, {sink: state}, metrics, in_order=in_order)
    dispatcher.due.push_claim(NOW, (1, 0, 0), state, ("mail", 3, us))
    dispatcher.run_due()
    assert state.pending.slots == {"mail": asked}
    assert list(state.due_claims) == [("mail", 3, us)]
