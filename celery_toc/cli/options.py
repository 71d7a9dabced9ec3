"""Options and arguments that several commands share, and their completion."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import datetime, timezone, tzinfo

import click
from celery.app.utils import find_app

import celery_toc
import kombu_toc

# -- times for people and for JSON


def iso(seconds: float) -> str:
    """ISO 8601 in UTC, to the millisecond: the form of every time in JSON."""
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def iso_us(us: int) -> str | None:
    """The same of microseconds; None of 0, which is no time."""
    return iso(us / 1e6) if us else None


def local(seconds: float, zone: tzinfo) -> str:
    """``2030-12-24 18:00:00`` in a time zone, for people."""
    return datetime.fromtimestamp(seconds, zone).strftime("%Y-%m-%d %H:%M:%S")


def local_iso(seconds: float, zone: tzinfo) -> str:
    """ISO 8601 in a time zone, with its offset from UTC, to the second."""
    return datetime.fromtimestamp(seconds, zone).isoformat(timespec="seconds")


def span(seconds: float) -> str:
    """A span of time in at most two units: ``350ms``, ``12s``, ``2h05m``, ``3d04h``."""
    if seconds < 0.9995:
        return f"{round(seconds * 1000)}ms"
    whole = round(seconds)
    if whole < 10:
        return f"{seconds:.1f}s"
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def milliseconds(seconds: float) -> str:
    """A span; below ten milliseconds to the tenth of one: ``1.3ms``."""
    return f"{seconds * 1000:.1f}ms" if seconds < 0.00995 else span(seconds)


def distance(seconds: float) -> str:
    """A span from now: ``in 2h05m``, ``12s ago``."""
    return f"in {span(seconds)}" if seconds >= 0 else f"{span(-seconds)} ago"


# -- options and arguments that several commands share, and their completion

#: Ids that completion reads at most: it must answer while somebody holds the Tab key.
MAX_COMPLETED = 100


class _Span(click.ParamType):  # type: ignore[type-arg]  # Click's is generic from 8.5 on
    """A span of time."""

    name = "span"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return seconds. Click reports the ValueError of a text that is no span."""
        try:
            return kombu_toc.read_span(value)
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


#: A span of time, in seconds.
SPAN = _Span()


# -- completion: it never raises, and never takes long


def _completing(ctx: click.Context) -> celery_toc.TaskCenter:
    """The center, before any command has run: only the words typed so far are known."""
    params = ctx.find_root().params
    app = params.get("app")
    if params.get("broker"):
        os.environ["CELERY_BROKER_URL"] = params["broker"]
    app = find_app(app) if isinstance(app, str) else app
    if app is None:
        from celery import current_app

        app = current_app._get_current_object()
    return celery_toc.timeout_center(app, socket_connect_timeout=0.3, socket_timeout=0.5)


def _silently(names: Callable[[click.Context, str], Iterable[str]]) -> Callable[..., list[str]]:
    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        try:
            return [name for name in names(ctx, incomplete) if name.startswith(incomplete)]
        except Exception:  # a shell that completes a word has no place for an error
            return []

    return complete


@_silently
def complete_queue(ctx: click.Context, incomplete: str) -> Iterable[str]:
    """The names of all queues."""
    return _completing(ctx).queues.names()


@_silently
def complete_id(ctx: click.Context, incomplete: str) -> Iterable[str]:
    """The ids of the messages that are due next."""
    page = _completing(ctx).scan(ctx.params.get("queue"), limit=MAX_COMPLETED)
    return [found.id for found in page.messages]


@_silently
def complete_dead_id(ctx: click.Context, incomplete: str) -> Iterable[str]:
    """The ids of dead messages."""
    page = _completing(ctx).scan(ctx.params.get("queue"), state="dead", limit=MAX_COMPLETED)
    return [found.id for found in page.messages]


@_silently
def complete_schedule(ctx: click.Context, incomplete: str) -> Iterable[str]:
    """The names of the schedules that fire next."""
    return [
        schedule.name for schedule in _completing(ctx).schedules.list(limit=MAX_COMPLETED).schedules
    ]


queue_option = click.option(
    "--queue",
    "-Q",
    "queue",
    metavar="NAME",
    shell_complete=complete_queue,
    help="Only in this queue.",
)
queues_argument = click.argument(
    "queues", nargs=-1, metavar="[QUEUE]...", shell_complete=complete_queue
)
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
