"""What is to be kept of a schedule, before the server is asked: checked, and with the message
that Celery makes for it."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import datetime, timedelta, tzinfo
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import Task
from celery.canvas import Signature
from celery.local import maybe_evaluate
from celery.utils.time import maybe_iso8601
from kombu import Queue
from kombu.utils import json as kombu_json

import kombu_toc

from . import rules, state
from .state import Record, firing_id, replace

if TYPE_CHECKING:
    from celery import Celery

    from ..compat.sending import QuickMessages


# -- the message of a firing
#
# Celery makes it once, when the schedule is put, by its own ``apply_async``. That is the template.
# A firing differs from it in its id, in its time, and in when it expires.

#: Options that say when a task runs, or which one it is: the schedule does.
_REFUSED = ("eta", "countdown", "task_id", "producer", "connection", "publisher")

#: What stands in a template for the time of a firing; its id, as of this time, stands for the id.
_SOME_US = 4_000_000_000_000_000
_SOME_TIME = rules.to_datetime(_SOME_US)


class Template(NamedTuple):
    """What the firings of a schedule are made of.

    packed: the message, with marks for what differs between firings
    fingerprint: the same for two templates that make the same messages
    """

    queue: str
    task: str
    priority: int
    traits: str
    packed: bytes
    fingerprint: str


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
    id = firing_id(name, _SOME_US)
    with channel() as capturing:
        deflate = capturing.settings.toc_deflate
        key = values = None
        if quick is not None and expires is None and "headers" not in options:
            known = app.tasks.get(task) if isinstance(task, str) else maybe_evaluate(task)
            if isinstance(known, Task):
                key = quick.key_of(known, {**options, "eta": _SOME_TIME})
                values = quick.values_of(known, id, args or (), kwargs or {}, {"eta": _SOME_TIME})
        if quick is not None and values is not None and (shape := quick.find(key)) is not None:
            parts = (shape.queue, shape.task, shape.priority, "")
            return _template(parts, shape.plain(values, ""), shape.sender, deflate)
        if app.conf.task_protocol != 2:
            raise rules.ScheduleError(
                f"schedule {name!r}: messages of Celery's protocol {app.conf.task_protocol} have "
                "their id in the body; set task_protocol to 2"
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
        given = {**options, "headers": headers, "eta": _SOME_TIME, "retry": False, "task_id": id}
        if expires is not None:
            given["expires"] = _SOME_TIME + timedelta(seconds=expires)
        given["producer"] = app.amqp.Producer(capturing, auto_declare=False)
        sent = _apply(app, name, task, args, kwargs, given)
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
    queue, message, priority, traits, _ = made[0]
    if queue is None:
        raise rules.ScheduleError(
            f"schedule {name!r}: its task would go to no queue, but to whoever listens"
        )
    headers, properties = message["headers"], message["properties"]
    # Without a parent also if it is put by a task.
    headers.update(id=id, root_id=id, parent_id=None, eta=_SOME_TIME.isoformat())
    properties.update(correlation_id=id, k=kombu_toc.token_with("", headers))
    if expires is not None:
        headers["expires"] = rules.to_datetime(_SOME_US + round(expires * 1e6)).isoformat()
        properties["expiration"] = str(round(expires * 1000))
    sender = (headers.get("origin"), properties.get("reply_to"))
    packed = kombu_toc.pack(message, deflate=False)
    return _template((queue, headers["task"], priority, traits), packed, sender, deflate)


def _template(
    parts: tuple[str, str, int, str], plain: bytes, sender: Iterable[str | None], deflate: bool
) -> Template:
    """sender: what a message says of the process that has made it"""
    lasting = plain
    for text in filter(None, sender):
        lasting = lasting.replace(_quoted(text), b'""')
    fingerprint = hashlib.sha256(lasting).hexdigest()[:32]
    return Template(*parts, kombu_toc.compress(plain) if deflate else plain, fingerprint)


def _quoted(text: str) -> bytes:
    return encode_basestring_ascii(text).encode()


@lru_cache(maxsize=256)
def _moment(us: int) -> bytes:
    return _quoted(rules.to_datetime(us).isoformat())


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
    if isinstance(task, str) and task:
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
    line, newline, body = kombu_toc.expand(template).partition(b"\n")
    times = [(_SOME_US, due)]
    if expires_us is not None:
        times.append((_SOME_US + expires_us, (due if late else planned) + expires_us))
    line = line.replace(_quoted(firing_id(name, _SOME_US)), _quoted(id))
    for mark, at in times:
        line = line.replace(_moment(mark), _moment(at))
    # The last one is a property; what a business id adds is there already.
    before, key, after = line.rpartition(b'"k":"')
    token = b"%08x" % zlib.crc32(id.encode("utf-8", "surrogatepass"))
    plain = b"".join((before, key, token, after, newline, body))
    packed = plain if template[:1] == b"{" else kombu_toc.compress(plain, id)
    return kombu_toc.ScheduleFiring(id, packed, due, priority, traits)


# -- what is to be kept of a schedule, before the server is asked


class Plan(NamedTuple):
    """What is to be kept under a name, before the server is asked.

    record: without what follows from the server's clock
    schedule: as it was given
    expires: when all of its firings expire, in microseconds since the epoch, if that is one moment
    """

    name: str
    record: Record
    template: Template
    schedule: Any
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
        if old is not None and not new.start and old.when.get("every") == new.when["every"]:
            return replace(new, when=old.when)
        read = rules.read_schedule(self.name, self.schedule, new.zone, new.start, now)
        return replace(new, when=read.to_json())


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
    for what, known in (("misfire", state.MISFIRES), ("overlap", state.OVERLAPS)):
        if (rule := getattr(wanted, what)) not in known:
            raise rules.ScheduleError(
                f"schedule {name!r}: {what}={rule!r}; there are {', '.join(map(repr, known))}"
            )
    max_runs = wanted.max_runs
    if max_runs is not None and (type(max_runs) is not int or not 0 < max_runs < 2**53):
        raise rules.ScheduleError(f"schedule {name!r}: max_runs={max_runs!r} is not 1 or more")
    if not isinstance(wanted.options, (Mapping, type(None))):
        raise rules.ScheduleError(f"schedule {name!r}: options={wanted.options!r} is no mapping")
    given = dict(wanted.options or {})
    if wanted.queue is not None:
        given["queue"] = wanted.queue
    for what, value in (("queue", given.get("queue")), ("owner", wanted.owner)):
        if not isinstance(value, (str, Queue, type(None))):
            raise rules.ScheduleError(f"schedule {name!r}: {what}={value!r} is no name")
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

    either_day = bool(wanted.either_day)
    when = rules.read_schedule(name, schedule, zone, start_us, 0, either_day=either_day)
    definition: dict[str, Any] = {
        "task": template.task,
        "when": when.to_json(),
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
    text = _encode_sorted(said)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:32]
    record = replace(state.EMPTY, **definition, fingerprint=fingerprint)
    return Plan(name, record, template, schedule, expires_at)


_encode_sorted = json.JSONEncoder(sort_keys=True).encode


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
