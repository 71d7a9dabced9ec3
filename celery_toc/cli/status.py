"""``celery toc status``: what each queue holds, and how late its messages are delivered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

import kombu_toc

from ..app.broker import visibility_warnings
from . import times
from .exits import Command
from .options import queues_argument
from .screen import Cell, Column, scaled
from .session import Session, with_session
from .wording import counted, listed

COLUMNS = (
    Column("queue", fold=True),
    Column("slots", right=True, spare=6),
    Column("scheduled", right=True),
    Column("ready", right=True),
    Column("in flight", right=True),
    Column("dead", right=True),
    Column("oldest", right=True, spare=3),
    Column("late p50", right=True, spare=5),
    Column("late p99", right=True, spare=1),
    Column("consumers", right=True, spare=2),
    Column("memory", right=True, spare=4),
)

#: Behind "dead", where a queue has messages in the task library only.
FAR = Column("far", right=True, spare=2)

#: What workers run.
RUNNING = (Column("running"), Column("task", fold=True), Column("worker", fold=True))

#: Seconds for which their answers are waited for.
ANSWER_WITHIN = 1.0

#: Of these, how late messages were delivered in the last minutes.
LATE = ("late_p50_seconds", "late_p99_seconds")


@click.command(
    cls=Command,
    example="""
celery -A shop toc status
celery -A shop toc status mail --json
""",
)
@queues_argument
@click.option("--all", "-a", "every", is_flag=True, help="Also reply queues with nothing in them.")
@click.option("--running", is_flag=True, help="Also ask the workers which tasks they run.")
@with_session
def status(session: Session, queues: tuple[str, ...], every: bool, running: bool) -> None:
    """What each queue holds, and how late its messages were delivered in the last minutes.

    Scheduled: waiting for their time. Ready: due and not taken yet; oldest: for how long. In
    flight: taken by a worker and not acknowledged: tasks with acks_late until they end, and others
    until they begin. So with Celery's default a task that runs is not in flight; --running asks the
    workers. Dead: given up on. Far: in the task library only, and so in no other number. Consumers:
    processes that take from the queue. Memory: what its messages use in Redis, an estimate.
    """
    rows = survey(session, queues, every=every, memory=True)
    server = server_of(session)
    warnings = [
        *kombu_toc.durability_warnings(session.center.client),
        *kombu_toc.outage_warnings(session.center.client),
        *visibility_warnings(session.center.limits),
        *unconsumed(rows),
        *stopped(rows),
    ]
    told = _running(session) if running else None
    if session.as_json:
        document = {"broker": session.broker, "server": server, "topics": rows}
        more = {} if told is None else {"running": told}
        session.json({**document, "warnings": warnings, **more})
        return
    session.screen.say(title(session, server), "bold")
    if rows:
        far = any("far" in row for row in rows)
        columns = list(COLUMNS)
        if far:
            columns.insert([one.name for one in COLUMNS].index("dead") + 1, FAR)
        session.screen.table(columns, [line(row, far=far) for row in rows])
    else:
        session.screen.say("There are no queues yet: a worker declares its own when it starts.")
    if told:
        session.screen.say("")
        session.screen.table(RUNNING, [list(one.values()) for one in told])
    elif told is not None:
        session.screen.say("No worker that answers runs a task.")
    for warning in warnings:
        session.screen.say(f"Warning: {warning}.", "yellow")
    if paused := [row["queue"] for row in rows if row["paused"]]:
        are = "is" if len(paused) == 1 else "are"
        session.screen.say(
            f"{listed(paused)} {are} paused; 'celery toc resume QUEUE' ends that.", "yellow"
        )


def _running(session: Session) -> list[dict[str, str]]:
    """The tasks that workers say that they run."""
    told = session.app.control.inspect(timeout=ANSWER_WITHIN).active() or {}
    return [
        {"id": one["id"], "task": one["name"], "worker": worker}
        for worker, active in sorted(told.items())
        for one in active
    ]


def survey(
    session: Session, named: Sequence[str], *, every: bool = False, memory: bool = False
) -> list[dict[str, Any]]:
    """What each queue holds, as in JSON.

    named: only these queues; all unless given
    every: also queues that expire by themselves, while they are empty
    memory: also the memory that each uses
    """
    center, names = session.center, session.queues(named)
    summaries = None
    if named:
        summaries = [one for name in names for one in session.ask(center.summary, name)]
    measured = kombu_toc.read_metrics(center, names)
    consumers, paused = center.consumers(), center.paused()
    rows = []
    for found in session.ask(center.summary) if summaries is None else summaries:
        declared = center.known(found.topic)
        passing = declared is not None and declared.declaration.expires
        if passing and not any(found.counts) and not every and found.topic not in named:
            continue
        late = measured[found.topic].recent_lateness if found.topic in measured else None
        rows.append(
            {
                "queue": found.topic,
                "topic": found.topic,
                "slots": found.slots,
                **found.counts._asdict(),
                "oldest_seconds": found.oldest_us / 1e6,
                "late_p50_seconds": late and late.quantile(0.5),
                "late_p99_seconds": late and late.quantile(0.99),
                # Replies are consumed for moments only, which nobody records.
                "consumers": None if passing else len(consumers.get(found.topic, ())),
                "paused": found.topic in paused,
                "target": None if declared is None else declared.declaration.target,
                "target_stopped": None if declared is None else declared.declaration.target_stopped,
            }
        )
    if memory:
        note_far(center, names, rows)
        sizes = None
        if not session.missing:  # it asks the nodes of all
            sizes = kombu_toc.estimate_memory(center.center, [row["queue"] for row in rows])
        for row in rows:
            row["memory_bytes"] = None if sizes is None else sizes[row["queue"]]
    return rows


def note_far(center: Any, names: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Note how much of each queue with a horizon is in the task library only; None: it cannot be
    asked."""
    far: dict[str, int | None] = {}
    for topic in names:
        known = center.known(topic)
        if known is None or not known.declaration.far:
            continue
        try:
            far.update(center.count_far(topic))
        except kombu_toc.LibraryError:
            far[topic] = None
    for row in rows:
        if row["topic"] in far:
            row["far"] = far[row["topic"]]


def unconsumed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A warning for each queue in which messages wait and which nobody consumes."""
    return [
        f"nobody sends {row['queue']!r} to its target, in which {waiting(row)}; start "
        "'celery toc notify'"
        if row["target"]
        else f"nobody consumes {row['queue']!r}, in which {waiting(row)}; start a worker with -Q "
        f"{row['queue']}"
        for row in rows
        if row["consumers"] == 0 and row["ready"] + row["scheduled"] and not row["target_stopped"]
    ]


def stopped(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A warning for each queue whose target wants nothing any more."""
    return [
        f"the target of {row['queue']!r} is stopped ({row['target_stopped']}), and {waiting(row)}; "
        f"'celery toc topic set {row['queue']} --target URL' goes on"
        for row in rows
        if row["target_stopped"]
    ]


def waiting(row: dict[str, Any]) -> str:
    """How many messages wait in a queue."""
    number = row["ready"] + row["scheduled"]
    return f"{counted(number, 'message')} {'waits' if number == 1 else 'wait'}"


def line(row: dict[str, Any], *, far: bool = False) -> list[Any]:
    """A row of the table.

    far: with what is in the task library only
    """
    oldest, consumers = row["oldest_seconds"], row["consumers"]
    waits = row["ready"] + row["scheduled"]
    if row["paused"]:
        consumers = Cell("paused", "yellow")
    elif consumers == 0 and waits:
        consumers = Cell(0, "yellow")
    size = row.get("memory_bytes")
    return [
        row["queue"],
        row["slots"],
        row["scheduled"],
        Cell(row["ready"], "yellow" if row["ready"] else ""),
        row["in_flight"],
        Cell(row["dead"], "red" if row["dead"] else ""),
        *([_far(row)] if far else []),
        Cell(times.span(oldest), "yellow" if oldest >= 1 else "") if oldest else None,
        *(None if row[late] is None else times.milliseconds(row[late]) for late in LATE),
        consumers,
        None if size is None else _bytes(size),
    ]


def _far(row: dict[str, Any]) -> Any:
    if "far" not in row:
        return None
    return Cell("?", "yellow") if row["far"] is None else row["far"]


def _bytes(number: float) -> str:
    """``0B``, ``812B``, ``4.2kB``, ``310MB``: about, as it is an estimate."""
    return scaled(number, ("B", "kB", "MB", "GB", "TB"), 9.95)


def title(session: Session, server: dict[str, str]) -> str:
    """The heading: broker and server."""
    name = " ".join(filter(None, (server["name"], server["version"])))
    return f"{session.broker}  {name}"


def server_of(session: Session) -> dict[str, str]:
    """The server's name and version; empty if it does not tell."""
    session.center  # noqa: B018 - to connect, which reads the server's INFO
    info = session.server
    name = "Valkey" if "valkey_version" in info else "Redis"
    return {
        "name": name if info else "",
        "version": str(info.get("valkey_version") or info.get("redis_version") or ""),
    }
