"""A message as scripts and as people are shown it."""

from __future__ import annotations

import json
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import click

from . import times
from .screen import Cell, Column, clean
from .session import Session

#: States, as one word each: a waiting message is one of the first two.
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


def describe(session: Session, task: Any, *, whole: bool = False) -> dict[str, Any]:
    """A message as in JSON; docs/commands.md explains it.

    whole: with headers, properties and body
    """
    found = task.found
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


def _priority(session: Session, found: Any) -> int:
    """The priority step of its topic that it has."""
    steps = session.center.topic(found.topic).steps
    return steps[min(found.step, len(steps) - 1)]


class State(click.Choice):
    """One of STATES, however it is written."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return super().convert(value.replace(" ", "-").replace("_", "-"), param, ctx)


def state_of(session: Session, found: Any) -> str:
    """One of STATES."""
    if found.state == "waiting":
        return "ready" if found.time_us <= session.now * 1e6 else "scheduled"
    return found.state.replace(" ", "-")


def _retries_left(session: Session, found: Any) -> int | None:
    if found.retries_left is not None:
        return found.retries_left
    topic = session.center.known(found.topic)  # which has just been looked at
    return topic.declaration.retries if topic else None


def _values(decoded: Any) -> Any:
    """What JSON can hold of it; what it cannot is a text. None if it could not be decoded."""
    if decoded is None or isinstance(decoded, str):
        return None
    try:
        return json.loads(json.dumps(decoded, default=repr))
    except (TypeError, ValueError):  # keys that are no text, or a value within itself
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
    seconds: its time, since the epoch; 0 if it is due because it was rolled back
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
        _cut(shown["error"] or ""),
    ]


def _when(session: Session, seconds: float) -> str:
    """As ISO 8601 with its offset in plain text; on a terminal without it, for a line below says
    it, and without today's date."""
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
    """What a message is, for a question or an answer."""
    when = f", {times.distance(seconds - session.now)}" if seconds else ""
    name = shown["task"] or "(no task)"
    return f"{name} {shown['id']} in {shown['queue']!r}: {shown['state']}{when}"


def named(pattern: str | None) -> Callable[[Any], bool] | None:
    """The predicate that a task has that name; ``*`` and ``?`` stand for anything."""
    if pattern is None:
        return None
    return lambda task: fnmatchcase(task.name or "", pattern)
