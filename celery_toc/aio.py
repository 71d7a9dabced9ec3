"""Sends tasks from an event loop, and finds, moves and cancels them; nothing blocks the loop.

::

    from celery_toc import aio

    result = await aio.send(remind.s(order), countdown=3600)
    await aio.cancel(result.id)

A task is sent by Celery's own ``apply_async``, with a producer whose channel reaches the server
through the event loop. So the message is Celery's, byte for byte, and its signals are sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import kombu_toc

from .app.sending import AsyncTaskCenter, sender_of

if TYPE_CHECKING:
    from celery import Celery, Signature

__all__ = ("AsyncTaskCenter", "aclose", "cancel", "get", "reschedule", "send", "timeout_center")


async def send(task: Signature, **options: Any) -> Any:
    """Send a task, as ``task.apply_async(**options)`` does.

    task: a signature, such as ``add.s(1, 2)``; also a chain or a group. What the result backend
        begins (a chord, or a chain with a group in it) is sent in a thread
    options: those of ``apply_async``: ``countdown``, ``eta``, ``queue``, ``task_id``, ...

    Returns what ``apply_async`` returns. Raises what it raises, and ConfigurationError if the
    app's broker is no timeout center. If the awaiting task is cancelled, nobody knows whether the
    message was sent; to send it again with the same ``task_id`` adds nothing while it waits.
    """
    return await sender_of(task.app).send(task, options)


def timeout_center(app: Celery | None = None) -> AsyncTaskCenter:
    """The timeout center of an app's broker: the methods of :class:`celery_toc.TaskCenter`,
    awaited.

    app: the current app unless given

    The tasks of an event loop share it. Its connections are those over which :func:`send` sends.
    """
    return sender_of(app).center


async def get(
    id: str | Iterable[str], *, app: Celery | None = None, **options: Any
) -> list[kombu_toc.Found]:
    """Look tasks up by id: :meth:`kombu_toc.TimeoutCenter.get`, with its options.

    app: the current app unless given
    """
    found: list[kombu_toc.Found] = await sender_of(app).center.get(id, **options)
    return found


async def cancel(
    id: str | Iterable[str], *, app: Celery | None = None, **options: Any
) -> list[kombu_toc.Cancelled]:
    """Delete waiting tasks by id: :meth:`kombu_toc.TimeoutCenter.cancel`, with its options.

    app: the current app unless given
    """
    cancelled: list[kombu_toc.Cancelled] = await sender_of(app).center.cancel(id, **options)
    return cancelled


async def reschedule(
    task_id: str, *, app: Celery | None = None, **options: Any
) -> list[kombu_toc.Rescheduled]:
    """Give a waiting task another time, ``eta`` or ``countdown``; without one it is due now:
    :meth:`celery_toc.TaskCenter.reschedule`, with its options.

    app: the current app unless given
    """
    moved: list[kombu_toc.Rescheduled] = await sender_of(app).center.reschedule(task_id, **options)
    return moved


async def aclose(app: Celery | None = None) -> None:
    """Close the connections that this event loop has to the app's broker: to be awaited before the
    loop ends, as in a lifespan handler. They open again when they are needed.

    app: the current app unless given
    """
    await sender_of(app).aclose()
