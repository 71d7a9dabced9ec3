"""``celery toc cancel``: take messages out before they run."""

from __future__ import annotations

from typing import Any

import click
from celery.backends.base import DisabledBackend

from kombu_toc import Cancelled

from ..app.revoke import mark_revoked, remember_revoked
from .exits import FAILED, NOT_FOUND, TOO_LATE, Command
from .messages import state_of
from .options import yes_option
from .screen import counted, skipped
from .selection import (
    Filters,
    Matching,
    check_usage,
    in_order,
    look_up,
    selection_options,
    show_found,
)
from .session import Session, with_session


@click.command(
    cls=Command,
    example="""
celery -A shop toc cancel 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11
celery -A shop toc cancel 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11 --yes --json
celery -A shop toc cancel --queue mail --task shop.mail.remind --until 2h
""",
)
@selection_options
@click.option(
    "--in-flight",
    is_flag=True,
    help="With ids: also what a worker has. Its message is deleted, but the task is not stopped.",
)
@click.option(
    "--biz-id",
    metavar="ID",
    help="Instead of ids and filters: what is pending of this business id in the task library.",
)
@click.option("--biz-type", metavar="NAME", help="With --biz-id: only of this business type.")
@click.option("--keep-results", is_flag=True, help="Do not mark the results as REVOKED.")
@yes_option
@with_session
def cancel(
    session: Session,
    ids: tuple[str, ...],
    in_flight: bool,
    biz_id: str | None,
    biz_type: str | None,
    keep_results: bool,
    yes: bool,
    **filters: Any,
) -> None:
    """Delete messages: a task that waits never runs, and its result is REVOKED.

    Name ids, or select by --queue, --task, --state, --since and --until: then all that wait and
    match. A message that a worker has already is left to it, which is reported (exit code 4).
    """
    given = Filters(**filters)
    if biz_id is not None or biz_type is not None:
        if biz_id is None or ids or in_flight or given.any:
            raise click.UsageError("--biz-id, with or without --biz-type, goes without the others")
        results = _Results(session, keep_results)
        _by_business(session, biz_id, biz_type, yes, results)
        results.finish()
        return
    named = check_usage(ids, given)
    if in_flight and not named:
        raise click.UsageError("--in-flight goes with ids; filters select waiting messages only")
    results = _Results(session, keep_results)
    if named:
        _by_id(session, ids, given.queue, in_flight, yes, results)
    else:
        _by_filters(session, given, yes, results)
    results.finish()


def _by_id(
    session: Session,
    ids: tuple[str, ...],
    queue: str | None,
    in_flight: bool,
    yes: bool,
    results: _Results,
) -> None:
    center = session.center
    found, missing = look_up(session, ids, queue)
    for id in missing:
        session.complain_of_none(id)
    before = {(one.topic, one.id): state_of(session, one) for one in found}
    if not found:
        if session.as_json:
            session.json({"results": [], "schedules": []})
        return
    if not yes:
        show_found(session, found)
    session.confirm(f"Delete {counted(len(found), 'message')}?", yes)
    present = [id for id in dict.fromkeys(ids) if id not in missing]
    done = session.ask(center.cancel, present, topic=queue, in_flight=in_flight)
    shown = []
    for each in in_order(ids, done):
        state = each.state.replace(" ", "-")
        if state == "waiting":
            state = before.get((each.topic, each.id), "ready")
        revoked = each.deleted and results.mark(each)
        shown.append(
            {
                "id": each.id,
                "queue": each.topic,
                "topic": each.topic,
                "state": state,
                "cancelled": each.deleted,
                "revoked": revoked,
            }
        )
        if not each.deleted:
            session.complain(f"too late: {each.id!r} is {each.state}", TOO_LATE)
        elif not session.as_json:
            result = " Its result is REVOKED." if revoked else ""
            session.screen.say(f"Cancelled {each.id} in {each.topic!r}; it was {state}.{result}")
    schedules = sorted({one.schedule for one in done if one.schedule})
    gone = {(one.topic, one.id) for one in found} - {(one.topic, one.id) for one in done}
    for _, id in sorted(gone):  # since they were looked up
        session.complain(f"too late: {id!r} is gone", TOO_LATE)
    if session.as_json:
        session.json({"results": shown, "schedules": schedules})
    elif schedules:
        session.screen.say(skipped(schedules), "yellow")


def _by_business(
    session: Session, biz_id: str, biz_type: str | None, yes: bool, results: _Results
) -> None:
    library = session.center.library
    if not yes:
        page = library.find(biz_id=biz_id, biz_type=biz_type, status="pending", limit=1000)
        number = len(page.records)
        if number:
            session.confirm(f"Cancel {counted(number, 'message')} of {biz_id!r}?", yes)
    done = library.cancel(biz_id=biz_id, biz_type=biz_type)
    shown = []
    for each in done:
        revoked = each.deleted and results.mark(each)
        shown.append(
            {
                "id": each.id,
                "queue": each.topic,
                "topic": each.topic,
                "state": each.state.replace(" ", "-"),
                "cancelled": each.deleted,
                "revoked": revoked,
            }
        )
        if not each.deleted:
            session.complain(f"too late: {each.id!r} is {each.state}", TOO_LATE)
        elif not session.as_json:
            session.screen.say(f"Cancelled {each.id} in {each.topic!r}.")
    if session.as_json:
        session.screen.json({"results": shown})
    if not done:
        session.complain(f"nothing is pending of business id {biz_id!r}", NOT_FOUND)


def _by_filters(session: Session, given: Filters, yes: bool, results: _Results) -> None:
    matching = Matching(session, given)
    cancelled = late = 0
    schedules: set[str] = set()
    number = matching.count()
    if number:
        session.confirm(f"Cancel {counted(number, 'message')}{matching.described}?", yes)
        for page in matching.pages():
            for each in session.ask(session.center.cancel_found, page, dead=False):
                cancelled += each.deleted
                late += not each.deleted
                schedules |= {each.schedule} - {""}
                if each.deleted:
                    results.mark(each)
    if session.as_json:
        session.json(
            {
                "cancelled": cancelled,
                "late": late,
                "revoked": results.marked,
                "schedules": sorted(schedules),
            }
        )
        return
    if not number:
        session.screen.say("No messages match.")
        return
    results_too = f"; {counted(results.marked, 'result')} marked REVOKED" if results.marked else ""
    session.screen.say(f"Cancelled {counted(cancelled, 'message')}{results_too}.")
    if schedules:
        session.screen.say(skipped(schedules), "yellow")
    if late:
        session.complain(f"too late for {counted(late, 'message')}: a worker has it", TOO_LATE)


class _Results:
    """Marks the results of cancelled tasks, as a revoke does."""

    def __init__(self, session: Session, keep: bool) -> None:
        self._session = session
        self.marked = 0
        #: why results are not marked; empty if the user does not want it
        self._why: str | None = None
        self._failed: Exception | None = None
        self._revoked: list[str] = []
        if keep:
            self._why = ""
        elif isinstance(session.app.backend, DisabledBackend):
            self._why = "the app has no result backend"

    def mark(self, cancelled: Cancelled) -> bool:
        """Mark the result of one task; return whether that was done. What a worker has is left."""
        if self._why is not None or self._failed is not None or cancelled.state == "in flight":
            return False
        task = self._session.center.task(cancelled)
        try:
            done = mark_revoked(
                self._session.app, task, only_if_not_begun=cancelled.state == "dead"
            )
        except Exception as exc:  # a result backend that cannot be reached may raise anything
            self._failed = exc
            return False
        self.marked += done
        if done:
            self._revoked.append(task.id)
        return done

    def finish(self) -> None:
        """Have workers list the revoked tasks; report results that could not be marked."""
        if self._revoked:
            remember_revoked(self._session.center, self._revoked)
        if self._failed is not None:
            self._session.complain(f"results are not marked REVOKED: {self._failed}", FAILED)
        elif self._why and not self._session.as_json:
            self._session.screen.say(f"Results are not marked: {self._why}.", "dim")
