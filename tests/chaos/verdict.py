"""What the ledger says about the product."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .app_queues import LIMITED
from .limits import judge_limits

#: Faults that end or silence connections: a publish may be repeated because of them.
NETWORK = ("cut", "freeze", "restart", "frozen")

#: Seconds that a signal may take to arrive: a process may start a task meanwhile.
SIGNAL = 0.05

#: Seconds for which a worker may have tasks queued in its pool.
QUEUED = 2.0


#: Slots of a queue, as it is declared by default.
SLOTS = 8

#: Seconds that a queue's tasks may wait without one of them being started, while so many are
#: started of other queues that were due later.
STARVED = 8.0
OVERTAKEN = 30

#: Seconds within which what was acknowledged early and lost with its worker must have been due.
TAKEN = 20.0

#: Seconds for which what was delivered may be on its way to the process that starts it.
ON_ITS_WAY = 1.0

#: What is counted of tasks that put their own jobs.
PUTS = "put again by their tasks"

#: Seconds by which a replica may be behind its primary.
BEHIND = 1.0


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
    #: by how many seconds the server's clock was set forward
    step: float = 0.0

    def forgot(self, queue: str, id: str, earlier: dict[str, Any], run: dict[str, Any]) -> bool:
        """Whether a replica that took over may not have heard that the earlier run's message was
        delivered, or acknowledged; or whether it could not be told while there was none."""
        slot = zlib.crc32(id.encode()) % SLOTS
        # In these, not the id says which slot.
        slots = range(SLOTS) if queue in LIMITED else (slot,)
        return (
            any((queue, number) in self.forgets for number in slots)
            and self.at <= run["at"]
            and any(self.at - BEHIND <= at <= self.until for at in (earlier["at"], earlier["end"]))
        )

    def hits(self, run: dict[str, Any]) -> bool:
        if not self.explains or self.worker != run["worker"]:
            return False
        return not self.pid or self.pid == run["pid"]

    def held_back(self, earlier: dict[str, Any], run: dict[str, Any]) -> bool:
        """Whether it stopped the later run's worker, which had the message already and started
        it when it went on, while it was run elsewhere."""
        return (
            self.family == "stop"
            and self.explains
            and self.worker == run["worker"]
            and not run["redelivered"]
            and self.at <= earlier["at"]
            and self.until <= run["at"] <= self.until + QUEUED
        )


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
    #: those of the unexplained that look like a publish sent twice
    republished: list[str] = field(default_factory=list)
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
        return not (
            self.lost
            or self.early
            or self.starved
            or self.crowded
            or self.disordered
            or self.unexplained
            or self.stuck
            or self.keys_left
            or self.broken
        )

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
            ("    of which published twice", len(self.republished)),
            *self.counted.items(),
            ("stuck", len(self.stuck)),
            ("keys left", len(self.keys_left)),
            ("broken", len(self.broken)),
            ("late p50 (ms)", f"{self.late_p50 * 1000:.1f}"),
            ("late p99 (ms)", f"{self.late_p99 * 1000:.1f}"),
        ]
        lines = [f"{name:<28} {value:>10}" for name, value in rows]
        for name in ("stuck", "keys_left", "broken"):
            lines += [f"{name}: {item}" for item in getattr(self, name)]
        for name in ("lost", "early", "starved", "crowded", "disordered", "unexplained"):
            for id in getattr(self, name):
                twice = " (published twice?)" if id in self.republished else ""
                lines += ["", f"{name}: {id}{twice}", *self.histories[id]]
        return "\n".join(lines)


def judge(report: Report, entries: list[dict[str, Any]], events: list[Event]) -> Report:
    """Fill in what the ledger tells, given what the harness did."""
    steps: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in entries:
        steps[entry["id"]].append(entry)
    report.faults = Counter(event.what for event in events if event.family)
    if puts := sum(entry["what"] == "put" for entry in entries):
        report.counted[PUTS] = puts
    lateness = []
    waits: list[Wait] = []
    for id, told in steps.items():
        told.sort(key=lambda entry: entry["at"])
        by_what: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for entry in told:
            by_what[entry["what"]].append(entry)
        [sending], runs = by_what["sending"], by_what["started"]
        last = max((run["retries"] for run in by_what["finished"]), default=-1)
        report.attempted += 1
        report.sent += len(by_what["sent"])
        report.failed += len(by_what["failed"])
        report.errors.update(entry["error"][:100] for entry in by_what["failed"])
        report.executed += last >= 0
        if by_what["sent"] and last < sending["times"]:
            explained = sending["times"] and _died_with_its_worker(by_what, events)
            (report.gone if explained else report.lost).append(id)
        elif by_what["put"] and len(by_what["finished"]) < 2:
            report.lost.append(id)
        eta = sending["eta"]
        if runs:
            due = max(eta or 0.0, (by_what["sent"] or [sending])[0]["at"])
            if not sending.get("key"):  # of others, some wait for what holds their key
                waits.append(Wait(sending["queue"], due, runs[0]["at"], id))
        if eta and runs:
            lateness.append(runs[0]["at"] - eta)
        if _is_early(eta, by_what, events):
            report.early.append(id)
        for retries in sorted({run["retries"] for run in runs}):
            _judge_runs(report, id, by_what, events, retries)
    report.starved = _starved(waits)
    report.crowded, report.disordered = judge_limits(steps, events)
    shown = (report.lost, report.early, report.starved, report.unexplained)
    for id in {*report.crowded, *report.disordered, *(id for some in shown for id in some)}:
        report.histories[id] = _history(steps[id], events)
    lateness.sort()
    if lateness:
        report.late_p50 = lateness[len(lateness) // 2]
        report.late_p99 = lateness[len(lateness) * 99 // 100]
    return report


def _ahead(events: list[Event], at: float) -> float:
    """By how many seconds the server's clock was ahead then."""
    return sum(event.step for event in events if event.at <= at)


def _was_ahead(events: list[Event], at: float) -> float:
    """By how many seconds it was ahead when what starts then may have been delivered, at most."""
    steps = [event.at for event in events if event.step and at - ON_ITS_WAY < event.at <= at]
    return max(_ahead(events, moment) for moment in (at - ON_ITS_WAY, *steps))


def _is_early(
    eta: float | None, by_what: dict[str, list[dict[str, Any]]], events: list[Event]
) -> bool:
    """Whether a run began before its time, by the server's clock."""
    if by_what["putting"] and len(by_what["started"]) == 2:  # the other one is what was put
        sent, run = by_what["putting"][0], by_what["started"][1]
        step = max(_was_ahead(events, run["at"]) - _ahead(events, sent["at"]), 0.0)
        if by_what["finished"] and run["at"] < sent["at"] + sent["delay"] - step:
            return True
    for run in by_what["started"]:
        ahead = _was_ahead(events, run["at"])
        if run["retries"] == 0:
            if eta and run["at"] < eta - max(ahead, 0.0):
                return True
            continue
        # Counted by the server's clock from when it was sent.
        sent = next(e for e in by_what["retrying"] if e["again"] == run["retries"])
        step = max(ahead - _ahead(events, sent["at"]), 0.0)
        if run["at"] < sent["at"] + sent["countdown"] - step:
            return True
    return False


def _died_with_its_worker(by_what: dict[str, list[dict[str, Any]]], events: list[Event]) -> bool:
    """Whether a process that had acknowledged the task was killed: nobody has it then.

    Also if it had not written down that it began: the two are not one step.
    """
    due = by_what["sending"][0]["at"]
    if by_what["retrying"]:
        latest = by_what["retrying"][-1]
        due = latest["at"] + latest["countdown"]
    due = max(due, by_what["sending"][0]["eta"] or 0.0)
    if by_what["started"]:
        run = by_what["started"][-1]
        ended = any(_same(e, run) and e["retries"] == run["retries"] for e in by_what["finished"])
        if not ended:
            return any(e.hits(run) and e.at >= run["at"] - SIGNAL for e in events)
    kills = (e for e in events if e.explains and e.family != "stop")
    return any(due - STARVED <= event.at <= due + TAKEN for event in kills)


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
        if any(w.queue == one.queue for w in meanwhile):
            continue
        if sum(w.due > one.due for w in meanwhile) >= OVERTAKEN:
            found.append(one.id)
    return found


def _judge_runs(
    report: Report,
    id: str,
    by_what: dict[str, list[dict[str, Any]]],
    events: list[Event],
    retries: int,
) -> None:
    """Of a task that was sent again under its id, each sending is judged by itself."""
    runs = [run for run in by_what["started"] if run["retries"] == retries]
    queue = by_what["sending"][0]["queue"]
    # A run that is explained and was one too many has sent the task again as well.
    sent_again = sum(entry["again"] == retries for entry in by_what["retrying"]) - 1
    for run in runs:
        ends = (e["at"] for e in by_what["finished"] if e["at"] >= run["at"] and _same(e, run))
        run["end"] = next(ends, run["at"])
    spent: set[int] = set()
    own = _run_of_own_put(by_what)
    for number, run in enumerate(runs[1:], 1):
        if run is own:
            continue
        for earlier in range(number):
            why = [
                event.what
                for event in events
                if event.hits(runs[earlier])
                and runs[earlier]["at"] - SIGNAL <= event.at <= run["at"]
            ] + [
                f"{event.what}, not started"
                for event in events
                if event.held_back(runs[earlier], run)
            ]
            why += [event.what for event in events if event.forgot(queue, id, runs[earlier], run)]
            if why and earlier not in spent:
                spent.add(earlier)
                report.explained[why[0]] += 1
                if "quit" in why and not run["redelivered"]:
                    report.broken.append(f"{id} runs again after a cold stop, and is not told so")
                break
        else:
            if sent_again > 0:
                sent_again -= 1
                report.explained["a run before that was explained"] += 1
                continue
            report.unexplained.append(id)
            begun = by_what["sending"][0]["at"]
            ends = by_what["sent"] or by_what["failed"]
            ended = ends[0]["at"] if ends else float("inf")
            if not run["redelivered"] and any(
                event.family in NETWORK
                and event.at <= ended
                and begun <= max(event.until, event.at)
                for event in events
            ):
                report.republished.append(id)


def _run_of_own_put(by_what: dict[str, list[dict[str, Any]]]) -> dict[str, Any] | None:
    """The run of what a task has put itself: one that is no redelivery, if there is one."""
    if not by_what["putting"]:
        return None
    since = by_what["putting"][0]["at"]
    later = (run for run in by_what["started"] if run["at"] >= since)
    return min(later, key=lambda run: (run["redelivered"], run["at"]), default=None)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two entries are of one process."""
    return one["worker"] == other["worker"] and one["pid"] == other["pid"]


def _history(told: list[dict[str, Any]], events: list[Event]) -> list[str]:
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
