"""A message as JSON for scripts, and as text for people."""

from __future__ import annotations

import json
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import click

from celery_toc import Task
from kombu_toc import Found

from . import times
from .screen import Cell, Column, clean
from .session import Session

#: States, one word each. A waiting message is scheduled or ready.
STATES = ("scheduled", "ready", "in-flight", "dead")

_STYLES = {"scheduled": "", "ready": "yellow", "in-flight": "cyan", "dead": "red"}

#: Characters of arguments, a reason or an error that a table shows.
SHOWN = 60

COLUMNS = (
    Column("id"),
    Column("task", fold=True),
    Column("queue", fold=True, spare=True),
    Column("state"),
    Column("time", spare=True),
    Column("in", right=True),
    Column("arguments", fold=True),
)

DEAD_COLUMNS = (
    Column("id"),
    Column("task", fold=True),
    Column("queue", fold=True, spare=True),
    Column("died", spare=True),
    Column("reason", fold=True),
    Column("error", fold=True),
)


def describe(session: Session, task: Task, *, whole: bool = False) -> dict[str, Any]:
    """A message as in JSON; docs/commands.md explains the fields.

    task: read from a message that was found
    whole: with headers, properties and body
    """
    found = task.found
    assert isinstance(found, Found)
    shown = {
        "id": found.id,
        "task": task.name or None,
        "queue": found.topic,
        "topic": found.topic,
        "slot": found.slot,
        "priority": _priority(session, found),
        "state": state_of(session, found),
        "time": times.iso(found.time_us / 1e6) if found.time_us else None,
        "retries_left": _retries_left(session, found),
        "far": found.far,
        "key": found.key,
        "unique": found.unique,
        "visibility": found.visibility,
        "max_lease": found.max_lease,
        "expiration": found.expiration,
        "expires": times.iso(found.expires_us / 1e6) if found.expires_us else None,
        "args": _values(task.args),
        "kwargs": _values(task.kwargs),
        "argsrepr": _repr(task.headers, "argsrepr", task.args),
        "kwargsrepr": _repr(task.headers, "kwargsrepr", task.kwargs),
        "reason": found.reason or None,
        "error": found.error or None,
        "problem": task.problem or None,
    }
    if whole:
        shown["headers"] = task.headers
        shown["properties"] = task.properties
        shown["content_type"] = task.content_type
        shown["body"] = _text(task.body)
    return shown


def _priority(session: Session, found: Found) -> int:
    """Its priority step, as its topic declares them."""
    steps = session.center.topic(found.topic).steps
    return steps[min(found.step, len(steps) - 1)]


class State(click.Choice):  # type: ignore[type-arg]  # Click's is generic from 8.2 on
    """One of STATES; spaces and underscores are accepted for the hyphen."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return super().convert(value.replace(" ", "-").replace("_", "-"), param, ctx)


def state_of(session: Session, found: Found) -> str:
    """One of STATES."""
    if found.state == "waiting":
        return "ready" if found.time_us <= session.now * 1e6 else "scheduled"
    return found.state.replace(" ", "-")


def _retries_left(session: Session, found: Found) -> int | None:
    if found.retries_left is not None:
        return found.retries_left
    topic = session.center.known(found.topic)  # which has just been looked at
    return topic.declaration.retries if topic else None


def _values(decoded: Any) -> Any:
    """Arguments for JSON, which shows as text what it cannot hold; None if they are not decoded."""
    if decoded is None or isinstance(decoded, str):
        return None
    try:
        return json.loads(json.dumps(decoded, default=repr))
    except (TypeError, ValueError):  # keys that are not text, or a value that contains itself
        return repr(decoded)


def _repr(headers: dict[str, Any], name: str, decoded: Any) -> str | None:
    said = headers.get(name)
    if isinstance(said, str):
        return said
    return None if decoded is None else repr(decoded)


def _text(body: bytes) -> str:
    return body.decode("utf-8", "backslashreplace")


def arguments(shown: dict[str, Any]) -> str:
    """Arguments as in a call, from what :func:`describe` returns."""
    args, kwargs = shown["argsrepr"] or "()", shown["kwargsrepr"] or "{}"
    return args if kwargs == "{}" else f"{args} {kwargs}"


def row(session: Session, shown: dict[str, Any], seconds: float) -> list[Any]:
    """A row for COLUMNS.

    shown: what :func:`describe` returns
    seconds: its time, since the epoch; 0 if it was rolled back and is due at once
    """
    state = shown["state"]
    return [
        shown["id"],
        shown["task"],
        shown["queue"],
        Cell(state, _STYLES[state]),
        _when(session, seconds) if seconds else None,
        _signed(seconds - session.now) if seconds else None,
        _cut(arguments(shown)),
    ]


def dead_row(session: Session, shown: dict[str, Any], seconds: float) -> list[Any]:
    """A row for DEAD_COLUMNS; as :func:`row`."""
    return [
        shown["id"],
        shown["task"],
        shown["queue"],
        _when(session, seconds),
        _cut(shown["reason"] or ""),
        _cut((shown["error"] or "").partition("\n")[0]),
    ]


def _when(session: Session, seconds: float) -> str:
    """A time: ISO 8601 with its offset in plain text. On a terminal the offset is left out, because
    a line below the table names the time zone, and so is today's date."""
    if not session.screen.is_rich:
        return times.local_iso(seconds, session.zone)
    text = times.local(seconds, session.zone)
    today = times.local(session.now, session.zone)[:10]
    return text[11:] if text[:10] == today else text


def _signed(seconds: float) -> str:
    return times.span(seconds) if seconds >= 0 else f"-{times.span(-seconds)}"


def _cut(text: str) -> str:
    text = clean(text)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def in_a_line(session: Session, shown: dict[str, Any], seconds: float) -> str:
    """A message in one line, for a question."""
    when = f", {times.distance(seconds - session.now)}" if seconds else ""
    name = shown["task"] or "(no task)"
    return f"{name} {shown['id']} in {shown['queue']!r}: {shown['state']}{when}"


def named(pattern: str | None) -> Callable[[Task], bool] | None:
    """The predicate that a task has such a name; ``*`` and ``?`` are wildcards."""
    if pattern is None:
        return None
    return lambda task: fnmatchcase(task.name or "", pattern)
