"""How long tasks wait when a server is killed and its replica takes its place.

::

    python -m benchmarks.failover --kills 3
    python -m benchmarks.failover --node-timeout 15000 --kills 2
    python -m benchmarks.failover --broker sentinel

Two workers run tasks that are due 20 times a second in the slots of each node; these were sent
beforehand. Others are sent one after the other meanwhile, to the slots of each node too, with
Celery's own policy of repeating a publish. Then a server is killed (SIGKILL): on a Cluster in turn
the one that has the keys of no single slot, ``{toc}``, and another. All times are seconds since
the kill:

delivery    until a task of the killed server's slots starts that was not due before
publish     until a publish to such a slot returns that began after the kill
others      on a Cluster: the same two of the slots of the other nodes; and how late the latest
            task of theirs was
errors      publishes that raised an error until then
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot

from kombu_toc.model.limits import CLUSTER_SLOTS
from kombu_toc.model.topic import slot_of

ROOT = Path(__file__).parents[1]

#: Seconds between the times of two tasks of a node, and for which there are such tasks.
APART = 0.05
AHEAD = 2.0

#: Seconds before its time when a task may be with a worker already.
FETCHED = 0.1


class OfCluster:
    """Three primaries with a replica each."""

    kinds = ("{toc}", "another")

    def __init__(self, directory: Path, node_timeout: int) -> None:
        from tests.support.cluster import Cluster

        self._cluster = Cluster(
            directory, "--cluster-node-timeout", str(node_timeout), replicas=1
        ).start()
        self.url = self._cluster.toc_url
        self.stop = self._cluster.stop

    def parts(self) -> list[list[int]]:
        """The queue's slots, by node."""
        by_node: dict[Any, list[int]] = {}
        for number in range(CLUSTER_SLOTS):
            by_node.setdefault(self._cluster.node_of(f"{{celery:{number}}}"), []).append(number)
        return list(by_node.values())

    def kill(self, kind: str) -> tuple[float, list[int]]:
        """End a server; returns when, and the queue's slots that it had."""
        cluster = self._cluster
        home = cluster.owner(key_slot(b"toc"))
        parts = {cluster.node_of(f"{{celery:{part[0]}}}"): part for part in self.parts()}
        self._victim = next(n for n in parts if (n is home) == (kind == "{toc}"))
        began = time.time()
        cluster.kill(self._victim)
        return began, parts[self._victim]

    def mend(self) -> None:
        self._cluster.wait_ok(120)
        self._cluster.restart(self._victim)
        self._cluster.wait_ok(120)


class OfSentinel:
    """A master with a replica, and three sentinels."""

    kinds = ("master",)

    def __init__(self, directory: Path, node_timeout: int) -> None:
        from tests.support.sentinels import NAME, Deployment

        lines = (f"sentinel down-after-milliseconds {NAME} {node_timeout}",)
        self._deployment = Deployment(directory, lines=lines).start()
        self.url = self._deployment.toc_url
        self.stop = self._deployment.stop

    def parts(self) -> list[list[int]]:
        return [list(range(CLUSTER_SLOTS))]

    def kill(self, kind: str) -> tuple[float, list[int]]:
        self._victim = self._deployment.acting()
        began = time.time()
        self._victim.kill()
        return began, self.parts()[0]

    def mend(self) -> None:
        """Let the killed one come back as a replica."""
        deployment, deadline = self._deployment, time.monotonic() + 60
        while deployment.acting() is self._victim:
            assert time.monotonic() < deadline, "no failover"
            time.sleep(0.05)  # the sentinels do it
        self._victim.start()
        acting = deployment.acting()
        while True:
            with acting.client() as client:
                info = client.info("replication")
            if info["role"] == "master" and info.get("slave0", {}).get("state") == "online":
                return
            assert time.monotonic() < deadline, "the killed one does not follow the other"
            time.sleep(0.05)  # the sentinels tell it to


BROKERS = {"cluster": OfCluster, "sentinel": OfSentinel}


def ids(part: list[int], number: int) -> list[str]:
    """So many ids that lie in these slots."""
    found: list[str] = []
    while len(found) < number:
        made = str(uuid.uuid4())
        if slot_of(made, CLUSTER_SLOTS) in part:
            found.append(made)
    return found


class Publisher(threading.Thread):
    """Sends tasks to some slots, one after the other: (began, ended, error)."""

    def __init__(self, work: Any, part: list[int]) -> None:
        super().__init__(daemon=True)
        self._work, self._part = work, part
        self.told: list[tuple[float, float, str]] = []
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(APART):
            [id], error, began = ids(self._part, 1), "", time.time()
            try:
                self._work.apply_async((0,), task_id=id)
            except Exception as exc:
                error = f"{type(exc).__name__}: {exc}"
            self.told.append((began, time.time(), error))


def measure(broker: Any, work: Any, ledger: Any, kind: str, horizon: float) -> dict[str, float]:
    parts = broker.parts()
    begin = time.time() + AHEAD + 1
    due: dict[str, tuple[float, int]] = {}
    for number, part in enumerate(parts):
        for turn, id in enumerate(ids(part, int(horizon / APART))):
            due[id] = (begin - 1 + turn * APART, number)
    # All are there before the kill, whatever the time that sending them takes.
    sending = time.time()
    for id, (at, _) in sorted(due.items(), key=lambda item: item[1]):
        late = max(time.time() - sending - AHEAD, 0)
        work.apply_async((0,), task_id=id, eta=datetime.fromtimestamp(at + late, timezone.utc))
        due[id] = (at + late, due[id][1])
    publishers = [Publisher(work, part) for part in parts]
    for publisher in publishers:
        publisher.start()
    time.sleep(max(begin - time.time(), 0) + 1)  # for a moment all is as ever
    killed, part = broker.kill(kind)
    victim = parts.index(part)

    def first_publish(number: int) -> float | None:
        ends = (t[1] for t in publishers[number].told if t[0] >= killed and not t[2])
        return next(ends, None)

    def starts(number: int) -> list[tuple[float, float]]:
        """When tasks of a node started that were not with a worker at the kill, and their times."""
        ledger.read()
        return sorted(
            (entry["at"], due[entry["id"]][0])
            for entry in ledger.entries
            if entry["what"] == "started" and entry["id"] in due
            if due[entry["id"]][1] == number and due[entry["id"]][0] > killed + FETCHED
        )

    deadline = time.monotonic() + horizon
    numbers = range(len(parts))
    while not all(first_publish(n) and starts(n) for n in numbers):
        assert time.monotonic() < deadline, f"nothing goes on: {publishers[victim].told[-3:]}"
        time.sleep(0.1)  # it is written elsewhere, with its time
    time.sleep(2)  # what has waited is run
    for publisher in publishers:
        publisher.ended.set()
        publisher.join()
    broker.mend()
    others = [n for n in numbers if n != victim]
    found = {
        "delivery": starts(victim)[0][0] - killed,
        "publish": first_publish(victim) - killed,
        "errors": sum(bool(t[2]) for publisher in publishers for t in publisher.told),
    }
    if others:
        found["others_delivery"] = max(starts(n)[0][0] for n in others) - killed
        found["others_publish"] = max(first_publish(n) for n in others) - killed
        found["others_latest"] = max(at - eta for n in others for at, eta in starts(n))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.failover",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--broker", choices=BROKERS, default="cluster")
    parser.add_argument("--kills", type=int, default=3, help="of each kind (3)")
    parser.add_argument(
        "--node-timeout",
        type=int,
        help="ms after which a server that is silent is dead: cluster-node-timeout (2000), "
        "down-after-milliseconds (1000)",
    )
    options = parser.parse_args()
    timeout = options.node_timeout or (2000 if options.broker == "cluster" else 1000)
    print(f"{options.broker}, a silent server is dead after {timeout} ms; seconds since the kill")
    rows: list[tuple[str, dict[str, float]]] = []
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        from tests.chaos.ledger import Ledger
        from tests.support.servers import Server

        directory = Path(folder)
        (directory / "ledger").mkdir()
        server = Server(directory / "ledger")
        stack.callback(server.stop)
        server.start()
        place = directory / "broker"
        place.mkdir()
        broker = BROKERS[options.broker](place, timeout)
        stack.callback(broker.stop)
        os.environ["CHAOS_BROKER"] = broker.url
        os.environ["CHAOS_VISIBILITY_TIMEOUT"] = "60"
        os.environ["CHAOS_LEDGER"] = server.url
        from tests.chaos.app import app, work

        for number in range(2):
            log = directory / f"worker{number}.log"
            worker = _worker(number, log)
            stack.callback(worker.wait)
            stack.callback(worker.terminate)
            while " ready." not in log.read_text():
                assert worker.poll() is None, log.read_text()
                time.sleep(0.1)  # it is said in the log alone
        with app.connection_for_write() as connection:
            connection.ensure_connection()
        ledger = Ledger(redis.Redis(port=server.port))
        horizon = 20 + 2.5 * timeout / 1000
        for number in range(options.kills):
            for kind in broker.kinds:
                found = measure(broker, work, ledger, kind, horizon)
                rows.append((kind, found))
                text = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
                print(f"kill {number + 1} of {kind}: {text}", flush=True)
    for kind in dict.fromkeys(kind for kind, _ in rows):
        some = [found for other, found in rows if other == kind]
        for name in some[0]:
            values = sorted(found[name] for found in some)
            print(
                f"{kind:<10} {name:<16} median {statistics.median(values):6.2f}"
                f"   from {values[0]:6.2f} to {values[-1]:6.2f}"
            )
    return 0


def _worker(number: int, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "celery", "-A", "tests.chaos.app", "worker", "-c", "2"]
    command += ["-n", f"w{number}@failover", "-l", "INFO"]
    with open(log, "ab") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "CHAOS_WORKER": f"w{number}", "PYTHONWARNINGS": "ignore"},
            stdout=output,
            stderr=output,
        )


if __name__ == "__main__":
    sys.exit(main())
