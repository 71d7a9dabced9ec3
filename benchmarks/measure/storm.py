"""storm: many tasks due at one instant, one worker with two processes; until all have started."""

from __future__ import annotations

import time

from ..metrics import Metric
from ..peers import Peer
from ..trial import Trial

METRICS = {
    "rate": Metric("tasks started, from the instant to the last", "tasks/s", more_is_better=True),
    "first": Metric("instant to first start", "ms"),
}
CASES = {"storm": ({"tasks": 5000}, {"tasks": 1000})}
ROUNDS = (3, 1)

#: Tasks a second that the slowest producer sends at the very least.
_SENT = 200


def measure(peer: Peer, tasks: int) -> dict[str, float]:
    """How fast they start."""
    with Trial(peer) as trial:
        trial.work(1, "-c", "2")
        before = trial.count()
        instant = time.time() + tasks / _SENT + 3
        trial.tell("together", tasks=tasks, at=instant)
        if time.time() > instant - 1:
            raise RuntimeError("the tasks were not sent in time; the machine is too busy")
        trial.wait(before + tasks, tasks / _SENT + 60 + tasks / 100)
        times = [at for _, at, _ in trial.starts()]
        return {
            "rate": tasks / (times[-1] - instant),
            "first": (times[0] - instant) * 1000,
        }
