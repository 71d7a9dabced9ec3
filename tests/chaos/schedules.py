"""Schedules of real workers while the server's clock is set, leaders die and queues are emptied.

::

    python -m tests.chaos.schedules --seconds 300 --seed 1

Three workers carry on the schedules of three queues. Faults come one after the other, as the seed
says; one time in two another one comes while the clock is wrong:

=========  =======================================================================================
forward    the server's clock is set 30 days forward, and some seconds later back
back       30 days back, and some seconds later forward
leader     SIGKILL of the worker that looks for firings that are gone
kill       SIGKILL of a worker with its pool
purge      ``celery toc purge`` of one queue or two
migrate    the workers end, ``celery toc migrate --to`` another broker, and they start again
=========  =======================================================================================

Between two steps the clock shows a *span* of time. By the ledger:

doubled    a firing was started twice, and no worker of these was killed; or it was started, and is
           in the other broker as well
early      started before its time by the server's clock
missed     a time of a schedule within a span was neither started nor moved to the other broker, and
           the schedule's history does not say that it was lost. Not asked for are times that nobody
           had taken when the span ended (`SETTLED`, what the fleet is behind then; after a fault
           `RECOVERED`), and those before
           the fleet noticed that the clock was set (`NOTICED`): there the misfire rule decides
stuck      at the end a schedule does not fire next when it should
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from celery import Celery
from celery.schedules import crontab

from celery_toc import timeout_center
from celery_toc.schedules.rules import to_datetime
from celery_toc.schedules.state import LOST, firing_id, planned_of
from kombu_toc import IN_FLIGHT

from ..support import nursery
from ..support.servers import Server, SteppedServer
from .app_queues import QUEUES
from .ledger import Ledger
from .run import PATIENCE, POOLS, READY, ROOT, SHUTDOWN, Worker
from .verdict import VISIBILITY_TIMEOUT

CLOCK = ("forward", "back")
OTHERS = ("leader", "kill", "purge", "migrate")

#: Seconds by which the clock is set.
STEP = 30 * 86400.0

#: Seconds within which what is due is taken; and after a fault.
SETTLED, RECOVERED = 2.0, VISIBILITY_TIMEOUT + 6.0

#: Seconds at the end in which every time of every schedule is asked for.
CALM = 6.0

#: Seconds within which schedules follow a clock that shows what they have not seen: what is late
#: comes at the next poll; that the clock was set back is noticed by a look of the leader.
NOTICED = {"forward": 3.0, "back": 8.0}

#: Name -> queue, what it is, misfire. Of a day in the past, ``all`` makes up for each time.
SCHEDULES = {
    "often": (QUEUES[0], timedelta(seconds=0.5), "once"),
    "skips": (QUEUES[1], timedelta(seconds=1), "skip"),
    "second": (QUEUES[1], timedelta(seconds=2), "once"),
    "minute": (QUEUES[2], crontab(), "once"),
    "all": (QUEUES[2], timedelta(minutes=20), "all"),
    "hour": (QUEUES[2], crontab(minute="0"), "once"),
}


@dataclass
class Span:
    """What the clock showed between two steps, in microseconds. Seconds of both ends are not asked
    for. offset: seconds by which it was ahead; since, until: by this machine's clock"""

    offset: float
    since: float
    begin: int
    not_noticed: float
    until: float = float("inf")
    end: int = 0
    not_settled: float = 0.0


@dataclass
class Verdict:
    started: int = 0
    asked: int = 0
    lost: int = 0
    moved: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    doubled: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    spans: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not (self.doubled or self.early or self.missed or self.stuck)

    def __str__(self) -> str:
        return "\n".join(f"{name:8} {value}" for name, value in vars(self).items())


class ScheduleChaos:
    """One run, in a directory for servers and logs."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._random = random.Random(seed)
        self._server = SteppedServer(self._folder("broker"))
        self._other = Server(self._folder("other"))
        self._ledger_server = Server(self._folder("ledger"))
        self._workers: list[Worker] = []
        self._killed: set[str] = set()
        self._spans: list[Span] = []
        self._fault_at = 0.0  # seconds since the epoch, of the latest that is not of the clock
        self._lost: set[str] = set()
        self._verdict = Verdict()

    def _folder(self, name: str) -> Path:
        folder = self._directory / name
        folder.mkdir()
        return folder

    def run(self, seconds: float = 0.0, faults: tuple[str, ...] = ()) -> Verdict:
        """Have these faults, or as many as fit into so many seconds. A fault of the clock may have
        another one in it: ``forward+leader``."""
        with ExitStack() as stack:
            self._start(stack)
            began = time.monotonic()
            pending = list(faults) or self._draw(seconds)
            for fault in pending:
                if not faults and time.monotonic() > began + seconds:
                    break
                self._go_on(1.0)
                self._hit(fault)
            # In calm, so that each run asks for some twenty firings, however slow the machine is.
            self._go_on(CALM + max(SETTLED, self._fault_at + RECOVERED - time.time()))
            self._end_span()
            self._look()
            self._catch_up()
            for worker in self._workers:
                os.kill(worker.process.pid, signal.SIGTERM)
            for worker in self._workers:
                worker.process.wait(30)
            self._ledger.read()
            self._judge()
        return self._verdict

    def _draw(self, seconds: float) -> list[str]:
        found: list[str] = []
        while len(found) * 2 < seconds:
            kinds = self._random.sample((*CLOCK, *OTHERS), len(CLOCK + OTHERS))
            found += [
                f"{kind}+{self._random.choice(OTHERS)}"
                if kind in CLOCK and self._random.random() < 0.5
                else kind
                for kind in kinds
            ]
        return found

    def _start(self, stack: ExitStack) -> None:
        for server in (self._server, self._other, self._ledger_server):
            stack.callback(server.stop)
            server.start()
        self._ledger = Ledger(stack.enter_context(self._ledger_server.client()))
        self._environment = {
            **os.environ,
            "CHAOS_BROKER": self._server.toc_url,
            "CHAOS_LEDGER": self._ledger_server.url,
            "CHAOS_VISIBILITY_TIMEOUT": str(VISIBILITY_TIMEOUT),
            "PYTHONWARNINGS": "ignore",
        }
        for number, pool in enumerate(POOLS):
            worker = Worker(number, self._directory, sys.executable, self._environment, pool)
            worker.launch()
            self._workers.append(worker)
            stack.callback(lambda worker=worker: worker.signal(signal.SIGKILL))
        self._until_ready()
        app = stack.enter_context(
            Celery("chaos", broker=self._server.toc_url, set_as_current=False)
        )
        options = {"visibility_timeout": VISIBILITY_TIMEOUT}
        app.conf.update(broker_transport_options=options, task_ignore_result=True)
        self._center = timeout_center(app)
        for name, (queue, when, misfire) in SCHEDULES.items():
            self._center.schedules.put(name, "chaos.fire", when, queue=queue, misfire=misfire)
        self._spans.append(Span(0.0, time.time(), self._now(), 0.0))

    def _until_ready(self) -> None:
        deadline = time.monotonic() + READY
        while not all(worker.ready for worker in self._workers):
            assert time.monotonic() < deadline, "a worker does not get ready"
            time.sleep(0.05)  # workers say in their logs that they are ready

    # -- faults

    def _hit(self, fault: str) -> None:
        kind, _, within = fault.partition("+")
        self._verdict.faults[fault] += 1
        if kind not in CLOCK:
            self._fault_at = time.time()
            getattr(self, f"_{kind}")()
            self._fault_at = time.time()
            return
        hold = SETTLED + NOTICED[kind] + self._random.uniform(1, 3)
        step = STEP if kind == "forward" else -STEP
        self._set(step, NOTICED[kind])
        if within:
            self._go_on(self._random.uniform(0, 3))
            self._hit(within)
            hold += RECOVERED
        self._go_on(hold)
        # When it is set back to a time that it has shown, all that has come since is late.
        self._set(-step, 0.0 if kind == "forward" else NOTICED["forward"])

    def _set(self, seconds: float, not_noticed: float) -> None:
        self._end_span()
        self._server.step(seconds)
        self._spans.append(Span(self._server.ahead, time.time(), self._now(), not_noticed))

    def _end_span(self) -> None:
        span = self._spans[-1]
        since_fault = time.time() - self._fault_at
        span.end = self._now()
        span.not_settled = max(
            SETTLED, since_fault if since_fault < RECOVERED else 0, self._behind(span)
        )
        span.until = time.time()

    def _behind(self, span: Span) -> float:
        """Seconds by which the fleet is behind: on a slow machine workers start for long."""
        self._ledger.read()
        started = self._ledger.ids("started")
        coming = {
            made.record.next
            for name in SCHEDULES
            if (made := self._center.schedules.get(name)) is not None and made.record.next
        }
        for queue in QUEUES:
            for found in self._center.scan(queue, state=IN_FLIGHT, limit=1000).messages:
                if found.id not in started:
                    coming.add(planned_of(found.id.partition("@")[0], found.id) or span.end)
        first = min((at for at in coming if at >= span.begin), default=span.end)
        return min((span.end - first) / 1e6 + SETTLED, PATIENCE)

    def _kill(self) -> None:
        self._until_ready()
        self._end(self._random.choice(self._workers))

    def _leader(self) -> None:
        self._until_ready()
        center = self._center.center
        deadline = time.monotonic() + READY
        while True:
            holder = center.client.get(center.keys.upkeep_also) or b"::"
            pid = int(holder.split(b":")[1] or 0)
            leaders = [worker for worker in self._workers if worker.process.pid == pid]
            if leaders:
                break
            assert time.monotonic() < deadline, "nobody is elected"
            self._go_on(0.05)
        self._end(leaders[0])

    def _end(self, worker: Worker) -> None:
        self._killed.add(worker.incarnation)
        worker.signal(signal.SIGKILL)
        worker.process.wait()
        worker.launch()

    def _purge(self) -> None:
        for queue in {QUEUES[2], self._random.choice(QUEUES)}:  # the former has what waits long
            # Histories say what was lost, but one that catches up forgets it within a second.
            waiting = {
                firing_id(name, made.record.next)
                for name, (of, _, _) in SCHEDULES.items()
                if of == queue
                and (made := self._center.schedules.get(name)) is not None
                and made.record.next is not None
            }
            self._command("purge", queue, "--yes")
            self._lost |= {id for id in waiting if not self._center.get(id)}

    def _migrate(self) -> None:
        self._until_ready()
        span, began = self._spans[-1], time.time()
        for worker in self._workers:
            os.kill(worker.process.pid, signal.SIGTERM)
        for worker in self._workers:
            worker.process.wait(SHUTDOWN)
        # It is forced, for it takes one that was killed for one that consumes.
        self._command("migrate", "--to", self._other.url, "--force", "--yes")
        for worker in self._workers:
            worker.launch()
        self._until_ready()
        if began < span.since + span.not_noticed:  # nobody was there to notice
            span.not_noticed += time.time() - began

    def _command(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "celery", "-A", "tests.chaos.app", "toc", *arguments]
        with open(self._directory / "commands.log", "ab") as log:
            process = nursery.Popen(
                command, cwd=ROOT, env=self._environment, stdout=log, stderr=subprocess.STDOUT
            )
            # Schedules stay, and say so with exit code 1.
            assert process.wait(60) in (0, 1), command

    # -- meanwhile

    def _go_on(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            for worker in self._workers:
                assert worker.process.poll() is None, f"{worker.incarnation} has ended by itself"
            self._look()
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 1.0))  # a history forgets what is old

    def _look(self) -> None:
        for name in SCHEDULES:
            for firing in self._center.schedules.history(name):
                if firing.outcome == LOST:
                    self._lost.add(firing.id)

    def _now(self) -> int:
        seconds, us = self._center.client.time()
        return int(seconds) * 1_000_000 + int(us)

    # -- the end

    def _catch_up(self) -> None:
        """What is late comes one by one."""
        self._spans[-1].until = float("inf")
        deadline = time.monotonic() + PATIENCE
        while True:
            self._verdict.stuck = []
            self._find_stuck()
            if not self._verdict.stuck or time.monotonic() > deadline:
                return
            self._go_on(0.5)

    def _find_stuck(self) -> None:
        self._ledger.read()
        for name in SCHEDULES:
            made, now = self._center.schedules.get(name), self._now()
            assert made is not None
            after = made.timing.after(now)
            gone = self._lost | self._moved() | self._ledger.ids("started")
            # What was put while the clock was ahead, and was not started, waits for its time.
            while after is not None and (
                (id := firing_id(name, after)) in gone
                or (made.record.next != after and self._center.get(id))
            ):
                after = made.timing.after(after)
            assert after is not None
            if made.record.next is None or not now - SETTLED * 1e6 <= made.record.next <= after:
                self._verdict.stuck.append(f"{name}: next {made.next}, {made.state}")

    def _moved(self) -> set[str]:
        with self._other.client() as client:
            lists = [key for key in client.keys("*") if client.type(key) == b"list"]
            return {
                json.loads(raw)["headers"]["id"]
                for key in lists
                for raw in client.lrange(key, 0, -1)
            }

    def _judge(self) -> None:
        verdict, moved = self._verdict, self._moved()
        runs = defaultdict(list)
        for entry in self._ledger.entries:
            runs[entry["id"]].append(entry)
        for id, entries in runs.items():
            killed = sum(entry["worker"] in self._killed for entry in entries)
            if len(entries) - killed > 1 or (id in moved and killed < len(entries)):
                told = [(entry["worker"], round(entry["at"], 2)) for entry in entries]
                verdict.doubled.append(f"{id} {told} {'moved' if id in moved else ''}")
            planned = planned_of(id.partition("@")[0], id)
            assert planned is not None
            at = entries[0]["at"]
            ahead = max(
                span.offset for span in self._spans if span.since - 1 <= at <= span.until + 1
            )
            if (at + ahead) * 1e6 + 1000 < planned:
                verdict.early.append(id)
        verdict.started, verdict.moved, verdict.lost = len(runs), len(moved), len(self._lost)
        for name in SCHEDULES:
            for id in self._asked(name):
                verdict.asked += 1
                if id not in runs and id not in moved and id not in self._lost:
                    verdict.missed.append(id)
        verdict.spans = [
            f"{to_datetime(span.begin):%m-%d %H:%M:%S} +{span.not_noticed:g} to "
            f"{to_datetime(span.end):%m-%d %H:%M:%S} -{span.not_settled:.1f}"
            for span in self._spans
        ]

    def _asked(self, name: str) -> Iterator[str]:
        made = self._center.schedules.get(name)
        assert made is not None
        for span in self._spans:
            at = made.timing.after(span.begin + int(span.not_noticed * 1e6))
            while at is not None and at < span.end - span.not_settled * 1e6:
                yield firing_id(name, at)
                at = made.timing.after(at)


def main() -> int:
    parser = argparse.ArgumentParser(description="Schedules under clock steps, kills and purges")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", help="these, one after the other: forward+leader,purge")
    parser.add_argument("--directory", type=Path, help="where logs are to stay")
    chosen = parser.parse_args()
    faults = tuple(chosen.faults.split(",")) if chosen.faults else ()
    with tempfile.TemporaryDirectory() as temporary:
        directory = chosen.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        found = ScheduleChaos(directory, chosen.seed).run(chosen.seconds, faults)
    print(found)
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(main())
