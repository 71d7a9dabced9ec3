"""asyncio: how many tasks a second one process sends from an event loop, and by apply_async; and
how long a handler takes that sends one, at 500 requests a second."""

from __future__ import annotations

from ..metrics import Metric
from ..peers import Peer
from ..trial import Trial

METRICS = {
    "now": Metric("immediate, by 64 tasks of an event loop", "tasks/s", more_is_better=True),
    "now_sync": Metric("immediate, apply_async one by one", "tasks/s", more_is_better=True),
    "now_times": Metric("immediate, so many times as many", "", more_is_better=True),
    "later": Metric("scheduled, by 64 tasks of an event loop", "tasks/s", more_is_better=True),
    "later_sync": Metric("scheduled, apply_async one by one", "tasks/s", more_is_better=True),
    "later_times": Metric("scheduled, so many times as many", "", more_is_better=True),
    "p50": Metric("a loaded handler, p50", "ms"),
    "p99": Metric("a loaded handler, p99", "ms"),
}
CASES = {"asyncio": ({"tasks": 10_000, "seconds": 10}, {"tasks": 5_000, "seconds": 4})}
ROUNDS = (3, 1)


def takes_part(peer: Peer, case: str) -> bool:
    return peer.name == "toc"


def measure(peer: Peer, tasks: int, seconds: float) -> dict[str, float]:
    """One process does all of it, so that the ratios are of one machine at one time."""
    with Trial(peer) as trial:
        return trial.run_inside("event_loop.py", tasks, seconds)
