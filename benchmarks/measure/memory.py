"""memory: bytes in Redis per scheduled task, and what a worker grows by while they wait."""

from __future__ import annotations

import time

from ..metrics import Metric
from ..peers import Peer
from ..trial import Trial

METRICS = {
    "bytes": Metric("in Redis per scheduled task", "bytes"),
    "held": Metric("the same, once an idle worker has seen them", "bytes"),
    "growth": Metric("a worker's growth", "MB"),
}
CASES = {
    "memory": ({"tasks": 50_000}, {"tasks": 5000}),
    "memory-million": (
        {"tasks": 1_000_000, "fast": True},
        {"tasks": 100_000, "fast": True},
    ),
}
ROUNDS = (1, 1)

#: Seconds for which a worker's memory must stay as it is.
_STEADY = 4.0
_LONGEST = 300.0


def takes_part(peer: Peer, case: str) -> bool:
    return peer.is_celery and (case == "memory" or peer.is_product)


def measure(peer: Peer, tasks: int, fast: bool = False) -> dict[str, float | None]:
    """Bytes and megabytes.

    fast: put into the center by its own operation, with the envelope of a real task
    """
    found: dict[str, float | None] = {"bytes": None, "held": None}
    if peer.is_redis:
        with Trial(peer) as trial:
            trial.tell("prepare")
            empty = _used(trial)
            _schedule(trial, tasks, fast)
            found["bytes"] = (_used(trial) - empty) / tasks
    with Trial(peer) as trial:
        trial.work(1, "-c", "2")
        empty = _used(trial) if peer.is_redis else 0
        before = _steady(trial)
        _schedule(trial, tasks, fast)
        after = _steady(trial)
        found["growth"] = (after - before) / 1e6
        if peer.is_redis:
            found["held"] = (_used(trial) - empty) / tasks
    return found


def _schedule(trial: Trial, tasks: int, fast: bool) -> None:
    if fast:
        from ..schedule import fill, real_envelope

        fill(trial, tasks, real_envelope(trial))
    else:
        trial.tell("publish", tasks=tasks, countdown=86_400.0, spread=36_000.0)


def _used(trial: Trial) -> int:
    with trial.broker.server.client() as client:
        return client.info("memory")["used_memory"]


def _steady(trial: Trial) -> int:
    """What the worker's processes have for themselves, when that changes no more."""
    # Each process by itself: pool processes share pages with the main one.
    history: list[tuple[float, int]] = []
    end = time.monotonic() + _LONGEST
    while True:
        now = time.monotonic()
        size = sum(process.memory_full_info().uss for process in trial.processes())
        history = [entry for entry in history if entry[0] > now - _STEADY] + [(now, size)]
        sizes = [entry[1] for entry in history]
        if now - history[0][0] > _STEADY * 0.8 and max(sizes) - min(sizes) < 200_000:
            return size
        if now > end:
            raise RuntimeError(f"{trial.peer.title}: the worker's memory does not settle")
        time.sleep(0.2)  # it takes messages meanwhile, or does not
