"""Pops that wait, and loops over messages, in an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from math import inf
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from ..center.consumption import Consumption, Loops, Taken
from ..center.pop_wait import WakeConnection
from ..errors import ConfigurationError

# -- runs code that is written without await in a task of an event loop
#
# The code runs in a greenlet. Where it needs the server, :func:`wait_for` switches to the task,
# which
# awaits what is to be awaited, and switches back with the result. Meanwhile other tasks run. So the
# center has one code for both worlds; SQLAlchemy's asyncio extension does the same.

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


class AwaitedPart:
    """A part of a center, whose methods are awaited: ``await center.queues.declare("mail")``.

    call: as :func:`run`
    """

    def __init__(self, part: Any, call: Callable[..., Any] = run) -> None:
        self._part = part
        self._call = call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._part, name)
        return partial(self._call, found) if callable(found) else found

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._part)})


def not_awaited() -> ConfigurationError:
    """The error of who uses asyncio's client as if it were another one."""
    return ConfigurationError(
        "what belongs to an AsyncTimeoutCenter is awaited: call its methods with await"
    )


# -- pops that wait, and loops over messages, in an event loop


class AsyncWakeConnection(WakeConnection):
    """As :class:`WakeConnection`, over a connection of redis.asyncio. It is closed after each wait:
    it belongs to its loop, which may end at any time."""

    _exchange: asyncio.Task[list[Any]] | None = None

    @property
    def usable(self) -> bool:
        return False

    def _connect(self, pool: Any) -> Any:
        return wait_for(self._client.open_link())

    def _send(self, command: bytes, seconds: float) -> None:
        exchange = self._connection.exchange(command, 1, seconds)
        self._exchange = asyncio.get_running_loop().create_task(exchange)

    def _can_read(self, seconds: float) -> bool:
        if self._exchange is None:
            return False
        done, _ = wait_for(asyncio.wait({self._exchange}, timeout=seconds))
        return bool(done)

    def _reply(self) -> Any:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None  # it is read only after something was sent
        [reply] = wait_for(exchange)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _disconnect(self, connection: Any) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None and not exchange.cancel():
            exchange.exception()  # or asyncio complains that nobody has asked for it
        wait_for(connection.close())


class AsyncTaken(Taken):
    """As :class:`Taken`, in a loop of an AsyncTimeoutCenter: its methods are awaited."""

    async def ack(self) -> bool:  # type: ignore[override]
        """Acknowledge it; returns whether it was still there."""
        return await run(Taken.ack, self)

    async def reject(  # type: ignore[override]
        self,
        *,
        requeue: bool = True,
        reason: str = "",
        error: str = "",
        backoff: float | None = None,
    ) -> str | None:
        """Give it back after a failure: see :meth:`.pop.Deliveries.reject`."""
        how = {"requeue": requeue, "reason": reason, "error": error, "backoff": backoff}
        return await run(lambda: Taken.reject(self, **how))  # type: ignore[arg-type]

    async def release(self) -> bool:  # type: ignore[override]
        """Give it back unhandled; returns whether it was still held by this delivery."""
        return await run(Taken.release, self)


class _Consumption(Consumption):
    """One whose leases a task renews instead of a thread."""

    taken = AsyncTaken
    task: asyncio.Task[None] | None = None

    def _make_bell(self) -> asyncio.Event:
        return asyncio.Event()

    def _start_renewing(self) -> None:
        if self.task is None:
            self.task = asyncio.get_running_loop().create_task(self._renew_in_task())

    async def _renew_in_task(self) -> None:
        held = self.held
        while True:
            now = time.monotonic()
            if due := held.renewing(now):
                await run(self.renew, held, due, now)
            left = None if held.due == inf else max(held.due - time.monotonic(), 0.0)
            await asyncio.wait({bell := asyncio.ensure_future(self._bell.wait())}, timeout=left)
            bell.cancel()
            self._bell.clear()


class AsyncConsumption:
    """What :meth:`AsyncTimeoutCenter.consume` returns: an asynchronous context manager, and in its
    block an asynchronous iterator over messages. Otherwise it is as :class:`Consumption`."""

    def __init__(self, loops: Loops, topics: tuple[str, ...], options: Any) -> None:
        self._loop = loops.consuming(_Consumption, topics, **options)

    async def __aenter__(self) -> AsyncConsumption:
        self._loop.__enter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        task = self._loop.task
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        await run(self._loop.__exit__, kind, exc, trace)

    def __aiter__(self) -> AsyncIterator[AsyncTaken]:
        return self

    async def __anext__(self) -> AsyncTaken:
        message = await run(self._loop.take)
        if message is None:
            raise StopAsyncIteration
        assert isinstance(message, AsyncTaken)
        return message
