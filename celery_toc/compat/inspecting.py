"""``celery inspect scheduled`` and ``revoked`` tell of the center what they tell of a worker.

Touches: ``celery.worker.control.scheduled`` and ``revoked``, whose answers are added to.

Why: a command is registered by its name, and the one that is registered last answers; Celery's own
can only be called by the name that its module gives it.

Read in Celery 5.3.6 and 5.7.0.

Without: the two commands tell what the worker itself holds: none of what waits in the center.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kombu_toc import CompatPart

PART = CompatPart(
    "inspect",
    touches="celery.worker.control.scheduled and .revoked",
    lost="`inspect scheduled` and `revoked` do not tell what waits in the center",
    check=lambda control: CompatPart.missing(control, "scheduled", "revoked"),
)


class Commands(NamedTuple):
    """Celery's own; each takes the worker's state, and arguments by name."""

    scheduled: Callable[..., Any]
    revoked: Callable[..., Any]


def commands() -> Commands | None:
    """The commands that are to be replaced; None if they stay."""
    from celery.worker import control

    return Commands(control.scheduled, control.revoked) if PART.usable(control) else None
