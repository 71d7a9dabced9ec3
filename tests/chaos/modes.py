"""What a run with a task library looks at beyond the others, by how its queues are declared
(``python -m tests.chaos --library MODE``); see the package.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy

from kombu_toc import LibraryError
from kombu_toc.client.options import DatabaseURL, read_databases
from kombu_toc.library.horizon import FarStore
from kombu_toc.library.shards import Shards
from kombu_toc.library.store import Store

from .app_queues import HORIZON, LIMITED, QUEUES
from .verdict import Report, Steps

if TYPE_CHECKING:
    from .library import LibraryRun

#: Seconds after which a row is written behind its message, while somebody does that and can.
WRITTEN = 3.0

#: Seconds after which somebody else does it, at the latest, when whoever did so was killed.
ELECTED = 17.0

#: Seconds before its time by which what is far ahead must be in Redis, whatever is killed.
LOADED = 20.0

#: Seconds by which a task may be late that is due when nothing breaks any more.
LATE = 2.0

#: Seconds between two looks at what is far ahead.
LOOK = 1.0


class Mode:
    """As queues are kept by default: ``through``."""

    #: how all queues are declared
    terms: Mapping[str, Any] = {}
    #: the databases of the library, unless others are asked for, and how many there may be
    engines: tuple[str, ...] = ("postgresql", "sqlite")
    most_engines = 8

    def __init__(self, run: LibraryRun) -> None:
        self.run = run
        self.broken: list[str] = []

    def environment(self) -> dict[str, str]:
        return {}

    def watch(self) -> None:
        """Look at something while faults go on, and after."""

    def losing(self) -> float:
        """Redis is about to lose everything: return for how many seconds the oldest of what has no
        row has waited."""
        return 0.0

    def is_unsaid(self, id: str) -> bool:
        """Whether there need be no record of a task that has run."""
        return False

    def finish(self, steps: Steps) -> None:
        """All have ended; the databases are there."""

    def weigh(self, report: Report, steps: Steps) -> None:
        """Add to what the ledger says."""


class Outbox(Mode):
    """Producers commit an order and its task in one transaction, or neither."""

    terms = {"library": "outbox"}
    engines = ("postgresql",)
    most_engines = 1

    def _engine(self) -> sqlalchemy.Engine:
        return sqlalchemy.create_engine(DatabaseURL(self.run.urls[0]).reveal())

    def environment(self) -> dict[str, str]:
        engine = self._engine()
        with engine.begin() as connection:
            connection.execute(sqlalchemy.text("CREATE TABLE orders (id VARCHAR(64) PRIMARY KEY)"))
        engine.dispose()
        return {"CHAOS_MODE": "outbox"}

    def finish(self, steps: Steps) -> None:
        engine = self._engine()
        with engine.connect() as connection:
            orders = set(connection.execute(sqlalchemy.text("SELECT id FROM orders")).scalars())
        engine.dispose()
        ran = {id for id, told in steps.items() if any(e["what"] == "started" for e in told)}
        self.broken += [f"{id} has run, and its order is not there" for id in sorted(ran - orders)]
        lost = {id for id in orders - ran if not self._is_gone(steps[id])}
        self.broken += [f"the order {id} is there, and its task has not run" for id in sorted(lost)]
        said = {id for id, told in steps.items() if any(e["what"] == "sent" for e in told)}
        counted = self.run.report.counted
        counted["orders committed"] = len(orders)
        counted["  of which nobody was told"] = len(orders - said)
        counted["orders rolled back"] = len(steps.keys() - orders)

    def weigh(self, report: Report, steps: Steps) -> None:
        # A message is put after its commit, by whoever is alive, and nobody writes down when.
        report.disordered = []

    @staticmethod
    def _is_gone(told: Sequence[dict[str, Any]]) -> bool:
        """Whether it was one that is acknowledged before it begins: its worker was killed."""
        return any(entry["what"] == "sending" and entry["times"] for entry in told)


class Behind(Mode):
    """Rows are written a moment after the messages: what has none yet is lost with Redis."""

    terms = {"library": "behind"}

    def losing(self) -> float:
        waits = [one.oldest_us / 1e6 for one in self.run.center().queues.unwritten()]
        oldest, now = max(waits, default=0.0), time.time()
        counted = self.run.report.counted
        name = "longest without a row (ms)"
        counted[name] = max(counted.get(name, 0), round(oldest * 1000))
        if oldest > WRITTEN and not self._is_excused(now - oldest, now):
            self.broken += [f"what was sent {oldest:.1f} s ago has no row, and nothing is broken"]
        return oldest

    def _is_excused(self, since: float, until: float) -> bool:
        """Whether nobody was there to write rows for some of that time, or could."""
        for event in self.run.events:
            ended = max(event.at, event.until)
            if event.family in ("database", "restart", "cut"):
                ended += WRITTEN
            elif event.explains or event.family in ("lost", "alone"):
                ended += ELECTED
            else:
                continue
            if event.at <= until and ended >= since:
                return True
        return False

    def is_unsaid(self, id: str) -> bool:
        """Without a row, history says what its worker says; if that was killed, nothing does."""
        steps = [entry for entry in self.run.entries if entry["id"] == id]
        for run in (entry for entry in steps if entry["what"] == "started"):
            ends = [e["at"] for e in steps if e["what"] == "finished" and e["at"] >= run["at"]]
            end = min(ends, default=run["at"])
            for event in self.run.events:
                hit = event.explains and event.worker == run["worker"]
                if hit and event.pid in (0, run["pid"]) and event.at >= run["at"] - 1:
                    late = any(a <= end and run["at"] <= b for a, b in event.unsaid)
                    if late or end >= event.at - event.said:
                        return True
        return False

    def weigh(self, report: Report, steps: Steps) -> None:
        missing = [id for id in report.lost if self._had_no_row(steps[id])]
        report.lost = [id for id in report.lost if id not in missing]
        report.counted["lost with Redis, without a row"] = len(missing)

    def _had_no_row(self, told: Sequence[dict[str, Any]]) -> bool:
        """Whether it was sent for the last time as Redis lost everything, or so short a time before
        that its row was not written."""
        begun = [entry["at"] for entry in told if entry["what"] in ("sending", "retrying")][-1]
        ended = [entry["at"] for entry in told if entry["what"] in ("sent", "finished")][-1]
        return any(
            event.at - event.unwritten - 0.1 <= max(begun, ended) and begun <= event.until + 0.1
            for event in self.run.losses
        )


class Guard(Mode):
    """What has ended is not run again, also if it is sent again under its id."""

    terms = {"guard": True}

    def environment(self) -> dict[str, str]:
        return {"CHAOS_MODE": "guard"}

    def weigh(self, report: Report, steps: Steps) -> None:
        again = ran = 0
        for id, told in steps.items():
            sent = [entry["at"] for entry in told if entry["what"] == "sent again"]
            again += len(sent)
            runs = [entry for entry in told if entry["what"] == "started" and sent]
            ran += sum(run["at"] > sent[0] for run in runs)
            if id in report.unexplained and all(
                self._was_away(told, run) for run in runs if run["at"] > sent[0]
            ):
                report.unexplained = [one for one in report.unexplained if one != id]
                report.explained["database was away, not guarded"] += 1
        report.counted["sent again after their end"] = again
        report.counted["  and run again"] = ran

    def _was_away(self, told: Sequence[dict[str, Any]], run: dict[str, Any]) -> bool:
        """Whether a database could not be asked when it was delivered, or had not been told."""
        ends = [e["at"] for e in told if e["what"] == "finished" and e["at"] < run["at"]]
        return any(
            one.at - 2.0 <= run["at"] and min(ends, default=0.0) <= one.until + self.run.unsaid
            for one in self.run.away
        )


class Far(Mode):
    """Half of what is ahead is further than the horizon: it is in the library only, and is put into
    Redis well before its time, whoever is killed at that."""

    terms = {"horizon": HORIZON}

    def __init__(self, run: LibraryRun) -> None:
        super().__init__(run)
        self._next_look = 0.0
        self._late: dict[str, float] = {}
        self._store: FarStore | None = None

    def environment(self) -> dict[str, str]:
        self._store = FarStore(Store(Shards(read_databases("", self.run.urls), 1, 1.0)))
        return {"CHAOS_MODE": "far"}

    def watch(self) -> None:
        now = time.monotonic()
        if self._store is None or now < self._next_look or self.run.is_busy:
            return
        self._next_look = now + LOOK
        until_us = round((time.time() + LOADED) * 1e6)
        try:
            for queue in (*QUEUES, *LIMITED):
                for row in self._store.read(queue, (0, "", ""), None, until_us, 100):
                    self._late[row.id] = row.action_us / 1e6 - time.time()
        except LibraryError:  # it recovers
            return

    def finish(self, steps: Steps) -> None:
        if self._store is not None:
            self._store.shards.close()
        for id, seconds in self._late.items():
            self.broken.append(f"{id} was in the library alone {seconds:.1f} s before its time")

    def weigh(self, report: Report, steps: Steps) -> None:
        late: dict[str, float] = {}
        forgotten = 0
        last = max((max(one.at, one.until) for one in self.run.events if one.family), default=0.0)
        for id, told in steps.items():
            sending, eta = told[0], told[0]["eta"]
            begun = [entry["at"] for entry in told if entry["what"] == "started"]
            if eta and begun and eta - sending["at"] > HORIZON:
                if self._is_put_late(eta):
                    forgotten += 1
                    continue
                late[id] = begun[0] - eta
                if late[id] > LATE and eta > last + ELECTED:
                    self.broken.append(f"{id} was far ahead, and {late[id]:.1f} s late")
        report.counted["further than the horizon"] = len(late) + forgotten
        report.counted["  lost, and nobody rebuilt"] = forgotten
        report.counted["  latest of the others (ms)"] = round(max(late.values(), default=0) * 1000)

    def _is_put_late(self, eta: float) -> bool:
        """Whether it was in Redis when that lost everything, and nobody rebuilt it: what is missing
        there is put again when it is overdue."""
        return any(
            event.family == "alone" and event.until >= eta - HORIZON for event in self.run.losses
        )


MODES: dict[str, type[Mode]] = {"through": Mode, "outbox": Outbox, "behind": Behind}
MODES |= {"guard": Guard, "far": Far}
