"""A connection of its own, on which commands are sent without waiting for their replies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import redis
from redis.exceptions import NoScriptError, ResponseError

from ..center import Call
from ..connections import SOCKET_TIMEOUT
from ..errors import ServerError
from ..metrics import Metrics

#: Seconds without use after which a connection may have been closed by the server.
IDLE = 0.05

#: What a broken connection raises.
BROKEN = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError)


class _Waiting(NamedTuple):
    what: Call | tuple[Any, ...]
    on_reply: Callable[[Any], None] | None
    owed: bool
    latest: float  #: monotonic seconds when the reply is overdue


class Link:
    """Sends commands, and reads their replies when the socket has them.

    pool: where the arguments of the connection come from; the connection is none of the pool's
    on_open, on_close: told the socket's file descriptor
    on_owed: told the calls that must run but whose replies never came
    metrics: told how long calls took

    A connection may be cut without either end being told. A reply that takes longer than the
    socket's timeout, beyond what its command blocks, counts as that: see :meth:`check`.
    """

    def __init__(
        self,
        pool: redis.ConnectionPool,
        on_open: Callable[[int, Callable[[], None]], None],
        on_close: Callable[[int], None],
        on_owed: Callable[[list[Call]], None],
        metrics: Metrics,
    ) -> None:
        self._pool = pool
        self._on_open = on_open
        self._on_close = on_close
        self._on_owed = on_owed
        self._metrics = metrics
        self._connection: Any = None
        self._fd: int | None = None
        self._waiting: deque[_Waiting] = deque()
        self._used = 0.0
        self._patience = pool.connection_kwargs.get("socket_timeout") or SOCKET_TIMEOUT
        #: by which the server knows the connection
        self.client_id = 0

    @property
    def busy(self) -> bool:
        """Whether a reply is still to come."""
        return bool(self._waiting)

    def send(
        self,
        items: list[tuple[Call | tuple[Any, ...], Callable[[Any], None] | None]],
        *,
        owed: int = 0,
        block: float = 0.0,
    ) -> None:
        """Send calls or plain commands, each with what is to be told its result.

        owed: so many, the first, must run; if the connection breaks first, `on_owed` gets them
        block: seconds for which the server may keep the reply back

        Raises redis-py's ConnectionError or TimeoutError.
        """
        now = time.monotonic()
        if not self._waiting and now > self._used + IDLE and self.readable():
            self.close()  # the server has, and nothing is lost by that
        self._used = now
        try:
            if self._connection is None:
                self._open()
            connection = self._connection
            latest = now + block + self._patience
            for number, (what, on_reply) in enumerate(items):
                self._waiting.append(_Waiting(what, on_reply, number < owed, latest))
            connection.send_packed_command(
                connection.pack_commands(
                    [w.command() if isinstance(w, Call) else w for w, _ in items]
                ),
                check_health=False,
            )
        except BaseException:
            if owed and self._connection is None:
                self._on_owed([what for what, _ in items[:owed] if isinstance(what, Call)])
            self.close()
            raise

    def check(self) -> None:
        """Raise redis-py's TimeoutError, and close the connection, if a reply is overdue."""
        if self._waiting and time.monotonic() > self._waiting[0].latest and not self.readable():
            self.close()
            raise redis.exceptions.TimeoutError("no reply: the connection is taken for broken")

    def readable(self) -> bool:
        """Whether a reply has come, or the end of the connection."""
        try:
            return self._connection is not None and self._connection.can_read(timeout=0)
        except BROKEN:
            return True

    def read(self) -> None:
        """Take the replies that have come. Raises ServerError for one that is an error."""
        while self._waiting:
            connection = self._connection
            try:
                reply = connection.read_response()
            except NoScriptError:
                waiting = self._waiting.popleft()
                self._resend(waiting)
            except ResponseError as exc:
                waiting = self._waiting.popleft()
                if waiting.owed and isinstance(waiting.what, Call):
                    self._on_owed([waiting.what])
                self.close()
                raise ServerError(f"Redis refused a command: {exc}") from exc
            except BaseException:
                self.close()
                raise
            else:
                what, on_reply, _, latest = self._waiting.popleft()
                if isinstance(what, Call):
                    seconds = time.monotonic() - latest + self._patience
                    self._metrics.ran(what.script.name, seconds)
                    reply = what.parse(reply)  # which counts, also what nobody waits for
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
        waiting, self._waiting = self._waiting, deque()
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._on_close(fd)
        if connection is not None:
            connection.disconnect()
        owed = [w.what for w in waiting if w.owed and isinstance(w.what, Call)]
        if owed:
            self._on_owed(owed)

    def _open(self) -> None:
        connection = self._pool.connection_class(**self._pool.connection_kwargs)
        connection.connect()
        connection.send_command("CLIENT", "ID")
        self.client_id = connection.read_response()
        self._connection = connection
        self._fd = connection._sock.fileno()
        self._on_open(self._fd, self.read)

    def _resend(self, waiting: _Waiting) -> None:
        # The server has forgotten its scripts (a restart, SCRIPT FLUSH): the text goes along.
        self._waiting.append(waiting)
        connection = self._connection
        try:
            connection.send_packed_command(
                connection.pack_command(*waiting.what.command(whole=True)), check_health=False
            )
        except BaseException:
            self.close()
            raise
