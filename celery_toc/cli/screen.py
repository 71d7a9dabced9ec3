"""The output of a command: for people on a terminal, and plain text anywhere else."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import signal
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import click

T = TypeVar("T")

# -- tables, fields and lines
#
# Text that comes from a message is shown without control characters: anybody may have sent it.

#: Minimum width of a column whose text may be folded; and if the terminal is narrower than that.
FOLDED, NARROWEST = 12, 5

#: Numbers from this one on are shortened if there is no room for them: 1.2M.
LONG = 10_000

#: Styles, and their codes on a terminal.
_SGR = {"bold": 1, "dim": 2, "red": 31, "yellow": 33, "cyan": 36}


class Column(NamedTuple):
    """A column of a table, and what becomes of it on a terminal that is too narrow.

    right: numbers are aligned to the right
    fold: its text is folded into several lines
    spare: it is left out, the highest number first and of equal ones the last; 0: never
    """

    name: str
    right: bool = False
    fold: bool = False
    spare: int = 0


class Cell(NamedTuple):
    """A value with a style, which plain text ignores."""

    value: Any
    style: str = ""


#: The values of a row in the order of the columns; or by their names, with ``_`` for a space.
Row = Sequence[Any] | Mapping[str, Any]


def _values(columns: Iterable[Column], row: Row) -> Sequence[Any]:
    if isinstance(row, Mapping):
        return [row[column.name.replace(" ", "_")] for column in columns]
    return row


def clean(text: Any) -> str:
    """A text whose control characters are escaped: it cannot move the cursor or break a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def _plain(value: Any) -> str:
    if isinstance(value, Cell):
        value = value.value
    return "" if value is None else clean(value)


def _short(number: int) -> str:
    """A large number in at most five characters: ``1.2M``."""
    return scaled(number, ("", "k", "M", "G", "T"), 99.95)


def scaled(number: float, units: Sequence[str], whole: float) -> str:
    """A number in the unit that fits; below `whole` with one digit after the point."""
    left = list(units)
    while number >= 999.5 and len(left) > 1:
        number /= 1000
        del left[0]
    digits = 0 if number >= whole or len(left) == len(units) else 1
    return f"{number:.{digits}f}{left[0]}"


def _shown(value: Any, *, short: bool = False) -> tuple[str, str]:
    """A value's text and its style, as a terminal shows it."""
    value, style = value if isinstance(value, Cell) else (value, "")
    if value is None:
        return "-", "dim"
    if isinstance(value, int) and not isinstance(value, bool):
        text = _short(value) if short and value >= LONG else f"{value:,}"
        return text, style or ("" if value else "dim")
    return clean(value), style


def _cells(text: str) -> int:
    """The width of a text on a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


class Fitted(NamedTuple):
    """A table for a terminal of some width."""

    columns: list[Column]
    widths: list[int]
    rows: list[list[tuple[str, str]]]  #: text and style


def fitted(columns: Sequence[Column], rows: Iterable[Row], width: int) -> Fitted:
    """Fit a table to the width of a terminal. Nothing is cut off: columns that can be spared are
    left out, then long numbers are shortened, and long texts are folded into lines."""
    values = [_values(columns, row) for row in rows]

    def measured(short: bool, folded: int) -> tuple[list[Any], list[int], list[int]]:
        cells = [[_shown(value, short=short) for value in row] for row in values]
        natural = [
            max([len(column.name), *(_cells(row[at][0]) for row in cells)])
            for at, column in enumerate(columns)
        ]
        least = [
            min(need, max(folded, len(column.name))) if column.fold else need
            for need, column in zip(natural, columns, strict=True)
        ]
        return cells, natural, least

    shown = list(range(len(columns)))
    cells, natural, least = measured(False, FOLDED)

    def too_wide() -> bool:
        return sum(least[at] + 2 for at in shown) - 2 > width

    while too_wide():
        spare = [at for at in shown if columns[at].spare]
        if not spare:
            break
        shown.remove(max(spare, key=lambda at: (columns[at].spare, at)))
    if too_wide():
        cells, natural, least = measured(True, FOLDED)
    if too_wide():
        cells, natural, least = measured(True, NARROWEST)
    widths = {at: least[at] for at in shown}
    room = width - sum(widths[at] + 2 for at in shown) + 2
    for at in shown:  # the remaining width goes to the columns that are folded
        more = max(min(natural[at] - widths[at], room), 0)
        widths[at] += more
        room -= more
    return Fitted(
        [columns[at] for at in shown],
        [widths[at] for at in shown],
        [[row[at] for at in shown] for row in cells],
    )


def _broken(text: str, width: int) -> list[str]:
    """A text in lines of that width."""
    lines, line, taken = [], "", 0
    for c in text:
        takes = _cells(c)
        if taken + takes > width and line:
            lines.append(line)
            line, taken = "", 0
        line, taken = line + c, taken + takes
    return [*lines, line]


def styled(text: str, style: str, colors: bool) -> str:
    """A text with a terminal's codes for that style; without colours only bold and dim."""
    code = _SGR.get(style)
    if code is None or not text.strip() or (code > 10 and not colors):
        return text
    return f"\x1b[{code}m{text}\x1b[0m"


def drawn_table(table: Fitted, *, colors: bool = True) -> list[list[str]]:
    """The lines of the heading, then those of each row, for a terminal."""

    def drawn(cells: Sequence[tuple[str, str]]) -> list[str]:
        parts = [_broken(text, wide) for (text, _), wide in zip(cells, table.widths, strict=True)]
        lines = []
        for number in range(max(map(len, parts))):
            line = []
            for part, (_, style), wide, column in zip(
                parts, cells, table.widths, table.columns, strict=True
            ):
                text = part[number] if number < len(part) else ""
                pad = " " * (wide - _cells(text))
                text = styled(text, style, colors)
                line.append(pad + text if column.right else text + pad)
            lines.append("  ".join(line).rstrip())
        return lines

    heading = [(column.name, "bold") for column in table.columns]
    return [drawn(heading), *(drawn(row) for row in table.rows)]


def plain_table(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    """Aligned columns, two spaces between them; an empty cell is ``-``."""
    lines = [[column.name.upper().replace(" ", "_") for column in columns]]
    lines += [[_plain(value) or "-" for value in _values(columns, row)] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    )


class Screen:
    """Standard output: with colours and for its width if it is a terminal, otherwise plain text.

    no_color: as ``celery --no-color``; the environment's NO_COLOR does the same
    hidden: whether nothing is shown but JSON
    """

    def __init__(self, *, no_color: bool = False, hidden: bool = False) -> None:
        self.colors = not (no_color or os.environ.get("NO_COLOR"))
        self.hidden = hidden

    @property
    def is_terminal(self) -> bool:
        """Whether it is a terminal, whose screen can be redrawn."""
        on_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        return on_terminal and not self.hidden

    def _echo(self, text: str) -> None:
        if not self.hidden:
            click.echo(text)

    def _styled(self, text: str, style: str) -> str:
        return styled(text, style, self.colors) if self.is_terminal else text

    def table(
        self, columns: Sequence[Column], rows: Iterable[Row], otherwise: str = ""
    ) -> list[str]:
        """Show a table; return the names of the columns that were left out.

        otherwise: said instead of a table without rows
        """
        rows = list(rows)
        if otherwise and not rows:
            self.say(otherwise)
            return []
        if not self.is_terminal:
            self._echo(plain_table(columns, rows))
            return []
        table = fitted(columns, rows, shutil.get_terminal_size().columns)
        for text in itertools.chain(*drawn_table(table, colors=self.colors)):
            self._echo(text)
        return [column.name for column in columns if column not in table.columns]

    def fields(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Names and values, one below the other."""
        pairs = [(name, value) for name, value in pairs if value is not None]
        width = max((len(name) for name, _ in pairs), default=0)
        for name, value in pairs:
            text, style = _shown(value) if self.is_terminal else (_plain(value), "")
            self._echo(f"{self._styled(name.ljust(width), 'bold')}  {self._styled(text, style)}")

    def say(self, text: str = "", style: str = "") -> None:
        """A line."""
        self._echo(self._styled(clean(text), style))

    @staticmethod
    def json(document: Any) -> None:
        """One JSON document on a line of its own, in ASCII."""
        click.echo(json.dumps(document, default=str))


#: What is worth a bar, at least; and seconds between two lines where there is no terminal, of which
#: the first comes after as many.
LONG_WORK, LINES_EVERY = 1_000, 10.0


class Progress:
    """The progress of long work on standard error: a bar with an estimate on a terminal, and a line
    every ten seconds elsewhere.

    total: how much there is to do, unless a call says it
    """

    def __init__(self, label: str, total: int = 0, *, hidden: bool) -> None:
        self._label = label
        self._total = total
        self._hidden = hidden
        self._bar: Any = None
        self._line_at = time.monotonic() + LINES_EVERY

    def __enter__(self) -> Progress:
        return self

    def __call__(self, done: int, of: int = 0) -> None:
        total = max(of or self._total, done)
        if self._hidden or total < LONG_WORK:
            return
        if not sys.stderr.isatty():
            now = time.monotonic()
            if now >= self._line_at:
                self._line_at = now + LINES_EVERY
                click.echo(f"{self._label}: {done:,} of {total:,}", err=True)
            return
        if self._bar is None:
            self._bar = click.progressbar(length=total, label=self._label, file=sys.stderr)
            self._bar.__enter__()
        self._bar.length = total
        self._bar.update(done - self._bar.pos)

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.__exit__(*exc_info)


# -- A terminal that is redrawn again and again, until q is typed

#: Seconds between two looks at the keyboard and at the size of the terminal.
POLL = 0.25


class Terminal:
    """Draws on the terminal of standard output.

    alternate: use the alternate screen; what the terminal shows comes back at the end
    """

    def __init__(self, *, alternate: bool) -> None:
        self._alternate = alternate
        self._height = 0
        #: the terminal's settings before, if keys can be read
        self._settings: Any = None
        self._handler: Any = None
        #: whether it can show block characters
        self.blocks = (sys.stdout.encoding or "").lower().startswith("utf")

    def __enter__(self) -> Terminal:
        try:
            import termios
            import tty

            if sys.stdin.isatty():
                self._settings = termios.tcgetattr(sys.stdin)
                tty.setcbreak(sys.stdin, termios.TCSADRAIN)
        except (ImportError, OSError, termios.error):  # keys cannot be read
            self._settings = None
        # After SIGTERM the terminal must be as it was, too.
        self._handler = signal.signal(signal.SIGTERM, _end)
        self._write("\x1b[?1049h\x1b[?25l" if self._alternate else "\x1b[?25l")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._write("\x1b[?1049l\x1b[?25h" if self._alternate else "\x1b[?25h")
        signal.signal(signal.SIGTERM, self._handler)
        if self._settings is not None:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._settings)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def show(self, lines: Sequence[str]) -> None:
        """Draw these lines in place of the last ones."""
        if self._alternate:
            text = "\x1b[H" + "\n".join(f"\x1b[2K{line}" for line in lines) + "\x1b[J"
        else:
            up = f"\x1b[{self._height}F" if self._height else ""
            text = f"{up}\x1b[J" + "".join(f"{line}\n" for line in lines)
        self._height = len(lines)
        self._write(text)

    def wait(self, seconds: float, draw: Callable[[], Sequence[str]]) -> bool:
        """Wait that long; return at once, and True, if q is typed. Redraws after a resize.

        draw: makes the lines for the present size
        """
        until, size = time.monotonic() + seconds, shutil.get_terminal_size()
        while (left := until - time.monotonic()) > 0:
            if self._settings is None:
                time.sleep(min(left, POLL))
            elif select.select([sys.stdin], [], [], min(left, POLL))[0]:
                typed = os.read(sys.stdin.fileno(), 64)
                if not typed or b"q" in typed.lower():
                    return True
            if size != (size := shutil.get_terminal_size()):
                self.show(draw())
        return False


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


# -- numbers and names in a sentence


def counted(number: int, noun: str, verb: str = "") -> str:
    """``1 message``, ``1,234 messages``; with what it does, or they do: ``1 message waits``."""
    if number == 1:
        return f"1 {noun} {verb}s" if verb else f"1 {noun}"
    plural = f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"
    return f"{number:,} {plural} {verb}".rstrip()


def skipped(schedules: Iterable[str]) -> str:
    """A sentence for the user: schedules whose next firing was deleted go on. Empty without any."""
    names = sorted(set(schedules))
    if not names:
        return ""
    goes = "it goes" if len(names) == 1 else "each goes"
    return f"The next firing of {listed(names)} was among them; {goes} on with the one after that."


def listed(names: Iterable[str]) -> str:
    """Names in a sentence: ``'a'``, ``'a' and 'b'``, ``'a', 'b' and 'c'``."""
    *some, last = [repr(name) for name in names]
    return f"{', '.join(some)} and {last}" if some else last
