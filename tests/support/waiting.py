"""Waiting for what other threads and processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(holds: Callable[[], Any], seconds: float = 15, what: Any = None) -> Any:
    """Return what `holds` returns, as soon as that is true.

    what: what a failure shows; called for, if it can be
    """
    deadline = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.005)
    return value
