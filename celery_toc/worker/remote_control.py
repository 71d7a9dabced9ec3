"""Remote control: ``celery inspect toc``, ``celery control toc_pause`` and ``toc_resume``; and
``celery inspect scheduled``, ``query_task`` and ``revoked``, which also tell what the center holds.

Importing this module registers the commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar

from celery.utils.log import get_logger
from celery.utils.serialization import jsonify
from celery.utils.time import maybe_iso8601, maybe_make_aware
from celery.worker import state as worker_state
from celery.worker.control import control_command, inspect_command, nok, ok
from kombu.utils.encoding import safe_repr
from kombu.utils.functional import maybe_list

from kombu_toc import WAITING, PartialError

from ..app.task import Task, TaskCenter
from ..compat import control
from ..schedules.state import Schedule

logger = get_logger(__name__)

_Command = TypeVar("_Command", bound=Callable[..., Any])

#: The default number of scheduled tasks in one reply.
SCHEDULED = 1000

#: Bytes of bodies in one reply; of further tasks the reply has the senders' abridged arguments.
IN_FULL = 8_000_000

#: Seconds for which one worker lists what waits in a queue. Longer than anybody waits for replies:
#: a worker that replies late must not list it again.
SPEAKS = 10.0

#: The largest difference between an `eta` and the time that the center stores for it.
_ROUNDED = timedelta(milliseconds=2)

#: The priority that Celery's timer gives to tasks with an `eta`.
_PRIORITY = 6


#: Celery's decorators, which have no types.
_inspect: Callable[..., Callable[[_Command], _Command]] = inspect_command
_control: Callable[..., Callable[[_Command], _Command]] = control_command


def _step(state: Any) -> Any:
    """The worker's step, or None if its broker is not a timeout center."""
    return getattr(state.consumer, "timeout_center_step", None)


_NONE = "the broker of this worker is not a timeout center"


@_inspect()
def toc(state: Any, **kwargs: Any) -> Any:
    """Show what the worker holds: leases, messages fetched ahead, times it serves; its lateness."""
    step = _step(state)
    return nok(_NONE) if step is None else step.report()


@_inspect(args=[("limit", int)], signature="[N=1000]")
def toc_schedules(state: Any, limit: int | None = None, **kwargs: Any) -> Any:
    """The recurring tasks of the worker's queues; of several workers, one lists a queue."""
    step = _step(state)
    if step is None:
        return nok(_NONE)
    center = TaskCenter(state.app, step.center)
    most = SCHEDULED if limit is None else limit
    found: list[dict[str, Any]] = []
    for queue in _spoken_for(center, state):
        if len(found) < most:
            page = center.schedules.list(queue=queue, limit=most - len(found))
            found += map(_schedule_told, page.schedules)
    return found


def _schedule_told(schedule: Schedule) -> dict[str, Any]:
    return {
        "name": schedule.name,
        "task": schedule.task,
        "schedule": schedule.text,
        "timezone": schedule.timezone,
        "queue": schedule.queue,
        "state": schedule.state,
        "next": None if schedule.next is None else schedule.next.isoformat(),
        "last": None if schedule.last is None else schedule.last.isoformat(),
        "runs": schedule.runs,
        "owner": schedule.owner,
    }


def _set_paused(state: Any, paused: bool, done: str, otherwise: str) -> Any:
    step = _step(state)
    return nok(_NONE) if step is None else ok(done if step.set_paused(paused) else otherwise)


@_control()
def toc_pause(state: Any, **kwargs: Any) -> Any:
    """Take no more tasks from any queue; those that are here go on."""
    return _set_paused(state, True, "paused", "was paused already")


@_control()
def toc_resume(state: Any, **kwargs: Any) -> Any:
    """Take tasks again."""
    return _set_paused(state, False, "takes tasks again", "was not paused")


#: Celery's commands that those below replace; None if they are not replaced.
_celerys = control.inspect_commands()


def scheduled(state: Any, limit: int | None = None, **kwargs: Any) -> Any:
    """List of currently scheduled ETA/countdown tasks."""
    # What is too far ahead to be in Redis is left out: a worker does not wait for a database here.
    found = _celerys.scheduled(state, **kwargs) if _celerys is not None else []
    step = _step(state)
    if step is None:
        return found
    center = TaskCenter(state.app, step.center)
    topics = _spoken_for(center, state)
    most = SCHEDULED if limit is None else limit
    found = [*found]
    try:
        for one in _told(center.scheduled(topics, most, far=False), state):
            found.append(one)
    except PartialError as exc:  # Celery's reply has no place for it
        logger.warning("inspect scheduled: the reply lacks what is missing: %s", exc)
    return found


def query_task(state: Any, ids: Any, **kwargs: Any) -> Any:
    """Query for task information by id."""
    found = _celerys.query_task(state, ids, **kwargs) if _celerys is not None else {}
    step, missing = _step(state), [str(id) for id in maybe_list(ids) if id not in found]
    if step is None or not missing:
        return found
    center = TaskCenter(state.app, step.center)
    now_us = center.client.time()[0] * 1_000_000
    try:
        for queue in _spoken_for(center, state):
            waiting = center.get(missing, topic=queue, far=False)
            later = [one for one in waiting if one.state == WAITING and one.time_us > now_us]
            for one in _told(map(center.task, later), state):
                found[one["request"]["id"]] = "scheduled", one["request"]
    except PartialError as exc:
        logger.warning("inspect query_task: the reply lacks what is missing: %s", exc)
    return found


def revoked(state: Any, **kwargs: Any) -> Any:
    """List of revoked task-ids."""
    found = _celerys.revoked(state, **kwargs) if _celerys is not None else []
    step = _step(state)
    if step is None:
        return found
    # Workers are not told of tasks that were removed from the center; list these as well.
    removed = step.center.notes.cancelled_lately(worker_state.REVOKE_EXPIRES)
    return list(dict.fromkeys([*removed, *found]))


if _celerys is not None:
    _inspect(alias="dump_schedule", args=[("limit", int)], signature="[N=1000]")(scheduled)
    _inspect(alias="dump_revoked")(revoked)
    _inspect(variadic="ids", signature="[id1 [id2 [... [idN]]]]")(query_task)


def _spoken_for(center: TaskCenter, state: Any) -> list[str]:
    """The queues whose tasks this worker lists; of several workers, one lists a queue."""
    queues = dict.fromkeys(queue.name for queue in state.consumer.task_consumer.queues)
    return center.notes.speaks_for(queues, state.hostname, SPEAKS)


def _told(tasks: Iterator[Task], state: Any) -> Iterator[dict[str, Any]]:
    """Tasks that wait in the center, in the form in which Celery lists a worker's own."""
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
    """When a task is due: the `eta` as it was sent, unless the task was rescheduled."""
    due = task.eta or datetime.now(timezone.utc)
    try:
        sent = maybe_make_aware(maybe_iso8601(task.fields.get("eta")), app.timezone)
        return sent if abs(sent - due) <= _ROUNDED else due
    except (AttributeError, TypeError, ValueError):  # it has none that can be read
        return due
