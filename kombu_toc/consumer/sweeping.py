"""Deletes what others have left behind: transient queues and bindings that went stale."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..center.center import TimeoutCenter
from ..center.exchanges import Bindings

logger = logging.getLogger(__name__)

#: Stale topics and exchanges that one look deletes at most.
SWEEP_MOST = 100


def sweep(center: TimeoutCenter, log: Callable[..., None] = logger.log) -> list[str]:
    """Delete the transient queues and bindings that nobody has refreshed; return their names.

    log: logs, as :meth:`logging.Logger.log`
    """
    stale = center.stale(SWEEP_MOST)
    bindings = Bindings(center)
    for member in stale:
        kind, _, name = member.partition(":")
        if kind == "topic":
            log(logging.INFO, "deleting queue %s: it went stale", name)
            center.delete(name)
        else:
            bindings.of(name)
    return stale
