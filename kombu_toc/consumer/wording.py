"""How a log names messages and their tasks."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from redis.exceptions import ResponseError

from ..errors import EnvelopeError
from ..model import message as envelope
from ..model.results import Delivery
from .pipe import BROKEN

if TYPE_CHECKING:
    from ..center.center import TimeoutCenter

#: Messages whose task names are looked up for a log, at once.
MAX_NAMED = 10


def task_of(body: bytes, id: str) -> str:
    """The name of the task that a message kept under that id carries; empty if it is none, or
    cannot be read."""
    try:
        name = envelope.unpack(body, id)["headers"].get("task")
    except EnvelopeError:
        return ""
    return name if isinstance(name, str) else ""


def in_words(delivery: Delivery) -> str:
    """Which message it is: id, topic, and the task's name if it has one."""
    task = task_of(delivery.body, delivery.id)
    return f"{delivery.id} of {delivery.topic}{f' (task {task})' if task else ''}"


def task_names(
    center: TimeoutCenter, topic: str, ids: list[str], messages: Iterable[Delivery] = ()
) -> dict[str, str]:
    """What a log says of the tasks of these messages: `` (task NAME)``, or nothing. What is not
    among `messages` is looked up, for it is rare."""
    names = dict.fromkeys(ids, "")
    bodies = {message.id: message.body for message in messages if message.id in names}
    unknown = [id for id in ids if id not in bodies][:MAX_NAMED]
    if unknown:
        with suppress(*BROKEN, ResponseError):
            bodies.update((found.id, found.body) for found in center.get(unknown, topic=topic))
    for id, body in bodies.items():
        task = task_of(body, id)
        if id in names and task:
            names[id] = f" (task {task})"
    return names
