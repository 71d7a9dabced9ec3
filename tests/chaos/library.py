"""A run with a task library: ``python -m tests.chaos --library``; see the package.

Of its two databases one or the other is away now and then; Redis loses everything, and is replaced
by an empty one; workers and senders kill themselves between any two steps.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kombu_toc import TimeoutCenter, center_for

from ..support import nursery
from ..support.databases import ENGINES, DatabaseServer
from ..support.library import create_tables
from .brokers import HASH_SLOTS, Single
from .deaths import DEATHS
from .modes import MODES
from .run import ROOT, Fault, Run, Worker, schedule
from .verdict import NETWORK, Event, Report, by_id

#: Seconds that a statement may take.
TIMEOUT = 1.0

#: Seconds that a process lives, as a rule, if it kills itself.
LIFE = 8.0

#: Seconds after which it has been said that a task has ended.
SAID = 2.0

#: Seconds after a fault for which senders may still find no broker, so that it gets later what they
#: publish.
HELD = 2.0

#: Seconds for which what a process has to say of a database that was away may be unsaid.
UNSAID = 12.0

#: Seconds without any progress after which what is not done is stuck: what is missing in Redis
#: alone is looked at twice.
PATIENCE = 60.0

#: What is given to --faults of such a run.
FAMILIES: dict[str, tuple[str, ...]] = {
    "kill": ("kill worker", "kill process"),
    "fleet": ("kill all workers",),
    "cut": ("cut", "lose a publish's reply", "lose an ack's reply", "lose a pop's reply"),
    "restart": ("restart", "crash"),
    "lost": ("redis flushed", "redis replaced"),
    "alone": ("redis flushed, nobody rebuilds",),
    "database": ("database killed", "database stopped", "database locked"),
    "keeper": ("kill keeper",),
    "step": (),
}


class LostEvent(Event):
    """Redis has lost everything."""

    #: seconds that the oldest had waited of what had no row
    unwritten = 0.0


class OfLibrary(Single):
    """A server that may lose what it has."""

    def lose(self, what: str, seconds: float) -> None:
        if what == "redis replaced":
            self._server.kill()
            for name in ("appendonlydir", "dump.rdb"):
                path = self._server.directory / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            time.sleep(seconds)  # nobody is there so soon
            self._server.start()
        else:
            with self._server.client() as client:
                client.flushall()


class LibraryRun(Run):
    """engines: of the databases of the library, by their names in `tests.support.databases`; mode:
    how queues are kept in it, of MODES"""

    patience = PATIENCE
    unsaid = UNSAID

    def __init__(
        self,
        directory: Path,
        *,
        mode: str = "through",
        engines: Sequence[str] | None = None,
        families: Sequence[str] | None = None,
        **how: Any,
    ) -> None:
        self._mode = MODES[mode](self)
        self._dies = families is None or "step" in families
        self._engines = engines or self._mode.engines
        if len(self._engines) > self._mode.most_engines:
            raise ValueError(f"{mode} is for {self._mode.most_engines} database")
        super().__init__(directory, families=families, **how)
        self._servers: list[DatabaseServer | None] = []
        self.urls: list[str] = []
        self.away: list[Event] = []
        self.losses: list[LostEvent] = []
        #: whether one of them is away just now
        self.is_busy = False
        self._rebuilds: list[tuple[subprocess.Popen[bytes], Event, float]] = []
        self._deaths = 0
        self._breaking = False
        self._followed: set[int] = set()
        self._options: dict[str, Any] = {}

    def _schedule(self, families: Sequence[str] | None) -> list[Fault]:
        there = dict(FAMILIES)
        if "sqlite" not in self._engines:
            there["database"] = FAMILIES["database"][:2]
        elif all(name == "sqlite" for name in self._engines):
            there["database"] = FAMILIES["database"][2:]
        return schedule(self._seed, self._seconds, families, there=there, gap=1.0)

    # -- the start

    def _make_broker(self) -> OfLibrary:
        return OfLibrary(self._directory / "broker", "toc+redis", self._commands())

    def _more_environment(self, stack: contextlib.ExitStack) -> dict[str, str]:
        for number, name in enumerate(self._engines):
            kind = ENGINES[name]
            if kind is None:
                self._servers.append(None)
                self.urls.append(f"sqlite:///{self._directory / f'library{number}.db'}")
                continue
            server = kind()
            stack.callback(server.stop)
            server.start()
            self._servers.append(server)
            self.urls.append(server.new_url())
        self._options = {"toc_library": self.urls, "toc_library_timeout": TIMEOUT}
        create_tables(self.urls)
        more = {"CHAOS_LIBRARY": json.dumps(self._options)}
        more |= self._mode.environment()
        more["CHAOS_TERMS"] = json.dumps(self._mode.terms)
        if self._dies:
            more["CHAOS_DEATHS"] = str(LIFE)
            more["CHAOS_DEATHS_UNTIL"] = str(time.time() + self._seconds + 10)
        return more

    # -- the middle

    def _watch_workers(self) -> None:
        self._read_deaths()
        for worker in self._workers:
            # One that starts asks the others what they know, and ends if the broker goes meanwhile.
            if worker.process.poll() == 1 and not worker.ready and self._was_cut(worker):
                worker.killed = True
        self._watch_producers()
        self._watch_rebuilds()
        self._mode.watch()
        super()._watch_workers()

    def _was_cut(self, worker: Worker) -> bool:
        cuts = (event.at for event in self._events if event.family in (*NETWORK, "lost", "alone"))
        return max(cuts, default=0.0) > worker.launched_at

    def _read_deaths(self) -> None:
        for text in self._ledger.client.lrange(DEATHS, self._deaths, -1):
            self._deaths += 1
            told = json.loads(text)
            event = Event(told["at"], f"death {told['where']}", "step", told["worker"])
            event.explains, event.pid = True, told["pid"]
            self._events.append(event)
            for worker in self._workers:
                if worker.process.pid == told["pid"]:
                    worker.killed, event.pid = True, 0  # all of it ends

    def _break_things(self) -> None:
        self._breaking = True
        super()._break_things()
        self._breaking = False

    def _watch_producers(self) -> None:
        """As long as faults go on, another one takes the place of each that ends."""
        for number, producer in enumerate(self._producers):
            if producer.poll() is None or number in self._followed or not self._breaking:
                continue
            self._followed.add(number)
            rate = str(self._rate / 2)
            self._produce(str(len(self._producers)), str(self._seed), "20", rate)

    def _hit(self, fault: Fault) -> bool:
        ours = {"database": self._take_away, "keeper": self._kill_keeper}
        ours |= dict.fromkeys(("lost", "alone"), self._lose)
        return ours.get(fault.family, super()._hit)(fault)

    def _kill_keeper(self, fault: Fault) -> bool:
        """Kill the worker that looks after the library: it loads, records and compares."""
        for client in self._broker.clients():
            for key in client.keys("toc:{toc}:speaker: library*"):
                name = (client.get(key) or b"").decode().partition("/")[0]
                for worker in self._workers:
                    if name.endswith(f":{worker.process.pid}") and worker.hittable:
                        event = Event(time.time(), fault.what, fault.family, worker.incarnation)
                        event.explains = worker.killed = True
                        self._events.append(event)
                        worker.signal(signal.SIGKILL)
                        return True
        return False  # none is elected just now

    def _lose(self, fault: Fault) -> bool:
        if self._rebuilds:
            return False
        event = LostEvent(time.time(), fault.what, fault.family)
        event.forgets, event.since = frozenset(HASH_SLOTS), math.inf  # and all had been said
        event.unwritten = self._mode.losing()
        event.at = time.time()
        self._events.append(event)
        self.losses.append(event)
        self._broker.lose(fault.what, 0.3)
        event.until = time.time()
        if fault.family == "lost":
            # Half of them are killed while they are at it, and begun again.
            self._rebuild(event, time.monotonic() + 2.0 if fault.dice % 2 else float("inf"))
        return True

    def _rebuild(self, event: Event, killed_at: float) -> None:
        command = [sys.executable, "-m", "celery", "-A", "tests.chaos.app"]
        command += ["toc", "library", "rebuild"]
        with open(self._directory / "rebuild.log", "ab") as log:
            made = nursery.Popen(command, cwd=ROOT, env=self._environment, stdout=log, stderr=log)
        self._stack.callback(made.wait)
        self._stack.callback(made.kill)
        self._rebuilds.append((made, event, killed_at))

    def _watch_rebuilds(self) -> None:
        for one in list(self._rebuilds):
            made, event, killed_at = one
            if time.monotonic() > killed_at:
                made.kill()
                made.wait()
            code = made.poll()
            if code is None:
                continue
            self._rebuilds.remove(one)
            event.until = time.time()
            if code:  # killed, or its database was away
                self._rebuild(event, float("inf"))

    def _take_away(self, fault: Fault) -> bool:
        if self.is_busy or any(one.until > time.time() for one in self.away):
            return False
        self.is_busy = True
        number = fault.dice % len(self._servers)
        if fault.what == "database locked":
            number = next(n for n, one in enumerate(self._servers) if one is None)
        elif self._servers[number] is None:
            number = next(n for n, one in enumerate(self._servers) if one is not None)
        event = Event(time.time(), fault.what, fault.family)
        event.until = event.at + fault.seconds
        self._events.append(event)
        self.away.append(event)
        server = self._servers[number]
        if server is None:
            self._lock(self.urls[number].removeprefix("sqlite:///"), fault.seconds)
        elif fault.what == "database killed":
            server.kill()
            self._back_after(fault.seconds, server.launch)
            event.until += 2.0  # it recovers first
        else:
            server.pause()
            self._back_after(fault.seconds, server.resume)
        return True

    def _lock(self, path: str, seconds: float) -> None:
        """Be the one writer of a SQLite database."""
        writer = sqlite3.connect(path, timeout=10, isolation_level=None)
        writer.execute("BEGIN IMMEDIATE")

        def release() -> None:
            writer.execute("ROLLBACK")
            writer.close()

        self._back_after(seconds, release)

    def _back_after(self, seconds: float, do: Callable[[], None]) -> None:
        def back() -> None:
            do()
            self.is_busy = False

        self._later(seconds, back)

    # -- the end

    @property
    def report(self) -> Report:
        return self._report

    @property
    def events(self) -> Sequence[Event]:
        return self._events

    @property
    def entries(self) -> Sequence[dict[str, Any]]:
        """What producers and tasks have written down."""
        return self._ledger.entries

    def center(self) -> TimeoutCenter:
        return center_for(self._broker.url, **self._options)

    def _is_empty(self) -> bool:
        return super()._is_empty() and not self._rebuilds and not self._pending()

    def _pending(self) -> int:
        found = self._library.counts()
        return found.get("pending", 0) + found.get("taken", 0)

    def _drain(self) -> None:
        self._library = self.center().library
        super()._drain()

    def _finish(self) -> None:
        """What the library knows is what has happened, and it agrees with Redis."""
        broken = self._report.broken
        told = {"entries": self._ledger.entries, "events": list(map(vars, self._events))}
        (self._directory / "told.json").write_text(json.dumps(told, default=repr))
        for event in self._events:
            margin = 1.0 if isinstance(event, LostEvent) else SAID
            if event.family in (*NETWORK, "lost", "alone"):
                event.held = max(event.at, event.until) + HELD
            event.unsaid = [(one.at - margin, one.until + UNSAID) for one in self.away]
            if not isinstance(event, LostEvent):
                event.said = SAID
        for one in self._library.check():
            broken.append(f"library and Redis disagree: {one.kind}: {one.id} of {one.topic}")
        counts = self._library.counts()
        left = {name: counts.get(name, 0) for name in ("pending", "taken", "not put")}
        if any(left.values()):
            broken.append(f"rows that have not ended: {left}")
            found = self._library.find(status=["pending", "taken"], limit=5)
            broken += [repr(one)[:300] for one in found.records]
        for id in sorted(self._ledger.done()):
            ended = {record.status for record in self._library.history(id)}
            if ended.isdisjoint(
                ("done", "succeeded", "retried", "failed")
            ) and not self._mode.is_unsaid(id):
                broken.append(f"{id} has run, and its record says {ended or 'nothing'}")
        self._ledger.read()
        self._mode.finish(by_id(self.entries))

    def _weigh(self) -> None:
        self._mode.weigh(self._report, by_id(self.entries))
        self._report.broken += self._mode.broken
