"""What became of a task whose message is gone: the sources that know it, and what each says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, NamedTuple

from celery import Celery
from celery.backends.base import DisabledBackend

import kombu_toc

#: Seconds for which a source is waited for.
WITHIN = 5.0

#: What sources are called.
CANCELLATIONS, RESULTS = "the cancellations", "the result backend"


class Source(NamedTuple):
    """A source that was asked about an id.

    said: what it says; empty if it does not know the id
    error: why it has not answered; empty if it has
    """

    name: str
    said: str = ""
    error: str = ""


def sources_of(app: Celery, center: Any, id: str) -> list[Source]:
    """What the cancellations and the result backend say of a task. Raises nothing."""
    asked: dict[str, Callable[[], str]] = {CANCELLATIONS: lambda: _cancelled(center, id)}
    if not isinstance(app.backend, DisabledBackend):
        asked[RESULTS] = lambda: _result(app, id)
    return [_asked(name, ask) for name, ask in asked.items()]


def _asked(name: str, ask: Callable[[], str]) -> Source:
    """What a source says, if it does within moments: Celery tries a backend that is away again."""
    found: list[Source] = []

    def run() -> None:
        try:
            found.append(Source(name, ask()))
        except Exception as exc:  # whatever a result backend raises
            found.append(Source(name, error=f"{type(exc).__name__}: {exc}"[:200]))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WITHIN)
    return found[0] if found else Source(name, error=f"it has not answered for {WITHIN:g} seconds")


def _cancelled(center: kombu_toc.TimeoutCenter, id: str) -> str:
    at = center.notes.cancelled_at(id)
    return "" if at is None else f"cancelled or revoked, {_moment(at)}"


def _result(app: Celery, id: str) -> str:
    if app.conf.result_serializer == "pickle":
        return "not read: results are pickled"
    found = app.backend.get_task_meta(id, cache=False)
    state, done = found.get("status"), found.get("date_done")
    if state == "PENDING":
        return ""
    return f"{state}, {done}" if done else str(state)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
