"""``celery toc failures``: see, retry and delete the latest failed tasks."""

from __future__ import annotations

from typing import Any

import click

import kombu_toc

from . import session as cli
from .messages import cut, described_failure, failure_fields, local_time, paging, show_parts
from .screen import Column, counted
from .session import Session

failures = cli.Group(
    "failures",
    help="The latest failed tasks: list, show, retry, delete, clear.",
    commands_at=dict.fromkeys(("list", "show", "retry", "delete", "clear"), __name__),
)

COLUMNS = (
    Column("id"),
    Column("task", fold=True),
    Column("queue", fold=True, spare=True),
    Column("failed", spare=True),
    Column("error", fold=True),
)

GROUP_COLUMNS = (
    Column("number", right=True),
    Column("task", fold=True),
    Column("exception", fold=True),
    Column("queue", fold=True, spare=True),
    Column("last", spare=True),
)

NONE = "No failed tasks match."

#: Fields of what a retry has taken away or left undone, and what is said of so many tasks.
SAID = {
    "not_kept": "cannot be retried: the message is not kept",
    "gone": "retried before, or no dead letter any more",
    "expires": "had expired: retried without `expires`",
    "eta": "retried without the `eta`, which had passed",
    "unique": "retried without holding its unique key: others of it may run at the same time",
    "chords": "belongs to a group or chord, which stays as it is: its result completes nothing",
}


@cli.command("""
celery -A shop toc failures list
celery -A shop toc failures list --groups
celery -A shop toc failures list --task 'shop.tasks.*' --exception TimeoutError --since -1d
""")
@cli.queue_option
@click.option("--exception", metavar="TYPE", help="Only with this type of exception.")
@click.option("--groups", is_flag=True, help="How many of each task and exception.")
@paging
def list_(
    session: Session,
    queue: str | None,
    since: str | None,
    until: str | None,
    groups: bool,
    **which: Any,
) -> None:
    """Failed tasks, the latest first."""
    part, name = session.center.failures, session.queue(queue)
    earliest, latest = session.time("since", since), session.time("until", until)
    if groups:
        found = session.ask(part.groups, name, since=earliest)
        if session.as_json:
            session.json({"groups": [one._asdict() for one in found]})
            return
        rows = [
            [
                *(one.number, one.task, one.exception, one.topic),
                local_time(session, one.last_us / 1e6),
            ]
            for one in found
        ]
        session.screen.table(GROUP_COLUMNS, rows, NONE)
        return
    try:
        page = session.ask(part.find, name, since=earliest, until=latest, **which)
    except ValueError:
        raise cli.Failure("--after: no page goes on there", cli.USAGE) from None
    if session.as_json:
        session.json({"failures": list(map(described_failure, page.failures)), "after": page.after})
        return
    rows = [
        [
            *(one.id, one.task, one.topic, local_time(session, one.failed_us / 1e6)),
            cut(one.error.partition("\n")[0] or one.exception),
        ]
        for one in page.failures
    ]
    session.screen.table(COLUMNS, rows, NONE)
    if page.after is not None:
        session.screen.say(f"There are more: --after '{page.after}'", "dim")


@cli.command("""
celery -A shop toc failures show 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11
""")
@click.argument("id")
@cli.queue_option
def show(session: Session, id: str, queue: str | None) -> None:
    """The failure of a task: exception, traceback, arguments, worker."""
    found = session.ask(session.center.failures.get, id, topic=session.queue(queue))
    if session.as_json:
        session.json({"failures": list(map(described_failure, found))})
    else:
        show_parts(session, (failure_fields(session, one) for one in found))
    if not found:
        session.complain(f"no failure of {id!r} is kept", cli.NOT_FOUND)


#: What selects failed tasks.
_which = cli.together(
    click.argument("ids", nargs=-1, metavar="[ID]..."),
    cli.queue_option,
    click.option("--task", metavar="NAME", help="Only tasks of that name; * and ? match any."),
    click.option("--exception", metavar="TYPE", help="Only with this type of exception."),
    click.option("--all", "-a", "every", is_flag=True, help="All of them."),
    cli.yes_option,
)


@cli.command("""
celery -A shop toc failures retry 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11
celery -A shop toc failures retry --task shop.tasks.remind --exception TimeoutError --yes
""")
@_which
def retry(session: Session, **which: Any) -> None:
    """Run failed tasks again: the same ids and arguments, due now, with all their retries.

    Name ids, or a --queue, a --task, an --exception, or --all.
    """
    name, number, chosen = _confirmed(session, "Retry", **which)
    done = kombu_toc.FailuresRetried()
    if chosen is not None:
        with session.progress("Retrying", number) as bar:
            done = session.ask(session.center.failures.retry, name, on_progress=bar, **chosen)
    if session.as_json:
        session.json({"retried": done.number, **done._asdict()})
        return
    if done.number or not session.exit_code:
        what = f"Retried {counted(done.number, 'task')}." if done.number else "Nothing is retried."
        session.screen.say(what)
    for field, said in SAID.items():
        if number := getattr(done, field):
            session.screen.say(f"{counted(number, 'task')}: {said}.")
    if done.not_kept:
        session.exit_code = max(session.exit_code, cli.PARTIAL)


@cli.command("""
celery -A shop toc failures delete 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11 --yes
celery -A shop toc failures delete --task shop.tasks.remind
""")
@_which
def delete(session: Session, **which: Any) -> None:
    """Forget failures. Dead letters stay where they are.

    Name ids, or a --queue, a --task, an --exception, or --all.
    """
    name, number, chosen = _confirmed(session, "Delete", **which)
    if chosen is not None:
        with session.progress("Deleting", number) as bar:
            number = session.ask(session.center.failures.delete, name, on_progress=bar, **chosen)
    _say_deleted(session, number)


@cli.command("""
celery -A shop toc failures clear --queue mail --yes
""")
@cli.queue_option
@cli.yes_option
def clear(session: Session, queue: str | None, yes: bool) -> None:
    """Forget all failures, of a queue or of all."""
    name = session.queue(queue)
    session.confirm(f"Forget all failures{f' of {name!r}' if name else ''}?", yes)
    _say_deleted(session, session.ask(session.center.failures.delete, name))


def _say_deleted(session: Session, number: int) -> None:
    if session.as_json:
        session.json({"deleted": number})
    elif number or not session.exit_code:
        session.screen.say(f"Deleted {counted(number, 'failure')}.")


def _confirmed(
    session: Session,
    verb: str,
    *,
    ids: tuple[str, ...],
    queue: str | None,
    task: str | None,
    exception: str | None,
    every: bool,
    yes: bool,
) -> tuple[str | None, int, dict[str, Any] | None]:
    """The queue, how many failed tasks are meant, and which; None if there are none of these."""
    if not (ids or queue or task or exception or every):
        raise click.UsageError("say which: ids, --queue, --task, --exception or --all")
    if ids and (task or exception or every):
        raise click.UsageError("give ids, or --task, --exception or --all, and not both")
    part, name = session.center.failures, session.queue(queue)
    if ids:
        known = {one.id for one in session.ask(part.get, ids, topic=name)}
        for id in ids:
            if id not in known:
                session.complain(f"no failure of {id!r} is kept", cli.NOT_FOUND)
        number, chosen = len(known), {"ids": [id for id in ids if id in known]}
    else:
        which = kombu_toc.FailureFilter(task, exception)
        groups = session.ask(part.groups, name)
        number, chosen = sum(one.number for one in groups if which.matches(one)), which._asdict()
    if not number:
        return name, 0, None
    where = f" in {name!r}" if name else ""
    session.confirm(f"{verb} {counted(number, 'failed task')}{where}?", yes)
    return name, number, chosen
