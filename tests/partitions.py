"""Parts the network of a real Sentinel or Cluster while ``kombu_toc.verify`` works on it.

    python -m tests.partitions --rounds 200
    python -m tests.partitions --rounds 20 --kind cluster --setting 1

Each server has a host of its own, a network namespace; so have the producers and consumers. A round
parts the network in one way, waits until that is over, and heals it. A table tells for each setting
what was lost, early or doubled, and by which cause. Exit code 1: something had no cause.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import redis

from kombu_toc import verify

from .support.cluster import Cluster, Node
from .support.networks import Network, NetworkHost
from .support.sentinels import NAME, Deployment
from .support.servers import Server

#: Seconds that a network is parted: longer than a lease lasts.
PARTED = 5.0

#: Seconds in which all is to be whole again, and those of work after that.
WHOLE, WORK = 60.0, 1.0

#: Seconds that a run may take when its faults are over: until all is done.
PATIENCE = 180.0


class Setting(NamedTuple):
    """toc_wait_replicas, and whether a primary without replicas refuses writes."""

    wait: int
    min_replicas: bool

    def __str__(self) -> str:
        return f"{self.wait}{', min-replicas-to-write 1' if self.min_replicas else ''}"


SETTINGS = (Setting(0, False), Setting(1, False), Setting(1, True))


class OfSentinel:
    """Three hosts with a server and a sentinel each."""

    HOSTS, SIZE, REPLICAS = 3, 1, 2

    def __init__(self, directory: Path, hosts: Sequence[NetworkHost], *options: str) -> None:
        self._deployment = Deployment(directory, *options, replicas=2, hosts=hosts)
        self.start, self.stop = self._deployment.start, self._deployment.stop
        self.servers = self._deployment.servers

    @property
    def url(self) -> str:
        return self._deployment.toc_url

    def is_whole(self) -> bool:
        masters = [server for server in self.servers if role(server) == "master"]
        for sentinel in self._deployment.sentinels:
            with sentinel.client() as client:
                state = client.sentinel_masters()[NAME]
            if state["port"] != masters[0].port or state["flags"] != "master":
                return False
        return len(masters) == 1


class OfCluster:
    """Three primaries and their replicas, on six hosts."""

    HOSTS, SIZE, REPLICAS = 6, 3, 1

    def __init__(self, directory: Path, hosts: Sequence[NetworkHost], *options: str) -> None:
        self._cluster = Cluster(directory, *options, replicas=1, hosts=hosts)
        self.start, self.stop = self._cluster.start, self._cluster.stop

    @property
    def servers(self) -> list[Node]:
        return self._cluster.nodes

    @property
    def url(self) -> str:
        return self._cluster.toc_url

    def is_whole(self) -> bool:
        return self._cluster.is_whole()


KINDS = {"sentinel": OfSentinel, "cluster": OfCluster}


def role(server: Server) -> str:
    with server.client() as client:
        return str(client.info("replication")["role"])


def replicated(master: Server, replicas: int) -> tuple[int, int]:
    """How much it has written, and how much of that so many replicas have."""
    with master.client() as client:
        info = client.info("replication")
    slaves = [info[f"slave{number}"] for number in range(info["connected_slaves"])]
    have = sorted((one["offset"] for one in slaves if one["state"] == "online"), reverse=True)
    return info["master_repl_offset"], have[replicas - 1] if len(have) >= replicas else -1


# -- ways to part a network: the master's host from those of the other servers, and the clients'

Way = Callable[[NetworkHost, list[NetworkHost], NetworkHost], None]


def both_ways(one: NetworkHost, others: list[NetworkHost]) -> None:
    one.lose(others)
    not_heard(others, one)


def not_heard(senders: list[NetworkHost], receiver: NetworkHost) -> None:
    for sender in senders:
        sender.lose([receiver])


def flap(master: NetworkHost, others: list[NetworkHost], clients: NetworkHost) -> None:
    for _ in range(5):
        master.link(False)
        time.sleep(0.4)
        master.link(True)
        time.sleep(0.4)


#: After the first two, another server takes the master's place before the network is healed.
WAYS: dict[str, Way] = {
    "from all servers": lambda master, others, clients: both_ways(master, others),
    "from all": lambda master, others, clients: master.link(False),
    "from the clients": lambda master, others, clients: both_ways(master, [clients]),
    "from a replica": lambda master, others, clients: both_ways(master, others[:1]),
    "no route": lambda master, others, clients: master.refuse([*others, clients]),
    "is not heard": lambda master, others, clients: master.lose([*others, clients]),
    "hears nothing": lambda master, others, clients: not_heard([*others, clients], master),
    "servers do not hear it": lambda master, others, clients: master.lose(others),
    "clients do not hear it": lambda master, others, clients: master.lose([clients]),
    "flaps": flap,
}


@dataclass
class Outcome:
    """What has come of some rounds.

    lost: ids of messages that a server forgot, whose put had been answered
    broken: what has no cause
    """

    ways: Counter[str] = field(default_factory=Counter)
    failovers: int = 0
    runs: int = 0
    puts: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: Counter[str] = field(default_factory=Counter)
    broken: list[verify.Broken] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        self.ways += other.ways
        self.failovers += other.failovers
        self.runs += other.runs
        self.puts += other.puts
        self.lost += other.lost
        self.doubled += other.doubled
        self.broken += other.broken

    def row(self, *head: object) -> str:
        broken = Counter(one.promise for one in self.broken)
        early = broken.pop(verify.EARLY, 0)
        causes = ", ".join(f"{name} {number}" for name, number in self.doubled.most_common())
        told = [*head, self.ways.total(), self.failovers, self.puts, len(self.lost), early]
        told += [self.doubled.total(), causes, dict(broken) or "nothing"]
        return " | ".join(map(str, told))


HEAD = (
    "kind | toc_wait_replicas | rounds | failovers | puts | lost | early | doubled | by"
    " | unexplained"
)


class Parting:
    """Rounds on one deployment.

    seconds: how long rounds begin
    """

    def __init__(self, directory: Path, kind: str, setting: Setting, seconds: float) -> None:
        self._directory, self._setting, self._seconds = directory, setting, seconds
        self._kind = KINDS[kind]
        self._history = directory / "history"
        self._outcome = Outcome()
        self._faults: list[verify.Event] = []

    def run(self, ways: Iterable[str]) -> Outcome:
        """Have the network parted in these ways, as many as there is time for, and judge."""
        options = ("--repl-timeout", "10")
        if self._setting.min_replicas:
            options += ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "1")
        with contextlib.ExitStack() as stack:
            self._network = stack.enter_context(Network(self._kind.HOSTS + 1))
            *hosts, self._clients = self._network.hosts
            folder = self._directory / "servers"
            folder.mkdir()
            self._servers = self._kind(folder, hosts, *options)
            stack.callback(self._servers.stop)
            self._servers.start()
            self._wait_whole()
            run = stack.enter_context(self._verifying())
            until = time.monotonic() + self._seconds
            for way in ways:
                if time.monotonic() > until:
                    break
                self._round(way, self._master())
                time.sleep(WORK)
            told, _ = run.communicate(timeout=self._seconds + PATIENCE)
        self._judge(told, run.returncode)
        return self._outcome

    @contextlib.contextmanager
    def _verifying(self) -> Iterator[subprocess.Popen[str]]:
        join = "&" if "?" in self._servers.url else "?"
        url = f"{self._servers.url}{join}toc_wait_replicas={self._setting.wait}"
        command = [*self._clients.enter, sys.executable, "-m", "kombu_toc.verify"]
        command += ["--broker", url, "--minutes", str(self._seconds / 60)]
        run = subprocess.Popen(
            [*command, "--history", str(self._history)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            while not list(self._history.glob("*/consumer-*")):
                assert run.poll() is None, run.communicate()[0]
                time.sleep(0.1)  # until it works
            yield run
        finally:
            if run.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(run.pid, 9)
                run.communicate()

    def _master(self) -> Server:
        return random.choice(self._masters())

    def _masters(self) -> list[Server]:
        return [one for one in self._servers.servers if role(one) == "master"]

    def _round(self, way: str, master: Server) -> None:
        others = [one.host for one in self._servers.servers if one is not master]
        others.sort(key=lambda host: host is not self._replica_of(master))
        since = self._wait_replicated()
        at, masters = time.monotonic(), self._masters()
        try:
            WAYS[way](master.host, others, self._clients)
            time.sleep(PARTED)
            if way in list(WAYS)[:2]:
                self._wait(lambda: len(self._masters()) > self._servers.SIZE, "nobody takes over")
        finally:
            self._network.heal()
        until, changes = self._wait_whole(masters)
        self._outcome.ways[way] += 1
        if changes:
            self._outcome.failovers += 1
            queues = [f"{queue}:" for queue in verify.QUEUES]
            fault = verify.Event(
                at, "network", verify.FORGOT, target=queues, since=since, until=until
            )
            self._faults.append(fault)
            [folder] = self._history.iterdir()
            with open(folder / "network", "a") as file:
                file.write(json.dumps(asdict(fault)) + "\n")

    def _replica_of(self, master: Server) -> Any:
        """The host of one of its replicas."""
        with master.client() as client:
            port = client.info("replication")["slave0"]["port"]
        return next(one.host for one in self._servers.servers if one.port == port)

    def _wait_whole(self, masters: Sequence[Server] = ()) -> tuple[float, int]:
        """Return when all is whole; returns since when the masters are those that they are, and how
        often others have been seen since they were those that are given. Until then somebody may
        work with one that is to follow another one, which is forgotten."""
        seen, since, changes = masters, time.monotonic(), 0

        def is_whole() -> bool:
            nonlocal seen, since, changes
            if (now := self._masters()) != seen:
                seen, since, changes = now, time.monotonic(), changes + 1
            return self._servers.is_whole() and self._masters() == seen

        self._wait(is_whole, "it does not become whole")
        self._wait_replicated()
        return since, changes

    def _wait_replicated(self) -> float:
        """Return the time before which nothing was done that a replica does not have. A connection
        that was cut may be silent for as long again: TCP tries it ever more rarely."""
        since, number = time.monotonic(), self._servers.REPLICAS
        marks = [(one, replicated(one, number)[0]) for one in self._masters()]
        self._wait(
            lambda: all(replicated(one, number)[1] >= written for one, written in marks),
            "a replica lags behind",
        )
        return since

    @staticmethod
    def _wait(holds: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + WHOLE
        while True:
            with contextlib.suppress(redis.RedisError, LookupError):  # one is being promoted
                if holds():
                    return
            assert time.monotonic() < until, what
            time.sleep(0.1)  # what one server knows of others comes by no event

    def _judge(self, told: str, code: int | None) -> None:
        [folder] = self._history.iterdir()
        history = verify.read(str(folder))
        verdict = verify.judge(history, verify.Rules(verify.LEASE, verify.QUEUES))
        spans = [(one.since or one.at, one.until) for one in self._faults]
        forgotten = {
            one.id
            for one in history
            if (one.what, one.stage) == (verify.PUT, verify.DONE)
            and any(since <= one.at <= until for since, until in spans)
        }
        outcome = self._outcome
        outcome.puts = verdict.counted[f"{verify.PUT} {verify.DONE}"]
        outcome.runs = verdict.counted[f"{verify.RUN} {verify.DONE}"]
        outcome.doubled = verdict.explained
        outcome.lost = [id for id in verdict.ids(verify.LOST) if id in forgotten]
        outcome.broken = [
            one
            for one in verdict.broken
            if not (one.promise == verify.LOST and one.id in forgotten)
        ]
        if code not in (0, 1):
            outcome.broken.append(
                verify.Broken(verify.HISTORY, "", f"it ended with {code}: {told}")
            )


def main() -> int:
    parser = argparse.ArgumentParser(description="Parts networks, and judges")
    parser.add_argument("--rounds", type=int, default=20, help="of each kind and setting")
    parser.add_argument("--kind", choices=KINDS, action="append", help="sentinel, cluster; both")
    parser.add_argument("--setting", type=int, choices=range(len(SETTINGS)), action="append")
    parser.add_argument("--directory", type=Path, help="where histories are to stay")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    random.seed(asked.seed)
    everything = True
    with tempfile.TemporaryDirectory() as temporary:
        directory = asked.directory or Path(temporary)
        print(HEAD, flush=True)
        for kind in asked.kind or KINDS:
            for number in asked.setting or range(len(SETTINGS)):
                total = Outcome()
                while (left := asked.rounds - total.ways.total()) > 0:
                    ways = random.sample(list(WAYS), len(WAYS))[:left]
                    folder = directory / f"{kind}-{number}-{total.ways.total()}"
                    folder.mkdir(parents=True)
                    total.add(Parting(folder, kind, SETTINGS[number], 15.0 * len(ways)).run(ways))
                    print(total.row(kind, SETTINGS[number]), *total.broken, sep="\n", flush=True)
                everything = everything and not total.broken
    return 0 if everything else 1


if __name__ == "__main__":
    sys.exit(main())
