"""idle: what a large fleet costs the server while nothing is due, and how soon a task starts that
nobody was told of. The consumers are the transport's own, without Celery around them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from contextlib import ExitStack
from typing import Any

import redis

from kombu_toc.center.calls import PutRequest

from ..metrics import Metric, percentile
from ..peers import INSIDE, Peer
from ..trial import Trial

METRICS = {
    "cpu": Metric("server's processor time, all consumers", "% of one"),
    "commands": Metric("commands by INFO, all consumers", "1/s"),
    "scripts": Metric("scripts run, all consumers", "1/s"),
    "connections": Metric("connections of a consumer", ""),
    "lost_p50": Metric("starts after its announcement was deleted (p50)", "ms"),
    "lost_max": Metric("the same, at most", "ms"),
}
CASES = {
    "idle-500": (
        {"consumers": 500, "queues": 40, "seconds": 30.0},
        {"consumers": 100, "queues": 40, "seconds": 10.0},
    )
}
ROUNDS = (1, 1)

#: Consumers of one program.
_TOGETHER = 125

#: Seconds in which the start is over: all have looked into their queues, and one keeps these in
#: order. That is so when the server runs no more scripts than in the while before.
_SETTLES, _AT_MOST = 10.0, 180.0

#: Messages whose announcements are deleted, and seconds until each is due.
_LOST, _DELAY = 10, 0.5

_BODY = b'{"h":{},"p":{},"t":null,"e":null}\nx'


def takes_part(peer: Peer, case: str) -> bool:
    return peer.is_product


def measure(peer: Peer, consumers: int, queues: int, seconds: float) -> dict[str, float]:
    """The server's load over a while, and milliseconds."""
    with Trial(peer) as trial, ExitStack() as stack:
        center = _declared(trial, queues)
        for first in range(0, consumers, _TOGETHER):
            stack.callback(_ended, _started(trial, min(consumers - first, _TOGETHER), queues))
        client = center.client
        _wait_until_idle(client)
        before, began = _read(client), time.monotonic()
        time.sleep(seconds)
        after, took = _read(client), time.monotonic() - began
        cpu, commands, scripts = ((b - a) / took for a, b in zip(before, after, strict=True))
        connected = client.info("clients")["connected_clients"] - 1
        late = [_lost(center, number, queues) for number in range(_LOST)]
        return {
            "cpu": cpu * 100,
            "commands": commands,
            "scripts": scripts,
            "connections": connected / consumers,
            "lost_p50": percentile(late, 50),
            "lost_max": max(late),
        }


def _declared(trial: Trial, queues: int) -> Any:
    from ..schedule import center_of

    center = center_of(trial)
    for i in range(queues):
        center.queues.declare(f"q{i}")
    return center


def _started(trial: Trial, number: int, queues: int) -> subprocess.Popen[str]:
    """A program of so many consumers, which listen when this returns."""
    environment = {
        **os.environ,
        "PYTHONPATH": trial.peer.path,
        "BENCH_BROKER": trial.broker.url,
        "BENCH_SETTINGS": json.dumps(trial.peer.settings),
    }
    process = subprocess.Popen(
        [str(trial.peer.python), str(INSIDE / "consumers.py"), str(number), str(queues)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    if process.stdout.readline() != "ready\n":
        process.kill()
        process.wait()
        raise RuntimeError("the consumers do not start")
    return process


def _ended(process: subprocess.Popen[str]) -> None:
    process.stdin.close()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_until_idle(client: redis.Redis) -> None:
    deadline, ran = time.monotonic() + _AT_MOST, float("inf")
    while time.monotonic() < deadline:
        before = _read(client)[2]
        time.sleep(_SETTLES)
        last, ran = ran, _read(client)[2] - before
        if ran > 0.9 * last:
            return


def _read(client: redis.Redis) -> tuple[float, int, int]:
    """Seconds of processor time, commands and scripts so far."""
    cpu, stats = client.info("cpu"), client.info("commandstats")
    return (
        cpu["used_cpu_user"] + cpu["used_cpu_sys"],
        client.info("stats")["total_commands_processed"],
        sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha")),
    )


def _lost(center: Any, number: int, queues: int) -> float:
    """Milliseconds by which a message starts late whose announcement is deleted in the moment in
    which it was made."""
    client, name = center.client, f"q{number * 7 % queues}"
    client.delete("bench:got")
    call = center.commands.put(
        center.registry.topic(name),
        PutRequest(f"lost-{number}", _BODY, delay_us=int(_DELAY * 1_000_000)),
    )
    with client.pipeline(transaction=True) as pipe:
        pipe.execute_command(*call.command(whole=True))
        pipe.delete(center.keys.wake(name))
        put, _ = pipe.execute()
    due = put[2] / 1_000_000 + _DELAY
    deadline = time.monotonic() + 30
    while (got := client.lpop("bench:got")) is None:
        if time.monotonic() > deadline:
            raise RuntimeError("a message whose announcement was deleted is stuck")
        time.sleep(0.05)  # a consumer notes the time itself
    return (float(got) - due) * 1000
