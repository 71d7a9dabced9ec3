"""Reads an app's ``beat_schedule``: what the setting has, and what ``app.add_periodic_task``
adds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import signals
from celery.backends.base import DisabledBackend
from celery.beat import BeatLazyFunc
from celery.schedules import crontab, maybe_schedule
from kombu.exceptions import KombuError

import kombu_toc

from ..schedules.rules import read_exclusions

if TYPE_CHECKING:
    from celery import Celery


# -- one recurring task, wherever it was configured

#: What a schedule that cannot be planned raises: of many, the others are planned all the same.
UNUSABLE = (kombu_toc.TocError, KombuError, ValueError, TypeError, KeyError, OverflowError)


@dataclass(frozen=True)
class Entry:
    """A recurring task as a beat has it.

    schedule: what ``center.schedules.put`` takes
    options: those of ``apply_async``
    rules: further arguments of ``center.schedules.put``, such as ``misfire`` and ``timezone``
    paused: whether it fires only after somebody resumes it
    """

    name: str
    task: str
    schedule: Any
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    rules: Mapping[str, Any] = field(default_factory=dict)
    paused: bool = False

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``center.schedules.put``, without the owner."""
        return {
            "args": list(self.args),
            "kwargs": dict(self.kwargs),
            "options": dict(self.options),
            **self.rules,
        }


class Refused(NamedTuple):
    """An entry that cannot be taken, and why."""

    name: str
    reason: str


class Read(NamedTuple):
    """What a reader has found."""

    entries: list[Entry]
    refused: list[Refused]


class NotTakenError(ValueError):
    """Why an entry cannot be taken."""


def read_each(named: Iterable[tuple[str, Callable[[], Entry]]]) -> Read:
    """Read entries: of each its name, and what makes it, or raises why it cannot be taken."""
    read = Read([], [])
    for name, make in named:
        try:
            read.entries.append(make())
        except (NotTakenError, kombu_toc.TocError) as exc:
            read.refused.append(Refused(name, str(exc)))
    return read


# -- finds a celery beat that runs although the app's schedules are put without one

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


# -- reads an app's beat_schedule
#
# An entry may say in its ``options`` what a beat has no name for: ``toc_misfire``, ``toc_grace``,
# ``toc_overlap``, ``toc_jitter``, ``toc_timezone``, ``toc_start``, ``toc_end``, ``toc_max_runs``,
# ``toc_either_day`` and ``toc_exclude``. A beat passes them on with the message, where nobody
# minds.

#: Arguments of ``center.schedules.put`` that an entry's options have with ``toc_`` before them.
RULES = (
    *("misfire", "grace", "overlap", "jitter", "timezone", "start", "end", "max_runs"),
    *("either_day", "exclude"),
)

_FIELDS = {"task", "schedule", "args", "kwargs", "options", "relative"}

#: What ``celery beat`` adds by itself if results do not expire by themselves.
CLEANUP = "celery.backend_cleanup"


def read(app: Celery) -> Read:
    """Read the ``beat_schedule`` of an app, by name."""
    configured = dict(app.conf.beat_schedule or {})
    if CLEANUP not in configured and _needs_cleanup(app):
        configured[CLEANUP] = {
            "task": CLEANUP,
            "schedule": crontab(minute="0", hour="4"),
            "options": {"expires": 12 * 3600},
        }
    return read_each(
        (str(name), partial(_entry, app, str(name), configured[name]))
        for name in sorted(configured, key=str)
    )


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
    except (OverflowError, ValueError) as exc:  # seconds that no timedelta has
        raise NotTakenError(f"its schedule is {given['schedule']!r}: {exc}") from None
    options, rules = dict(given.get("options") or {}), {}
    for rule in RULES:
        if (value := options.pop(f"toc_{rule}", None)) is not None:
            # What a file has belongs to the edition.
            rules[rule] = read_exclusions(name, value) if rule == "exclude" else value
    if headers := without_marks(options.pop("headers", None) or {}):
        options["headers"] = headers  # a beat in this process has marked them in place
    return Entry(
        *(name, str(given["task"]), schedule),
        args=tuple(args),
        kwargs=dict(kwargs),
        options=options,
        rules=rules,
    )
