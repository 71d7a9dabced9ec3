"""``celery toc reschedule`` and ``run``: give a message another time, or none."""

from __future__ import annotations

from typing import Any

import click

from . import times
from .ends import NOT_FOUND, TOO_LATE, USAGE, Command, Failure
from .session import SPAN, Session, complete_id, topic_option, with_session

_ids = click.argument("ids", nargs=-1, required=True, metavar="ID...", shell_complete=complete_id)


@click.command(
    cls=Command,
    example="""
celery -A shop toc reschedule 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11 --countdown 1h30m
celery -A shop toc reschedule 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11 --eta 2030-12-24T18:00+01:00
""",
)
@_ids
@topic_option
@click.option("--eta", metavar="TIME", help="ISO 8601; without an offset, in the app's time zone.")
@click.option("--countdown", metavar="SPAN", type=SPAN, help="From now: seconds, or 1h30m, 2d.")
@with_session
def reschedule(
    session: Session,
    ids: tuple[str, ...],
    topic: str | None,
    eta: str | None,
    countdown: float | None,
) -> None:
    """Give messages that wait another time.

    One that is in flight or dead is left as it is (exit code 4).
    """
    if (eta is None) == (countdown is None):
        raise click.UsageError("give either --eta or --countdown")
    if eta is not None:
        try:
            when: dict[str, Any] = {"eta": times.read_moment(eta, session.zone)}
        except ValueError as exc:
            raise Failure(f"--eta: {exc}", USAGE) from None
    else:
        when = {"countdown": countdown}
    _move(session, ids, topic, lambda id, name: session.center.reschedule(id, topic=name, **when))


@click.command(
    cls=Command,
    example="""
celery -A shop toc run 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11
""",
)
@_ids
@topic_option
@with_session
def run(session: Session, ids: tuple[str, ...], topic: str | None) -> None:
    """Make messages that wait due now.

    One that is in flight or dead is left as it is (exit code 4): `dead requeue` runs dead ones.
    """
    _move(session, ids, topic, lambda id, name: session.center.run_now(id, topic=name))


def _move(session: Session, ids: tuple[str, ...], topic: str | None, move: Any) -> None:
    name = session.topic(topic)
    results = []
    for id in ids:
        moved = move(id, name)
        if not moved:
            session.complain(f"there is no message {id!r}", NOT_FOUND)
        for each in moved:
            due = times.iso(each.time_us / 1e6) if each.time_us else None
            results.append(
                {
                    "id": each.id,
                    "topic": each.topic,
                    "state": each.state.replace(" ", "-"),
                    "moved": each.moved,
                    "time": due,
                }
            )
            if not each.moved:
                session.complain(f"too late: {each.id!r} is {each.state}", TOO_LATE)
            elif not session.as_json:
                when = times.local(each.time_us / 1e6, session.zone) if due else "now"
                session.screen.say(f"{each.id} in {each.topic!r} is due {when}.")
    if session.as_json:
        session.screen.json({"results": results})
