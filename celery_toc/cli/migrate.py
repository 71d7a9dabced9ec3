"""``celery toc migrate``: move everything from a broker of Kombu's own Redis transport, or back."""

from __future__ import annotations

from typing import Any

import click

import kombu_toc

from ..schedules.state import Schedule
from .screen import Column, counted
from .session import USAGE, Failure, Session, command, document, flag, option, yes_option

#: Added to the error that somebody consumes: what can be done.
OVERRIDE = "; --force moves what is there all the same"

QUEUES = (Column("queue"), Column("messages", right=True))
STAYING = (Column("in"), Column("message", fold=True), Column("reason", fold=True))


@command
@click.argument("source", metavar="[redis://...]", required=False)
@option("--to target", "redis://...", "The way back: from the app's broker to this one.")
@option("--queue -Q queues", "NAME", "Only this queue.", multiple=True)
@option("--key-prefix", "TEXT", "The global_keyprefix of the redis:// broker, if any.", default="")
@flag("--dry-run", "Count what would be moved, report what prevents it, and change nothing.")
@flag(
    "--force", "Also while somebody consumes: a task that workers of both brokers take runs twice."
)
@yes_option
def migrate(
    session: Session,
    source: str | None,
    target: str | None,
    queues: tuple[str, ...],
    key_prefix: str,
    dry_run: bool,
    force: bool,
) -> None:
    """Move all messages from a redis:// broker to the app's, ETA tasks that workers held included;
    or, with --to, back to such a broker.

    First stop the workers of the broker that has the messages. The command can be repeated, also
    after it was stopped halfway: nothing is lost and nothing is moved twice. Exit code 1 if a
    message stays behind, which is reported, or if a queue or a prefix that was named is not there.

    Examples:
    celery -A shop toc migrate redis://localhost:6379/0 --dry-run
    celery -A shop toc migrate redis://localhost:6379/0
    celery -A shop toc migrate redis://localhost:6379/0 -Q mail --yes --json
    celery -A shop toc migrate --to redis://localhost:6379/0
    """
    url = source or target
    if url is None or (source is None) == (target is None):
        raise Failure(
            "name the broker to move from, redis://..., or with --to the one to move to", USAGE
        )
    session.center.client.ping()
    shown = kombu_toc.mask_password(url)
    session.ctx.meta["celery_toc.broker"] = shown
    options: dict[str, Any] = {
        "options": {"global_keyprefix": key_prefix} if key_prefix else None,
        "queues": queues or None,
        "force": force,
    }
    if source:
        options["fanout"] = [
            queue.exchange.name
            for queue in session.app.amqp.queues.values()
            if queue.exchange and queue.exchange.type == "fanout"
        ]

    def run(label: str, **more: Any) -> Any:
        with session.app.connection_for_write() as connection, session.progress(label) as bar:
            more["on_progress"] = bar
            if source:
                return kombu_toc.migrate_broker(url, connection, **options, **more)
            return kombu_toc.migrate_back(connection, url, **options, **more)

    try:
        if dry_run:
            result = run("Counting", dry_run=True)
        else:
            if not session.yes:
                preview = run("Counting", dry_run=True)
                if preview.refused:
                    raise Failure(f"{preview.refused}{OVERRIDE}")
                where = f"{'from' if source else 'to'} {shown}"
                if preview.moved:
                    session.confirm(
                        f"Move {counted(preview.moved, 'message')} {where}: {_parts(preview)}?"
                    )
            result = run("Moving")
    except kombu_toc.ConsumersError as exc:
        raise Failure(f"{exc}{OVERRIDE}") from exc
    # No beat of the other broker knows of these.
    schedules = [
        one
        for one in (() if source else session.center.schedules.each())
        if not one.ended and (not queues or one.queue in queues)
    ]
    _report(session, result, dry_run, schedules)


def _parts(result: Any) -> str:
    return f"{result.scheduled} scheduled; {result.unacknowledged} had been held by workers"


def _say_schedules(session: Session, schedules: list[Schedule]) -> None:
    if not schedules:
        return
    session.screen.say(
        f"{counted(len(schedules), 'schedule', 'stay')} in the timeout center: workers of the "
        "other broker fire none, beyond the firing that was moved. With 'celery beat' this "
        "replaces them:",
        "yellow",
    )
    entries = [line for schedule in schedules for line in schedule.beat_entry.split("\n")]
    for line in (
        *("", "from datetime import timedelta", "from celery.schedules import crontab, solar", ""),
        *("beat_schedule = {", *entries, "}"),
    ):
        session.screen.say(line)


def _report(session: Session, result: Any, dry_run: bool, schedules: list[Schedule]) -> None:
    session.json(
        {
            **document(result, "queues unacknowledged scheduled staying skipped unknown dead"),
            "dry_run": dry_run,
            "moved": 0 if dry_run else result.moved,
            "found": result.moved,
            "named": [
                {"place": one.place, "message": one.what, "reason": one.reason}
                for one in result.named
            ],
            "refused": result.refused or None,
            "schedules": [document(one, "name queue beat_entry") for one in schedules],
        }
    )
    if result.queues:
        session.screen.table(QUEUES, sorted(result.queues.items()))
    moved = "no messages"
    if result.moved:
        moved = f"{counted(result.moved, 'message')}: {_parts(result)}"
    session.screen.say(f"{'Would move' if dry_run else 'Moved'} {moved}.")
    if result.dead:
        session.screen.say(
            f"{counted(result.dead, 'dead letter', 'stay')} in the timeout center; "
            "'celery toc dead requeue' makes them messages again."
        )
    for key, reason in result.skipped.items():
        session.screen.say(f"Left {key!r}: {reason}.")
    if result.named:
        session.screen.table(STAYING, [list(one) for one in result.named])
    _say_schedules(session, schedules)
    if result.staying:
        where = "where it is" if result.staying == 1 else "where they are"
        session.complain(f"{counted(result.staying, 'message', 'stay')} {where}")
    for queue in result.unknown:
        session.complain(f"there is no queue {queue!r} to move from")
    if result.refused:
        session.complain(f"nothing would be moved: {result.refused}{OVERRIDE}")
