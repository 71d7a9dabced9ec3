"""Times as people type them: a span from now, or a moment."""

from __future__ import annotations

import re
from datetime import datetime, timezone

from ..problems import Problem, invalid

_SPAN = re.compile(r"\s*(?:in\s+)?([+-]?)\s*((?:\d+(?:\.\d+)?\s*[a-z]+\s*)+)(ago)?\s*")
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
_UNITS = {
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
        if unit not in _UNITS:
            raise _unclear(found[0], field)
        total += float(size) * _UNITS[unit]
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
