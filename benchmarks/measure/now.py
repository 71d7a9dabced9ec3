"""now: one immediate task at a time, on an idle worker; from before it is sent to its start."""

from __future__ import annotations

from typing import Any

from ..metrics import TIMES, distribution
from ..peers import Peer
from ..trial import Trial

METRICS = TIMES
CASES = {"now": ({"tasks": 500}, {"tasks": 100})}
ROUNDS = (3, 1)


def measure(peer: Peer, tasks: int) -> dict[str, Any]:
    """Latency in milliseconds."""
    with Trial(peer) as trial:
        trial.work(1, "-c", "2")
        sent = dict(trial.tell("one_by_one", tasks=tasks, seed=1))
        return distribution([at - sent[number] for number, at, _ in trial.starts()])
