"""Threads of the operating system, also where gevent or eventlet replace threads by greenlets.

All greenlets of a thread stand still while one of them does not yield. Work that must continue
meanwhile needs a native thread, and locks that work between native threads; the replaced locks
may not. A native thread may use sockets as they are: it has an event loop of its own.
"""

from __future__ import annotations

import _thread
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple


class OSThreads(NamedTuple):
    """The threads and locks that Python had before gevent or eventlet patched it."""

    #: Whether it is patched. Then a native thread must not wait for a lock that greenlets use, such
    #: as the locks of logging's handlers.
    patched: bool
    #: Runs a function in a daemon thread: the interpreter does not wait for it at its end.
    start: Callable[[Callable[[], None]], Any]
    lock: Callable[[], Any]
    rlock: Callable[[], Any]
    #: To be called by such a thread at its end. It closes what the thread's event loop has open.
    leave: Callable[[], None]


def unpatched_threading() -> OSThreads:
    """Native threads and locks, as this process has them now."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):

        def original(name: str) -> Any:
            return monkey.get_original("_thread", name)

        return _patched(original, _leave_gevent)
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("thread"):
        module = patcher.original("_thread")
        return _patched(lambda name: getattr(module, name), _leave_eventlet)
    return OSThreads(False, _start, _thread.allocate_lock, _thread.RLock, lambda: None)


def _start(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="toc-heartbeat", daemon=True).start()


def _patched(original: Callable[[str], Any], leave: Callable[[], None]) -> OSThreads:
    start = original("start_new_thread")
    return OSThreads(
        True, lambda run: start(run, ()), original("allocate_lock"), original("RLock"), leave
    )


def _leave_gevent() -> None:
    sys.modules["gevent"].get_hub().destroy(destroy_loop=True)


def _leave_eventlet() -> None:
    hub = sys.modules["eventlet.hubs"].get_hub()
    if hub.running:  # else nothing has waited yet, and nothing would end its first wait
        hub.abort(wait=True)
    loop = getattr(hub, "loop", None)  # of the hub that is built on asyncio
    if loop is not None and not loop.is_running():
        loop.close()


class WakeEvent:
    """Wakes one thread. :meth:`ring` never waits."""

    def __init__(self, lock: Callable[[], Any]) -> None:
        self._silent = lock()
        self._silent.acquire()

    def ring(self) -> None:
        try:
            self._silent.release()
        except RuntimeError:
            pass  # it rings already

    def wait(self, seconds: float) -> None:
        """Wait until it rings; return at once if it has rung since the last wait."""
        self._silent.acquire(timeout=seconds)


# -- logging from a native thread
#
# Where threads are greenlets, the locks of logging's handlers are theirs: what a native thread has
# to log waits for one of them.


class DeferredLog:
    """Logs at once, or when another thread comes by.

    deferred: whether the native thread may not log by itself
    """

    def __init__(self, logger: logging.Logger, deferred: Callable[[], bool]) -> None:
        self._logger = logger
        self._deferred = deferred
        self._waiting: deque[tuple[int, str, tuple[Any, ...], Exception | None]] = deque()

    def log(self, level: int, text: str, *args: Any, error: Exception | None = None) -> None:
        """Log, as :meth:`logging.Logger.log`; error: with its traceback."""
        if self._deferred():
            self._waiting.append((level, text, args, error))
        else:
            self._logger.log(level, text, *args, exc_info=error)

    def flush(self) -> None:
        """Log what has waited. For any thread but the native one, now and then."""
        while self._waiting:
            try:
                level, text, args, error = self._waiting.popleft()
            except IndexError:  # another was faster
                return
            self._logger.log(level, text, *args, exc_info=error)


# -- the thread of the lease keeper


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
        self.running = False
        #: monotonic seconds of the next beat
        self.due = float("inf")

    @property
    def patched(self) -> bool:
        """Whether threads are greenlets elsewhere in this process: see :class:`OSThreads`."""
        return self._native.patched

    def beat_within(self, seconds: float) -> None:
        """Have the next beat begin within so many seconds. For any thread."""
        due = time.monotonic() + seconds
        # The lock in any case: a thread that found nothing to do may be about to end.
        with self._lock:
            if self.running and due >= self.due:
                return
            self.due = min(self.due, due)
            if self.running:
                self._bell.ring()
            else:
                self._native = unpatched_threading()  # patched since, perhaps
                self._native.start(self._run)
                self.running = True

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
            self.running = False
            self.due = float("inf")
            on_end()
            return True

    def has_ended(self) -> None:
        """The thread ends by an error."""
        with self._lock:
            self.running = False

    def leave(self) -> None:
        """To be called by the thread at its end, if it has used sockets."""
        self._native.leave()
