"""``celery toc dead``: see, replay and delete the messages that were given up on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from .actions import look_up
from .exits import NOT_FOUND, TOO_LATE, Group
from .messages import named, paging, show_all, show_page
from .options import complete_dead_id, queue_option, yes_option
from .screen import counted
from .session import Session, command

dead = Group(
    "dead",
    help="Messages that were given up on: list, show, requeue, purge.",
    commands_at=dict.fromkeys(("list", "show", "requeue", "purge"), __name__),
)


@command("""
celery -A shop toc dead list --queue mail --since -1d
celery -A shop toc dead list --task 'shop.tasks.*' --json
""")
@queue_option
@paging
def list_(session: Session, queue: str | None, **which: Any) -> None:
    """Dead messages in the order in which they died, with the reason and the last error."""
    show_page(session, queue, "dead", **which)


@command("""
celery -A shop toc dead show 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11
""")
@click.argument("id", shell_complete=complete_dead_id)
@queue_option
def show(session: Session, id: str, queue: str | None) -> None:
    """All of a dead message, decoded."""
    found = session.ask(session.center.get, id, topic=session.queue(queue))
    gone = [each for each in found if each.state == "dead"]
    if found and not gone:
        session.complain(f"{id!r} is {found[0].state}, not dead", TOO_LATE)
    else:
        show_all(session, id, gone)


def _dead_options(function: Any) -> Any:
    """Give a command the arguments and options that select dead messages."""
    for option in (
        yes_option,
        click.option("--all", "-a", "every", is_flag=True, help="All of them."),
        click.option("--task", metavar="NAME", help="Only tasks of that name; * and ? match any."),
        queue_option,
        click.argument("ids", nargs=-1, metavar="[ID]...", shell_complete=complete_dead_id),
    ):
        function = option(function)
    return function


@command("""
celery -A shop toc dead requeue 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11
celery -A shop toc dead requeue --queue mail --task shop.tasks.remind --yes
""")
@_dead_options
def requeue(session: Session, **which: Any) -> None:
    """Put dead messages back into their queues, due now, with all their retries.

    Name ids, or a --queue, a --task or both, or --all.
    """
    _apply(session, "requeue", "requeued", session.center.dead.requeue, **which)


@command("""
celery -A shop toc dead purge 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11 --yes
celery -A shop toc dead purge --queue mail
""")
@_dead_options
def purge(session: Session, **which: Any) -> None:
    """Delete dead messages for good.

    Name ids, or a --queue, a --task or both, or --all.
    """
    _apply(session, "purge", "purged", session.center.dead.purge, **which)


def _apply(
    session: Session,
    verb: str,
    done: str,
    operation: Callable[..., int],
    *,
    ids: tuple[str, ...],
    queue: str | None,
    task: str | None,
    every: bool,
    yes: bool,
) -> None:
    if not (ids or queue or task or every):
        raise click.UsageError("say which: ids, --queue, --task or --all")
    if ids and (task or every):
        raise click.UsageError("give ids, or --task or --all, and not both")
    center, name = session.center, session.queue(queue)
    if ids:
        found, _ = look_up(session, ids, name)
        dead = [one for one in found if one.state == "dead"]
        names = {one.id for one in dead} | {one.id.rpartition("#")[0] for one in dead}
        alive = {one.id: one.state for one in found}
        missing = [id for id in dict.fromkeys(ids) if id not in names]
        ids = tuple(id for id in dict.fromkeys(ids) if id in names)
        number = len(dead)
        for id in missing:
            if id in alive:
                session.complain(f"{id!r} is {alive[id]}, not dead", NOT_FOUND)
            else:
                session.complain_of_none(id)
    elif task or name is None:
        number = session.ask(center.count, name, state="dead", where=named(task))
    else:
        number = session.ask(center.counts, name).dead
    if number:
        what = counted(number, "dead message")
        what += f" of {task}" if task else ""
        what += f" in {name!r}" if name else ""
        session.confirm(f"{verb.capitalize()} {what}?", yes)
        number = session.ask(operation, name, ids=list(ids) or None, where=named(task))
    if session.as_json:
        session.json({done: number})
    elif number:
        session.screen.say(f"{done.capitalize()} {counted(number, 'message')}.")
    elif not session.exit_code:
        session.screen.say("No messages match.")
