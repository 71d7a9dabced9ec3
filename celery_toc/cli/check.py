"""``celery toc check`` and ``repair``: look for what cannot be, and mend it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from .ends import FAULTS, Command
from .screen import Column
from .session import Session, complete_topic, with_session, yes_option

COLUMNS = (
    Column("topic"),
    Column("slot", right=True),
    Column("fault"),
    Column("id", fold=True),
    Column("in", fold=True),
)

_topics = click.argument("topics", nargs=-1, metavar="[TOPIC]...", shell_complete=complete_topic)


@click.command(
    cls=Command,
    example="""
celery -A shop toc check
celery -A shop toc check mail --json
""",
)
@_topics
@with_session
def check(session: Session, topics: tuple[str, ...]) -> None:
    """Look through topics for what cannot be, such as an id without a body.

    They may be in use meanwhile. Exit code 5 if there is something.
    """
    center = session.center
    faults = _tell(session, (f for name in session.topics(topics) for f in center.check(name)))
    if faults:
        session.exit_code = FAULTS


@click.command(
    cls=Command,
    example="""
celery -A shop toc repair
celery -A shop toc repair mail --yes --json
""",
)
@_topics
@yes_option
@with_session
def repair(session: Session, topics: tuple[str, ...], yes: bool) -> None:
    """Mend what `check` finds.

    Topics may be in use meanwhile. An id without a body is removed; a body without an id goes to
    the dead messages.
    """
    center, names = session.center, session.topics(topics)
    session.confirm(f"Repair {', '.join(map(repr, topics)) or 'all topics'}?", yes)
    _tell(session, (fault for name in names for fault in center.repair(name)))


def _tell(session: Session, faults: Iterable[Any]) -> list[Any]:
    found = list(faults)
    if session.as_json:
        session.screen.json(
            {
                "faults": [
                    {
                        "topic": fault.topic,
                        "slot": fault.slot,
                        "kind": fault.kind,
                        "id": fault.id or None,
                        "places": list(fault.places),
                    }
                    for fault in found
                ]
            }
        )
    elif found:
        rows = [[f.topic, f.slot, f.kind, f.id or None, ", ".join(f.places)] for f in found]
        session.screen.table(COLUMNS, rows)
    else:
        session.screen.say("Nothing is wrong.")
    return found
