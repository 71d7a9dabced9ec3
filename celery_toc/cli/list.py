"""``celery toc list``: what is scheduled, in the order of time."""

from __future__ import annotations

from typing import Any

import click

from . import times
from .ends import USAGE, Command, Failure
from .message import COLUMNS, DEAD_COLUMNS, STATES, dead_row, describe, named, row
from .session import Session, topic_option, with_session


def paging(function: Any) -> Any:
    """The options that say which messages, and how many of them."""
    for option in (
        click.option("--after", metavar="CURSOR", help="Go on where another page ended."),
        click.option(
            "--limit",
            "-n",
            type=click.IntRange(1),
            default=50,
            show_default=True,
            help="Messages on a page.",
        ),
        click.option("--task", metavar="NAME", help="Only tasks of that name; * and ? match any."),
        click.option("--until", metavar="TIME", help="Only with a time before that one."),
        click.option(
            "--since",
            metavar="TIME",
            help="Only from that time on: ISO 8601, or a span from now such as 1h30m or -2d.",
        ),
    ):
        function = option(function)
    return function


@click.command(
    "list",
    cls=Command,
    example="""
celery -A shop toc list --topic mail --until 1h
celery -A shop toc list --task 'shop.tasks.*' --state scheduled --limit 20
celery -A shop toc list --since 2030-12-24 --until 2030-12-27 --json
""",
)
@topic_option
@click.option("--state", "-s", type=click.Choice(STATES), help="Only in this state.")
@paging
@with_session
def list_(session: Session, topic: str | None, state: str | None, **which: Any) -> None:
    """The messages of a topic, or of all, in the order of time.

    The time of one that waits is when it is due; of one in flight, when its lease ends; of a dead
    one, when it died.
    """
    show_page(session, topic, state, **which)


def bounds(
    session: Session, since: str | None, until: str | None
) -> tuple[float | None, float | None]:
    """The times that were given, in seconds since the epoch."""

    def read(option: str, text: str | None) -> float | None:
        if text is None:
            return None
        try:
            return times.read_bound(text, session.zone, session.now)
        except ValueError as exc:
            raise Failure(f"--{option}: {exc}", USAGE) from None

    return read("since", since), read("until", until)


def show_page(
    session: Session,
    topic: str | None,
    state: str | None,
    *,
    since: str | None,
    until: str | None,
    task: str | None,
    limit: int,
    after: str | None,
) -> None:
    """Show a page of what there is."""
    earliest, latest = bounds(session, since, until)
    kind = {"in-flight": "in flight", "dead": "dead"}.get(state or "")
    if state in ("scheduled", "ready"):
        kind = "waiting"
        if state == "ready":
            latest = min(session.now, latest) if latest is not None else session.now
        else:
            earliest = max(session.now, earliest) if earliest is not None else session.now
    topic = session.topic(topic)
    try:
        page = session.center.scan(
            topic,
            state=kind,
            since=earliest,
            until=latest,
            where=named(task),
            limit=limit,
            after=after,
        )
    except ValueError as exc:  # a cursor that is none
        raise Failure(exc, USAGE) from None
    messages = [describe(session, session.center.task(found)) for found in page.messages]
    if session.as_json:
        session.screen.json({"messages": messages, "after": page.after})
        return
    make_row, columns = (dead_row, DEAD_COLUMNS) if state == "dead" else (row, COLUMNS)
    rows = [
        make_row(session, message, found.time_us / 1e6)
        for message, found in zip(messages, page.messages, strict=True)
    ]
    if rows:
        session.screen.table(columns, rows)
    else:
        session.screen.say("Nothing.")
    if page.after is not None:
        session.screen.say(f"There is more: --after {page.after}", "dim")
