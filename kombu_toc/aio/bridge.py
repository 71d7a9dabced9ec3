"""Runs code that is written without ``await`` in a task of an event loop.

The code runs in a greenlet. Where it needs the server, :func:`wait_for` switches to the task, which
awaits what is to be awaited, and switches back with the result. Meanwhile other tasks run. So the
center has one code for both worlds; SQLAlchemy's asyncio extension does the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar, cast

from ..errors import ConfigurationError

try:
    import greenlet

    _Greenlet: Any = greenlet.greenlet
except ImportError:  # a program that needs it, and more, says so itself
    greenlet, _Greenlet = None, object

P = ParamSpec("P")
R = TypeVar("R")


def check() -> None:
    """Raises ConfigurationError without the package greenlet."""
    if greenlet is None:
        raise ConfigurationError(
            "asyncio needs the package greenlet: pip install 'celery-toc[asyncio]'"
        )


class _Bridge(_Greenlet):  # type: ignore[misc]  # it has no types
    """The greenlet of one call; no other greenlet is one of these."""


async def run(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function whose waiting for the server does not block the loop.

    If the task is cancelled, the function gets the CancelledError where it waits.
    """
    task = greenlet.getcurrent()
    bridge = _Bridge(function, task)
    # What a task has in context variables holds here, too: what traces requests relies on it.
    bridge.gr_context = task.gr_context
    found = bridge.switch(*args, **kwargs)
    while not bridge.dead:
        try:
            value = await found
        except BaseException as exc:
            found = bridge.throw(exc)
        else:
            found = bridge.switch(value)
    return cast(R, found)


def wait_for(awaitable: Awaitable[R]) -> R:
    """Await something from within a function that :func:`run` calls.

    Raises ConfigurationError anywhere else.
    """
    current = greenlet.getcurrent()
    if not isinstance(current, _Bridge):
        close = getattr(awaitable, "close", None)
        if close is not None:  # or Python warns of a coroutine that was never awaited
            close()
        raise not_awaited()
    return cast(R, current.parent.switch(awaitable))


def not_awaited() -> ConfigurationError:
    """The error of who uses asyncio's client as if it were another one."""
    return ConfigurationError(
        "what belongs to an AsyncTimeoutCenter is awaited: call its methods with await"
    )
