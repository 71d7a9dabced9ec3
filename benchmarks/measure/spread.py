"""spread: as many tasks of 0.2 s due together as there are one-process workers, repeatedly.

Each could start at once, if no worker took two. What is due together was not sent together, as
with tasks of many users: each is sent some seconds before, in no order.
"""

from __future__ import annotations

import random
import time
from typing import Any

from ..metrics import TIMES, distribution
from ..peers import Peer
from ..trial import Trial

METRICS = TIMES
CASES = {
    "spread": ({"workers": 4, "turns": 60}, {"workers": 4, "turns": 14}),
}
ROUNDS = (3, 1)

SECONDS = 0.2

#: Between one instant and the next; longer than the tasks, should a worker take two or three.
_APART = 0.8

#: Seconds before its action time when a task is sent.
_AHEAD = (1.5, 5.5)


def measure(peer: Peer, workers: int, turns: int) -> dict[str, Any]:
    """Lateness in milliseconds."""
    chance = random.Random(1)
    due = {number: number // workers * _APART for number in range(turns * workers)}
    plan = sorted((at - chance.uniform(*_AHEAD), number) for number, at in due.items())
    with Trial(peer) as trial:
        trial.work(workers, "-c", "1")
        before = trial.count()
        begin = time.time() + _AHEAD[1] + 0.5
        for when, number in plan:
            time.sleep(max(begin + when - time.time(), 0))
            trial.tell("together", tasks=1, at=begin + due[number], first=number, seconds=SECONDS)
        trial.wait(before + turns * workers)
        return distribution([at - begin - due[number] for number, at, _ in trial.starts()])
