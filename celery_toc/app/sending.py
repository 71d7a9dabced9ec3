"""Sends the tasks of an app from one event loop."""

from __future__ import annotations

import asyncio
import builtins
import hashlib
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import Task, current_app
from celery.canvas import Signature, chain, chord, group
from celery.utils import uuid
from kombu.exceptions import OperationalError
from kombu.utils import json

import kombu_toc
from celery_toc import timeout_center

from ..compat import sending as compat
from .task import TaskCenter, broker_of

if TYPE_CHECKING:
    from celery import Celery

    from ..schedules.messages import Plan
    from ..schedules.state import Schedule


# -- what sends the tasks of an app from one event loop

#: Tasks of an event loop that are being sent at a time. The others wait for their turn, so that a
#: loop in which thousands are sent still turns.
LANES = 64

#: Seconds between two attempts to send, at least.
PAUSE = 0.01

#: How often it is looked whether a message can be made like another one that Celery is making.
ATTEMPTS = 50


class _Awaited:
    """An object of which each method is called where waiting does not block the loop."""

    def __init__(self, inner: Any, center: kombu_toc.AsyncTimeoutCenter) -> None:
        self._inner = inner
        self._center = center

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._center.call, _without_center, getattr(self._inner, name))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._inner)})


class AsyncTaskCenter:
    """The methods of :class:`TaskCenter`, awaited. :func:`celery_toc.aio.timeout_center` returns
    it."""

    def __init__(self, tasks: TaskCenter, center: kombu_toc.AsyncTimeoutCenter) -> None:
        #: the center whose methods are called
        self.tasks = tasks
        self._center = center

    def __repr__(self) -> str:
        return f"<AsyncTaskCenter over {self.tasks!r}>"

    @property
    def schedules(self) -> AsyncSchedules:
        """Tasks that run again and again: the methods of :class:`celery_toc.Schedules`, awaited."""
        return AsyncSchedules(self.tasks.schedules, self._center)

    @property
    def dead(self) -> Any:
        """Dead messages: see :class:`.DeadTasks`, awaited."""
        return _Awaited(self.tasks.dead, self._center)

    async def scheduled(self, topics: Iterable[str], limit: int, *, far: bool = True) -> list[Any]:
        """As :meth:`TaskCenter.scheduled`, in a list."""

        def read(_: Any) -> list[Any]:
            return list(self.tasks.scheduled(topics, limit, far=far))

        found: list[Any] = await self._center.call(read)
        return found

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.tasks)})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in vars(TaskCenter) and hasattr(self._center, name):
            return getattr(self._center, name)
        found = getattr(self.tasks, name)
        return partial(self._center.call, _without_center, found) if callable(found) else found


class AsyncSchedules(_Awaited):
    """The methods of :class:`celery_toc.Schedules`, awaited."""

    def signed(self, by: str) -> AsyncSchedules:
        """As :meth:`celery_toc.Schedules.signed`."""
        return AsyncSchedules(self._inner.signed(by), self._center)

    async def plan(self, name: str, task: Any, schedule: Any, **options: Any) -> Plan:
        """As :meth:`celery_toc.Schedules.plan`. Celery makes the message in a thread."""
        return await asyncio.to_thread(self._inner.plan, name, task, schedule, **options)

    async def put(self, name: str, task: Any, schedule: Any, **options: Any) -> Schedule:
        """As :meth:`celery_toc.Schedules.put`."""
        plan = await self.plan(name, task, schedule, **options)
        return await self._center.call(_without_center, self._inner.keep, plan)

    async def put_many(self, entries: Iterable[Mapping[str, Any]]) -> builtins.list[Schedule]:
        """As :meth:`celery_toc.Schedules.put_many`, by a thread over a connection of its own: the
        loop is free meanwhile."""
        inner, entries = self._inner, [*entries]

        def put() -> builtins.list[Schedule]:
            center = timeout_center(inner._app)
            try:
                found: builtins.list[Schedule] = center.schedules.signed(inner._by).put_many(
                    entries
                )
                return found
            finally:
                center.client.close()

        return await asyncio.to_thread(put)

    async def each(self, *, queue: str | None = None) -> AsyncIterator[Schedule]:
        """Yield all schedules, as :meth:`celery_toc.Schedules.each`."""
        after = None
        while True:
            page = await self.list(queue=queue, after=after)
            for schedule in page.schedules:
                yield schedule
            after = page.after
            if after is None:
                return


def _without_center(center: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return method(*args, **kwargs)


class Lane:
    """A producer that sends one task at a time: a repeated publish is recognised by its producer's
    latest one."""

    def __init__(self, app: Celery, transport: kombu_toc.AsyncTransport) -> None:
        self.channel: kombu_toc.AsyncChannel = transport.Channel(transport)
        self.producer = app.amqp.Producer(self.channel, auto_declare=False)


class AsyncSender:
    """Sends the tasks of an app from one event loop.

    Raises ConfigurationError if the app's broker is no timeout center.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        broker_of(app)
        # One that is Kombu's in all but the transport, and how it waits between attempts.
        self._connection = connection = app.connection_for_write()
        connection.transport_cls = kombu_toc.AsyncTransport
        connection.ensure = partial(_ensure, connection)
        self._transport: kombu_toc.AsyncTransport = connection.transport
        self._center = self._transport.async_center
        self.center = AsyncTaskCenter(TaskCenter(app, self._transport.center), self._center)
        self._quick = compat.QuickMessages(app)
        #: kinds of messages of which Celery is making one
        self._learning: set[Any] = set()
        self._idle: list[Lane] = []
        self._turns = asyncio.Semaphore(LANES)

    async def send(self, signature: Signature, options: dict[str, Any]) -> Any:
        """Send a signature as its ``apply_async`` does."""
        if type(signature) is not Signature and _begins_in_the_backend(signature):
            return await asyncio.to_thread(signature.apply_async, **options)
        lane = None
        await self._turns.acquire()
        try:
            lane = self._idle.pop() if self._idle else Lane(self.app, self._transport)
            return await self._center.call(self._send, signature, lane, options)
        finally:
            if lane is not None:
                self._idle.append(lane)
            self._turns.release()

    def _send(self, _: Any, signature: Any, lane: Lane, options: dict[str, Any]) -> Any:
        """Send a signature; called where waiting does not block the loop."""
        settings = self._transport.settings
        if type(signature) is not Signature or settings.toc_library or settings.toc_otel:
            return self._by_celery(signature, lane, options)
        quick = self._quick
        known = _quickly(quick, signature, options)
        if known is None:
            return self._by_celery(signature, lane, options)
        task, key, values = known
        id, shape = values.id, quick.find(key)
        attempts = 0
        while shape is None and key in self._learning and attempts < ATTEMPTS:
            # Celery is making one for another task: this one can be made like it in a moment.
            self._transport.center.client.sleep(PAUSE / 10)
            shape = quick.find(key)
            attempts += 1
        if shape is None:
            lane.channel.last = None
            self._learning.add(key)
            try:
                result = self._by_celery(signature, lane, {**options, "task_id": id})
                quick.learn(key, lane.channel, lane.channel.last, values)
            finally:
                self._learning.discard(key)
            return result
        lane.channel.publish_made(
            partial(shape.plain, values),
            shape.queue,
            id,
            priority=shape.priority,
            eta=values.eta,
            counts=values.counts,
            key=values.key,
            run_again=self._again,
        )
        result = task.AsyncResult(id)
        result.ignored = shape.ignored
        return result

    def _by_celery(self, signature: Any, lane: Lane, options: dict[str, Any]) -> Any:
        compat.install_async_results(self.app.backend)
        return signature.apply_async(producer=lane.producer, **options)

    def _again(self, publish: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that repeats a publish as the app's settings say."""
        conf, connection = self.app.conf, self._connection
        again = publish
        if conf.task_publish_retry:
            again = _ensure(connection, None, publish, **conf.task_publish_retry_policy)

        def publish_again() -> None:
            try:
                again()
            except connection.recoverable_connection_errors as exc:  # as Celery raises them
                raise OperationalError(str(exc)) from exc

        return publish_again

    async def aclose(self) -> None:
        """Close the connections."""
        await self._center.aclose()
        senders = _senders.get(asyncio.get_running_loop(), {})
        senders.pop(self.app, None)


def _quickly(
    quick: compat.QuickMessages, signature: Any, options: Mapping[str, Any]
) -> tuple[Task, Any, compat.Values] | None:
    """Task, kind and values of a message that may be made like others; None if Celery is to make
    it."""
    # As Signature.apply_async merges them.
    given = {name: value for name, value in options.items() if value is not None}
    merged = {**signature.options, **given} if signature.options else given
    try:
        task = signature.type
    except KeyError:  # it is registered elsewhere
        return None
    key = quick.key_of(task, merged) if isinstance(task, Task) else None
    if key is None:
        return None
    id, args, kwargs = merged.get("task_id") or uuid(), signature.args, signature.kwargs
    values = quick.values_of(task, id, args or (), kwargs or {}, merged)
    return None if values is None else (task, key, values)


def _begins_in_the_backend(signature: Any) -> bool:
    """Whether Celery would talk to the result backend before it sends anything."""
    if isinstance(signature, chord):
        return True
    if isinstance(signature, chain):
        return any(isinstance(task, (chain, chord, group)) for task in signature.tasks)
    return isinstance(signature, group) and any(map(_begins_in_the_backend, signature.tasks))


def _ensure(
    connection: Any,
    obj: Any,
    fun: Callable[..., Any],
    errback: Callable[[Any, float], Any] | None = None,
    max_retries: int | None = None,
    interval_start: float = 1,
    interval_step: float = 1,
    interval_max: float = 1,
    on_revive: Any = None,
    retry_errors: Any = None,
) -> Callable[..., Any]:
    """As ``kombu.Connection.ensure``, whose pauses would block the loop."""
    errors = (*connection.recoverable_connection_errors, *(retry_errors or ()))

    def ensured(*args: Any, **kwargs: Any) -> Any:
        retries, pause = 0, interval_start
        while True:
            try:
                return fun(*args, **kwargs)
            except errors as exc:
                if max_retries is not None and retries >= max_retries:
                    raise
                if errback is not None:
                    errback(exc, pause)
            retries += 1
            connection.transport.center.client.sleep(max(pause, PAUSE))
            pause = min(pause + interval_step, interval_max)

    return ensured


#: event loop -> app -> its sender there
_senders: dict[asyncio.AbstractEventLoop, dict[Celery, AsyncSender]] = {}


def sender_of(app: Celery | None = None) -> AsyncSender:
    """The sender of an app, the current one unless given, in the running loop."""
    found: Celery = current_app._get_current_object() if app is None else app
    loop = asyncio.get_running_loop()
    senders = _senders.get(loop)
    if senders is None:
        for ended in [one for one in list(_senders) if one.is_closed()]:
            _senders.pop(ended, None)
        senders = _senders.setdefault(loop, {})
    sender = senders.get(found)
    return sender or senders.setdefault(found, AsyncSender(found))


# -- many tasks at once

#: Tasks that leave together.
TOGETHER = 500


class _Gathering:
    """Stands for a channel, and gathers in a batch what is published."""

    def __init__(self, channel: kombu_toc.Channel) -> None:
        self._channel = channel
        self.batch = channel.create_publish_batch(TOGETHER)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def basic_publish(self, message: dict[str, Any], **kwargs: Any) -> Any:
        return self.batch.publish(message, **kwargs)


def send_many(signatures: Iterable[Signature], app: Celery | None = None) -> list[Any]:
    """Send tasks, as ``apply_async`` of each would, and several times as fast::

        celery_toc.send_many(add.s(n, n) for n in range(10_000))
        celery_toc.send_many(add.chunks(pairs, 10).group().tasks)

    Up to 500 leave together. Messages that are alike are made like one that Celery has just made.

    app: the current app unless given

    Returns what ``apply_async`` returns of each. Raises what it raises; then the tasks before are
    sent. Raises Kombu's BatchPublishError if some may not have been sent, and ConfigurationError if
    the app's broker is no timeout center.
    """
    app = current_app._get_current_object() if app is None else app
    results = []
    with app.producer_or_acquire() as producer:
        if not isinstance(producer.channel, kombu_toc.Channel):
            broker_of(app)  # it says which it is
        channel = _Gathering(producer.channel)
        batch, quick = channel.batch, compat.QuickMessages(app)
        if app.conf.task_publish_retry:
            policy = app.conf.task_publish_retry_policy
            batch.run_again = lambda run: _ensure(producer.connection, None, run, **policy)
        gathering = app.amqp.Producer(channel, auto_declare=False)
        settings = producer.channel.settings
        may_be_quick = not (settings.toc_library or settings.toc_otel)
        try:
            for signature in signatures:
                known = None
                if may_be_quick and type(signature) is Signature:
                    known = _quickly(quick, signature, {})
                if known is None:
                    results.append(signature.apply_async(producer=gathering))
                    continue
                task, key, values = known
                shape = quick.find(key)
                if shape is None:
                    batch.last = None
                    results.append(signature.apply_async(producer=gathering, task_id=values.id))
                    quick.learn(key, channel, batch.last, values)
                    continue
                batch.publish_made(
                    partial(shape.plain, values),
                    shape.queue,
                    values.id,
                    shape.priority,
                    values.eta,
                    values.counts,
                    values.key,
                )
                result = task.AsyncResult(values.id)
                result.ignored = shape.ignored
                results.append(result)
        finally:
            if batch.is_open:
                batch.flush()
                batch.close()
    return results


# -- tasks of which there is one at a time


def unique(
    key: Any, until: str | float | None = None, conflict: str = "keep", at_most: float | None = None
) -> dict[str, Any]:
    """Options of ``apply_async`` by which a task is sent only if its queue has none of this key:
    ``apply_async(args, **unique("invoice-42"))``.

    key: text, a whole number or a UUID
    until: how long the task that is sent has the key: ``"start"``, until a worker fetches it;
        ``"done"``, until it has ended; or for so many seconds, also if it has ended before.
        ``"done"`` unless given; with ``replace`` and ``push_back``, ``"start"``
    conflict: what is done if another task has the key: ``"keep"``, nothing is sent, and the
        AsyncResult of the other one is returned; ``"replace"``, the other one gets the new
        arguments and the new time, and keeps its id, of which the AsyncResult is returned;
        ``"push_back"``, the same, and its time only gets later; ``"raise"``, UniqueError. What has
        started cannot be replaced or pushed back: then UniqueError is raised
    at_most: with ``push_back``: seconds after the first was sent beyond which it is not pushed back

    Raises CompatError if this Celery lacks a name that is needed. Sending raises TraitError if an
    option makes no sense.
    """
    compat.install_uniqueness()
    said = {"": key, "-until": until, "-conflict": conflict, "-at-most": at_most}
    return {f"x-unique{name}": value for name, value in said.items() if value is not None}


class Unique:
    """The attribute ``toc_unique`` of a task: each time it is sent, with :func:`unique`.

    key: computes the key from the arguments of the task; None: this one is not unique. Or a text,
        the same for all. Unless given, tasks with the same arguments have the same key. The name of
        the task and a colon are put before it
    until, conflict, at_most: as of :func:`unique`

    Raises CompatError as :func:`unique`.
    """

    def __init__(
        self,
        key: Callable[..., Any] | str | None = None,
        until: str | float | None = None,
        conflict: str = "keep",
        at_most: float | None = None,
    ) -> None:
        compat.install_uniqueness()
        self.key = key
        self.until = until
        self.conflict = conflict
        self.at_most = at_most

    def __repr__(self) -> str:
        return f"<Unique: until={self.until!r} conflict={self.conflict!r}>"

    def options_for(self, task: Any, args: Any, kwargs: Any) -> dict[str, Any]:
        """The options with which the task is sent with these arguments."""
        args, kwargs = tuple(args or ()), dict(kwargs or {})
        if self.key is None:
            key: Any = _digest(task, args, kwargs)
        else:
            key = self.key(*args, **kwargs) if callable(self.key) else self.key
        if key is None:
            return {}
        return unique(f"{task.name}:{key}", self.until, self.conflict, self.at_most)


def _digest(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """A text that tasks with the same arguments have in common."""
    try:
        bound = inspect.signature(task.run).bind(*args, **kwargs)
        bound.apply_defaults()
        said = dict(bound.arguments)
    except TypeError:  # it is sent with arguments that it does not take
        said = {"args": args, "kwargs": kwargs}
    try:
        text = json.dumps(said, sort_keys=True)
    except TypeError as exc:
        raise kombu_toc.TraitError(
            f"task {task.name}: its arguments make no unique key ({exc}); give toc_unique a key, a "
            "function of the arguments"
        ) from None
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
