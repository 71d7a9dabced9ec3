"""What ``celery toc top`` draws: a table of queues, and a chart of what comes due."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from . import times
from .screen import Column, ansi_table, clean, styled
from .status import COLUMNS as STATUS_COLUMNS
from .status import line
from .wording import counted

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
    rows = snapshot["topics"]
    table, *drawn = ansi_table(COLUMNS, [cells(row) for row in rows], width, colors=colors)
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


def _axis(span: float) -> str:
    """Four times, below the bars."""
    part = WIDTH // 4
    marks = [f"+{times.span(span * number / 4)}" if number else "now" for number in range(4)]
    return "".join(mark.ljust(part) for mark in marks)
