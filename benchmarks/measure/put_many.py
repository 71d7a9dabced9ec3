"""put_many: how many messages of 200 bytes one process puts by lists, and acknowledges."""

from __future__ import annotations

from ..metrics import Metric
from ..peers import Peer
from ..trial import Trial

METRICS = {
    "one_by_one": Metric("scheduled, one by one", "messages/s", more_is_better=True),
    "scheduled": Metric("scheduled, in lists of 10,000", "messages/s", more_is_better=True),
    "immediate": Metric("immediate, in lists of 10,000", "messages/s", more_is_better=True),
    "acked": Metric("acknowledged in one list", "messages/s", more_is_better=True),
}
CASES = {"put_many": ({"messages": 200_000}, {"messages": 40_000})}
ROUNDS = (3, 1)


def takes_part(peer: Peer, case: str) -> bool:
    return peer.name == "toc"


def measure(peer: Peer, messages: int) -> dict[str, float]:
    """Messages a second."""
    with Trial(peer) as trial:
        return trial.run_inside("put_many.py", trial.broker.url, messages)
