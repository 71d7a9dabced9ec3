"""Logging from a native thread.

Where threads are greenlets, the locks of logging's handlers are theirs: what a native thread has
to log waits for one of them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any


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
