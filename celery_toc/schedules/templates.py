"""The message of a firing: what Celery would send for it.

Celery makes it once, when the schedule is put, by its own ``apply_async``. That is the template. A
firing differs from it in its id, in its time, and in when it expires.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from celery import Task
from celery.canvas import Signature

import kombu_toc

from .errors import ScheduleError
from .rules import to_datetime
from .state import firing_id

if TYPE_CHECKING:
    from celery import Celery

#: Options that say when a task runs, or which one it is: the schedule does.
_REFUSED = ("eta", "countdown", "task_id", "producer", "connection", "publisher")

#: What differs between two messages for the same thing.
_PASSING = ("id", "root_id", "parent_id", "eta", "expires", "origin")

#: Any time will do: each firing has its own.
_SOME_TIME = to_datetime(4_000_000_000_000_000)


class Template:
    """What the firings of a schedule are made of.

    captured: as Kombu has prepared one
    """

    def __init__(self, name: str, captured: kombu_toc.Captured, deflate: bool) -> None:
        if captured.queue is None:
            raise ScheduleError(
                f"schedule {name!r}: its task would go to no queue, but to whoever listens"
            )
        self.queue: str = captured.queue
        _, message, self.priority, self.traits, _ = captured
        headers, properties = message["headers"], message["properties"]
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
) -> Template:
    """Have Celery make the message of a firing, and declare the queue that it goes to.

    expires: seconds after its planned time

    Raises ScheduleError for what cannot be sent again and again, and what ``apply_async`` raises.
    """
    for option in _REFUSED:
        if options.get(option) is not None:
            raise ScheduleError(
                f"schedule {name!r}: the option {option} belongs to one message, and a schedule "
                "sends many: leave it out"
            )
    if app.conf.task_protocol != 2:
        raise ScheduleError(
            f"schedule {name!r}: messages of Celery's protocol {app.conf.task_protocol} have their "
            "id in the body; set task_protocol to 2"
        )
    if app.conf.task_always_eager:
        raise ScheduleError(
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
    with channel() as capturing:
        producer = app.amqp.Producer(capturing, auto_declare=False)
        sent = _apply(app, name, task, args, kwargs, {**given, "task_id": id, "producer": producer})
        backend = getattr(sent, "backend", None)
        if backend is not None and hasattr(backend, "remove_pending_result"):
            backend.remove_pending_result(sent)  # nothing was sent: no result will come
        made = [one for one in capturing.captured if one.message["headers"].get("id") == id]
        capturing.captured.clear()
        if any(one.unique for one in made):
            raise ScheduleError(
                f"schedule {name!r}: its task has a unique key; a firing is one message already: "
                "use overlap='skip' or 'wait', or send it from a task that the schedule starts"
            )
        if len(made) != 1:
            shown = ", ".join(str(one.queue) for one in made) or "none"
            raise ScheduleError(
                f"schedule {name!r}: its task would go to these queues: {shown}; a schedule has "
                "one, so route it to one queue, or name it: queue=..."
            )
        return Template(name, made[0], capturing.settings.toc_deflate)


def _apply(
    app: Celery, name: str, task: Any, args: Any, kwargs: Any, options: dict[str, Any]
) -> Any:
    if isinstance(task, Signature):
        if type(task) is not Signature:
            raise ScheduleError(
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
        raise ScheduleError(
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
    traits: str = "",
) -> kombu_toc.ScheduleFiring:
    """The message of a firing.

    planned, due: when it was to be, and with its jitter
    traits: what holds for it alone
    by_hand: it is none, but is sent beside them
    """
    id = firing_id(name, planned) + ("!" if by_hand else "")
    message = kombu_toc.unpack(template)
    headers, properties = message["headers"], message["properties"]
    headers.update(id=id, root_id=id, eta=to_datetime(due).isoformat())
    properties["correlation_id"] = id
    token = f"{zlib.crc32(id.encode('utf-8', 'surrogatepass')):08x}"
    properties["k"] = kombu_toc.token_with(token, headers)
    if expires_us is not None:
        headers["expires"] = to_datetime(planned + expires_us).isoformat()
        properties["expiration"] = str(expires_us // 1000)
    deflate = template[:1] != b"{"
    return kombu_toc.ScheduleFiring(
        id, kombu_toc.pack(message, deflate=deflate, id=id), due, priority, traits
    )
