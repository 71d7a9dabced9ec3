"""The timeout center for asyncio: the methods of :class:`TimeoutCenter`, awaited.

::

    async with AsyncTimeoutCenter.from_url("toc+redis://localhost:6379/0") as center:
        await center.put("mail", "order-7", b"remind", delay=3600)

The parts of the center run as they are, in a greenlet (:func:`.client.run`). Their calls leave over
connections of redis.asyncio (:class:`.client.Links`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import partial
from itertools import islice
from math import inf
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import redis
import redis.asyncio

from ..center.calls import PutRequest
from ..center.center import TimeoutCenter
from ..center.consumption import Consumption, Taken
from ..client.options import Address, Settings
from ..errors import ConfigurationError
from ..library import outbox
from ..library.opening import attach, open_center
from ..model.limits import Limits
from ..model.results import Delivery, Found, Position
from ..model.topic import Topic
from .client import AsyncClient, AsyncClusterClient, AwaitedPart, check, open_link, run, wait_for

P = ParamSpec("P")
R = TypeVar("R")

# -- the task library of what runs in an event loop: databases are asked in threads
#
# The library has a center of its own, whose connections wait; it is used in threads, too.

#: What one turn of a thread reads of what is far ahead.
PAGE = 200

#: What asks no database.
_AT_ONCE = frozenset(("note", "gather", "consumes", "scheduled"))


class InThreads:
    """Something whose methods wait for databases; each is called in a thread, and awaited where
    :func:`.client.run` runs the caller."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found) or name in _AT_ONCE or name.startswith("_"):
            return found
        return partial(_in_thread, found)


class FarInThreads(InThreads):
    """What is far ahead: see :class:`.center.core.Far`."""

    def read(self, *args: Any) -> Iterator[tuple[Found, Position]]:
        found = self._inner.read(*args)
        while page := _in_thread(lambda: list(islice(found, PAGE))):
            yield from page


class RecorderInThreads(InThreads):
    """The recorder of a process. What it writes over a connection of the caller's, it writes in the
    caller's thread."""

    def write_with(self, connection: Any, *args: Any) -> None:
        _with(connection, self._inner, lambda given: self._inner.write_with(given, *args))


class LibraryInThreads(InThreads):
    """What a center tells its library: see :class:`.center.core.Recorder`."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.recorder = RecorderInThreads(inner.recorder)
        self.far = FarInThreads(inner.far)
        self.library = inner.library
        self.failures = InThreads(inner.failures)
        self.server_time = InThreads(inner.server_time)

    def keep_far(self, topic: Topic, requests: Sequence[PutRequest]) -> set[int]:
        connection = outbox.current()
        if connection is None:
            return _in_thread(self._inner.keep_far, topic, requests)

        def keep(given: Any) -> set[int]:
            with outbox.outbox(given):
                kept: set[int] = self._inner.keep_far(topic, requests)
            return kept

        return _with(connection, self._inner.recorder, keep)

    def told(self, messages: Sequence[Delivery], *how: Any) -> None:
        # Only receipts are looked up in databases.
        tell = partial(self._inner.told, messages, *how)
        if all(one.body for one in messages):
            tell()
        else:
            _in_thread(tell)


def attach_in_threads(
    center: TimeoutCenter,
    settings: Settings,
    address: Address,
    another: Callable[[], TimeoutCenter],
) -> None:
    """Have a center of an event loop use the library that the settings name, if they do.

    another: makes a center whose connections wait
    """
    if not settings.toc_library:
        return
    opened = attach(another(), settings, address, another)
    assert opened is not None
    opened.topic_of = center.registry.known
    center.recorder = LibraryInThreads(opened)


def _with(connection: Any, recorder: Any, write: Callable[[Any], R]) -> R:
    """Write over a connection of the caller's, in the caller's thread.

    write: given the connection, or what a connection of SQLAlchemy's asyncio extension wraps
    """
    _in_thread(recorder.store.shards.make_sure)  # or this thread would ask
    if not outbox.is_awaited(connection):
        return write(connection)
    written: R = wait_for(connection.run_sync(write))
    return written


def _in_thread(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Call something in a thread, where waiting does not block the loop."""
    return wait_for(asyncio.to_thread(function, *args, **kwargs))


# -- loops over messages


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
    _make_bell = asyncio.Event
    task: asyncio.Task[None] | None = None

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

    def __init__(self, loop: _Consumption) -> None:
        self._loop = loop

    async def __aenter__(self) -> AsyncConsumption:
        self._loop.__enter__()
        return self

    async def __aexit__(self, *why: object) -> None:
        task = self._loop.task
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        await run(self._loop.__exit__, *why)

    def __aiter__(self) -> AsyncIterator[AsyncTaken]:
        return self

    async def __anext__(self) -> AsyncTaken:
        message = await run(self._loop.take)
        if message is None:
            raise StopAsyncIteration
        assert isinstance(message, AsyncTaken)
        return message


# -- the timeout center


class Awaited(Generic[P, R]):
    """A method of the center, awaited: ``get = Awaited(TimeoutCenter.get)``.

    Of the class it is the center's function, with its signature and docstring.
    """

    def __init__(self, method: Callable[Concatenate[Any, P], R]) -> None:
        self._name = method.__name__
        self._method = method

    @overload
    def __get__(self, facade: None, owner: type) -> Callable[Concatenate[Any, P], R]: ...

    @overload
    def __get__(
        self, facade: AsyncTimeoutCenter, owner: type
    ) -> Callable[P, Coroutine[Any, Any, R]]: ...

    def __get__(self, facade: AsyncTimeoutCenter | None, owner: type) -> Callable[..., Any]:
        if facade is None:
            return self._method
        method = getattr(facade.center, self._name)

        def call(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
            return run(method, *args, **kwargs)

        call.__name__, call.__doc__ = self._name, self._method.__doc__
        return call


class AsyncTimeoutCenter:
    """The operations on topics, awaited. Tasks of one event loop share one.

    client: a ``redis.asyncio.Redis`` that returns bytes; it says where the server is. The center
        opens connections of its own like those of its pool, no more than the pool's
        ``max_connections`` and at most ten unless that is set. :meth:`from_url` makes one for a
        Cluster, too
    options: those of :class:`TimeoutCenter`

    Raises ConfigurationError for a client that cannot be used, and if the package greenlet is not
    installed.

    A task that is cancelled while it awaits a method does not know whether the server has done
    what was asked; no connection is left with replies that nobody reads.
    """

    def __init__(self, client: redis.asyncio.Redis, prefix: str = "toc:", **options: Any) -> None:
        self._take(TimeoutCenter(_client_like(client), prefix, **options))

    @classmethod
    def from_url(cls, url: str, *, ssl: Any = None, **options: Any) -> AsyncTimeoutCenter:
        """The timeout center behind a broker URL; see :func:`kombu_toc.center_for`.

        ssl: as in Celery's ``broker_use_ssl``
        options: as in ``broker_transport_options``; ``max_connections`` is ten unless given, for
            each node of a Cluster

        Raises ConfigurationError for a URL or an option that makes no sense. It connects when it is
        first used.
        """
        classes = (AsyncClient, AsyncClusterClient)
        return cls.over(open_center(url, ssl, options, attach_in_threads, classes=classes))

    @classmethod
    def over(cls, center: TimeoutCenter) -> AsyncTimeoutCenter:
        """The center around one whose client is one of asyncio's."""
        made = cls.__new__(cls)
        made._take(center)
        return made

    def _take(self, center: TimeoutCenter) -> None:
        check()
        #: the center whose methods run in greenlets
        self.center = center
        self.clustered = center.clustered
        self.client: Any = center.client
        self.keys, self.metrics = center.keys, center.metrics
        self.queues, self.dead = AwaitedPart(center.queues), AwaitedPart(center.dead)
        self.failures = AwaitedPart(center.failures)
        self.admin, self.recurring = AwaitedPart(center.admin), AwaitedPart(center.recurring)
        self.registry, self.runner = AwaitedPart(center.registry), AwaitedPart(center.runner)
        self.notes = AwaitedPart(center.notes)

    def __repr__(self) -> str:
        return f"<AsyncTimeoutCenter over {self.center!r}>"

    async def __aenter__(self) -> AsyncTimeoutCenter:
        return self

    async def __aexit__(self, *why: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Send the counters of this process, and close the connections; they open again when the
        center is used."""
        center = self.center
        try:
            await run(center.metrics.send, center.runner)
        finally:
            await self.client.aclose()

    def call(
        self, function: Callable[..., R], /, *args: Any, **kwargs: Any
    ) -> Coroutine[Any, Any, R]:
        """Call a function of `kombu_toc` that takes a center: ``await center.call(read_metrics)``.

        function: gets the center as its first argument, then the others
        """
        return run(function, self.center, *args, **kwargs)

    @property
    def limits(self) -> Limits:
        """What holds for queues whose declarations do not say."""
        return self.center.limits

    @property
    def library(self) -> AwaitedPart:
        """The task library behind this center: its methods are awaited. Raises ConfigurationError
        if there is none."""
        return AwaitedPart(self.center.library, asyncio.to_thread)

    # -- put, pop, and what ends a delivery

    def consume(
        self,
        *topics: str,
        limit: int = 1,
        idle: float | None = None,
        visibility: float | None = None,
        auto_ack: bool = True,
    ) -> AsyncConsumption:
        """As :meth:`TimeoutCenter.consume`; what it returns is awaited, and not the method."""
        loops = self.center.loops
        loop = _Consumption(
            loops, topics, limit=limit, idle=idle, visibility=visibility, auto_ack=auto_ack
        )
        return AsyncConsumption(loop)

    put = Awaited(TimeoutCenter.put)
    put_many = Awaited(TimeoutCenter.put_many)
    pop = Awaited(TimeoutCenter.pop)
    ack = Awaited(TimeoutCenter.ack)
    reject = Awaited(TimeoutCenter.reject)
    bury = Awaited(TimeoutCenter.bury)
    release = Awaited(TimeoutCenter.release)
    extend = Awaited(TimeoutCenter.extend)

    # -- messages by id, by state and time

    get = Awaited(TimeoutCenter.get)
    cancel = Awaited(TimeoutCenter.cancel)
    reschedule = Awaited(TimeoutCenter.reschedule)
    run_now = Awaited(TimeoutCenter.run_now)
    scan = Awaited(TimeoutCenter.scan)
    count = Awaited(TimeoutCenter.count)
    counts = Awaited(TimeoutCenter.counts)


def _client_like(client: Any) -> AsyncClient:
    """A client that opens connections like those of a client of redis.asyncio."""
    if isinstance(client, redis.asyncio.RedisCluster):
        raise ConfigurationError(
            "the center has a client of its own for a Redis Cluster, which knows what has run: "
            "use AsyncTimeoutCenter.from_url('toc+cluster://h1:7000,h2:7000')"
        )
    if not isinstance(client, redis.asyncio.Redis):
        raise ConfigurationError(
            f"an AsyncTimeoutCenter takes a redis.asyncio.Redis, not {type(client).__name__}; "
            "AsyncTimeoutCenter.from_url takes a URL"
        )
    pool: Any = client.connection_pool
    if pool.connection_kwargs.get("decode_responses"):
        raise ConfigurationError(
            "the center keeps bytes: give it a client of redis.asyncio without "
            "decode_responses=True"
        )
    names = ("host", "port", "path", "db", "username")
    where = {n: v for n, v in pool.connection_kwargs.items() if n in names}
    most = pool.max_connections if pool.max_connections < 1 << 31 else None
    return AsyncClient(
        redis.ConnectionPool(
            connection_class=redis.UnixDomainSocketConnection
            if "path" in where
            else redis.Connection,
            **where,
        ),
        open=lambda: open_link(pool),
        most=most,
    )
