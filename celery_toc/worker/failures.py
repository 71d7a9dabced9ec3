"""Passes on to the transport why a message is rejected."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import Terminated, TimeLimitExceeded
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.imports import symbol_by_name
from celery.utils.log import get_logger

import kombu_toc

from ..compat.worker import install_failure_reasons

# -- A task that fails for good goes to DeadQueue, where the app or the task asks for it
#
# The request sees what Celery makes of a failure: it holds back the acknowledgement until then. If
# the task has neither succeeded, nor will be retried, nor is revoked, and its message does not come
# back, then the message goes to DeadQueue: rejected if it was to be acknowledged now, or buried if
# that was done before the task ran, as Celery does unless it is told otherwise.

REASON = "the task failed"

#: Characters of an exception's text, and of the end of its traceback, that are kept.
TEXT, TRACEBACK = 800, 3000

#: Characters of arguments that a failure is listed with.
ARGUMENTS = 1000

#: What a task raises that has not failed.
_NO_FAILURE = (Ignore, Reject, Retry, Terminated, MemoryError)

#: Events of a request that has not failed for good.
_OTHERWISE = frozenset(("task-succeeded", "task-retried", "task-revoked", "task-cancelled"))


def has_failed(exc: BaseException, events: Collection[str]) -> bool:
    """Whether a task has failed for good, by the events that Celery has sent of its failure."""
    if isinstance(exc, (SystemExit, KeyboardInterrupt)):
        # Its process was told to end: that is a failure if Celery takes it for one.
        return "task-failed" in events
    return _OTHERWISE.isdisjoint(events)


#: What is below these layers in the end: a request class of Celery's, which has no types.
_Request: Any = object


class _Ending(_Request):  # type: ignore[misc]
    """A layer of a request class: is told how a task ends, unless it succeeds."""

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        exc: BaseException = exc_info.exception
        if isinstance(exc, ExceptionWithTraceback):  # as it comes from another process
            exc = exc.exc
        handle = partial(super().on_failure, exc_info, *args, **kwargs)
        return self._ends(exc, exc_info.traceback, handle)

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        handle = partial(super().on_timeout, soft, timeout)
        return handle() if soft else self._ends(TimeLimitExceeded(timeout), None, handle)

    def _ends(self, exc: BaseException, traceback: object, handle: Callable[[], Any]) -> Any:
        """Have Celery handle it.

        traceback: None at a time limit
        """
        return handle()


@cache
def layered(base: type, *layers: type, mask: Any = None) -> type:
    """A request class with these layers, the outermost first.

    mask: hides arguments before a failure is kept
    """
    # Logs and tools know it by the name of its base.
    own = {"__module__": base.__module__, "__qualname__": base.__name__, "celerys": base}
    if _Recorded in layers:
        own["on_success"] = base.on_success  # type: ignore[attr-defined]
    return type(base.__name__, (*layers, _Ending, base), {**own, "mask": mask})


class Dying(_Ending):
    """Its message goes to DeadQueue when its task has failed for good."""

    #: Celery's treatment of the failure, while that goes on
    _outcome: Any = None
    _is_settled = False

    def _ends(self, exc: BaseException, traceback: object, handle: Callable[[], Any]) -> Any:
        handle = partial(super()._ends, exc, traceback, handle)
        late = self.task.acks_late
        if isinstance(exc, _NO_FAILURE) or self._outcome is not None or self._is_settled:
            return handle()
        if late and self.acknowledged:
            return handle()
        message = self.message
        message.reason, message.error = REASON, report(exc, traceback)
        was_acknowledged = self.acknowledged
        outcome = self._outcome = SimpleNamespace(acknowledged=False, requeued=False, events=set())
        try:
            return handle()
        finally:
            self._outcome = None
            if outcome.acknowledged or was_acknowledged:
                lives = outcome.requeued or not has_failed(exc, outcome.events)
                self._is_settled = self.is_dead = not lives
                if not lives and was_acknowledged:
                    if isinstance(message, kombu_toc.Message):
                        message.bury(message.reason, message.error)
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


# -- passes on to the transport why a message is rejected
#
# Celery rejects a message without a reason. A message whose body it cannot decode is acknowledged,
# and so is lost. Here a rejected message keeps the reason and the last error, and a message that
# cannot be decoded goes to DeadQueue.

logger = get_logger(__name__)


def explain(consumer: Any) -> None:
    """Make a worker's consumer, and the requests that it creates from now on, keep reasons."""

    def undecodable(message: Any, exc: BaseException) -> bool:
        if not isinstance(message, kombu_toc.Message):
            return False
        logger.critical(
            "Message %s of queue %s cannot be decoded (content type %r, encoding %r): %r. "
            "It goes to DeadQueue.",
            message.headers.get("id"),
            message.delivery_info.get("routing_key"),
            message.content_type,
            message.content_encoding,
            exc,
        )
        _note(message, "its body cannot be decoded", exc)
        reject: Callable[..., Any] = message.reject_log_error
        reject(logger, consumer.connection_errors)
        return True

    install_failure_reasons(
        consumer,
        {
            "on_unknown_message": _note_unknown_message,
            "on_unknown_task": _note_unknown_task,
            "on_invalid_task": _note_invalid_task,
        },
        undecodable,
        lambda task: _request_class(consumer, task),
    )


def _request_class(consumer: Any, task: Any) -> type:
    base: Any = symbol_by_name(task.Request)
    base = vars(base).get("celerys", base)
    transport = consumer.connection.transport
    layers: list[type] = [_Telling]
    mask, dies = None, getattr(task, "dead_on_failure", None)
    if isinstance(transport, kombu_toc.Transport):
        settings = transport.settings
        dies = settings.toc_dead_on_failure if dies is None else dies
        if settings.toc_failures and getattr(task, "keep_failures", True):
            layers.insert(0, _Keeping)
            mask = _masking(settings.toc_failures_mask)
        if settings.toc_library:
            layers.insert(0, _Recorded)
    # Below the others, one of which says more of the error.
    return layered(base, *layers, *([Dying] if dies else []), mask=mask)


def _note_unknown_message(body: Any, message: Any) -> None:
    _note(message, "not a task: no consumer understands it")


def _note_unknown_task(body: Any, message: Any, exc: BaseException) -> None:
    _note(message, f"unknown task {exc}: no worker of this queue has registered it")


def _note_invalid_task(body: Any, message: Any, exc: BaseException) -> None:
    _note(message, "invalid task", exc)


def _note(message: Any, reason: str, exc: BaseException | None = None) -> None:
    if isinstance(message, kombu_toc.Message):
        message.reason = reason
        message.error = _text(exc)


def _text(exc: BaseException | None) -> str:
    return "" if exc is None else f"{type(exc).__name__}: {exc}"


def _leave_in_flight() -> None:
    """In place of a killed request's `acknowledge`: its message comes back."""


class _Telling(_Ending):
    """Stores the task's failure in its message before that is rejected."""

    keeps_traceback = False

    def cancel(self, pool: Any, *args: Any, **kwargs: Any) -> Any:
        # Celery takes a greenlet that it has killed for one that has succeeded, also where the
        # signal is handled in that greenlet, which ends it before this returns.
        if pool.is_green and self.task.acks_late:
            self.acknowledge = _leave_in_flight
        try:
            return super().cancel(pool, *args, **kwargs)
        except Exception:  # the signal is handled in a hub, which kills nobody
            self.__dict__.pop("acknowledge", None)
            raise

    def _ends(self, exc: BaseException, traceback: object, handle: Callable[[], Any]) -> Any:
        handle = partial(super()._ends, exc, traceback, handle)
        if traceback is None:
            return handle()
        if isinstance(exc, Reject):
            _note(self.message, "rejected by the task")
            self.message.asks_requeue = True
            self.message.error = "" if exc.reason is None else str(exc.reason)
        else:
            _note(self.message, "the task failed", exc)
            if self.keeps_traceback and isinstance(exc, Exception):
                self.message.error = report(exc, traceback)
        try:
            return handle()
        except MemoryError:
            raise
        except Exception as error:
            # For instance a full result backend. A failed task has ended, even if its failure
            # cannot be stored; otherwise this worker would hold its message for ever.
            logger.error(
                "Task %s[%s] failed, and that cannot be stored: %r", self.name, self.id, error
            )
            if isinstance(exc, Reject):
                return self.reject(requeue=exc.requeue)


class _Recorded(_Ending):
    """Says in its message how the task ended, for the task library."""

    keeps_traceback = True
    _is_expired = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Celery makes a class of its own for each task, whose success calls no other.
        super().__init_subclass__(**kwargs)
        if "on_success" in vars(cls):
            cls.on_success = _noting_success(vars(cls)["on_success"])

    def maybe_expire(self) -> Any:
        self._is_expired = super().maybe_expire()
        return self._is_expired

    def revoked(self) -> Any:
        found = super().revoked()
        if found and self.message.outcome == "done":
            self.message.outcome = "expired" if self._is_expired else "revoked"
            self.message.note_outcome()
        return found

    def _ends(self, exc: BaseException, traceback: object, handle: Callable[[], Any]) -> Any:
        if traceback is None:
            self.message.error = self.message.error or f"TimeLimitExceeded: {exc.args[0]} s"
        handle = partial(super()._ends, exc, traceback, handle)
        return _ending(self.message, _outcome(exc), handle)


def _noting_success(on_success: Callable[..., Any]) -> Callable[..., Any]:
    def noting(self: Any, failed__retval__runtime: Any, **kwargs: Any) -> Any:
        handle = partial(on_success, self, failed__retval__runtime, **kwargs)
        if failed__retval__runtime[0]:
            return handle()
        return _ending(self.message, "succeeded", handle)

    return noting


def _ending(message: Any, outcome: str, handle: Callable[[], Any]) -> Any:
    """Have Celery handle the end of a task; the outcome is noted as its message is acknowledged,
    or afterwards if that was done when it began."""
    was_acknowledged, message.outcome = message.acknowledged, outcome
    try:
        return handle()
    finally:
        if was_acknowledged:
            message.note_outcome()


def _outcome(exc: BaseException) -> str:
    if isinstance(exc, Retry):
        return "retried"
    if isinstance(exc, Ignore):
        return "done"
    return "revoked" if isinstance(exc, Terminated) else "failed"


# -- lists failed tasks in Redis (kombu_toc's center.failures)


@cache
def _masking(mask: bool | tuple[str, ...]) -> Any:
    """What hides arguments before a failure is kept; None if nothing is hidden."""
    if not mask:
        return None
    from kombu_toc.http import Mask

    return Mask.of(mask)


class _Keeping(_Ending):
    """Its failure is listed once Celery has settled it. Of a task that succeeds it does nothing."""

    mask: Any = None
    #: whether its message went to DeadQueue
    is_dead = False
    _is_requeued = False

    def reject(self, requeue: bool = False) -> None:
        self._is_requeued, self.is_dead = requeue, not requeue
        super().reject(requeue=requeue)

    def _ends(self, exc: BaseException, traceback: object, handle: Callable[[], Any]) -> Any:
        handle = partial(super()._ends, exc, traceback, handle)
        if isinstance(exc, (*_NO_FAILURE, *(self.task.throws or ()))):
            return handle()
        events: set[str] = set()
        send: Callable[..., Any] = super().send_event

        def noting(type: str, **fields: Any) -> None:
            events.add(type)
            send(type, **fields)

        self.send_event = noting
        try:
            return handle()
        finally:
            del self.send_event
            if not self._is_requeued and has_failed(exc, events):
                self._keep(exc, traceback)

    def _keep(self, exc: BaseException, traceback: object) -> None:
        if not isinstance(self.message, kombu_toc.Message):
            return
        try:
            headers = self.message.headers
            args = " ".join(str(headers.get(name) or "") for name in ("argsrepr", "kwargsrepr"))
            error = report(exc, traceback)
            hidden = None if self.mask is None else _hidden(self.mask, self, error)
            self.message.keep_failure(
                self.task.name,
                type(exc).__name__,
                dead=self.is_dead,
                error=error if hidden is None else hidden[1],
                args=(args if hidden is None else hidden[0])[:ARGUMENTS],
                masked=hidden is not None,
                worker=str(self.request_dict.get("hostname") or ""),
                runtime=time.time() - self.time_start if self.time_start else None,
                retries=self.request_dict.get("retries") or 0,
            )
        except Exception:  # whatever it is, the task has ended
            logger.exception("The failure of task %s[%s] is not listed", self.name, self.id)


def _hidden(mask: Any, request: Any, error: str) -> tuple[str, str] | None:
    """The arguments and the error of a task without what is hidden; None if nothing has to be."""
    from kombu_toc.http import Masking

    run = request.task.run
    masking = Masking(mask, lambda name: list(inspect.signature(run).parameters))
    given = request.args, request.kwargs
    shown = masking.args(request.task.name, given[0]), masking.kwargs(given[1])
    if shown == given:
        return None
    return f"{shown[0]!r} {shown[1]!r}", masking.text(error)
