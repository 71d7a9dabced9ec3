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

#: The commands in the order of the help, and the module of each. A new one needs a line here.
COMMANDS = {
    "status": "celery_toc.cli.status",
    "list": "celery_toc.cli.messages",
    "show": "celery_toc.cli.messages",
    "cancel": "celery_toc.cli.actions",
    "reschedule": "celery_toc.cli.actions",
    "run": "celery_toc.cli.actions",
    "dead": "celery_toc.cli.actions",
    "failures": "celery_toc.cli.library",
    "pause": "celery_toc.cli.topic",
    "resume": "celery_toc.cli.topic",
    "purge": "celery_toc.cli.topic",
    "delete": "celery_toc.cli.topic",
    "topic": "celery_toc.cli.topic",
    "limits": "celery_toc.cli.status",
    "find": "celery_toc.cli.messages",
    "history": "celery_toc.cli.messages",
    "library": "celery_toc.cli.library",
    "schedule": "celery_toc.cli.schedule",
    "check": "celery_toc.cli.status",
    "repair": "celery_toc.cli.status",
    "top": "celery_toc.cli.status",
    "reshard": "celery_toc.cli.topic",
    "migrate": "celery_toc.cli.migrate",
    "metrics": "celery_toc.cli.status",
    "web": "celery_toc.cli.web",
    "notify": "celery_toc.cli.web",
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
