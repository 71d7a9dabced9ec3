"""behind: two one-process workers, one held by a long task; how many of a stream of short tasks
wait for the long one, although the other worker is idle?"""

from __future__ import annotations

import time

from ..metrics import Metric
from ..peers import Peer
from ..trial import Trial

METRICS = {
    "waited": Metric("short tasks that waited for the long one", "tasks"),
    "longest": Metric("longest wait", "ms"),
}
CASES = {
    "behind": ({"seconds": 7.0, "tasks": 60}, {"seconds": 4.5, "tasks": 30}),
}
ROUNDS = (3, 1)

#: Which part of the long task's time the stream takes.
_PART = 0.85


def measure(peer: Peer, seconds: float, tasks: int) -> dict[str, float]:
    """How many waited, and how long."""
    with Trial(peer) as trial:
        trial.work(2, "-c", "1")
        before = trial.count()
        trial.tell("nap", number=0, seconds=seconds)
        trial.wait(before + 1)
        began = next(at for number, at, _ in trial.starts() if number == 0)
        time.sleep(0.05)  # the stream comes when the long task runs
        sent = dict(trial.tell("stream", tasks=tasks, gap=seconds * _PART / tasks, first=1))
        trial.wait(before + 1 + tasks)
        starts = {number: at for number, at, _ in trial.starts() if number}
        ended = began + seconds
        return {
            "waited": sum(at >= ended > sent[number] for number, at in starts.items()),
            "longest": max(at - sent[number] for number, at in starts.items()) * 1000,
        }
