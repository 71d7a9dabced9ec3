"""Celery's requests: which of them the pool has, and which it has begun."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

from celery.worker import state

import kombu_toc

from ..compat import weak_sets


class SubmittedRequests:
    """What a pool of threads or greenlets was given and has not ended.

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
        self._references = weak_sets.references(state.reserved_requests, state.active_requests)

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
        """It has ended, or does not begin."""
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
