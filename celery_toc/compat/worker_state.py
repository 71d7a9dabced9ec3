"""Which tasks a worker has, and whether it is told to end.

Touches: ``celery.worker.state``: ``requests``, ``reserved_requests``, ``active_requests``,
``should_stop``, ``should_terminate`` and ``maybe_shutdown``.

Why: no signal and no method tells which tasks a worker has; the commands that show them are for
others, and copy what they show.

Read in Celery 5.3.6 and 5.7.0.

Without: a message would be given back while its task is executed. A worker does not start.
"""

from __future__ import annotations

from kombu_toc import CompatPart

_NAMES = (
    "requests",
    "reserved_requests",
    "active_requests",
    "should_stop",
    "should_terminate",
    "maybe_shutdown",
)

PART = CompatPart(
    "worker-state",
    touches=f"celery.worker.state: {', '.join(_NAMES)}",
    lost="messages would be given back while their tasks are executed",
    check=lambda state: CompatPart.missing(state, *_NAMES),
    way_out="Install Celery 5.3.6 to 5.7",
)


def check() -> None:
    """Raises CompatError."""
    from celery.worker import state

    PART.usable(state)
