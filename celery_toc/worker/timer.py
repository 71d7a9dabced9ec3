"""Tasks that have waited in the center start when it says that they are due, whatever the worker's
clock says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from celery.worker import state

import kombu_toc

from .requests import forget


class PastTimers:
    """The consumer's timer, but for tasks that have waited in the center: they start when it says
    that they are due, and most of them are.

    limits: gives the entries that end tasks at their time limits
    qos: gives the consumer's prefetch count
    """

    def __init__(
        self,
        timer: Any,
        limits: Callable[[], Iterable[Any]] = tuple,
        qos: Callable[[], Any] = lambda: None,
    ) -> None:
        self._timer = timer
        self._limits = limits
        self._qos = qos

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
        """As the timer's; of a task that has waited in the center, at its action time."""
        message = getattr(args[0], "message", None) if args else None
        if not isinstance(message, kombu_toc.Message) or not message.waited:
            return self._timer.call_at(eta, fun, args, kwargs, priority)
        entry = self._timer.Entry(fun, args, kwargs)
        if not message.is_early:
            entry()
            return entry
        # Celery fetches one more for each task that its timer has. These are fetched already,
        # and the prefetch count may be set anew before they begin.
        qos = self._qos()
        if qos is not None:
            qos.decrement_eventually()

        def begin() -> None:
            if entry.canceled:  # by Celery, because the connection is lost
                return
            if qos is not None:
                qos.increment_eventually()
            entry()

        message.call_when_due(begin, lambda: forget(args[0]))
        return entry

    def clear(self) -> None:
        """Forget everything but the time limits of tasks that go on.

        Celery before 5.7 clears its timer when the connection is lost.
        """
        limits = list(self._limits())
        kept = [scheduled for scheduled in self._timer.queue if scheduled.entry in limits]
        self._timer.clear()
        for eta, priority, entry in kept:
            self._timer.enter_at(entry, eta, priority)


def begin_when_due(handle: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What to do with a request instead of `handle`: of a message that is handed over ahead of its
    time, wait until then.

    Most of these go to the timer; but with an ``eta`` from before this machine's start Celery uses
    none.
    """

    def on_task_request(request: Any) -> Any:
        message = getattr(request, "message", None)
        if not isinstance(message, kombu_toc.Message) or not message.is_early:
            return handle(request)
        return message.call_when_due(lambda: handle(request), lambda: forget(request))

    return on_task_request


def forget_what_has_ended(message: Any) -> None:
    """After Celery's strategy has handled a message: forget its task if that has ended.

    Celery 5.7 notes a task with an ``eta`` as scheduled once the timer has it. One that was
    started at once may have ended by then, and would never be forgotten.
    """
    if not isinstance(message, kombu_toc.Message) or not message.waited:
        return
    request: Any = state.requests.get(message.headers.get("id"))
    if request is not None and (
        request.message is message
        and message.acknowledged
        and request not in state.active_requests
        and request not in state.reserved_requests
    ):
        state.requests.pop(request.id, None)
        state.scheduled_requests.discard(request)
