"""``python -m benchmarks.inside.sizes``: what many queues, keys and consumers cost a server.

Arguments: of ``queues``, ``keys`` and ``consumers`` those that are wanted; then numbers. Prints a
line of JSON for each number. Consumers are 250 in a process (`consumers`), each with connections
and a heartbeat of its own; they are idle, but for a message at times.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kombu import Connection, Producer

import kombu_toc
from tests.support.servers import Server

from .keyed_cost import LIMIT, POPS, fill, pop, settle

#: Seconds for which the server is looked at, and messages that are put meanwhile.
SECONDS, PUTS = 10.0, 50


def spent(client: Any) -> float:
    said = client.info("cpu")
    return float(said["used_cpu_user"] + said["used_cpu_sys"])


def idle(client: Any, producer: Producer) -> dict[str, float]:
    """What the server does for idle consumers, and how late these are."""
    before, commands = spent(client), client.info("stats")["total_commands_processed"]
    time.sleep(SECONDS)
    used = spent(client) - before
    asked = client.info("stats")["total_commands_processed"] - commands
    client.delete("bench:got")
    late = []
    for _ in range(PUTS):
        due = time.time() + 0.1
        producer.publish("x", routing_key="q0", headers={"x-delay": 100})
        got = None
        while got is None and time.time() < due + 20:
            got = client.blpop("bench:got", timeout=2)
        late.append((float(got[1]) - due) * 1000 if got else 20_000.0)
    said = client.info()
    return {
        "percent of a processor": round(used / SECONDS * 100, 1),
        "commands a second": round(asked / SECONDS),
        "connections": said["connected_clients"],
        "late p50 ms": round(statistics.median(late), 1),
        "late max ms": round(max(late), 1),
    }


def producer_of(server: Server) -> Any:
    return Connection(server.toc_url).Producer()


def start(stack: ExitStack, url: str, number: int, queues: int) -> None:
    command = [sys.executable, "-m", "benchmarks.inside.consumers", str(number), str(queues)]
    environment = {**os.environ, "BENCH_BROKER": url}
    made = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    stack.callback(made.wait)
    stack.callback(made.kill)
    assert made.stdout is not None and made.stdout.readline() == "ready\n"


def of_consumers(server: Server, number: int) -> dict[str, float]:
    center = kombu_toc.center_for(server.toc_url)
    center.queues.declare("q0")
    with ExitStack() as stack, server.client() as client:
        for _ in range(0, number, 250):
            start(stack, server.toc_url, min(number, 250), 1)
        return idle(client, stack.enter_context(producer_of(server)))


def of_queues(server: Server, number: int) -> dict[str, float]:
    center = kombu_toc.center_for(server.toc_url)
    with ExitStack() as stack, server.client() as client:
        before = client.info("memory")["used_memory"]
        began = time.perf_counter()
        for n in range(number):
            center.put(f"q{n}", "one", b"x" * 200, delay=3600)
        filled = time.perf_counter() - began
        taken = client.info("memory")["used_memory"] - before
        start(stack, server.toc_url, 2, 1)
        found = idle(client, stack.enter_context(producer_of(server)))
        began = time.perf_counter()
        assert len(center.queues.names()) == number
        names = time.perf_counter() - began
        return {
            "ms to declare and put one": round(filled / number * 1000, 2),
            "bytes a queue with one": round(taken / number),
            "names ms": round(names * 1000, 1),
            **found,
        }


def of_keys(server: Server, number: int) -> dict[str, float]:
    center = kombu_toc.center_for(server.toc_url)
    center.queues.declare("plain")
    center.queues.declare("keyed", key_concurrency=1, key_rate="10/s")
    messages = max(number, 100_000)
    with server.client() as client:
        taken = {}
        for topic, keys in (("plain", 0), ("keyed", number)):
            before = client.info("memory")["used_memory"]
            fill(center, topic, messages, keys)
            taken[topic] = (client.info("memory")["used_memory"] - before) / messages
            settle(center, topic)
        times = [(pop(center, "plain"), pop(center, "keyed")) for _ in range(POPS)]
    plain, keyed = (statistics.median(each) / LIMIT for each in zip(*times, strict=True))
    return {
        "us a message without keys": round(plain, 1),
        "us a message with keys": round(keyed, 1),
        "bytes without keys": round(taken["plain"]),
        "bytes with keys": round(taken["keyed"]),
    }


def main() -> None:
    measured = {"queues": of_queues, "keys": of_keys, "consumers": of_consumers}
    wanted = [word for word in sys.argv[1:] if word in measured]
    numbers = [int(word) for word in sys.argv[1:] if word not in measured]
    for what in wanted:
        for number in numbers:
            with tempfile.TemporaryDirectory() as folder:
                server = Server(Path(folder)).start()
                try:
                    print(what, number, json.dumps(measured[what](server, number)), flush=True)
                finally:
                    server.stop()


if __name__ == "__main__":
    main()
