"""What is asked for when a claim is acted on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kombu_toc.consumer.dispatcher import LATE_US, Dispatcher
from kombu_toc.consumer.state import ConsumerState

from ..support.cases import each

NOW = 1_000_000


class Sink:
    policy = SimpleNamespace(before_delivery=lambda: None)


@each(
    "us, late",
    [(NOW + 20_000, False), (NOW - LATE_US, False), (NOW - LATE_US - 1, True)],
    ids=["ahead", "in time", "late"],
)
def test_a_claim_that_is_acted_on_late_is_told_from_others(us: int, late: bool) -> None:
    """Of another slot something may have come due before it."""
    loop: Any = SimpleNamespace(now=lambda: 1.0, hub=None)
    clock: Any = SimpleNamespace(at=lambda now: NOW)
    sink: Any = Sink()
    metrics: Any = None
    state = ConsumerState(sink, "round_robin")
    dispatcher = Dispatcher(loop, clock, {sink: state}, metrics)
    dispatcher.due.push_claim(NOW, (1, 0, 0), state, ("mail", 3, us))
    dispatcher.run_due()
    assert state.pending.slots == {"mail": {3}}
    assert list(state.due_claims) == [("mail", 3, us)]
    assert state.pending.late == ({"mail"} if late else set())
