"""``celery toc status``: what each topic holds, and how punctual it is."""

from __future__ import annotations

from typing import Any

import click
import redis

import kombu_toc

from . import times
from .ends import Command
from .screen import Cell, Column
from .session import Session, complete_topic, with_session

COLUMNS = (
    Column("topic"),
    Column("slots", right=True),
    Column("scheduled", right=True),
    Column("ready", right=True),
    Column("in flight", right=True),
    Column("dead", right=True),
)


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
    """What each topic holds.

    Scheduled: waits for its time. Ready: due, and not taken yet. In flight: with a worker. Dead:
    given up on.
    """
    rows = survey(session, topics, every=every)
    server = server_of(session)
    warnings = kombu_toc.durability_warnings(session.center.client)
    if session.as_json:
        session.screen.json(
            {"broker": session.broker, "server": server, "topics": rows, "warnings": warnings}
        )
        return
    name = " ".join(filter(None, (server["name"], server["version"])))
    session.screen.say(f"{session.broker}  {name}", "bold")
    session.screen.table(COLUMNS, [line(row) for row in rows])
    for warning in warnings:
        session.screen.say(f"Warning: {warning}", "yellow")


def survey(session: Session, asked: tuple[str, ...], *, every: bool) -> list[dict[str, Any]]:
    """What each topic holds, as in JSON.

    every: those too that go away by themselves, also while they are empty
    """
    center = session.center
    rows = []
    for name in session.topics(asked):
        topic = center.declared(name)
        if topic is None:  # it has just gone
            continue
        counts = center.counts(name)
        if topic.declaration.expires and not any(counts) and not every and name not in asked:
            continue
        rows.append({"topic": name, "slots": topic.slots, **counts._asdict()})
    return rows


def line(row: dict[str, Any]) -> list[Any]:
    """A row of the table."""
    return [
        row["topic"],
        row["slots"],
        row["scheduled"],
        Cell(row["ready"], "yellow" if row["ready"] else ""),
        row["in_flight"],
        Cell(row["dead"], "red" if row["dead"] else ""),
    ]


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
