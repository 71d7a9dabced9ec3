"""Reads what redbeat keeps in Redis: a hash for each entry, and an index of them.

redbeat need not be installed. What a key holds is in ``redbeat.schedulers`` and
``redbeat.decoder``; read in 2.0 to 2.4.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

from celery.schedules import crontab, schedule

from .configured import Entry, NotTakenError, Read, Refused, without_marks

#: What redbeat puts before the names of its keys, unless ``redbeat_key_prefix`` says otherwise.
PREFIX = "redbeat:"

#: Entries that are read at a time.
_PAGE = 500

_FIELDS = ("minute", "hour", "day_of_week", "day_of_month", "month_of_year")


def definitions(client: Any, prefix: str = PREFIX) -> Iterator[tuple[str, str | None]]:
    """Yield the name and the JSON of each entry, by name; None if the entry has none.

    client: a client of redis-py
    """
    found = client.zrange(f"{prefix}:schedule", 0, -1)
    keys = sorted(key.decode() if isinstance(key, bytes) else str(key) for key in found)
    for at in range(0, len(keys), _PAGE):
        page = keys[at : at + _PAGE]
        with client.pipeline(transaction=False) as pipe:
            for key in page:
                pipe.hget(key, "definition")
            texts = pipe.execute()
        for key, text in zip(page, texts, strict=True):
            shown = text.decode() if isinstance(text, bytes) else text
            yield key.removeprefix(prefix), shown


def read(definitions: Iterator[tuple[str, str | None]]) -> Read:
    """Read entries: pairs of a name and JSON."""
    found = Read([], [])
    for name, text in definitions:
        try:
            found.entries.append(_entry(name, text))
        except NotTakenError as exc:
            found.refused.append(Refused(name, str(exc)))
    return found


def _entry(name: str, text: str | None) -> Entry:
    try:
        found = json.loads(text or "null", object_hook=_value)
    except (ValueError, TypeError, KeyError) as exc:
        raise NotTakenError(f"its definition cannot be read: {exc}") from exc
    if not isinstance(found, dict):
        raise NotTakenError("its key has no definition")
    task, options = found.get("task"), dict(found.get("options") or {})
    if not isinstance(task, str) or not task:
        raise NotTakenError("it names no task")
    if headers := without_marks(options.pop("headers", None) or {}):
        options["headers"] = headers
    return Entry(
        *(name, task, _schedule(found.get("schedule"))),
        args=found.get("args") or [],
        kwargs=found.get("kwargs") or {},
        options=options,
        paused=not found.get("enabled", True),
    )


def _value(found: dict[str, Any]) -> Any:
    """What JSON has no word for, as redbeat writes it."""
    if found.get("__type__") != "datetime":
        return found
    zone = found.get("timezone", "UTC")
    names = ("year", "month", "day", "hour", "minute", "second", "microsecond")
    fields: dict[str, Any] = {name: found.get(name, 0) for name in names}
    tz = timezone(timedelta(seconds=zone)) if isinstance(zone, (int, float)) else ZoneInfo(zone)
    return datetime(**fields, tzinfo=tz)


def _schedule(found: Any) -> Any:
    kind = found.get("__type__") if isinstance(found, dict) else None
    try:
        if kind == "interval":
            every = timedelta(seconds=found["every"])
            return schedule(every, relative=bool(found.get("relative")))
        if kind == "crontab":
            return crontab(**{name: found.get(name, "*") for name in _FIELDS})
    except (ValueError, TypeError, KeyError) as exc:
        raise NotTakenError(f"its {kind} cannot be read: {exc}") from exc
    raise NotTakenError(
        f"its schedule is {kind or type(found).__name__}, which has no counterpart: "
        "write it as crontab, interval or solar"
    )
