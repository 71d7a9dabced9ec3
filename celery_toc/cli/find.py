"""``celery toc find`` and ``history``: what the task library knows, also of what has ended."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import click

import kombu_toc

from . import times
from .exits import NOT_FOUND, USAGE, Command, Failure
from .screen import Column
from .session import Session, with_session

#: The names of the statuses, as the library has them.
STATUSES = ("pending", "taken", "done", "cancelled", "dead", "expired")

COLUMNS = (
    Column("id", fold=True),
    Column("status"),
    Column("time"),
    Column("task", fold=True, spare=2),
    Column("queue", fold=True, spare=3),
    Column("business", fold=True, spare=1),
    Column("attempts", right=True, spare=5),
    Column("changed", spare=4),
    Column("error", fold=True, spare=6),
)


@click.command(
    cls=Command,
    example="""
celery -A shop toc find --biz-id 42
celery -A shop toc find --biz-type order --biz-id 42 --status pending --json
celery -A shop toc find --task shop.mail.remind --since -1d --limit 20
""",
)
@click.option("--biz-id", metavar="ID", help="Only of this business id.")
@click.option("--biz-type", metavar="NAME", help="Only of this business type.")
@click.option("--status", "-s", type=click.Choice(STATUSES), multiple=True, help="Only of these.")
@click.option("--task", metavar="NAME", help="Only tasks of this name.")
@click.option(
    "--since",
    metavar="TIME",
    help="Only with an action time from then on: ISO 8601, or a span from now such as -2d.",
)
@click.option("--until", metavar="TIME", help="Only with an action time until then.")
@click.option(
    "--limit", "-n", type=click.IntRange(1), default=50, show_default=True, help="At most so many."
)
@click.option("--after", metavar="CURSOR", help="Go on where another page ended.")
@with_session
def find(
    session: Session,
    biz_id: str | None,
    biz_type: str | None,
    status: tuple[str, ...],
    task: str | None,
    since: str | None,
    until: str | None,
    limit: int,
    after: str | None,
) -> None:
    """Find tasks in the library, by the order of their action times.

    It needs no Redis. A search by --task alone may read all tables.
    """
    between = _bound(session, "--since", since), _bound(session, "--until", until)
    page = session.library.find(
        biz_id=biz_id,
        biz_type=biz_type,
        status=status or None,
        task=task,
        between=between,
        limit=limit,
        after=after,
    )
    _show(session, page.records, page.after)


@click.command(
    cls=Command,
    example="""
celery -A shop toc history 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11
""",
)
@click.argument("id", metavar="ID")
@with_session
def history(session: Session, id: str) -> None:
    """Show what has become of a task: a line for each message, such as those of its retries.

    It needs no Redis. Exit code 3 if the library does not know the id.
    """
    records = session.library.history(id)
    if not records:
        raise Failure(f"the library has no task {id!r}", NOT_FOUND)
    _show(session, records, None)


def _bound(session: Session, option: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return times.read_bound(text, session.zone, datetime.now(timezone.utc).timestamp())
    except ValueError as exc:
        raise Failure(f"{option}: {exc}", USAGE) from None


def _iso(us: int) -> str | None:
    if not us:
        return None
    text = datetime.fromtimestamp(us / 1e6, timezone.utc).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _show(session: Session, records: list[kombu_toc.Record], after: str | None) -> None:
    if session.as_json:
        document: dict[str, Any] = {"tasks": [_described(record) for record in records]}
        session.screen.json({**document, "after": after})
        return

    def moment(us: int) -> str | None:
        if not us:
            return None
        return datetime.fromtimestamp(us / 1e6, session.zone).isoformat(timespec="seconds")

    rows = [
        [
            *(record.id, record.status, moment(record.action_us), record.task, record.topic),
            " ".join(part for part in (record.biz_type, record.biz_id) if part) or None,
            *(record.attempts, moment(record.modified_us), record.error),
        ]
        for record in records
    ]
    if rows:
        session.screen.table(COLUMNS, rows)
    else:
        session.screen.say("No tasks match.")
    if after is not None:
        session.screen.say(f"There are more: --after '{after}'", "dim")


def _described(record: kombu_toc.Record) -> dict[str, Any]:
    return {
        "id": record.id,
        "queue": record.topic,
        "topic": record.topic,
        "task": record.task,
        "status": record.status,
        "time": _iso(record.action_us),
        "biz_type": record.biz_type,
        "biz_id": record.biz_id,
        "attempts": record.attempts,
        "worker": record.worker,
        "error": record.error,
        "created": _iso(record.created_us),
        "changed": _iso(record.modified_us),
    }
