"""What a Celery worker tells the transport: how many tasks its pool can start, what it keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable
from typing import Any
from weakref import ref

from celery import Task
from celery.worker import state

import kombu_toc

from ..compat import processes
from . import pools
from .pace import Pace
from .requests import SubmittedRequests

#: Seconds for which a pool of threads has work queued of its own.
QUEUED_IN_POOL = 0.02


class PoolPolicy:
    """The policy of a worker's channel; see `kombu_toc.WorkerPolicy`.

    accepts_early: whether tasks may be handed over ahead of their time
    is_stopping: tells whether the worker is about to end
    """

    def __init__(
        self,
        consumer: Any,
        submitted: SubmittedRequests,
        pace: Pace,
        *,
        accepts_early: bool,
        is_stopping: Callable[[], bool],
    ) -> None:
        pool = consumer.pool
        self._consumer = consumer
        self._submitted = submitted
        self._pace = pace
        self._is_stopping = is_stopping
        self.accepts_early = accepts_early
        self.queues_in_pool = pools.in_threads(pool)
        self.paused = False
        #: while everything is given back that the pool has not begun
        self.ending = False
        # A full pool of greenlets stops whoever gives it one more, for as long as it is full.
        self._prefetches = not (
            pool.is_green or consumer.app.conf.get("worker_disable_prefetch", False)
        )
        self._scaler = getattr(consumer.controller, "autoscaler", None) or consumer.controller
        self._missing = processes.missing_of(pool)
        #: what was executing when that was last looked at
        self._seen: set[Any] = set()
        self._sent = processes.SentTasks(pool) if processes.in_event_loop(pool) else None
        self.flush_pool = processes.SendNow(pool)
        self.before_delivery = state.maybe_shutdown

    @property
    def prefetches(self) -> bool:
        return self._prefetches and not self.paused

    def idle_slots(self) -> int | None:
        busy = self._submitted.busy()
        if busy != self._seen:
            self._seen = busy
            self._pace.see(busy, time.monotonic())
        return 0 if self.paused else self._limit() - len(busy)

    def idle_within(self, seconds: float) -> int:
        return self._pace.soon_free(seconds, self._limit(), time.monotonic())

    def start_limit(self) -> int | None:
        idle = self.idle_slots()
        if self.queues_in_pool and idle is not None:
            # A thread goes on with what its pool has queued while the loop waits for the
            # interpreter.
            idle += self.idle_within(QUEUED_IN_POOL)
        return idle

    def _limit(self) -> int:
        # An autoscaler's pool grows for what comes, up to its present maximum.
        most = getattr(self._scaler, "max_concurrency", None)
        pool = self._consumer.pool
        # Before Celery 5.7, a gevent pool's num_processes is how many tasks run just now.
        limit: int = most or (pool.limit if pool.is_green else pool.num_processes) or 1
        return limit - self._missing()

    def wants_early(self, message: kombu_toc.Message) -> bool:
        return is_timed(self._consumer.app, message)

    def keeps(self, message: kombu_toc.Message) -> bool:
        if self.ending:
            return self._submitted.begun(message) or self._was_sent(message)
        # Only the connection is lost, unless the worker is about to end.
        if self._is_stopping():
            return False
        request = self._submitted.executing(message)
        if request is None:
            return self._was_sent(message)
        # What Celery is about to cancel is left to be delivered again.
        cancels = self._consumer.app.conf.get("worker_cancel_long_running_tasks_on_connection_loss")
        return not (cancels and request.task.acks_late and not request.acknowledged)

    def _was_sent(self, message: kombu_toc.Message) -> bool:
        return self._sent is not None and self._sent.keeps(message)

    def execution(self, message: kombu_toc.Message) -> Hashable | None:
        # Celery has noted by now that the pool has begun its task, or that it has ended. What is
        # terminated has ended for Celery before its process has.
        request = self._submitted.active(message)
        if request is None and self._sent is not None:
            request = self._sent.executed(message)
        return None if request is None else ref(request)

    def ended(self, executions: Collection[Hashable]) -> Collection[Hashable]:
        ended = set(executions) - self._submitted.busy()
        if not ended or self._sent is None:
            return ended
        return [one for one in ended if not self._sent.executes(one())]  # type: ignore[operator]

    def take_queued(self, seconds: float) -> list[kombu_toc.Message]:
        return self._submitted.take_queued(time.monotonic() - seconds)


def is_timed(app: Any, message: kombu_toc.Message) -> bool:
    """Whether Celery prepares this message's task and then leaves it to the timer.

    Its own strategy does; one of somebody else's might begin the task at once.
    """
    task = app.tasks.get(message.headers.get("task"))
    return (
        message.waited
        and getattr(task, "Strategy", None) == Task.Strategy
        and type(task).start_strategy is Task.start_strategy
    )
