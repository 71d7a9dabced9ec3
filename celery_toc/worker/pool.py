"""The pool of a worker: what it is given, what it has begun, when that ends, and how much fits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Set
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

from billiard.einfo import ExceptionInfo
from celery import Task, bootsteps
from celery.concurrency.solo import TaskPool as SoloPool
from celery.concurrency.thread import TaskPool as ThreadPool
from celery.worker import state

import kombu_toc

from ..compat import worker as compat

# -- pools of threads, of greenlets, and of one thread
#
# In these nothing wakes the event loop when a task ends, and a task whose result cannot be stored
# would never end for Celery, or would end a worker of one thread.


def is_solo(pool: Any) -> bool:
    """Whether tasks are executed within the event loop, which stands still meanwhile."""
    return isinstance(pool, SoloPool)


def in_threads(pool: Any) -> bool:
    """Whether the pool queues tasks for threads."""
    return isinstance(pool, ThreadPool)


def watch_solo(pool: Any, took: Callable[[float], None]) -> None:
    """Tell how many seconds each task of a worker of one thread takes; and keep the worker from
    ending with a task."""

    def change(request: Any, target: Any, callback: Any, accept: Any) -> tuple[Any, Any, Any]:
        began = time.monotonic()

        def end() -> None:
            took(time.monotonic() - began)

        return *_failing(request, target, callback, end), accept

    if compat.SOLO_HOOKS.usable(pool):
        compat.replace_on_apply(pool, change)


def watch(pool: Any, submitted: SubmittedRequests) -> None:
    """Keep account of what a pool of threads or greenlets is given. Raises CompatError."""

    def change(request: Any, target: Any, callback: Any, accept: Any) -> Any:
        # The pool has it from now on, and starts it when it can, whatever becomes of the
        # connection.
        def accepted(*when: Any) -> None:
            if not submitted.accept(request):
                raise CancelledError
            accept(*when)

        if request.message.given_back:  # it was waiting for its rate limit
            return None
        submitted.add(request, time.monotonic(), starts=pool.is_green)
        end = partial(submitted.end, request)
        return *_failing(request, target, callback, end), accepted

    compat.HOOKS.usable(pool)
    compat.replace_on_apply(pool, change)


def _failing(
    request: Any,
    target: Callable[..., Any],
    callback: Callable[[Any], Any],
    end: Callable[[], None],
) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """A pool's target and callback, so that a task fails whose result cannot be stored.

    end: is called when the task has ended

    A process of a pool tells of it. In threads, Celery would take such a task for one that runs for
    ever, and a worker of one thread would end.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return target(*args, **kwargs)
        except Exception:
            return ExceptionInfo()
        except BaseException:  # the pool does not call back then
            end()
            raise

    def ended(result: Any) -> Any:
        tell = request.on_failure if isinstance(result, ExceptionInfo) else callback
        try:
            return tell(result)
        finally:
            end()

    return run, ended


# -- estimates how soon a worker's processes become idle, from the run times of recent tasks

#: The weight of the latest task in the moving average.
WEIGHT = 0.2


class Pace:
    """The mean run time of a worker's tasks, and when its current tasks started.

    Times are monotonic seconds and are passed in.
    """

    def __init__(self) -> None:
        #: mean run time in seconds; None until a task has ended
        self.mean: float | None = None
        self._began: dict[Hashable, float] = {}

    def took(self, seconds: float) -> None:
        """Record the run time of a task that has ended."""
        if self.mean is None:
            self.mean = seconds
        else:
            self.mean += WEIGHT * (seconds - self.mean)

    def see(self, executing: Set[Hashable], now: float) -> None:
        """Record which tasks are executing now."""
        began = self._began
        for task in began.keys() - executing:
            self.took(now - began.pop(task))
        for task in executing - began.keys():
            began[task] = now

    def soon_free(self, seconds: float, processes: int, now: float) -> int:
        """Estimate how many more tasks the processes start within `seconds`.

        A task that has run for longer than the mean is expected to run for as long again, so that
        nothing is fetched to wait behind a long task. Returns 0 until a task has ended.
        """
        mean = self.mean
        if mean is None:
            return 0
        mean = max(mean, 1e-6)
        rate = max(processes - len(self._began), 0) / mean
        for since in self._began.values():
            age = now - since
            rate += 1 / (age if age > mean else mean)
        return int(seconds * rate)


# -- what a Celery worker tells the transport

#: Seconds for which a pool of threads has work queued of its own.
QUEUED_IN_POOL = 0.02


class PoolPolicy:
    """The policy of a worker's channel; see `kombu_toc.WorkerPolicy`.

    accepts_early: whether tasks may be handed over ahead of their time
    """

    def __init__(
        self, consumer: Any, submitted: SubmittedRequests, pace: Pace, *, accepts_early: bool
    ) -> None:
        pool = consumer.pool
        self._consumer = consumer
        self._submitted = submitted
        self._pace = pace
        self.accepts_early = accepts_early
        self.queues_in_pool = in_threads(pool)
        self.paused = False
        #: while everything is given back that the pool has not begun
        self.ending = False
        # A full pool of greenlets stops whoever gives it one more, for as long as it is full.
        self._prefetches = not (
            pool.is_green or consumer.app.conf.get("worker_disable_prefetch", False)
        )
        self._scaler = getattr(consumer.controller, "autoscaler", None) or consumer.controller
        self._missing = compat.missing_of(pool)
        #: what was executing when that was last looked at
        self._seen: set[Any] = set()
        self._sent = compat.SentTasks(pool) if compat.in_event_loop(pool) else None
        self.flush_pool = compat.send_now_of(pool)
        self.before_delivery = lambda: state.maybe_shutdown()  # it may be replaced

    @property
    def prefetches(self) -> bool:
        return self._prefetches and not self.paused

    def idle_slots(self) -> int | None:
        busy = self._submitted.busy()
        if busy != self._seen:
            self._seen = busy
            self._pace.see(busy, time.monotonic())
        return 0 if self.paused else self._limit() - len(busy)

    def idle_within(self, seconds: float) -> int:
        return self._pace.soon_free(seconds, self._limit(), time.monotonic())

    def start_limit(self) -> int | None:
        idle = self.idle_slots()
        if self.queues_in_pool and idle is not None:
            # A thread goes on with what its pool has queued while the loop waits for the
            # interpreter.
            idle += self.idle_within(QUEUED_IN_POOL)
        return idle

    def _limit(self) -> int:
        # An autoscaler's pool grows for what comes, up to its present maximum.
        most = getattr(self._scaler, "max_concurrency", None)
        pool = self._consumer.pool
        # Before Celery 5.7, a gevent pool's num_processes is how many tasks run just now.
        limit: int = most or (pool.limit if pool.is_green else pool.num_processes) or 1
        return limit - self._missing()

    def wants_early(self, message: kombu_toc.Message) -> bool:
        return is_timed(self._consumer.app, message)

    def keeps(self, message: kombu_toc.Message) -> bool:
        if self.ending:
            return self._submitted.begun(message) or self._was_sent(message)
        # Only the connection is lost, unless the worker is about to end.
        if is_stopping(self._consumer):
            return False
        request = self._submitted.executing(message)
        if request is None:
            return self._was_sent(message)
        # What Celery is about to cancel is left to be delivered again.
        cancels = self._consumer.app.conf.get("worker_cancel_long_running_tasks_on_connection_loss")
        return not (cancels and request.task.acks_late and not request.acknowledged)

    def _was_sent(self, message: kombu_toc.Message) -> bool:
        return self._sent is not None and self._sent.keeps(message)

    def execution(self, message: kombu_toc.Message) -> Hashable | None:
        # Celery has noted by now that the pool has begun its task, or that it has ended. What is
        # terminated has ended for Celery before its process has.
        request = self._submitted.active(message)
        if request is None and self._sent is not None:
            request = self._sent.executed(message)
        return None if request is None else ref(request)

    def ended(self, executions: Collection[Hashable]) -> Collection[Hashable]:
        ended = set(executions) - self._submitted.busy()
        if not ended or self._sent is None:
            return ended
        return [one for one in ended if not self._sent.executes(one())]  # type: ignore[operator]

    def take_queued(self, seconds: float) -> list[kombu_toc.Message]:
        return self._submitted.take_queued(time.monotonic() - seconds)


def is_stopping(consumer: Any) -> bool:
    """Whether a worker is about to end, and not only to connect again."""
    # Celery asks the same of its flags: an exit code, which may be 0, or None or False.
    told = any(
        f is not None and f is not False for f in (state.should_stop, state.should_terminate)
    )
    return told or consumer.controller.blueprint.state != bootsteps.RUN


def is_timed(app: Any, message: kombu_toc.Message) -> bool:
    """Whether Celery prepares this message's task and then leaves it to the timer.

    Its own strategy does; one of somebody else's might begin the task at once.
    """
    task = app.tasks.get(message.headers.get("task"))
    return (
        message.waited
        and getattr(task, "Strategy", None) == Task.Strategy
        and type(task).start_strategy is Task.start_strategy
    )


# -- Celery's requests: which of them the pool has, and which it has begun


class SubmittedRequests:
    """The requests that a pool of threads or greenlets was given and has not ended.

    Threads of the pool call it as well as the event loop.

    on_end: called when one has ended
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        #: requests, and monotonic seconds when the pool was given them
        self._since: dict[Any, float] = {}
        #: those of them that it has begun, or begins whatever happens
        self._started: set[Any] = set()
        #: held while it is decided whether one is begun or its message given back
        self.deciding = threading.Lock()
        self._references = compat.references(state.reserved_requests, state.active_requests)

    def add(self, request: Any, now: float, *, starts: bool) -> None:
        """The pool is about to be given it.

        now: monotonic seconds
        starts: it begins it whatever happens
        """
        self._since[request] = now
        if starts:
            self._started.add(request)

    def accept(self, request: Any) -> bool:
        """The pool comes to it: whether it may begin it. It may not if its message was given back
        meanwhile."""
        with self.deciding:
            if request.message.given_back:
                self.end(request)
                return False
            self._started.add(request)
            return True

    def end(self, request: Any) -> None:
        """Forget a request that has ended, or does not begin."""
        self._since.pop(request, None)
        self._started.discard(request)
        self._on_end()

    def executing(self, message: kombu_toc.Message) -> Any:
        """The request of a message whose task the pool has, or None."""
        return _request_of(message, state.active_requests, self._since)

    @staticmethod
    def active(message: kombu_toc.Message) -> Any:
        """The request of a message whose task has begun and not ended as Celery has it, or None."""
        return _request_of(message, state.active_requests)

    def begun(self, message: kombu_toc.Message) -> bool:
        """Whether a message's task is begun, or begins whatever happens."""
        return _request_of(message, state.active_requests, self._started) is not None

    def busy(self) -> set[Any]:
        """References to the requests of the tasks that the pool has or is about to get."""
        # By the weak references that the two sets hold: to go through the requests costs more
        # than all else that a turn of the loop asks for.
        busy = self._references()
        if not self._since:
            return busy
        return busy.union(map(ref, tuple(self._since)))

    def take_queued(self, until: float) -> list[kombu_toc.Message]:
        """Take back what no thread has begun, if some of it was given to the pool until then: of
        what is left, the later ones would start before those that are taken back.

        until: monotonic seconds
        """
        if len(self._since) <= len(self._started):
            return []
        taken: list[kombu_toc.Message] = []
        with self.deciding:
            for request, since in tuple(self._since.items()):
                message = request.message
                if request in self._started or message.acknowledged:
                    continue
                if since > until and not taken:  # they are in the order in which it was given them
                    break
                message.given_back = True  # the thread that comes to it goes on to the next
                self._since.pop(request, None)
                forget(request)
                taken.append(message)
        return taken


def forget(request: Any) -> None:
    """Have Celery forget a request whose message was given back before it was to start."""
    if state.requests.get(request.id) is request:
        del state.requests[request.id]
    for requests in (state.reserved_requests, getattr(state, "scheduled_requests", None)):
        if requests is not None:
            requests.discard(request)


def _request_of(message: kombu_toc.Message, *requests: Iterable[Any]) -> Any:
    """The request of these that is this message's, or None."""
    while True:
        try:
            return next((r for some in requests for r in some if r.message is message), None)
        except RuntimeError:  # another thread has added one, or taken one out
            continue


# -- tasks that have waited in the center start when it says that they are due


@dataclass(eq=False)
class PastTimers:
    """The consumer's timer, but for tasks that have waited in the center: they start when it says
    that they are due, and most of them are.

    limits: gives the entries that end tasks at their time limits
    qos: gives the consumer's prefetch count
    """

    timer: Any
    limits: Callable[[], Iterable[Any]] = tuple
    qos: Callable[[], Any] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.timer, name)

    def call_at(
        self,
        eta: Any,
        fun: Callable[..., Any],
        args: Any = (),
        kwargs: Any = None,
        priority: int = 0,
    ) -> Any:
        """As the timer's; of a task that has waited in the center, at its action time."""
        message = getattr(args[0], "message", None) if args else None
        if not isinstance(message, kombu_toc.Message) or not message.waited:
            return self.timer.call_at(eta, fun, args, kwargs, priority)
        entry = self.timer.Entry(fun, args, kwargs)
        if not message.is_early:
            entry()
            return entry
        # Celery fetches one more for each task that its timer has. These are fetched already,
        # and the prefetch count may be set anew before they begin.
        qos = self.qos()
        if qos is not None:
            qos.decrement_eventually()

        def begin() -> None:
            if entry.canceled:  # by Celery, because the connection is lost
                return
            if qos is not None:
                qos.increment_eventually()
            entry()

        message.call_when_due(begin, lambda: forget(args[0]))
        return entry

    def clear(self) -> None:
        """Forget everything but the time limits of tasks that go on.

        Celery before 5.7 clears its timer when the connection is lost.
        """
        limits = list(self.limits())
        kept = [scheduled for scheduled in self.timer.queue if scheduled.entry in limits]
        self.timer.clear()
        for eta, priority, entry in kept:
            self.timer.enter_at(entry, eta, priority)


def begin_when_due(handle: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function to use instead of `handle`: it waits with a message that is handed over
    ahead of its time.

    Most of these go to the timer; but with an ``eta`` from before this machine's start Celery uses
    none.
    """

    def on_task_request(request: Any) -> Any:
        message = getattr(request, "message", None)
        if not isinstance(message, kombu_toc.Message) or not message.is_early:
            return handle(request)
        return message.call_when_due(lambda: handle(request), lambda: forget(request))

    return on_task_request


def forget_what_has_ended(message: Any) -> None:
    """After Celery's strategy has handled a message: forget its task if that has ended.

    Celery 5.7 notes a task with an ``eta`` as scheduled once the timer has it. One that was
    started at once may have ended by then, and would never be forgotten.
    """
    if not isinstance(message, kombu_toc.Message) or not message.waited:
        return
    request: Any = state.requests.get(message.headers.get("id"))
    if request is not None and (
        request.message is message
        and message.acknowledged
        and request not in state.active_requests
        and request not in state.reserved_requests
    ):
        state.requests.pop(request.id, None)
        state.scheduled_requests.discard(request)
