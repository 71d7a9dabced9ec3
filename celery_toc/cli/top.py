"""``celery toc top``: what happens now and what comes next, again and again."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import click

import kombu_toc

from . import times
from .ends import Command
from .screen import Column, plain_table, rich_table
from .session import SPAN, Session, complete_topic, with_session
from .status import COLUMNS as STATUS_COLUMNS
from .status import line, server_of, survey, title

#: What is counted a second.
RATES = ("put", "delivered", "acked", "dead")

COLUMNS = (
    *(column for column in STATUS_COLUMNS if column.name != "slots"),
    *(Column(f"{name}/s", right=True, spare=name in ("acked", "dead")) for name in RATES),
)

#: Columns and rows of the time line.
WIDTH, HEIGHT = 60, 5

#: Seconds over which a rate is taken, at least and at most: processes tell what they have counted
#: every five. Until there are so many, a rate is that of the last minute or two.
ENOUGH, WINDOW = 15.0, 30.0

_EIGHTHS = " ▁▂▃▄▅▆▇█"


@click.command(
    cls=Command,
    example="""
celery -A shop toc top
celery -A shop toc top mail --span 1h --interval 2
celery -A shop toc top --count 10 --json
""",
)
@click.argument("topics", nargs=-1, metavar="[TOPIC]...", shell_complete=complete_topic)
@click.option(
    "--interval", "-i", type=SPAN, default="1", show_default=True, help="Time between two looks."
)
@click.option(
    "--span", type=SPAN, default="10m", show_default=True, help="How far the time line reaches."
)
@click.option("--count", "-c", type=click.IntRange(1), help="Look so often, and end.")
@with_session
def top(
    session: Session, topics: tuple[str, ...], interval: float, span: float, count: int | None
) -> None:
    """A live view: what each topic holds, rates, lateness, and a time line of what comes due.

    Ctrl-C ends it. Without a terminal, or without Rich, a line for each look; with --json, a JSON
    document for each.
    """
    if not span:
        raise click.UsageError("--span must be more than 0")
    looks = _Looks(session, topics, span)
    show = _live if session.screen.is_rich and not session.as_json else _lines
    try:
        show(session, looks, max(interval, 0.1), count)
    except KeyboardInterrupt:
        pass  # that is how it ends


class _Looks:
    """One look after another; what came about between them gives the rates."""

    def __init__(self, session: Session, topics: Sequence[str], span: float) -> None:
        self._session = session
        self._topics = topics
        self._span = span
        self._samples: deque[tuple[float, dict[str, dict[str, int]]]] = deque()

    def look(self) -> dict[str, Any]:
        """What there is now, as in JSON."""
        session = self._session
        seconds, microseconds = session.center.client.time()
        now = seconds + microseconds / 1e6
        rows = survey(session, self._topics)
        names = [row["topic"] for row in rows]
        measured = kombu_toc.read_metrics(session.center, names, minutes=1)
        self._samples.append((now, {name: found.totals for name, found in measured.items()}))
        while len(self._samples) > 2 and self._samples[1][0] <= now - WINDOW:
            self._samples.popleft()
        for row in rows:
            found = measured.get(row["topic"])
            row["per_second"] = {name: found and self._rate(found, name) for name in RATES}
        return {
            "time": times.iso(now),
            "topics": rows,
            "coming": {
                "span_seconds": self._span,
                "due": self._coming([row["topic"] for row in rows if row["scheduled"]]),
            },
        }

    def _rate(self, measured: kombu_toc.Measured, counter: str) -> float:
        began, before = self._samples[0]
        seconds = self._samples[-1][0] - began
        first = before.get(measured.topic)
        if seconds < ENOUGH or first is None:
            return measured.rate(counter)
        return max(measured.totals[counter] - first[counter], 0) / seconds

    def _coming(self, topics: Sequence[str]) -> list[int]:
        """How many messages come due in each part of the span."""
        edges = [self._span * number / WIDTH for number in range(WIDTH + 1)]
        due = [self._session.center.coming(name, edges) for name in topics]
        by = [sum(column) for column in zip(*due, strict=True)] or [0] * (WIDTH + 1)
        return [later - sooner for sooner, later in itertools.pairwise(by)]


def _row(row: dict[str, Any]) -> list[Any]:
    cells = line(row)
    del cells[1]  # slots
    return [*cells, *(_rate(row["per_second"][name]) for name in RATES)]


def _rate(number: float | None) -> str | None:
    if number is None:
        return None
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def _lines(session: Session, looks: _Looks, interval: float, count: int | None) -> None:
    """Each look below the one before."""
    columns = (Column("time"), *COLUMNS)
    for number in itertools.count() if count is None else range(count):
        if number:
            time.sleep(interval)
        look = looks.look()
        if session.as_json:
            session.screen.json(look)
            continue
        at = look["time"].partition("T")[2]
        rows = [[at, *_row(row)] for row in look["topics"]]
        heading, *lines = plain_table(columns, rows).splitlines()
        for text in lines if number else (heading, *lines):
            session.screen.say(text)


def _live(session: Session, looks: _Looks, interval: float, count: int | None) -> None:
    """Each look in place of the one before."""
    from rich.live import Live

    heading = title(session, server_of(session))
    console = session.screen.console
    with Live(console=console, screen=count is None, auto_refresh=False) as live:
        for number in itertools.count() if count is None else range(count):
            if number:
                time.sleep(interval)
            live.update(view(heading, looks.look(), console.width), refresh=True)


def view(heading: str, look: dict[str, Any], width: int) -> Any:
    """A look as Rich shows it, on so many columns."""
    from rich.console import Group
    from rich.text import Text

    at = look["time"].partition("T")[2]
    coming = look["coming"]
    span, due = coming["span_seconds"], coming["due"]
    chart = Text("\n".join(bars(due, HEIGHT)), "cyan", no_wrap=True)
    return Group(
        Text.assemble((heading, "bold"), f"  {at}", no_wrap=True, overflow="ellipsis"),
        rich_table(COLUMNS, [_row(row) for row in look["topics"]], width),
        Text.assemble(
            ("coming due", "bold"),
            f"  {sum(due):,} within {times.span(span)}, at most {max(due):,} in "
            f"{times.span(span / len(due))}",
            no_wrap=True,
        ),
        chart,
        Text(_axis(span), "dim", no_wrap=True),
    )


def bars(numbers: Sequence[int], height: int) -> list[str]:
    """A bar for each number, as lines of text from the top; what is not 0 is seen."""
    most = max(max(numbers), 1)
    eighths = [-(-number * height * 8 // most) for number in numbers]
    return [
        "".join(_EIGHTHS[min(max(eighth - 8 * row, 0), 8)] for eighth in eighths)
        for row in reversed(range(height))
    ]


def _axis(span: float) -> str:
    """The times below the bars, four of them."""
    part = WIDTH // 4
    marks = [f"+{times.span(span * number / 4)}" if number else "now" for number in range(4)]
    return "".join(mark.ljust(part) for mark in marks)
