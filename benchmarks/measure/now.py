"""now: one immediate task at a time, on an idle worker; from before it is sent to its start."""

from __future__ import annotations

from typing import Any

from ..metrics import TIMES, Metric, distribution, percentile
from ..peers import Peer
from ..trial import Trial

METRICS = {**TIMES, "sending": Metric("of these the sending takes (p50)", "ms")}
CASES = {"now": ({"tasks": 500}, {"tasks": 100})}
ROUNDS = (3, 1)


def measure(peer: Peer, tasks: int) -> dict[str, Any]:
    """Latency in milliseconds."""
    with Trial(peer) as trial:
        trial.work(1, "-c", "2")
        sent = trial.tell("one_by_one", tasks=tasks, seed=1)
        began = {number: before for number, before, _ in sent}
        found = distribution([at - began[number] for number, at, _ in trial.starts()])
        found["sending"] = percentile([after - before for _, before, after in sent], 50) * 1000
        return found
