"""http: what one process of the HTTP API does, loaded by another one on the same machine."""

from __future__ import annotations

import json
import os
import subprocess

from ..metrics import Metric
from ..peers import INSIDE, Peer
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
        made = subprocess.run(
            [str(peer.python), str(INSIDE / "http_load.py"), trial.broker.url, str(seconds)],
            env={**os.environ, "PYTHONPATH": peer.path, "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
    return dict(json.loads(made.stdout))
