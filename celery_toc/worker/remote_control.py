"""Remote control: ``celery inspect toc``, ``celery control toc_pause`` and ``toc_resume``; and
``celery inspect scheduled`` and ``revoked``, which tell of the center what they tell of a worker.

To import this module makes the commands known in a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar

from celery.utils.serialization import jsonify
from celery.utils.time import maybe_iso8601, maybe_make_aware
from celery.worker import state as worker_state
from celery.worker.control import control_command, inspect_command, nok, ok
from kombu.utils.encoding import safe_repr

from ..app.task import Task
from ..app.task_center import TaskCenter
from ..compat import inspecting

_Command = TypeVar("_Command", bound=Callable[..., Any])

#: Scheduled tasks that one answer has, unless another number is asked for.
SCHEDULED = 1000

#: Bytes of bodies after which arguments are told as their senders wrote them, abridged.
IN_FULL = 8_000_000

#: Seconds for which one worker tells what waits in a queue. Longer than anybody waits for answers:
#: who comes to it late must not tell it again.
SPEAKS = 10.0

#: What differs between an `eta` and the time that a center has made of it, at most.
_ROUNDED = timedelta(milliseconds=2)

#: What Celery's timer gives tasks that wait for their time.
_PRIORITY = 6


#: Celery's decorators, which have no types.
_inspect: Callable[..., Callable[[_Command], _Command]] = inspect_command
_control: Callable[..., Callable[[_Command], _Command]] = control_command


def _step(state: Any) -> Any:
    """The worker's step, or None if its broker is no timeout center."""
    return getattr(state.consumer, "timeout_center_step", None)


_NONE = "the broker of this worker is not a timeout center"


@_inspect()
def toc(state: Any, **kwargs: Any) -> Any:
    """What the worker holds: leases, messages fetched ahead, times it serves; its lateness."""
    step = _step(state)
    return nok(_NONE) if step is None else step.report()


@_control()
def toc_pause(state: Any, **kwargs: Any) -> Any:
    """Take no more tasks from any queue; those that are here go on."""
    step = _step(state)
    if step is None:
        return nok(_NONE)
    return ok("paused" if step.pause() else "was paused already")


@_control()
def toc_resume(state: Any, **kwargs: Any) -> Any:
    """Take tasks again."""
    step = _step(state)
    if step is None:
        return nok(_NONE)
    return ok("takes tasks again" if step.resume() else "was not paused")


#: Celery's commands of which these two take the place, or None if they stay.
_celerys = inspecting.commands()


def scheduled(state: Any, limit: int | None = None, **kwargs: Any) -> Any:
    """List of currently scheduled ETA/countdown tasks."""
    found = _celerys.scheduled(state, **kwargs) if _celerys is not None else []
    step = _step(state)
    if step is None:
        return found
    center = TaskCenter(state.app, step.center)
    topics = _spoken_for(center, state)
    return [*found, *_told(center.scheduled(topics, SCHEDULED if limit is None else limit), state)]


def revoked(state: Any, **kwargs: Any) -> Any:
    """List of revoked task-ids."""
    found = _celerys.revoked(state, **kwargs) if _celerys is not None else []
    step = _step(state)
    if step is None:
        return found
    # Of what waited in the center, workers need not be told, and it is to be seen all the same.
    removed = step.center.cancelled_lately(worker_state.REVOKE_EXPIRES)
    return list(dict.fromkeys([*removed, *found]))


if _celerys is not None:
    _inspect(alias="dump_schedule", args=[("limit", int)], signature="[N=1000]")(scheduled)
    _inspect(alias="dump_revoked")(revoked)


def _spoken_for(center: TaskCenter, state: Any) -> list[str]:
    """The queues of this worker whose tasks it lists; of many workers, one does."""
    queues = dict.fromkeys(queue.name for queue in state.consumer.task_consumer.queues)
    return center.speaks_for(queues, state.hostname, SPEAKS)


def _told(tasks: Iterator[Task], state: Any) -> Iterator[dict[str, Any]]:
    """Tasks that wait in the center, as Celery tells of those that a worker holds."""
    read = 0
    for task in tasks:
        read += len(task.body)
        in_full = read <= IN_FULL
        args, kwargs = (
            (task.args, task.kwargs)
            if in_full
            else (task.headers.get("argsrepr", ""), task.headers.get("kwargsrepr", ""))
        )
        info = task.properties.get("delivery_info") or {}
        yield {
            "eta": _eta(task, state.app).isoformat(),
            "priority": _PRIORITY,
            # celery.worker.request.Request.info
            "request": {
                "id": task.id,
                "name": task.fields.get("shadow") or task.name,
                "args": jsonify(args, unknown_type_filter=safe_repr),
                "kwargs": jsonify(kwargs, unknown_type_filter=safe_repr),
                "type": task.name,
                "hostname": state.hostname,
                "time_start": None,
                "acknowledged": False,
                "delivery_info": {
                    "exchange": info.get("exchange"),
                    "routing_key": info.get("routing_key"),
                    "priority": task.properties.get("priority"),
                    "redelivered": getattr(task.found, "retries_left", None) is not None,
                },
                "worker_pid": None,
            },
        }


def _eta(task: Task, app: Any) -> datetime:
    """When a task is due: as it was sent, unless the center has been told otherwise since."""
    due = task.eta or datetime.now(timezone.utc)
    try:
        sent = maybe_make_aware(maybe_iso8601(task.fields.get("eta")), app.timezone)
        return sent if abs(sent - due) <= _ROUNDED else due
    except (AttributeError, TypeError, ValueError):  # it has none that can be read
        return due
