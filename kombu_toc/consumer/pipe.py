"""A connection of its own, on which commands are sent without waiting for their replies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import redis
from redis.exceptions import NoScriptError, ResponseError

from ..client.connect import SOCKET_TIMEOUT
from ..client.connection import IDLE
from ..client.errors import explained, is_refused, refusal
from ..compat.redis_connections import socket_of
from ..errors import ServerError
from ..metrics.counters import Metrics
from ..scripts.call import ScriptCall, pack_command, pieces

#: What a broken connection raises.
BROKEN = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError)


class Item(NamedTuple):
    """A call or a plain command, and what is called with its result, or if there will be none."""

    what: ScriptCall | tuple[Any, ...]
    on_reply: Callable[[Any], None] | None = None
    on_failure: Callable[[], None] | None = None
    moves: int = 0  #: how often it was sent elsewhere


class Waiting(NamedTuple):
    """What a reply is awaited for."""

    item: Item
    owed: bool
    latest: float  #: monotonic seconds when the reply is overdue


class PipelinedConnection:
    """Sends commands, and reads their replies when the socket has them.

    pool: gives a pool. The connection is made with the pool's arguments, and never belongs to it
    on_open, on_close: called with the socket's file descriptor
    on_owed: called with the calls that must run and whose replies never came
    metrics: counts the calls, and how long they took
    on_refused: called with what was refused and the error; returns whether it has handled that, and
        the connection goes on
    on_announcing: called with the calls that write what scripts have announced
    arguments: what to make of the pool's while the connection is opened

    A connection may be cut although neither end is told. It is taken for broken if a reply takes
    longer than the socket's timeout and the time for which its command may block: see
    :meth:`check`.

    It has seventeen fields: the eight arguments above, and what is on its way.
    """

    def __init__(
        self,
        pool: Callable[[], redis.ConnectionPool],
        on_open: Callable[[int, Callable[[], None]], None],
        on_close: Callable[[int], None],
        on_owed: Callable[[list[ScriptCall]], None],
        metrics: Metrics,
        *,
        on_refused: Callable[[Waiting, ResponseError], bool] | None = None,
        on_announcing: Callable[[ScriptCall], None] | None = None,
        arguments: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ) -> None:
        self._pool = pool
        self._on_open = on_open
        self._on_close = on_close
        self._on_owed = on_owed
        self._metrics = metrics
        self._connection: Any = None
        self._fd: int | None = None
        self._on_refused = on_refused
        self._on_announcing = on_announcing
        self._arguments = arguments
        self._waiting: deque[Waiting] = deque()
        self._used = 0.0
        #: the SHA-1 of each script that was sent whole over this connection
        self._brought: set[str] = set()
        #: monotonic seconds when the latest reply had come
        self._heard = 0.0
        self._patience = SOCKET_TIMEOUT
        #: what the connection was found broken by, while nobody read from it
        self._broke: BaseException | None = None
        #: by which the server knows the connection
        self.client_id = 0

    @property
    def busy(self) -> bool:
        """Whether a reply is still to come."""
        return bool(self._waiting)

    @property
    def since(self) -> float:
        """Monotonic seconds since when the oldest reply is awaited; now if none is."""
        return self._waiting[0].latest - self._patience if self._waiting else time.monotonic()

    def send(
        self,
        items: Sequence[tuple[Any, ...]],
        *,
        owed: int = 0,
        block: float = 0.0,
    ) -> None:
        """Send calls or plain commands, each as an :class:`Item`, or what makes one.

        owed: so many, the first, must run; if the connection breaks first, `on_owed` gets them
        block: seconds for which the server may keep the reply back

        Raises redis-py's ConnectionError or TimeoutError.
        """
        made = [Item(*item) for item in items]
        now = time.monotonic()
        if not self._waiting and now > self._used + IDLE and self.readable():
            self.close()  # the server has, and nothing is lost by that
        self._used = now
        try:
            if self._connection is None:
                self._open()
            connection = self._connection
            latest = now + block + self._patience
            for number, item in enumerate(made):
                self._waiting.append(Waiting(item, number < owed, latest))
            packed = [
                self._packed(item.what)
                if isinstance(item.what, ScriptCall)
                else pack_command(*item.what)
                for item in made
            ]
            connection.send_packed_command(pieces(b"".join(packed)), check_health=False)
        except BaseException:
            if self._connection is None:  # none of it is waited for yet
                self._waiting.extend(Waiting(item, n < owed, 0.0) for n, item in enumerate(made))
            self.close()
            raise

    def _packed(self, call: ScriptCall) -> bytes:
        """The first call of a script brings its text: one that the server does not know would be
        sent again, and run behind what was sent after it."""
        sha = call.script.sha
        if sha in self._brought:
            return call.packed()
        self._brought.add(sha)
        return pack_command(*call.command(whole=True))

    def check(self) -> None:
        """Raise redis-py's TimeoutError, and close the connection, if a reply is overdue."""
        now = time.monotonic()
        # A reply that is awaited behind a long one has not been overdue while that came.
        if (
            self._waiting
            and now > max(self._waiting[0].latest, self._heard + self._patience)
            and not self.readable()
        ):
            self.close()
            raise redis.exceptions.TimeoutError("no reply: the connection is taken for broken")

    def readable(self) -> bool:
        """Whether a reply has come, or the end of the connection."""
        return self.wait(0)

    def wait(self, seconds: float) -> bool:
        """Wait for a reply, or the end of the connection; whether it has come."""
        try:
            return self._connection is not None and self._connection.can_read(timeout=seconds)
        except BROKEN as exc:
            self._broke = exc  # redis-py has closed it, and would read from nothing
            return True

    def read(self) -> None:
        """Take the replies that have come. Raises ServerError for one that is an error."""
        while self._waiting:
            connection = self._connection
            try:
                if self._broke is not None:
                    raise self._broke
                reply = connection.read_response()
            except NoScriptError:
                waiting = self._waiting.popleft()
                self._resend(waiting)
            except ResponseError as exc:
                waiting = self._waiting.popleft()
                if self._on_refused is None or not self._on_refused(waiting, exc):
                    self._fail([waiting])
                    self.close()
                    if is_refused(exc):
                        raise explained(exc, self._pool()) from exc
                    raise ServerError(refusal(exc, self._pool())) from exc
            except BaseException:
                self.close()
                raise
            else:
                self._heard = time.monotonic()
                (what, on_reply, *_), _, latest = self._waiting.popleft()
                if isinstance(what, ScriptCall):
                    times = self._metrics.scripts[what.script.name]
                    times[0] += 1
                    times[1] += time.monotonic() - latest + self._patience
                    if what.wake is not None:
                        self._announce(what, reply)
                    reply = what.parse(reply)  # also if nobody is told: it counts
                if on_reply is not None:
                    on_reply(reply)
            if self._connection is None or not self._waiting:
                return
            try:
                if not self._connection.can_read(timeout=0):
                    return
            except BaseException:
                self.close()
                raise
        # Readable with nothing asked for: the server has closed the connection. What needs one
        # opens the next, or learns that there is none to be had.
        self.close()

    def close(self) -> None:
        """Close the connection; whatever is owed goes to `on_owed`."""
        connection, self._connection = self._connection, None
        self._broke = None
        waiting, self._waiting = self._waiting, deque()
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._on_close(fd)
        if connection is not None:
            connection.disconnect()
        self._fail(waiting)

    def _fail(self, waiting: Iterable[Waiting]) -> None:
        """There will be no reply: it is owed, or whoever waits for it is told."""
        owed = []
        for item, is_owed, _ in waiting:
            if is_owed and isinstance(item.what, ScriptCall):
                owed.append(item.what)
            elif item.on_failure is not None:
                item.on_failure()
        if owed:
            self._on_owed(owed)

    def _open(self) -> None:
        pool = self._pool()
        self._patience = pool.connection_kwargs.get("socket_timeout") or SOCKET_TIMEOUT
        arguments = self._arguments(pool.connection_kwargs)
        connection = pool.connection_class(**arguments)
        connection.connect()
        connection.send_command("CLIENT", "ID")
        try:
            self.client_id = connection.read_response()
        except ResponseError as exc:
            connection.disconnect()
            if is_refused(exc):
                raise explained(exc, pool) from exc
            raise
        if arguments.get("socket_timeout") != self._patience:
            connection.socket_timeout = self._patience
            socket_of(connection).settimeout(self._patience)
        self._connection = connection
        self._brought.clear()
        self._fd = socket_of(connection).fileno()
        self._on_open(self._fd, self.read)

    def _announce(self, call: ScriptCall, reply: Any) -> None:
        """Hand over what a script has announced and could not write itself."""
        announcing = call.announcing(reply)
        if announcing is not None and self._on_announcing is not None:
            self._on_announcing(announcing)

    def _resend(self, waiting: Waiting) -> None:
        # The server has forgotten its scripts (a restart, SCRIPT FLUSH): the text goes along.
        call = waiting.item.what
        assert isinstance(call, ScriptCall)  # nothing else is refused for that
        self._waiting.append(waiting)
        connection = self._connection
        try:
            connection.send_packed_command(
                (pack_command(*call.command(whole=True)),), check_health=False
            )
        except BaseException:
            self.close()
            raise
