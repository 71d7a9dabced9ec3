"""``celery toc reschedule`` and ``run``: give messages another time, or make them due now."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click

from kombu_toc import Found

from . import options
from .exits import TOO_LATE, USAGE, Command, Failure
from .options import SPAN, yes_option
from .screen import counted
from .selection import (
    MOVED_WITHIN,
    Filters,
    Matching,
    check_usage,
    in_order,
    look_up,
    selection_options,
)
from .session import Session, with_session


@click.command(
    cls=Command,
    example="""
celery -A shop toc reschedule 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11 --countdown 1h30m
celery -A shop toc reschedule 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11 --eta 2030-12-24T18:00+01:00
celery -A shop toc reschedule --queue mail --task shop.mail.remind --until 2h --countdown 1d
""",
)
@selection_options
@click.option("--eta", metavar="TIME", help="ISO 8601; without an offset, in the app's time zone.")
@click.option("--countdown", metavar="SPAN", type=SPAN, help="From now: seconds, or 1h30m, 2d.")
@yes_option
@with_session
def reschedule(
    session: Session,
    ids: tuple[str, ...],
    eta: str | None,
    countdown: float | None,
    yes: bool,
    **filters: Any,
) -> None:
    """Give messages that wait another time.

    Name ids, or say which by --queue, --task, --state, --since and --until: then all that wait
    and match. One that is in flight or dead is left as it is (exit code 4).
    """
    given = Filters(**filters)
    named = check_usage(ids, given)
    if (eta is None) == (countdown is None):
        raise click.UsageError("give either --eta or --countdown")
    if eta is not None:
        try:
            at = options.read_moment(eta, session.zone)
        except ValueError as exc:
            raise Failure(f"--eta: {exc}", USAGE) from None
    if named:
        when: dict[str, Any] = {"delay": countdown} if eta is None else {"at": at}
        _by_id(session, ids, given.queue, when)
    else:
        to = at if countdown is None else session.now + countdown
        to_text = f"to {options.local_iso(to, session.zone)}"
        _by_filters(session, given, to, f"Reschedule {{}} {to_text}?", yes)


@click.command(
    cls=Command,
    example="""
celery -A shop toc run 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11
celery -A shop toc run --queue mail --task shop.mail.remind
""",
)
@selection_options
@yes_option
@with_session
def run(session: Session, ids: tuple[str, ...], yes: bool, **filters: Any) -> None:
    """Make messages that wait due now.

    Name ids, or say which by --queue, --task, --state, --since and --until: then all that wait
    and match. One that is in flight or dead is left as it is (exit code 4): `dead requeue` runs
    dead ones.
    """
    given = Filters(**filters)
    if check_usage(ids, given):
        _by_id(session, ids, given.queue, {})
    else:
        _by_filters(session, given, None, "Run {} now?", yes)


def _by_id(
    session: Session, ids: tuple[str, ...], queue: str | None, when: dict[str, float]
) -> None:
    session.center.reschedule_found([], **when)  # refuses an invalid time
    found, missing = look_up(session, ids, queue)
    for id in missing:
        session.complain_of_none(id)
    moved = session.ask(session.center.reschedule_found, found, **when)
    gone = {(one.topic, one.id) for one in found} - {(one.topic, one.id) for one in moved}
    for _, id in sorted(gone):  # since they were looked up
        session.complain(f"too late: {id!r} is gone", TOO_LATE)
    results = []
    for each in in_order(ids, moved):
        due = options.iso(each.time_us / 1e6) if each.time_us else None
        state = each.state.replace(" ", "-")
        if state == "waiting":
            state = "scheduled" if each.time_us > session.now * 1e6 and when else "ready"
        results.append(
            {
                "id": each.id,
                "queue": each.topic,
                "topic": each.topic,
                "state": state,
                "moved": each.moved,
                "time": due,
            }
        )
        if not each.moved:
            session.complain(f"too late: {each.id!r} is {each.state}", TOO_LATE)
        elif not session.as_json:
            at = options.local_iso(each.time_us / 1e6, session.zone) if due and when else "now"
            session.screen.say(f"{each.id} in {each.topic!r} is due {at}.")
    if session.as_json:
        session.screen.json({"results": results})


def _by_filters(
    session: Session, given: Filters, to: float | None, question: str, yes: bool
) -> None:
    when = {} if to is None else {"at": to}
    session.center.reschedule_found([], **when)  # refuses an invalid time
    matching = Matching(session, given)
    number = matching.count()
    moved = late = 0
    if number:
        session.confirm(question.format(f"{counted(number, 'message')}{matching.described}"), yes)
        for page in matching.pages(skip=_has_time(session, to)):
            for each in session.ask(session.center.reschedule_found, page, **when):
                moved += each.moved
                late += not each.moved
    if session.as_json:
        session.json({"moved": moved, "late": late})
        return
    if not number:
        session.screen.say("No messages match.")
        return
    done = "now" if to is None else options.local_iso(to, session.zone)
    session.screen.say(f"Rescheduled {counted(moved, 'message')}, due {done}.")
    if late:
        session.complain(f"too late for {counted(late, 'message')}: a worker has it", TOO_LATE)


def _has_time(session: Session, to: float | None) -> Callable[[Found], bool]:
    """The predicate that a message already has the time that it is to be given.

    A scan in the order of time meets the messages again that this very command has moved.
    """
    began = time.monotonic()

    def has_time(found: Found) -> bool:
        now = session.now + time.monotonic() - began
        if to is None or to <= now:
            return found.time_us <= (now + MOVED_WITHIN) * 1e6
        return to * 1e6 - 1000 <= found.time_us < (to + MOVED_WITHIN) * 1e6

    return has_time
