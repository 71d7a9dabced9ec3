"""How evenly a Redis Cluster's nodes are loaded, and what a message costs each of them.

::

    python -m benchmarks.spread --nodes 1,2,4

A number of messages are put, popped and acknowledged through the center by one process, and a
number of tasks are sent to and run by a worker, of one queue or several; a queue has 64 slots. Of
each node, what it says of itself is taken before and after: the scripts it has run (``INFO
commandstats``: EVALSHA) and its processor time (``INFO cpu``), by which a message costs so many
microseconds. The node that has ``{toc}``, the keys of no single slot, has more to do: it is marked
with a star.

The worst is the most that a node has, by the mean of all nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kombu_toc import center_for
from kombu_toc.center.calls import PutRequest

ROOT = Path(__file__).parents[1]
SLOTS = 64

#: Messages that go to the center together.
BATCH = 100


class Load:
    """What nodes have done since this was made."""

    def __init__(self, cluster: Any) -> None:
        self._nodes = cluster.primaries()
        self._home = cluster.node_of("{toc}")
        self._before = self._read()

    def _read(self) -> list[tuple[int, float]]:
        found = []
        for node in self._nodes:
            with node.client() as client:
                stats = client.info("commandstats")
                cpu = client.info("cpu")
            used = cpu["used_cpu_user"] + cpu["used_cpu_sys"]
            found.append((stats.get("cmdstat_evalsha", {}).get("calls", 0), used))
        return found

    def show(self, what: str, messages: int, slots: list[int]) -> None:
        done = [(a - b, x - y) for (a, x), (b, y) in zip(self._read(), self._before, strict=True)]
        scripts = [calls for calls, _ in done]
        cost = [seconds / messages * 1e6 for _, seconds in done]
        stars = ["*" if node is self._home else "" for node in self._nodes]

        def row(name: str, values: list[float], form: str) -> None:
            mean = sum(values) / len(values)
            each = "  ".join(f"{v:{form}}{s}" for v, s in zip(values, stars, strict=True))
            print(f"  {name:<22} {each}   worst {max(values) / mean:.2f}, sum {sum(values):{form}}")

        print(f"{len(done)} nodes, {what}, {messages} messages")
        row("slots", slots, ".0f")
        row("scripts", scripts, ".0f")
        row("us a message", cost, ".1f")
        print(flush=True)


def slots_by_node(cluster: Any, *topics: str) -> list[int]:
    nodes = [
        cluster.node_of(f"{{{topic}:{number}}}") for topic in topics for number in range(SLOTS)
    ]
    return [nodes.count(node) for node in cluster.primaries()]


def through_center(cluster: Any, messages: int, topic: str) -> None:
    center = center_for(cluster.toc_url)
    declared = center.queues.declare(topic, slots=SLOTS)
    center.runner.run(center.commands.put(declared, PutRequest("first", b"")))
    center.ack(center.pop(topic, limit=10).messages)
    slots, load = slots_by_node(cluster, topic), Load(cluster)
    body = os.urandom(200)
    for first in range(0, messages, BATCH):
        some = range(first, first + BATCH)
        center.runner.run_puts(
            [center.commands.put(declared, PutRequest(f"m{number}", body)) for number in some]
        )
        left = BATCH
        while left:
            popped = center.pop(topic, limit=BATCH).messages
            center.ack(popped)
            left -= len(popped)
    load.show("put, pop and ack in batches of a hundred", messages, slots)
    center.client.close()


def through_worker(cluster: Any, messages: int, number_of_queues: int, directory: Path) -> None:
    from tests.support.servers import Server

    queues = ["celery", *(f"queue-{number}" for number in range(1, number_of_queues))]
    with ExitStack() as stack:
        folder = directory / "journal"
        folder.mkdir()
        journal = Server(folder).start()
        stack.callback(journal.stop)
        log = directory / "worker.log"
        environment = {
            **os.environ,
            "E2E_BROKER": cluster.toc_url,
            "E2E_BACKEND": "disabled://",
            "E2E_LOG": journal.url,
            "E2E_SETTINGS": json.dumps({"broker_transport_options": {"toc_slots": SLOTS}}),
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, "-m", "celery", "-A", "tests.support.tasks", "worker"]
        command += ["-c", "2", "-n", "w@spread", "-l", "INFO", "-Q", ",".join(queues)]
        with open(log, "ab") as output:
            worker = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output
            )
        stack.callback(worker.wait)
        stack.callback(worker.terminate)
        while " ready." not in log.read_text():
            assert worker.poll() is None, log.read_text()
            time.sleep(0.1)  # it is said in the log alone
        from tests.support.tasks import make_app

        options = {"broker_transport_options": {"toc_slots": SLOTS}}
        app = make_app(cluster.toc_url, "disabled://", **options)
        center = center_for(cluster.toc_url)
        slots, load = slots_by_node(cluster, *queues), Load(cluster)
        for number in range(messages):
            app.tasks["e2e.add"].apply_async((number, 1), queue=queues[number % len(queues)])
        while any((left := center.counts(q)).waiting or left.in_flight for q in queues):
            time.sleep(0.1)  # they are run in other processes
        load.show(f"sent to and run by a worker, {len(queues)} queues", messages, slots)
        center.client.close()
        app.close()


def main() -> int:
    from tests.support.cluster import Cluster

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spread",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", default="1,2,4", help="numbers of nodes (1,2,4)")
    parser.add_argument("--messages", type=int, default=20_000, help="through the center (20000)")
    parser.add_argument("--tasks", type=int, default=4000, help="through a worker (4000)")
    parser.add_argument("--queues", type=int, default=1, help="of the worker (1)")
    options = parser.parse_args()
    for number in map(int, options.nodes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            cluster = Cluster(directory / "cluster", primaries=number).start()
            try:
                through_center(cluster, options.messages, "mail")
                through_worker(cluster, options.tasks, options.queues, directory)
            finally:
                cluster.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
