"""``celery toc library``: the task library's tables, and what is put back from it."""

from __future__ import annotations

import click

from .screen import Column, counted
from .session import FAILED, FAULTS, Group, Session, command, document

DIFFERENCES = (Column("kind"), Column("id", fold=True), Column("queue", fold=True))

COLUMNS = (Column("database", fold=True), Column("version"), Column("problem", fold=True))


library = Group(
    "library",
    help="The record in SQL behind Redis: its tables, its state, and what is put back from it.",
    commands_at=dict.fromkeys(
        ("create", "upgrade", "status", "check", "prune", "rebuild", "reshard"), __name__
    ),
)


def _changed(session: Session, what: str, otherwise: str, databases: list[str]) -> None:
    lines = [f"{what} {url}." for url in databases]
    session.tell({"databases": databases}, *(lines or [otherwise]))


@command("celery -A shop toc library create")
def create(session: Session) -> None:
    """Make the tables in databases that have none. (SQLite's are made when it is first used.)"""
    _changed(session, "Made the tables in", "All tables are there.", session.library.create())


@command("celery -A shop toc library upgrade")
def upgrade(session: Session) -> None:
    """Bring the tables of an older release up to date."""
    changed = session.library.upgrade()
    _changed(session, "Brought up to date:", "All tables are up to date.", changed)


@command("""
celery -A shop toc library status
celery -A shop toc library status --json
""")
def status(session: Session) -> None:
    """Show each database, and how many tasks are recorded in which status.

    Exit code 1 if a database cannot be used.
    """
    databases = session.library.status()
    usable = not any(database.problem for database in databases)
    counts = session.library.counts() if usable else {}
    if session.as_json:
        session.screen.json(
            {
                "databases": [
                    {**document(one, "url version"), "problem": one.problem or None}
                    for one in databases
                ],
                "counts": {name.replace(" ", "_"): number for name, number in counts.items()},
            }
        )
    else:
        rows = [
            [database.url, database.version, database.problem or None] for database in databases
        ]
        session.screen.table(COLUMNS, rows)
        session.screen.fields((name, number) for name, number in counts.items())
    if not usable:
        session.exit_code = FAILED


@command("""
celery -A shop toc library check
celery -A shop toc library check --fix --json
""")
@click.option("--fix", is_flag=True, help="Mend what is found.")
def check(session: Session, fix: bool) -> None:
    """Compare the library with Redis: what is pending, and what waits.

    The queues may be in use meanwhile: what is found is looked at again after some seconds. Exit
    code 5 if something is found, also if it is mended.
    """
    found = session.center.library.check(fix=fix)
    rows = [[one.kind, one.id, one.topic] for one in found]
    if not session.as_json:
        session.screen.table(DIFFERENCES, rows, "The library and Redis agree.")
    session.tell(
        {"fixed": fix, "disagreements": [document(one, "kind id topic") for one in found]},
        f"Mended {counted(len(found), 'disagreement')}." if fix and found else "",
    )
    if found:
        session.exit_code = FAULTS


@command("""
celery -A shop toc library prune
celery -A shop toc library prune --days 7
""")
@click.option(
    "--days",
    type=click.FloatRange(1),
    default=30.0,
    show_default=True,
    help="Keep the history of so many days.",
)
def prune(session: Session, days: float) -> None:
    """Drop the history of earlier days, by whole days. What is pending stays."""
    dropped = session.library.prune(days)
    session.tell({"dropped": dropped}, f"Dropped {counted(dropped, 'day')} of history.")


@command("""
celery -A shop toc library rebuild
celery -A shop toc library rebuild --json
""")
def rebuild(session: Session) -> None:
    """Put back into Redis what is pending and is not there, the soonest first.

    After Redis was lost, flushed, or replaced by an empty one. Workers may run and others send
    meanwhile. The command can be stopped and repeated: what is there is not put twice.
    """
    with session.progress("Rebuilding") as bar:
        done = session.library.rebuild(bar)
    if session.as_json:
        session.screen.json(
            {
                **document(done, "rows put taken ended"),
                **{"not_kept": list(done.not_kept), "behind": list(done.behind)},
            }
        )
        return
    session.screen.say(f"Put {counted(done.put, 'message')} back, of {counted(done.rows, 'row')}.")
    if done.taken:
        session.screen.say(
            f"{counted(done.taken, 'message')} had been taken by workers a moment ago: what these "
            "do not finish comes back by itself."
        )
    for queue in done.not_kept:
        session.screen.say(
            f"Queue {queue} has x-library: off: what was in it when Redis was lost is lost.",
            "yellow",
        )
    for queue in done.behind:
        session.screen.say(
            f"Queue {queue} has x-library: behind: what was sent to it in the seconds before Redis "
            "was lost may be lost.",
            "yellow",
        )


@command("""
celery -A shop toc library reshard
celery -A shop toc library reshard --json
""")
def reshard(session: Session) -> None:
    """Move the rows to other databases, or to another number of tables, while they are used.

    First give all senders and workers the new layout in toc_library and toc_library_tables, and
    the former one in toc_library_before and toc_library_tables_before: until all is moved, both are
    read. The command can be stopped and repeated. Afterwards take the latter two options away.
    """
    with session.progress("Moving") as bar:
        done = session.library.reshard(bar)
    session.tell(
        document(done, "rows moved"),
        f"Moved {counted(done.moved, 'row')}, of {counted(done.of_rows, 'row')}.",
    )
