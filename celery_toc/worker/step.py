"""What a worker gains when its broker is a timeout center.

Active without any set-up: a worker whose broker is ours gets one more bootstep
(`celery_toc.plugin` sees to that). It

- tells the channel how many tasks could start at once, and how soon more could, so that no task
  is fetched by a busy worker while an idle one could start it;
- hands a task that arrives when it is due straight on, instead of to a timer: a message with an
  ``eta`` has waited in Redis, by Redis's clock, and ``request.eta`` stays as sent;
- keeps the messages of executing tasks when the connection breaks, and of those that a process
  has been sent and is about to start;
- gives back, as soon as the worker is told to end, what no process has begun, however long the
  tasks take that it waits for.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from datetime import datetime
from typing import Any
from weakref import ref

from billiard.einfo import ExceptionInfo
from celery import Task, bootsteps, signals
from celery.concurrency.solo import TaskPool as SoloPool
from celery.utils.log import get_logger
from celery.utils.time import maybe_iso8601
from celery.worker import state
from celery.worker.consumer.tasks import Tasks
from celery.worker.request import Request
from kombu.utils.imports import symbol_by_name

import kombu_toc

from .failures import explain
from .pace import Pace
from .policy import PoolPolicy
from .prefork import FlushesWhatWasNotSent, missing, sent_request, time_limits

logger = get_logger(__name__)

__all__ = ("TimeoutCenterStep",)

#: Seconds that a signal handler waits for messages to be given back.
HELP_TIMEOUT = 1.0

#: Seconds: what lasted shorter was no connection that a worker could use; how long it pauses after
#: the first of those, and how long at most, after several in a row.
SHORT = 3.0
FIRST_PAUSE = 0.1
LAST_PAUSE = 5.0


class _PastTimers:
    """The consumer's timer, but for tasks that have waited in the center: they start when it says
    that they are due, and most of them are.

    limits: gives the entries that end tasks at their time limits
    qos: gives the consumer's prefetch count
    """

    def __init__(
        self,
        timer: Any,
        limits: Callable[[], Iterable[Any]] = tuple,
        qos: Callable[[], Any] = lambda: None,
    ) -> None:
        self._timer = timer
        self._limits = limits
        self._qos = qos

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timer, name)

    def call_at(
        self,
        eta: Any,
        fun: Callable[..., Any],
        args: Any = (),
        kwargs: Any = None,
        priority: int = 0,
    ) -> Any:
        message = getattr(args[0], "message", None) if args else None
        if not isinstance(message, kombu_toc.Message) or not message.waited:
            return self._timer.call_at(eta, fun, args, kwargs, priority)
        entry = self._timer.Entry(fun, args, kwargs)
        if not message.is_early:
            entry()
            return entry
        # Celery fetches one more for each task that its timer has. These are fetched already,
        # and the prefetch count may be set anew before they begin.
        qos = self._qos()
        if qos is not None:
            qos.decrement_eventually()

        def begin() -> None:
            if entry.canceled:  # by Celery, because the connection is lost
                return
            if qos is not None:
                qos.increment_eventually()
            entry()

        message.call_when_due(begin, lambda: _forget(args[0]))
        return entry

    def clear(self) -> None:
        """Forget everything but the time limits of tasks that go on.

        Celery before 5.7 clears its timer when the connection is lost.
        """
        limits = list(self._limits())
        kept = [scheduled for scheduled in self._timer.queue if scheduled.entry in limits]
        self._timer.clear()
        for eta, priority, entry in kept:
            self._timer.enter_at(entry, eta, priority)


class TimeoutCenterStep(bootsteps.StartStopStep):
    """See the module."""

    label = "Timeout center"
    requires = (Tasks,)

    def __init__(self, c: Any, **kwargs: Any) -> None:
        super().__init__(c, **kwargs)
        transport = c.conninfo.get_transport_cls()
        self.enabled = isinstance(transport, type) and issubclass(transport, kombu_toc.Transport)
        self._poller: Any = None
        self._channel: Any = None
        self._paused = False
        self._said = False
        #: requests that a pool of threads or greenlets was given, and monotonic seconds when
        self._submitted: dict[Any, float] = {}
        #: those of them that it has begun, or begins whatever happens
        self._started: set[Any] = set()
        #: requests that a process was sent and whose messages were kept for that
        self._promised: list[Any] = []
        #: held while it is decided whether one is begun or its message given back
        self._deciding = threading.Lock()
        self._helper: threading.Thread | None = None
        self._solo = False
        self._pace = Pace()
        #: what was executing when that was last looked at
        self._seen: set[Any] = set()
        if self.enabled:
            # Strategies bind the timer's method when the Tasks step starts, before this one.
            c.timer = _PastTimers(c.timer, lambda: time_limits(c.pool), lambda: c.qos)
            _begin_when_due(c)
            explain(c)
            _settle_at_once(c)
            _forget_what_has_ended(c)
            _read_times_quickly(c)
            _pause_between_connections(c)

    def include_if(self, c: Any) -> bool:
        return self.enabled

    def start(self, c: Any) -> None:
        c.timeout_center_step = self
        self._channel = channel = c.task_consumer.channel
        self._poller = channel.poller
        self._poller.steady = True
        self._scaler = getattr(c.controller, "autoscaler", None) or c.controller
        # What gossip hears of the others: with many of them, each would be woken all the time.
        self._poller.unhurried.add(c.app.conf.event_exchange)
        # A full pool of greenlets stops whoever gives it one more, for as long as it is full.
        self._no_prefetch = c.pool.is_green or bool(c.app.conf.get("worker_disable_prefetch"))
        channel.policy = PoolPolicy(
            *(self, c),
            prefetches=not (self._no_prefetch or self._paused),
            in_threads=_ends_tasks_in_threads(c.pool),
        )
        flush = getattr(c.pool, "flush", None)
        if flush is not None and not isinstance(flush, FlushesWhatWasNotSent):
            c.pool.flush = FlushesWhatWasNotSent(c.pool, self._promised)
        self._say_what_is_served(c, channel)
        self._listen_for_the_end(c)
        if self._solo:
            _survive(c.pool)
            self._time_tasks(c.pool)
        elif not c.hub or _ends_tasks_in_threads(c.pool):
            self._tell_when_tasks_end(c.pool)

    def _say_what_is_served(self, c: Any, channel: kombu_toc.Channel) -> None:
        """Once, not at every reconnect."""
        if self._said:
            return
        self._said = True
        topics = [channel.center.known(queue.name) for queue in c.task_consumer.queues]
        logger.info(
            "Timeout center at %s: %s",
            c.conninfo.as_uri(),
            ", ".join(_described(topic, channel.settings.limits) for topic in topics if topic),
        )
        ignored = [f"the broker's options {', '.join(channel.settings.ignored)}"]
        ignored = ignored if channel.settings.ignored else []
        for queue, what in channel.ignored.items():
            if what:
                ignored.append(f"for queue {queue!r}: {', '.join(what)}")
        if ignored:
            logger.warning("Without effect: %s", "; ".join(ignored))
        if channel.transport.address.kind == "embedded":
            return
        for warning in kombu_toc.durability_warnings(channel.center.client):
            logger.warning("The broker %s may lose tasks: %s.", c.conninfo.as_uri(), warning)

    @property
    def center(self) -> kombu_toc.TimeoutCenter:
        """That of the consumer's connection."""
        return self._channel.center

    def report(self) -> dict[str, Any]:
        """What ``celery inspect toc`` shows."""
        return {"paused": self._paused, **self._channel.report()}

    def pause(self) -> bool:
        """Take no more tasks, also after a reconnect; whether that is new."""
        return self._pause(True)

    def resume(self) -> bool:
        """Take tasks again; whether that is new."""
        return self._pause(False)

    def _pause(self, paused: bool) -> bool:
        if self._paused == paused:
            return False
        self._paused = paused
        self._channel.policy.prefetches = not (self._no_prefetch or paused)
        self._channel.poller.nudge()
        logger.info("No more tasks are taken: paused" if paused else "Tasks are taken again")
        return True

    def stop(self, c: Any) -> None:
        if self._poller is not None and _is_stopping(c):
            # The loop turns no more, but the pool may work on for as long as its tasks take.
            if self._helper is not None:
                self._helper.join()
            self._poller.close()
            self._give_back(c, c.task_consumer.channel)
            center = self._channel.center
            center.metrics.send(center)
        self._poller = None

    def _give_back(self, c: Any, channel: kombu_toc.Channel) -> None:
        """Everything that the pool has not begun."""

        def begun(message: kombu_toc.Message) -> bool:
            request = _request_of(message, state.active_requests, self._started)
            return request is not None or self._was_sent(c, message)

        policy = channel.policy
        kept, policy.kept = policy.kept, begun
        with self._deciding:
            channel.qos.restore_unacked()
        policy.kept = kept

    def _was_sent(self, c: Any, message: kombu_toc.Message) -> bool:
        """Whether a process has this message's task and has not said yet that it starts it."""
        request = sent_request(c.pool, message)
        if request is None:
            return False
        self._promised.append(request)
        return True

    def _listen_for_the_end(self, c: Any) -> None:
        """For when the loop does not turn although the worker is to end."""
        self._solo = isinstance(c.pool, SoloPool)
        signals.worker_shutting_down.connect(self._ending)
        wait = getattr(c.controller, "wait_for_soft_shutdown", None)
        if wait is None or c.pool.is_green or hasattr(wait, "gives_back"):
            return

        def wait_for_soft_shutdown() -> None:
            # A cold shutdown, within a signal handler: Celery sleeps for as long as tasks may
            # still end, and waits for the pool.
            poller = self._poller
            if poller is not None:
                channel = c.task_consumer.channel

                def give_back() -> None:
                    poller.give_up()
                    self._give_back(c, channel)

                self._help(give_back)
                self._helper.join(HELP_TIMEOUT)
            wait()

        wait_for_soft_shutdown.gives_back = True
        c.controller.wait_for_soft_shutdown = wait_for_soft_shutdown

    def _ending(self, **_: Any) -> None:
        # A solo worker executes its tasks within its loop.
        if self._solo and self._poller is not None:
            self._help(self._poller.give_up)

    def _help(self, function: Callable[[], None]) -> None:
        """Run it in a thread: what this signal handler has interrupted may hold a lock."""
        self._helper = threading.Thread(target=function, name="toc-end", daemon=True)
        self._helper.start()

    @staticmethod
    def _is_timed(c: Any, message: kombu_toc.Message) -> bool:
        """Whether Celery gets this message's task ready and does nothing more with it, for it
        belongs to the timer: its own strategy does."""
        task = c.app.tasks.get(message.headers.get("task"))
        return (
            message.waited
            and getattr(task, "Strategy", None) == Task.Strategy
            and type(task).start_strategy is Task.start_strategy
        )

    def _free(self, c: Any) -> int:
        """How many tasks could start at once."""
        busy = self._busy()
        if busy != self._seen:
            self._seen = busy
            self._pace.see(busy, time.monotonic())
        return 0 if self._paused else self._limit(c) - len(busy)

    def _soon_free(self, c: Any, seconds: float) -> int:
        """How many more could within so many seconds."""
        return self._pace.soon_free(seconds, self._limit(c), time.monotonic())

    def _limit(self, c: Any) -> int:
        # An autoscaler's pool grows for what comes, up to its present maximum.
        most = getattr(self._scaler, "max_concurrency", None) or c.pool.num_processes or 1
        return most - missing(c.pool)

    def _executing(self, c: Any, message: kombu_toc.Message) -> bool:
        """Whether the connection alone is lost, and the pool has this message's task."""
        if _is_stopping(c):
            return False
        cancels = c.app.conf.get("worker_cancel_long_running_tasks_on_connection_loss")
        request = _request_of(message, state.active_requests, self._submitted)
        if request is None:
            return self._was_sent(c, message)
        # What Celery is about to cancel is left to be delivered again.
        return not (cancels and request.task.acks_late and not request.acknowledged)

    def _busy(self) -> set[Any]:
        """References to the requests of the tasks that the pool has or is about to get."""
        # By the weak references that the two sets hold: to go through the requests costs more
        # than all else that a turn of the loop asks for.
        busy = state.reserved_requests.data | state.active_requests.data
        if not self._submitted:
            return busy
        return busy.union(map(ref, tuple(self._submitted)))

    def _take_queued(self, seconds: float) -> list[kombu_toc.Message]:
        """Take back what the pool was given so long ago and no thread has begun."""
        if len(self._submitted) <= len(self._started):
            return []
        until = time.monotonic() - seconds
        taken = []
        with self._deciding:
            for request, since in tuple(self._submitted.items()):
                message = request.message
                if since > until or request in self._started or message.acknowledged:
                    continue
                message.given_back = True  # the thread that comes to it goes on to the next
                self._submitted.pop(request, None)
                _forget(request)
                taken.append(message)
        return taken

    def _time_tasks(self, pool: Any) -> None:
        """A solo pool executes a task while the loop stands still."""
        if getattr(pool, "_toc_step", None) is not None:
            pool._toc_step = self
            return
        pool._toc_step = self
        apply = pool.on_apply

        def on_apply(*args: Any, **options: Any) -> Any:
            began = time.monotonic()
            try:
                return apply(*args, **options)
            finally:
                pool._toc_step._pace.took(time.monotonic() - began)

        on_apply.survives = getattr(apply, "survives", False)
        pool.on_apply = on_apply

    def _tell_when_tasks_end(self, pool: Any) -> None:
        """In these pools nothing wakes the loop when a task ends."""
        if getattr(pool, "_toc_step", None) is not None:
            pool._toc_step = self
            return
        pool._toc_step = self
        apply = pool.on_apply

        def on_apply(
            target: Any,
            args: Any = None,
            kwargs: Any = None,
            callback: Any = None,
            accept_callback: Any = None,
            **options: Any,
        ) -> Any:
            # Celery's request, whose method the callback is: the pool has it from now on, and
            # starts it when it can, whatever becomes of the connection.
            request = getattr(callback, "__self__", None)
            step = pool._toc_step

            def left() -> None:
                step._submitted.pop(request, None)
                step._started.discard(request)
                poller = pool._toc_step._poller
                if poller is not None:
                    poller.nudge()

            def accepted(*when: Any) -> None:
                with step._deciding:
                    if request.message.given_back:
                        left()
                        raise CancelledError
                    step._started.add(request)
                accept_callback(*when)

            traced, tell = _failing(request, target, callback)

            def ended(result: Any) -> Any:
                try:
                    return tell(result)
                finally:
                    left()

            def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    return traced(*args, **kwargs)
                except BaseException:  # the pool does not call back then
                    left()
                    raise

            if not isinstance(getattr(request, "message", None), kombu_toc.Message):
                return apply(
                    target,
                    args,
                    kwargs,
                    callback=callback,
                    accept_callback=accept_callback,
                    **options,
                )
            if request.message.given_back:  # it was waiting for its rate limit
                return None
            step._submitted[request] = time.monotonic()
            if pool.is_green:
                step._started.add(request)
            return apply(run, args, kwargs, callback=ended, accept_callback=accepted, **options)

        pool.on_apply = on_apply


def _described(topic: kombu_toc.Topic, otherwise: kombu_toc.Limits) -> str:
    """A topic and what holds for it."""
    slots, retries = topic.slots, topic.declaration.retries
    return (
        f"{topic.name} ({slots} {'slot' if slots == 1 else 'slots'}, "
        f"visibility timeout {topic.declaration.limits(otherwise).visibility:g} s, "
        f"{retries} {'retry' if retries == 1 else 'retries'})"
    )


def _is_stopping(c: Any) -> bool:
    # Celery asks the same of its flags: an exit code, which may be 0, or None or False.
    told = any(
        f is not None and f is not False for f in (state.should_stop, state.should_terminate)
    )
    return told or c.controller.blueprint.state != bootsteps.RUN


def _request_of(message: kombu_toc.Message, *requests: Iterable[Any]) -> Any:
    """The request of these that is this message's, or None."""
    while True:
        try:
            return next((r for some in requests for r in some if r.message is message), None)
        except RuntimeError:  # another thread has added one, or taken one out
            continue


def _begin_when_due(c: Any) -> None:
    """What is handed over ahead of its time goes to the timer, and its time is ours. But not
    always: with an ``eta`` from before this machine's start Celery uses none."""
    handle = c.on_task_request

    def on_task_request(request: Any) -> Any:
        message = getattr(request, "message", None)
        if not isinstance(message, kombu_toc.Message) or not message.is_early:
            return handle(request)
        return message.call_when_due(lambda: handle(request), lambda: _forget(request))

    c.on_task_request = on_task_request


def _forget(request: Any) -> None:
    """Its message was given back before it was to start."""
    if state.requests.get(request.id) is request:
        del state.requests[request.id]
    for requests in (state.reserved_requests, getattr(state, "scheduled_requests", None)):
        if requests is not None:
            requests.discard(request)


def _settle_at_once(c: Any) -> None:
    """Acknowledge when a request says so, not in the loop's next turn: there may be none."""

    def wrap(call_soon: Callable[..., Any]) -> Callable[..., Any]:
        def settle(function: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(getattr(function, "__self__", None), kombu_toc.Message):
                return call_soon(function, *args, **kwargs)
            return function(*args, **kwargs)

        return settle

    for name in ("call_soon", "call_soon_ack"):  # the second since Celery 5.7
        if hasattr(c, name):
            setattr(c, name, wrap(getattr(c, name)))


def _forget_what_has_ended(c: Any) -> None:
    """Celery 5.7 notes a task with an ``eta`` as scheduled once the timer has it. One that was
    started at once may have ended by then, and would never be forgotten."""
    if not hasattr(state, "scheduled_requests"):
        return
    update = c.update_strategies

    def forgetting(strategy: Callable[..., Any]) -> Callable[..., Any]:
        def handle(message: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return strategy(message, *args, **kwargs)
            finally:
                if isinstance(message, kombu_toc.Message) and message.waited:
                    forget(message)

        return handle

    def forget(message: kombu_toc.Message) -> None:
        request = state.requests.get(message.headers.get("id"))
        if (
            getattr(request, "message", None) is message
            and message.acknowledged
            and request not in state.active_requests
            and request not in state.reserved_requests
        ):
            state.requests.pop(request.id, None)
            state.scheduled_requests.discard(request)

    def update_strategies() -> None:
        update()
        for name, strategy in c.strategies.items():
            c.strategies[name] = forgetting(strategy)

    c.update_strategies = update_strategies


def _pause_between_connections(c: Any) -> None:
    """Celery connects again at once, five times a second: a server that lets a worker in and then
    refuses what it needs would be asked, and the log be filled, without an end."""
    connect = c.connect
    connected, pause = -math.inf, 0.0

    def connect_after_a_pause() -> Any:
        nonlocal connected, pause
        now = time.monotonic()
        short = now - connected < SHORT
        pause = min(max(2 * pause, FIRST_PAUSE), LAST_PAUSE) if short else 0.0
        while (left := now + pause - time.monotonic()) > 0:
            state.maybe_shutdown()
            time.sleep(min(left, 0.1))
        made = connect()
        connected = time.monotonic()
        return made

    c.connect = connect_after_a_pause


def _read_times_quickly(c: Any) -> None:
    """Celery's parser of an ``eta`` is written in Python, and each request asks the app's settings
    for its time zone: a third of what the worker does for a task that is due."""

    class QuickRequest(Request):
        tzlocal = c.app.conf.timezone

        def __init__(self, message: Any, **options: Any) -> None:
            super().__init__(message, maybe_iso8601=_read_time, **options)

    update = c.update_strategies

    def update_strategies() -> None:
        # A request class of somebody's own stays what it is.
        tasks = [
            task
            for task in c.app.tasks.values()
            if "Request" not in vars(task) and symbol_by_name(task.Request) is Request
        ]
        for task in tasks:
            task.Request = QuickRequest
        try:
            update()
        finally:
            for task in tasks:
                del task.Request

    c.update_strategies = update_strategies


def _read_time(time: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(time)
    except (TypeError, ValueError):
        if time == "":  # to Celery it is no time at all, and it ends the worker
            raise
        return maybe_iso8601(time)


def _failing(
    request: Any, target: Callable[..., Any], callback: Callable[[Any], Any]
) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """A pool's target and callback, so that a task fails whose result cannot be stored.

    A process of a pool tells of it. In threads, Celery would take such a task for one that runs for
    ever, and a worker of one thread would end.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return target(*args, **kwargs)
        except Exception:
            return ExceptionInfo()

    def ended(result: Any) -> Any:
        return request.on_failure(result) if isinstance(result, ExceptionInfo) else callback(result)

    return run, ended


def _survive(pool: Any) -> None:
    """Keep a worker of one thread from ending with a task."""
    apply = pool.on_apply
    if getattr(apply, "survives", False):
        return

    def on_apply(
        target: Any, args: Any = None, kwargs: Any = None, callback: Any = None, **options: Any
    ) -> Any:
        request = getattr(callback, "__self__", None)
        if isinstance(getattr(request, "message", None), kombu_toc.Message):
            target, callback = _failing(request, target, callback)
        return apply(target, args or (), kwargs, callback, **options)

    on_apply.survives = True
    pool.on_apply = on_apply


def _ends_tasks_in_threads(pool: Any) -> bool:
    try:
        from celery.concurrency.thread import TaskPool
    except ImportError:  # no concurrent.futures
        return False
    return isinstance(pool, TaskPool)
