"""``celery toc cancel``: take messages out before they run."""

from __future__ import annotations

import click

from .ends import NOT_FOUND, TOO_LATE, Command
from .message import describe, in_a_line
from .session import Session, complete_id, topic_option, with_session, yes_option


@click.command(
    cls=Command,
    example="""
celery -A shop toc cancel 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11
celery -A shop toc cancel 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11 --yes --json
""",
)
@click.argument("ids", nargs=-1, required=True, metavar="ID...", shell_complete=complete_id)
@topic_option
@click.option(
    "--in-flight",
    is_flag=True,
    help="Also what a worker has: its message goes, but what runs is not stopped.",
)
@yes_option
@with_session
def cancel(
    session: Session, ids: tuple[str, ...], topic: str | None, in_flight: bool, yes: bool
) -> None:
    """Delete messages by id: a task that waits never runs.

    Says whether it was in time: one that a worker has already is left to it (exit code 4).
    """
    center, topic = session.center, session.topic(topic)
    if not yes:
        for id in ids:
            for found in center.get(id, topic=topic):
                message = describe(session, center.task(found))
                session.screen.say(in_a_line(session, message, found.time_us / 1e6))
    session.confirm("Delete it?" if len(ids) == 1 else f"Delete these {len(ids)}?", yes)
    results = []
    for id in ids:
        done = center.cancel(id, topic=topic, in_flight=in_flight)
        results += [
            {
                "id": each.id,
                "topic": each.topic,
                "state": each.state.replace(" ", "-"),
                "cancelled": each.deleted,
            }
            for each in done
        ]
        for each in done:
            if not each.deleted:
                session.complain(f"too late: {each.id!r} is {each.state}", TOO_LATE)
            elif not session.as_json:
                session.screen.say(f"Cancelled {each.id} in {each.topic!r}; it was {each.state}.")
        if not done:
            session.complain(f"there is no message {id!r}", NOT_FOUND)
    if session.as_json:
        session.screen.json({"results": results})
