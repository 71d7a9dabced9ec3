"""A primary, its replicas and their sentinels: real ones, on free loopback ports."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

import redis

from .certificates import OnlyTLS
from .servers import Host, Server
from .waiting import wait_until

#: By which the sentinels know the primary.
NAME = "mymaster"


class SentinelProcess(Server):
    """A sentinel; it keeps what it knows in its own configuration file."""

    def __init__(
        self,
        directory: Path,
        primary: Server,
        quorum: int,
        *lines: str,
        options: tuple[str, ...] = (),
    ) -> None:
        super().__init__(directory, *options)
        self.primary, self.quorum, self.lines = primary, quorum, lines

    def launch(self) -> None:
        path = self.directory / "sentinel.conf"
        if not path.exists():
            at = self.primary.host.address
            lines = [
                f"sentinel monitor {NAME} {at} {self.primary.port} {self.quorum}",
                f"sentinel down-after-milliseconds {NAME} 600",
                f"sentinel failover-timeout {NAME} 3000",
                *self.lines,
            ]
            path.write_text("\n".join(lines) + "\n")
        command = [*self.host.enter, self.program(), str(path), "--sentinel", *self.ports()]
        command += [*self.host.listen(self.port), "--dir", str(self.directory), *self.options]
        with open(self.directory / "server.log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)


class TLSSentinel(OnlyTLS, SentinelProcess):
    pass


class TLSOnlyServer(OnlyTLS, Server):
    pass


class Deployment:
    """A primary, replicas and sentinels.

    options: of the servers
    lines: of the sentinels' configuration
    tls: options with which all of them speak nothing but TLS
    hosts: where they run: the primary and a sentinel on the first, and so on
    """

    def __init__(
        self,
        directory: Path,
        *options: str,
        replicas: int = 1,
        sentinels: int = 3,
        lines: tuple[str, ...] = (),
        tls: tuple[str, ...] = (),
        hosts: Sequence[Host] = (),
    ) -> None:
        self.directory = directory
        server, sentinel = (TLSOnlyServer, TLSSentinel) if tls else (Server, SentinelProcess)
        if tls:
            tls = (*tls, "--tls-replication", "yes")
            options += tls
        options = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1", *options)
        self.primary = server(self._place("primary"), *options)
        address = hosts[0].address if hosts else self.primary.host.address
        following = ("--replicaof", address, str(self.primary.port))
        self.replicas = [
            server(self._place(f"replica{i}"), *following, *options) for i in range(replicas)
        ]
        self.sentinels = [
            sentinel(
                self._place(f"sentinel{i}"), self.primary, sentinels // 2 + 1, *lines, options=tls
            )
            for i in range(sentinels)
        ]
        for number, host in enumerate(hosts):
            self.servers[number].host = self.sentinels[number].host = host

    @property
    def servers(self) -> list[Server]:
        return [self.primary, *self.replicas]

    def _place(self, name: str) -> Path:
        made = self.directory / name
        made.mkdir()
        return made

    def start(self) -> Deployment:
        for server in self.servers:
            server.start()
        self._wait(lambda: self.in_step(len(self.replicas)), "the replicas do not follow")
        for sentinel in self.sentinels:
            sentinel.start()
        self._wait(self._agreed, "the sentinels do not find each other")
        return self

    def in_step(self, number: int) -> bool:
        """Whether so many replicas follow the primary."""
        with self.primary.client() as client:
            info = client.info("replication")
        states = [info[f"slave{i}"]["state"] for i in range(info["connected_slaves"])]
        return states.count("online") >= number

    def _agreed(self) -> bool:
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                state = client.sentinel_masters()[NAME]
            others = state["num-other-sentinels"]
            if others < len(self.sentinels) - 1 or state["num-slaves"] < len(self.replicas):
                return False
        return True

    def _wait(self, holds, what: str, seconds: float = 30) -> None:
        wait_until(holds, seconds, what)

    def master(self) -> tuple[str, int]:
        """Where the master is, by the first sentinel that answers."""
        for sentinel in self.sentinels:
            with contextlib.suppress(redis.ConnectionError), sentinel.client() as client:
                state = client.sentinel_masters()[NAME]  # redis-py 6 fails at the shorter way
                return state["ip"], state["port"]
        raise AssertionError("no sentinel answers")

    def acting(self) -> Server:
        """The server that is the master by now."""
        port = self.master()[1]
        return next(s for s in self.servers if s.port == port)

    def wait_for_failover(self, seconds: float = 60) -> Server:
        """The server that has become the master in the primary's place."""

        def done() -> bool:
            server = self.acting()
            if server is self.primary:
                return False
            with server.client() as client:
                return client.info("replication")["role"] == "master"

        self._wait(done, "no failover", seconds)
        return self.acting()

    def __enter__(self) -> Deployment:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for server in (*self.sentinels, *self.servers):
            server.kill()

    @property
    def hosts(self) -> str:
        return ",".join(f"{sentinel.host.address}:{sentinel.port}" for sentinel in self.sentinels)

    @property
    def toc_url(self) -> str:
        return f"toc+sentinel://{self.hosts}/0?master_name={NAME}"
