"""Reads ahead in a thread, while what was read is worked on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")

#: Seconds after which a thread looks whether anybody still wants what it has read.
LOOK = 0.1


class _End:
    """What comes last.

    error: what reading has raised, if it has
    """

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class _Ahead(Generic[T]):
    def __init__(self, read: Callable[[], Iterator[T]]) -> None:
        self._read = read
        self._stopping = threading.Event()
        # One waits here, one is being read, one is worked on: what is known of rows gets old.
        self._queue: queue.Queue[T | _End] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._run, name="toc-read-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for one in self._read():
                if not self._put(one):
                    return
            self._put(_End())
        except BaseException as exc:
            self._put(_End(exc))

    def _put(self, one: T | _End) -> bool:
        while not self._stopping.is_set():
            try:
                self._queue.put(one, timeout=LOOK)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[T]:
        while True:
            one = self._queue.get()
            if isinstance(one, _End):
                if one.error is not None:
                    raise one.error
                return
            yield one

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()


@contextmanager
def reading_ahead(read: Callable[[], Iterator[T]]) -> Iterator[Iterator[T]]:
    """Within this, what `read` yields is read by a thread, a little before it is asked for.

    What `read` raises is raised where it is iterated.
    """
    ahead = _Ahead(read)
    try:
        yield iter(ahead)
    finally:
        ahead.close()
