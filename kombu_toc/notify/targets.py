"""The targets of topics: which there are, and how one is stopped."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ..model.limits import interval_us
from ..model.topic import Declaration
from ..scripts.call import text

if TYPE_CHECKING:
    from ..center.center import TimeoutCenter


class Target(NamedTuple):
    """What the declaration of a topic says of what is sent of it."""

    url: str
    retry_backoff: float  #: seconds; 0: the notifier's
    retry_backoff_max: float  #: seconds
    spacing: float = 0.0  #: seconds between two messages, of a rate that lets them start one by one


def read_targets(center: TimeoutCenter) -> dict[str, Target]:
    """The topics that something is to be sent of now: they have a target that was not stopped, and
    are not paused."""
    found = {
        text(name): declaration
        for name, raw in center.client.hgetall(center.keys.topics).items()
        if b'"target":' in raw and (declaration := Declaration.from_json(raw)).target
    }
    if not found:
        return {}
    paused = center.paused()
    made = {}
    for name, declaration in found.items():
        if declaration.target and not declaration.target_stopped and name not in paused:
            limits = declaration.limits(center.limits)
            one_by_one = declaration.rate and (declaration.rate_burst or 1) == 1
            made[name] = Target(
                declaration.target,
                limits.retry_backoff,
                limits.retry_backoff_max,
                interval_us(declaration.rate) / 1e6 if one_by_one and declaration.rate else 0.0,
            )
    return made


def stop_target(center: TimeoutCenter, topic: str, url: str, why: str) -> bool:
    """Have nothing sent to the target of a topic any more, until somebody names one again.

    url: the target that is meant: if the topic has another one by now, nothing is done
    why: is shown with the topic

    Returns whether it was this call that has stopped it.
    """
    while True:
        found = center.declared(topic)
        if found is None or found.declaration.target != url or found.declaration.target_stopped:
            return False
        if center.redeclare(found, replace(found.declaration, target_stopped=why)):
            return True
