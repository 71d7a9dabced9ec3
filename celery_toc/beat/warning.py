"""Finds a ``celery beat`` that runs although the app's schedules are put without one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from celery import signals

logger = logging.getLogger(__name__)

#: What the messages of a beat have among their headers: Celery's own from 5.7 on, and that of
#: django-celery-beat.
MARK = "celery_beat_task"
_MARKS = (MARK, "periodic_task_name")

#: What a firing of a schedule has.
_FIRING = "x-schedule"


def is_of_a_beat(headers: Mapping[str, Any]) -> bool:
    """Whether a beat has sent the message with these headers."""
    return any(mark in headers for mark in _MARKS) and _FIRING not in headers


def without_marks(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Headers without those by which a beat marks what it sends."""
    return {name: value for name, value in headers.items() if name not in _MARKS}


def watch() -> None:
    """Have a beat that starts in this process warn, if it need not run."""
    signals.beat_init.connect(_on_beat_init, weak=False, dispatch_uid="celery_toc.beat")


def _on_beat_init(sender: Any = None, **_: Any) -> None:
    app = getattr(sender, "app", None)
    if app is None or not app.conf.get("toc_beat"):
        return
    logger.warning(
        "This celery beat is not needed: toc_beat is set, so the workers put beat_schedule. What "
        "this beat sends runs twice: stop it"
    )
    # Before Celery 5.7 a beat does not mark what it sends; workers warn of what is marked.
    signals.before_task_publish.connect(_mark, weak=False, dispatch_uid="celery_toc.beat")


def _mark(headers: Any = None, **_: Any) -> None:
    if isinstance(headers, dict):
        headers.setdefault(MARK, True)
