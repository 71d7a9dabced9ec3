"""notify: what one notifier sends to a target on the same machine, and whether a slow target
delays another one."""

from __future__ import annotations

from ..metrics import Metric
from ..peers import Peer
from ..trial import Trial

METRICS = {
    "rate": Metric("notifications sent and acknowledged", "messages/s", more_is_better=True),
    "alone": Metric("from put to target (p50)", "ms"),
    "beside": Metric("the same beside a target that never answers", "ms"),
    "beside_p99": Metric("the same, p99", "ms"),
}
CASES = {"notify": ({"seconds": 10.0}, {"seconds": 4.0})}
ROUNDS = (3, 1)


def takes_part(peer: Peer, case: str) -> bool:
    return peer.name == "toc"


def measure(peer: Peer, seconds: float) -> dict[str, float]:
    """Messages a second, and milliseconds."""
    with Trial(peer) as trial:
        return trial.inside("notify_load.py", seconds)
