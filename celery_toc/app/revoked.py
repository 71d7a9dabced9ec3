"""What follows when the message of a revoked task was removed: what a worker does that discards it.

The task's result is marked REVOKED, the signal ``task_revoked`` is sent, and workers list the task
among the revoked ones.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING

from celery import signals, states
from celery.app.task import Context

from .task import Task
from .task_center import TaskCenter

if TYPE_CHECKING:
    from celery import Celery

#: States of a result that does not exist yet, or of a task that no worker executes: the same as in
#: Celery's own `revoke`.
_NOT_BEGUN = frozenset((states.PENDING, states.RECEIVED, states.RETRY, states.REJECTED))

#: Environment variables and defaults: how many revoked ids are remembered, and for how many
#: seconds. The same as in celery.worker.state, which only a worker has to import.
_REVOKES_MAX = ("CELERY_WORKER_REVOKES_MAX", 50_000)
_REVOKE_EXPIRES = ("CELERY_WORKER_REVOKE_EXPIRES", 10_800.0)


def remember_revoked(center: TaskCenter, ids: Iterable[str]) -> None:
    """Have workers list these tasks among the revoked ones."""
    center.remember_cancelled(
        ids, most=int(_setting(*_REVOKES_MAX)), seconds=_setting(*_REVOKE_EXPIRES)
    )


def mark_revoked(app: Celery, task: Task, *, only_if_not_begun: bool = False) -> bool:
    """Mark the result of a task as REVOKED, and send ``task_revoked``; its message is removed.

    only_if_not_begun: do nothing if the result says that a worker has begun the task

    Returns whether that was done. A message that is no task, or that cannot be read, has no
    result. Raises whatever the result backend raises.
    """
    if task.name is None:
        return False
    # celery.worker.request.Request._announce_revoked does the same in a worker.
    kind = app.tasks.get(task.name)
    if kind is None:  # this process does not know the task: the app's own settings hold
        kind = app.Task()
        kind.name = task.name
    context = _context(task)
    backend = kind.backend
    if only_if_not_begun and backend.get_state(task.id) not in _NOT_BEGUN:
        return False
    ignored = context.ignore_result
    if ignored is None:
        ignored = kind.ignore_result
    backend.mark_as_revoked(
        task.id,
        "revoked",
        request=context,
        store_result=not ignored or kind.store_errors_even_if_ignored,
    )
    signals.task_revoked.send(
        sender=kind, request=context, terminated=False, signum=None, expired=False
    )
    return True


def _setting(name: str, default: float) -> float:
    return float(os.environ.get(name, default))


def _context(task: Task) -> Context:
    """The request of a task, as a worker would make it from the message."""
    info = task.properties.get("delivery_info") or {}
    fields = {
        "ignore_result": None,
        **task.fields,
        "properties": task.properties,
        "reply_to": task.properties.get("reply_to"),
        "correlation_id": task.properties.get("correlation_id"),
        "hostname": socket.gethostname(),
        "delivery_info": {
            "exchange": info.get("exchange"),
            "routing_key": info.get("routing_key"),
            "priority": task.properties.get("priority"),
            "redelivered": False,
        },
        **task.embedded,
        "args": task.args,
        "kwargs": task.kwargs,
    }
    return Context(fields)
