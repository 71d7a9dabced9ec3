"""``celery toc schedule``: recurring tasks, which the center keeps instead of a beat."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

import click

from ..schedules.rules import UnknownScheduleError
from . import times
from .exits import NOT_FOUND, Command, Failure, Group
from .options import complete_schedule, queue_option, yes_option
from .screen import Cell, Column
from .session import Session, with_session
from .wording import counted, listed

COMMANDS = {
    "list": f"{__name__}:list_",
    "show": f"{__name__}:show",
    "put": "celery_toc.cli.schedule_put:put",
    "pause": f"{__name__}:pause",
    "resume": f"{__name__}:resume",
    "skip": f"{__name__}:skip",
    "run": f"{__name__}:run",
    "delete": f"{__name__}:delete",
    "sync": "celery_toc.cli.schedule_sync:sync",
    "import": "celery_toc.cli.schedule_sync:import_",
}

COLUMNS = (
    Column("name", fold=True),
    Column("schedule", fold=True),
    Column("task", fold=True, spare=1),
    Column("queue", fold=True, spare=3),
    Column("state", spare=2),
    Column("next", spare=2),
    Column("in", right=True),
    Column("runs", right=True, spare=4),
)

HISTORY = (
    Column("planned"),
    Column("outcome"),
    Column("late", right=True, spare=1),
    Column("id", fold=True, spare=2),
    Column("reason", fold=True, spare=3),
)

_STYLES = {"active": "", "paused": "yellow", "ended": "dim"}

#: Coming firings that `show` computes.
UPCOMING = 5

_names = click.argument(
    "names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_schedule
)


@click.group(cls=Group, commands_at=COMMANDS)
@click.pass_context
def schedule(ctx: click.Context) -> None:
    """Recurring tasks: list, show, put, pause, resume, skip, run, delete, sync, import."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@click.command(
    "list",
    cls=Command,
    example="""
celery -A shop toc schedule list
celery -A shop toc schedule list --task 'shop.mail.*' --state paused
celery -A shop toc schedule list --queue mail --json
""",
)
@queue_option
@click.option("--task", metavar="NAME", help="Only this task; * and ? match any.")
@click.option(
    "--state", "-s", type=click.Choice(("active", "paused", "ended")), help="Only in this state."
)
@click.option("--owner", metavar="NAME", help="Only what this put; * and ? match any.")
@click.option(
    "--limit", "-n", type=click.IntRange(1), default=50, show_default=True, help="Lines of a page."
)
@click.option("--after", metavar="CURSOR", help="Go on where another page ended.")
@with_session
def list_(
    session: Session,
    queue: str | None,
    task: str | None,
    state: str | None,
    owner: str | None,
    limit: int,
    after: str | None,
) -> None:
    """The schedules, queue by queue, in the order in which they fire next."""
    queue = session.queue(queue)
    found: list[Any] = []
    while len(found) < limit:
        page = session.center.schedules.list(queue=queue, limit=limit - len(found), after=after)
        found += [one for one in page.schedules if _matches(one, task, state, owner)]
        after = page.after
        if after is None:
            break
    if session.as_json:
        session.screen.json(
            {"schedules": [document(one) for one in found], "after": after},
        )
    elif found:
        if session.screen.is_rich:
            session.screen.say(f"Times are in {session.zone_name}.", "dim")
        session.screen.table(COLUMNS, [_line(session, one) for one in found])
        if after is not None:
            session.screen.say(f"There may be more: --after {after}", "dim")
    else:
        session.screen.say("There are no such schedules.")


def _matches(found: Any, task: str | None, state: str | None, owner: str | None) -> bool:
    return (
        (task is None or fnmatchcase(found.task, task))
        and (state is None or found.state == state)
        and (owner is None or fnmatchcase(found.owner or "", owner))
    )


@click.command(
    cls=Command,
    example="""
celery -A shop toc schedule show nightly
celery -A shop toc schedule show nightly --json
""",
)
@click.argument("name", metavar="NAME", shell_complete=complete_schedule)
@with_session
def show(session: Session, name: str) -> None:
    """Everything about a schedule: its next firings, and what became of the last ones."""
    found = session.center.schedules.get(name)
    if found is None:
        raise unknown(session, name)
    coming = found.upcoming(UPCOMING)
    history = session.center.schedules.history(name)
    if session.as_json:
        document_ = document(found)
        document_["upcoming"] = [_iso(moment) for moment in coming]
        document_["history"] = [_firing(one) for one in history]
        session.screen.json(document_)
        return
    show_fields(session, found, coming)
    if history:
        session.screen.say()
        session.screen.table(HISTORY, [_history_line(session, one) for one in history])


def show_fields(session: Session, found: Any, coming: list[datetime]) -> None:
    """A schedule, a line for each of its properties."""
    zone = f" ({found.timezone})" if found.timezone else ""
    fields: list[tuple[str, Any]] = [
        ("name", found.name),
        ("task", found.task),
        ("schedule", f"{found.text}{zone}"),
        ("state", Cell(found.state, _STYLES.get(found.state, ""))),
        ("queue", found.queue),
        ("arguments", _arguments(found)),
        ("options", _shown_options(found.options)),
        ("misfire", f"{found.misfire}, if later than {times.span(found.grace)}"),
        ("overlap", found.overlap),
        ("jitter", times.span(found.jitter) if found.jitter else None),
        ("starts", _moment(session, found.start)),
        ("ends", _moment(session, found.end)),
        ("runs", f"{found.runs} of {found.max_runs}" if found.max_runs else found.runs),
        ("owner", found.owner),
        ("last", _moment(session, found.last)),
        ("next", _moment(session, found.next)),
        ("message", found.next_id),
    ]
    fields += [("then", _moment(session, moment)) for moment in coming[1:]]
    session.screen.fields(fields)


def _command(
    function: Callable[[Session, str], tuple[dict[str, Any], str]], name: str, example: str
) -> click.Command:
    """A command that does the same with each schedule that is named."""

    @_names
    @with_session
    def run(session: Session, names: tuple[str, ...]) -> None:
        results = []
        for one in dict.fromkeys(names):
            try:
                result, said = function(session, one)
            except UnknownScheduleError:
                error = unknown(session, one)
                session.complain(error.format_message(), NOT_FOUND)
                continue
            results.append(result)
            if not session.as_json:
                session.screen.say(said)
        if session.as_json:
            session.screen.json({"schedules": results})

    run.__doc__ = function.__doc__
    return click.command(name, cls=Command, example=example)(run)


def _pause(session: Session, name: str) -> tuple[dict[str, Any], str]:
    """Have schedules fire no more, until `resume`. What has fired already goes on."""
    found = session.center.schedules.pause(name)
    return document(found), f"Paused {name!r}."


def _resume(session: Session, name: str) -> tuple[dict[str, Any], str]:
    """Have paused schedules fire again, from their next time on."""
    found = session.center.schedules.resume(name)
    return document(found), f"Resumed {name!r}: next {_moment(session, found.next) or 'never'}."


def _skip(session: Session, name: str) -> tuple[dict[str, Any], str]:
    """Leave out the next firing of schedules."""
    before = session.center.schedules.get(name)
    found = session.center.schedules.skip_next(name)
    left = _moment(session, before.next) if before is not None else None
    said = f"{name!r} leaves out {left}: next {_moment(session, found.next) or 'never'}."
    return document(found), said


def _run(session: Session, name: str) -> tuple[dict[str, Any], str]:
    """Send the tasks of schedules now, beside their firings."""
    id = session.center.schedules.run_now(name)
    return {"name": name, "id": id}, f"Sent {name!r} as {id}."


pause = _command(_pause, "pause", "celery -A shop toc schedule pause nightly")
resume = _command(_resume, "resume", "celery -A shop toc schedule resume nightly")
skip = _command(_skip, "skip", "celery -A shop toc schedule skip nightly")
run = _command(_run, "run", "celery -A shop toc schedule run nightly")


@click.command(
    cls=Command,
    example="""
celery -A shop toc schedule delete nightly
celery -A shop toc schedule delete nightly hourly --yes --json
""",
)
@_names
@yes_option
@with_session
def delete(session: Session, names: tuple[str, ...], yes: bool) -> None:
    """Delete schedules with their next firings. What has fired already goes on.

    One that an app's beat_schedule has comes back when that setting changes, or by `sync`.
    """
    found = [(name, session.center.schedules.get(name)) for name in dict.fromkeys(names)]
    for name, one in found:
        if one is None:
            session.complain(unknown(session, name).format_message(), NOT_FOUND)
    there = [name for name, one in found if one is not None]
    if there:
        session.confirm(f"Delete {counted(len(there), 'schedule')}: {listed(there)}?", yes)
    deleted = [name for name in there if session.center.schedules.delete(name)]
    if session.as_json:
        session.screen.json({"deleted": deleted})
    elif deleted:
        session.screen.say(f"Deleted {listed(deleted)}.")


# -- how it is shown


def unknown(session: Session, name: str) -> Failure:
    """There is no schedule of that name; a similar one is named."""
    known = [one.name for one in islice(session.center.schedules.each(), 10_000)]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; do you mean {near[0]!r}?" if near else "; 'celery toc schedule list' shows all"
    return Failure(f"there is no schedule {name!r}{hint}", NOT_FOUND)


def document(found: Any) -> dict[str, Any]:
    """A schedule, as in JSON."""
    return {
        "name": found.name,
        "task": found.task,
        "schedule": found.text,
        "timezone": found.timezone,
        "queue": found.queue,
        # of what is not decoded, as their sender wrote them
        "args": found.args if isinstance(found.args, str) else list(found.args or ()),
        "kwargs": found.kwargs if isinstance(found.kwargs, str) else dict(found.kwargs or {}),
        "options": dict(found.options),
        "misfire": found.misfire,
        "grace_seconds": float(found.grace),
        "overlap": found.overlap,
        "jitter_seconds": float(found.jitter),
        "start": _iso(found.start),
        "end": _iso(found.end),
        "max_runs": found.max_runs,
        "owner": found.owner,
        "state": found.state,
        "next": _iso(found.next),
        "next_id": found.next_id,
        "last": _iso(found.last),
        "runs": found.runs,
        "created": _iso(found.created),
        "changed": _iso(found.changed),
    }


def _firing(found: Any) -> dict[str, Any]:
    return {
        "id": found.id,
        "planned": _iso(found.planned),
        "started": _iso(found.started),
        "ended": _iso(found.ended),
        "outcome": found.outcome,
        "reason": found.reason or None,
        "by_hand": found.by_hand,
        "late_seconds": found.late,
    }


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else times.iso(moment.timestamp())


def _moment(session: Session, moment: datetime | None) -> str | None:
    if moment is None:
        return None
    seconds = moment.timestamp()
    shown = times.local if session.screen.is_rich else times.local_iso
    return shown(seconds, session.zone)


def _arguments(found: Any) -> str | None:
    args, kwargs = found.args or (), found.kwargs or {}
    shown = [args] if isinstance(args, str) else [repr(one) for one in args]
    if isinstance(kwargs, str):
        shown.append(kwargs)
    else:
        shown += [f"{name}={value!r}" for name, value in kwargs.items()]
    return ", ".join(shown) or None


def _shown_options(options: Any) -> str | None:
    return ", ".join(f"{name}={value!r}" for name, value in sorted(options.items())) or None


def _line(session: Session, found: Any) -> list[Any]:
    left = None if found.next is None else times.distance(found.next.timestamp() - session.now)
    return [
        found.name,
        found.text,
        found.task,
        found.queue,
        Cell(found.state, _STYLES.get(found.state, "")),
        _moment(session, found.next),
        left,
        found.runs,
    ]


def _history_line(session: Session, found: Any) -> list[Any]:
    outcome = f"{found.outcome} (by hand)" if found.by_hand else found.outcome
    return [
        _moment(session, found.planned),
        outcome,
        None if found.late is None else times.milliseconds(found.late),
        found.id,
        found.reason or None,
    ]
