"""Priority steps of topics that are declared already: whether they agree with a center's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import PriorityStepsError
from ..model.limits import PRIORITY_STEPS
from ..model.topic import Topic


def agreed(topic: Topic, steps: tuple[int, ...]) -> Topic:
    """The topic. Raises PriorityStepsError if it was declared with others."""
    standing = topic.declaration.steps
    # A topic that expires is used by many who know nothing of each other: replies, events.
    if topic.declaration.altered or topic.declaration.expires:
        return topic
    if standing is None or standing == steps:
        return topic
    raise PriorityStepsError(
        f"queue {topic.name!r} was declared with priority_steps {_listed(standing)}, not "
        f"{_listed(steps)}; set priority_steps to {_listed(standing)}, or leave it out, for "
        "then a queue's own are used; to give it others: "
        f"'celery toc topic set {topic.name} --priority-steps {_listed(steps)}'"
    )


def check_unused(client: Any, topic: Topic, steps: tuple[int, ...]) -> None:
    """Raise PriorityStepsError if messages are under default steps that these lack: an older
    release has declared the topic, without steps. In such an app all places have the same, or
    messages get lost."""
    there = _in_use(client, topic, set(PRIORITY_STEPS) - set(steps))
    if there:
        raise PriorityStepsError(
            f"queue {topic.name!r} holds messages under the priority steps "
            f"{_listed(there)}, which {_listed(steps)} lack: they were sent with "
            f"priority_steps {_listed(PRIORITY_STEPS)}, the default; leave priority_steps "
            f"out, or 'celery toc repair {topic.name}' moves them"
        )


def _in_use(client: Any, topic: Topic, steps: Iterable[int]) -> list[int]:
    """Those of some steps under which messages wait."""
    pairs = [(step, slot.store(step)) for slot in topic.all_slots() for step in sorted(steps)]
    with client.pipeline(transaction=False) as pipe:
        for _, key in pairs:
            pipe.exists(key)
        replies = pipe.execute() if pairs else []
    return sorted({step for (step, _), there in zip(pairs, replies, strict=True) if there})


def _listed(steps: Iterable[int]) -> str:
    """Priority steps as a URL has them."""
    return ",".join(map(str, steps))
