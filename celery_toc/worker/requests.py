"""Celery's requests: which of them the pool has, and which it has begun."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

from celery.worker import state

import kombu_toc

from ..compat import worker

# -- celery's requests


class SubmittedRequests:
    """The requests that a pool of threads or greenlets was given and has not ended.

    Threads of the pool call it as well as the event loop.

    on_end: called when one has ended
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        #: requests, and monotonic seconds when the pool was given them
        self._since: dict[Any, float] = {}
        #: those of them that it has begun, or begins whatever happens
        self._started: set[Any] = set()
        #: held while it is decided whether one is begun or its message given back
        self.deciding = threading.Lock()
        self._references = worker.references(state.reserved_requests, state.active_requests)

    def add(self, request: Any, now: float, *, starts: bool) -> None:
        """The pool is about to be given it.

        now: monotonic seconds
        starts: it begins it whatever happens
        """
        self._since[request] = now
        if starts:
            self._started.add(request)

    def accept(self, request: Any) -> bool:
        """The pool comes to it: whether it may begin it. It may not if its message was given back
        meanwhile."""
        with self.deciding:
            if request.message.given_back:
                self.end(request)
                return False
            self._started.add(request)
            return True

    def end(self, request: Any) -> None:
        """Forget a request that has ended, or does not begin."""
        self._since.pop(request, None)
        self._started.discard(request)
        self._on_end()

    def executing(self, message: kombu_toc.Message) -> Any:
        """The request of a message whose task the pool has, or None."""
        return _request_of(message, state.active_requests, self._since)

    @staticmethod
    def active(message: kombu_toc.Message) -> Any:
        """The request of a message whose task has begun and not ended as Celery has it, or None."""
        return _request_of(message, state.active_requests)

    def begun(self, message: kombu_toc.Message) -> bool:
        """Whether a message's task is begun, or begins whatever happens."""
        return _request_of(message, state.active_requests, self._started) is not None

    def busy(self) -> set[Any]:
        """References to the requests of the tasks that the pool has or is about to get."""
        # By the weak references that the two sets hold: to go through the requests costs more
        # than all else that a turn of the loop asks for.
        busy = self._references()
        if not self._since:
            return busy
        return busy.union(map(ref, tuple(self._since)))

    def take_queued(self, until: float) -> list[kombu_toc.Message]:
        """Take back what no thread has begun, if some of it was given to the pool until then: of
        what is left, the later ones would start before those that are taken back.

        until: monotonic seconds
        """
        if len(self._since) <= len(self._started):
            return []
        taken: list[kombu_toc.Message] = []
        with self.deciding:
            for request, since in tuple(self._since.items()):
                message = request.message
                if request in self._started or message.acknowledged:
                    continue
                if since > until and not taken:  # they are in the order in which it was given them
                    break
                message.given_back = True  # the thread that comes to it goes on to the next
                self._since.pop(request, None)
                forget(request)
                taken.append(message)
        return taken


def forget(request: Any) -> None:
    """Have Celery forget a request whose message was given back before it was to start."""
    if state.requests.get(request.id) is request:
        del state.requests[request.id]
    for requests in (state.reserved_requests, getattr(state, "scheduled_requests", None)):
        if requests is not None:
            requests.discard(request)


def _request_of(message: kombu_toc.Message, *requests: Iterable[Any]) -> Any:
    """The request of these that is this message's, or None."""
    while True:
        try:
            return next((r for some in requests for r in some if r.message is message), None)
        except RuntimeError:  # another thread has added one, or taken one out
            continue


# -- tasks that have waited in the center start when it says that they are due


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
    """Return a function to use instead of `handle`: it waits with a message that is handed over
    ahead of its time.

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
