"""``celery toc top``: a live view of what happens now and what comes due."""

from __future__ import annotations

import itertools
import shutil
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import click
import redis

import kombu_toc

from .screen import Column, Terminal, clean, counted, drawn_table, fitted, plain_table, styled
from .session import SPAN, Session, command, iso, local, queues_argument, span
from .status import COLUMNS as STATUS_COLUMNS
from .status import line, server_of, survey, title

# -- what celery toc top draws

#: Counters that are shown as rates per second.
RATES = ("put", "delivered", "acked", "dead")

#: Columns of `status` that are left out here.
_LEFT_OUT = ("slots", "memory")

COLUMNS = (
    *(column for column in STATUS_COLUMNS if column.name not in _LEFT_OUT),
    *(
        Column(f"{name}/s", right=True, spare=spare)
        for name, spare in zip(RATES, (2, 1, 4, 7), strict=True)
    ),
)

#: Bars of the chart, and its height in lines.
WIDTH, HEIGHT = 60, 5

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def cells(row: dict[str, Any]) -> list[Any]:
    """A row of the table."""
    kept = [
        cell
        for cell, column in zip(line(row), STATUS_COLUMNS, strict=True)
        if column.name not in _LEFT_OUT
    ]
    return [*kept, *(_rate(row["per_second"][name]) for name in RATES)]


def _rate(number: float | None) -> str | None:
    if number is None:
        return None
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def view(
    heading: str,
    snapshot: dict[str, Any],
    width: int,
    height: int,
    *,
    trouble: str = "",
    colors: bool = True,
    blocks: bool = True,
) -> list[str]:
    """Draw a snapshot, in at most so many columns and lines.

    snapshot: as ``top --json`` prints it
    trouble: why it is not up to date
    blocks: whether the terminal has block characters
    """
    coming = snapshot["coming"]
    ahead, due = coming["span_seconds"], coming["due"]
    lines = [styled(clean(heading)[:width], "bold", colors)]
    if trouble:
        lines.append(styled(clean(trouble)[:width], "red", colors))
    comes = (
        f"coming due  {sum(due):,} within {span(ahead)}, at most {max(due):,} in "
        f"{span(ahead / len(due))}"
    )
    chart = [
        "",
        comes[:width],
        *(styled(bar[:width], "cyan", colors) for bar in bars(due, HEIGHT, blocks=blocks)),
        styled(_axis(ahead)[:width], "dim", colors),
    ]
    rows = snapshot["topics"]
    fitting = fitted(COLUMNS, [cells(row) for row in rows], width)
    table, *drawn = drawn_table(fitting, colors=colors)
    room = height - len(lines) - len(table)
    if sum(map(len, drawn)) > room - len(chart) and room - len(chart) < 4:
        chart = []
    room -= len(chart)
    if sum(map(len, drawn)) > room:
        drawn = _liveliest(rows, drawn, room - 1)
        left = len(rows) - len(drawn)
        drawn.append([f"... and {counted(left, 'queue')} with less to do"[:width]])
    return [*lines, *table, *itertools.chain(*drawn), *chart]


def _liveliest(
    rows: Sequence[dict[str, Any]], drawn: Sequence[list[str]], room: int
) -> list[list[str]]:
    """The lines of the queues with the most to do, as many as there is room for, in their order."""

    def liveliness(at: int) -> tuple[float, ...]:
        row = rows[at]
        rates = row["per_second"]
        return (
            -(row["ready"] + row["in_flight"]),
            -(rates["delivered"] or 0) - (rates["put"] or 0),
            -row["scheduled"],
            at,
        )

    kept = []
    for at in sorted(range(len(rows)), key=liveliness):
        room -= len(drawn[at])
        if room < 0:
            break
        kept.append(at)
    return [drawn[at] for at in sorted(kept)]


def bars(numbers: Sequence[int], height: int, *, blocks: bool = True) -> list[str]:
    """A bar for each number, as lines of text from the top; a number above 0 is always visible."""
    most = max(max(numbers), 1)
    characters = _EIGHTHS if blocks else " ....####"
    eighths = [-(-number * height * 8 // most) for number in numbers]
    return [
        "".join(characters[min(max(eighth - 8 * row, 0), 8)] for eighth in eighths)
        for row in reversed(range(height))
    ]


def _axis(ahead: float) -> str:
    """Four times, below the bars."""
    part = WIDTH // 4
    marks = [f"+{span(ahead * number / 4)}" if number else "now" for number in range(4)]
    return "".join(mark.ljust(part) for mark in marks)


# -- celery toc top

#: Errors of a server that is away for a while: the next snapshot may succeed.
AWAY = (redis.RedisError, kombu_toc.TocError, OSError)

#: Seconds over which a rate is taken, at least and at most: processes send their counters every
#: five seconds. Until then, a rate is that of the last minute or two.
MIN_WINDOW, WINDOW = 15.0, 30.0


@command("""
celery -A shop toc top
celery -A shop toc top mail --span 1h --interval 2
celery -A shop toc top --count 10 --json
""")
@queues_argument
@click.option(
    "--interval",
    "-i",
    type=SPAN,
    default="1",
    show_default=True,
    help="Time between two looks.",
)
@click.option(
    "--span", type=SPAN, default="10m", show_default=True, help="How far the time line reaches."
)
@click.option("--count", "-c", type=click.IntRange(1), help="End after so many looks.")
def top(
    session: Session, queues: tuple[str, ...], interval: float, span: float, count: int | None
) -> None:
    """A live view: what each queue holds, rates, lateness, and a time line of what comes due.

    q or Ctrl-C ends it. Without a terminal it prints a line for each queue and look; with --json,
    a JSON document for each look. While Redis is away it says so, and keeps trying.
    """
    if not span:
        raise click.UsageError("--span must be more than 0")
    snapshots = _Snapshots(session, queues, span)
    show = _live if session.screen.is_terminal and not session.as_json else _lines
    try:
        show(session, snapshots, max(interval, 0.1), count)
    except KeyboardInterrupt:
        pass  # the way to end it


class _Snapshots:
    """Takes snapshots of the queues; rates are the difference between two of them."""

    def __init__(self, session: Session, queues: Sequence[str], span: float) -> None:
        self._session = session
        self._queues = queues
        self._span = span
        #: Redis's clock at the last snapshot
        self.now = 0.0
        #: the last snapshot
        self.latest: dict[str, Any] = {}
        #: why the server does not answer; it is None while it does
        self.away: Exception | None = None
        #: monotonic seconds
        self._away_since = 0.0
        self._samples: deque[tuple[float, dict[str, dict[str, int]]]] = deque()

    def try_to_take(self) -> bool:
        """Take a snapshot; return False if the server is away. The first one must succeed."""
        try:
            self.latest = self._take()
        except AWAY as exc:
            if not self.latest:
                raise
            if self.away is None:
                self._away_since = time.monotonic()
            self.away = exc
            return False
        self.away = None
        return True

    @property
    def trouble(self) -> str:
        """The line that says that the server is away; empty while it answers."""
        if self.away is None:
            return ""
        said = " ".join(str(self.away).split()) or type(self.away).__name__
        gone = span(time.monotonic() - self._away_since)
        return f"Redis has been away for {gone}, trying again: {said}"

    def _take(self) -> dict[str, Any]:
        """A new snapshot, as in JSON."""
        session = self._session
        seconds, microseconds = session.center.client.time()
        self.now = now = seconds + microseconds / 1e6
        rows = survey(session, self._queues)
        names = [row["queue"] for row in rows]
        measured = kombu_toc.read_metrics(session.center, names, minutes=1)
        self._samples.append((now, {name: found.totals for name, found in measured.items()}))
        while len(self._samples) > 2 and self._samples[1][0] <= now - WINDOW:
            self._samples.popleft()
        for row in rows:
            found = measured.get(row["queue"])
            row["per_second"] = {name: found and self._rate(found, name) for name in RATES}
        return {
            "time": iso(now),
            "topics": rows,
            "coming": {
                "span_seconds": self._span,
                "due": self._coming([row["queue"] for row in rows if row["scheduled"]]),
            },
        }

    def _rate(self, measured: kombu_toc.Measured, counter: str) -> float:
        began, before = self._samples[0]
        seconds = self._samples[-1][0] - began
        first = before.get(measured.topic)
        if seconds < MIN_WINDOW or first is None:
            return measured.rate(counter)
        return max(measured.totals[counter] - first[counter], 0) / seconds

    def _coming(self, queues: Sequence[str]) -> list[int]:
        """How many messages come due in each part of the span."""
        edges = [self._span * number / WIDTH for number in range(WIDTH + 1)]
        due = [self._session.center.queues.coming(name, edges) for name in queues]
        by = [sum(column) for column in zip(*due, strict=True)] or [0] * (WIDTH + 1)
        return [later - sooner for sooner, later in itertools.pairwise(by)]


def _lines(session: Session, snapshots: _Snapshots, interval: float, count: int | None) -> None:
    """Print each snapshot below the one before."""
    columns = (Column("time"), *COLUMNS)
    reported = False
    for number in itertools.count() if count is None else range(count):
        if number:
            time.sleep(interval)
        if not snapshots.try_to_take():
            if not reported:
                click.echo(clean(snapshots.trouble), err=True)
            reported = True
            continue
        if reported:
            click.echo("Redis is back.", err=True)
            reported = False
        snapshot = snapshots.latest
        if session.as_json:
            session.screen.json(snapshot)
            continue
        at = snapshot["time"].partition("T")[2]
        rows = [[at, *cells(row)] for row in snapshot["topics"]]
        heading, *lines = plain_table(columns, rows).splitlines()
        for text in lines if number else (heading, *lines):
            session.screen.say(text)


def _live(session: Session, snapshots: _Snapshots, interval: float, count: int | None) -> None:
    """Draw each snapshot in place of the one before, until q is typed."""
    snapshots.try_to_take()  # before the screen changes: if this fails, the error is seen
    heading = title(session, server_of(session))
    with Terminal(alternate=count is None) as terminal:
        for number in itertools.count() if count is None else range(count):
            if number:
                snapshots.try_to_take()

            def draw() -> list[str]:
                size = shutil.get_terminal_size()
                at = local(snapshots.now, session.zone)[11:]
                return view(
                    f"{heading}  {at}",
                    snapshots.latest,
                    size.columns,
                    size.lines - (count is not None),  # the cursor's own
                    trouble=snapshots.trouble,
                    colors=session.screen.colors,
                    blocks=terminal.blocks,
                )

            terminal.show(draw())
            last = count is not None and number == count - 1
            if not last and terminal.wait(interval, draw):
                return
