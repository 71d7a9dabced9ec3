"""What the ledger says about the product."""

from __future__ import annotations

import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from kombu_toc import verify

from .app_queues import LIMITED

Steps = Mapping[str, Sequence[dict[str, Any]]]

#: Seconds; the same for the product and its peers.
VISIBILITY_TIMEOUT = 5.0

#: What a report has of the promises that the judge decides.
PROMISES = {
    "lost": verify.LOST,
    "early": verify.EARLY,
    "unexplained": verify.TWICE,
    "crowded": verify.LIMITS,
    "disordered": verify.ORDER,
}

#: Faults that end or silence connections: a publish may be repeated because of them.
NETWORK = ("cut", "freeze", "restart", "frozen")

#: Faults during which the server cannot be reached, and what a worker says that ends meanwhile.
AWAY = ("freeze", "restart", "frozen", "node", "pause", "master")
GIVES_UP = "calls that settle messages are not said"

#: Slots of a queue on a Cluster. A single server has one, of which what is said of all holds too.
SLOTS = 8

#: Seconds that a queue's tasks may wait without one of them being started, while so many are
#: started of other queues that were due later.
STARVED = 8.0
OVERTAKEN = 30

#: Seconds that a step of the server's clock takes, and that what was delivered before it may be on
#: its way.
STEPPING, ON_ITS_WAY = 0.3, 1.0

#: Seconds by which what a task writes down of its start may be behind what its worker knows.
NOTED = 0.05

#: What a report has of tasks whose histories it shows, and what else should be empty.
SHOWN = ("lost", "early", "starved", "crowded", "disordered", "unexplained")
NAMED = ("stuck", "keys_left", "broken")

#: What is counted of tasks that put their own jobs.
PUTS = "put again by their tasks"


@dataclass
class Event:
    """A fault, or what the harness saw of a process. Times are in seconds since the epoch."""

    at: float
    what: str
    family: str = ""
    #: the worker's name and incarnation
    worker: str = ""
    #: the process of its pool, if it was that alone
    pid: int = 0
    until: float = 0.0
    #: whether a task that was executing there may run again
    explains: bool = False
    #: queues and slots whose latest writes the broker may have forgotten
    forgets: frozenset[tuple[str, int]] = frozenset()
    #: from when on it may have forgotten them, if not from a second before
    since: float | None = None
    #: by how many seconds the server's clock was set forward
    step: float = 0.0
    #: seconds after which the end of a task is known, so that this explains no other run
    said: float = math.inf
    #: from when to when it may have remained unknown
    unsaid: Sequence[tuple[float, float]] = ()
    #: whether it ended without having said all that it had to
    gave_up: bool = False
    #: until when what a library has may be published and not be in the broker
    held: float = 0.0

    def faults(self, others: Sequence[Event] = ()) -> Iterator[verify.Event]:
        """What the judge is to know of it."""
        for one in others if self.gave_up else ():
            if one.family in AWAY and one.at <= self.at <= one.until + ON_ITS_WAY:
                said = self.at - one.at + ON_ITS_WAY
                yield self._fault(verify.SILENT, self.worker, said=said)
        if self.explains:
            what = {"quit": verify.QUIT, "stop long": verify.STOPPED}.get(self.what, verify.KILLED)
            target = f"{self.worker}/{self.pid}" if self.pid else self.worker
            until = self.until if what == verify.STOPPED else math.inf
            yield self._fault(what, target, until=until, said=self.said)
            for since, until in self.unsaid:
                yield self._fault(verify.UNSAID, target, since=since, until=until)
        if self.forgets:
            places = [f"{queue}:{slot}" for queue, slot in self.forgets]
            yield self._fault(verify.FORGOT, *places, since=self.since, until=self.until)
            for since, until in self.unsaid:
                if self.at <= until:
                    yield self._fault(verify.UNSAID, *places, since=since, until=until)
        if self.held:
            yield self._fault(verify.HELD, *LIMITED, until=self.held)
        if self.step:
            yield self._fault(verify.STEPPED)

    def _fault(self, what: str, *target: str, **more: Any) -> verify.Event:
        return verify.Event(self.at, "harness", what, target=target, **more)


@dataclass
class Report:
    """Counts, and the histories behind those that should be zero."""

    transport: str
    seed: int
    broker: str = "redis"
    attempted: int = 0
    sent: int = 0
    failed: int = 0
    #: error -> publishes that raised it
    errors: Counter[str] = field(default_factory=Counter)
    executed: int = 0
    lost: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    #: tasks of a queue of which none was started for long, while others' were
    starved: list[str] = field(default_factory=list)
    #: tasks that ran while as many as may run were running, or before one that goes first
    crowded: list[str] = field(default_factory=list)
    disordered: list[str] = field(default_factory=list)
    #: tasks that were acknowledged before they began, and whose worker was killed then
    gone: list[str] = field(default_factory=list)
    #: fault that explains it -> number of runs
    explained: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    keys_left: list[str] = field(default_factory=list)
    #: what else should not have happened: a worker that does not stop, or ends by itself
    broken: list[str] = field(default_factory=list)
    #: what else was counted, in the words of who did so
    counted: dict[str, int] = field(default_factory=dict)
    late_p50: float = 0.0
    late_p99: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    histories: dict[str, list[str]] = field(default_factory=dict)

    @property
    def faultless(self) -> bool:
        return not any(getattr(self, name) for name in (*SHOWN, *NAMED))

    def table(self) -> str:
        rows = [
            ("transport", self.transport),
            ("broker", self.broker),
            ("seed", self.seed),
            ("faults", sum(self.faults.values())),
            *((f"  {name}", number) for name, number in sorted(self.faults.items())),
            ("attempted", self.attempted),
            ("sent", self.sent),
            ("send failed", self.failed),
            *((f"  with {name}", number) for name, number in sorted(self.errors.items())),
            ("executed", self.executed),
            ("lost", len(self.lost)),
            ("  acknowledged, then killed", len(self.gone)),
            ("early", len(self.early)),
            ("starved", len(self.starved)),
            ("more at once than may run", len(self.crowded)),
            ("out of order", len(self.disordered)),
            ("duplicated", sum(self.explained.values()) + len(self.unexplained)),
            *((f"  by {name}", number) for name, number in sorted(self.explained.items())),
            ("  unexplained", len(self.unexplained)),
            *self.counted.items(),
            ("stuck", len(self.stuck)),
            ("keys left", len(self.keys_left)),
            ("broken", len(self.broken)),
            ("late p50 (ms)", f"{self.late_p50 * 1000:.1f}"),
            ("late p99 (ms)", f"{self.late_p99 * 1000:.1f}"),
        ]
        lines = [f"{name:<28} {value:>10}" for name, value in rows]
        for name in NAMED:
            lines += [f"{name}: {item}" for item in getattr(self, name)]
        for name in SHOWN:
            for id in getattr(self, name):
                lines += ["", f"{name}: {id}", *self.histories[id]]
        return "\n".join(lines)


def by_id(entries: Sequence[dict[str, Any]]) -> Steps:
    """What was written down of each task, in order."""
    steps: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in sorted(entries, key=lambda entry: entry["at"]):
        steps[entry["id"]].append(entry)
    return steps


def judge(report: Report, entries: list[dict[str, Any]], events: list[Event]) -> Report:
    """Fill in what the ledger tells, given what the harness did."""
    steps = by_id(entries)
    report.faults = Counter(event.what for event in events if event.family)
    if puts := sum(entry["what"] == "put" for entry in entries):
        report.counted[PUTS] = puts
    waits: list[Wait] = []
    for id, told in steps.items():
        sending = told[0]
        whats = Counter(entry["what"] for entry in told)
        report.attempted += 1
        report.sent += whats["sent"]
        report.failed += whats["failed"]
        report.errors.update(entry["error"][:100] for entry in told if entry["what"] == "failed")
        report.executed += whats["finished"] > 0
        sent = next((entry["at"] for entry in told if entry["what"] == "sent"), sending["at"])
        begun = next((entry["at"] for entry in told if entry["what"] == "started"), None)
        if begun is not None and not sending.get("key"):  # some wait for what holds their key
            waits.append(Wait(sending["queue"], max(sending["eta"] or 0.0, sent), begun, id))
    report.starved = _starved(waits)
    limits = {
        name: verify.Limit(int(str(terms.get("concurrency", 0))) or None, "key_order" in terms)
        for name, terms in LIMITED.items()
    }
    rules = verify.Rules(VISIBILITY_TIMEOUT, limits, NOTED)
    verdict = verify.judge(history(entries, events), rules)
    for name, promise in PROMISES.items():
        setattr(report, name, [id.partition("+")[0] for id in verdict.ids(promise)])
    report.gone = [id.partition("+")[0] for id in verdict.gone]
    report.explained = verdict.explained
    report.broken += [str(one) for one in verdict.broken if one.promise == verify.HISTORY]
    for id in {id for name in SHOWN for id in getattr(report, name)}:
        report.histories[id] = _history(steps[id], events)
    if late := verdict.lateness:
        report.late_p50, report.late_p99 = late[len(late) // 2], late[len(late) * 99 // 100]
    return report


def history(entries: Sequence[dict[str, Any]], events: Sequence[Event]) -> list[verify.Event]:
    """The ledger, for the judge. What a task has sent under its id is a message of its own."""
    found = [fault for event in events for fault in event.faults(events)]
    sent: dict[str, dict[str, Any]] = {}
    retrying: dict[tuple[str, int], int] = {}
    put_off: set[str] = set()
    entries = sorted(entries, key=lambda entry: entry["at"])
    # When the process of each entry wrote the next one of its task.
    until: list[float] = []
    following: dict[tuple[str, int], float] = {}
    for entry in reversed(entries):
        until.append(following.get((entry["id"], entry["pid"]), entry["at"]))
        following[entry["id"], entry["pid"]] = entry["at"]
    for entry, until_at in zip(entries, reversed(until), strict=True):
        id, pid, at = entry["id"], entry["pid"], entry["at"]
        retries = entry.get("retries", 0)
        name = f"{id}+{retries}" if retries else id

        note = partial(_note, found, events, at, until_at)
        match entry["what"]:
            case "sending":
                queue, key = entry["queue"], entry.get("key", "")
                # In those with limits, not the id says which slot.
                slot = "" if queue in LIMITED else f":{zlib.crc32(id.encode()) % SLOTS}"
                more = {"queue": queue + slot, "key": key, "root": id if entry["times"] else ""}
                sent[id] = more | {"early_ack": bool(entry["times"])}
                note(pid, verify.PUT, verify.ASKED, id, due=entry["eta"], **sent[id])
            case "sent" | "put":
                note(pid, verify.PUT, verify.DONE, id)
            case "failed":
                note(pid, verify.PUT, verify.FAILED, id)
            case "putting":
                note(pid, verify.PUT, verify.ASKED, id, delay=entry["delay"], **sent[id])
            case "retrying":
                retrying[id, pid] = entry["again"]
                name, delay = f"{id}+{entry['again']}", entry["countdown"]
                note(pid, verify.PUT, verify.ASKED, name, delay=delay, **sent[id])
            case "put off":
                put_off.add(id)
            case "started":
                # What was put off says so, and whether anything else has happened tells nobody.
                told = None if entry["redelivered"] and id in put_off else entry["redelivered"]
                note(f"{entry['worker']}/{pid}", verify.RUN, verify.ASKED, name, redelivered=told)
            case "finished":
                note(f"{entry['worker']}/{pid}", verify.RUN, verify.DONE, name)
                if retrying.pop((id, pid), None) == retries + 1:
                    note(pid, verify.PUT, verify.DONE, f"{id}+{retries + 1}")
    return found


def _note(
    found: list[verify.Event],
    events: Sequence[Event],
    at: float,
    until: float,
    process: Any,
    what: str,
    stage: str,
    id: str,
    **more: Any,
) -> None:
    """Add a line. About the time of a step, the server's clock may have shown either time: of what
    is asked to be put the sooner one counts, until its sender goes on; else the later one."""
    soon = what == verify.PUT and stage == verify.ASKED
    since = at - (STEPPING if soon else ON_ITS_WAY)
    steps = [event for event in events if event.step and event.at <= (until if soon else at)]
    times = [since, *(event.at for event in steps if event.at > since)]
    ahead = [sum(event.step for event in steps if event.at <= time) for time in times]
    clock = at + (min(ahead) if soon else max(ahead))
    found.append(verify.Event(at, str(process), what, stage, id, server=clock, **more))


class Wait(NamedTuple):
    """A task's first run: when it was due and when it began."""

    queue: str
    due: float
    began: float
    id: str


def _starved(waits: list[Wait]) -> list[str]:
    """Tasks that waited for long, while none of their queue was started and many of others were."""
    found = []
    for one in waits:
        if one.began - one.due < STARVED:
            continue
        meanwhile = [w for w in waits if one.due < w.began < one.began - 1.0]
        own = any(w.queue == one.queue for w in meanwhile)
        if not own and sum(w.due > one.due for w in meanwhile) >= OVERTAKEN:
            found.append(one.id)
    return found


def _history(told: Sequence[dict[str, Any]], events: list[Event]) -> list[str]:
    """What happened to a task, and around it."""
    first, last = told[0]["at"], told[-1]["at"]
    lines = []
    for entry in told:
        rest = {k: v for k, v in entry.items() if k not in ("what", "id", "at")}
        lines.append((entry["at"], f"{entry['what']} {rest}"))
    for event in events:
        if first - 8 <= event.at <= last:
            where = f" {event.worker}" if event.worker else ""
            where += f" pid {event.pid}" if event.pid else ""
            until = f" for {event.until - event.at:.2f} s" if event.until else ""
            lines.append((event.at, f"    -- {event.what}{where}{until}"))
    return [f"  {at - first:+9.4f}  {text}" for at, text in sorted(lines)]
