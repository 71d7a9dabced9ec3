"""limits: how exact a queue's rate is over three workers, how soon the next task starts when one
that fills a queue's concurrency ends, and what a pop costs with 100,000 keys."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Any

from ..metrics import Metric, percentile
from ..peers import Peer
from ..trial import Trial

METRICS = {
    "least": Metric("starts in ten seconds, at least", "tasks", more_is_better=True),
    "most": Metric("starts in ten seconds, at most", "tasks"),
    "opened": Metric("from the end of one to the start of the next, p50", "ms"),
    "opened_p99": Metric("from the end of one to the start of the next, p99", "ms"),
    "together": Metric("that ran at once, at most", "tasks"),
    "plain": Metric("a pop of 20 without keys, of the server", "us"),
    "keyed": Metric("a pop of 20 with keys, of the server", "us"),
    "ratio": Metric("so many times as much", ""),
}
CASES = {
    "limits-rate": ({"seconds": 30.0}, {"seconds": 16.0}),
    "limits-opening": ({"tasks": 200}, {"tasks": 60}),
    "limits-keys": (
        {"messages": 1_000_000, "keys": 100_000},
        {"messages": 100_000, "keys": 10_000},
    ),
}
ROUNDS = (3, 1)
LONG = ("limits-keys",)

#: Starts a second of the limited queue, and the window in seconds over which they are counted.
RATE, WINDOW = 100, 10.0

#: Seconds that each of the tasks takes of which one runs at a time.
SECONDS = 0.05


def takes_part(peer: Peer, case: str) -> bool:
    return peer.name == "toc"


def measure(peer: Peer, **arguments: Any) -> dict[str, Any]:
    if "seconds" in arguments:
        return rate(peer, **arguments)
    if "tasks" in arguments:
        return opening(peer, **arguments)
    return cost(peer, **arguments)


def rate(peer: Peer, seconds: float) -> dict[str, Any]:
    """Starts in every window of ten seconds that begins with a start, once all have begun."""
    limits = {"limited": {"rate": f"{RATE}/s"}}
    with Trial(peer, {"broker_transport_options": {"toc_topics": limits}}) as trial:
        trial.work(3, "-c", "4", "-Q", "celery,limited")
        before = trial.count()
        tasks = int(RATE * seconds)
        trial.tell("keyed", tasks=tasks, queue="limited")
        trial.wait(before + tasks, 60 + 3 * seconds)
        times = [at for number, at, _ in trial.starts() if number >= 0]
    counts = [
        bisect_left(times, at + WINDOW) - first
        for first, at in enumerate(times)
        if at + WINDOW <= times[-1]
    ]
    return {"least": min(counts), "most": max(counts)}


def opening(peer: Peer, tasks: int) -> dict[str, Any]:
    """Two workers share a queue of which one task runs at a time."""
    limits = {"limited": {"concurrency": 1}}
    with Trial(peer, {"broker_transport_options": {"toc_topics": limits}}) as trial:
        trial.work(2, "-c", "2", "-Q", "celery,limited")
        before = trial.count()
        trial.tell("keyed", tasks=tasks, queue="limited", seconds=SECONDS)
        trial.wait(before + tasks, 60 + 3 * tasks * SECONDS)
        times = [at for number, at, _ in trial.starts() if number >= 0]
    gaps = [(after - at - SECONDS) * 1000 for at, after in pairwise(times)]
    return {
        "opened": percentile(gaps, 50),
        "opened_p99": percentile(gaps, 99),
        "together": 1 + sum(gap < 0 for gap in gaps),
    }


def cost(peer: Peer, messages: int, keys: int) -> dict[str, Any]:
    """Microseconds of the server."""
    with Trial(peer) as trial:
        return trial.run_inside("keyed_cost.py", trial.broker.url, messages, keys, timeout=600)
