"""The thread of the lease keeper: when it wakes, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .native_threads import WakeEvent, unpatched_threading


class BeatThread:
    """Starts a native thread when a beat is due, and wakes it.

    run: what the thread does: it calls :meth:`sleep`, and ends after :meth:`ends_if` or
        :meth:`has_ended`
    lock: the one that guards what makes a beat necessary
    """

    def __init__(self, run: Callable[[], None], lock: Any) -> None:
        self._run = run
        self._lock = lock
        self._native = unpatched_threading()
        self._bell = WakeEvent(self._native.lock)
        self._running = False
        #: monotonic seconds of the next beat
        self.due = float("inf")

    @property
    def running(self) -> bool:
        return self._running

    @property
    def patched(self) -> bool:
        """Whether threads are greenlets elsewhere in this process: see :class:`OSThreads`."""
        return self._native.patched

    def beat_within(self, seconds: float) -> None:
        """Have the next beat begin within so many seconds. For any thread."""
        due = time.monotonic() + seconds
        # The lock in any case: a thread that found nothing to do may be about to end.
        with self._lock:
            if self._running and due >= self.due:
                return
            self.due = min(self.due, due)
            if self._running:
                self._bell.ring()
            else:
                self._native = unpatched_threading()  # patched since, perhaps
                self._native.start(self._run)
                self._running = True

    def pause(self, seconds: float) -> None:
        """Wait in another thread than this one, although that may be a greenlet's."""
        WakeEvent(self._native.lock).wait(seconds)

    # -- in the thread

    def sleep(self, seconds: float) -> None:
        """Wait for so long, or until a beat is due earlier."""
        self._bell.wait(seconds)

    def schedule(self, next_beat: Callable[[float], float], began: float) -> None:
        """A beat has begun: have the next one when `next_beat` says.

        Whoever makes one necessary from now on counts from that.
        """
        with self._lock:
            self.due = next_beat(began)

    def ends_if(
        self, idle: Callable[[], bool], otherwise: float, on_end: Callable[[], None]
    ) -> bool:
        """Whether there is nothing to beat for; then the thread is to end.

        otherwise: monotonic seconds of the next beat, unless the one that begins says better
        on_end: called if it ends, before another can make a beat necessary
        """
        with self._lock:
            if not idle():
                self.due = otherwise
                return False
            self._running = False
            self.due = float("inf")
            on_end()
            return True

    def has_ended(self) -> None:
        """The thread ends by an error."""
        with self._lock:
            self._running = False

    def leave(self) -> None:
        """To be called by the thread at its end, if it has used sockets."""
        self._native.leave()
