"""Which messages a command is about: ids that were named, or what filters find."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import click

from . import times
from .list import bounds, narrowed
from .message import describe, in_a_line, named
from .session import Renamed, Session, complete_id, queue_option

#: Messages that are read, and then dealt with, together.
STEP = 500

#: Messages that a question names one by one, at most.
SHOWN = 10

#: States of what waits.
WAITING = ("scheduled", "ready")

#: Seconds after a time to which many messages are moved within which they are, for each comes
#: behind the one before.
WIDTH = 0.1


def choosing(function: Any) -> Any:
    """The arguments that say which waiting messages."""
    for option in (
        click.option(
            "--until",
            cls=Renamed,
            formerly=("--before",),
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
    """What was given beside ids."""

    queue: str | None
    task: str | None
    state: str | None
    since: str | None
    until: str | None

    @property
    def any(self) -> bool:
        return any(value is not None for value in self)


def check_usage(ids: tuple[str, ...], filters: Filters) -> bool:
    """Whether ids were named; fails if neither they were nor filters, or both."""
    rest = filters._replace(queue=None)
    if ids and rest.any:
        raise click.UsageError("give ids, or --task, --state, --since and --until, and not both")
    if not ids and not filters.any:
        raise click.UsageError("say which: ids, --queue, --task, --state, --since or --until")
    return bool(ids)


class Many:
    """The waiting messages that filters find."""

    def __init__(self, session: Session, filters: Filters) -> None:
        self._session = session
        self._queue = session.queue(filters.queue)
        self._task = filters.task
        _, self._since, self._until = narrowed(
            session, filters.state, *bounds(session, filters.since, filters.until)
        )
        self.described = _described(session, filters, self._queue)

    def count(self) -> int:
        """How many there are now."""
        center = self._session.center
        if self._task is self._since is self._until is None:
            return center.counts(self._queue).waiting
        return center.count(
            self._queue,
            state="waiting",
            since=self._since,
            until=self._until,
            where=named(self._task),
        )

    def pages(self, skip: Callable[[Any], bool] = lambda found: False) -> Iterator[list[Any]]:
        """All of them, some at a time.

        skip: those to leave out, such as what this very command has moved
        """
        after = None
        while True:
            page = self._session.center.scan(
                self._queue,
                state="waiting",
                since=self._since,
                until=self._until,
                where=named(self._task),
                limit=STEP,
                after=after,
            )
            if found := [one for one in page.messages if not skip(one)]:
                yield found
            after = page.after
            if after is None:
                return


def _described(session: Session, filters: Filters, queue: str | None) -> str:
    """What filters say, for a question: ``of shop.remind in 'mail'``."""
    said = []
    if filters.task:
        said.append(f"of {filters.task}")
    if queue is not None:
        said.append(f"in {queue!r}")
    since, until = bounds(session, filters.since, filters.until)
    if since is not None:
        said.append(f"due from {times.local_iso(since, session.zone)} on")
    if until is not None:
        said.append(f"due before {times.local_iso(until, session.zone)}")
    return "".join(f" {part}" for part in said)


def looked_up(
    session: Session, ids: tuple[str, ...], queue: str | None
) -> tuple[list[Any], list[str]]:
    """What there is of the ids that were named, and the ids of which there is nothing."""
    found = session.center.get(ids, topic=session.queue(queue))
    names = {one.id for one in found} | {one.id.rpartition("#")[0] for one in found}
    return found, [id for id in dict.fromkeys(ids) if id not in names]


def in_order(ids: Iterable[str], done: Iterable[Any]) -> list[Any]:
    """What was done, in the order in which the ids were named."""
    places = {id: at for at, id in enumerate(dict.fromkeys(ids))}

    def place(one: Any) -> int:
        return places.get(one.id, places.get(one.id.rpartition("#")[0], len(places)))

    return sorted(done, key=place)


def show_found(session: Session, found: list[Any]) -> None:
    """What a question is about, a line each."""
    for one in found[:SHOWN]:
        message = describe(session, session.center.task(one))
        session.screen.say(in_a_line(session, message, one.time_us / 1e6))
    if len(found) > SHOWN:
        session.screen.say(f"... and {len(found) - SHOWN:,} more")
