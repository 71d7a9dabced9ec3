"""An operation before it is sent: a script with its keys and arguments, and how to read its
reply."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from . import scores
from .errors import ActionTimeError
from .scripts import Script


class Call(NamedTuple):
    """An operation ready to be sent: a script with its arguments, and how to read its reply."""

    script: Script
    keys: Sequence[str]
    args: Sequence[Any]
    parse: Callable[[Any], Any]

    def command(self, *, whole: bool = False) -> tuple[Any, ...]:
        """As a Redis command: by its SHA-1, or with the whole text."""
        if whole:
            return ("EVAL", self.script.text, len(self.keys), *self.keys, *self.args)
        return ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.args)


def when_of(at_us: int | None, delay_us: int | None) -> str:
    """A time as the scripts read it: a moment, ``+`` and so much from now, or nothing for now.

    Raises ActionTimeError beyond the year 2255.
    """
    if delay_us is not None:
        if delay_us <= 0:
            return ""
        scores.check(time.time_ns() // 1000 + delay_us)  # near enough to refuse the year 2255
        return f"+{delay_us}"
    return "" if at_us is None else str(scores.check(at_us))


def microseconds(seconds: float | None) -> int | None:
    """Raises ActionTimeError for what is not a time."""
    if seconds is None:
        return None
    try:
        return round(seconds * 1_000_000)
    except (OverflowError, ValueError):
        raise ActionTimeError(f"{seconds!r} is not a time; choose another eta") from None


def text(raw: bytes) -> str:
    """An id or a key as it was given."""
    return raw.decode("utf-8", "surrogatepass")


def texts(raw: Iterable[bytes]) -> list[str]:
    return [text(item) for item in raw]
