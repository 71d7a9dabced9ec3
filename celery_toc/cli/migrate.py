"""``celery toc migrate``: move everything from a broker of Kombu's own Redis transport."""

from __future__ import annotations

import sys
from typing import Any

import click

import kombu_toc

from .ends import FAILED, Command, Failure
from .screen import Column
from .session import Session, with_session, yes_option

QUEUES = (Column("queue"), Column("messages", right=True))
STAYING = (Column("in"), Column("message", fold=True), Column("reason", fold=True))


@click.command(
    cls=Command,
    example="""
celery -A shop toc migrate redis://localhost:6379/0 --dry-run
celery -A shop toc migrate redis://localhost:6379/0
celery -A shop toc migrate redis://localhost:6379/0 -Q mail --yes --json
""",
)
@click.argument("source", metavar="redis://...")
@click.option("--queue", "-Q", "queues", multiple=True, metavar="NAME", help="Only this queue.")
@click.option(
    "--key-prefix", default="", metavar="TEXT", help="The old broker's global_keyprefix, if any."
)
@click.option("--dry-run", is_flag=True, help="Count what would be moved, and change nothing.")
@click.option(
    "--force",
    is_flag=True,
    help="Also while somebody consumes from the old broker: what both take runs twice.",
)
@yes_option
@with_session
def migrate(
    session: Session,
    source: str,
    queues: tuple[str, ...],
    key_prefix: str,
    dry_run: bool,
    force: bool,
    yes: bool,
) -> None:
    """Move all messages from a redis:// broker to the app's, ETA tasks that workers held included.

    Stop the workers of the old broker first. It can be repeated, also after it was stopped
    halfway: nothing is lost and nothing is moved twice. Exit code 1 if a message stays behind,
    which is said.
    """
    session.center.client.ping()
    shown = kombu_toc.mask_password(source)
    session.ctx.meta["celery_toc.broker"] = shown
    amqp = session.app.amqp
    options: dict[str, Any] = {
        "options": {"global_keyprefix": key_prefix} if key_prefix else None,
        "queues": queues or None,
        "fanout": [
            queue.exchange.name
            for queue in amqp.queues.values()
            if queue.exchange and queue.exchange.type == "fanout"
        ],
    }

    def run(label: str, **more: Any) -> Any:
        with session.app.connection_for_write() as connection, _Bar(session, label) as bar:
            return kombu_toc.migrate_broker(source, connection, progress=bar, **options, **more)

    try:
        if dry_run:
            result = run("Counting", dry_run=True)
        else:
            if not yes:
                found = run("Counting", dry_run=True)
                session.confirm(f"Move {_described(found)} from {shown}?", yes)
            result = run("Moving", force=force)
    except kombu_toc.MigrationError as exc:
        raise Failure(f"{exc}; --force moves what is there all the same", FAILED) from exc
    _tell(session, result, dry_run)


class _Bar:
    """A progress bar on standard error, if that is a terminal."""

    def __init__(self, session: Session, label: str) -> None:
        self._label = label
        self._shows = sys.stderr.isatty() and not session.as_json
        self._bar: Any = None

    def __enter__(self) -> _Bar:
        return self

    def __call__(self, done: int, total: int) -> None:
        if not self._shows:
            return
        if self._bar is None:
            self._bar = click.progressbar(length=total, label=self._label, file=sys.stderr)
            self._bar.__enter__()
        self._bar.update(done - self._bar.pos)

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.__exit__(*exc_info)


def _described(result: Any) -> str:
    return (
        f"{result.moved} messages, of which workers had taken {result.unacknowledged} and "
        f"{result.scheduled} are not due yet,"
    )


def _tell(session: Session, result: Any, dry_run: bool) -> None:
    if session.as_json:
        session.screen.json(
            {
                "dry_run": dry_run,
                "moved": 0 if dry_run else result.moved,
                "found": result.moved,
                "queues": result.queues,
                "unacknowledged": result.unacknowledged,
                "scheduled": result.scheduled,
                "staying": result.staying,
                "named": [
                    {"place": one.place, "message": one.what, "reason": one.reason}
                    for one in result.named
                ],
                "skipped": result.skipped,
            }
        )
    else:
        if result.queues:
            session.screen.table(QUEUES, sorted(result.queues.items()))
        verb = "There are" if dry_run else "Moved"
        session.screen.say(f"{verb} {_described(result)[:-1]}.")
        for key, reason in result.skipped.items():
            session.screen.say(f"Left {key!r}: {reason}.")
        if result.named:
            session.screen.table(STAYING, [list(one) for one in result.named])
    if result.staying:
        session.complain(f"{result.staying} messages stay where they are", FAILED)
