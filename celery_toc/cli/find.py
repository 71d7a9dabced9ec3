"""``celery toc find`` and ``history``: what the task library knows, also of what has ended."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import click

import kombu_toc

from . import times
from .exits import FAILED, NOT_FOUND, PARTIAL, USAGE, Command, Failure
from .options import yes_option
from .screen import Column
from .session import Session, with_session
from .wording import counted

#: What went wrong, and can be sent again.
FAILURES = ("failed", "dead")

#: Tasks that are shown unless it is said, and that are counted before they are sent again.
SHOWN, COUNTED = 50, 1000

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
celery -A shop toc find --failed --task shop.mail.remind --retry
""",
)
@click.option("--biz-id", metavar="ID", help="Only of this business id.")
@click.option("--biz-type", metavar="NAME", help="Only of this business type.")
@click.option(
    "--status", "-s", type=click.Choice(kombu_toc.STATUSES), multiple=True, help="Only of these."
)
@click.option("--failed", is_flag=True, help="Only what has failed or is dead.")
@click.option("--task", metavar="NAME", help="Only tasks of this name.")
@click.option(
    "--attribute",
    metavar="NAME=VALUE",
    multiple=True,
    help="Only with this attribute; several: with all of them.",
)
@click.option(
    "--since",
    metavar="TIME",
    help="Only with an action time from then on: ISO 8601, or a span from now such as -2d.",
)
@click.option("--until", metavar="TIME", help="Only with an action time until then.")
@click.option(
    "--limit", "-n", type=click.IntRange(1), help="At most so many; 50, unless with --retry."
)
@click.option("--after", metavar="CURSOR", help="Go on where another page ended.")
@click.option("--retry", is_flag=True, help="Send all of them again, that have failed or are dead.")
@yes_option
@with_session
def find(
    session: Session,
    biz_id: str | None,
    biz_type: str | None,
    status: tuple[str, ...],
    failed: bool,
    task: str | None,
    attribute: tuple[str, ...],
    since: str | None,
    until: str | None,
    limit: int | None,
    after: str | None,
    retry: bool,
    yes: bool,
) -> None:
    """Find tasks in the library, by the order of their action times.

    It needs no Redis. `celery toc show ID` has the traceback of one that has failed. A search by
    --biz-id asks one table, any other all tables. Exit code 1 if a database does not answer: what
    the others have is shown.

    With --retry, all that are found are sent again, each once however often this is done, and not
    more than --limit, if that is given.
    """
    if failed and status:
        raise click.UsageError("give --failed or --status, and not both")
    which: dict[str, Any] = {
        "biz_id": biz_id,
        "biz_type": biz_type,
        "task": task,
        "attributes": dict(_attribute(text) for text in attribute),
        "between": (_bound(session, "--since", since), _bound(session, "--until", until)),
    }
    if retry:
        wrong = FAILURES if failed else status
        if not wrong or not set(wrong) <= set(FAILURES) or after is not None:
            raise click.UsageError(
                "--retry goes with --failed, or with --status failed or dead, and not with --after"
            )
        _retry(session, which, wrong, limit, yes)
        return
    page = session.library.find(
        status=(FAILURES if failed else status) or None,
        limit=SHOWN if limit is None else limit,
        after=after,
        **which,
    )
    _show(session, page.records, page.after, page.away)
    for url in page.away:
        session.complain(f"{url} does not answer: what it has is not shown", FAILED)


def _attribute(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"--attribute {text!r}: write it as NAME=VALUE")
    return name, value


def _retry(
    session: Session, which: dict[str, Any], status: tuple[str, ...], limit: int | None, yes: bool
) -> None:
    library = session.library
    most = min(limit or COUNTED, COUNTED)
    number = len(library.find(status=status, limit=most, **which).records)
    done = kombu_toc.Retried(0, 0)
    if number:
        more = " or more" if number == COUNTED != limit else ""
        session.confirm(f"Send {counted(number, 'task')}{more} again?", yes)
        done = library.retry(status=status, limit=limit, **which)
    if session.as_json:
        session.screen.json({"retried": done.number, "not_kept": done.not_kept})
        return
    session.screen.say(
        f"Sent {counted(done.number, 'task')} again." if done.number else "No tasks match."
    )
    if done.not_kept:
        session.complain(f"{counted(done.not_kept, 'task')}: the message is not kept", PARTIAL)


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


def _show(
    session: Session,
    records: list[kombu_toc.Record],
    after: str | None,
    away: tuple[str, ...] = (),
) -> None:
    if session.as_json:
        document: dict[str, Any] = {"tasks": [described(record) for record in records]}
        session.screen.json({**document, "after": after, "away": list(away)})
        return

    def moment(us: int) -> str | None:
        if not us:
            return None
        return datetime.fromtimestamp(us / 1e6, session.zone).isoformat(timespec="seconds")

    rows = [
        [
            *(record.id, record.status, moment(record.action_us), record.task, record.topic),
            " ".join(part for part in (record.biz_type, record.biz_id) if part) or None,
            *(record.attempts, moment(record.modified_us)),
            (record.error or "").partition("\n")[0] or None,
        ]
        for record in records
    ]
    if rows:
        session.screen.table(COLUMNS, rows)
    else:
        session.screen.say("No tasks match.")
    if after is not None:
        session.screen.say(f"There are more: --after '{after}'", "dim")


def described(record: kombu_toc.Record) -> dict[str, Any]:
    """A record as JSON."""
    return {
        "id": record.id,
        "queue": record.topic,
        "topic": record.topic,
        "task": record.task,
        "status": record.status,
        "time": _iso(record.action_us),
        "biz_type": record.biz_type,
        "biz_id": record.biz_id,
        "attributes": record.attributes,
        "attempts": record.attempts,
        "worker": record.worker,
        "error": record.error,
        "created": _iso(record.created_us),
        "changed": _iso(record.modified_us),
    }
