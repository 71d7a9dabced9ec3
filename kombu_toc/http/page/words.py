"""Numbers, times and spans of time as people read and type them, and addresses of views."""

from __future__ import annotations

import re
from collections.abc import Collection
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import urlencode

from ..problems import Problem, invalid


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

_SPAN = re.compile(r"\s*(?:in\s+)?([+-]?)\s*((?:\d+(?:\.\d+)?\s*[a-z]+\s*)+)(ago)?\s*")
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
_SECONDS = {
    "ms": 0.001,
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86_400.0),
    **dict.fromkeys(("w", "week", "weeks"), 604_800.0),
}

#: The latest moment: scores hold no later one.
LAST = 9.0e9

#: Characters of a time: a longer text is none, and would take long to look through.
_LONGEST = 100


def read_time(text: str, field: str, now: float) -> float | None:
    """Seconds since the epoch of a span (``1h 30m``, ``-5m``, ``10 min ago``), ``now``, or a moment
    (``2026-01-31 09:30``; UTC unless it has an offset). None for nothing.

    now: by Redis's clock

    Raises Problem.
    """
    said = text.strip().lower()
    if not said:
        return None
    if len(said) > _LONGEST:
        raise _unclear(text, field)
    if said == "now":
        return now
    if (found := _SPAN.fullmatch(said)) is not None:
        return _checked(now + _seconds(found, field), text, field)
    try:
        moment = datetime.fromisoformat(said.upper().replace("Z", "+00:00").replace(" UTC", ""))
    except ValueError:
        raise _unclear(text, field) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return _checked(moment.timestamp(), text, field)


def _seconds(found: re.Match[str], field: str) -> float:
    total = 0.0
    for size, unit in _PART.findall(found[2]):
        if unit not in _SECONDS:
            raise _unclear(found[0], field)
        total += float(size) * _SECONDS[unit]
    back = (found[1] == "-") != bool(found[3])
    return -total if back else total


def _checked(moment: float, text: str, field: str) -> float:
    if not -LAST < moment < LAST:
        raise _unclear(text, field)
    return moment


def _unclear(text: str, field: str) -> Problem:
    return invalid(
        field,
        f"{text[:60]!r} is no time: say a span from now such as 1h30m or -5m, or a moment such as "
        "2026-01-31 09:30 (UTC unless it has an offset)",
    )
