"""``celery toc schedule sync`` and ``import``: schedules that were configured for a beat."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import click

import kombu_toc

from ..beat import importing
from ..beat.configured import Read, Refused
from ..beat.importing import OWNER, Imported, import_entries
from ..beat.sync import Outcome, Sync
from .exits import FAILED, USAGE, Failure
from .screen import Column, counted, plural
from .session import Session, command

REFUSED = (Column("name", fold=True), Column("why it is not taken", fold=True))

_dry_run = click.option(
    "--dry-run", is_flag=True, help="Report what would be done, and change nothing."
)


def _load(session: Session) -> None:
    """Load the app as a beat does: its modules add periodic tasks."""
    session.app.loader.import_default_modules()
    session.app.finalize()


@command("""
celery -A shop toc schedule sync --dry-run
celery -A shop toc schedule sync
""")
@_dry_run
def sync(session: Session, dry_run: bool) -> None:
    """Put what the app has in beat_schedule; remove what it has put and is gone.

    Workers do it with toc_beat = True. This command does it at once and in any case, also for a
    release that was taken back. Exit code 1 if an entry cannot be put.
    """
    _load(session)
    process = f"celery toc schedule sync {uuid.uuid4().hex[:8]}"
    one = Sync(session.app, session.center, process)
    outcome = one.plan() if dry_run else one.run(force=True)
    if outcome.told.verdict == "busy":
        raise Failure(
            f"{outcome.told.process} is putting a beat_schedule of this app: try again in "
            f"{outcome.told.busy:.0f} s",
            FAILED,
        )
    if not dry_run and outcome.told.verdict != "in force":
        raise Failure(
            f"{outcome.told.process} has put another beat_schedule of this app meanwhile: see "
            "'celery toc schedule list', and try again",
            FAILED,
        )
    _report_sync(session, outcome, dry_run)


def _report_sync(session: Session, outcome: Outcome, dry_run: bool) -> None:
    if outcome.refused:
        session.exit_code = FAILED
    if session.as_json:
        session.screen.json(
            {
                "dry_run": dry_run,
                "put": outcome.put,
                "removed": outcome.removed,
                "unchanged": outcome.unchanged,
                "refused": _refused(outcome.refused),
            }
        )
        return
    would = "would be " if dry_run else ""
    for name in outcome.put:
        session.screen.say(f"{name}: {would}put")
    for name in outcome.removed:
        session.screen.say(f"{name}: {would}removed")
    parts = [f"{len(outcome.put)} {would}put", f"{len(outcome.removed)} {would}removed"]
    session.screen.say(f"{', '.join(parts)}, {outcome.unchanged} unchanged.")
    _say_refused(session, outcome.refused)


@command("""
celery -A shop toc schedule import django --dry-run
celery -A shop toc schedule import django
celery -A shop toc schedule import redbeat redis://localhost:6379/1
""")
@click.argument("source", type=click.Choice(("django", "redbeat")))
@click.argument("url", metavar="[redis://...]", required=False)
@click.option("--key-prefix", metavar="TEXT", help="redbeat_key_prefix; the app's, or 'redbeat:'.")
@_dry_run
@click.option("--force", is_flag=True, help="Also what others have put under the same names.")
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
    """
    _load(session)
    read = (
        _read_django(session, url)
        if source == "django"
        else _read_redbeat(session, url, key_prefix)
    )
    done = import_entries(
        *(session.app, session.center, read, f"{OWNER}{source}"), dry_run=dry_run, force=force
    )
    _report_import(session, read, done, dry_run)


def _read_django(session: Session, url: str | None) -> Read:
    if url is not None:
        raise Failure(
            "django-celery-beat is read through the app's Django: leave out the URL", USAGE
        )
    try:
        return importing.read_django(importing.django_rows(), session.now)
    except Exception as exc:  # whatever Django and its database raise
        raise Failure(
            f"the tables of django-celery-beat cannot be read: {type(exc).__name__}: {exc}", FAILED
        ) from exc


def _read_redbeat(session: Session, url: str | None, key_prefix: str | None) -> Read:
    from redis import Redis, RedisError

    conf = session.app.conf
    url = url or conf.get("redbeat_redis_url")
    if not url:
        raise Failure("say where redbeat keeps its entries: redis://localhost:6379/1", USAGE)
    prefix = key_prefix or conf.get("redbeat_key_prefix") or importing.REDBEAT_PREFIX
    shown = kombu_toc.mask_password(url)
    try:
        with Redis.from_url(url) as client:
            return importing.read_redbeat(importing.redbeat_definitions(client, prefix))
    except (RedisError, ValueError, OSError) as exc:
        raise Failure(f"redbeat's entries at {shown} cannot be read: {exc}", FAILED) from exc


def _report_import(session: Session, read: Read, done: Imported, dry_run: bool) -> None:
    if done.refused:
        session.exit_code = FAILED
    found = len(read.entries) + len(read.refused)
    if session.as_json:
        session.screen.json(
            {
                "dry_run": dry_run,
                "found": found,
                "put": done.put,
                "unchanged": done.unchanged,
                "paused": done.paused,
                "refused": _refused(done.refused),
            }
        )
        return
    would = "would be " if dry_run else ""
    paused = set(done.paused)
    for name in done.put:
        session.screen.say(f"{name}: {would}put{', paused' if name in paused else ''}")
    session.screen.say(
        f"{counted(found, 'entry')}: {len(done.put)} {would}put, {done.unchanged} unchanged, "
        f"{len(done.refused)} not taken."
    )
    _say_refused(session, done.refused)


def _refused(refused: Iterable[Refused]) -> list[dict[str, Any]]:
    return [one._asdict() for one in refused]


def _say_refused(session: Session, refused: list[Refused]) -> None:
    if refused:
        noun = "entry" if len(refused) == 1 else plural("entry")
        session.screen.say(f"Not taken, {len(refused)} {noun}:", "yellow")
        session.screen.table(REFUSED, refused)
