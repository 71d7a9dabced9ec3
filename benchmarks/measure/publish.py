"""publish: how many tasks a second one producer sends; nobody consumes meanwhile."""

from __future__ import annotations

from ..metrics import Metric
from ..peers import Peer
from ..trial import Trial

METRICS = {
    "now": Metric("immediate, one by one", "tasks/s", more_is_better=True),
    "later": Metric("scheduled, one by one", "tasks/s", more_is_better=True),
    "now_batch": Metric("immediate, in batches of 100", "tasks/s", more_is_better=True),
    "later_batch": Metric("scheduled, in batches of 100", "tasks/s", more_is_better=True),
}
CASES = {"publish": ({"tasks": 10_000}, {"tasks": 1_500})}


def measure(peer: Peer, tasks: int) -> dict[str, float | None]:
    """Each kind on a fresh broker."""
    kinds = {
        "now": {},
        "later": {"countdown": 86_400.0, "spread": 3600.0},
        "now_batch": {"batch": 100},
        "later_batch": {"countdown": 86_400.0, "spread": 3600.0, "batch": 100},
    }
    found = {}
    for name, options in kinds.items():
        with Trial(peer) as trial:
            trial.tell("prepare")
            trial.tell("publish", tasks=max(tasks // 10, 100), **options)  # warm-up
            seconds = trial.tell("publish", tasks=tasks, **options)
            found[name] = seconds and tasks / seconds
    return found
