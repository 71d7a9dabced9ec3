"""Options and arguments that several commands share, and their completion."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from datetime import datetime, timezone, tzinfo

import click
from celery.app.utils import find_app
from celery.utils.time import maybe_iso8601

import celery_toc

# -- reads times as people write them, and writes times for people

#: Seconds in each unit that a span may name.
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}

_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d|w)")
_SPAN = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h|d|w))+")


def read_span(text: str) -> float:
    """Read a span in seconds: ``90``, ``1.5``, ``1h30m``, ``2d``, ``500ms``; not negative.

    Raises ValueError, which says what is allowed.
    """
    text = text.strip().lower()
    if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", text):
        return float(text)
    if _SPAN.fullmatch(text):
        return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    raise ValueError(f"{text!r} is not a span of time; write seconds, or 1h30m, 2d, 500ms")


def read_moment(text: str, zone: tzinfo) -> float:
    """Read ISO 8601 as seconds since the epoch; a time without an offset is in `zone`.

    Raises ValueError, which gives an example.
    """
    try:
        moment: datetime | None = maybe_iso8601(text.strip())
        if moment is None:
            raise ValueError
        return (moment if moment.tzinfo else moment.replace(tzinfo=zone)).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is not a time; write it as in ISO 8601, such as 2030-12-24T18:00:00+01:00"
        ) from None


def read_bound(text: str, zone: tzinfo, now: float) -> float:
    """Read a moment, ``now``, or a span before (``-1h``) or after now (``1h``, ``+1h``).

    now: seconds since the epoch

    Returns seconds since the epoch. Raises ValueError if it is none of these.
    """
    stripped = text.strip().lower()
    if stripped == "now":
        return now
    sign, rest = (-1, stripped[1:]) if stripped[:1] == "-" else (1, stripped.removeprefix("+"))
    try:
        return now + sign * read_span(rest)
    except ValueError:
        pass
    try:
        return read_moment(text, zone)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a time; write it as in ISO 8601, such as 2030-12-24T18:00:00+01:00, "
            "or as a span from now, such as 1h30m or -2d"
        ) from None


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
    """A span of time, as `times` reads it."""

    name = "span"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return seconds. Click reports the ValueError of a text that is no span."""
        try:
            return read_span(value)
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
