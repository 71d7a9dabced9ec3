"""``celery toc show``: all of a message."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from kombu_toc import Found, Record

from . import times
from .exits import Command
from .find import described
from .message import describe
from .options import complete_id, queue_option
from .session import Session, with_session

#: What a task is in the library that has not ended.
LIVE = ("pending", "taken")

#: What the time of a message means, by its state.
_TIMES = {
    "scheduled": "due",
    "ready": "due",
    "in-flight": "lease ends",
    "dead": "died",
}


@click.command(
    cls=Command,
    example="""
celery -A shop toc show 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11
celery -A shop toc show 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11 --json
""",
)
@click.argument("id", shell_complete=complete_id)
@queue_option
@with_session
def show(session: Session, id: str, queue: str | None) -> None:
    """All of a message, decoded; and what the task library has of those of its id that have ended,
    with the end of the traceback of a failure.

    Messages that share the id, such as a task and its retry, are all shown.
    """
    found = session.ask(session.center.get, id, topic=session.queue(queue))
    records = [one for one in session.history(id) if one.topic == (queue or one.topic)]
    show_all(session, id, found, [one for one in records if one.status not in LIVE])


def show_all(session: Session, id: str, found: list[Found], records: Sequence[Record] = ()) -> None:
    """Show the messages that were found under an id, and what is recorded of others."""
    messages = [describe(session, session.center.task(each), whole=True) for each in found]
    if session.as_json:
        recorded = {"records": [described(one) for one in records]} if records else {}
        session.json({"id": id, "messages": messages, **recorded})
    for number, (each, message) in enumerate(zip(found, messages, strict=True)):
        if session.as_json:
            break
        if number:
            session.screen.say()
        session.screen.fields(_fields(session, message, each.time_us / 1e6))
    for number, record in enumerate(() if session.as_json else records):
        if found or number:
            session.screen.say()
        session.screen.fields(_recorded(session, record))
    if not found and not records:
        session.complain_of_none(id)


def _recorded(session: Session, record: Record) -> list[tuple[str, Any]]:
    """What the library has of a message that has ended."""

    def time(us: int) -> str:
        return f"{times.local_iso(us / 1e6, session.zone)}"

    return [
        *(("id", record.id), ("task", record.task), ("status", record.status)),
        ("due", time(record.action_us) if record.action_us else None),
        *(("queue", record.topic), ("business type", record.biz_type)),
        *(("business id", record.biz_id), ("attempts", record.attempts)),
        *((f"attributes.{name}", value) for name, value in record.attributes.items()),
        *(("worker", record.worker), ("created", time(record.created_us))),
        ("changed", time(record.modified_us)),
        *_lines("error", record.error),
    ]


def _fields(session: Session, message: dict[str, Any], seconds: float) -> list[tuple[str, Any]]:
    when = "now: it was rolled back"
    if seconds:
        away = times.distance(seconds - session.now)
        when = f"{times.local_iso(seconds, session.zone)} ({away})"
    fields = [
        ("id", message["id"]),
        ("task", message["task"]),
        ("state", message["state"]),
        (_TIMES[message["state"]], when),
        ("queue", message["queue"]),
        ("slot", message["slot"]),
        ("place", "the task library, until its time comes" if message["far"] else None),
        ("priority", message["priority"]),
        ("retries left", message["retries_left"]),
        *_own(message),
        ("args", message["argsrepr"]),
        ("kwargs", message["kwargsrepr"]),
        ("reason", message["reason"]),
        *_lines("error", message["error"]),
        ("problem", message["problem"]),
    ]
    for group in ("headers", "properties"):
        fields += [
            (f"{group}.{name}", _value(value))
            for name, value in message[group].items()
            if value is not None
        ]
    return [*fields, ("content type", message["content_type"]), ("body", message["body"])]


def _own(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """What holds for it and not for its queue, as far as anything does."""
    seconds = [
        (label, f"{message[name]:g} s")
        for label, name in (("visibility", "visibility"), ("max lease", "max_lease"))
        if message[name] is not None
    ]
    texts = [(name, message[name]) for name in ("expires", "key", "unique") if message[name]]
    return [*seconds, *texts]


def _lines(name: str, text: str | None) -> list[tuple[str, Any]]:
    """A text of several lines, such as a traceback."""
    return [("" if at else name, line) for at, line in enumerate((text or "").splitlines())]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
