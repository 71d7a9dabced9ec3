"""Marks the messages whose time is a countdown, for the transport.

Celery turns a countdown into an ``eta`` by the clock of this machine. The mark tells the
transport to count the time by Redis's clock instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from celery.app.amqp import AMQP

import kombu_toc


def install() -> None:
    """Mark the countdowns of every app of this process.

    Replaces the public attribute ``AMQP.create_task_message``: Celery has no hook between the
    countdown and the message.
    """
    # On the class, and uncached: the app that is just sending its first message has its AMQP,
    # and looks this up after it has asked for its transport (from Celery 5.5 on).
    cached = AMQP.create_task_message
    AMQP.create_task_message = property(
        lambda amqp: partial(create_task_message, cached.__get__(amqp)),
        cached.__set__,
        cached.__delete__,
    )


def create_task_message(
    create: Callable[..., Any],
    /,
    task_id: str,
    name: str,
    args: Any = None,
    kwargs: Any = None,
    countdown: float | None = None,
    *rest: Any,
    **options: Any,
) -> Any:
    """Create the message of a task, and add what the transport reads.

    create: Celery's function, which is given all the other arguments

    What is added is the mark of a countdown, and with protocol 1, whose headers are empty, id and
    eta. Returns what `create` returns: headers, properties, body, event.
    """
    message = create(task_id, name, args, kwargs, countdown, *rest, **options)
    headers, properties, body, _ = message
    if countdown:
        # A property and not a header: a retry inherits headers, and may have another kind of time.
        properties[kombu_toc.COUNTDOWN] = True
    if isinstance(body, dict):  # protocol 1
        headers.setdefault("id", task_id)
        if body.get("eta"):
            headers.setdefault("eta", body["eta"])
    return message
