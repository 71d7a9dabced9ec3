"""The event loop as the poller sees it: Kombu's hub, or a wait of its own without one.

Nothing else in the consumer knows a hub, a timer, a file descriptor or the wake-up pipe.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from kombu.utils.eventio import ERR, READ, poll
from redis.exceptions import ResponseError

from ..center.runner import misused, named
from ..client.connection import close_idle, with_short_timeouts
from ..scripts.call import ScriptCall
from .connections import ClusterConnections, HomeConnection, PipelinedConnection, Waiting, give_up
from .threads import unpatched_threading

if TYPE_CHECKING:
    import redis

    from ..center.center import TimeoutCenter
    from .lease_keeper import LeaseKeeper

#: The hub's poller waits whole milliseconds, rounded up; what is left of one is slept.
TICK = 0.001


class Loop:
    """Waits for sockets, timers and other threads.

    on_nudged: called in the loop after :meth:`nudge`, while there is a hub
    """

    #: The clock that everything in the consumer goes by: monotonic seconds.
    now: Callable[[], float] = staticmethod(time.monotonic)

    #: Waits without turning the loop, for a part of a millisecond.
    sleep: Callable[[float], None] = staticmethod(time.sleep)

    def __init__(self, on_nudged: Callable[[], None]) -> None:
        self.hub: Any = None
        #: while something is delivered: the loop may stand still for as long as a task takes
        self.held_up = False
        #: within the call that the hub makes before it waits: it knows already for how long
        self.ticking = False
        self._on_nudged = on_nudged
        self._callbacks: dict[int, Callable[[], None]] = {}
        #: what waits where there is no hub
        self._own: Any = None
        self._pipe: tuple[socket.socket, socket.socket] | None = None
        #: whether something is in it that the loop has not heard yet: once is enough
        self._rung = False
        self._thread = 0
        self._tick: Callable[[], None] | None = None
        self._repeating: Any = None

    # -- Kombu's hub

    def register(self, hub: Any, tick: Callable[[], None], interval: float) -> None:
        """Work within a hub: it calls `tick` before each wait, and waits no longer than
        `interval` seconds."""
        self.hub, self._tick = hub, tick
        self._thread = threading.get_ident()
        hub.on_tick.add(tick)
        self._repeating = hub.call_repeatedly(interval, end_wait)
        self.open_pipe()

    def unregister(self) -> None:
        """Leave the hub."""
        hub, self.hub = self.hub, None
        if hub is not None:
            hub.on_tick.discard(self._tick)
            if self._repeating is not None:
                self._repeating.cancel()

    @property
    def elsewhere(self) -> bool:
        """Whether the caller runs in another thread than the hub."""
        return threading.get_ident() != self._thread

    # -- sockets

    def opened(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` whenever this socket is readable."""
        self._callbacks[fd] = callback
        if self.hub is not None:
            self.hub.add_reader(fd, self.readable, fd)
        if self._own is not None:  # Celery's mingle waits without the loop that it has
            self._own.register(fd, READ | ERR)

    def closed(self, fd: int) -> None:
        """Watch this socket no longer."""
        self._callbacks.pop(fd, None)
        if self.hub is not None:
            self.hub.remove(fd)
        if self._own is not None:
            with suppress(KeyError, ValueError, OSError):
                self._own.unregister(fd)

    def readable(self, fd: int) -> None:
        """A socket is readable."""
        callback = self._callbacks.get(fd)
        if callback is not None:
            callback()

    # -- without a hub

    def wait_alone(self) -> None:
        """Get ready for :meth:`wait`."""
        if self._own is None:
            self._own = poll()
            for fd in self._callbacks:
                self._own.register(fd, READ | ERR)
            self.open_pipe()

    def wait(self, seconds: float) -> Iterable[int]:
        """Wait for sockets; return those that are readable."""
        return [fd for fd, _ in self._own.poll(seconds) or ()]

    # -- other threads

    def nudge(self) -> None:
        """End the wait, from any thread: something has changed."""
        pipe = self._pipe
        if pipe is not None and not self._rung:
            self._rung = True
            with suppress(OSError):  # closed: nobody waits
                pipe[1].send(b"\0")

    def open_pipe(self) -> None:
        """Make what :meth:`nudge` writes to."""
        if self._pipe is None:
            self._pipe, self._rung = socket.socketpair(), False
            for end in self._pipe:
                end.setblocking(False)
            self.opened(self._pipe[0].fileno(), self._nudged)

    def _nudged(self) -> None:
        if self._pipe is not None:
            with suppress(OSError):
                self._pipe[0].recv(4096)
        self._rung = False  # after that: what changes from now on rings again
        if self.hub is not None:
            self._on_nudged()

    def close(self) -> None:
        """Close the pipe, and what waits without a hub."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            self.closed(pipe[0].fileno())
            for end in pipe:
                end.close()
        own, self._own = self._own, None
        if own is not None:
            own.close()


class Alarm:
    """Ends the hub's wait at a moment, by one timer at most: Kombu's hub runs ten due timers a
    turn and may then sleep for a second, so there must never be many of them, and none that is
    due at once.

    early: seconds by which the timer goes off before that moment, because the hub rounds up; one
        that is set for a moment so close nudges the loop instead
    """

    def __init__(self, loop: Loop, on_time: Callable[[], None], *, early: float = TICK) -> None:
        self._loop = loop
        self._on_time = on_time
        self._early = early
        self._timer: Any = None
        self._timer_due_at = 0.0

    def set(self, when: float, now: float) -> None:
        """Go off at `when`, in monotonic seconds, unless it does so before anyway."""
        if self._timer is not None:
            if self._timer_due_at <= when and not self._timer.canceled:
                return
            self._timer.cancel()
        wait = when - now - self._early
        if wait <= 0 and self._early:
            self._timer = None
            self._loop.nudge()
            return
        self._timer_due_at = when
        self._timer = self._loop.hub.call_later(max(wait, TICK - self._early), self._fire)
        if self._loop.ticking:
            self._loop.nudge()  # the hub has already decided how long to wait

    @property
    def is_set(self) -> bool:
        """Whether it is going to go off."""
        return self._timer is not None

    def cancel(self) -> None:
        """Do not go off."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _fire(self) -> None:
        self._timer = None
        self._on_time()


def end_wait() -> None:
    """What a timer calls that only ends the wait: the turn that follows does the work."""


# -- what connects a poller with the world

#: Seconds for which a worker keeps a connection that nobody uses, and between looks for such.
CONNECTION_IDLE = 10.0
CLOSE_IDLE = 5.0

#: Seconds after which it is said again that a key cannot be used.
COMPLAIN_AGAIN = 300.0

#: Seconds for which nobody waits for what is in a key that another program has written.
LEFT_OUT = 5.0

logger = logging.getLogger(__name__)

#: Told what a server has refused; whether that is seen to, and the rest goes on.
OnRefused: TypeAlias = Callable[[Waiting, ResponseError], bool]


#: Sends commands, and has replies read when the loop finds that they have come.
Connection: TypeAlias = PipelinedConnection | ClusterConnections


class Wiring:
    """Kombu's loop, and connections to Redis."""

    #: those to the nodes of a Cluster
    _nodes: ClusterConnections | None = None

    def __init__(self, center: TimeoutCenter, leases: LeaseKeeper) -> None:
        self._center = center
        self._leases = leases
        self._close_at = 0.0
        #: key of what was refused -> monotonic seconds after which it is said again
        self._complained: dict[str, float] = {}
        #: key that another program has written -> monotonic seconds until which it is left out
        self._left_out: dict[str, float] = {}

    def loop(self, on_nudged: Callable[[], None]) -> Loop:
        """The loop of a poller."""
        return Loop(on_nudged)

    def blocking(self, loop: Loop, on_refused: OnRefused) -> PipelinedConnection:
        """A connection for commands that block. `on_refused` is told what is refused."""
        told = (loop.opened, loop.closed, self._leases.retry_later, self._center.metrics)
        if self._center.clustered:
            return HomeConnection(
                self._pool, *told, on_refused=on_refused, arguments=with_short_timeouts
            )
        return PipelinedConnection(self._pool, *told, on_refused=on_refused)

    def work(self, loop: Loop) -> Connection:
        """A connection for everything that is answered at once."""
        if not self._center.clustered:
            return self.blocking(loop, self.refused)
        told = (loop.opened, loop.closed, self._leases.retry_later, self._center.metrics)
        self._nodes = ClusterConnections(self._center.client, *told, self.refused)
        return self._nodes

    @property
    def home_away(self) -> bool:
        """Whether the node of a Cluster on whose keys commands block is away."""
        return self._nodes is not None and self._nodes.home_away

    def refused(self, waiting: Waiting, exc: ResponseError) -> bool:
        """Whether a key of another type was refused, which keeps nobody from the rest."""
        call, client, now = waiting.item.what, self._center.client, time.monotonic()
        if "WRONGTYPE" not in str(exc):
            return False
        if isinstance(call, ScriptCall):
            keys, about = list(call.keys), call.keys[0]
        else:
            stem = self._center.keys.wake("").removesuffix("wake:")
            keys = [part for part in call if isinstance(part, str) and part.startswith(stem)]
            wrong = misused(client, keys)
            self._left_out.update(dict.fromkeys(wrong, now + LEFT_OUT))
            about = next(iter(wrong), "")
        if now >= self._complained.get(about, 0.0):
            self._complained[about] = now + COMPLAIN_AGAIN
            said = named(exc, client, keys)
            logger.error("a key cannot be used, and what does not need it goes on: %s", said)
        give_up([waiting], self._leases.retry_later)
        return True

    def reads(self, key: str) -> bool:
        """Whether a key is read: it was not found to be of another type lately."""
        return time.monotonic() >= self._left_out.get(key, 0.0)

    def close_idle(self, now: float) -> None:
        """Close what this thread has not used for long, if it is time to; now: monotonic seconds"""
        if now >= self._close_at:
            self._close_at = now + CLOSE_IDLE
            patched = unpatched_threading().patched
            close_idle(CONNECTION_IDLE, threading.get_native_id() if patched else None)

    def _pool(self) -> redis.ConnectionPool:
        """Of the server that has the keys of no single slot."""
        client = self._center.client
        pool: redis.ConnectionPool = (
            client.client_for() if self._center.clustered else client
        ).connection_pool
        return pool
