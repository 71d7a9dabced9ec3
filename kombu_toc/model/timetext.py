"""Times and spans of time as people type them: in commands, and in fields of the page."""

from __future__ import annotations

import re
from datetime import datetime, timezone, tzinfo

_SECONDS = {
    "ms": 0.001,
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86_400.0),
    **dict.fromkeys(("w", "week", "weeks"), 604_800.0),
}
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_PART = re.compile(rf"({_NUMBER.pattern})\s*([a-z]+)\s*")
_FRACTION = re.compile(r"\.(\d+)")

#: The latest moment, in seconds since the epoch: scores hold no later one.
_LAST = 9.0e9

#: Characters of a span: a longer text is none, and would take long to look through.
_LONGEST = 100


def read_span(text: str) -> float:
    """Read a span of time in seconds: ``90``, ``1.5``, ``1h30m``, ``2 days``; not negative.

    Raises ValueError, which says what is allowed.
    """
    said = text.strip().lower()
    parts = _PART.findall(said)
    if len(said) <= _LONGEST:
        if _NUMBER.fullmatch(said):
            return float(said)
        if parts and not _PART.sub("", said) and all(unit in _SECONDS for _, unit in parts):
            return sum(float(number) * _SECONDS[unit] for number, unit in parts)
    raise ValueError(f"{text[:60]!r} is not a span of time; write seconds, or 1h30m, 2d, 500ms")


def read_time(text: str, now: float, zone: tzinfo = timezone.utc) -> float:
    """Read a moment of ISO 8601, ``now``, or a span from now (``1h30m``, ``in 2 days``, ``-5m``,
    ``10 min ago``), as seconds since the epoch.

    zone: of a moment without an offset

    Raises ValueError, which says what is allowed.
    """
    said = text.strip().lower()
    if said == "now":
        return now
    sign, rest = (-1, said[1:]) if said[:1] == "-" else (1, said.removeprefix("+"))
    if rest.endswith(" ago"):
        sign, rest = -sign, rest.removesuffix(" ago")
    try:
        try:
            moment = now + sign * read_span(rest.removeprefix("in "))
        except ValueError:
            read = parse_iso(said.upper().replace(" UTC", "Z"))
            moment = (read if read.tzinfo else read.replace(tzinfo=zone)).timestamp()
        if -_LAST < moment < _LAST:
            return moment
    except (ValueError, OverflowError):
        pass
    raise ValueError(
        f"{text[:60]!r} is not a time up to the year 2255; write it as in ISO 8601, such as "
        "2030-12-24T18:00:00+01:00, or as a span from now, such as 1h30m or -2d"
    )


def parse_iso(text: str) -> datetime:
    """Read ISO 8601. Raises ValueError."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        # Python 3.10 knows no 'Z', no offset without a colon, and only three or six digits of a
        # second's fraction.
        text = _FRACTION.sub(lambda m: "." + m[1][:6].ljust(6, "0"), text, count=1)
        text = re.sub(r"(:\d\d.*[+-]\d\d)(\d\d)$", r"\1:\2", text.replace("Z", "+00:00"))
        return datetime.fromisoformat(text)
