"""A terminal that is redrawn again and again, until q is typed."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

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
            text = "\x1b[H" + "\n".join(f"\x1b[2K{one}" for one in lines) + "\x1b[J"
        else:
            up = f"\x1b[{self._height}F" if self._height else ""
            text = f"{up}\x1b[J" + "".join(f"{one}\n" for one in lines)
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
