"""http: what one process of the HTTP API does, loaded by another one on the same machine."""

from __future__ import annotations

from ..metrics import Metric
from ..peers import Peer
from ..trial import Trial

METRICS = {
    "puts": Metric("put, one in a request", "messages/s", more_is_better=True),
    "pulls": Metric("leased and acknowledged, 100 in a request", "messages/s", more_is_better=True),
    "late": Metric("a long poll answers after the due time (p50)", "ms"),
    "waiting": Metric("processor time while 1,000 clients wait", "% of one"),
}
CASES = {"http": ({"seconds": 10.0}, {"seconds": 4.0})}
ROUNDS = (3, 1)


def takes_part(peer: Peer, case: str) -> bool:
    return peer.name == "toc"


def measure(peer: Peer, seconds: float) -> dict[str, float]:
    """Messages a second, milliseconds, and percent of a processor."""
    with Trial(peer) as trial:
        return trial.inside("http_load.py", seconds)
