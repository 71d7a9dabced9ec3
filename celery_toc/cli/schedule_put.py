"""``celery toc schedule put``: a recurring task from the command line."""

from __future__ import annotations

import json
from typing import Any

import click
from celery.schedules import solar
from kombu.exceptions import KombuError

from ..beat.sync import OWNER
from ..schedules.reading import read_cron
from . import times
from .exits import FAILED, USAGE, Command, Failure
from .options import SPAN, complete_queue
from .schedule import document, show_fields
from .session import Session, with_session


class _Json(click.ParamType):  # type: ignore[type-arg]  # Click's is generic from 8.5 on
    """JSON of one kind."""

    def __init__(self, kind: type, example: str) -> None:
        self.kind, self.example = kind, example
        self.name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            found = json.loads(value)
            if isinstance(found, self.kind):
                return found
        except ValueError:
            pass
        self.fail(f"{value!r} is not JSON such as {self.example}", param, ctx)


@click.command(
    cls=Command,
    example="""
celery -A shop toc schedule put nightly shop.tidy --cron '0 3 * * *'
celery -A shop toc schedule put poll shop.poll --every 30s --args '["eu"]' --overlap skip
celery -A shop toc schedule put dawn shop.lights_off --sun sunrise --at 52.5,13.4
""",
)
@click.argument("name", metavar="NAME")
@click.argument("task", metavar="TASK")
@click.option(
    "--cron",
    metavar="'M H D M W'",
    help="Minute, hour, day, month, day of the week (Sunday: 0 or 7). Or @daily.",
)
@click.option(
    "--cron-or",
    "either_day",
    is_flag=True,
    default=None,
    help="With --cron: a day of the month or of the week is enough, as for cron; else both.",
)
@click.option("--every", type=SPAN, metavar="SPAN", help="An interval: 30s, 1h30m.")
@click.option("--sun", metavar="EVENT", help="An event of the sun, such as sunrise; with --at.")
@click.option("--at", "place", metavar="LAT,LON", help="Where the sun is looked at.")
@click.option("--args", type=_Json(list, '[1, "a"]'), metavar="JSON", help="Arguments: a list.")
@click.option(
    "--kwargs", type=_Json(dict, '{"a": 1}'), metavar="JSON", help="Arguments by name: an object."
)
@click.option(
    "--options",
    type=_Json(dict, '{"priority": 3}'),
    metavar="JSON",
    help="Options of apply_async: priority, expires, headers, ...",
)
@click.option(
    "--queue", "-Q", metavar="NAME", shell_complete=complete_queue, help="The queue, if not routed."
)
@click.option("--timezone", metavar="ZONE", help="Of a crontab; the app's unless given.")
@click.option(
    "--misfire", type=click.Choice(("skip", "once", "all")), help="What was missed by the grace."
)
@click.option("--grace", type=SPAN, metavar="SPAN", help="How late a firing may be: 1m.")
@click.option(
    "--overlap",
    type=click.Choice(("allow", "skip", "wait")),
    help="While the firing before still runs.",
)
@click.option(
    "--jitter",
    type=SPAN,
    metavar="SPAN",
    help="Each firing up to so much later; by how much is settled by its time.",
)
@click.option("--start", metavar="TIME", help="Not before: ISO 8601, or a span from now.")
@click.option("--end", metavar="TIME", help="Not after.")
@click.option("--max-runs", type=click.IntRange(1), metavar="N", help="So often, then it ends.")
@click.option("--force", is_flag=True, help="Also if another has put a schedule of that name.")
@with_session
def put(
    session: Session,
    name: str,
    task: str,
    cron: str | None,
    every: float | None,
    sun: str | None,
    place: str | None,
    force: bool,
    **more: Any,
) -> None:
    """Put a schedule, or change one: TASK is sent whenever it is time.

    Say --cron, --every or --sun. A schedule that has just these rules stays as it is; otherwise its
    next firing is replaced, and its pause, runs and history stay.
    """
    when = _schedule(cron, every, sun, place)
    rules = {rule: value for rule, value in more.items() if value is not None}
    for bound in ("start", "end"):
        if bound in rules:
            try:
                rules[bound] = times.read_bound(rules[bound], session.zone, session.now)
            except ValueError as exc:
                raise click.UsageError(f"--{bound}: {exc}") from exc
    schedules = session.center.schedules
    before = schedules.get(name)
    if before is not None and before.owner and not force:
        raise Failure(_owned(name, before.owner), FAILED)
    try:
        found = schedules.put(name, task, when, **rules)
    except (TypeError, KombuError) as exc:  # arguments that the task or its serializer refuses
        raise Failure(f"task {task!r} cannot be sent so: {exc}", USAGE) from exc
    changed = before is None or before.fingerprint != found.fingerprint
    if session.as_json:
        session.screen.json({**document(found), "is_new": before is None, "has_changed": changed})
        return
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
        raise Failure("say one of --cron, --every and --sun", USAGE)
    try:
        if cron is not None:
            return read_cron(cron)
        if sun is not None:
            latitude, longitude = map(float, (place or "").split(","))
            return solar(sun, latitude, longitude)
    except ImportError as exc:
        raise Failure(f"{exc}: solar schedules need the package ephem", FAILED) from exc
    except ValueError as exc:
        if sun is not None and (place or "").count(",") != 1:
            raise Failure("--sun needs a place: --at 52.5,13.4", USAGE) from exc
        raise Failure(f"the schedule cannot be read: {exc}", USAGE) from exc
    return every


def _owned(name: str, owner: str) -> str:
    if owner.startswith(OWNER):
        app = owner.removeprefix(OWNER)
        return (
            f"the schedule {name!r} comes from the beat_schedule of app {app!r}: change it there, "
            "or pass --force and lose the change when that changes"
        )
    return f"the schedule {name!r} was put by {owner!r}: --force changes it"
