"""What is to be kept of a schedule, before the server is asked: checked, and with the message that
Celery makes for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, NamedTuple

from kombu.utils import json as kombu_json

import kombu_toc

from . import state
from .errors import ScheduleError
from .reading import check_name, read_schedule, read_seconds, read_time, read_zone
from .rules import to_datetime
from .state import Record
from .templates import Template, capture

if TYPE_CHECKING:
    from celery import Celery


class Plan(NamedTuple):
    """What is to be kept under a name, before the server is asked.

    record: without what follows from the server's clock
    when: makes what says when it fires of the server's clock in microseconds
    expires: when all of its firings expire, in microseconds since the epoch, if that is one moment
    """

    name: str
    record: Record
    template: Template
    when: Callable[[int], dict[str, Any]]
    expires: int | None

    def made_of(self, old: Record | None, now: int) -> Record:
        """What is to be kept, if that is there already; an interval goes on as it was. Raises
        ScheduleError if it could never run a task."""
        for what, at in (("end", self.record.end), ("expires", self.expires)):
            if at is not None and at <= now:
                raise ScheduleError(
                    f"schedule {self.name!r}: {what}={to_datetime(at).isoformat()} is in the past: "
                    "it would never run"
                )
        new = replace(self.record, when=self.when(now))
        if old is None or new.start or "every" not in new.when:
            return new
        return replace(new, when=old.when) if old.when.get("every") == new.when["every"] else new


class Wanted(NamedTuple):
    """The options of :meth:`.schedules.Schedules.put`, as it explains them."""

    args: Any = ()
    kwargs: Mapping[str, Any] | None = None
    queue: str | None = None
    options: Mapping[str, Any] | None = None
    misfire: str = "once"
    grace: float | timedelta = 60.0
    overlap: str = "allow"
    jitter: float | timedelta = 0.0
    start: datetime | float | None = None
    end: datetime | float | None = None
    max_runs: int | None = None
    timezone: str | tzinfo | None = None
    owner: str | None = None
    either_day: bool = False


def plan_of(
    app: Celery,
    channel: Callable[[], AbstractContextManager[kombu_toc.CapturingChannel]],
    name: str,
    task: Any,
    schedule: Any,
    wanted: Wanted,
) -> Plan:
    """Check what is wanted, and have Celery make the message.

    channel: gives a channel that captures what is published

    Raises ScheduleError if it makes no sense.
    """
    check_name(name)
    zone = read_zone(app, name, schedule, wanted.timezone)
    start_us = read_time(name, "start", wanted.start, zone)
    end_us = read_time(name, "end", wanted.end, zone)
    if start_us is not None and end_us is not None and end_us < start_us:
        raise ScheduleError(f"schedule {name!r}: it ends before it starts")
    _check_one_of(name, "misfire", wanted.misfire, state.MISFIRES)
    _check_one_of(name, "overlap", wanted.overlap, state.OVERLAPS)
    max_runs = wanted.max_runs
    if max_runs is not None and (not isinstance(max_runs, int) or max_runs < 1):
        raise ScheduleError(f"schedule {name!r}: max_runs={max_runs!r} is not 1 or more")
    given = dict(wanted.options or {})
    if wanted.queue is not None:
        given["queue"] = wanted.queue
    expires = given.get("expires")
    if expires is None:
        expires = getattr(_registered(app, task), "expires", None)
    lasts = expires_at = None
    if isinstance(expires, (int, float, timedelta)):
        lasts = read_seconds(name, "expires", expires)
        if lasts == 0:
            raise ScheduleError(f"schedule {name!r}: expires=0: no firing would ever run")
    elif isinstance(expires, datetime):
        expires_at = read_time(name, "expires", expires, zone)
    template = capture(
        *(app, name, task, wanted.args, wanted.kwargs, given),
        *(None if lasts is None else lasts / 1e6, channel),
    )
    headers = kombu_toc.unpack(template.packed)["headers"]

    def when(now: int) -> dict[str, Any]:
        either_day = bool(wanted.either_day)
        read = read_schedule(name, schedule, zone, start_us, now, either_day=either_day)
        return read.to_json()

    record = Record(
        task=headers["task"],
        when=when(0),
        zone=zone,
        misfire=wanted.misfire,
        grace_us=read_seconds(name, "grace", wanted.grace),
        overlap=wanted.overlap,
        jitter_us=read_seconds(name, "jitter", wanted.jitter),
        start=start_us,
        end=end_us,
        max_runs=max_runs,
        expires_us=lasts,
        priority=template.priority,
        traits=template.traits,
        owner=wanted.owner,
        options=_shown(given),
    )
    definition = {
        **json.loads(record.to_text(name).partition("\n")[2]),
        "queue": template.queue,
    }
    relative = bool(getattr(schedule, "relative", False))
    text = json.dumps([definition, relative, template.fingerprint], sort_keys=True)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:32]
    return Plan(
        name,
        replace(record, fingerprint=fingerprint),
        template,
        when,
        expires_at,
    )


def _check_one_of(name: str, what: str, given: Any, known: tuple[str, ...]) -> None:
    if given not in known:
        raise ScheduleError(
            f"schedule {name!r}: {what}={given!r}; there are {', '.join(map(repr, known))}"
        )


def _registered(app: Celery, task: Any) -> Any:
    if isinstance(task, str):
        return app.tasks.get(task)
    try:
        return getattr(task, "type", task)
    except KeyError:  # a signature of a task that is registered elsewhere
        return None


def _shown(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as JSON can have them."""
    shown: dict[str, Any] = {}
    for key, value in options.items():
        try:
            shown[key] = json.loads(kombu_json.dumps(value))
        except (TypeError, ValueError):
            shown[key] = str(value)
    return shown
