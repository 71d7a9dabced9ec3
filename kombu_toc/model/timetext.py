"""Times as text: what people type, ISO 8601, and when a message becomes due by its headers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta, timezone, tzinfo
from operator import methodcaller
from typing import Any

from ..errors import ActionTimeError

# -- times and spans of time as people type them: in commands, and in fields of the page


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
    with suppress(ValueError, OverflowError):
        try:
            moment = now + sign * read_span(rest.removeprefix("in "))
        except ValueError:
            read = parse_iso(said.upper().replace(" UTC", "Z"))
            moment = (read if read.tzinfo else read.replace(tzinfo=zone)).timestamp()
        if -_LAST < moment < _LAST:
            return moment
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


# -- when a message becomes due, by its headers


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)


#: Gives a time without time zone the zone that it is in.
_aware: Callable[[datetime], datetime] = methodcaller("replace", tzinfo=timezone.utc)

#: Reads an ``eta`` that datetime does not.
_read: Callable[[str], datetime | None] = datetime.fromisoformat


def use_timezone(
    aware: Callable[[datetime], datetime],
    read: Callable[[str], datetime | None] = datetime.fromisoformat,
) -> None:
    """Say how an ``eta`` is understood.

    aware: gives one without time zone the zone that it is in; UTC unless told
    read: makes a time of a text that `datetime.fromisoformat` does not understand, lest a
        sender refuses what a consumer can read
    """
    global _aware, _read
    _aware, _read = aware, read


def eta_us(eta: Any) -> int:
    """An ``eta`` header as microseconds since the epoch.

    eta: ISO 8601, or a datetime. Raises ValueError or TypeError if it is neither.
    """
    moment = eta if isinstance(eta, datetime) else _parsed(eta)
    if moment.tzinfo is None:
        moment = _aware(moment)
    return (moment - _EPOCH) // _MICROSECOND


def _parsed(eta: Any) -> datetime:
    if not isinstance(eta, str):
        raise TypeError(f"not a time: {eta!r}")
    try:
        return parse_iso(eta)
    except ValueError:
        moment = _read(eta)
        if moment is None:
            raise
        return moment


def action_time(headers: Mapping[str, Any], id: str) -> tuple[int | None, int | None]:
    """(microseconds since the epoch, microseconds from now); both None for now.

    id: names the message in an error

    Raises ActionTimeError if it cannot be told: a worker could not read it either.
    """
    eta = headers.get("eta")
    if eta is not None:
        try:
            return eta_us(eta), None
        except (ValueError, TypeError, OverflowError) as exc:
            raise ActionTimeError(
                f"task {id}: its eta {eta!r:.80} is not a time; pass a datetime, or a text "
                "such as '2030-01-31T10:00:00+00:00'"
            ) from exc
    delay = headers.get("x-delay")
    if delay is not None:
        try:
            return None, int(float(delay) * 1000)
        except (ValueError, TypeError, OverflowError) as exc:
            raise ActionTimeError(
                f"message {id}: its x-delay {delay!r:.80} is not a number of milliseconds"
            ) from exc
    return None, None
