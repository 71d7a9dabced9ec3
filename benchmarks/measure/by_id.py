"""fleet-revoke: what a revoke costs the server where an app has many queues, and its caller."""

from __future__ import annotations

import redis

from ..metrics import Metric
from ..peers import Peer
from ..trial import Trial

METRICS = {
    "scripts": Metric("scripts that a revoke runs", ""),
    "calls": Metric("commands by INFO that a revoke sends", ""),
    "took": Metric("a revoke takes", "ms"),
}
CASES = {
    "fleet-revoke-20": ({"queues": 20}, {"queues": 20}),
    "fleet-revoke-1000": ({"queues": 1000}, {"queues": 1000}),
}
ROUNDS = (3, 1)

#: Tasks that are revoked, one after the other.
_TASKS = 20


def takes_part(peer: Peer, case: str) -> bool:
    return peer.is_product


def measure(peer: Peer, queues: int) -> dict[str, float]:
    """Each is the mean of all revokes."""
    with Trial(peer) as trial:
        ids = trial.tell("schedule_over", queues=queues, tasks=_TASKS)
        trial.tell("revoke", ids=ids[:1])  # its connections are made
        with trial.broker.server.client() as client:
            before = _read(client)
            took = trial.tell("revoke", ids=ids[1:])
            after = _read(client)
        scripts, calls = ((b - a) / (_TASKS - 1) for a, b in zip(before, after, strict=True))
        return {"scripts": scripts, "calls": calls, "took": took / (_TASKS - 1) * 1000}


def _read(client: redis.Redis) -> tuple[int, int]:
    """Scripts and commands so far."""
    stats = client.info("commandstats")
    return (
        sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha")),
        client.info("stats")["total_commands_processed"],
    )
