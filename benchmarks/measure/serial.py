"""serial: how fast two workers take up a backlog of which each key runs one task at a time in the
order of sending, and whether they do; beside the same tasks without order."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ..metrics import Metric
from ..peers import Peer
from ..trial import Trial

METRICS = {
    "rate": Metric("tasks started", "tasks/s", more_is_better=True),
    "free": Metric("tasks started, without order", "tasks/s", more_is_better=True),
    "disordered": Metric("tasks that began before an earlier one of their key", "tasks"),
}
CASES = {"serial": ({"tasks": 10_000, "keys": 500}, {"tasks": 2000, "keys": 100})}
ROUNDS = (3, 1)


def takes_part(peer: Peer, case: str) -> bool:
    return peer.name == "toc"


def measure(peer: Peer, tasks: int, keys: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for metric, limits in (("rate", {"key_order": "serial"}), ("free", {})):
        settings = {"broker_transport_options": {"toc_topics": {"celery": limits}}}
        with Trial(peer, settings) as trial:
            trial.tell("prepare")
            trial.tell("keyed", tasks=tasks, keys=keys)
            for _ in range(2):
                trial.start("-c", "2")
            trial.wait(tasks, 60 + tasks / 50)
            starts = trial.starts()
        times = [at for _, at, _ in starts][tasks // 10 :]
        found[metric] = (len(times) - 1) / (times[-1] - times[0])
        if limits:
            latest: dict[int, int] = defaultdict(lambda: -1)
            found["disordered"] = 0
            for number, _, _ in starts:
                found["disordered"] += number < latest[number % keys]
                latest[number % keys] = max(latest[number % keys], number)
    return found
