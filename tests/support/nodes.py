"""pytest-celery's nodes, backed by processes of this machine instead of containers.

A test reads as any pytest-celery test does: it asks for ``celery_setup`` and finds a broker, a
backend, workers and an app. Where pytest-celery has a container, a node here has a process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from pytest_celery import CeleryTestBackend, CeleryTestBroker, CeleryTestWorker

from . import nursery
from .cluster import Cluster
from .servers import Server

ROOT = Path(__file__).parents[2]

#: Seconds a worker may take until it is ready: Celery's mingle alone takes one.
READY_TIMEOUT = 60.0

_numbers = itertools.count(1)


class ServerProcess:
    """What a broker or backend node has for a container: a server of the tests."""

    status = "running"

    def __init__(self, server: Server | Cluster, url: str) -> None:
        self.server = server
        self.name = self.id = f"server-{server.port}"
        self.celeryconfig = {"url": url, "host_url": url}

    def ready(self) -> bool:
        return self.server.answers()

    def logs(self) -> str:
        return self.server.logs()

    def reload(self) -> None:
        """A process needs none."""

    def teardown(self) -> None:
        """The server belongs to the fixture that started it."""


class WorkerProcess:
    """What a worker node has for a container: a ``celery worker``.

    options: of the command line, such as ``-P``, ``gevent``
    settings: of the app
    skew: seconds by which its clock is ahead
    execute: whether its start is a new program's, and not a fork's; a clock is set in one only
    """

    def __init__(
        self,
        directory: Path,
        broker: str,
        backend: str,
        log: str,
        *options: str,
        settings: dict[str, Any] | None = None,
        skew: float | None = None,
        execute: bool = False,
    ) -> None:
        self._start = subprocess.Popen if execute or skew is not None else nursery.Popen
        self.name = self.id = f"worker{next(_numbers)}"
        self.celeryconfig: dict[str, Any] = {}
        self._log_file = directory / f"{self.name}.log"
        self._command = [sys.executable, "-m", "celery", "-A", "tests.support.tasks", "worker"]
        self._command += ["-n", f"{self.name}@test", "-l", "INFO", *options]
        self._environment = {
            **os.environ,
            "E2E_BROKER": broker,
            "E2E_BACKEND": backend,
            "E2E_LOG": log,
            "E2E_SETTINGS": json.dumps(settings or {}),
            "PYTHONWARNINGS": "ignore",
        }
        if skew is not None:
            self._environment["E2E_SKEW"] = str(skew)
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = False

    def start(self) -> WorkerProcess:
        self._asked = False
        with open(self._log_file, "ab") as log:
            self._process = self._start(
                self._command, cwd=ROOT, env=self._environment, stdout=log, stderr=log
            )
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def status(self) -> str:
        running = self._process is not None and self._process.poll() is None
        return "running" if running else "exited"

    def worker_name(self) -> str:
        return f"{self.name}@test"

    def worker_queue(self) -> str:
        return "celery"

    def log_level(self) -> str:
        return "INFO"

    def logs(self) -> str:
        return self._log_file.read_text(errors="replace")

    def ready(self) -> bool:
        deadline = time.monotonic() + READY_TIMEOUT
        while " ready." not in self.logs():
            assert self.status == "running", self.logs()
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)  # Celery says that it is ready in its log, and nowhere else
        return True

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Send a signal, and wait if it is one that ends the process."""
        number = signal if isinstance(signal, int) else getattr(_signals, signal)
        os.kill(self.pid, number)
        if number in (_signals.SIGKILL, _signals.SIGTERM, _signals.SIGQUIT):
            self._process.wait(60)

    def reload(self) -> None:
        """A process needs none."""

    def restart(self, timeout: float = 10) -> None:
        self.teardown()
        self._log_file.unlink()
        self.start().ready()

    def processes(self) -> list[psutil.Process]:
        """The worker's main process and its pool."""
        main = psutil.Process(self.pid)
        return [main, *main.children(recursive=True)]

    def ask_to_stop(self) -> None:
        """Tell it, once, as an operator would; teardown() waits until it has."""
        if self.status == "running" and not self._asked:
            self._asked = True
            os.kill(self.pid, _signals.SIGTERM)

    def teardown(self) -> None:
        """Stop it as an operator would; what does not stop is a failure."""
        if self.status != "running":
            return
        self.ask_to_stop()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            for process in self.processes():
                process.kill()
            raise AssertionError(f"the worker did not stop:\n{self.logs()[-3000:]}") from None

    def end(self) -> None:
        """Kill it and its pool at once: none sees the end of another, and acts on it."""
        if self.status != "running":
            return
        os.kill(self.pid, _signals.SIGSTOP)  # it forks nobody after they are counted
        for process in reversed(self.processes()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()


_signals = signal


class Broker(CeleryTestBroker):
    """A broker node; `container` is a :class:`ServerProcess`."""


class Backend(CeleryTestBackend):
    """A result backend node; `container` is a :class:`ServerProcess`."""


class Worker(CeleryTestWorker):
    """A worker node; `container` is a :class:`WorkerProcess`."""

    container: WorkerProcess

    def hostname(self) -> str:
        return self.container.worker_name()
