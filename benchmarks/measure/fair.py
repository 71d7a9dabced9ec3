"""fair: how long the tasks of a tenant who sends one now and then wait beside a tenant with a
backlog; and how many of the other's messages go before one of his with a million of them."""

from __future__ import annotations

from typing import Any

from ..metrics import Metric, percentile
from ..peers import Peer
from ..trial import Trial

METRICS = {
    "p50": Metric("a task of the small tenant waits, p50", "ms"),
    "p99": Metric("a task of the small tenant waits, p99", "ms"),
    "before": Metric("messages of the large tenant that go before it, at most", "messages"),
}
CASES = {
    "fair": (
        {"backlog": 4000, "tasks": 60},
        {"backlog": 1500, "tasks": 20},
    ),
    "fair-million": ({"backlog": 1_000_000}, {"backlog": 100_000}),
}
ROUNDS = (3, 1)
LONG = ("fair-million",)

#: Seconds that a task takes, and between two of the small tenant.
SECONDS, GAP = 0.01, 0.1


def takes_part(peer: Peer, case: str) -> bool:
    return peer.name == "toc" or (case == "fair" and peer.is_celery and peer.name != "before")


def measure(peer: Peer, backlog: int, tasks: int = 0) -> dict[str, Any]:
    """Milliseconds, or messages."""
    return waits(peer, backlog, tasks) if tasks else overtaken(peer, backlog)


def waits(peer: Peer, backlog: int, tasks: int) -> dict[str, Any]:
    """With two processes, each of which takes 10 ms for a task. A peer without fairness is asked
    the same."""
    topics = {"celery": {"key_fair": True}}
    settings = {"broker_transport_options": {"toc_topics": topics}} if peer.is_product else {}
    with Trial(peer, settings) as trial:
        trial.work(1, "-c", "2")
        before = trial.count()
        trial.tell("keyed", tasks=backlog, key="large", first=tasks, seconds=SECONDS)
        sent = dict(trial.tell("keyed", tasks=tasks, key="small", gap=GAP, seconds=SECONDS))
        trial.wait(before + backlog + tasks, 60 + 3 * backlog * SECONDS)
        starts = {number: at for number, at, _ in trial.starts()}
    late = [(starts[int(number)] - at) * 1000 for number, at in sent.items()]
    return {"p50": percentile(late, 50), "p99": percentile(late, 99)}


def overtaken(peer: Peer, backlog: int) -> dict[str, Any]:
    """Of the center alone: one message at a time."""
    with Trial(peer) as trial:
        return trial.run_inside("fair.py", trial.broker.url, backlog, timeout=600)
