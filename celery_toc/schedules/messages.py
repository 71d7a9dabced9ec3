"""What is to be kept of a schedule, before the server is asked: checked, and with the message
that Celery makes for it."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import Task
from celery.canvas import Signature
from celery.utils.time import maybe_iso8601
from kombu.utils import json as kombu_json

import kombu_toc

from . import rules, state
from .state import Record, firing_id

if TYPE_CHECKING:
    from celery import Celery

    from ..compat.sending import QuickMessages


# -- the message of a firing
#
# Celery makes it once, when the schedule is put, by its own ``apply_async``. That is the template.
# A
# firing differs from it in its id, in its time, and in when it expires.

#: Options that say when a task runs, or which one it is: the schedule does.
_REFUSED = ("eta", "countdown", "task_id", "producer", "connection", "publisher")

#: What differs between two messages for the same thing.
_PASSING = ("id", "root_id", "parent_id", "eta", "expires", "origin")

#: Any time will do: each firing has its own.
_SOME_TIME = rules.to_datetime(4_000_000_000_000_000)


class Template:
    """What the firings of a schedule are made of.

    captured: as Kombu has prepared one
    """

    def __init__(self, name: str, captured: kombu_toc.Captured, deflate: bool) -> None:
        if captured.queue is None:
            raise rules.ScheduleError(
                f"schedule {name!r}: its task would go to no queue, but to whoever listens"
            )
        self.queue: str = captured.queue
        _, message, self.priority, self.traits, _ = captured
        headers, properties = message["headers"], message["properties"]
        self.task: str = headers["task"]
        headers["root_id"] = headers["id"]
        headers["parent_id"] = None  # also if it is put by a task
        self.packed = kombu_toc.pack(message, deflate=deflate)
        passing = {key: value for key, value in headers.items() if key not in _PASSING}
        lasting = {
            "headers": passing,
            "properties": {"delivery_info": properties.get("delivery_info")},
            "content-type": message["content-type"],
            "content-encoding": message["content-encoding"],
            "body": message["body"],
        }
        for key in ("priority", "delivery_mode"):
            lasting["properties"][key] = properties.get(key)
        #: the same for two templates that make the same messages
        self.fingerprint = hashlib.sha256(kombu_toc.pack(lasting, deflate=False)).hexdigest()[:32]


def capture(
    app: Celery,
    name: str,
    task: Any,
    args: Any,
    kwargs: Any,
    options: Mapping[str, Any],
    expires: float | None,
    channel: Callable[[], AbstractContextManager[kombu_toc.CapturingChannel]],
    quick: QuickMessages | None,
) -> Template:
    """Have Celery make the message of a firing, and declare the queue that it goes to.

    expires: seconds after its planned time
    quick: makes it, if Celery has just made others of the same task with the same options

    Raises ScheduleError for what cannot be sent again and again, and what ``apply_async`` raises.
    """
    for option in _REFUSED:
        if options.get(option) is not None:
            raise rules.ScheduleError(
                f"schedule {name!r}: the option {option} belongs to one message, and a schedule "
                "sends many: leave it out"
            )
    if app.conf.task_protocol != 2:
        raise rules.ScheduleError(
            f"schedule {name!r}: messages of Celery's protocol {app.conf.task_protocol} have their "
            "id in the body; set task_protocol to 2"
        )
    if app.conf.task_always_eager:
        raise rules.ScheduleError(
            f"schedule {name!r}: with task_always_eager nothing is sent; leave that off"
        )
    headers = {
        **(options.get("headers") or {}),
        kombu_toc.SCHEDULE: name,
        "x-slot-basis": kombu_toc.SCHEDULE_BASIS,
    }
    given = {**options, "headers": headers, "eta": _SOME_TIME, "retry": False}
    if expires is not None:
        given["expires"] = _SOME_TIME + timedelta(seconds=expires)
    id = firing_id(name, 4_000_000_000_000_000)
    key = values = None
    if quick is not None and expires is None and "headers" not in options:
        task = app.tasks.get(task, task) if isinstance(task, str) else task
        if isinstance(task, Task):
            key = quick.key_of(task, {**options, "eta": _SOME_TIME})
            values = quick.values_of(task, id, args or (), kwargs or {}, {"eta": _SOME_TIME})
    with channel() as capturing:
        if quick is not None and values is not None and (shape := quick.find(key)) is not None:
            message = kombu_toc.unpack(shape.plain(values, ""))
            quickly = kombu_toc.Captured(shape.queue, message, shape.priority)
            return Template(name, quickly, capturing.settings.toc_deflate)
        producer = app.amqp.Producer(capturing, auto_declare=False)
        sent = _apply(app, name, task, args, kwargs, {**given, "task_id": id, "producer": producer})
        backend = getattr(sent, "backend", None)
        if backend is not None and hasattr(backend, "remove_pending_result"):
            backend.remove_pending_result(sent)  # nothing was sent: no result will come
        made = [one for one in capturing.captured if one.message["headers"].get("id") == id]
        if quick is not None and key is not None and values is not None and len(made) == 1:
            plain = not (made[0].traits or made[0].unique)
            quick.learn(key, capturing, made[0].message if plain else None, values)
        capturing.captured.clear()
        if any(one.unique for one in made):
            raise rules.ScheduleError(
                f"schedule {name!r}: its task has a unique key; a firing is one message already: "
                "use overlap='skip' or 'wait', or send it from a task that the schedule starts"
            )
        if len(made) != 1:
            shown = ", ".join(str(one.queue) for one in made) or "none"
            raise rules.ScheduleError(
                f"schedule {name!r}: its task would go to these queues: {shown}; a schedule has "
                "one, so route it to one queue, or name it: queue=..."
            )
        return Template(name, made[0], capturing.settings.toc_deflate)


def _apply(
    app: Celery, name: str, task: Any, args: Any, kwargs: Any, options: dict[str, Any]
) -> Any:
    if isinstance(task, Signature):
        if type(task) is not Signature:
            raise rules.ScheduleError(
                f"schedule {name!r}: a schedule sends one task, and {type(task).__name__} is made "
                "of several; write a task that starts it"
            )
        return task.clone(args, kwargs).apply_async(**options)
    if isinstance(task, str):
        known = app.tasks.get(task)
        if known is None:
            return app.send_task(task, args, kwargs, **options)
        task = known
    if not isinstance(task, Task):
        raise rules.ScheduleError(
            f"schedule {name!r}: {task!r} is neither a task nor the name of one nor a signature"
        )
    return task.apply_async(args, kwargs, **options)


def firing_of(
    name: str,
    template: bytes,
    planned: int,
    due: int,
    priority: int,
    expires_us: int | None,
    *,
    by_hand: bool = False,
    late: bool = False,
    traits: str = "",
) -> kombu_toc.ScheduleFiring:
    """The message of a firing.

    planned, due: when it was to be, and with its jitter
    traits: what holds for it alone
    by_hand: it is none, but is sent beside them
    late: it is sent although its time has passed; it expires after it is due
    """
    id = firing_id(name, planned) + ("!" if by_hand else "")
    message = kombu_toc.unpack(template)
    headers, properties = message["headers"], message["properties"]
    headers.update(id=id, root_id=id, eta=rules.to_datetime(due).isoformat())
    properties["correlation_id"] = id
    token = f"{zlib.crc32(id.encode('utf-8', 'surrogatepass')):08x}"
    properties["k"] = kombu_toc.token_with(token, headers)
    if expires_us is not None:
        headers["expires"] = rules.to_datetime((due if late else planned) + expires_us).isoformat()
        properties["expiration"] = str(expires_us // 1000)
    deflate = template[:1] != b"{"
    return kombu_toc.ScheduleFiring(
        id, kombu_toc.pack(message, deflate=deflate, id=id), due, priority, traits
    )


# -- what is to be kept of a schedule, before the server is asked


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
                moment = rules.to_datetime(at).isoformat()
                raise rules.ScheduleError(
                    f"schedule {self.name!r}: {what}={moment} is in the past: it would never run"
                )
        new = self.record
        if "every" not in new.when:
            return new
        same = old is not None and not new.start and old.when.get("every") == new.when["every"]
        return replace(new, when=old.when if same and old is not None else self.when(now))


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
    exclude: Any = ()


def plan_of(
    app: Celery,
    channel: Callable[[], AbstractContextManager[kombu_toc.CapturingChannel]],
    name: str,
    task: Any,
    schedule: Any,
    wanted: Wanted,
    quick: QuickMessages | None = None,
) -> Plan:
    """Check what is wanted, and have Celery make the message.

    channel: gives a channel that captures what is published
    quick: makes messages that are like others

    Raises ScheduleError if it makes no sense.
    """
    rules.check_name(name)
    zone = rules.read_zone(app, name, schedule, wanted.timezone)
    start_us = rules.read_time(name, "start", wanted.start, zone)
    end_us = rules.read_time(name, "end", wanted.end, zone)
    if start_us is not None and end_us is not None and end_us < start_us:
        raise rules.ScheduleError(f"schedule {name!r}: it ends before it starts")
    _check_one_of(name, "misfire", wanted.misfire, state.MISFIRES)
    _check_one_of(name, "overlap", wanted.overlap, state.OVERLAPS)
    max_runs = wanted.max_runs
    if max_runs is not None and (not isinstance(max_runs, int) or max_runs < 1):
        raise rules.ScheduleError(f"schedule {name!r}: max_runs={max_runs!r} is not 1 or more")
    given = dict(wanted.options or {})
    if wanted.queue is not None:
        given["queue"] = wanted.queue
    expires = given.get("expires")
    if expires is None:
        expires = getattr(_registered(app, task), "expires", None)
    lasts = expires_at = None
    if isinstance(expires, (int, float, timedelta)):
        lasts = rules.read_seconds(name, "expires", expires)
        if lasts == 0:
            raise rules.ScheduleError(f"schedule {name!r}: expires=0: no firing would ever run")
    elif expires is not None:
        if isinstance(expires, str):
            with suppress(ValueError):
                expires = maybe_iso8601(expires)
        expires_at = rules.read_time(name, "expires", expires, zone)
    template = capture(
        *(app, name, task, wanted.args, wanted.kwargs, given),
        *(None if lasts is None else lasts / 1e6, channel, quick),
    )

    def when(now: int) -> dict[str, Any]:
        either_day = bool(wanted.either_day)
        read = rules.read_schedule(name, schedule, zone, start_us, now, either_day=either_day)
        return read.to_json()

    definition: dict[str, Any] = {
        "task": template.task,
        "when": when(0),
        "zone": zone,
        "misfire": wanted.misfire,
        "grace_us": rules.read_seconds(name, "grace", wanted.grace),
        "overlap": wanted.overlap,
        "jitter_us": rules.read_seconds(name, "jitter", wanted.jitter),
        "start": start_us,
        "end": end_us,
        "max_runs": max_runs,
        "exclude": rules.read_exclusions(name, wanted.exclude),
        "expires_us": lasts,
        "priority": template.priority,
        "traits": template.traits,
        "owner": wanted.owner,
        "options": _shown(given),
    }
    relative = bool(getattr(schedule, "relative", False))
    said = [definition, template.queue, relative, template.fingerprint]
    text = json.dumps(said, sort_keys=True)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:32]
    record = Record(**definition, fingerprint=fingerprint)
    return Plan(name, record, template, when, expires_at)


def _check_one_of(name: str, what: str, given: Any, known: tuple[str, ...]) -> None:
    if given not in known:
        raise rules.ScheduleError(
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
