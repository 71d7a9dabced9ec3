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
        self._pid = 0

    @contextlib.contextmanager
    def watching(self, descriptor: int, until: float) -> Iterator[None]:
        """Within this, a connection is cut when the time is over.

        descriptor: of its socket
        until: monotonic seconds
        """
        if self._pid != os.getpid():
            self._start()
        number = next(self._numbers)
        self._watched[number] = (until, descriptor)
        try:
            yield
        finally:
            # Held while a connection is cut: its number may be another's afterwards.
            with self._lock:
                self._watched.pop(number, None)

    def _start(self) -> None:
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                self._watched = {}
                threading.Thread(target=self._run, name="toc-watchdog", daemon=True).start()

    def _run(self) -> None:
        pid = self._pid
        while pid == os.getpid():
            time.sleep(min(INTERVAL, self._timeout / 4))
            now = time.monotonic()
            for number, (until, descriptor) in list(self._watched.items()):
                if now > until:
                    with self._lock:
                        if self._watched.pop(number, None) is not None:
                            _cut(descriptor)


def _cut(descriptor: int) -> None:
    """End a connection; who waits for it gets an error."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        copy.shutdown(socket.SHUT_RDWR)
