"""A run with everything on: ``python -m tests.chaos --soak --seconds 600``; see the package.

Beside producers and workers, which have a library, a client puts, leases and settles over HTTP,
looks at the page, and a schedule fires; a fault comes every 20 seconds. At the end, memory,
descriptors, connections and keys are what they were at first.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import psutil
from celery import Celery

from celery_toc import timeout_center

from ..support.http_server import HttpServer
from .library import FAMILIES as OF_LIBRARY
from .library import LibraryRun
from .run import FAMILIES as OF_BROKERS
from .run import Fault, schedule

#: The faults. Redis loses nothing: what is put over HTTP is in no library.
FAMILIES = {name: OF_LIBRARY[name] for name in ("kill", "fleet", "cut", "restart", "database")}
FAMILIES |= {name: OF_BROKERS["redis"][name] for name in ("term", "stop", "freeze", "flush")}
FAMILIES["keeper"] = OF_LIBRARY["keeper"]

#: Seconds between two faults, and after the start until what is used is what is used always.
GAP, WARM = 20.0, 15.0

#: Growth that is none: of a process; of Redis, and there of the keys that do not expire.
MOST = {"megabytes": 40, "descriptors": 10, "connections": 10, "keys": 20, "megabytes of Redis": 8}

VIEWS = ("/page/", "/page/queue?queue=celery", "/page/dead", "/page/limits")


class SoakRun(LibraryRun):
    """As its base, with more beside it, and with a look at what it uses."""

    def _schedule(self, families: Sequence[str] | None) -> list[Fault]:
        return schedule(self._seed, self._seconds, families, there=FAMILIES, gap=GAP)

    def _break_things(self) -> None:
        self._answers: Counter[str] = Counter()
        self._accepted: set[str] = set()
        self._leased: set[str] = set()
        self._is_over = threading.Event()
        log = self._directory / "http.log"
        self._http = HttpServer(self._broker.url)
        self._stack.callback(lambda: log.write_text("\n".join(self._http.said)))
        self._stack.enter_context(self._http)
        app = self._stack.enter_context(Celery("soak", broker=self._broker.url))
        schedules = timeout_center(app).schedules
        schedules.put("tick", "chaos.tick", 2.0, queue="celery")
        client = threading.Thread(target=self._ask, daemon=True)
        client.start()
        self._first: dict[Any, dict[str, float]] = {}
        self._last: dict[Any, dict[str, float]] = {}
        self._looks_next = time.monotonic() + WARM
        super()._break_things()
        self._is_over.set()
        client.join()
        self._report.counted["firings"] = schedules.get("tick").runs
        schedules.delete("tick")
        counted = {f"answers {what}": number for what, number in self._answers.items()}
        self._report.counted |= {"put over HTTP": len(self._accepted), **counted}
        lost = self._accepted - self._leased
        self._report.broken += [f"{id} was put over HTTP and never leased" for id in lost]

    def _ask(self) -> None:
        """Until it is over, and until what was put has been leased."""
        number, end = 0, float("inf")
        is_over = self._is_over.is_set
        while time.monotonic() < end and not (is_over() and self._accepted <= self._leased):
            if is_over():
                end = min(end, time.monotonic() + 60)
            else:
                number += 1
                id, view = f"http-{number}", VIEWS[number % len(VIEWS)]
                said = {"id": id, "text": "x", "delay": number % 5, "unique": f"key-{number % 50}"}
                put = self._request("POST", "/v1/queues/http/tasks", said)
                if put is not None and put["outcome"] == "added":
                    self._accepted.add(id)
                self._request("GET", view)
            leased = self._request("POST", "/v1/queues/http:lease", {"limit": 50, "wait": 1})
            tasks = leased["tasks"] if leased else []
            self._leased |= {one["id"] for one in tasks}
            if tasks:
                receipts = [one["receipt"] for one in tasks]
                self._request("POST", "/v1/queues/http:ack", {"receipts": receipts})

    def _request(self, method: str, path: str, document: Any = None) -> Any:
        try:
            reply = self._http.ask(method, path, document)
        except (OSError, http.client.HTTPException) as exc:
            self._report.broken.append(f"{method} {path} has no answer: {exc!r}")
            return None
        self._answers[f"{reply.status}"] += 1
        if reply.status >= 500 and reply.status != 503:
            self._report.broken.append(f"{method} {path}: {reply.status} {reply.body[:300]!r}")
        return reply.json if document is not None and reply.status < 300 else None

    def _watch_workers(self) -> None:
        super()._watch_workers()
        if not hasattr(self, "_first") or time.monotonic() < self._looks_next:
            return
        self._looks_next = time.monotonic() + WARM
        self._look()

    def _look(self) -> None:
        """What Redis uses, if nothing is broken now, and each process that has begun long ago."""
        used: dict[Any, dict[str, float]] = {}
        for pid in (self._http.process.pid, *(one.process.pid for one in self._workers)):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if time.time() - process.create_time() >= WARM:
                    used[pid] = {"megabytes": process.memory_info().rss / 2**20}
                    used[pid]["descriptors"] = process.num_fds()
        for client in () if self._ends else self._broker.clients():
            said = client.info()
            keys = said["db0"]["keys"] - said["db0"]["expires"]
            used["Redis"] = {"connections": said["connected_clients"], "keys": keys}
            used["Redis"]["megabytes of Redis"] = said["used_memory"] / 2**20
        self._last |= used
        self._first = used | self._first

    def _stop_workers(self) -> None:
        self._until_ready()
        self._look()
        kinds = {self._http.process.pid: "HTTP", "Redis": "Redis"}
        for who, last in self._last.items():
            for what, number in last.items():
                grown = number - self._first[who][what]
                name = f"{what} more, {kinds.get(who, 'worker that grew most')}"
                self._report.counted[name] = max(round(grown), self._report.counted.get(name, -999))
                if grown > MOST[what]:
                    self._report.broken.append(f"{who} has {grown:.0f} {what} more than at first")
        super()._stop_workers()
