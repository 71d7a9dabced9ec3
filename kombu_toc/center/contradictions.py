"""Declarations that contradict the one that stands: one warning for each, with the way out."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from ..model.limits import LIBRARY_TERMS, LIMITS, NOTIFIER_TERMS, TERMS, same
from ..model.topic import Declaration, Topic

logger = logging.getLogger(__name__)

#: Warnings that are remembered, lest they are logged again.
MAX_WARNED = 4096

#: What was warned of in this process: the declarations' key, the topic, and what was asked for.
_warned: set[tuple[str, str, str]] = set()

#: Limits that a topic has only if it was declared with them.
_UNLESS_SAID = frozenset((*TERMS, *LIBRARY_TERMS, *NOTIFIER_TERMS))

#: Limits that `declare` answers for by itself.
_ANSWERED = ("slots", "expires")


def warn_of_contradictions(place: str, topic: Topic, asked: Mapping[str, Any]) -> None:
    """Log, once in a process, what a topic was to be declared with and is not.

    place: where its declaration is kept
    asked: limits as :meth:`.registry.Registry.declare` takes them; what is None agrees with any
    """
    # A topic that expires is used by many who know nothing of each other: replies, events.
    if topic.declaration.expires:
        return
    found = list(_contradictions(topic, asked))
    if not found:
        return
    options = " ".join(f"{option_of(name)} {shown(name, value)}" for name, _, value in found)
    key = (place, topic.name, options)
    if key in _warned:
        return
    if len(_warned) >= MAX_WARNED:
        _warned.clear()
    _warned.add(key)
    logger.warning(
        "queue %r was declared with %s, and this process asks for %s: the former stands; "
        "'celery toc topic set %s %s' changes it",
        topic.name,
        ", ".join(f"{name}={shown(name, holds)}" for name, holds, _ in found),
        ", ".join(f"{name}={shown(name, value)}" for name, _, value in found),
        shlex.quote(topic.name),
        options,
    )


def option_of(limit: str) -> str:
    """The option of ``celery toc topic set`` for a limit."""
    return "--priority-steps" if limit == "steps" else f"--{limit.replace('_', '-')}"


def shown(limit: str, value: Any) -> str:
    """A limit's value as that option takes it."""
    if value is None:
        return "none" if limit in _UNLESS_SAID else "default"
    if limit == "key_weights":
        return ",".join(f"{key}={weight:.15g}" for key, weight in value)
    if limit == "steps":
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _contradictions(topic: Topic, asked: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(limit, what stands, what was asked for)."""
    wanted = Declaration.of(topic.name, **{k: v for k, v in asked.items() if k not in _ANSWERED})
    for name in (*LIMITS, "steps"):
        if name in _ANSWERED or asked.get(name) is None:
            continue
        holds, value = getattr(topic.declaration, name), getattr(wanted, name)
        if name == "steps":
            holds = topic.open_steps
        if not same(name, holds, value):
            yield name, holds, value
