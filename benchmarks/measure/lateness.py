"""lateness: countdown tasks, no two due together; from the action time to the start.

The action time is the moment before the task was sent, plus its countdown.
"""

from __future__ import annotations

from typing import Any

from ..metrics import TIMES, distribution
from ..peers import Peer
from ..trial import Trial

METRICS = TIMES
CASES = {
    "lateness": ({"tasks": 400}, {"tasks": 80}),
    "lateness-loaded": (
        {"tasks": 400, "others": 1_000_000},
        {"tasks": 80, "others": 100_000},
    ),
}
ROUNDS = (3, 1)


def takes_part(peer: Peer, case: str) -> bool:
    return case == "lateness" or peer.is_product


def measure(peer: Peer, tasks: int, others: int = 0) -> dict[str, Any]:
    """Lateness in milliseconds.

    others: tasks that are scheduled for much later meanwhile
    """
    with Trial(peer) as trial:
        if others:
            from ..schedule import fill, real_envelope

            trial.tell("prepare")
            fill(trial, others, real_envelope(trial))
        trial.work(1, "-c", "2")
        before = trial.count()
        sent = trial.tell("sparse", tasks=tasks, gap=0.08, countdown=1.6, seed=1)
        trial.wait(before + tasks)
        due = dict(sent)
        return distribution([at - due[number] for number, at, _ in trial.starts()])
