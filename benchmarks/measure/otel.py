"""otel: what OpenTelemetry (``toc_otel``) takes of the processor, for each task that is sent with
``apply_async``, or that a consumer receives and acknowledges.

Each kind runs several times in turn; the least is taken, for what other programs do only adds.
"""

from __future__ import annotations

from ..metrics import Metric
from ..peers import Peer
from ..trial import Trial

KINDS = {
    "off": "off",
    "api": "on, without an SDK",
    "unsampled": "on, nothing is sampled",
    "spans": "on, spans and metrics",
}
METRICS = {
    f"{name}_{kind}": Metric(f"{title}, {shown}", "us")
    for name, title in (("send", "sent"), ("receive", "received and acknowledged"))
    for kind, shown in KINDS.items()
}
CASES = {"otel": ({"tasks": 5_000, "times": 5}, {"tasks": 3000, "times": 3})}
ROUNDS = (1, 1)


def takes_part(peer: Peer, case: str) -> bool:
    return peer.name == "toc"


def measure(peer: Peer, tasks: int, times: int) -> dict[str, float]:
    """Microseconds of the processor."""
    least: dict[str, float] = {}
    with Trial(peer) as trial:
        for _ in range(times):
            for kind in KINDS:
                found = trial.run_inside("otel.py", trial.broker.url, tasks, kind)
                for name, us in found.items():
                    key = f"{name}_{kind}"
                    least[key] = min(us, least.get(key, us))
    return least
