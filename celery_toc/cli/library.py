"""``celery toc library``: the task library's tables, and what is put back from it; and ``celery toc
failures``: see, retry and delete the latest failed tasks."""

from __future__ import annotations

from typing import Any

import click

import kombu_toc

from . import session as cli
from .messages import cut, described_failure, failure_fields, local_time, paging, show_parts
from .screen import Column, counted
from .session import Session

DIFFERENCES = (Column("kind"), Column("id", fold=True), Column("queue", fold=True))

COLUMNS = (Column("database", fold=True), Column("version"), Column("problem", fold=True))


library = cli.Group(
    "library",
    help="The record in SQL behind Redis: its tables, its state, and what is put back from it.",
    commands_at=dict.fromkeys(
        ("create", "upgrade", "status", "check", "prune", "rebuild", "reshard"), __name__
    ),
)


def _changed(session: Session, what: str, otherwise: str, databases: list[str]) -> None:
    lines = [f"{what} {url}." for url in databases]
    session.tell({"databases": databases}, *(lines or [otherwise]))


@cli.command
def create(session: Session) -> None:
    """Make the tables in databases that have none. (SQLite's are made when it is first used.)

    Examples:
    celery -A shop toc library create
    """
    _changed(session, "Made the tables in", "All tables are there.", session.library.create())


@cli.command
def upgrade(session: Session) -> None:
    """Bring the tables of an older release up to date.

    Examples:
    celery -A shop toc library upgrade
    """
    changed = session.library.upgrade()
    _changed(session, "Brought up to date:", "All tables are up to date.", changed)


@cli.command
def status(session: Session) -> None:
    """Show each database, and how many tasks are recorded in which status.

    Exit code 1 if a database cannot be used.

    Examples:
    celery -A shop toc library status
    celery -A shop toc library status --json
    """
    databases = session.library.status()
    usable = not any(database.problem for database in databases)
    counts = session.library.counts() if usable else {}
    described = [
        {**cli.document(database, "url version"), "problem": database.problem or None}
        for database in databases
    ]
    numbers = {name.replace(" ", "_"): number for name, number in counts.items()}
    shown = {"databases": described, "counts": numbers}
    session.show(shown, COLUMNS, [[*database.values()] for database in described])
    session.screen.fields(counts.items())
    if not usable:
        session.exit_code = cli.FAILED


@cli.command
@cli.flag("--fix", "Mend what is found.")
def check(session: Session, fix: bool) -> None:
    """Compare the library with Redis: what is pending, and what waits.

    The queues may be in use meanwhile: what is found is looked at again after some seconds. Exit
    code 5 if something is found, also if it is mended.

    Examples:
    celery -A shop toc library check
    celery -A shop toc library check --fix --json
    """
    disagreements = session.center.library.check(fix=fix)
    shown = [cli.document(one, "kind id topic") for one in disagreements]
    rows = [[*one.values()] for one in shown]
    document = {"fixed": fix, "disagreements": shown}
    session.show(document, DIFFERENCES, rows, "The library and Redis agree.")
    if fix and disagreements:
        session.screen.say(f"Mended {counted(len(disagreements), 'disagreement')}.")
    if disagreements:
        session.exit_code = cli.FAULTS


@cli.command
@cli.option(
    "--days", "DAYS", "Keep the history of so many days.", type=click.FloatRange(1), default=30.0
)
def prune(session: Session, days: float) -> None:
    """Drop the history of earlier days, by whole days. What is pending stays.

    Examples:
    celery -A shop toc library prune
    celery -A shop toc library prune --days 7
    """
    dropped = session.library.prune(days)
    session.tell({"dropped": dropped}, f"Dropped {counted(dropped, 'day')} of history.")


@cli.command
def rebuild(session: Session) -> None:
    """Put back into Redis what is pending and is not there, the soonest first.

    After Redis was lost, flushed, or replaced by an empty one. Workers may run and others send
    meanwhile. The command can be stopped and repeated: what is there is not put twice.

    Examples:
    celery -A shop toc library rebuild
    celery -A shop toc library rebuild --json
    """
    with session.progress("Rebuilding") as bar:
        done = session.library.rebuild(bar)
    taken = (
        f"{counted(done.taken, 'message')} had been taken by workers a moment ago: what these do "
        "not finish comes back by itself."
    )
    lost = {
        "off: what was in it when Redis was lost is lost": done.not_kept,
        "behind: what was sent to it in the seconds before Redis was lost may be lost": done.behind,
    }
    session.tell(
        {
            **cli.document(done, "rows put taken ended"),
            **{"not_kept": list(done.not_kept), "behind": list(done.behind)},
        },
        f"Put {counted(done.put, 'message')} back, of {counted(done.rows, 'row')}.",
        taken if done.taken else "",
        notes=[f"Queue {q} has x-library: {how}." for how, some in lost.items() for q in some],
    )


@cli.command
def reshard(session: Session) -> None:
    """Move the rows to other databases, or to another number of tables, while they are used.

    First give all senders and workers the new layout in toc_library and toc_library_tables, and
    the former one in toc_library_before and toc_library_tables_before: until all is moved, both are
    read. The command can be stopped and repeated. Afterwards take the latter two options away.

    Examples:
    celery -A shop toc library reshard
    celery -A shop toc library reshard --json
    """
    with session.progress("Moving") as bar:
        done = session.library.reshard(bar)
    session.tell(
        cli.document(done, "rows moved"),
        f"Moved {counted(done.moved, 'row')}, of {counted(done.rows, 'row')}.",
    )


# -- celery toc failures


failures = cli.Group(
    "failures",
    help="The latest failed tasks: list, show, retry, delete, clear.",
    commands_at=dict.fromkeys(("list", "show", "retry", "delete", "clear"), __name__),
)

FAILURE_COLUMNS = (
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


@cli.command
@cli.queue_option
@cli.option("--exception", "TYPE", "Only with this type of exception.")
@cli.flag("--groups", "How many of each task and exception.")
@paging
def list_(
    session: Session,
    queue: str | None,
    since: str | None,
    until: str | None,
    groups: bool,
    **which: Any,
) -> None:
    """Failed tasks, the latest first.

    Examples:
    celery -A shop toc failures list
    celery -A shop toc failures list --groups
    celery -A shop toc failures list --task 'shop.tasks.*' --exception TimeoutError --since -1d
    """
    part, name = session.center.failures, session.queue(queue)
    earliest, latest = session.time("since", since), session.time("until", until)
    if groups:
        found = session.ask(part.groups, name, since=earliest)
        rows = [
            {**one._asdict(), "queue": one.topic, "last": local_time(session, one.last_us / 1e6)}
            for one in found
        ]
        session.show({"groups": [one._asdict() for one in found]}, GROUP_COLUMNS, rows, NONE)
        return
    try:
        page = session.ask(part.find, name, since=earliest, until=latest, **which)
    except ValueError:
        raise cli.Failure("--after: no page goes on there", cli.USAGE) from None
    failures = list(map(described_failure, page.failures))
    rows = [
        {
            **shown,
            "failed": local_time(session, one.failed_us / 1e6),
            "error": cut(one.error.partition("\n")[0] or one.exception),
        }
        for shown, one in zip(failures, page.failures, strict=True)
    ]
    session.show({"failures": failures, "after": page.after}, FAILURE_COLUMNS, rows, NONE)
    session.say_more(page.after and f"'{page.after}'")


@cli.command
@click.argument("id")
@cli.queue_option
def show(session: Session, id: str, queue: str | None) -> None:
    """The failure of a task: exception, traceback, arguments, worker.

    Examples:
    celery -A shop toc failures show 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11
    """
    failures = session.ask(session.center.failures.get, id, topic=session.queue(queue))
    session.json({"failures": list(map(described_failure, failures))})
    show_parts(session, (failure_fields(session, failure) for failure in failures))
    if not failures:
        session.complain(f"no failure of {id!r} is kept", cli.NOT_FOUND)


_which = cli.chosen(None, cli.option("--exception", "TYPE", "Only with this type of exception."))


@cli.command
@_which
def retry(session: Session, **which: Any) -> None:
    """Run failed tasks again: the same ids and arguments, due now, with all their retries.

    Name ids, or a --queue, a --task, an --exception, or --all.

    Examples:
    celery -A shop toc failures retry 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11
    celery -A shop toc failures retry --task shop.tasks.remind --exception TimeoutError --yes
    """
    name, number, chosen = _confirmed(session, "Retry", **which)
    done = kombu_toc.FailuresRetried()
    if chosen is not None:
        with session.progress("Retrying", number) as bar:
            done = session.ask(session.center.failures.retry, name, on_progress=bar, **chosen)
    nothing = "" if session.exit_code else "Nothing is retried."
    held = ((getattr(done, field), said) for field, said in SAID.items())
    session.tell(
        {"retried": done.number, **done._asdict()},
        f"Retried {counted(done.number, 'task')}." if done.number else nothing,
        *(f"{counted(number, 'task')}: {said}." for number, said in held if number),
    )
    if done.not_kept and not session.as_json:
        session.exit_code = max(session.exit_code, cli.PARTIAL)


@cli.command
@_which
def delete(session: Session, **which: Any) -> None:
    """Forget failures. Dead letters stay where they are.

    Name ids, or a --queue, a --task, an --exception, or --all.

    Examples:
    celery -A shop toc failures delete 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11 --yes
    celery -A shop toc failures delete --task shop.tasks.remind
    """
    name, number, chosen = _confirmed(session, "Delete", **which)
    if chosen is not None:
        with session.progress("Deleting", number) as bar:
            number = session.ask(session.center.failures.delete, name, on_progress=bar, **chosen)
    _say_deleted(session, number)


@cli.command
@cli.queue_option
@cli.yes_option
def clear(session: Session, queue: str | None) -> None:
    """Forget all failures, of a queue or of all.

    Examples:
    celery -A shop toc failures clear --queue mail --yes
    """
    name = session.queue(queue)
    session.confirm(f"Forget all failures{f' of {name!r}' if name else ''}?")
    _say_deleted(session, session.ask(session.center.failures.delete, name))


def _say_deleted(session: Session, number: int) -> None:
    done = f"Deleted {counted(number, 'failure')}."
    session.tell({"deleted": number}, done if number or not session.exit_code else "")


def _confirmed(
    session: Session,
    verb: str,
    *,
    ids: tuple[str, ...],
    queue: str | None,
    task: str | None,
    exception: str | None,
    every: bool,
) -> tuple[str | None, int, dict[str, Any] | None]:
    """The queue, how many failed tasks are meant, and which; None if there are none of these."""
    cli.are_named(ids, queue, task=task, exception=exception, all=every)
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
    session.confirm(f"{verb} {counted(number, 'failed task')}{where}?")
    return name, number, chosen
