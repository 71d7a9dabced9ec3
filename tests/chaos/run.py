"""Starts everything, breaks it as the schedule says, and waits for what is left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import redis
from celery import Celery

from ..support import nursery
from ..support.servers import Server
from .app_queues import QUEUES
from .brokers import CLUSTER_FAMILIES, LENGTHS, SENTINEL_FAMILIES, OfCluster, OfSentinel, Single
from .ledger import Ledger
from .verdict import GIVES_UP, NETWORK, VISIBILITY_TIMEOUT, Event, Report, judge

ROOT = Path(__file__).parents[2]

TRANSPORTS = ("toc", "redis", "valkey")
BROKERS = ("redis", "cluster", "sentinel")

#: Seconds between the end of a fault of the network, or the start of another one, and the next.
GAP = 2.0

#: Tasks that a flood sends to one queue at once.
FLOOD = 400

#: Seconds for which a task may be executed, or be sent again, while the broker holds nothing.
ALONE = 10.0

#: Seconds a warm shutdown may take; no task takes longer than half a one.
SHUTDOWN = 20.0

#: Seconds without any progress after which what is not done is stuck.
PATIENCE = 30.0

#: Seconds a worker may take until it is ready.
READY = 60.0

POOLS = (("prefork", "2"), ("prefork", "2"), ("threads", "4"))

#: The third of a Cluster: greenlets hear remote control over a connection of its own.
GREENLETS = ("gevent", "4")

#: Seconds in which each worker must answer to remote control when the servers are whole again.
ANSWERS = 20.0

#: What is given to --faults, and the faults of each: of workers, and of each kind of broker.
WORKER_FAMILIES: dict[str, tuple[str, ...]] = {
    "kill": ("kill worker", "kill process"),
    "term": ("term", "quit"),
    "stop": ("stop long", "stop short"),
    "fleet": ("kill all workers",),
    "flood": ("flood",),
}
FAMILIES: dict[str, dict[str, tuple[str, ...]]] = {
    "redis": {
        **WORKER_FAMILIES,
        "cut": (
            "cut",
            "cut halfway",
            *(f"lose {kind}'s reply" for kind in ("a publish", "an ack", "a pop")),
        ),
        "freeze": ("freeze", "freeze halfway"),
        "restart": ("restart", "crash", "outage"),
        "frozen": ("server frozen",),
        "clock": ("clock forward", "clock back"),
        "full": ("full",),
        "flush": ("flush",),
    },
    "cluster": {**WORKER_FAMILIES, **CLUSTER_FAMILIES},
    "sentinel": {**WORKER_FAMILIES, **SENTINEL_FAMILIES},
}


class Fault(NamedTuple):
    """One entry of the schedule; `at` and `seconds` are in seconds, `dice` is for details."""

    at: float
    family: str
    what: str
    seconds: float
    dice: int


def schedule(
    seed: int,
    seconds: float,
    families: Sequence[str] | None = None,
    broker: str = "redis",
    *,
    there: Mapping[str, tuple[str, ...]] | None = None,
    gap: float = GAP,
) -> list[Fault]:
    """The faults of a run: each kind once, in any order, then each again.

    there: what there is instead of the broker's own; gap: seconds between two at least
    """
    rng = random.Random(seed)
    kinds = [
        (family, what)
        for family, whats in (there or FAMILIES[broker]).items()
        if families is None or family in families
        for what in whats
    ]
    lengths = {
        "stop long": (VISIBILITY_TIMEOUT + 1, VISIBILITY_TIMEOUT + 3),
        "stop short": (0.5, 3),
        # A lease that is renewed every third of its time must outlast these.
        "freeze": (0.5, 2),
        "freeze halfway": (0.3, 1),
        "restart": (0.2, 1),
        "crash": (0.2, 1),
        # Every lease ends meanwhile.
        "outage": (VISIBILITY_TIMEOUT + 1, VISIBILITY_TIMEOUT + 2),
        "server frozen": (VISIBILITY_TIMEOUT + 1, VISIBILITY_TIMEOUT + 3),
        "full": (1, 4),
        # Some are over before a statement's time is.
        "database killed": (0.5, 4.0),
        "database stopped": (0.5, 5.0),
        "database locked": (0.5, 4.0),
        **LENGTHS,
    }
    faults: list[Fault] = []
    at = 0.5
    deck: list[tuple[str, str]] = []
    while kinds and at < seconds:
        if not deck:
            deck = rng.sample(kinds, len(kinds))
        family, what = deck.pop()
        length = rng.uniform(*lengths.get(what, (0, 0)))
        faults.append(Fault(at, family, what, length, rng.randrange(1 << 30)))
        at += gap + rng.uniform(0, 0.4) + (length if family in (*NETWORK, "full") else 0)
    return faults


class Worker:
    """A worker that is started again whenever it has ended."""

    def __init__(
        self,
        number: int,
        directory: Path,
        python: str,
        environment: dict[str, str],
        pool: tuple[str, str],
    ) -> None:
        self.number = number
        self.pool, concurrency = pool
        self._directory = directory
        self._command = [python, "-m", "celery", "-A", "tests.chaos.app", "worker", "-l", "INFO"]
        self._command += ["-n", f"w{number}@chaos", "-P", self.pool, "-c", concurrency]
        self._environment = environment
        self._launched = 0
        self.incarnation = ""
        self.process: subprocess.Popen[bytes]
        #: monotonic seconds
        self.stopped_until: float | None = None
        self.must_end_by: float | None = None
        self.killed = False

    def launch(self) -> None:
        self._launched += 1
        #: seconds since the epoch
        self.launched_at = time.time()
        self.incarnation = f"w{self.number}.{self._launched}"
        self.stopped_until = self.must_end_by = None
        self.killed = False
        with open(self.log, "ab") as log:
            # In a session of its own, so that it can be hit with its pool.
            self.process = nursery.Popen(
                self._command,
                cwd=ROOT,
                env={**self._environment, "CHAOS_WORKER": self.incarnation},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def log(self) -> Path:
        return self._directory / f"{self.incarnation}.log"

    @property
    def ready(self) -> bool:
        return " ready." in self.log.read_text(errors="replace")

    @property
    def hittable(self) -> bool:
        """Running, and under no other fault."""
        return (
            self.process.poll() is None
            and not self.killed
            and self.stopped_until is None
            and self.must_end_by is None
        )

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def pool_processes(self) -> list[int]:
        try:
            return [child.pid for child in psutil.Process(self.process.pid).children()]
        except psutil.NoSuchProcess:
            return []


class Run:
    """One run. directory: for servers and logs. seconds: how long producers and faults go on.

    rate: tasks per second. python: interpreter of workers and producers. broker: see BROKERS.
    """

    #: seconds without any progress after which what is not done is stuck
    patience = PATIENCE

    def __init__(
        self,
        directory: Path,
        *,
        seed: int = 1,
        seconds: float = 60.0,
        transport: str = "toc",
        rate: float = 12.0,
        families: Sequence[str] | None = None,
        python: str = sys.executable,
        broker: str = "redis",
    ) -> None:
        self._directory = directory
        self._seed, self._seconds, self._rate = seed, seconds, rate
        self._transport, self._python = transport, python
        self._kind = broker
        self._faults = self._schedule(families)
        self._events: list[Event] = []
        self._report = Report(transport, seed, broker)
        #: what ends a fault, and when: monotonic seconds
        self._ends: list[tuple[float, Callable[[], None]]] = []
        self._workers: list[Worker] = []
        self._producers: list[subprocess.Popen[bytes]] = []

    def _schedule(self, families: Sequence[str] | None) -> list[Fault]:
        return schedule(self._seed, self._seconds, families, self._kind)

    def run(self) -> Report:
        with contextlib.ExitStack() as stack:
            self._start(stack)
            self._break_things()
            self._drain()
            self._stop_workers()
            self._finish()
            self._report.broken += self._broker.broken
            self._report.keys_left = self._keys()
            self._ledger.read()
        judge(self._report, self._ledger.entries, self._events)
        self._weigh()
        return self._report

    # -- the start

    def _start(self, stack: contextlib.ExitStack) -> None:
        self._broker = self._make_broker()
        stack.callback(self._broker.stop)
        self._broker.start()
        folder = self._directory / "ledger"
        folder.mkdir()
        ledger = Server(folder)
        stack.callback(ledger.stop)
        ledger.start()
        self._ledger = Ledger(stack.enter_context(ledger.client()))
        self._stack = stack
        self._environment = environment = {
            **os.environ,
            "CHAOS_BROKER": self._broker.url,
            "CHAOS_LEDGER": ledger.url,
            "CHAOS_VISIBILITY_TIMEOUT": str(VISIBILITY_TIMEOUT),
            "PYTHONWARNINGS": "ignore",
        }
        environment.update(self._more_environment(stack))
        pools = (*POOLS[:-1], GREENLETS) if self._kind == "cluster" else POOLS
        for number, pool in enumerate(pools):
            worker = Worker(number, self._directory, self._python, environment, pool)
            worker.launch()
            self._workers.append(worker)
            stack.callback(self._kill, worker)
        self._until_ready()
        for number in range(2):
            rate = str(self._rate / 2)
            self._produce(str(number), str(self._seed), str(self._seconds), rate)
        if self._kind == "cluster":
            self._produce("ask", str(self._seconds))

    def _more_environment(self, stack: contextlib.ExitStack) -> dict[str, str]:
        """What else is started, and what producers and workers are told of it."""
        return {}

    def _produce(self, *arguments: str) -> None:
        command = [self._python, "-m", "tests.chaos.producer", *arguments]
        with open(self._directory / f"producer{len(self._producers)}.log", "ab") as log:
            producer = subprocess.Popen(
                command, cwd=ROOT, env=self._environment, stdout=log, stderr=log
            )
        self._producers.append(producer)
        self._stack.callback(producer.wait)
        self._stack.callback(producer.kill)

    def _make_broker(self) -> Single | OfCluster | OfSentinel:
        folder = self._directory / "broker"
        if self._kind == "cluster":
            return OfCluster(folder)
        if self._kind == "sentinel":
            return OfSentinel(folder)
        scheme = {"toc": "toc+redis", "redis": "redis", "valkey": "valkey"}[self._transport]
        return Single(folder, scheme, self._commands())

    @staticmethod
    def _kill(worker: Worker) -> None:
        worker.signal(signal.SIGKILL)
        worker.process.wait()

    def _until_ready(self) -> None:
        deadline = time.monotonic() + READY
        while not all(worker.ready for worker in self._workers):
            self._watch_workers()
            if time.monotonic() > deadline:
                self._report.broken.append("a worker does not get ready")
                return
            time.sleep(0.05)  # workers say in their logs that they are ready

    # -- the middle

    def _break_things(self) -> None:
        began = time.monotonic()
        pending = list(self._faults)
        while (
            pending
            or self._ends
            or not self._broker.ready
            or time.monotonic() < began + self._seconds
        ):
            now = time.monotonic()
            for entry in sorted(self._ends, key=lambda entry: entry[0]):
                if entry[0] <= now:
                    self._ends.remove(entry)
                    entry[1]()
            if pending and began + pending[0].at <= now:
                if self._hit(pending[0]):
                    began = now - pending.pop(0).at  # the gaps stay as they are
                else:
                    assert now < began + pending[0].at + READY, f"not ready for {pending[0]}"
            self._watch_workers()
            time.sleep(0.02)  # the schedule's grain

    def _read_deaths(self) -> None:
        """Learn which workers have ended on purpose."""

    def _watch_workers(self) -> None:
        for worker in self._workers:
            code = worker.process.poll()
            if code is not None:
                self._read_deaths()  # told before they happen, maybe since the last look
                if not worker.killed and worker.must_end_by is None:
                    self._broke(f"{worker.incarnation} ended by itself, with {code}", worker)
                worker.signal(signal.SIGKILL)  # whatever its pool has left
                gave_up = GIVES_UP in worker.log.read_text(errors="replace")
                ended = Event(time.time(), "ended", worker=worker.incarnation, gave_up=gave_up)
                self._events.append(ended)
                worker.launch()
            elif worker.must_end_by is not None and time.monotonic() > worker.must_end_by:
                self._broke(f"{worker.incarnation} did not end after SIGTERM", worker)
                worker.must_end_by, worker.killed = None, True
                self._events.append(
                    Event(time.time(), "killed at last", worker=worker.incarnation, explains=True)
                )
                worker.signal(signal.SIGKILL)

    def _broke(self, text: str, worker: Worker) -> None:
        end = worker.log.read_text(errors="replace")[-2000:]
        self._report.broken.append(f"{text}; its log ends:\n{end}")
        # Workers that cannot even start would be started again for ever.
        assert len(self._report.broken) < 20, self._report.broken[-1]

    def _hit(self, fault: Fault) -> bool:
        """Make it happen; False if nothing is there that it can hit just now."""
        if fault.family in ("fleet", "flood"):
            return self._hit_all(fault)
        event = Event(time.time(), fault.what, fault.family)
        if fault.seconds:
            event.until = event.at + fault.seconds
        end = time.monotonic() + fault.seconds
        if fault.family in ("kill", "term", "stop"):
            worker = self._victim(fault)
            if worker is None:
                return False
            event.worker = worker.incarnation
            event.explains = fault.what in ("kill worker", "kill process", "stop long", "quit")
            if fault.what == "kill process":
                children = worker.pool_processes()
                if not children:
                    return False
                event.pid = children[fault.dice % len(children)]
        elif not self._broker.ready:
            return False
        self._events.append(event)
        if fault.what == "kill worker":
            worker.killed = True
            worker.signal(signal.SIGKILL)
        elif fault.what == "kill process":
            with contextlib.suppress(ProcessLookupError):
                os.kill(event.pid, signal.SIGKILL)
        elif fault.family == "term":
            worker.must_end_by = time.monotonic() + SHUTDOWN
            number = signal.SIGTERM if fault.what == "term" else signal.SIGQUIT
            os.kill(worker.process.pid, number)
        elif fault.family == "stop":
            worker.stopped_until = end
            worker.signal(signal.SIGSTOP)

            def go_on() -> None:
                worker.stopped_until = None
                event.until = time.time()
                worker.signal(signal.SIGCONT)

            self._ends.append((end, go_on))
        else:
            self._broker.hit(fault, event, self._later)
        return True

    def _hit_all(self, fault: Fault) -> bool:
        """What is of no single worker and of no broker."""
        if fault.what == "flood":
            self._events.append(Event(time.time(), fault.what, fault.family))
            queue = QUEUES[fault.dice % len(QUEUES)]
            self._produce("flood", str(len(self._producers)), queue, str(FLOOD))
            return True
        workers = [worker for worker in self._workers if worker.hittable and worker.ready]
        if len(workers) < len(self._workers):
            return False
        for number, worker in enumerate(workers):
            family = "" if number else fault.family
            event = Event(time.time(), fault.what, family, worker.incarnation, explains=True)
            self._events.append(event)
            worker.killed = True
            worker.signal(signal.SIGKILL)
        return True

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        self._ends.append((time.monotonic() + seconds, do))

    def _victim(self, fault: Fault) -> Worker | None:
        workers = [worker for worker in self._workers if worker.hittable and worker.ready]
        if fault.what == "kill process":
            workers = [worker for worker in workers if worker.pool == "prefork"]
        return workers[fault.dice % len(workers)] if workers else None

    def _commands(self) -> dict[str, bytes]:
        """What only a publish, an acknowledgement and a pop send."""
        if self._transport == "toc":
            from kombu_toc.scripts.call import load

            scripts = {"publish": "put", "ack": "ack", "pop": "pop"}
            return {kind: load(name).sha.encode() for kind, name in scripts.items()}
        publish, pop = (b"LPUSH", b"BRPOP") if self._transport == "redis" else (b"ZADD", b"BZMPOP")
        return {"publish": publish, "ack": b"ZREM", "pop": pop}

    # -- the end

    def _drain(self) -> None:
        progress = time.monotonic()
        quiet = 0.0  # monotonic seconds since when all is done
        alone = 0.0  # and since when nothing is in the broker, but something is not done
        while True:
            now = time.monotonic()
            self._watch_workers()
            if self._ledger.read():
                progress = now
            producing = any(producer.poll() is None for producer in self._producers)
            missing = self._ledger.ids("sent") - self._ledger.done()
            if producing or missing or not self._is_empty():
                quiet = 0.0
            else:
                quiet = quiet or now
                # A peer may deliver again what it was not told of, when its time is over.
                if self._transport == "toc" or now - quiet > VISIBILITY_TIMEOUT + 2:
                    return
            # What had been acknowledged when its worker was killed is nowhere any more.
            is_gone = self._transport == "toc" and not producing and self._is_empty() and missing
            alone = (alone or now) if is_gone else 0.0
            if alone and now - alone > ALONE:
                return
            if now - progress > self.patience:
                self._report.stuck = self._held()
                if producing:
                    self._report.broken.append("a producer does not end")
                return
            time.sleep(0.1)  # nobody tells when something is finished

    def _stop_workers(self) -> None:
        self._until_ready()
        if self._kind == "cluster":
            self._ask_workers()
        for worker in self._workers:
            os.kill(worker.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + SHUTDOWN
        for worker in self._workers:
            try:
                worker.process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                self._broke(f"{worker.incarnation} did not end after SIGTERM", worker)

    def _ask_workers(self) -> None:
        """No fault may have ended remote control."""
        deadline = time.monotonic() + ANSWERS
        wanted = {f"w{worker.number}@chaos" for worker in self._workers}
        with Celery("asks", broker=self._broker.url, set_as_current=False) as app:
            while wanted and time.monotonic() < deadline:
                wanted -= {name for one in app.control.ping(timeout=1) for name in one}
        for worker in self._workers:
            if f"w{worker.number}@chaos" in wanted:
                self._broke(f"{worker.incarnation} does not answer to remote control", worker)

    def _finish(self) -> None:
        """Look at what is left when the workers have ended."""

    def _weigh(self) -> None:
        """Add to what the ledger says."""

    def _is_empty(self) -> bool:
        return self._transport != "toc" or not self._keys()

    def _keys(self) -> list[str]:
        """Keys that hold messages."""
        if self._transport == "toc":
            return sorted({key for client in self._broker.clients() for key in _slot_keys(client)})
        names = [key.decode() for client in self._broker.clients() for key in client.keys("*")]
        return sorted(name for name in names if "binding" not in name and "pidbox" not in name)

    def _held(self) -> list[str]:
        """What is in the broker, for whoever wonders why."""
        held, wanted = [], set(self._keys())
        for client in self._broker.clients():
            for key in sorted(wanted & {key.decode() for key in client.keys("*")}):
                is_scored = client.type(key) == b"zset"
                scored = client.zrange(key, 0, 20, withscores=True) if is_scored else ()
                held += [f"{key}: {id.decode()} {score:.0f}" for id, score in scored] or [key]
        return held


def _slot_keys(client: redis.Redis) -> Iterator[str]:
    for key in client.keys("toc:{*:*}:*"):
        name = key.decode()
        # What expires holds none of the tasks: recent publishes that are remembered, the list of
        # failed tasks, and the reply queues of workers that were killed.
        passing = any(part in name for part in (":sent", ":given", ":ended", ":fail", "pidbox"))
        if passing and client.ttl(key) != -1:  # or gone by now
            continue
        yield name
