"""Cuts connections to a database that does not answer in time.

A driver waits for as long as the database's machine is there: also if the database stands still.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator

#: Seconds between two looks, at most.
INTERVAL = 0.5

#: Seconds that the thread waits for something to watch before it ends.
IDLE = 5.0


class Watchdog:
    """Watches connections while they are used. Any thread may call it.

    timeout: seconds that a connection is watched for, at least: how often it looks
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        #: what is watched: until when, in monotonic seconds, and its socket
        self._watched: dict[int, tuple[float, int]] = {}
        self._pid = os.getpid()
        #: the thread that watches, and what wakes it; None: there is none
        self._bell: threading.Event | None = None

    def after_fork(self) -> None:
        """Nothing is watched yet in this process: the thread is its parent's."""
        self._pid, self._lock, self._watched = os.getpid(), threading.Lock(), {}
        self._bell = None

    @contextlib.contextmanager
    def watching(self, descriptor: int, until: float) -> Iterator[None]:
        """Within this, a connection is cut when the time is over.

        descriptor: of its socket
        until: monotonic seconds
        """
        number = next(self._numbers)
        self._watch(number, until, descriptor)
        try:
            yield
        finally:
            # Held while a connection is cut: its number may be another's afterwards.
            with self._lock:
                self._watched.pop(number, None)

    def close(self) -> None:
        """End the thread, if nothing is watched. It starts again when something is."""
        if (bell := self._bell) is not None:
            bell.set()

    def _watch(self, number: int, until: float, descriptor: int) -> None:
        if self._pid != os.getpid():
            self.after_fork()
        with self._lock:
            self._watched[number] = (until, descriptor)
            if self._bell is None:
                bell = self._bell = threading.Event()
                threading.Thread(
                    target=self._run, args=(bell,), name="toc-watchdog", daemon=True
                ).start()

    def _run(self, bell: threading.Event) -> None:
        pid, used = os.getpid(), time.monotonic()
        while pid == os.getpid():
            closing = bell.wait(min(INTERVAL, self._timeout / 4))
            bell.clear()
            now = time.monotonic()
            with self._lock:
                if self._watched:
                    used = now
                elif closing or now > used + IDLE:
                    self._bell = None
                    return
                over = [
                    self._watched.pop(number)
                    for number, (until, _) in list(self._watched.items())
                    if now > until
                ]
                for _, descriptor in over:
                    _cut(descriptor)


def _cut(descriptor: int) -> None:
    """End a connection; who waits for it gets an error."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        copy.shutdown(socket.SHUT_RDWR)
