"""``celery toc top``: what happens now and what comes next, again and again."""

from __future__ import annotations

import itertools
import os
import select
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import click
import redis

import kombu_toc

from . import times
from .exits import Command
from .screen import Column, ansi_table, clean, plain_table, styled
from .session import SPAN, Session, counted, queues_argument, with_session
from .status import COLUMNS as STATUS_COLUMNS
from .status import line, server_of, survey, title

#: What is counted a second.
RATES = ("put", "delivered", "acked", "dead")

#: Of a table of `status`, what is left out here.
_LEFT_OUT = ("slots", "memory")

COLUMNS = (
    *(column for column in STATUS_COLUMNS if column.name not in _LEFT_OUT),
    *(
        Column(f"{name}/s", right=True, spare=spare)
        for name, spare in zip(RATES, (2, 1, 4, 7), strict=True)
    ),
)

#: What a server that is away for a while may cause: the next look may find it there.
AWAY = (redis.RedisError, kombu_toc.TocError, OSError)

#: Seconds between two looks at the keys and at the size of the terminal.
BLINK = 0.25

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
@queues_argument
@click.option(
    "--interval", "-i", type=SPAN, default="1", show_default=True, help="Time between two looks."
)
@click.option(
    "--span", type=SPAN, default="10m", show_default=True, help="How far the time line reaches."
)
@click.option("--count", "-c", type=click.IntRange(1), help="Look so often, and end.")
@with_session
def top(
    session: Session, queues: tuple[str, ...], interval: float, span: float, count: int | None
) -> None:
    """A live view: what each queue holds, rates, lateness, and a time line of what comes due.

    q ends it, and so does Ctrl-C. Without a terminal, a line for each queue and look; with --json,
    a JSON document for each look. While Redis is away it shows that, and goes on trying.
    """
    if not span:
        raise click.UsageError("--span must be more than 0")
    looks = _Looks(session, queues, span)
    show = _live if session.screen.is_live and not session.as_json else _lines
    try:
        show(session, looks, max(interval, 0.1), count)
    except KeyboardInterrupt:
        pass  # that is how it ends


class _Looks:
    """One look after another; what came about between them gives the rates."""

    def __init__(self, session: Session, queues: Sequence[str], span: float) -> None:
        self._session = session
        self._queues = queues
        self._span = span
        #: Redis's clock at the latest
        self.now = 0.0
        #: what the last look found
        self.latest: dict[str, Any] = {}
        #: why the server cannot be asked, and monotonic seconds since when
        self.away: Exception | None = None
        self._away_since = 0.0
        self._samples: deque[tuple[float, dict[str, dict[str, int]]]] = deque()

    def try_to_look(self) -> bool:
        """Look; False if the server is away. It must have been there once."""
        try:
            self.latest = self.look()
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
        """What is told while the server is away."""
        if self.away is None:
            return ""
        said = " ".join(str(self.away).split()) or type(self.away).__name__
        gone = times.span(time.monotonic() - self._away_since)
        return f"Redis has been away for {gone}, trying again: {said}"

    def look(self) -> dict[str, Any]:
        """What there is now, as in JSON."""
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
            "time": times.iso(now),
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
        if seconds < ENOUGH or first is None:
            return measured.rate(counter)
        return max(measured.totals[counter] - first[counter], 0) / seconds

    def _coming(self, queues: Sequence[str]) -> list[int]:
        """How many messages come due in each part of the span."""
        edges = [self._span * number / WIDTH for number in range(WIDTH + 1)]
        due = [self._session.center.coming(name, edges) for name in queues]
        by = [sum(column) for column in zip(*due, strict=True)] or [0] * (WIDTH + 1)
        return [later - sooner for sooner, later in itertools.pairwise(by)]


def _row(row: dict[str, Any]) -> list[Any]:
    cells = [
        cell
        for cell, column in zip(line(row), STATUS_COLUMNS, strict=True)
        if column.name not in _LEFT_OUT
    ]
    return [*cells, *(_rate(row["per_second"][name]) for name in RATES)]


def _rate(number: float | None) -> str | None:
    if number is None:
        return None
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def _lines(session: Session, looks: _Looks, interval: float, count: int | None) -> None:
    """Each look below the one before."""
    columns = (Column("time"), *COLUMNS)
    told = False
    for number in itertools.count() if count is None else range(count):
        if number:
            time.sleep(interval)
        if not looks.try_to_look():
            if not told:
                click.echo(clean(looks.trouble), err=True)
            told = True
            continue
        if told:
            click.echo("Redis is back.", err=True)
            told = False
        look = looks.latest
        if session.as_json:
            session.screen.json(look)
            continue
        at = look["time"].partition("T")[2]
        rows = [[at, *_row(row)] for row in look["topics"]]
        heading, *lines = plain_table(columns, rows).splitlines()
        for text in lines if number else (heading, *lines):
            session.screen.say(text)


def _live(session: Session, looks: _Looks, interval: float, count: int | None) -> None:
    """Each look in place of the one before, until q is typed."""
    looks.try_to_look()  # before the screen is taken: whoever cannot look says why
    heading = title(session, server_of(session))
    with _Terminal(alternate=count is None) as terminal:
        for number in itertools.count() if count is None else range(count):
            if number:
                looks.try_to_look()

            def draw() -> list[str]:
                size = shutil.get_terminal_size()
                at = times.local(looks.now, session.zone)[11:]
                return view(
                    f"{heading}  {at}",
                    looks.latest,
                    size.columns,
                    size.lines - (count is not None),  # the cursor's own
                    trouble=looks.trouble,
                    colors=session.screen.colors,
                    blocks=terminal.blocks,
                )

            terminal.show(draw())
            last = count is not None and number == count - 1
            if not last and terminal.wait(interval, draw):
                return


class _Terminal:
    """The terminal that standard output is, to be drawn on.

    alternate: leave what is on it as it is, and show it again at the end
    """

    def __init__(self, *, alternate: bool) -> None:
        self._alternate = alternate
        self._height = 0
        self._typed: Any = None
        self._signal: Any = None
        #: whether it can show block characters
        self.blocks = (sys.stdout.encoding or "").lower().startswith("utf")

    def __enter__(self) -> _Terminal:
        try:
            import termios
            import tty

            if sys.stdin.isatty():
                self._typed = termios.tcgetattr(sys.stdin)
                tty.setcbreak(sys.stdin, termios.TCSADRAIN)
        except (ImportError, OSError, termios.error):  # nothing can be typed
            self._typed = None
        # Whoever ends it otherwise finds the terminal as it was, too.
        self._signal = signal.signal(signal.SIGTERM, _end)
        self._write("\x1b[?1049h\x1b[?25l" if self._alternate else "\x1b[?25l")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._write("\x1b[?1049l\x1b[?25h" if self._alternate else "\x1b[?25h")
        signal.signal(signal.SIGTERM, self._signal)
        if self._typed is not None:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._typed)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def show(self, lines: Sequence[str]) -> None:
        """Draw this in place of what was drawn last."""
        if self._alternate:
            text = "\x1b[H" + "\n".join(f"\x1b[2K{one}" for one in lines) + "\x1b[J"
        else:
            up = f"\x1b[{self._height}F" if self._height else ""
            text = f"{up}\x1b[J" + "".join(f"{one}\n" for one in lines)
        self._height = len(lines)
        self._write(text)

    def wait(self, seconds: float, draw: Any) -> bool:
        """Whether q is typed within that time. Draws anew when the terminal changes its size."""
        until, size = time.monotonic() + seconds, shutil.get_terminal_size()
        while (left := until - time.monotonic()) > 0:
            if self._typed is None:
                time.sleep(min(left, BLINK))
            elif select.select([sys.stdin], [], [], min(left, BLINK))[0]:
                typed = os.read(sys.stdin.fileno(), 64)
                if not typed or b"q" in typed.lower():
                    return True
            if size != (size := shutil.get_terminal_size()):
                self.show(draw())
        return False


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def view(
    heading: str,
    look: dict[str, Any],
    width: int,
    height: int,
    *,
    trouble: str = "",
    colors: bool = True,
    blocks: bool = True,
) -> list[str]:
    """The lines that show a look, on so many columns and lines.

    trouble: why it is not a new one
    blocks: whether there are block characters
    """
    coming = look["coming"]
    span, due = coming["span_seconds"], coming["due"]
    lines = [styled(clean(heading)[:width], "bold", colors)]
    if trouble:
        lines.append(styled(clean(trouble)[:width], "red", colors))
    comes = (
        f"coming due  {sum(due):,} within {times.span(span)}, at most {max(due):,} in "
        f"{times.span(span / len(due))}"
    )
    chart = [
        "",
        comes[:width],
        *(styled(bar[:width], "cyan", colors) for bar in bars(due, HEIGHT, blocks=blocks)),
        styled(_axis(span)[:width], "dim", colors),
    ]
    rows = look["topics"]
    table, *drawn = ansi_table(COLUMNS, [_row(row) for row in rows], width, colors=colors)
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
    """Of the lines of rows, those for which there is room, in their order."""

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
    """A bar for each number, as lines of text from the top; what is not 0 is seen."""
    most = max(max(numbers), 1)
    characters = _EIGHTHS if blocks else " ....####"
    eighths = [-(-number * height * 8 // most) for number in numbers]
    return [
        "".join(characters[min(max(eighth - 8 * row, 0), 8)] for eighth in eighths)
        for row in reversed(range(height))
    ]


def _axis(span: float) -> str:
    """The times below the bars, four of them."""
    part = WIDTH // 4
    marks = [f"+{times.span(span * number / 4)}" if number else "now" for number in range(4)]
    return "".join(mark.ljust(part) for mark in marks)
