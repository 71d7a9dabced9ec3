"""Threads of the operating system, also where gevent or eventlet replace threads by greenlets.

All greenlets of a thread stand still while one of them does not yield. Work that must continue
meanwhile needs a native thread, and locks that work between native threads; the replaced locks may
not. A native thread may use sockets as they are: it has an event loop of its own.
"""

from __future__ import annotations

import _thread
import sys
import threading
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
        True,
        lambda run: start(run, ()),
        original("allocate_lock"),
        original("RLock"),
        leave,
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
