"""``celery toc status``: what each topic holds, and how punctual it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import redis

import kombu_toc

from . import times
from .ends import Command
from .screen import Cell, Column
from .session import Session, complete_topic, with_session

COLUMNS = (
    Column("topic", fold=True),
    Column("slots", right=True),
    Column("scheduled", right=True),
    Column("ready", right=True),
    Column("in flight", right=True),
    Column("dead", right=True),
    Column("oldest", right=True, spare=True),
    Column("late p50", right=True),
    Column("late p99", right=True),
)

#: Of these, how late messages were delivered in the last minutes.
LATE = ("late_p50_seconds", "late_p99_seconds")


@click.command(
    cls=Command,
    example="""
celery -A shop toc status
celery -A shop toc status mail --json
""",
)
@click.argument("topics", nargs=-1, metavar="[TOPIC]...", shell_complete=complete_topic)
@click.option("--all", "-a", "every", is_flag=True, help="Also reply queues with nothing in them.")
@with_session
def status(session: Session, topics: tuple[str, ...], every: bool) -> None:
    """What each topic holds, and how late its messages were delivered in the last minutes.

    Scheduled: waits for its time. Ready: due, and not taken yet; oldest: for how long. In flight:
    with a worker. Dead: given up on.
    """
    rows = survey(session, topics, every=every)
    server = server_of(session)
    warnings = kombu_toc.durability_warnings(session.center.client)
    if session.as_json:
        session.screen.json(
            {"broker": session.broker, "server": server, "topics": rows, "warnings": warnings}
        )
        return
    session.screen.say(title(session, server), "bold")
    session.screen.table(COLUMNS, [line(row) for row in rows])
    for warning in warnings:
        session.screen.say(f"Warning: {warning}.", "yellow")


def survey(session: Session, asked: Sequence[str], *, every: bool = False) -> list[dict[str, Any]]:
    """What each topic holds, as in JSON.

    every: those too that go away by themselves, also while they are empty
    """
    center, names = session.center, session.topics(asked)
    summaries = [one for name in names for one in center.summary(name)] if asked else None
    measured = kombu_toc.read_metrics(center, names)
    rows = []
    for found in center.summary() if summaries is None else summaries:
        declared = center.known(found.topic)
        passing = declared is not None and declared.declaration.expires
        if passing and not any(found.counts) and not every and found.topic not in asked:
            continue
        late = measured[found.topic].recent_lateness if found.topic in measured else None
        rows.append(
            {
                "topic": found.topic,
                "slots": found.slots,
                **found.counts._asdict(),
                "oldest_seconds": found.oldest_us / 1e6,
                "late_p50_seconds": late and late.quantile(0.5),
                "late_p99_seconds": late and late.quantile(0.99),
            }
        )
    return rows


def line(row: dict[str, Any]) -> list[Any]:
    """A row of the table."""
    oldest = row["oldest_seconds"]
    return [
        row["topic"],
        row["slots"],
        row["scheduled"],
        Cell(row["ready"], "yellow" if row["ready"] else ""),
        row["in_flight"],
        Cell(row["dead"], "red" if row["dead"] else ""),
        Cell(times.span(oldest), "yellow" if oldest >= 1 else "") if oldest else None,
        *(None if row[late] is None else times.milliseconds(row[late]) for late in LATE),
    ]


def title(session: Session, server: dict[str, str]) -> str:
    """Where all this is."""
    name = " ".join(filter(None, (server["name"], server["version"])))
    return f"{session.broker}  {name}"


def server_of(session: Session) -> dict[str, str]:
    """The server's name and version; empty where it does not tell."""
    try:
        info = session.center.client.info("server")
    except redis.ResponseError:  # an ACL user who may not ask
        info = {}
    name = "Valkey" if "valkey_version" in info else "Redis"
    return {
        "name": name if info else "",
        "version": str(info.get("valkey_version") or info.get("redis_version") or ""),
    }
