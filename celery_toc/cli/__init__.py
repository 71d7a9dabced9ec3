"""``celery toc``: see what is scheduled, cancel it, move it, replay it.

Celery loads this package whenever ``celery`` runs, for any command. So each command here is a
module of its own, which is imported when it is used.
"""

from __future__ import annotations

from typing import Any

import click

from celery_toc import __version__
from celery_toc.beat import configured
from celery_toc.compat import control
from celery_toc.worker import remote_control as remote_control

from .exits import Group

control.add_commands()
configured.watch()

#: The commands, and where each is. To add one, write a module and add a line here.
COMMANDS = {
    "status": "celery_toc.cli.status:status",
    "list": "celery_toc.cli.messages:list_",
    "show": "celery_toc.cli.messages:show",
    "cancel": "celery_toc.cli.cancel:cancel",
    "reschedule": "celery_toc.cli.reschedule:reschedule",
    "run": "celery_toc.cli.reschedule:run",
    "dead": "celery_toc.cli.dead:dead",
    "pause": "celery_toc.cli.queue:pause",
    "resume": "celery_toc.cli.queue:resume",
    "purge": "celery_toc.cli.queue:purge",
    "delete": "celery_toc.cli.queue:delete",
    "topic": "celery_toc.cli.topic:topic",
    "limits": "celery_toc.cli.status:limits",
    "find": "celery_toc.cli.messages:find",
    "history": "celery_toc.cli.messages:history",
    "library": "celery_toc.cli.library:library",
    "schedule": "celery_toc.cli.schedule:schedule",
    "check": "celery_toc.cli.status:check",
    "repair": "celery_toc.cli.status:repair",
    "top": "celery_toc.cli.top:top",
    "reshard": "celery_toc.cli.queue:reshard",
    "migrate": "celery_toc.cli.migrate:migrate",
    "metrics": "celery_toc.cli.status:metrics",
    "web": "celery_toc.cli.web:web",
    "notify": "celery_toc.cli.web:notify",
}


@click.group(
    "toc",
    cls=Group,
    commands_at=COMMANDS,
    short_help="See, cancel, move and replay what the timeout center holds.",
)
@click.version_option(__version__, prog_name="celery-toc", message="%(prog)s %(version)s")
@click.pass_context
def toc(ctx: click.Context, /, **_: Any) -> None:
    """See, cancel, move and replay the tasks that a timeout center holds.

    The app names the broker: `celery -A shop toc status`. Exit codes: 0 done, 1 the broker cannot
    be used or the operation failed, 2 wrong usage, 3 not found, 4 too late, 5 faults found.
    """
    # Options that the app has added to all commands come as keywords; they mean nothing here.
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
