"""One measurement's surroundings: a fresh broker of a peer, workers, a producer, and notes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from .inside import notes
from .peers import INSIDE, Broker, Peer

#: A folder in memory, where the system has one.
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

#: Seconds that a worker may take until it is ready.
START_TIMEOUT = 120.0

#: Seconds that a producer may take for what it is told.
TELL_TIMEOUT = 900.0


class Trial:
    """Use it in a with block; what it has started ends with that."""

    def __init__(self, peer: Peer, settings: dict[str, Any] | None = None) -> None:
        """settings: of the Celery app, beside the peer's own"""
        self.peer = peer
        self._settings = {**peer.settings, **(settings or {})}
        self.broker: Broker
        self.workers: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()
        self._producer: subprocess.Popen[str] | None = None

    def inside(self, script: str, *arguments: object) -> dict[str, float]:
        """Run a script with the peer's Python, for the broker; what it prints as JSON."""
        made = subprocess.run(
            [str(self.peer.python), str(INSIDE / script), self.broker.url, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": self.peer.path, "PYTHONWARNINGS": "ignore"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
            check=True,
        )
        return dict(json.loads(made.stdout))

    def __enter__(self) -> Trial:
        with ExitStack() as stack:
            directory = tempfile.mkdtemp(prefix="toc-notes-", dir=_MEMORY)
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            self.directory = Path(directory)
            self.broker = stack.enter_context(self.peer.broker())
            self._environment = {
                **os.environ,
                "PYTHONPATH": self.peer.path,
                "PYTHONWARNINGS": "ignore",
                "BENCH_BROKER": self.broker.url,
                "BENCH_SETTINGS": json.dumps(self._settings),
                "BENCH_NOTES": directory,
                "C_FORCE_ROOT": "1",
            }
            stack.callback(self._end_all)
            self._stack = stack.pop_all()
        return self

    def run_inside(self, script: str, *args: object, timeout: float = 300) -> dict[str, Any]:
        """Run a script of ``benchmarks/inside`` with the peer's Python; what it printed as JSON."""
        made = subprocess.run(
            [str(self.peer.python), str(INSIDE / script), *map(str, args)],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if made.returncode:
            raise RuntimeError(f"{script} {' '.join(map(str, args))}: {made.stderr[-3000:]}")
        return dict(json.loads(made.stdout))

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # -- workers

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Start a worker; return at once. options: of Celery's command line"""
        command = [str(self.peer.python)]
        if self.peer.is_celery:
            name = f"w{len(self.workers)}@bench"
            command += ["-m", "celery", "-A", "app", "worker", "-l", "WARNING", "-n", name]
            command += options
        else:
            command += [part.format(url=self.broker.url) for part in self.peer.worker]
        with open(self.directory / "workers.log", "ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.workers.append(process)
        return process

    def work(self, number: int, *options: str) -> None:
        """Start workers, and return when they are ready and have warmed up.

        The warm-up takes each of their processes through a few tasks, now and delayed.
        """
        for _ in range(number):
            self.start(*options)
        if self.peer.is_celery:
            self.wait_ready(len(self.workers))
            self.tell("prepare")
        before = self.count()
        self.tell("warm_up", tasks=20)
        self.wait(before + 20, START_TIMEOUT)
        if self.peer.is_celery:
            self.tell("warm_up", tasks=5, countdown=1.2)
            self.wait(before + 25, START_TIMEOUT)
            time.sleep(0.5)  # acknowledgements and heartbeats of the start are out of the way

    def beat(self, scheduler: str | None = None) -> None:
        """Start Celery's beat, with the scheduler of that class if it is another one."""
        settings = dict(self.peer.settings)
        if scheduler is not None:
            settings["beat_scheduler"] = scheduler
            settings["redbeat_redis_url"] = f"redis://{self.broker.server.address}/0"
        command = [str(self.peer.python), "-m", "celery", "-A", "app", "beat", "-l", "WARNING"]
        command += ["--pidfile=", "-s", str(self.directory / "beat-schedule")]
        with open(self.directory / "workers.log", "ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.directory,
                env={**self._environment, "BENCH_SETTINGS": json.dumps(settings)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.workers.append(process)

    def wait_ready(self, number: int) -> None:
        """Return when so many of Celery's workers are ready."""
        self._wait(
            lambda: len(list(self.directory.glob("*.ready"))) >= number,
            START_TIMEOUT,
            f"not {number} workers are ready",
        )

    def _end_all(self) -> None:
        if self._producer is not None:
            self._producer.stdin.close()
            try:
                self._producer.wait(5)
            except subprocess.TimeoutExpired:
                self._producer.kill()
                self._producer.wait()
        for worker in self.workers:
            kill(worker)

    def processes(self) -> list[psutil.Process]:
        """The workers, and the processes of their pools."""
        mains = [psutil.Process(worker.pid) for worker in self.workers]
        return [p for main in mains for p in (main, *main.children(recursive=True))]

    def processor_seconds(self) -> float:
        """Processor time so far of the producer and the workers."""
        every = self.processes()
        if self._producer is not None:
            every.append(psutil.Process(self._producer.pid))
        return float(sum(sum(process.cpu_times()[:2]) for process in every))

    # -- the producer

    def tell(self, do: str, **options: Any) -> Any:
        """Have the producer do something, and return what it answers."""
        if self._producer is None:
            module = self.peer.jobs or "producer"
            with open(self.directory / "producer.log", "ab") as log:
                self._producer = subprocess.Popen(
                    [str(self.peer.python), "-m", module],
                    cwd=self.directory,
                    env=self._environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        self._producer.stdin.write(json.dumps({"do": do, **options}) + "\n")
        self._producer.stdin.flush()
        # A broker that blocks its producers must not block the run.
        limit = threading.Timer(TELL_TIMEOUT, self._producer.kill)
        limit.start()
        line = self._producer.stdout.readline()
        limit.cancel()
        if not line:
            raise RuntimeError((self.directory / "producer.log").read_text()[-3000:])
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.peer.title}: {answer['error']}")
        return answer["result"]

    # -- the notes

    def count(self) -> int:
        """How many tasks have started."""
        return notes.count(str(self.directory))

    def starts(self) -> list[tuple[int, float, int]]:
        """(number, time, process) of each start but those of the warm-up."""
        return [start for start in notes.read(str(self.directory)) if start[0] >= 0]

    def wait(self, number: int, timeout: float = 60.0) -> None:
        """Return when so many have started, the warm-up's included."""
        self._wait(lambda: self.count() >= number, timeout, f"not {number} tasks have started")

    def _wait(self, done: Any, timeout: float, text: str) -> None:
        deadline = time.monotonic() + timeout
        while not done():
            dead = any(worker.poll() is not None for worker in self.workers)
            if dead or time.monotonic() > deadline:
                log = self.directory / "workers.log"
                tail = log.read_text(errors="replace")[-3000:] if log.exists() else ""
                raise RuntimeError(f"{self.peer.title}: {text} (but {self.count()})\n{tail}")
            time.sleep(0.02)  # the tasks run in other processes


def kill(worker: subprocess.Popen[bytes]) -> None:
    """Kill a worker and the processes of its pool, at once."""
    try:
        main = psutil.Process(worker.pid)
        family = [main, *main.children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    worker.wait()
    psutil.wait_procs(family, timeout=5)
