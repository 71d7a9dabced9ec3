"""``celery toc limits``: what queues limit, and what is used of it."""

from __future__ import annotations

from typing import Any

import click

import kombu_toc

from . import times
from .exits import Command
from .options import queues_argument
from .screen import Cell, Column
from .session import Session, with_session
from .topic import text_of

COLUMNS = (
    Column("queue", fold=True),
    Column("limit"),
    Column("value", right=True),
    Column("used", right=True),
    Column("next in", right=True),
    Column("waiting", right=True, spare=1),
    Column("keys waiting", right=True, spare=2),
    Column("oldest", right=True, spare=3),
)


@click.command(
    cls=Command,
    example="""
celery -A shop toc limits
celery -A shop toc limits mail --json
""",
)
@queues_argument
@with_session
def limits(session: Session, queues: tuple[str, ...]) -> None:
    """What queues limit, what is used of it, and what waits for it.

    Used: of a rate, how many of those that may come at once; of `concurrency`, how many run; of
    a limit of each key, how many keys it holds back (`key rate`), of how many something runs, or
    how many take turns. Next in: when the next may start. Waiting: messages that are due.
    """
    found = []
    for name in session.queues(queues):
        used: kombu_toc.Usage | None = session.ask(session.center.usage, name)
        if used is not None and (used.limits or queues):
            found.append(used)
    if session.as_json:
        session.json({"limits": [document(one) for one in found]})
        return
    rows = [row for one in found for row in _rows(one)]
    if rows:
        session.screen.table(COLUMNS, rows)
    else:
        session.screen.say("No queue limits anything: 'celery toc topic set QUEUE --rate 100/s'.")


def document(found: kombu_toc.Usage) -> dict[str, Any]:
    """A queue, as in JSON."""
    return {
        "queue": found.topic,
        "topic": found.topic,
        "limits": [
            {
                "limit": one.name,
                "value": one.value,
                "used": one.used,
                "of": one.of,
                "opens_seconds": one.opens_us / 1e6,
            }
            for one in found.limits
        ],
        "running": found.running,
        "waiting": found.waiting,
        "keys_waiting": found.keys_waiting,
        "oldest_seconds": found.oldest_us / 1e6,
    }


def _rows(found: kombu_toc.Usage) -> list[list[Any]]:
    """The rows of a queue; what waits in it is said once."""
    rows = []
    for number, one in enumerate(found.limits):
        is_full = one.of is not None and one.used >= one.of
        used = str(one.used) if one.of is None else f"{one.used}/{one.of}"
        rest: list[Any] = [None] * 3
        if not number:
            oldest = found.oldest_us / 1e6
            rest = [found.waiting, found.keys_waiting, times.span(oldest) if oldest else None]
        rows.append(
            [
                found.topic,
                one.name.replace("_", " "),
                text_of(one.name, one.value),
                Cell(used, "yellow" if is_full and found.waiting else ""),
                times.milliseconds(one.opens_us / 1e6) if one.opens_us else None,
                *rest,
            ]
        )
    return rows
