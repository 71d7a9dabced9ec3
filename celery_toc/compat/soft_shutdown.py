"""A cold shutdown gives back what nobody has begun before it waits.

Touches: ``WorkController.wait_for_soft_shutdown`` of Celery 5.5 and later, which is replaced on the
worker.

Why: a cold shutdown happens within a signal handler, in which Celery sleeps for as long as tasks
may still end, and waits for the pool. The signal ``worker_shutting_down`` comes before that, and
tells nothing of who else may be stopped by then.

Read in Celery 5.5.3, 5.6.3 and 5.7.0; 5.3 and 5.4 have no soft shutdown.

Without: what a worker has fetched and not begun comes back when its leases end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kombu_toc import CompatPart

PART = CompatPart(
    "soft-shutdown",
    touches="Celery's WorkController.wait_for_soft_shutdown",
    lost="what a worker has fetched comes back from a cold shutdown when its leases end",
    check=lambda worker: [],  # Celery before 5.5 has none, and needs none
)


def install(worker: Any, before: Callable[[], None]) -> None:
    """Have a worker call `before` when its soft shutdown begins."""
    wait = getattr(worker, "wait_for_soft_shutdown", None)
    if wait is None or hasattr(wait, "is_ours") or not PART.usable(worker):
        return

    def wait_for_soft_shutdown() -> None:
        before()
        wait()

    ours: Any = wait_for_soft_shutdown
    ours.is_ours = True
    worker.wait_for_soft_shutdown = ours
