"""When a message becomes due, by its headers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from ..errors import ActionTimeError
from ..model.timetext import parse_iso

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)


def _naive_is_utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=timezone.utc)


#: Gives a time without time zone the zone that it is in.
_aware: Callable[[datetime], datetime] = _naive_is_utc

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
