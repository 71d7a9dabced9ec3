"""``celery toc``: see what is scheduled, cancel it, move it, replay it.

Celery loads this package whenever ``celery`` runs, for any command. So the module of a command is
imported when the command is used.
"""

from __future__ import annotations

import click

from celery_toc import __version__
from celery_toc.beat import configured
from celery_toc.compat import control
from celery_toc.worker import remote_control as remote_control

from .session import Group

control.add_commands()
configured.watch()

#: The commands in the order of the help, and the module of each. To add one, write a function and
#: add a line here.
COMMANDS = {
    name: f"celery_toc.cli.{module}"
    for module, names in (
        ("status", "status"),
        ("messages", "list show"),
        ("actions", "cancel reschedule run dead"),
        ("library", "failures"),
        ("topic", "pause resume purge delete topic"),
        ("status", "limits"),
        ("messages", "find history"),
        ("library", "library"),
        ("schedule", "schedule"),
        ("status", "check repair top"),
        ("topic", "reshard"),
        ("migrate", "migrate"),
        ("status", "metrics"),
        ("web", "web notify"),
    )
    for name in names.split()
}


toc = Group(
    "toc",
    commands_at=COMMANDS,
    short_help="See, cancel, move and replay what the timeout center holds.",
    help="""See, cancel, move and replay the tasks that a timeout center holds.

    The app names the broker: `celery -A shop toc status`. Exit codes: 0 done, 1 the broker cannot
    be used or the operation failed, 2 wrong usage, 3 not found, 4 too late, 5 faults found.
    """,
)
click.version_option(__version__, prog_name="celery-toc", message="%(prog)s %(version)s")(toc)
