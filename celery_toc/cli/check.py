"""``celery toc check`` and ``repair``: look for inconsistencies, and mend them."""

from __future__ import annotations

from collections.abc import Iterable

import click

from kombu_toc import Fault

from .exits import FAULTS, Command
from .options import queues_argument, yes_option
from .screen import Column
from .session import Session, with_session
from .wording import counted

COLUMNS = (
    Column("queue"),
    Column("slot", right=True),
    Column("fault"),
    Column("id", fold=True),
    Column("in", fold=True),
)


@click.command(
    cls=Command,
    example="""
celery -A shop toc check
celery -A shop toc check mail --json
""",
)
@queues_argument
@with_session
def check(session: Session, queues: tuple[str, ...]) -> None:
    """Look through queues for inconsistencies, such as an id without a body.

    The queues may be in use meanwhile. Exit code 5 if something is found.
    """
    center = session.center
    names = session.queues(queues)
    faults = _report(session, (f for name in names for f in session.ask(center.check, name)))
    if faults:
        session.exit_code = FAULTS


@click.command(
    cls=Command,
    example="""
celery -A shop toc repair
celery -A shop toc repair mail --yes --json
""",
)
@queues_argument
@yes_option
@with_session
def repair(session: Session, queues: tuple[str, ...], yes: bool) -> None:
    """Mend what `check` finds.

    The queues may be in use meanwhile. An id without a body is removed; a body without an id goes
    to the dead messages.
    """
    center, names = session.center, session.queues(queues)
    if not yes:
        found = sum(len(session.ask(center.check, name)) for name in names)
        if found:
            session.confirm(f"Repair {counted(found, 'inconsistency')}?", yes)
    _report(session, (fault for name in names for fault in session.ask(center.repair, name)))


def _report(session: Session, faults: Iterable[Fault]) -> list[Fault]:
    found = list(faults)
    if session.as_json:
        session.json(
            {
                "faults": [
                    {
                        "queue": fault.topic,
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
        session.screen.say("No inconsistencies found.")
    return found
