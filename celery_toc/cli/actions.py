"""``celery toc cancel``, ``reschedule`` and ``run``, and how messages are selected: by ids, or by
filters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

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


class _WithId(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=_WithId)


#: What selects waiting messages.
selection_options = cli.together(
    click.argument("ids", nargs=-1, metavar="[ID]...", shell_complete=cli.complete_id),
    cli.queue_option,
    cli.option("--task", "NAME", "Only tasks of that name; * and ? match any."),
    cli.choice("--state -s", WAITING, "Only in this state."),
    cli.option(
        "--since",
        "TIME",
        "Only those that are due from that time on: ISO 8601, or a span such as 1h30m.",
    ),
    cli.option("--until", "TIME", "Only those that are due before that time."),
)


class Filters(NamedTuple):
    """The options that select messages, as they were given."""

    queue: str | None
    task: str | None
    state: str | None
    since: str | None
    until: str | None

    @property
    def any(self) -> bool:
        return any(value is not None for value in self)


def check_usage(ids: tuple[str, ...], filters: Filters) -> bool:
    """Return whether ids were named. Fails unless there are either ids or filters."""
    rest = filters._replace(queue=None)
    if ids and rest.any:
        raise click.UsageError("give ids, or --task, --state, --since and --until, and not both")
    if not ids and not filters.any:
        raise click.UsageError("say which: ids, --queue, --task, --state, --since or --until")
    return bool(ids)


class Matching:
    """The waiting messages that match filters.

    described: the filters in words, for a question: `` of shop.remind in 'mail'``
    """

    def __init__(self, session: Session, filters: Filters) -> None:
        self._session = session
        self._queue = session.queue(filters.queue)
        self._task = filters.task
        _, self._since, self._until = messages.narrowed(
            session, filters.state, *messages.bounds(session, filters.since, filters.until)
        )
        self.described = _described(session, filters, self._queue)

    def count(self) -> int:
        """How many messages match now."""
        center, ask = self._session.center, self._session.ask
        no_filters = (self._task, self._since, self._until) == (None, None, None)
        if no_filters and self._queue is not None:
            return ask(center.counts, self._queue).waiting
        with self._session.looking(messages.named(self._task), self._queue, "waiting") as where:
            return ask(
                center.count,
                self._queue,
                state="waiting",
                since=self._since,
                until=self._until,
                where=where,
            )

    def pages(self, skip: Callable[[Found], bool] = lambda found: False) -> Iterator[list[Found]]:
        """Yield the messages in pages.

        skip: whether to leave a message out, such as one that this very command has moved
        """
        after = None
        while True:
            page = self._session.ask(
                self._session.center.scan,
                self._queue,
                state="waiting",
                since=self._since,
                until=self._until,
                where=messages.named(self._task),
                limit=PAGE,
                after=after,
            )
            if found := [message for message in page.messages if not skip(message)]:
                yield found
            after = page.after
            if after is None:
                return


def _described(session: Session, filters: Filters, queue: str | None) -> str:
    """Filters in words, for a question: `` of shop.remind in 'mail'``."""
    said = []
    if filters.task:
        said.append(f"of {filters.task}")
    if queue is not None:
        said.append(f"in {queue!r}")
    since, until = messages.bounds(session, filters.since, filters.until)
    if since is not None:
        said.append(f"due from {cli.local_iso(since, session.zone)} on")
    if until is not None:
        said.append(f"due before {cli.local_iso(until, session.zone)}")
    return "".join(f" {part}" for part in said)


def look_up(
    session: Session, ids: tuple[str, ...], queue: str | None
) -> tuple[list[Found], list[str]]:
    """Look messages up by the ids that were named.

    Returns the messages, and the ids without a message. An id also finds copies that share it.
    """
    found = session.ask(session.center.get, ids, topic=session.queue(queue))
    names = {one.id for one in found} | {one.id.rpartition("#")[0] for one in found}
    return found, [id for id in dict.fromkeys(ids) if id not in names]


def in_order(ids: Iterable[str], done: Iterable[T]) -> list[T]:
    """Sort results by the order in which the ids were named."""
    places = {id: at for at, id in enumerate(dict.fromkeys(ids))}

    def place(one: T) -> int:
        return places.get(one.id, places.get(one.id.rpartition("#")[0], len(places)))

    return sorted(done, key=place)


def show_found(session: Session, found: list[Found]) -> None:
    """Show the messages of a question, one a line."""
    for one in found[:MAX_LISTED]:
        message = messages.describe(session, session.center.task(one))
        session.screen.say(messages.in_a_line(session, message, one.time_us / 1e6))
    if len(found) > MAX_LISTED:
        session.screen.say(f"... and {len(found) - MAX_LISTED:,} more")


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
    given = Filters(**filters)
    if biz_id is not None or biz_type is not None:
        if biz_id is None or ids or in_flight or given.any:
            raise click.UsageError("--biz-id, with or without --biz-type, goes without the others")
        results = _Results(session, keep_results)
        _cancel_business(session, biz_id, biz_type, results)
        results.finish()
        return
    named = check_usage(ids, given)
    if in_flight and not named:
        raise click.UsageError("--in-flight goes with ids; filters select waiting messages only")
    results = _Results(session, keep_results)
    if named:
        _cancel_ids(session, ids, given.queue, in_flight, results)
    else:
        _cancel_matching(session, given, results)
    results.finish()


def _cancel_ids(
    session: Session,
    ids: tuple[str, ...],
    queue: str | None,
    in_flight: bool,
    results: _Results,
) -> None:
    center = session.center
    found, missing = look_up(session, ids, queue)
    for id in missing:
        session.complain_of_none(id)
    before = {(one.topic, one.id): messages.state_of(session, one) for one in found}
    if not found:
        if session.as_json:
            session.json({"results": [], "schedules": []})
        return
    if not session.yes:
        show_found(session, found)
    session.confirm(f"Delete {counted(len(found), 'message')}?")
    present = [id for id in dict.fromkeys(ids) if id not in missing]
    done = session.ask(center.cancel, present, topic=queue, in_flight=in_flight)
    shown = []
    for each in in_order(ids, done):
        state = each.state.replace(" ", "-")
        if state == "waiting":
            state = before.get((each.topic, each.id), "ready")
        shown.append(_tell_cancelled(session, each, state, results, f"; it was {state}"))
    schedules = sorted({one.schedule for one in done if one.schedule})
    gone = {(one.topic, one.id) for one in found} - {(one.topic, one.id) for one in done}
    for _, id in sorted(gone):  # since they were looked up
        session.complain(f"too late: {id!r} is gone", cli.TOO_LATE)
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
    elif not session.as_json:
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
    if session.as_json:
        session.screen.json({"results": shown})
    if not done:
        session.complain(f"nothing is pending of business id {biz_id!r}", cli.NOT_FOUND)


def _cancel_matching(session: Session, given: Filters, results: _Results) -> None:
    matching = Matching(session, given)
    cancelled = late = 0
    schedules: set[str] = set()
    number = matching.count()
    if number:
        session.confirm(f"Cancel {counted(number, 'message')}{matching.described}?")
        with session.progress("Cancelling", number) as bar:
            for page in matching.pages():
                for each in session.ask(session.center.cancel, page, dead=False):
                    cancelled += each.deleted
                    late += not each.deleted
                    schedules |= {each.schedule} - {""}
                    if each.deleted:
                        results.mark(each)
                bar(cancelled + late)
    results_too = f"; {counted(results.marked, 'result')} marked REVOKED" if results.marked else ""
    done = f"Cancelled {counted(cancelled, 'message')}{results_too}."
    marked, named = results.marked, sorted(schedules)
    session.tell(
        {"cancelled": cancelled, "late": late, "revoked": marked, "schedules": named},
        done if number else "No messages match.",
        notes=[skipped(named)],
    )
    if late and not session.as_json:
        session.complain(f"too late for {counted(late, 'message')}: a worker has it", cli.TOO_LATE)


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
            self._session.complain(f"results are not marked REVOKED: {self._failed}", cli.FAILED)
        elif self._why and not self._session.as_json:
            self._session.screen.say(f"Results are not marked: {self._why}.", "dim")


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
    given = Filters(**filters)
    named = check_usage(ids, given)
    if (eta is None) == (countdown is None):
        raise click.UsageError("give either --eta or --countdown")
    at = session.time("eta", eta)
    if named:
        when: dict[str, Any] = {"delay": countdown} if eta is None else {"at": at}
        _move_ids(session, ids, given.queue, when)
    else:
        to = session.now + (countdown or 0.0) if at is None else at
        to_text = f"to {cli.local_iso(to, session.zone)}"
        _move_matching(session, given, to, f"Reschedule {{}} {to_text}?")


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
    given = Filters(**filters)
    if check_usage(ids, given):
        _move_ids(session, ids, given.queue, {})
    else:
        _move_matching(session, given, None, "Run {} now?")


def _move_ids(
    session: Session, ids: tuple[str, ...], queue: str | None, when: dict[str, Any]
) -> None:
    session.center.reschedule([], **when)  # refuses an invalid time
    found, missing = look_up(session, ids, queue)
    for id in missing:
        session.complain_of_none(id)
    moved = session.ask(session.center.reschedule, found, **when)
    gone = {(one.topic, one.id) for one in found} - {(one.topic, one.id) for one in moved}
    for _, id in sorted(gone):  # since they were looked up
        session.complain(f"too late: {id!r} is gone", cli.TOO_LATE)
    results = []
    for each in in_order(ids, moved):
        state = each.state.replace(" ", "-")
        if state == "waiting":
            state = "scheduled" if each.time_us > session.now * 1e6 and when else "ready"
        results.append({**cli.document(each, "id topic moved time_us"), "state": state})
        if not each.moved:
            session.complain(f"too late: {each.id!r} is {each.state}", cli.TOO_LATE)
        elif not session.as_json:
            at = cli.local_iso(each.time_us / 1e6, session.zone) if each.time_us and when else "now"
            session.screen.say(f"{each.id} in {each.topic!r} is due {at}.")
    if session.as_json:
        session.screen.json({"results": results})


def _move_matching(session: Session, given: Filters, to: float | None, question: str) -> None:
    when: dict[str, Any] = {} if to is None else {"at": to}
    session.center.reschedule([], **when)  # refuses an invalid time
    matching = Matching(session, given)
    number = matching.count()
    moved = late = 0
    if number:
        session.confirm(question.format(f"{counted(number, 'message')}{matching.described}"))
        with session.progress("Rescheduling", number) as bar:
            for page in matching.pages(skip=_has_time(session, to)):
                for each in session.ask(session.center.reschedule, page, **when):
                    moved += each.moved
                    late += not each.moved
                bar(moved + late)
    due = "now" if to is None else cli.local_iso(to, session.zone)
    done = f"Rescheduled {counted(moved, 'message')}, due {due}."
    session.tell({"moved": moved, "late": late}, done if number else "No messages match.")
    if late and not session.as_json:
        session.complain(f"too late for {counted(late, 'message')}: a worker has it", cli.TOO_LATE)


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


#: What selects dead messages.
_dead_options = cli.together(
    click.argument("ids", nargs=-1, metavar="[ID]...", shell_complete=cli.complete_dead_id),
    cli.queue_option,
    cli.option("--task", "NAME", "Only tasks of that name; * and ? match any."),
    cli.flag("--all -a every", "All of them."),
    cli.yes_option,
)


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
    if not (ids or queue or task or every):
        raise click.UsageError("say which: ids, --queue, --task or --all")
    if ids and (task or every):
        raise click.UsageError("give ids, or --task or --all, and not both")
    center, name = session.center, session.queue(queue)
    if ids:
        found, _ = look_up(session, ids, name)
        dead = [one for one in found if one.state == "dead"]
        names = {one.id for one in dead} | {one.id.rpartition("#")[0] for one in dead}
        alive = {one.id: one.state for one in found}
        missing = [id for id in dict.fromkeys(ids) if id not in names]
        ids = tuple(id for id in dict.fromkeys(ids) if id in names)
        number = len(dead)
        for id in missing:
            if id in alive:
                session.complain(f"{id!r} is {alive[id]}, not dead", cli.NOT_FOUND)
            else:
                session.complain_of_none(id)
    elif task or name is None:
        with session.looking(messages.named(task), name, "dead") as where:
            number = session.ask(center.count, name, state="dead", where=where)
    else:
        number = session.ask(center.counts, name).dead
    if number:
        what = counted(number, "dead message")
        what += f" of {task}" if task else ""
        what += f" in {name!r}" if name else ""
        session.confirm(f"{verb.capitalize()} {what}?")
        with session.progress(f"{verb[:-1].capitalize()}ing", number) as bar:
            chosen = list(ids) or None
            number = session.ask(
                operation, name, ids=chosen, where=messages.named(task), on_progress=bar
            )
    said = "" if session.exit_code else "No messages match."
    session.tell(
        {done: number}, f"{done.capitalize()} {counted(number, 'message')}." if number else said
    )
