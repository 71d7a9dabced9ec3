"""Numbers, times and spans of time as people read and type them, and addresses of views."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import urlencode

from ...model import timetext
from ..problems import invalid


def link(view: str, **query: Any) -> str:
    """The address of a view, relative to the page: so it is the same wherever the page is mounted.
    What is None or empty is left out."""
    said = {name: value for name, value in query.items() if value not in (None, "")}
    return f"{view}?{urlencode(said, errors='surrogatepass')}" if said else view


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

#: Seconds, and what they are called.
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def number(value: float) -> str:
    """``1,234``; below 10 with one digit behind the point if it is no whole number."""
    if value == int(value) or value >= 10:
        return f"{value:,.0f}"
    return f"{value:.2g}" if value < 1 else f"{value:.1f}"


#: What is in flight, for who sees that tasks run.
FLIGHT = (
    "In flight is what a worker has and has not acknowledged: a task that is acknowledged as it "
    "begins, as is Celery's default, runs without being in flight."
)


def skipped(schedules: Collection[str], number: int = 0) -> str:
    """What becomes of schedules whose next firing was deleted: these, or more, `number` in all."""
    shown = [repr(name) for name in sorted(schedules)]
    *some, last = shown if number <= len(shown) else [*shown, f"{number - len(shown):,} more"]
    names = f"{', '.join(some)} and {last}" if some else last
    goes = "each goes" if some else "it goes"
    return f"The next firing of {names} was among them; {goes} on with the one after that."


def counted(value: int, thing: str) -> str:
    """``1 message``, ``2,000 messages``."""
    return f"{value:,} {thing}" if value == 1 else f"{value:,} {thing}s"


def span(seconds: float) -> str:
    """``5 s``, ``1 min 5 s``, ``3 d 2 h``: the two largest units."""
    seconds = abs(seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.0005 else "0 s"
    left, said = int(seconds), []
    for size, name in _UNITS:
        if left >= size:
            said.append(f"{left // size} {name}")
            left %= size
        elif said:
            break
        if len(said) == 2:
            break
    return " ".join(said)


def lateness(seconds: float | None) -> str:
    """``4.2 ms``, ``1.3 s``; a dash where nothing is known."""
    if seconds is None:
        return "-"
    if seconds < 0.0995:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def moment(us: int) -> str:
    """``2026-01-31 09:30:00 UTC``."""
    try:
        made = _EPOCH + timedelta(microseconds=us)
    except OverflowError:
        return f"{us} µs"
    return f"{made:%Y-%m-%d %H:%M:%S} UTC"


def iso(us: int) -> str:
    """``2026-01-31T09:30:00.000000Z``."""
    try:
        made = _EPOCH + timedelta(microseconds=us)
    except OverflowError:
        return ""
    return f"{made:%Y-%m-%dT%H:%M:%S.%f}Z"


def away(us: int, now_us: int) -> str:
    away = (us - now_us) / 1e6
    return f"in {span(away)}" if away > 0 else f"{span(away)} ago"


# -- times as people type them


def read_time(text: str, field: str, now: float) -> float | None:
    """As :func:`.timetext.read_time`, and None for nothing. Raises Problem.

    now: by Redis's clock
    """
    try:
        return timetext.read_time(text, now) if text.strip() else None
    except ValueError as exc:
        raise invalid(field, str(exc)) from None
