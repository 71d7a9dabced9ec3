"""fleet-gossip: how far behind a worker's gossip is in a large fleet whose workers send events, and
what reading them costs a worker that has nothing else to do.

The worker is a real one. The rest of the fleet is a program that sends what they would send: each
a heartbeat every two seconds, and together so many events of tasks a second.
"""

from __future__ import annotations

import threading
import time

import psutil

from ..metrics import Metric, percentile
from ..peers import Peer
from ..trial import Trial

METRICS = {
    "lag_p50": Metric("age of a heartbeat when gossip has it (p50)", "s"),
    "lag_max": Metric("the same, at most", "s"),
    "heard": Metric("heartbeats heard, of those sent", "%"),
    "cpu": Metric("processor time of the idle worker for it", "% of one"),
    "sent": Metric("events sent", "1/s"),
}
CASES = {
    "fleet-gossip-500": (
        {"workers": 500, "events": 1000, "seconds": 60.0},
        {"workers": 500, "events": 1000, "seconds": 20.0},
    )
}
ROUNDS = (1, 1)

#: Seconds for which the worker is measured without a fleet around it.
_ALONE = 10.0

#: Seconds after the last event in which what is behind may still come in.
_AFTER = 5.0


def takes_part(peer: Peer, case: str) -> bool:
    return peer.is_product


def measure(peer: Peer, workers: int, events: int, seconds: float) -> dict[str, float]:
    with Trial(peer) as trial:
        heard = trial.directory / "gossip"
        heard.touch()
        trial.start("-P", "solo", "-E")
        trial.wait_ready(1)
        [worker] = trial.processes()
        time.sleep(3)  # what belongs to the start is over
        alone = _share(worker, _ALONE)
        sent: list[int] = []
        options = {"workers": workers, "events": events, "seconds": seconds}
        sender = threading.Thread(target=lambda: sent.extend(trial.tell("events", **options)))
        sender.start()
        time.sleep(1)
        busy = _share(worker, seconds - 2)
        sender.join()
        time.sleep(_AFTER)
        lags = [float(line) for line in heard.read_text().split()]
        beats, others, took = sent
        return {
            "lag_p50": percentile(lags, 50),
            "lag_max": max(lags),
            "heard": len(lags) / beats * 100,
            "cpu": (busy - alone) * 100,
            "sent": (beats + others) / took,
        }


def _share(process: psutil.Process, seconds: float) -> float:
    """The part of a processor that it uses in a while."""
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    time.sleep(seconds)
    return (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)
