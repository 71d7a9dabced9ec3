"""A message tells whether its time was given as a countdown.

Touches: ``AMQP.create_task_message``, which is replaced on the class.

Why: Celery turns a countdown into an ``eta`` by the clock of the machine that sends. Nothing that
is handed to ``before_task_publish`` or to the transport tells the two apart.

Read in Celery 5.3.6, 5.5.3 and 5.7.0.

Without: a countdown is an ``eta``. If the sender's clock is wrong, so is the time, as with every
other broker. Messages of protocol 1 have no id and no ``eta`` that the center can read, and wait
in the worker.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kombu_toc import COUNTDOWN, CompatPart

PART = CompatPart(
    "countdowns",
    touches="Celery's AMQP.create_task_message",
    lost="a countdown begins by the clock of the machine that sends",
    check=lambda amqp: [
        *CompatPart.missing(amqp, "create_task_message"),
        *CompatPart.missing(
            vars(amqp).get("create_task_message"), "__get__", "__set__", "__delete__"
        ),
    ],
)


def install() -> None:
    """Give the messages that are made of a countdown a mark."""
    from celery.app.amqp import AMQP

    if not PART.usable(AMQP):
        return
    # On the class, and uncached: the app that is just sending its first message has its AMQP,
    # and looks this up when it has asked for its transport (from Celery 5.5 on).
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
        properties[COUNTDOWN] = True
    if isinstance(body, dict):  # protocol 1
        headers.setdefault("id", task_id)
        if body.get("eta"):
            headers.setdefault("eta", body["eta"])
    return message
