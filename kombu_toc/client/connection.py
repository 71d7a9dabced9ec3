"""A client of one server: redis-py's, with connections of its own for frequent commands."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakValueDictionary

import redis
from redis.exceptions import ResponseError

from ..compat.redis_connections import is_open, open_of
from ..errors import ServerError
from ..scripts.call import patience_for, pieces
from .errors import translated

#: Seconds without use after which a connection may have been closed by the server.
IDLE = 0.05


#: The clients of this process. The child of a fork has them, too.
_clients: WeakValueDictionary[int, Client] = WeakValueDictionary()


class Client(redis.Redis):
    """redis-py's client. A reply that a server cannot run a command for now is raised as a
    ServerError, which is a ConnectionError: callers retry as after a lost connection."""

    #: how who uses this client waits between two attempts
    sleep = staticmethod(time.sleep)

    def __init__(self, connection_pool: redis.ConnectionPool) -> None:
        super().__init__(connection_pool=connection_pool)
        self.thread = threading.get_native_id()
        #: its own idle connections, and the monotonic seconds when each was last used
        self._idle: deque[tuple[Any, float]] = deque()
        # A pool with a bound counts its connections, and new credentials reach only the pool's.
        pooled = isinstance(connection_pool, redis.BlockingConnectionPool)
        provider = connection_pool.connection_kwargs.get("credential_provider")
        self._keeps_connections = not pooled and provider is None
        if self._keeps_connections:
            _clients[id(self)] = self

    @property
    def run_packed(self) -> Callable[[Sequence[bytes]], list[Any]] | None:
        """Sends packed commands and returns their replies; for a command that is refused, the
        error. None if every connection must come from the pool.

        For frequent commands: it saves the work of redis-py's pool and of its execute_command. A
        loop of center.put takes 31 us of processor time for a message; over redis-py's own, 65
        (25 and 50 with hiredis). A loop of Celery's apply_async, with all that Celery does, takes
        311 and 359 (302 and 368). Measured with Python 3.11 and redis-py 8.1, alternating.
        """
        return self._run_packed if self._keeps_connections else None

    def _run_packed(self, commands: Sequence[bytes]) -> list[Any]:
        with self.sending(commands) as read:
            return read(len(commands))

    @contextmanager
    def sending(self, commands: Sequence[bytes]) -> Iterator[Callable[[int], list[Any]]]:
        """As :attr:`run_packed`, in two steps: yields a function that reads that many replies."""
        connection = self._connection()
        packed = b"".join(commands)

        def read(number: int) -> list[Any]:
            if more := patience_for(len(packed)):
                connection.can_read(timeout=more)
            replies: list[Any] = []
            for _ in range(number):
                try:
                    replies.append(connection.read_response())
                except ResponseError as exc:
                    replies.append(translated(exc, self.connection_pool))
            return replies

        try:
            connection.send_packed_command(pieces(packed))
            yield read
        except BaseException as exc:
            connection.disconnect()  # replies may still arrive
            if isinstance(exc, ValueError):  # redis-py cannot read it
                raise ServerError(f"no reply of a Redis or Valkey: {exc}; correct the URL") from exc
            if isinstance(exc, ResponseError):  # the server refused the login
                raise translated(exc, self.connection_pool)  # noqa: B904 - as below
            raise
        finally:
            self._idle.append((connection, time.monotonic()))

    def _connection(self) -> Any:
        """A connection that only this thread uses until it is put back."""
        while self._idle:
            try:
                connection, used = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if connection.pid != os.getpid():  # it is the parent process's
                continue
            if time.monotonic() > used + IDLE:
                _disconnect_if_broken(connection)
            return connection
        pool = self.connection_pool
        return pool.connection_class(**pool.connection_kwargs)

    def take_open(self) -> Any:
        """An open idle connection, or None; the server is not asked."""
        while self._idle:
            try:
                connection, _ = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if connection.pid == os.getpid() and is_open(connection):
                return connection
        return open_of(self.connection_pool)

    def drop_idle(self, seconds: float = 0.0) -> None:
        """Close the connections that have been idle for this long. A fault that broke another one
        may have broken them, or they are no longer needed."""
        latest = time.monotonic() - seconds
        with suppress(IndexError):  # another thread was faster
            while self._idle[0][1] <= latest:
                self._idle.popleft()[0].disconnect()

    def close(self) -> None:
        """Close its connections; they open again when they are needed."""
        self.drop_idle()
        super().close()

    def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            if not self._keeps_connections:
                return super().execute_command(*args, **options)
            return self.execute_all([(args, options)], True)[0]
        except ResponseError as exc:
            raise translated(exc, self.connection_pool)  # noqa: B904 - it has its cause already, if it is another

    def execute_all(self, commands: Sequence[tuple[Any, Any]], raises: bool) -> list[Any]:
        """Execute commands as redis-py does, over the same connections as packed commands, so that
        a process seldom needs more of them.

        commands: arguments and redis-py's options of each
        raises: whether the first error is raised; otherwise it takes the place of a reply
        """
        connection = self._connection()
        replies: list[Any] = []
        try:
            connection.send_packed_command(connection.pack_commands([args for args, _ in commands]))
            for args, options in commands:
                try:
                    replies.append(self.parse_response(connection, args[0], **options))
                except ResponseError as exc:
                    replies.append(exc)
        except BaseException as exc:
            connection.disconnect()  # replies may still arrive
            if isinstance(exc, ValueError):
                raise ServerError(f"no reply of a Redis or Valkey: {exc}; correct the URL") from exc
            raise
        finally:
            self._idle.append((connection, time.monotonic()))
        for reply in replies if raises else ():
            if isinstance(reply, Exception):
                raise reply
        return replies

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Pipeline:
        made = pipeline_of(self, transaction, shard_hint)
        if transaction or not self._keeps_connections:
            made.run = None
        return made


def pipelined(
    client: Any, commands: Iterable[tuple[Any, ...]], *, raises: bool = True
) -> list[Any]:
    """The replies to commands that are sent together, to each node of a Cluster its own.

    raises: the first error; else errors are among the replies
    """
    with client.pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        replies: list[Any] = pipe.execute(raise_on_error=raises)
    return replies


def close_idle(seconds: float, thread: int | None = None) -> None:
    """Close the connections of this process that have been idle for this long.

    thread: native id; only connections of clients that were made in this thread. Where sockets
        belong to an event loop, no other thread may close them.
    """
    # A copy of the references is made at once, whatever other threads add meanwhile.
    for client in [found() for found in _clients.valuerefs()]:
        if client is not None and thread in (None, client.thread):
            client.drop_idle(seconds)


def _disconnect_if_broken(connection: Any) -> None:
    """Close a connection that the server has closed; it reconnects when something is sent."""
    try:
        broken = connection.can_read(timeout=0)
    except (redis.ConnectionError, redis.TimeoutError, OSError):
        broken = True
    if broken:
        connection.disconnect()


class _Reply:
    """A reply that was read, for redis-py's parsers, which read from a connection."""

    def __init__(self, reply: Any) -> None:
        self._reply = reply

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        return self._reply


def parsed(
    client: Any, replies: Iterable[Any], commands: Sequence[tuple[Any, Any]], raises: bool
) -> list[Any]:
    """Replies as redis-py's methods return them. Errors are among them, or the first is raised.

    commands: the arguments and the options of each
    """
    found = []
    for reply, (args, options) in zip(replies, commands, strict=True):
        if not isinstance(reply, Exception):
            reply = client.parse_response(_Reply(reply), args[0], **options)
        elif raises:
            raise reply
        found.append(reply)
    return found


def pipeline_of(client: Any, transaction: bool = False, shard_hint: Any = None) -> Pipeline:
    """A pipeline that sends its commands by the client's `execute_all`."""
    made = Pipeline(client.connection_pool, client.response_callbacks, transaction, shard_hint)
    made.run = client.execute_all
    return made


class Pipeline(redis.client.Pipeline):
    """redis-py's pipeline, with the errors of :class:`Client`."""

    #: executes the commands instead of redis-py
    run: Callable[[Sequence[tuple[Any, Any]], bool], list[Any]] | None = None

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        try:
            if self.run is not None and not self.watching:
                stack, self.command_stack = self.command_stack, []
                replies = self.run(stack, raise_on_error) if stack else []
                return [translated(reply, self.connection_pool) for reply in replies]
            return [translated(r, self.connection_pool) for r in super().execute(raise_on_error)]
        except ResponseError as exc:
            raise translated(exc, self.connection_pool)  # noqa: B904 - as above
