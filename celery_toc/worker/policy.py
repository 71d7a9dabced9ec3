"""What a Celery worker tells the transport: how many tasks its pool can start, what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery.worker import state

import kombu_toc

from .prefork import send_now

if TYPE_CHECKING:
    from .step import TimeoutCenterStep

#: Seconds for which a pool of threads has work queued of its own.
QUEUED_IN_POOL = 0.02


class PoolPolicy:
    """The policy of a worker's channel; see `kombu_toc.WorkerPolicy`."""

    accepts_early = True

    def __init__(self, step: TimeoutCenterStep, c: Any, *, prefetches: bool, in_threads: bool):
        self._step = step
        self._consumer = c
        self.prefetches = prefetches
        self.queues_in_pool = in_threads
        #: what `keeps` asks
        self.kept: Callable[[kombu_toc.Message], bool] = lambda m: step._executing(c, m)

    def idle_slots(self) -> int | None:
        return self._step._free(self._consumer)

    def idle_within(self, seconds: float) -> int:
        return self._step._soon_free(self._consumer, seconds)

    def start_limit(self) -> int | None:
        idle = self._step._free(self._consumer)
        if self.queues_in_pool:
            # A thread goes on with what its pool has queued while the loop waits for the
            # interpreter.
            idle += self._step._soon_free(self._consumer, QUEUED_IN_POOL)
        return idle

    def wants_early(self, message: kombu_toc.Message) -> bool:
        return self._step._is_timed(self._consumer, message)

    def keeps(self, message: kombu_toc.Message) -> bool:
        return self.kept(message)

    def take_queued(self, seconds: float) -> list[kombu_toc.Message]:
        return self._step._take_queued(seconds)

    def before_delivery(self) -> None:
        state.maybe_shutdown()

    def flush_pool(self) -> bool:
        send_now(self._consumer.pool)
        return True
