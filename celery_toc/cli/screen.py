"""What a command prints: with Rich on a terminal, as plain text anywhere else.

Rich is an extra (``celery-toc[cli]``): without it a terminal gets plain text too. Whatever comes
from a message is shown without control characters, for it may have come from anybody.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import click

try:
    import rich.console
    import rich.table
    import rich.text
except ImportError:  # an extra
    rich = None


#: Characters that a column whose text may be broken keeps, where there is room for more or not.
FOLDED = 12


class Column(NamedTuple):
    """A column of a table. On a terminal that is too narrow:

    spare: it is left out, the last one first
    fold: its text is broken into lines
    """

    name: str
    right: bool = False
    fold: bool = False
    spare: bool = False


class Cell(NamedTuple):
    """A value with a style of Rich's, which plain text leaves out."""

    value: Any
    style: str = ""


def clean(text: Any) -> str:
    """A text in which nothing can move the cursor or break a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def _plain(value: Any) -> str:
    if isinstance(value, Cell):
        value = value.value
    return "" if value is None else clean(value)


def _styled(value: Any) -> Any:
    value, style = value if isinstance(value, Cell) else (value, "")
    if value is None:
        return rich.text.Text("-", "dim")
    if isinstance(value, int) and not isinstance(value, bool):
        return rich.text.Text(f"{value:,}", style or ("" if value else "dim"))
    return rich.text.Text(clean(value), style)


def plain_table(columns: Sequence[Column], rows: Iterable[Sequence[Any]]) -> str:
    """Aligned columns, two spaces between them; what is empty shows as ``-``."""
    lines = [[column.name.upper().replace(" ", "_") for column in columns]]
    lines += [[_plain(value) or "-" for value in row] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    )


def rich_table(columns: Sequence[Column], rows: Iterable[Sequence[Any]], width: int) -> Any:
    """The same as a table of Rich's, for a terminal of that width."""
    cells = [[_styled(value) for value in row] for row in rows]
    shown = _fitting(columns, cells, width)
    table = rich.table.Table(
        box=rich.box.SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False
    )
    for column in (columns[at] for at in shown):
        table.add_column(
            column.name,
            justify="right" if column.right else "left",
            no_wrap=not column.fold,
            min_width=FOLDED if column.fold else None,
            overflow="fold",
        )
    for row in cells:
        table.add_row(*(row[at] for at in shown))
    return table


def _fitting(columns: Sequence[Column], cells: Sequence[Sequence[Any]], width: int) -> list[int]:
    """Numbers of the columns for which there is room."""
    needed = [
        min(
            max([len(column.name), *(row[at].cell_len for row in cells)]),
            FOLDED if column.fold else width,
        )
        for at, column in enumerate(columns)
    ]
    shown = list(range(len(columns)))
    for at in reversed(range(len(columns))):
        if sum(needed[at] + 2 for at in shown) <= width:
            break
        if columns[at].spare:
            shown.remove(at)
    return shown


class Screen:
    """Standard output, and how to write to it.

    no_color: as ``celery --no-color``; the environment's NO_COLOR does the same
    console: a console of Rich's to use; otherwise one is made if that is possible and wanted
    """

    def __init__(self, *, no_color: bool = False, console: Any = None) -> None:
        self.console = console
        if console is None and rich is not None and sys.stdout.isatty():
            no_color = no_color or bool(os.environ.get("NO_COLOR"))
            self.console = rich.console.Console(no_color=no_color or None, highlight=False)

    @property
    def is_rich(self) -> bool:
        return self.console is not None

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[Any]]) -> None:
        if self.is_rich:
            self.console.print(rich_table(columns, rows, self.console.width))
        else:
            click.echo(plain_table(columns, rows))

    def fields(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Names and values, one below the other."""
        pairs = [(name, value) for name, value in pairs if value is not None]
        if self.is_rich:
            grid = rich.table.Table.grid(padding=(0, 2))
            grid.add_column(style="bold", no_wrap=True)
            grid.add_column(overflow="fold")
            for name, value in pairs:
                grid.add_row(name, _styled(value))
            self.console.print(grid)
        else:
            width = max(len(name) for name, _ in pairs)
            for name, value in pairs:
                click.echo(f"{name.ljust(width)}  {_plain(value)}")

    def say(self, text: str = "", style: str = "") -> None:
        """A line."""
        if self.is_rich:
            self.console.print(rich.text.Text(clean(text), style), soft_wrap=True)
        else:
            click.echo(clean(text))

    @staticmethod
    def json(document: Any) -> None:
        """One JSON document on a line of its own, in ASCII."""
        click.echo(json.dumps(document, default=str))
