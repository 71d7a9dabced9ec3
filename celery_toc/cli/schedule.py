"""``celery toc schedule``: recurring tasks, which the center keeps instead of a beat."""

from __future__ import annotations

import gc
import json
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from fnmatch import fnmatchcase
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any

import click
from celery.schedules import solar
from kombu.exceptions import KombuError

import kombu_toc

from ..beat import sync as beat
from ..beat.configured import Read, Refused
from ..schedules.rules import UnknownScheduleError, read_cron
from . import session as cli
from .screen import Cell, Column, counted, listed
from .session import Session

# -- celery toc schedule

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

EDITS = (Column("changed"), Column("by", fold=True), Column("what", fold=True))

_STYLES = {"active": "", "paused": "yellow", "ended": "dim"}

#: Coming firings that `show` computes.
UPCOMING = 5

_names = click.argument(
    "names", nargs=-1, required=True, metavar="NAME...", shell_complete=cli.complete_schedule
)


schedule = cli.Group(
    "schedule",
    help="Recurring tasks: list, show, put, pause, skip, run, backfill, delete, sync, and others.",
    commands_at=dict.fromkeys(
        (
            *("list", "show", "put", "pause", "resume", "skip", "run"),
            *("backfill", "delete", "sync", "import"),
        ),
        __name__,
    ),
)


@cli.command
@cli.queue_option
@cli.option("--task", "NAME", "Only this task; * and ? match any.")
@cli.choice("--state -s", ("active", "paused", "ended"), "Only in this state.")
@cli.option("--owner", "NAME", "Only what this put; * and ? match any.")
@cli.option("--limit -n", "N", "Lines of a page.", default=50)
@cli.option("--after", "CURSOR", "Go on where another page ended.")
def list_(
    session: Session, queue: str | None, limit: int, after: str | None, **which: str | None
) -> None:
    """The schedules, queue by queue, in the order in which they fire next.

    Examples:
    celery -A shop toc schedule list
    celery -A shop toc schedule list --task 'shop.mail.*' --state paused
    celery -A shop toc schedule list --queue mail --json
    """
    queue = session.queue(queue)
    found: list[Any] = []
    while len(found) < limit:
        page = session.center.schedules.list(queue=queue, limit=limit - len(found), after=after)
        found += [one for one in page.schedules if _matches(one, **which)]
        after = page.after
        if after is None:
            break
    if found and session.screen.is_terminal:
        session.screen.say(f"Times are in {session.zone_name}.", "dim")
    schedules = list(map(described, found))
    rows = [_row(session, *both) for both in zip(found, schedules, strict=True)]
    shown = {"schedules": schedules, "after": after}
    session.show(shown, COLUMNS, rows, "There are no such schedules.")
    if found and after is not None:
        session.screen.say(f"There may be more: --after {after}", "dim")


def _matches(found: Any, task: str | None, state: str | None, owner: str | None) -> bool:
    return (
        (task is None or fnmatchcase(found.task, task))
        and (state is None or found.state == state)
        and (owner is None or fnmatchcase(found.owner or "", owner))
    )


@cli.command
@click.argument("name", metavar="NAME", shell_complete=cli.complete_schedule)
def show(session: Session, name: str) -> None:
    """Everything about a schedule: its next firings, and what became of the last ones.

    Examples:
    celery -A shop toc schedule show nightly
    celery -A shop toc schedule show nightly --json
    """
    found = session.center.schedules.get(name)
    if found is None:
        raise unknown(session, name)
    coming = found.upcoming(UPCOMING)
    history = session.center.schedules.history(name)
    session.json(
        {
            **described(found),
            "upcoming": [cli.iso(moment.timestamp()) for moment in coming],
            "history": [_firing(one) for one in history],
            "edits": [
                {"time": cli.iso(one.at.timestamp()), "by": one.by, "what": one.what}
                for one in found.edits
            ],
        }
    )
    show_fields(session, found, coming)
    if history:
        session.screen.say()
        session.screen.table(HISTORY, [_history_line(session, one) for one in history])
    session.screen.say()
    lines = [[_moment(session, one.at), one.by, one.what] for one in found.edits]
    session.screen.table(EDITS, lines)


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
        ("misfire", f"{found.misfire}, if later than {cli.span(found.grace)}"),
        ("overlap", found.overlap),
        ("not on", ", ".join(map(str, found.exclude)) or None),
        ("jitter", cli.span(found.jitter) if found.jitter else None),
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


def _each(
    function: Callable[[Session, str], tuple[dict[str, Any], str]],
) -> Callable[..., Any]:
    """The function of a command that does the same with each schedule that is named."""

    @wraps(function)
    def run(session: Session, names: tuple[str, ...]) -> None:
        results = []
        for name in dict.fromkeys(names):
            try:
                result, told = function(session, name)
            except UnknownScheduleError:
                session.complain(unknown(session, name).format_message(), cli.NOT_FOUND)
                continue
            results.append(result)
            session.screen.say(told)
        session.json({"schedules": results})

    return _names(run)


@cli.command
@_each
def pause(session: Session, name: str) -> tuple[dict[str, Any], str]:
    """Have schedules fire no more, until `resume`. What has fired already goes on.

    Examples:
    celery -A shop toc schedule pause nightly
    """
    found = session.center.schedules.pause(name)
    return described(found), f"Paused {name!r}."


@cli.command
@_each
def resume(session: Session, name: str) -> tuple[dict[str, Any], str]:
    """Have paused schedules fire again, from their next time on.

    Examples:
    celery -A shop toc schedule resume nightly
    """
    found = session.center.schedules.resume(name)
    return described(found), f"Resumed {name!r}: next {_moment(session, found.next) or 'never'}."


@cli.command
@_each
def skip(session: Session, name: str) -> tuple[dict[str, Any], str]:
    """Leave out the next firing of schedules.

    Examples:
    celery -A shop toc schedule skip nightly
    """
    before = session.center.schedules.get(name)
    found = session.center.schedules.skip_next(name)
    left = _moment(session, before.next) if before is not None else None
    said = f"{name!r} leaves out {left}: next {_moment(session, found.next) or 'never'}."
    return described(found), said


@cli.command
@_each
def run(session: Session, name: str) -> tuple[dict[str, Any], str]:
    """Send the tasks of schedules now, beside their firings.

    Examples:
    celery -A shop toc schedule run nightly
    """
    id = session.center.schedules.run_now(name)
    return {"name": name, "id": id}, f"Sent {name!r} as {id}."


@cli.command
@click.argument("name", metavar="NAME", shell_complete=cli.complete_schedule)
@cli.option("--from start", "TIME", "ISO 8601, or a span ago.", required=True)
@cli.option("--to end", "TIME", "The end; now unless given.")
@cli.option("--rate", "RATE", "Tasks a second.", type=float, default=10.0)
@cli.option("--limit", "N", "If more: none is sent.", type=int, default=1000)
def backfill(
    session: Session, name: str, start: str, end: str | None, rate: float, limit: int
) -> None:
    """Send the task of a schedule for each time of the past for which no firing has come.

    Examples:
    celery -A shop toc schedule backfill nightly --from 2026-11-01 --to 2026-11-20
    celery -A shop toc schedule backfill hourly --from -2d --rate 0.5 --json
    """
    bounds = session.time("from", start) or 0.0, session.time("to", end)
    try:
        with session.progress("Sending") as bar:
            ids = session.center.schedules.backfill(
                name, *bounds, rate=rate, limit=limit, on_progress=bar
            )
    except UnknownScheduleError:
        raise unknown(session, name) from None
    session.tell(
        {"name": name, "ids": ids},
        f"Sent {counted(len(ids), 'firing')} of {name!r}, {rate:g} a second.",
    )


@cli.command
@_names
@cli.yes_option
def delete(session: Session, names: tuple[str, ...]) -> None:
    """Delete schedules with their next firings. What has fired already goes on.

    One that an app's beat_schedule has comes back when that setting changes, or by `sync`.

    Examples:
    celery -A shop toc schedule delete nightly
    celery -A shop toc schedule delete nightly hourly --yes --json
    """
    found = [(name, session.center.schedules.get(name)) for name in dict.fromkeys(names)]
    for name, one in found:
        if one is None:
            session.complain(unknown(session, name).format_message(), cli.NOT_FOUND)
    there = [name for name, one in found if one is not None]
    if there:
        session.confirm(f"Delete {counted(len(there), 'schedule')}: {listed(there)}?")
    deleted = [name for name in there if session.center.schedules.delete(name)]
    session.tell({"deleted": deleted}, f"Deleted {listed(deleted)}." if deleted else "")


# -- how it is shown


def unknown(session: Session, name: str) -> cli.Failure:
    """There is no schedule of that name; a similar one is named."""
    known = (one.name for one in islice(session.center.schedules.each(), 10_000))
    hint = cli.meant(name, known, "; 'celery toc schedule list' shows all")
    return cli.Failure(f"there is no schedule {name!r}{hint}", cli.NOT_FOUND)


def described(found: Any) -> dict[str, Any]:
    """A schedule, as in JSON."""
    return {
        **cli.document(
            found, "name task timezone queue misfire overlap start end max_runs owner state"
        ),
        **cli.document(found, "next next_id last runs created changed"),
        "schedule": found.text,
        # of what is not decoded, as their sender wrote them
        "args": found.args if isinstance(found.args, str) else list(found.args or ()),
        "kwargs": found.kwargs if isinstance(found.kwargs, str) else dict(found.kwargs or {}),
        "options": dict(found.options),
        "grace_seconds": float(found.grace),
        "jitter_seconds": float(found.jitter),
        "exclude": list(map(str, found.exclude)),
    }


def _firing(found: Any) -> dict[str, Any]:
    shown = cli.document(found, "id planned started ended outcome by_hand")
    return {**shown, "reason": found.reason or None, "late_seconds": found.late}


def _moment(session: Session, moment: datetime | None) -> str | None:
    if moment is None:
        return None
    seconds = moment.timestamp()
    shown = cli.local if session.screen.is_terminal else cli.local_iso
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


def _row(session: Session, found: Any, shown: dict[str, Any]) -> dict[str, Any]:
    left = None if found.next is None else cli.distance(found.next.timestamp() - session.now)
    state = Cell(found.state, _STYLES.get(found.state, ""))
    return {**shown, "state": state, "next": _moment(session, found.next), "in": left}


def _history_line(session: Session, found: Any) -> list[Any]:
    outcome = f"{found.outcome} (by hand)" if found.by_hand else found.outcome
    return [
        _moment(session, found.planned),
        outcome,
        None if found.late is None else cli.milliseconds(found.late),
        found.id,
        found.reason or None,
    ]


# -- celery toc schedule put


def _json(kind: type, example: str) -> cli.Read:
    """JSON of one kind."""

    def read(value: str) -> Any:
        with suppress(ValueError):
            if isinstance(found := json.loads(value), kind):
                return found
        raise ValueError(f"{value!r} is not JSON such as {example}")

    return cli.Read("json", read)


@cli.command
@click.argument("name", metavar="NAME")
@click.argument("task", metavar="TASK")
@cli.option(
    "--cron",
    "'M H D M W'",
    "Minute, hour, day, month, day of the week (Sunday: 0 or 7). Or @daily.",
)
@cli.flag(
    "--cron-or either_day",
    "With --cron: a day of the month or of the week is enough, as for cron; else both.",
    default=None,
)
@cli.option("--every", "SPAN", "An interval: 30s, 1h30m.")
@cli.option("--sun", "EVENT", "An event of the sun, such as sunrise; with --at.")
@cli.option("--at place", "LAT,LON", "Where the sun is looked at.")
@cli.option("--args", "JSON", "Arguments: a list.", type=_json(list, '[1, "a"]'))
@cli.option("--kwargs", "JSON", "Arguments by name: an object.", type=_json(dict, '{"a": 1}'))
@cli.option(
    "--options",
    "JSON",
    "Options of apply_async: priority, expires, headers, ...",
    type=_json(dict, '{"priority": 3}'),
)
@cli.option("--queue -Q", "NAME", "The queue, if not routed.", shell_complete=cli.complete_queue)
@cli.option("--timezone", "ZONE", "Of a crontab; the app's unless given.")
@cli.choice("--misfire", ("skip", "once", "all"), "What was missed by the grace.")
@cli.option("--grace", "SPAN", "How late a firing may be: 1m.")
@cli.choice("--overlap", ("allow", "skip", "wait", "cancel"), "While the firing before still runs.")
@cli.option(
    "--jitter", "SPAN", "Each firing up to so much later; by how much is settled by its time."
)
@cli.option("--start", "TIME", "Not before: ISO 8601, or a span from now.")
@cli.option("--end", "TIME", "Not after.")
@cli.option("--max-runs", "N", "So often, then it ends.")
@cli.option(
    "--exclude",
    "DATE|FILE",
    "Not on this day, or on those of a file: iCalendar, or a date in each line.",
    multiple=True,
)
@cli.flag("--force", "Also if another has put a schedule of that name.")
def put(
    session: Session,
    name: str,
    task: str,
    cron: str | None,
    every: float | None,
    sun: str | None,
    place: str | None,
    exclude: tuple[str, ...],
    force: bool,
    **more: Any,
) -> None:
    """Put a schedule, or change one: TASK is sent whenever it is time.

    Say --cron, --every or --sun. A schedule that has just these rules stays as it is; otherwise its
    next firing is replaced, and its pause, runs and history stay.

    Examples:
    celery -A shop toc schedule put nightly shop.tidy --cron '0 3 * * *'
    celery -A shop toc schedule put poll shop.poll --every 30s --args '["eu"]' --overlap skip
    celery -A shop toc schedule put dawn shop.lights_off --sun sunrise --at 52.5,13.4
    """
    when = _schedule(cron, every, sun, place)
    rules = {rule: value for rule, value in more.items() if value is not None}
    for bound in ("start", "end"):
        if bound in rules:
            rules[bound] = session.time(bound, rules[bound])
    rules["exclude"] = [
        one if one[:4].isdigit() and not Path(one).is_file() else Path(one) for one in exclude
    ]
    schedules = session.center.schedules
    before = schedules.get(name)
    if before is not None and before.owner and not force:
        raise cli.Failure(_owned(name, before.owner))
    try:
        found = schedules.put(name, task, when, **rules)
    except (TypeError, KombuError) as exc:  # arguments that the task or its serializer refuses
        raise cli.Failure(f"task {task!r} cannot be sent so: {exc}", cli.USAGE) from exc
    changed = before is None or before.fingerprint != found.fingerprint
    session.json({**described(found), "is_new": before is None, "has_changed": changed})
    show_fields(session, found, found.upcoming(3))
    if not changed:
        session.screen.say("It was there already, just so.", "dim")
    if task not in session.app.tasks:
        session.screen.say(
            f"Task {task!r} is not among those that the app has loaded here; a worker needs it.",
            "yellow",
        )


def _schedule(cron: str | None, every: float | None, sun: str | None, place: str | None) -> Any:
    given = [option for option in (cron, every, sun) if option is not None]
    if len(given) != 1:
        raise cli.Failure("say one of --cron, --every and --sun", cli.USAGE)
    try:
        if cron is not None:
            return read_cron(cron)
        if sun is not None:
            latitude, longitude = map(float, (place or "").split(","))
            return solar(sun, latitude, longitude)
    except ImportError as exc:
        raise cli.Failure(f"{exc}: solar schedules need the package ephem") from exc
    except ValueError as exc:
        if sun is not None and (place or "").count(",") != 1:
            raise cli.Failure("--sun needs a place: --at 52.5,13.4", cli.USAGE) from exc
        raise cli.Failure(f"the schedule cannot be read: {exc}", cli.USAGE) from exc
    return every


def _owned(name: str, owner: str) -> str:
    if owner.startswith(beat.OWNER):
        app = owner.removeprefix(beat.OWNER)
        return (
            f"the schedule {name!r} comes from the beat_schedule of app {app!r}: change it there, "
            "or pass --force and lose the change when that changes"
        )
    return f"the schedule {name!r} was put by {owner!r}: --force changes it"


# -- ``celery toc schedule sync`` and ``import``: schedules that were configured for a beat


REFUSED = (Column("name", fold=True), Column("why it is not taken", fold=True))

_dry_run = cli.flag("--dry-run", "Report what would be done, and change nothing.")


def _load(session: Session) -> None:
    """Load the app as a beat does: its modules add periodic tasks."""
    session.app.loader.import_default_modules()
    session.app.finalize()


@cli.command
@_dry_run
def sync(session: Session, dry_run: bool) -> None:
    """Put what the app has in beat_schedule; remove what it has put and is gone.

    Workers do it with toc_beat = True. This command does it at once and in any case, also for a
    release that was taken back. Exit code 1 if an entry cannot be put.

    Examples:
    celery -A shop toc schedule sync --dry-run
    celery -A shop toc schedule sync
    """
    _load(session)
    process = f"celery toc schedule sync {uuid.uuid4().hex[:8]}"
    one = beat.Sync(session.app, session.center, process)
    outcome = one.plan() if dry_run else one.run(force=True)
    if outcome.told.verdict == "busy":
        raise cli.Failure(
            f"{outcome.told.process} is putting a beat_schedule of this app: try again in "
            f"{outcome.told.busy:.0f} s"
        )
    if not dry_run and outcome.told.verdict != "in force":
        raise cli.Failure(
            f"{outcome.told.process} has put another beat_schedule of this app meanwhile: see "
            "'celery toc schedule list', and try again"
        )
    would = "would be " if dry_run else ""
    parts = [f"{len(outcome.put)} {would}put", f"{len(outcome.removed)} {would}removed"]
    _report(
        session,
        {**cli.document(outcome, "put removed unchanged"), "dry_run": dry_run},
        [
            *(f"{name}: {would}put" for name in outcome.put),
            *(f"{name}: {would}removed" for name in outcome.removed),
            f"{', '.join(parts)}, {outcome.unchanged} unchanged.",
        ],
        outcome.refused,
    )


def _report(
    session: Session, shown: dict[str, Any], lines: list[str], refused: list[Refused]
) -> None:
    """Say what was put, and what could not be."""
    session.tell({**shown, "refused": [one._asdict() for one in refused]}, *lines)
    if refused:
        session.exit_code = cli.FAILED
        session.screen.say(f"Not taken, {counted(len(refused), 'entry')}:", "yellow")
        session.screen.table(REFUSED, refused)


@cli.command
@click.argument("source", type=click.Choice(("django", "redbeat")))
@click.argument("url", metavar="[redis://...]", required=False)
@cli.option("--key-prefix", "TEXT", "redbeat_key_prefix; the app's, or 'redbeat:'.")
@_dry_run
@cli.flag("--force", "Also what others have put under the same names.")
def import_(
    session: Session,
    source: str,
    url: str | None,
    key_prefix: str | None,
    dry_run: bool,
    force: bool,
) -> None:
    """Take over the tables of django-celery-beat, or what redbeat keeps in Redis.

    Stop that beat first: what both have runs twice. The command can be repeated: it puts what is
    new or has changed, and removes nothing. Exit code 1 if an entry cannot be taken, which is
    reported.

    Examples:
    celery -A shop toc schedule import django --dry-run
    celery -A shop toc schedule import django
    celery -A shop toc schedule import redbeat redis://localhost:6379/1
    """
    _load(session)
    # Nothing of what is read refers to itself. To look for it takes a ninth of the time.
    gc.disable()
    try:
        if source == "django":
            read = _read_django(session, url)
        else:
            read = _read_redbeat(session, url, key_prefix)
        done = beat.import_entries(
            *(session.app, session.center, read, f"{beat.IMPORTED_BY}{source}"),
            dry_run=dry_run,
            force=force,
        )
    finally:
        gc.enable()
    number, would = len(read.entries) + len(read.refused), "would be " if dry_run else ""
    paused = set(done.paused)
    _report(
        session,
        {**cli.document(done, "put unchanged paused"), "dry_run": dry_run, "found": number},
        [
            *(f"{name}: {would}put{', paused' if name in paused else ''}" for name in done.put),
            f"{counted(number, 'entry')}: {len(done.put)} {would}put, {done.unchanged} unchanged, "
            f"{len(done.refused)} not taken.",
        ],
        done.refused,
    )


def _read_django(session: Session, url: str | None) -> Read:
    if url is not None:
        raise cli.Failure(
            "django-celery-beat is read through the app's Django: leave out the URL", cli.USAGE
        )
    try:
        return beat.read_django(beat.django_rows(), session.now)
    except Exception as exc:  # whatever Django and its database raise
        raise cli.Failure(
            f"the tables of django-celery-beat cannot be read: {type(exc).__name__}: {exc}"
        ) from exc


def _read_redbeat(session: Session, url: str | None, key_prefix: str | None) -> Read:
    from redis import Redis, RedisError

    conf = session.app.conf
    url = url or conf.get("redbeat_redis_url")
    if not url:
        raise cli.Failure(
            "say where redbeat keeps its entries: redis://localhost:6379/1", cli.USAGE
        )
    prefix = key_prefix or conf.get("redbeat_key_prefix") or beat.REDBEAT_PREFIX
    shown = kombu_toc.mask_password(url)
    try:
        with Redis.from_url(url) as client:
            return beat.read_redbeat(beat.redbeat_definitions(client, prefix))
    except (RedisError, ValueError, OSError) as exc:
        raise cli.Failure(f"redbeat's entries at {shown} cannot be read: {exc}") from exc
