"""How much a consumer takes, by what its owner could start."""

from __future__ import annotations

from kombu_toc.consumer.state import WorkerPolicy
from kombu_toc.transport.receiving import Capacity, capacity_of

from ..support.cases import each


class Worker(WorkerPolicy):
    def __init__(self, idle: int, soon: int = 0, prefetches: bool = True) -> None:
        self.idle, self.soon, self.prefetches = idle, soon, prefetches

    def idle_slots(self) -> int | None:
        return self.idle

    def idle_within(self, seconds: float) -> int:
        return self.soon


def test_a_plain_consumer_takes_what_its_window_allows() -> None:
    assert capacity_of(WorkerPolicy(), room=3, held=1, window=4) == Capacity(3, 3, 4)


@each(
    ("worker", "expected"),
    [
        (Worker(idle=2), Capacity(free=2, room=2, batch=0)),
        (Worker(idle=2, soon=3), Capacity(free=2, room=5, batch=3)),
        (Worker(idle=0, soon=30), Capacity(free=0, room=10, batch=20)),
        (Worker(idle=2, soon=3, prefetches=False), Capacity(free=2, room=2, batch=0)),
        (Worker(idle=-1), Capacity(free=-1, room=-1, batch=0)),
    ],
)
def test_a_worker_takes_what_it_can_start_at_once_and_within_moments(
    worker: Worker, expected: Capacity
) -> None:
    assert capacity_of(worker, room=10, held=0, window=20) == expected


def test_what_is_fetched_already_takes_a_place() -> None:
    assert capacity_of(Worker(idle=4), room=10, held=3, window=20).free == 1
