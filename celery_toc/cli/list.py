"""``celery toc list``: what is scheduled, in the order of time."""

from __future__ import annotations

from typing import Any

import click

from . import times
from .exits import USAGE, Command, Failure
from .message import COLUMNS, DEAD_COLUMNS, STATES, State, dead_row, describe, named, row
from .options import queue_option
from .session import Session, with_session


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
celery -A shop toc list --queue mail --until 1h
celery -A shop toc list --task 'shop.tasks.*' --state scheduled --limit 20
celery -A shop toc list --since 2030-12-24 --until 2030-12-27 --json
""",
)
@queue_option
@click.option("--state", "-s", type=State(STATES), help="Only in this state.")
@paging
@with_session
def list_(session: Session, queue: str | None, state: str | None, **which: Any) -> None:
    """The messages of a queue, or of all together, in the order of time.

    The time of one that waits is when it is due; of one in flight, when its lease ends; of a dead
    one, when it died.
    """
    show_page(session, queue, state, **which)


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


def narrowed(
    session: Session, state: str | None, earliest: float | None, latest: float | None
) -> tuple[str | None, float | None, float | None]:
    """The center's state, and the times, that these filters together mean.

    Fails if nothing can ever match them.
    """
    now = session.now
    if earliest is not None and latest is not None and earliest >= latest:
        raise Failure("--since is not before --until: nothing can match", USAGE)
    if state == "scheduled" and latest is not None and latest <= now:
        raise Failure(
            "what is scheduled is due later than now, and --until is in the past: "
            "nothing can match",
            USAGE,
        )
    if state in ("ready", "dead") and earliest is not None and earliest > now:
        what = "was due" if state == "ready" else "died"
        raise Failure(f"what is {state} {what} before now: --since is in the future", USAGE)
    if state == "ready":
        return "waiting", earliest, now if latest is None else min(now, latest)
    if state == "scheduled":
        return "waiting", now if earliest is None else max(now, earliest), latest
    return {"in-flight": "in flight", "dead": "dead"}.get(state or ""), earliest, latest


def show_page(
    session: Session,
    queue: str | None,
    state: str | None,
    *,
    since: str | None,
    until: str | None,
    task: str | None,
    limit: int,
    after: str | None,
) -> None:
    """Show a page of what there is."""
    kind, earliest, latest = narrowed(session, state, *bounds(session, since, until))
    queue = session.queue(queue)
    try:
        page = session.ask(
            session.center.scan,
            queue,
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
        session.json({"messages": messages, "after": page.after})
        return
    make_row, columns = (dead_row, DEAD_COLUMNS) if state == "dead" else (row, COLUMNS)
    rows = [
        make_row(session, message, found.time_us / 1e6)
        for message, found in zip(messages, page.messages, strict=True)
    ]
    if rows:
        left_out = session.screen.table(columns, rows)
        if left_out:
            session.screen.say(f"No room for {' and '.join(left_out)}.", "dim")
        if session.screen.is_rich and not {"time", "died"} & set(left_out):
            session.screen.say(f"Times are in {session.zone_name}.", "dim")
    else:
        session.screen.say("No messages match.")
    if page.after is not None:
        session.screen.say(f"There are more: --after {page.after}", "dim")
