"""Pools of a worker: the tasks that they were given, and when these end.

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

Touches: of Celery's prefork `TaskPool` ``_pool`` and ``flush``, which is replaced on the pool; of
billiard's pool behind it ``_cache``, ``_pool``, ``outbound_buffer``, ``mark_as_worker_lost``,
``_processes``, ``_all_inqueues``, ``on_poll_start`` and ``_tref_for_id``; of its jobs
``_callback``, ``_write_to``, ``_scheduled_for``, ``_accepted``, ``_job`` and ``discard``; of its
processes ``_is_alive`` and ``inq._reader``; of Celery's request ``_apply_result``.

Why: when the connection is lost or the worker stops, Celery forgets every task that no process has
said it starts. One that was written to a process is started nevertheless. Were its message given
back, it would be executed twice. Only the pool's own books tell which those are; no method shows
them.

Read in Celery 5.3.6 and 5.7.0 and billiard 4.2.1 and 4.3.2.

Without ``processes``: tasks would be executed twice. A worker with such a pool does not start.
Without ``missing-processes``: a task may be fetched for a process that has died, before another has
taken its place. Without ``send-now``: a task goes to its process a turn of the event loop later.
Without ``time-limits``: Celery before 5.7 forgets the time limits of running tasks when its
connection breaks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kombu_toc import CompatPart, Message

# -- pool-hooks


def _check_hooks(pool: Any) -> list[str]:
    from celery.worker.request import Request

    return [
        *CompatPart.missing(pool, "on_apply"),
        *CompatPart.missing(Request, "on_accepted", "on_success", "on_failure"),
    ]


HOOKS = CompatPart(
    "pool-hooks",
    touches="Celery's BasePool.on_apply",
    lost="messages would be given back while threads execute them",
    check=_check_hooks,
    way_out="Install Celery 5.3.6 to 5.7, or start the worker with --pool prefork",
)

SOLO_HOOKS = CompatPart(
    "solo-hooks",
    touches="Celery's BasePool.on_apply, of the solo pool",
    lost="a solo worker fetches nothing ahead, and ends if a result cannot be stored",
    check=_check_hooks,
)


def replace_on_apply(pool: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace what a pool does with a task, once: not again after a reconnect."""
    if not getattr(pool.on_apply, "is_ours", False):
        on_apply: Any = wrap(pool.on_apply)
        on_apply.is_ours = True
        pool.on_apply = on_apply


def request_of(callback: Any) -> Any:
    """Celery's request whose method a callback is; None if its message is none of ours."""
    request = getattr(callback, "__self__", None)
    return request if isinstance(getattr(request, "message", None), Message) else None


# -- processes


def _check_processes(pool: Any) -> list[str]:
    from billiard.pool import ApplyResult
    from celery.worker.request import Request

    behind = getattr(pool, "_pool", None)
    job = ApplyResult({}, None)
    processes = list(getattr(behind, "_pool", ()))
    return [
        *CompatPart.missing(pool, "_pool", "flush"),
        *CompatPart.missing(behind, "_cache", "_pool", "outbound_buffer", "mark_as_worker_lost"),
        *CompatPart.missing(job, "_callback", "_write_to", "_scheduled_for", "_accepted", "_job"),
        *CompatPart.missing(job, "discard", "ready"),
        *CompatPart.missing(Request, "_apply_result"),
        *(
            name
            for process in processes[:1]
            for name in CompatPart.missing(process, "_is_alive", "inq")
        ),
        *(name for process in processes[:1] for name in CompatPart.missing(process.inq, "_reader")),
    ]


PROCESSES = CompatPart(
    "processes",
    touches="billiard's Pool._cache, .outbound_buffer, ApplyResult._write_to, ._accepted and more",
    lost="tasks that a process was sent would be given back and executed twice",
    check=_check_processes,
    way_out="Install Celery 5.3.6 to 5.7 with billiard 4.2 or 4.3, or start the worker with "
    "--pool threads",
)

MISSING = CompatPart(
    "missing-processes",
    touches="billiard's Pool._processes, Celery's AsynPool._all_inqueues",
    lost="tasks may be fetched for a process that has died and is not replaced yet",
    check=lambda behind: CompatPart.missing(behind, "_processes", "_all_inqueues"),
)

SEND_NOW = CompatPart(
    "send-now",
    touches="Celery's AsynPool.on_poll_start",
    lost="a task goes to its process a turn of the event loop later",
    check=lambda behind: CompatPart.missing(behind, "on_poll_start"),
)

TIME_LIMITS = CompatPart(
    "time-limits",
    touches="Celery's AsynPool._tref_for_id",
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
        if pool.flush is not None and not isinstance(pool.flush, FlushesWhatWasNotSent):
            pool.flush = FlushesWhatWasNotSent(pool, self._promised)

    def keeps(self, message: Any) -> bool:
        """Whether a process has this message's task and has not said yet that it starts it; then
        the message is kept."""
        request = sent_request(self._pool, message)
        if request is None:
            return False
        self._promised.append(request)
        return True

    def executed(self, message: Any) -> Any:
        """The request of a message whose task a process executes, or None."""
        for job in tuple(self._pool._pool._cache.values()):
            request = getattr(getattr(job, "_callback", None), "__self__", None)
            if getattr(request, "message", None) is message and job._accepted and not job.ready():
                return request
        return None

    def executes(self, request: Any) -> bool:
        """Whether a process still executes a request's task.

        request: None if nobody knows it any more
        """
        job = None if request is None else _job(request)
        return job is not None and not job.ready()


def sent_request(pool: Any, message: Any) -> Any:
    """The request of a message whose task was written to a process of the pool that lives, or
    None.

    One whose process died before it started is sent to another, and waits for that.
    """
    pool = pool._pool
    # The pool's own jobs are asked: Celery may have forgotten the request already.
    for job in tuple(pool._cache.values()):
        request = getattr(getattr(job, "_callback", None), "__self__", None)
        if getattr(request, "message", None) is message and _was_sent(pool, job):
            return request
    return None


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


class FlushesWhatWasNotSent:
    """The pool's `flush`, when the connection is lost or the worker stops.

    promised: requests whose messages were kept because a process was sent them
    """

    def __init__(self, pool: Any, promised: list[Any]) -> None:
        self._pool = pool
        self._flush: Callable[[], Any] = pool.flush
        self._promised = promised

    def __call__(self) -> Any:
        pool = self._pool._pool
        jobs = tuple(pool._cache.values())
        sent = [job for job in jobs if _was_sent(pool, job)]
        executing = [job for job in jobs if getattr(job, "_accepted", False)]
        for job in sent:
            job.discard = _nothing
        # Asked now: later, a job's process may be one that only has the file descriptor of its own.
        sent_to = [(job, job._write_to) for job in sent]
        for process in tuple(pool._pool):
            if not process._is_alive():
                # Its pipe goes to the process that comes next: not with tasks in it.
                _empty(process.inq._reader)
        while self._promised:
            request = self._promised.pop()
            job = _job(request)
            accepted = job is not None and job._accepted
            if not (accepted or _was_sent(pool, job) or request.message.acknowledged):
                request.message.requeue_lost()  # its process has been killed since
        try:
            return self._flush()
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


def _nothing() -> None:
    pass


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
