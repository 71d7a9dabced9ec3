"""floor: what nobody can go below on this machine: a bare round trip to Redis, and Celery without
a broker, sending into its own process's memory and working in a solo pool from there.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time

from ..metrics import Metric
from ..peers import INSIDE, Peer
from ..trial import Trial

METRICS = {
    "ping": Metric("round trip of a PING on a bare socket (p50)", "us"),
    "send": Metric("Celery sends scheduled tasks into memory", "tasks/s", more_is_better=True),
    "drain": Metric("a solo worker drains them from memory", "tasks/s", more_is_better=True),
}
CASES = {"floor": ({"tasks": 10_000}, {"tasks": 2_000})}
ROUNDS = (3, 1)

_PING = b"*1\r\n$4\r\nPING\r\n"


def takes_part(peer: Peer, case: str) -> bool:
    return peer.is_product


def measure(peer: Peer, tasks: int) -> dict[str, float]:
    """Microseconds, and tasks a second."""
    with Trial(peer) as trial:
        times = []
        with socket.create_connection(("127.0.0.1", trial.broker.server.port)) as connection:
            for _ in range(tasks):
                began = time.perf_counter()
                connection.sendall(_PING)
                connection.recv(64)
                times.append(time.perf_counter() - began)
    made = subprocess.run(
        [str(peer.python), str(INSIDE / "floor.py"), str(tasks)],
        env={**os.environ, "C_FORCE_ROOT": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return {"ping": sorted(times)[len(times) // 2] * 1e6, **json.loads(made.stdout)}
