"""A task that fails for good goes to DeadQueue, where the app or the task asks for it.

The request sees what Celery makes of a failure: it holds back the acknowledgement until then. If
the task has neither succeeded, nor will be retried, nor is revoked, and its message does not come
back, then the message goes to DeadQueue: rejected if it was to be acknowledged now, or buried if
that was done before the task ran, as Celery does unless it is told otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import Terminated, TimeLimitExceeded
from celery.exceptions import Ignore, Reject, Retry

import kombu_toc

REASON = "the task failed"

#: Characters of an exception's text, and of the end of its traceback, that are kept.
TEXT, TRACEBACK = 800, 3000

#: What a task raises that has not failed.
_NO_FAILURE = (Ignore, Reject, Retry, Terminated, MemoryError)

#: Events of a request that has not failed for good.
_OTHERWISE = frozenset(("task-succeeded", "task-retried", "task-revoked", "task-cancelled"))


class _Outcome:
    """What Celery does with a request whose task has failed."""

    __slots__ = ("acknowledged", "events", "requeued")

    def __init__(self) -> None:
        self.acknowledged = False
        self.requeued = False
        self.events: set[str] = set()


@cache
def dying(base: type) -> type:
    """A request class whose message goes to DeadQueue when its task has failed for good."""
    if getattr(base, "dies_on_failure", False):
        return base

    class Request(base):  # type: ignore[misc]  # Celery has no types
        dies_on_failure = True
        _outcome: _Outcome | None = None
        _is_settled = False

        def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
            exc = exc_info.exception
            if isinstance(exc, ExceptionWithTraceback):
                exc = exc.exc
            handle = partial(super().on_failure, exc_info, *args, **kwargs)
            if isinstance(exc, _NO_FAILURE):
                return handle()
            return self._settling(exc, exc_info.traceback, handle)

        def on_timeout(self, soft: bool, timeout: float) -> Any:
            handle = partial(super().on_timeout, soft, timeout)
            return handle() if soft else self._settling(TimeLimitExceeded(timeout), "", handle)

        def _settling(
            self, exc: BaseException, traceback: object, handle: Callable[[], Any]
        ) -> Any:
            """Have Celery handle a failure, and settle the message as that has come out."""
            late = self.task.acks_late
            if self._outcome is not None or self._is_settled or (late and self.acknowledged):
                return handle()
            message = self.message
            message.reason, message.error = REASON, report(exc, traceback)
            was_acknowledged = self.acknowledged
            outcome = self._outcome = _Outcome()
            try:
                return handle()
            finally:
                self._outcome = None
                if outcome.acknowledged or was_acknowledged:
                    self._settle(outcome, exc, was_acknowledged)

        def _settle(self, outcome: _Outcome, exc: BaseException, was_acknowledged: bool) -> None:
            lives = outcome.requeued or not outcome.events.isdisjoint(_OTHERWISE)
            if isinstance(exc, (SystemExit, KeyboardInterrupt)):
                # Its process was told to end: that is a failure if Celery takes it for one.
                lives = lives or "task-failed" not in outcome.events
            self._is_settled = not lives
            if not lives and was_acknowledged:
                if isinstance(self.message, kombu_toc.Message):
                    self.message.bury(self.message.reason, self.message.error)
            elif not lives:
                super().reject(requeue=False)
            elif not was_acknowledged:
                super().acknowledge()

        def acknowledge(self) -> None:
            if self._outcome is None:
                # Celery acknowledges it when it begins. If its worker is lost, it has failed.
                if not self.task.acks_late and isinstance(self.message, kombu_toc.Message):
                    self.message.dies_if_lost = True
                super().acknowledge()
            else:
                self._outcome.acknowledged = True

        def reject(self, requeue: bool = False) -> None:
            if self._outcome is not None:
                self._outcome.requeued = requeue
                self._is_settled = True
            super().reject(requeue=requeue)

        def send_event(self, type: str, **fields: Any) -> None:
            if self._outcome is not None:
                self._outcome.events.add(type)
            elif type == "task-revoked":
                self._is_settled = True  # also if its process is killed then
            super().send_event(type, **fields)

    Request.__qualname__ = Request.__name__ = base.__name__
    Request.__module__ = base.__module__
    return Request


def report(exc: BaseException, traceback: object) -> str:
    """An exception and the end of its traceback, as they are kept with a message."""
    text = f"{type(exc).__name__}: {exc}"
    if len(text) > TEXT:
        text = f"{text[:TEXT]}..."
    lines = str(traceback or "").strip()
    if len(lines) > TRACEBACK:
        end = lines[-TRACEBACK:]
        lines = f"...\n{end.partition(chr(10))[2] or end}"
    return f"{text}\n{lines}" if lines else text
