"""page: how soon the page of a broker with a million scheduled messages is there, and what it
costs while many look at it."""

from __future__ import annotations

from ..metrics import Metric
from ..peers import Peer
from ..trial import Trial

METRICS = {
    "overview": Metric("the overview, first view of a new server", "ms"),
    "queue": Metric("a queue, first view of a new server", "ms"),
    "message": Metric("a message, first view of a new server", "ms"),
    "viewers": Metric("processor time of the server with 20 viewers", "% of one"),
    "viewers_redis": Metric("processor time of Redis with 20 viewers", "% of one"),
}
CASES = {
    "page": ({"number": 1_000_000, "seconds": 10.0}, {"number": 200_000, "seconds": 4.0}),
}
ROUNDS = (3, 1)


def takes_part(peer: Peer, case: str) -> bool:
    return peer.name == "toc"


def measure(peer: Peer, number: int, seconds: float) -> dict[str, float]:
    """Milliseconds, and percent of a processor."""
    with Trial(peer) as trial:
        return trial.inside("page_load.py", number, seconds)
