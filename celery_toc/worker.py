"""What a worker gains when its broker is a timeout center.

Active without any set-up: a worker whose broker is ours gets one more bootstep
(`celery_toc.plugin` sees to that). It

- tells the channel how many tasks could start at once, so that no task is fetched by a busy
  worker while an idle one could start it;
- hands a task that arrives when it is due straight on, instead of to a timer: a message with an
  ``eta`` has waited in Redis, by Redis's clock, and ``request.eta`` stays as sent;
- keeps the messages of executing tasks when the connection breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import bootsteps
from celery.utils.log import get_logger
from celery.worker import state
from celery.worker.consumer.tasks import Tasks

import kombu_toc

from .rejections import explain

logger = get_logger(__name__)

__all__ = ("TimeoutCenterStep",)


class _PastTimers:
    """The consumer's timer, but for tasks that have waited already: they start at once."""

    def __init__(self, timer: Any) -> None:
        self._timer = timer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timer, name)

    def call_at(
        self,
        eta: Any,
        fun: Callable[..., Any],
        args: Any = (),
        kwargs: Any = None,
        priority: int = 0,
    ) -> Any:
        message = getattr(args[0], "message", None) if args else None
        if not isinstance(message, kombu_toc.Message) or not message.waited:
            return self._timer.call_at(eta, fun, args, kwargs, priority)
        entry = self._timer.Entry(fun, args, kwargs)
        entry()
        return entry


class TimeoutCenterStep(bootsteps.StartStopStep):
    """See the module."""

    label = "Timeout center"
    requires = (Tasks,)

    def __init__(self, c: Any, **kwargs: Any) -> None:
        super().__init__(c, **kwargs)
        transport = c.conninfo.get_transport_cls()
        self.enabled = isinstance(transport, type) and issubclass(transport, kombu_toc.Transport)
        self._poller: Any = None
        self._warned = False
        #: requests that a pool of threads or greenlets was given
        self._submitted: set[Any] = set()
        if self.enabled:
            # Strategies bind the timer's method when the Tasks step starts, before this one.
            c.timer = _PastTimers(c.timer)
            explain(c)

    def include_if(self, c: Any) -> bool:
        return self.enabled

    def start(self, c: Any) -> None:
        channel = c.task_consumer.channel
        self._poller = channel.poller
        self._poller.steady = True
        channel.free = lambda: self._limit(c) - self._busy()
        channel.keep = lambda message: self._executing(c, message)
        channel.no_prefetch = bool(c.app.conf.get("worker_disable_prefetch"))
        self._warn_of_forgetfulness(c, channel)
        if not c.hub or _ends_tasks_in_threads(c.pool):
            self._tell_when_tasks_end(c.pool)

    def _warn_of_forgetfulness(self, c: Any, channel: kombu_toc.Channel) -> None:
        """Once, not at every reconnect."""
        if self._warned or channel.transport.address.kind == "embedded":
            return
        self._warned = True
        for warning in kombu_toc.durability_warnings(channel.center.client):
            logger.warning("The broker %s may lose messages: %s", c.conninfo.as_uri(), warning)

    def stop(self, c: Any) -> None:
        self._poller = None

    @staticmethod
    def _limit(c: Any) -> int:
        return getattr(c.controller, "max_concurrency", None) or c.pool.num_processes or 1

    def _executing(self, c: Any, message: kombu_toc.Message) -> bool:
        """Whether the connection alone is lost, and the pool has this message's task."""
        # Celery asks the same of its flag: an exit code, which may be 0, or None or False.
        stopping = state.should_stop is not None and state.should_stop is not False
        if stopping or c.controller.blueprint.state != bootsteps.RUN:
            return False
        cancels = c.app.conf.get("worker_cancel_long_running_tasks_on_connection_loss")
        for request in {*state.active_requests, *self._submitted}:
            if request.message is message:
                # What Celery is about to cancel is left to be delivered again.
                return not (cancels and request.task.acks_late and not request.acknowledged)
        return False

    def _busy(self) -> int:
        """How many tasks the pool has or is about to get."""
        reserved = state.reserved_requests
        others = [r for r in (*state.active_requests, *self._submitted) if r not in reserved]
        return len(reserved) + len(set(others))

    def _tell_when_tasks_end(self, pool: Any) -> None:
        """In these pools nothing wakes the loop when a task ends."""
        if getattr(pool, "_toc_step", None) is not None:
            pool._toc_step = self
            return
        pool._toc_step = self
        apply = pool.on_apply

        def on_apply(
            target: Any, args: Any = None, kwargs: Any = None, callback: Any = None, **options: Any
        ) -> Any:
            # Celery's request, whose method the callback is: the pool has it from now on, and
            # starts it when it can, whatever becomes of the connection.
            request = getattr(callback, "__self__", None)
            step = pool._toc_step

            def left() -> None:
                step._submitted.discard(request)
                poller = pool._toc_step._poller
                if poller is not None:
                    poller.nudge()

            def ended(*result: Any) -> Any:
                try:
                    return callback(*result)
                finally:
                    left()

            def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    return target(*args, **kwargs)
                except BaseException:  # the pool does not call back then
                    left()
                    raise

            if callback is None or not hasattr(request, "message"):
                return apply(target, args, kwargs, callback=callback, **options)
            step._submitted.add(request)
            return apply(run, args, kwargs, callback=ended, **options)

        pool.on_apply = on_apply


def _ends_tasks_in_threads(pool: Any) -> bool:
    try:
        from celery.concurrency.thread import TaskPool
    except ImportError:  # no concurrent.futures
        return False
    return isinstance(pool, TaskPool)
