"""Waiting for what other threads and processes bring about."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

#: Seconds that count at most between two looks: a machine that stands still holds up what is
#: waited for as well.
MOST = 0.1


def wait_until(holds: Callable[[], Any], seconds: float = 15, what: Any = None) -> Any:
    """Return what `holds` returns, as soon as that is true.

    what: what a failure shows; called for, if it can be
    """
    began = time.monotonic()
    while not (value := holds()):
        waited = time.monotonic() - began
        assert waited < seconds, what() if callable(what) else what
        time.sleep(min(0.005 + waited / 50, 0.02))  # what takes longer is asked for less often
    return value


def at_once(run: Callable[[Any], object], arguments: Iterable[Any]) -> None:
    """Call it with each of these, in threads; raises what one of the calls does."""
    given = list(arguments)
    with ThreadPoolExecutor(len(given)) as pool:
        for _ in pool.map(run, given):
            pass


@contextmanager
def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[list[Any]]:
    """Run it beside; what it returned is in the list at the end."""
    returned: list[Any] = []
    thread = threading.Thread(target=lambda: returned.append(function(*args, **kwargs)))
    thread.start()
    try:
        yield returned
    finally:
        thread.join(30)
        assert not thread.is_alive()


def running(seconds: float) -> Iterator[None]:
    """Turns of a loop, for so many seconds in which this process was not held up."""
    passed, before = 0.0, time.monotonic()
    while passed < seconds:
        yield
        now = time.monotonic()
        passed += min(now - before, MOST)
        before = now
