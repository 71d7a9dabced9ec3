"""scale: what put, pop, cancel and counts cost with many tasks scheduled.

Each operation is one call at a time: the client's time is that of the whole round trip, the
server's is what it says it has spent on the calls (``INFO commandstats``).
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable
from typing import Any

import psutil

from kombu_toc.center.calls import PutRequest

from ..metrics import Metric
from ..peers import Peer
from ..trial import Trial

OPERATIONS = ("put", "pop", "cancel", "counts")

CASES = {
    "scale": (
        {"sizes": (10_000, 1_000_000, 10_000_000), "calls": 2000},
        {"sizes": (10_000, 200_000), "calls": 500},
    )
}
ROUNDS = (1, 1)

#: Bytes of memory that a scheduled task takes in Redis, at most.
_BYTES = 700

METRICS = {
    **{
        f"{name}_{where}_{size}": Metric(f"{name} at {size}, {where}", "us")
        for name in OPERATIONS
        for where in ("client", "server")
        for size in ("few", "most")
    },
    **{
        f"{name}_{where}_ratio": Metric(f"{name}, most : few, {where}", "")
        for name in OPERATIONS
        for where in ("client", "server")
    },
    "most": Metric("tasks at most", "tasks"),
}


def takes_part(peer: Peer, case: str) -> bool:
    return peer.is_product


def measure(peer: Peer, sizes: tuple[int, ...], calls: int) -> dict[str, float]:
    """Microseconds a call with the fewest and the most tasks scheduled, and their ratios.

    The sizes between are in the result as well, named by the number. Sizes for which the machine
    has too little memory are left out.
    """
    from ..schedule import center_of, fill, real_envelope

    found: dict[str, float] = {}
    with Trial(peer) as trial:
        trial.tell("prepare")
        body = real_envelope(trial)
        center = center_of(trial)
        sizes = tuple(
            size
            for size in sizes
            if size <= sizes[0] or size * _BYTES < psutil.virtual_memory().available
        )
        there = 0
        for size in sizes:
            fill(trial, size - there, body)
            there = size
            taken: list[Any] = []
            for step in _operations(center, body, calls // 4, taken).values():
                _cost(trial, step, calls // 4)  # warm-up
            for name, step in _operations(center, body, calls, taken).items():
                client, server = _cost(trial, step, calls)
                named = {sizes[0]: "few", sizes[-1]: "most"}.get(size, str(size))
                found[f"{name}_client_{named}"] = client
                found[f"{name}_server_{named}"] = server
            center.ack(taken)
    for name in OPERATIONS:
        for where in ("client", "server"):
            key = f"{name}_{where}"
            found[f"{key}_ratio"] = found[f"{key}_most"] / found[f"{key}_few"]
    found["most"] = sizes[-1]
    return found


def _operations(
    center: Any, body: bytes, calls: int, taken: list[Any]
) -> dict[str, Callable[[int], object]]:
    """Functions that do an operation for the n-th time, in the order in which they are to be
    measured: what is put is cancelled again. What is popped is added to `taken`.
    """
    from ..schedule import FIRST, SPAN, TOPIC

    topic = center.registry.topic(TOPIC)
    new = [str(uuid.uuid4()) for _ in range(calls)]
    middle = (FIRST + SPAN // 2) * 1_000_000

    def pop(number: int) -> None:
        taken.extend(center.pop(TOPIC, limit=1).messages)

    center.runner.run_all(
        [center.commands.put(topic, PutRequest(str(uuid.uuid4()), body)) for _ in range(calls)]
    )
    return {
        "pop": pop,
        "put": lambda n: center.runner.run(
            center.commands.put(topic, PutRequest(new[n], body, delay_us=middle + n * 1_000_000))
        ),
        "cancel": lambda n: center.cancel(new[n], topic=TOPIC),
        "counts": lambda n: center.counts(TOPIC),
    }


def _cost(trial: Trial, step: Callable[[int], object], calls: int) -> tuple[float, float]:
    """Microseconds a call: (median at the client, mean at the server)."""
    with trial.broker.server.client() as client:
        client.config_resetstat()
        times = []
        for number in range(calls):
            began = time.perf_counter_ns()
            step(number)
            times.append((time.perf_counter_ns() - began) / 1000)
        stats = client.info("commandstats")
    # What a script calls is counted with the script as well as by itself.
    sent = [v["usec"] for k, v in stats.items() if k in ("cmdstat_evalsha", "cmdstat_eval")]
    return statistics.median(times), sum(sent) / calls
