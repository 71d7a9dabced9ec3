"""Selects the messages of a command: by ids, or by filters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import click

from kombu_toc import Found

from . import options
from .messages import bounds, describe, in_a_line, named, narrowed
from .options import complete_id, queue_option
from .session import Session

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


def selection_options(function: Any) -> Any:
    """Give a command the arguments and options that select waiting messages."""
    for option in (
        click.option(
            "--until",
            metavar="TIME",
            help="Only those that are due before that time.",
        ),
        click.option(
            "--since",
            metavar="TIME",
            help="Only those that are due from that time on: ISO 8601, or a span such as 1h30m.",
        ),
        click.option("--state", "-s", type=click.Choice(WAITING), help="Only in this state."),
        click.option("--task", metavar="NAME", help="Only tasks of that name; * and ? match any."),
        queue_option,
        click.argument("ids", nargs=-1, metavar="[ID]...", shell_complete=complete_id),
    ):
        function = option(function)
    return function


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
        _, self._since, self._until = narrowed(
            session, filters.state, *bounds(session, filters.since, filters.until)
        )
        self.described = _described(session, filters, self._queue)

    def count(self) -> int:
        """How many messages match now."""
        center, ask = self._session.center, self._session.ask
        no_filters = (self._task, self._since, self._until) == (None, None, None)
        if no_filters and self._queue is not None:
            return ask(center.counts, self._queue).waiting
        return ask(
            center.count,
            self._queue,
            state="waiting",
            since=self._since,
            until=self._until,
            where=named(self._task),
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
                where=named(self._task),
                limit=PAGE,
                after=after,
            )
            if found := [one for one in page.messages if not skip(one)]:
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
    since, until = bounds(session, filters.since, filters.until)
    if since is not None:
        said.append(f"due from {options.local_iso(since, session.zone)} on")
    if until is not None:
        said.append(f"due before {options.local_iso(until, session.zone)}")
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
        message = describe(session, session.center.task(one))
        session.screen.say(in_a_line(session, message, one.time_us / 1e6))
    if len(found) > MAX_LISTED:
        session.screen.say(f"... and {len(found) - MAX_LISTED:,} more")
