"""Options and arguments that several commands share, and their completion."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import click
from celery.app.utils import find_app

import celery_toc

from . import times

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
            return times.read_span(value)
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
    return _completing(ctx).topics()


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
    return [one.name for one in _completing(ctx).schedules.list(limit=MAX_COMPLETED).schedules]


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
