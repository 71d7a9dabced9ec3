"""What waits for the rest of its batch, and for how long."""

from __future__ import annotations

from typing import Any

from kombu_toc.consumer.state import REST_OF_BATCH, ConsumerState

from ..support.cases import each

SINK: Any = object()


@each(
    "batch, in_flight, entry, until",
    [
        ((7, 1000), {1}, (1000, 7), 5.0 + REST_OF_BATCH),
        ((7, 1000), {1}, (900, 7), 5.0 + REST_OF_BATCH),
        ((7, 0), {1}, (0, 7), 5.0 + REST_OF_BATCH),  # the server's time was not known yet
        ((7, 1000), {1}, (1001, 7), 0.0),  # it comes due in time
        ((7, 1000), {1}, (1000, 6), 0.0),  # of the batch before
        ((7, 1000), set(), (1000, 7), 0.0),  # nothing else is to come
        ((0, 0), {1}, (0, 7), 0.0),  # the nodes of a Cluster
    ],
)
def test_what_was_due_when_it_was_asked_for_waits_for_the_rest_of_its_batch(
    batch: tuple[int, int], in_flight: set[int], entry: tuple[int, int], until: float
) -> None:
    state = ConsumerState(SINK, "round_robin")
    state.batch, state.pops_in_flight, state.left_at = batch, in_flight, 5.0
    due, number = entry
    assert state.rest_comes_until((due, (number, 0, 1), state, object())) == until
