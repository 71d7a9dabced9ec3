"""Reads an app's ``beat_schedule``: what the setting has, and what ``app.add_periodic_task`` adds.

An entry may say in its ``options`` what a beat has no name for: ``toc_misfire``, ``toc_grace``,
``toc_overlap``, ``toc_jitter``, ``toc_timezone``, ``toc_start``, ``toc_end``, ``toc_max_runs`` and
``toc_either_day``. A beat passes them on with the message, where nobody minds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from celery.backends.base import DisabledBackend
from celery.beat import BeatLazyFunc
from celery.schedules import crontab, maybe_schedule

from ..schedules.reading import decides_itself
from .entry import Entry, NotTakenError, Read, Refused
from .warning import without_marks

if TYPE_CHECKING:
    from celery import Celery

#: Arguments of ``center.schedules.put`` that an entry's options have with ``toc_`` before them.
RULES = (
    *("misfire", "grace", "overlap", "jitter", "timezone", "start", "end", "max_runs"),
    "either_day",
)

_FIELDS = {"task", "schedule", "args", "kwargs", "options", "relative"}

#: What ``celery beat`` adds by itself if results do not expire by themselves.
CLEANUP = "celery.backend_cleanup"


def read(app: Celery) -> Read:
    """Read the ``beat_schedule`` of an app, by name."""
    found = Read([], [])
    configured = dict(app.conf.beat_schedule or {})
    if CLEANUP not in configured and _needs_cleanup(app):
        options = {"expires": 12 * 3600}
        configured[CLEANUP] = {
            "task": CLEANUP,
            "schedule": crontab(minute="0", hour="4"),
            "options": options,
        }
    for name in sorted(configured, key=str):
        try:
            found.entries.append(_entry(app, str(name), configured[name]))
        except NotTakenError as exc:
            found.refused.append(Refused(str(name), str(exc)))
    return found


def _needs_cleanup(app: Celery) -> bool:
    # As celery.beat.Scheduler.install_default_entries has it, but not for nothing.
    if isinstance(app.backend, DisabledBackend):
        return False
    return bool(app.conf.result_expires and not app.backend.supports_autoexpire)


def _entry(app: Celery, name: str, given: Any) -> Entry:
    if not isinstance(given, Mapping):
        raise NotTakenError(
            f"it is {type(given).__name__}, not a dictionary with task and schedule"
        )
    if unknown := sorted(map(str, given.keys() - _FIELDS)):
        raise NotTakenError(f"it has {', '.join(unknown)}, which no beat knows")
    for needed in ("task", "schedule"):
        if given.get(needed) is None:
            raise NotTakenError(f"it has no {needed}")
    args, kwargs = given.get("args") or (), given.get("kwargs") or {}
    if any(isinstance(one, BeatLazyFunc) for one in (*args, *kwargs.values())):
        raise NotTakenError(
            "an argument is a BeatLazyFunc, which a beat would call for each firing: "
            "have the task call it"
        )
    try:
        schedule = maybe_schedule(given["schedule"], bool(given.get("relative")), app=app)
    except AttributeError:
        kind = type(given["schedule"]).__name__
        raise NotTakenError(f"its schedule is {kind}: write crontab, timedelta or solar") from None
    if decides_itself(schedule):
        raise NotTakenError(
            f"its class {type(schedule).__name__} decides when it is due, and no store has it: "
            "write crontab, timedelta or solar"
        )
    options, rules = dict(given.get("options") or {}), {}
    for rule in RULES:
        if (value := options.pop(f"toc_{rule}", None)) is not None:
            rules[rule] = value
    if headers := without_marks(options.pop("headers", None) or {}):
        options["headers"] = headers  # a beat in this process has marked them in place
    return Entry(
        *(name, str(given["task"]), schedule),
        args=tuple(args),
        kwargs=dict(kwargs),
        options=options,
        rules=rules,
    )
