"""drain: how fast workers with default prefetch take up a backlog of immediate tasks.

The queue is filled before the worker starts. The first tenth of the starts is warm-up.
"""

from __future__ import annotations

import math
from typing import Any

from ..metrics import Metric
from ..peers import Peer
from ..trial import Trial

METRICS = {
    "rate": Metric("tasks started", "tasks/s", more_is_better=True),
    "client": Metric("processor time of a task: client", "us"),
    "server_put": Metric("processor time of a task: server, as it is sent", "us"),
    "worker": Metric("processor time of a task: worker", "us"),
    "server_drain": Metric("processor time of a task: server, as it is taken", "us"),
}

_PREFORK = ("-P", "prefork", "-c", "2")
CASES = {
    "drain": ({"tasks": 20_000, "pool": _PREFORK}, {"tasks": 3000, "pool": _PREFORK}),
    "drain-solo": (
        {"tasks": 10_000, "pool": ("-P", "solo")},
        {"tasks": 2000, "pool": ("-P", "solo")},
    ),
    "drain-threads": (
        {"tasks": 10_000, "pool": ("-P", "threads", "-c", "4")},
        {"tasks": 2000, "pool": ("-P", "threads", "-c", "4")},
    ),
    "drain-two": (
        {"tasks": 20_000, "pool": _PREFORK, "workers": 2},
        {"tasks": 3000, "pool": _PREFORK, "workers": 2},
    ),
}

#: Measured more often than the rest: the machine's noise is largest here.
ROUNDS = (5, 2)
LONG = ("drain-solo", "drain-threads", "drain-two")


def measure(peer: Peer, tasks: int, pool: tuple[str, ...], workers: int = 1) -> dict[str, Any]:
    """Starts a second, and microseconds of processor for a task, after the warm-up."""
    with Trial(peer) as trial:
        server = trial.broker.server if peer.is_redis else None

        def used() -> tuple[float, float]:
            return trial.processor_seconds(), server.cpu() if server else math.nan

        trial.tell("prepare")
        before = used()
        trial.tell("publish", tasks=tasks)
        sent = used()
        for _ in range(workers):
            trial.start(*pool)
        trial.wait(tasks // 10, 60.0)
        began, first = used(), trial.count()
        trial.wait(tasks, 60 + tasks / 100)
        done, rest = used(), tasks - first
        all_ = [at for _, at, _ in trial.starts()]
        times = all_[tasks // 10 :]
        found = {
            "client": (sent[0] - before[0]) / tasks,
            "server_put": (sent[1] - before[1]) / tasks,
            "worker": (done[0] - began[0]) / rest,
            "server_drain": (done[1] - began[1]) / rest,
        }
        return {
            **{name: at * 1e6 for name, at in found.items() if not math.isnan(at)},
            "rate": (len(times) - 1) / (times[-1] - times[0]),
            # For plots: (seconds, how many have started since)
            "curve": [(round(at - all_[0], 4), n) for n, at in enumerate(all_)][:: tasks // 100],
        }
