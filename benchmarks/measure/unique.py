"""unique: what a unique key adds to a put of 200 bytes, from one process, one message at a time."""

from __future__ import annotations

from ..metrics import Metric
from ..peers import Peer
from ..trial import Trial

METRICS = {
    "plain": Metric("without a key", "messages/s", more_is_better=True),
    "new": Metric("of a new key", "messages/s", more_is_better=True),
    "kept": Metric("of a key that is held: it is kept", "messages/s", more_is_better=True),
    "replaced": Metric("the one that waits is replaced", "messages/s", more_is_better=True),
    "plain_us": Metric("the server takes, without a key", "us"),
    "new_us": Metric("of a new key", "us"),
    "kept_us": Metric("of a key that is held: it is kept", "us"),
    "replaced_us": Metric("for each of two calls that replace one", "us"),
    "void": Metric("claims that hold no longer, of so many that were made", "%"),
}
CASES = {"unique": ({"messages": 100_000}, {"messages": 20_000})}
ROUNDS = (3, 1)


def takes_part(peer: Peer, case: str) -> bool:
    return peer.name == "toc"


def measure(peer: Peer, messages: int) -> dict[str, float]:
    """Messages a second, and microseconds of the server for each call."""
    with Trial(peer) as trial:
        return trial.run_inside("unique.py", trial.broker.url, messages)
