"""fleet: what idle workers cost the server. Each is a solo worker, otherwise as by default, with
heartbeats, gossip and mingle; once more without these, which is the consumer alone."""

from __future__ import annotations

import socket
import time

import redis

from ..metrics import Metric
from ..peers import Peer
from ..servers import RedisServer
from ..trial import Trial

_BARE = ("--without-heartbeat", "--without-gossip", "--without-mingle")

METRICS = {
    "commands": Metric("commands of a worker", "1/s"),
    "bare": Metric("the same without heartbeats, gossip and mingle", "1/s"),
    "stats": Metric("commands by INFO commandstats, within scripts too", "1/s"),
    "cpu": Metric("server's processor time, all workers", "% of one"),
    "connections": Metric("connections of a worker", ""),
}
CASES = {
    "fleet-1": ({"workers": 1}, {"workers": 1, "seconds": 5.0}),
    "fleet-10": ({"workers": 10}, {"workers": 4, "seconds": 5.0}),
    "fleet-50": ({"workers": 50}, {"workers": 10, "seconds": 5.0}),
}
ROUNDS = (1, 1)
LONG = ("fleet-1", "fleet-50")


def takes_part(peer: Peer, case: str) -> bool:
    return peer.is_celery and peer.is_redis


def measure(peer: Peer, workers: int, seconds: float = 10.0) -> dict[str, float]:
    """Per second, and per worker but for the processor time."""
    with Trial(peer) as trial:
        _start(trial, workers)
        server = trial.broker.server
        with server.client() as client:
            busy, stats, began = server.cpu(), _calls(client), time.monotonic()
            time.sleep(seconds)
            took = time.monotonic() - began
            found = {
                "cpu": (server.cpu() - busy) / took * 100,
                "stats": (_calls(client) - stats) / took / workers,
                "commands": _commands(server, seconds) / workers,
                "connections": (client.info("clients")["connected_clients"] - 1) / workers,
            }
    with Trial(peer) as trial:
        _start(trial, workers, *_BARE)
        found["bare"] = _commands(trial.broker.server, seconds) / workers
    return found


def _start(trial: Trial, workers: int, *options: str) -> None:
    # Two at a time: a machine that starts fifty at once takes long.
    for first in range(0, workers, 2):
        for _ in range(first, min(first + 2, workers)):
            trial.start("-P", "solo", *options)
        trial.wait_ready(min(first + 2, workers))
    time.sleep(3)  # what belongs to the start, gossip among it, is over


def _calls(client: redis.Redis) -> int:
    stats = client.info("commandstats")
    return sum(entry["calls"] for entry in stats.values())


def _commands(server: RedisServer, seconds: float) -> float:
    """Commands a second that clients send; what scripts call is not counted."""
    data = bytearray()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"MONITOR\r\n")
        connection.settimeout(0.1)
        began = time.monotonic()
        while (now := time.monotonic()) < began + seconds:
            try:
                data += connection.recv(1 << 20)
            except TimeoutError:
                continue
    # +1700000000.000000 [0 127.0.0.1:5000] "PING", or [0 lua] of what a script calls
    lines = [line for line in bytes(data).split(b"\r\n")[1:] if line.startswith(b"+")]
    return sum(b" lua] " not in line[:64] for line in lines) / (now - began)
