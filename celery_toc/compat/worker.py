"""How a worker starts, connects, counts its tasks and ends; its requests and its pool.

A worker's consumer gets one more bootstep (`bootstep`).

Touches: `Consumer.Blueprint.default_steps`, to which the step is added.

Why: ``app.steps["consumer"]`` is the public way, for who has the app. The transport is asked for by
a worker of any app, with gevent and eventlet after Celery has told of it (``worker_init``).

Read in Celery 5.3.6 and 5.7.0.

Without: a worker would know nothing of leases, and give back what its processes execute when its
connection breaks. Nothing starts.

Which tasks a worker has, and whether it is told to end (`worker-state`).

Touches: ``celery.worker.state``: ``requests``, ``reserved_requests``, ``active_requests``,
``should_stop``, ``should_terminate`` and ``maybe_shutdown``.

Why: no signal and no method tells which tasks a worker has; the commands that show them are for
others, and copy what they show.

Read in Celery 5.3.6 and 5.7.0.

Without: a message would be given back while its task is executed. A worker does not start.

The references in a WeakSet, without going through what they refer to (`weak-sets`).

Touches: ``weakref.WeakSet.data`` of ``celery.worker.state.reserved_requests`` and
``active_requests``.

Why: how many tasks are in hand is asked several times in each turn of the event loop. To go
through a WeakSet costs more than all else that is asked; its length counts what both sets hold
twice.

Read in Python 3.10 to 3.13.

Without: a worker takes longer for each turn of its event loop.

A worker pauses between connections that do not last (`connect-pause`).

Touches: `Consumer.connect`, which is replaced on the consumer.

Why: Celery connects again at once, five times a second. Its settings have a limit of attempts,
but no pause after a connection that was made and broke. A server that lets a worker in and then
refuses what it needs would be asked, and the log be filled, without an end.

Read in Celery 5.3.6 and 5.7.0.

Without: a worker whose connections break as soon as they are made tries five times a second.

A cold shutdown gives back what nobody has begun before it waits (`soft-shutdown`).

Touches: ``WorkController.wait_for_soft_shutdown`` of Celery 5.5 and later, which is replaced on the
worker, ``TaskPool.stop`` and ``on_apply``, which are replaced on its pool of processes,
``celery.worker.state.maybe_shutdown``, which is replaced until that pool has stopped, and which of
the functions ``_write_job``, ``_recv_message`` and ``_flush_outqueue`` has been interrupted.

Why: a cold shutdown happens within a signal handler, in which Celery sleeps for as long as tasks
may still end, and waits for the pool. The signal ``worker_shutting_down`` comes before that, and
tells nothing of who else may be stopped by then. If the handler has interrupted the pool, a task is
written half or a result half read: the process takes what tells it to end for the rest of the task,
or waits until its result is read, and Celery waits for the process.

Read in Celery 5.5.3, 5.6.3 and 5.7.0; 5.3 and 5.4 have no soft shutdown.

Without: what a worker has fetched and not begun comes back when its leases end; and a worker that
was busy may end half a minute later, or never.

An acknowledgement leaves when a task says so (`acks-at-once`).

Touches: `Consumer.call_soon` and, since Celery 5.7, `Consumer.call_soon_ack`, which are replaced
on the consumer.

Why: Celery's strategies hand acknowledgements to these two, which run them in the event loop's
next turn. There may be none: a worker that ends waits for its tasks outside the loop. No setting
changes that.

Read in Celery 5.3.6 and 5.7.0.

Without: an acknowledgement leaves a turn of the loop later, and those of tasks that end while the
worker stops leave when it closes its event loop.

`due-times`: a task that has waited in the center starts when the center says that it is due.

Touches: `Consumer.timer` and `Consumer.on_task_request`, which are replaced on the consumer; and,
since Celery 5.7, ``celery.worker.state.scheduled_requests``, with `Consumer.strategies`, which are
wrapped whenever Celery makes them.

Why: Celery's strategy hands a task with an ``eta`` to the consumer's timer, which goes by the
worker's clock. A strategy of our own would take the place of the app's (``Task.Strategy``).

Read in Celery 5.3.6 and 5.7.0, and the timer in Kombu 5.3.7 and 5.7.0.

Without: a task with an ``eta`` is delivered when it is due, and then waits for the worker's timer:
some milliseconds, and longer if the worker's clock is behind Redis's. Nothing is prepared ahead of
its time. Celery before 5.7 forgets the time limits of running tasks when its connection breaks.

A request reads its times quickly (`quick-times`).

Touches: the argument ``maybe_iso8601`` of `celery.worker.request.Request`, its property
``tzlocal``, and `Consumer.update_strategies`, which is replaced on the consumer: while Celery
makes its strategies, and no longer, tasks have another ``Task.Request``.

Why: Celery's parser of an ``eta`` is written in Python, and each request asks the app's settings
for its time zone: a third of what the worker does for a task that is due. ``Task.Request`` is
public; how a request reads its times is not.

Read in Celery 5.3.6 and 5.7.0.

Without: a worker takes some 50 microseconds longer for a task that is due.

A message keeps why it comes back or dies (`failure-reasons`).

Touches: `Consumer.on_unknown_message`, ``on_unknown_task``, ``on_invalid_task``,
``on_decode_error`` and ``update_strategies``, which are replaced on the consumer.
(``Task.Request``, which is set, is public.)

Why: Celery rejects a message without a reason, and acknowledges one that it cannot decode, which
then is gone. The signals for these (``task_unknown``, ``task_rejected``) come after that.

Read in Celery 5.3.6 and 5.7.0.

Without: DeadQueue shows no reasons and no errors. A message that cannot be decoded is acknowledged
and gone, as with every other broker.

What a pool of threads, greenlets or one thread is given, and when that ends.

Touches: ``BasePool.on_apply``, which is replaced on the pool; and that the callback which Celery
hands to it is a method of the request.

Why: the pool alone knows whether a thread will begin what it has queued. Celery forgets that when
the connection breaks. ``Task.Request`` could be told, but Celery derives from it for each task,
and replaces what hands a request to the pool and what hears of its success. Celery's signals come
where the task runs, and not for one that a pool has queued.

Read in Celery 5.3.6 and 5.7.0.

Without ``pool-hooks``: a message would be given back while a thread executes it. A worker with such
a pool does not start. Without ``solo-hooks``: a solo worker does not know how long its tasks take,
so it fetches none ahead, and ends if a result cannot be stored, as with every other broker.

What a pool of processes was sent: it is executed, whatever becomes of the connection.

Touches: of Celery's prefork `TaskPool` ``_pool``, and ``flush`` and ``register_with_event_loop``,
which are replaced on the pool; Kombu's ``Hub.reset``, which is replaced on the worker's loop; of
billiard's pool behind it ``_cache``, ``_pool``, ``outbound_buffer``, ``mark_as_worker_lost``,
``_processes``, ``_all_inqueues``, ``_fileno_to_outq``, ``on_poll_start``, ``_tref_for_id``, and
which readers are of its ``_recv_message``; of its jobs
``_callback``, ``_write_to``, ``_scheduled_for``, ``_accepted``, ``_job`` and ``discard``; of its
processes ``_is_alive`` and ``inq._reader``; of Celery's request ``_apply_result``.

Why: when the connection is lost or the worker stops, Celery forgets every task that no process has
said it starts. One that was written to a process is started nevertheless. Were its message given
back, it would be executed twice. Only the pool's own books tell which those are; no method shows
them. And of a result that it was reading, Celery forgets what it has read, and takes the rest for
the next one: the process counts as busy from then on, and its messages stay with the worker.

Read in Celery 5.3.6 and 5.7.0 and billiard 4.2.1 and 4.3.2.

Without ``processes``: tasks would be executed twice. A worker with such a pool does not start.
Without ``missing-processes``: a task may be fetched for a process that has died, before another has
taken its place. Without ``send-now``: a task goes to its process a turn of the event loop later.
Without ``time-limits``: Celery before 5.7 forgets the time limits of running tasks when its
connection breaks.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from traceback import walk_stack
from typing import Any
from weakref import ref

from kombu_toc import CompatPart, Message

# -- bootstep

BOOTSTEP = CompatPart(
    "bootstep",
    lost="a worker would give back tasks that it executes",
    check=lambda blueprint: [
        *CompatPart.missing(blueprint, "default_steps"),
        *CompatPart.missing(getattr(blueprint, "default_steps", []), "append", "__contains__"),
    ],
    way_out="Install Celery 5.3.6 to 5.7",
)


def add_bootstep(step: type) -> None:
    """Give it to every worker's consumer that is made from now on. Raises CompatError."""
    from celery.worker.consumer import Consumer

    blueprint: Any = Consumer.Blueprint
    BOOTSTEP.usable(blueprint)
    if step not in blueprint.default_steps:
        blueprint.default_steps.append(step)


# -- worker-state

_NAMES = (
    *("requests", "reserved_requests", "active_requests", "should_stop"),
    *("should_terminate", "maybe_shutdown"),
)

WORKER_STATE = CompatPart(
    "worker-state",
    lost="messages would be given back while their tasks are executed",
    check=lambda state: CompatPart.missing(state, *_NAMES),
    way_out="Install Celery 5.3.6 to 5.7",
)


def check_worker_state() -> None:
    """Raises CompatError."""
    from celery.worker import state

    WORKER_STATE.usable(state)


# -- weak-sets

WEAK_SETS = CompatPart(
    "weak-sets",
    lost="a worker takes longer for each turn of its event loop",
    check=lambda some: [] if isinstance(getattr(some, "data", None), set) else ["WeakSet.data"],
)


def references(first: Any, second: Any) -> Callable[[], set[Any]]:
    """Return a function that gives references to everything that two WeakSets hold."""
    if WEAK_SETS.usable(first) and WEAK_SETS.usable(second):
        return lambda: first.data | second.data

    def through() -> set[Any]:
        return set(map(ref, [*_listed(first), *_listed(second)]))

    return through


def _listed(some: Iterable[Any]) -> list[Any]:
    while True:
        try:
            return list(some)
        except RuntimeError:  # another thread has added one, or taken one out
            continue


# -- connect-pause

CONNECT_PAUSE = CompatPart(
    "connect-pause",
    lost="a worker whose connections break at once connects five times a second",
    check=lambda consumer: CompatPart.missing(consumer, "connect"),
)

#: Seconds: what lasted shorter was no connection that a worker could use; how long it pauses after
#: the first of those, and how long at most, after several in a row.
SHORT = 3.0
FIRST_PAUSE = 0.1
LAST_PAUSE = 5.0


def install_connect_pause(consumer: Any, maybe_shutdown: Callable[[], None]) -> None:
    """Have a worker's consumer pause; `maybe_shutdown` raises what ends a worker that is told
    to end meanwhile."""
    if not CONNECT_PAUSE.usable(consumer):
        return
    connect = consumer.connect
    connected, pause = -math.inf, 0.0

    def connect_after_a_pause() -> Any:
        nonlocal connected, pause
        now = time.monotonic()
        short = now - connected < SHORT
        pause = min(max(2 * pause, FIRST_PAUSE), LAST_PAUSE) if short else 0.0
        while (left := now + pause - time.monotonic()) > 0:
            maybe_shutdown()
            time.sleep(min(left, 0.1))
        made = connect()
        connected = time.monotonic()
        return made

    consumer.connect = connect_after_a_pause


# -- soft-shutdown

SOFT_SHUTDOWN = CompatPart(
    "soft-shutdown",
    lost="a cold shutdown may hang, and what a worker has fetched comes back when its leases end",
    check=lambda worker: [],  # Celery before 5.5 has none, and needs none
)


def install_soft_shutdown(worker: Any, before: Callable[[], None]) -> None:
    """Have a worker call `before` when its soft shutdown begins, and stop its pool of processes
    between the pool's reads and writes, not within one of them."""
    from celery.worker import state

    wait, pool = getattr(worker, "wait_for_soft_shutdown", None), worker.pool
    if wait is None or not SOFT_SHUTDOWN.usable(worker):
        return
    stop, maybe_shutdown = pool.stop, state.maybe_shutdown

    def wait_for_soft_shutdown() -> None:
        before()
        wait()

    def stop_between() -> None:
        if any(_is_half_done(frame) for frame, _ in walk_stack(sys._getframe())):
            # What has been interrupted goes on; nothing else begins.
            state.maybe_shutdown = stop_first
            pool.on_apply = lambda *_, **__: None
            pool._pool.outbound_buffer.clear()
            return
        if getattr(pool._pool, "_active_writers", None):
            pool.flush()
        stop()

    def stop_first() -> None:
        state.maybe_shutdown = maybe_shutdown
        stop_between()
        maybe_shutdown()

    worker.wait_for_soft_shutdown = wait_for_soft_shutdown
    if in_event_loop(pool):
        pool.stop = stop_between


def _is_half_done(frame: Any) -> bool:
    """Whether a pool is just reading a result there, or writing a task of which all is known."""
    name = frame.f_code.co_name
    reads = name in ("_recv_message", "_flush_outqueue")
    return reads or (name == "_write_job" and "Hw" in frame.f_locals)


# -- requests of a worker: from a message that is delivered to the end of its task


# -- acks-at-once

ACKS_AT_ONCE = CompatPart(
    "acks-at-once",
    lost="acknowledgements leave a turn of the event loop later",
    check=lambda consumer: CompatPart.missing(consumer, "call_soon"),
)


def install_acks_at_once(consumer: Any) -> None:
    """Have a worker's consumer run what is a message's own at once."""
    if not ACKS_AT_ONCE.usable(consumer):
        return
    for name in ("call_soon", "call_soon_ack"):
        if hasattr(consumer, name):
            setattr(consumer, name, _at_once(getattr(consumer, name)))


def _at_once(call_soon: Callable[..., Any]) -> Callable[..., Any]:
    def settle(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(getattr(function, "__self__", None), Message):
            return call_soon(function, *args, **kwargs)
        return function(*args, **kwargs)

    return settle


# -- due-times

DUE_TIMES = CompatPart(
    "due-times",
    lost="a task that is due waits for the worker's timer as well",
    check=lambda consumer: [
        *CompatPart.missing(
            *(consumer, "timer", "on_task_request", "update_strategies", "strategies")
        ),
        *CompatPart.missing(
            *(getattr(consumer, "timer", None), "call_at", "queue", "Entry", "enter_at", "clear")
        ),
    ],
)


def install_due_times(
    consumer: Any,
    timer_of: Callable[[Any], Any],
    handle_of: Callable[[Callable[[Any], Any]], Callable[[Any], Any]],
    after_strategy: Callable[[Any], None],
) -> bool:
    """Return whether tasks may be handed to this consumer ahead of their time.

    Call it before Celery makes its strategies, which keep the timer's method.

    timer_of: makes of the consumer's timer the one that it is to have
    handle_of: makes of what the consumer does with a request what it is to do
    after_strategy: gets each message that a strategy has handled
    """
    from celery.worker import state

    if not DUE_TIMES.usable(consumer):
        return False
    consumer.timer = timer_of(consumer.timer)
    consumer.on_task_request = handle_of(consumer.on_task_request)
    if hasattr(state, "scheduled_requests"):
        _wrap_strategies(consumer, after_strategy)
    return True


def _wrap_strategies(consumer: Any, after_strategy: Callable[[Any], None]) -> None:
    update = consumer.update_strategies

    def wrapped(strategy: Callable[..., Any]) -> Callable[..., Any]:
        def handle(message: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return strategy(message, *args, **kwargs)
            finally:
                if message.headers.get("eta") is not None:
                    after_strategy(message)

        return handle

    def update_strategies() -> None:
        update()
        for name, strategy in consumer.strategies.items():
            consumer.strategies[name] = wrapped(strategy)

    consumer.update_strategies = update_strategies


# -- quick-times

QUICK_TIMES = CompatPart(
    "quick-times",
    lost="a worker takes longer for each task with an eta",
    check=lambda request: [
        *CompatPart.missing(request, "tzlocal"),
        *(
            []
            if "maybe_iso8601" in inspect.signature(request.__init__).parameters
            else ["Request(maybe_iso8601=...)"]
        ),
    ],
)


def install_quick_times(consumer: Any) -> None:
    """Have the requests of a worker's consumer read times quickly."""
    from celery.worker.request import Request
    from kombu.utils.imports import symbol_by_name

    if not QUICK_TIMES.usable(Request):
        return

    class QuickRequest(Request):  # type: ignore[misc]  # Celery has no types
        tzlocal = consumer.app.conf.timezone

        def __init__(self, message: Any, **options: Any) -> None:
            super().__init__(message, maybe_iso8601=read_time, **options)

    update = consumer.update_strategies

    def update_strategies() -> None:
        # A request class of somebody's own stays what it is.
        tasks = [
            task
            for task in consumer.app.tasks.values()
            if "Request" not in vars(task) and symbol_by_name(task.Request) is Request
        ]
        for task in tasks:
            task.Request = QuickRequest
        try:
            update()
        finally:
            for task in tasks:
                del task.Request

    consumer.update_strategies = update_strategies


def read_time(time: Any) -> datetime | None:
    """As Celery's maybe_iso8601."""
    try:
        return datetime.fromisoformat(time)
    except (TypeError, ValueError):
        if time == "":  # to Celery it is no time at all, and it ends the worker
            raise
        from celery.utils.time import maybe_iso8601

        read: datetime | None = maybe_iso8601(time)
        return read


# -- failure-reasons

_METHODS = ("on_unknown_message", "on_unknown_task", "on_invalid_task", "on_decode_error")

FAILURE_REASONS = CompatPart(
    "failure-reasons",
    lost="DeadQueue shows no reasons, and what cannot be decoded is gone, as Celery has it",
    check=lambda consumer: CompatPart.missing(consumer, *_METHODS, "update_strategies"),
)


def install_failure_reasons(
    consumer: Any,
    before: Mapping[str, Callable[..., None]],
    undecodable: Callable[[Any, BaseException], bool],
    request_class: Callable[[Any], type],
) -> None:
    """Replace the methods on a worker's consumer.

    before: by a method's name, what is called before it, with its arguments
    undecodable: returns whether it has seen to a message that cannot be decoded
    request_class: the request class that a task is to have, in place of its ``Request``
    """
    if not FAILURE_REASONS.usable(consumer):
        return
    for name, function in before.items():
        setattr(consumer, name, _after(function, getattr(consumer, name)))
    on_decode_error = consumer.on_decode_error
    update = consumer.update_strategies

    def decode_error(message: Any, exc: BaseException) -> None:
        if not undecodable(message, exc):
            on_decode_error(message, exc)

    def update_strategies() -> None:
        # Again after a pool_restart, which may have imported tasks.
        for task in consumer.app.tasks.values():
            task.Request = request_class(task)
        update()

    consumer.on_decode_error = decode_error
    consumer.update_strategies = update_strategies


def _after(function: Callable[..., None], method: Callable[..., Any]) -> Callable[..., Any]:
    def replaced(*args: Any, **kwargs: Any) -> Any:
        function(*args, **kwargs)
        return method(*args, **kwargs)

    return replaced


# -- pools of a worker: the tasks that they were given, and when these end


# -- pool-hooks


def _check_hooks(pool: Any) -> list[str]:
    from celery.worker.request import Request

    return [
        *CompatPart.missing(pool, "on_apply"),
        *CompatPart.missing(Request, "on_accepted", "on_success", "on_failure"),
    ]


HOOKS = CompatPart(
    "pool-hooks",
    lost="messages would be given back while threads execute them",
    check=_check_hooks,
    way_out="Install Celery 5.3.6 to 5.7, or start the worker with --pool prefork",
)

SOLO_HOOKS = CompatPart(
    "solo-hooks",
    lost="a solo worker fetches nothing ahead, and ends if a result cannot be stored",
    check=_check_hooks,
)


def replace_on_apply(pool: Any, change: Callable[[Any, Any, Any, Any], Any]) -> None:
    """Replace what a pool does with a task, once: not again after a reconnect.

    change: is called before the pool is given the task of one of our messages: with Celery's
        request, and the target and the two callbacks, of which it returns what takes their place;
        None: the task does not begin
    """
    on_apply = pool.on_apply
    if getattr(on_apply, "is_ours", False):
        return

    def replaced(
        target: Any,
        args: Any = None,
        kwargs: Any = None,
        callback: Any = None,
        accept_callback: Any = None,
        **options: Any,
    ) -> Any:
        given = target, callback, accept_callback
        request = getattr(callback, "__self__", None)
        if isinstance(getattr(request, "message", None), Message):
            given = change(request, *given)
            if given is None:
                return None
        target, callback, accept_callback = given
        return on_apply(target, args or (), kwargs, callback, accept_callback, **options)

    replaced.is_ours = True  # type: ignore[attr-defined]
    pool.on_apply = replaced


# -- processes


def _check_processes(pool: Any) -> list[str]:
    from billiard.pool import ApplyResult
    from celery.worker.request import Request

    behind = getattr(pool, "_pool", None)
    job = ApplyResult({}, None)
    processes = list(getattr(behind, "_pool", ()))[:1]
    return [
        *CompatPart.missing(pool, "_pool", "flush"),
        *CompatPart.missing(behind, "_cache", "_pool", "outbound_buffer", "mark_as_worker_lost"),
        *CompatPart.missing(job, "_callback", "_write_to", "_scheduled_for", "_accepted", "_job"),
        *CompatPart.missing(job, "discard", "ready"),
        *CompatPart.missing(Request, "_apply_result"),
        *(name for one in processes for name in CompatPart.missing(one, "_is_alive", "inq")),
        *(name for one in processes for name in CompatPart.missing(one.inq, "_reader")),
    ]


PROCESSES = CompatPart(
    "processes",
    lost="tasks that a process was sent would be given back and executed twice",
    check=_check_processes,
    way_out="Install Celery 5.3.6 to 5.7 with billiard 4.2 or 4.3, or start the worker with "
    "--pool threads",
)

MISSING = CompatPart(
    "missing-processes",
    lost="tasks may be fetched for a process that has died and is not replaced yet",
    check=lambda behind: CompatPart.missing(behind, "_processes", "_all_inqueues"),
)

SEND_NOW = CompatPart(
    "send-now",
    lost="a task goes to its process a turn of the event loop later",
    check=lambda behind: CompatPart.missing(behind, "on_poll_start"),
)

TIME_LIMITS = CompatPart(
    "time-limits",
    lost="Celery before 5.7 forgets the time limits of running tasks with its connection",
    check=lambda behind: CompatPart.missing(behind, "_tref_for_id"),
)


def in_event_loop(pool: Any) -> bool:
    """Whether this is a pool of processes that works within Celery's event loop."""
    try:
        from celery.concurrency.prefork import TaskPool
    except ImportError:  # not on this platform
        return False
    return isinstance(pool, TaskPool) and not pool.options.get("threads", True)


class SentTasks:
    """The tasks that a pool has sent to its processes, which have not said that they start them.

    Raises CompatError if the pool's books cannot be read.
    """

    def __init__(self, pool: Any) -> None:
        PROCESSES.usable(pool)
        self._pool = pool
        #: requests whose messages were kept because a process was sent them
        self._promised: list[Any] = []
        if pool.flush is not None:
            pool.flush = _flush_what_was_not_sent(pool, self._promised)
        if in_event_loop(pool):
            pool.register_with_event_loop = _read_on(pool)

    def keeps(self, message: Any) -> bool:
        """Whether a process that lives was written this message's task and has not said yet that it
        starts it; then the message is kept. One whose process died waits for another."""
        for job, request in self._jobs(message):
            if _was_sent(self._pool._pool, job):
                self._promised.append(request)
                return True
        return False

    def executed(self, message: Any) -> Any:
        """The request of a message whose task a process executes, or None."""
        jobs = self._jobs(message)
        return next((request for job, request in jobs if job._accepted and not job.ready()), None)

    def _jobs(self, message: Any) -> Iterator[tuple[Any, Any]]:
        # The pool's own jobs are asked: Celery may have forgotten the request already.
        for job in tuple(self._pool._pool._cache.values()):
            request = getattr(getattr(job, "_callback", None), "__self__", None)
            if getattr(request, "message", None) is message:
                yield job, request

    def executes(self, request: Any) -> bool:
        """Whether a process still executes a request's task.

        request: None if nobody knows it any more
        """
        job = None if request is None else _job(request)
        return job is not None and not job.ready()


def missing_of(pool: Any) -> Callable[[], int]:
    """Return a function that counts the processes of a pool that are not up: one that died leaves
    no room until another one has taken its place."""
    if not in_event_loop(pool) or not MISSING.usable(getattr(pool, "_pool", None)):
        return lambda: 0

    def missing() -> int:
        missing: int = pool._pool._processes - len(pool._pool._all_inqueues)
        return missing if missing > 0 else 0

    return missing


def send_now_of(pool: Any) -> Callable[[], bool]:
    """Return a function that has a pool of processes send its tasks in this turn of the event
    loop, and tells whether nothing is left to send. Other pools begin by themselves."""
    if not in_event_loop(pool):
        return lambda: True
    sends: bool | None = None

    def send_now() -> bool:
        nonlocal sends
        if sends is None:
            # The pool has its method once it is part of the loop, later than all else starts.
            sends = SEND_NOW.usable(pool._pool)
        if sends:
            pool._pool.on_poll_start()
        return sends

    return send_now


def time_limits(pool: Any) -> list[Any]:
    """The timer's entries that end the tasks of a pool of processes, in an event loop."""
    if not in_event_loop(pool) or not TIME_LIMITS.usable(getattr(pool, "_pool", None)):
        return []
    return list(pool._pool._tref_for_id.values())


def _read_on(tasks: Any) -> Callable[[Any], None]:
    """Return the `register_with_event_loop` of a pool, which reads on what was half read when the
    loop was reset, because a connection broke, and so does a pool that stops meanwhile."""
    register: Callable[[Any], Any] = tasks.register_with_event_loop

    def process_of(fd: int) -> Any:
        return getattr(tasks._pool, "_fileno_to_outq", {}).get(fd)

    def kept(loop: Any, change: Callable[..., Any]) -> Callable[..., None]:
        """What changes the loop, and keeps Celery's readings of results that it has begun."""

        def changed(*args: Any) -> None:
            half = [
                (fd, read, process_of(fd))
                for fd, (read, _) in loop.readers.items()
                if getattr(read, "__name__", "") == "_recv_message"
            ]
            change(*args)
            for fd, read, process in half:
                if process is not None and process_of(fd) is process:
                    loop.add_reader(fd, read)

        return changed

    def register_and_read_on(loop: Any) -> None:
        if "reset" not in vars(loop):
            loop.reset = kept(loop, loop.reset)
        kept(loop, register)(loop)

    return register_and_read_on


def _flush_what_was_not_sent(tasks: Any, promised: list[Any]) -> Callable[[], Any]:
    """Return the `flush` of a pool, when the connection is lost or the worker stops.

    tasks: Celery's pool; promised: requests whose messages were kept because a process was sent
        them
    """
    flush: Callable[[], Any] = tasks.flush

    def flush_the_rest() -> Any:
        pool = tasks._pool
        jobs = tuple(pool._cache.values())
        sent = [job for job in jobs if _was_sent(pool, job)]
        executing = [job for job in jobs if getattr(job, "_accepted", False)]
        for job in sent:
            job.discard = lambda: None
        # Asked now: later, a job's process may be one that only has the file descriptor of its own.
        sent_to = [(job, job._write_to) for job in sent]
        for process in tuple(pool._pool):
            if not process._is_alive():
                # Its pipe goes to the process that comes next: not with tasks in it.
                _empty(process.inq._reader)
        while promised:
            request = promised.pop()
            job = _job(request)
            accepted = job is not None and job._accepted
            if not (accepted or _was_sent(pool, job) or request.message.acknowledged):
                request.message.requeue_lost()  # its process has been killed since
        try:
            return flush()
        finally:
            for job in sent:
                del job.discard
            for job in {*sent, *executing}:
                if not job.ready() and job._job not in pool._cache:
                    _remember(pool, job)
            for job, process in sent_to:
                # The pool has found meanwhile that it was killed, put the job back, and forgotten
                # what was put back.
                if process not in pool._pool and not (job._accepted or job.ready()):
                    job.discard()
                    _give_back(job)

    return flush_the_rest


def _remember(pool: Any, job: Any) -> None:
    """Older Celery forgets every job: nobody would acknowledge the tasks."""
    process = job._write_to or job._scheduled_for
    if process is not None and process._is_alive():
        pool._cache[job._job] = job
    elif job._accepted:
        pool.mark_as_worker_lost(job, getattr(process, "exitcode", None) or 0)
    else:
        _give_back(job)


def _give_back(job: Any) -> None:
    request = getattr(job._callback, "__self__", None)
    if request is not None and not request.message.acknowledged:
        request.message.requeue_lost()


def _empty(reader: Any) -> None:
    with suppress(OSError):
        while reader.poll(0):
            os.read(reader.fileno(), 1 << 16)


def _job(request: Any) -> Any:
    """The pool's job of a request, or None."""
    reference = request._apply_result
    return reference() if reference is not None else None


def _was_sent(pool: Any, job: Any) -> bool:
    # A map's or an imap's job, which Celery has none of, is written to no process.
    process = getattr(job, "_write_to", None)
    return process is not None and process._is_alive() and job not in pool.outbound_buffer
