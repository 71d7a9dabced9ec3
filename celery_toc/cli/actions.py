"""``celery toc cancel``, ``reschedule`` and ``run``, and how messages are selected: by ids, or by
filters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import click
from celery.backends.base import DisabledBackend

from kombu_toc import Cancelled, Found

from ..app.revoke import mark_revoked, remember_revoked
from . import messages
from . import session as cli
from .screen import counted, skipped
from .session import Session

# -- which messages

#: Messages of a page that is read, and then changed by one call.
PAGE = 500

#: Messages that a question lists one by one, at most.
MAX_LISTED = 10

#: States of a waiting message.
WAITING = ("scheduled", "ready")

#: Seconds. Of many messages that are moved to one time, each comes a little behind the one before:
#: all have times within this span.
MOVED_WITHIN = 0.1

NONE = "No messages match."

#: What selects waiting messages.
selection_options = cli.together(
    cli.ids_argument(cli.complete_id),
    cli.queue_option,
    cli.task_option,
    cli.choice("--state -s", WAITING, "Only in this state."),
    cli.option(
        "--since",
        "TIME",
        "Only those that are due from that time on: ISO 8601, or a span such as 1h30m.",
    ),
    cli.option("--until", "TIME", "Only those that are due before that time."),
)


def _changed(
    session: Session,
    question: str,
    label: str,
    change: Callable[[list[Found]], Any],
    skip: Callable[[Found], bool] = lambda found: False,
    *,
    queue: str | None,
    task: str | None,
    state: str | None,
    since: str | None,
    until: str | None,
) -> Iterator[Any]:
    """Ask, and then change the waiting messages that match the filters; yield the result of each.

    question: with ``{}`` for how many, and which
    skip: whether to leave a message out, such as one that this very command has moved
    """
    center, queue = session.center, session.queue(queue)
    _, *times = messages.narrowed(session, state, since, until)
    which: dict[str, Any] = {"state": "waiting", "since": times[0], "until": times[1]}
    where = messages.named(task)
    if queue is not None and (task, *times) == (None, None, None):
        number = session.ask(center.counts, queue).waiting
    else:
        with session.looking(where, queue, "waiting") as look:
            number = session.ask(center.count, queue, where=look, **which)
    if not number:
        return
    words = [counted(number, "message")]
    words += [f"of {task}"] if task else []
    words += [] if queue is None else [f"in {queue!r}"]
    bounds = (("since", since, "due from {} on"), ("until", until, "due before {}"))
    for option, text, phrase in bounds:
        if (at := session.time(option, text)) is not None:
            words.append(phrase.format(cli.local_iso(at, session.zone)))
    session.confirm(question.format(" ".join(words)))
    done = 0
    after: str | None = ""
    with session.progress(label, number) as bar:
        while after is not None:
            page = session.ask(
                center.scan, queue, where=where, limit=PAGE, after=after or None, **which
            )
            found = [one for one in page.messages if not skip(one)]
            for each in session.ask(change, found) if found else ():
                done += 1
                yield each
            bar(done)
            after = page.after


def _tell_changed(session: Session, shown: dict[str, Any], done: str, schedules: Any = ()) -> None:
    """Say how many messages that matched were changed, and that it was too late for others."""
    late = shown["late"]
    session.tell(shown, done if any(shown.values()) else NONE, notes=[skipped(schedules)])
    if late and not session.as_json:
        session.complain(f"too late for {counted(late, 'message')}: a worker has it", cli.TOO_LATE)


def look_up(
    session: Session, ids: Sequence[str], queue: str | None, *, dead: bool = False
) -> tuple[list[Found], list[str]]:
    """Look messages up by the ids that were named; report those without one.

    dead: only dead ones

    Returns the messages, and the ids that have some. An id also finds copies that share it.
    """
    every = session.ask(session.center.get, ids, topic=session.queue(queue))
    states = {one.id: one.state for one in every}
    found = [one for one in every if one.state == "dead" or not dead]
    names = {name for one in found for name in (one.id, one.id.rpartition("#")[0])}
    there = []
    for id in dict.fromkeys(ids):
        if id in names:
            there.append(id)
        elif id in states:
            session.complain(f"{id!r} is {states[id]}, not dead", cli.NOT_FOUND)
        else:
            session.complain_of_none(id)
    return found, there


def _in_order(session: Session, ids: Iterable[str], found: list[Found], done: Any) -> list[Any]:
    """Sort results by the order in which the ids were named; report what has gone since it was
    found."""
    for _, id in sorted({(one.topic, one.id) for one in found}.difference(map(_place, done))):
        session.complain(f"too late: {id!r} is gone", cli.TOO_LATE)
    order = {id: at for at, id in enumerate(dict.fromkeys(ids))}

    def place(one: Any) -> int:
        return order.get(one.id, order.get(one.id.rpartition("#")[0], len(order)))

    return sorted(done, key=place)


def _place(one: Any) -> tuple[str, str]:
    return one.topic, one.id


# -- celery toc cancel


@cli.command
@selection_options
@cli.flag(
    "--in-flight",
    "With ids: also what a worker has. Its message is deleted, but the task is not stopped.",
)
@cli.option(
    "--biz-id",
    "ID",
    "Instead of ids and filters: what is pending of this business id in the task library.",
)
@cli.option("--biz-type", "NAME", "With --biz-id: only of this business type.")
@cli.flag("--keep-results", "Do not mark the results as REVOKED.")
@cli.yes_option
def cancel(
    session: Session,
    ids: tuple[str, ...],
    in_flight: bool,
    biz_id: str | None,
    biz_type: str | None,
    keep_results: bool,
    **filters: Any,
) -> None:
    """Delete messages: a task that waits never runs, and its result is REVOKED.

    Name ids, or select by --queue, --task, --state, --since and --until: then all that wait and
    match. A message that a worker has already is left to it, which is reported (exit code 4).

    Examples:
    celery -A shop toc cancel 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11
    celery -A shop toc cancel 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11 --yes --json
    celery -A shop toc cancel --queue mail --task shop.mail.remind --until 2h
    """
    results = _Results(session, keep_results)
    if biz_id is not None or biz_type is not None:
        if biz_id is None or ids or in_flight or any(filters.values()):
            raise click.UsageError("--biz-id, with or without --biz-type, goes without the others")
        _cancel_business(session, biz_id, biz_type, results)
    elif cli.are_named(ids, **filters):
        _cancel_ids(session, ids, filters["queue"], in_flight, results)
    elif in_flight:
        raise click.UsageError("--in-flight goes with ids; filters select waiting messages only")
    else:
        _cancel_matching(session, results, **filters)
    results.finish()


def _cancel_ids(
    session: Session, ids: Sequence[str], queue: str | None, in_flight: bool, results: _Results
) -> None:
    center = session.center
    found, there = look_up(session, ids, queue)
    if not found:
        session.json({"results": [], "schedules": []})
        return
    before = {_place(one): messages.state_of(session, one) for one in found}
    if not session.yes:
        for one in found[:MAX_LISTED]:
            message = messages.describe(session, center.task(one))
            session.screen.say(messages.in_a_line(session, message, one.time_us / 1e6))
        if len(found) > MAX_LISTED:
            session.screen.say(f"... and {len(found) - MAX_LISTED:,} more")
    session.confirm(f"Delete {counted(len(found), 'message')}?")
    done = session.ask(center.cancel, there, topic=queue, in_flight=in_flight)
    shown = []
    for each in _in_order(session, ids, found, done):
        state = each.state.replace(" ", "-")
        if state == "waiting":
            state = before.get(_place(each), "ready")
        shown.append(_tell_cancelled(session, each, state, results, f"; it was {state}"))
    schedules = sorted({one.schedule for one in done if one.schedule})
    session.tell({"results": shown, "schedules": schedules}, notes=[skipped(schedules)])


def _tell_cancelled(
    session: Session, each: Cancelled, state: str, results: _Results, more: str = ""
) -> dict[str, Any]:
    """Mark the result of a message, and say what became of it; returns that as in JSON.

    more: what else is said of one that was deleted
    """
    revoked = each.deleted and results.mark(each)
    if not each.deleted:
        session.complain(f"too late: {each.id!r} is {each.state}", cli.TOO_LATE)
    else:
        result = " Its result is REVOKED." if revoked and more else ""
        session.screen.say(f"Cancelled {each.id} in {each.topic!r}{more}.{result}")
    done = {"state": state, "cancelled": each.deleted, "revoked": revoked}
    return {**cli.document(each, "id topic"), **done}


def _cancel_business(
    session: Session, biz_id: str, biz_type: str | None, results: _Results
) -> None:
    library = session.center.library
    if not session.yes:
        page = library.find(biz_id=biz_id, biz_type=biz_type, status="pending", limit=1000)
        number = len(page.records)
        if number:
            session.confirm(f"Cancel {counted(number, 'message')} of {biz_id!r}?")
    done = library.cancel(biz_id=biz_id, biz_type=biz_type)
    shown = [_tell_cancelled(session, each, each.state.replace(" ", "-"), results) for each in done]
    session.json({"results": shown})
    if not done:
        session.complain(f"nothing is pending of business id {biz_id!r}", cli.NOT_FOUND)


def _cancel_matching(session: Session, results: _Results, **filters: Any) -> None:
    cancelled = late = 0
    schedules: set[str] = set()
    change = partial(session.center.cancel, dead=False)
    for each in _changed(session, "Cancel {}?", "Cancelling", change, **filters):
        cancelled += each.deleted
        late += not each.deleted
        schedules |= {each.schedule} - {""}
        if each.deleted:
            results.mark(each)
    marked, named = len(results.marked), sorted(schedules)
    too = f"; {counted(marked, 'result')} marked REVOKED" if marked else ""
    shown = {"cancelled": cancelled, "late": late, "revoked": marked, "schedules": named}
    _tell_changed(session, shown, f"Cancelled {counted(cancelled, 'message')}{too}.", named)


class _Results:
    """Marks the results of cancelled tasks, as a revoke does."""

    def __init__(self, session: Session, keep: bool) -> None:
        self._session, self._keep = session, keep
        self._no_backend = not keep and isinstance(session.app.backend, DisabledBackend)
        #: ids of the tasks whose results were marked
        self.marked: list[str] = []
        self._failed: Exception | None = None

    def mark(self, cancelled: Cancelled) -> bool:
        """Mark the result of one task; return whether that was done. What a worker has is left."""
        no_more = self._keep or self._no_backend or self._failed is not None
        if no_more or cancelled.state == "in flight":
            return False
        task = self._session.center.task(cancelled)
        is_dead = cancelled.state == "dead"
        try:
            done = mark_revoked(self._session.app, task, only_if_not_begun=is_dead)
        except Exception as exc:  # a result backend that cannot be reached may raise anything
            self._failed = exc
            return False
        self.marked += [task.id] if done else []
        return done

    def finish(self) -> None:
        """Have workers list the revoked tasks; report results that could not be marked."""
        if self.marked:
            remember_revoked(self._session.center, self.marked)
        if self._failed is not None:
            self._session.complain(f"results are not marked REVOKED: {self._failed}")
        elif self._no_backend:
            text = "Results are not marked: the app has no result backend."
            self._session.screen.say(text, "dim")


# -- celery toc reschedule and run


@cli.command
@selection_options
@cli.option("--eta", "TIME", "ISO 8601; without an offset, in the app's time zone.")
@cli.option("--countdown", "SPAN", "From now: seconds, or 1h30m, 2d.")
@cli.yes_option
def reschedule(
    session: Session,
    ids: tuple[str, ...],
    eta: str | None,
    countdown: float | None,
    **filters: Any,
) -> None:
    """Give messages that wait another time.

    Name ids, or say which by --queue, --task, --state, --since and --until: then all that wait
    and match. One that is in flight or dead is left as it is (exit code 4).

    Examples:
    celery -A shop toc reschedule 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11 --countdown 1h30m
    celery -A shop toc reschedule 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11 --eta 2030-12-24T18:00+01:00
    celery -A shop toc reschedule --queue mail --task shop.mail.remind --until 2h --countdown 1d
    """
    named = cli.are_named(ids, **filters)
    if (eta is None) == (countdown is None):
        raise click.UsageError("give either --eta or --countdown")
    at = session.time("eta", eta)
    if named:
        when: dict[str, Any] = {"delay": countdown} if eta is None else {"at": at}
        _move_ids(session, ids, filters["queue"], when)
    else:
        to = session.now + (countdown or 0.0) if at is None else at
        _move_matching(
            session, f"Reschedule {{}} to {cli.local_iso(to, session.zone)}?", to, **filters
        )


@cli.command
@selection_options
@cli.yes_option
def run(session: Session, ids: tuple[str, ...], **filters: Any) -> None:
    """Make messages that wait due now.

    Name ids, or say which by --queue, --task, --state, --since and --until: then all that wait
    and match. One that is in flight or dead is left as it is (exit code 4): `dead requeue` runs
    dead ones.

    Examples:
    celery -A shop toc run 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11
    celery -A shop toc run --queue mail --task shop.mail.remind
    """
    if cli.are_named(ids, **filters):
        _move_ids(session, ids, filters["queue"], {})
    else:
        _move_matching(session, "Run {} now?", None, **filters)


def _move_ids(
    session: Session, ids: Sequence[str], queue: str | None, when: dict[str, Any]
) -> None:
    session.center.reschedule([], **when)  # refuses an invalid time
    found, _ = look_up(session, ids, queue)
    moved = session.ask(session.center.reschedule, found, **when)
    results = []
    for each in _in_order(session, ids, found, moved):
        state = each.state.replace(" ", "-")
        if state == "waiting":
            state = "scheduled" if each.time_us > session.now * 1e6 and when else "ready"
        results.append({**cli.document(each, "id topic moved time_us"), "state": state})
        if not each.moved:
            session.complain(f"too late: {each.id!r} is {each.state}", cli.TOO_LATE)
        else:
            at = cli.local_iso(each.time_us / 1e6, session.zone) if each.time_us and when else "now"
            session.screen.say(f"{each.id} in {each.topic!r} is due {at}.")
    session.json({"results": results})


def _move_matching(session: Session, question: str, to: float | None, **filters: Any) -> None:
    """to: when they are due: seconds since the epoch; None: now"""
    when: dict[str, Any] = {} if to is None else {"at": to}
    change: Callable[..., Any] = partial(session.center.reschedule, **when)
    change([])  # refuses an invalid time
    began, moved, late = time.monotonic(), 0, 0

    def has_time(found: Found) -> bool:
        """A scan in the order of time meets the messages again that this very command has moved."""
        now = session.now + time.monotonic() - began
        if to is None or to <= now:
            return found.time_us <= (now + MOVED_WITHIN) * 1e6
        return to * 1e6 - 1000 <= found.time_us < (to + MOVED_WITHIN) * 1e6

    for each in _changed(session, question, "Rescheduling", change, has_time, **filters):
        moved += each.moved
        late += not each.moved
    due = "now" if to is None else cli.local_iso(to, session.zone)
    done = f"Rescheduled {counted(moved, 'message')}, due {due}."
    _tell_changed(session, {"moved": moved, "late": late}, done)


# -- ``celery toc dead``: see, replay and delete the messages that were given up on


dead = cli.Group(
    "dead",
    help="Messages that were given up on: list, show, requeue, purge.",
    commands_at=dict.fromkeys(("list", "show", "requeue", "purge"), __name__),
)


@cli.command
@cli.queue_option
@messages.paging
def list_(session: Session, queue: str | None, **which: Any) -> None:
    """Dead messages in the order in which they died, with the reason and the last error.

    Examples:
    celery -A shop toc dead list --queue mail --since -1d
    celery -A shop toc dead list --task 'shop.tasks.*' --json
    """
    messages.show_page(session, queue, "dead", **which)


@cli.command
@click.argument("id", shell_complete=cli.complete_dead_id)
@cli.queue_option
def show(session: Session, id: str, queue: str | None) -> None:
    """All of a dead message, decoded.

    Examples:
    celery -A shop toc dead show 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11
    """
    found = session.ask(session.center.get, id, topic=session.queue(queue))
    gone = [each for each in found if each.state == "dead"]
    if found and not gone:
        session.complain(f"{id!r} is {found[0].state}, not dead", cli.TOO_LATE)
    else:
        messages.show_all(session, id, gone)


_dead_options = cli.chosen(cli.complete_dead_id)


@cli.command
@_dead_options
def requeue(session: Session, **which: Any) -> None:
    """Put dead messages back into their queues, due now, with all their retries.

    Name ids, or a --queue, a --task or both, or --all.

    Examples:
    celery -A shop toc dead requeue 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11
    celery -A shop toc dead requeue --queue mail --task shop.tasks.remind --yes
    """
    _apply(session, "requeue", "requeued", session.center.dead.requeue, **which)


@cli.command
@_dead_options
def purge(session: Session, **which: Any) -> None:
    """Delete dead messages for good.

    Name ids, or a --queue, a --task or both, or --all.

    Examples:
    celery -A shop toc dead purge 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11 --yes
    celery -A shop toc dead purge --queue mail
    """
    _apply(session, "purge", "purged", session.center.dead.purge, **which)


def _apply(
    session: Session,
    verb: str,
    done: str,
    operation: Callable[..., int],
    *,
    ids: tuple[str, ...],
    queue: str | None,
    task: str | None,
    every: bool,
) -> None:
    named = cli.are_named(ids, queue, task=task, all=every)
    center, name, where = session.center, session.queue(queue), messages.named(task)
    there: list[str] = []
    if named:
        found, there = look_up(session, ids, name, dead=True)
        number = len(found)
    elif task or name is None:
        with session.looking(where, name, "dead") as look:
            number = session.ask(center.count, name, state="dead", where=look)
    else:
        number = session.ask(center.counts, name).dead
    if number:
        what = counted(number, "dead message")
        what += f" of {task}" if task else ""
        what += f" in {name!r}" if name else ""
        session.confirm(f"{verb.capitalize()} {what}?")
        with session.progress(f"{verb[:-1].capitalize()}ing", number) as bar:
            number = session.ask(operation, name, ids=there or None, where=where, on_progress=bar)
    said = f"{done.capitalize()} {counted(number, 'message')}." if number else NONE
    session.tell({done: number}, "" if session.exit_code and not number else said)
