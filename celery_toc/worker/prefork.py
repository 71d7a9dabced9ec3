"""What a pool of processes has been sent: it is started, whatever becomes of the connection.

Celery forgets, when the connection is lost or the worker stops, every task that no process has
said it starts. One that was written to a process is started nevertheless: were its message given
back, it would run twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def sent_request(pool: Any, message: Any) -> Any:
    """The request of a message whose task was written to a process of the pool that lives, or
    None.

    One whose process died before it started is sent to another, and waits for that.
    """
    pool = getattr(pool, "_pool", None)
    # The pool's own jobs are asked: Celery may have forgotten the request already.
    for job in tuple(getattr(pool, "_cache", {}).values()):
        request = getattr(getattr(job, "_callback", None), "__self__", None)
        if getattr(request, "message", None) is message and _was_sent(pool, job):
            return request
    return None


def missing(pool: Any) -> int:
    """How many processes of a pool are not up: one that died leaves no room until another one has
    taken its place."""
    pool = getattr(pool, "_pool", None)
    try:
        missing = pool._processes - len(pool._all_inqueues)
    except AttributeError:
        return 0
    return missing if missing > 0 else 0


def send_now(pool: Any) -> None:
    """See to it that a pool of processes sends its tasks in this turn of the event loop."""
    schedule = getattr(getattr(pool, "_pool", None), "on_poll_start", None)
    if schedule is not None:
        schedule()


def time_limits(pool: Any) -> list[Any]:
    """The timer's entries that end the tasks of a pool of processes, in an event loop."""
    return list(getattr(getattr(pool, "_pool", None), "_tref_for_id", {}).values())


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
        jobs = tuple(getattr(pool, "_cache", {}).values())
        sent = [job for job in jobs if _was_sent(pool, job)]
        executing = [job for job in jobs if getattr(job, "_accepted", False)]
        for job in sent:
            job.discard = _nothing
        for process in tuple(getattr(pool, "_pool", ())):
            if not process._is_alive():
                # Its pipe goes to the process that comes next: not with tasks in it.
                _empty(process.inq._reader)
        while self._promised:
            request = self._promised.pop()
            job = _job(request)
            accepted = job is not None and job._accepted
            if not (accepted or _was_sent(pool, job) or request.message.acknowledged):
                request.message.requeue()  # its process has been killed since
        try:
            return self._flush()
        finally:
            for job in sent:
                del job.discard
            for job in {*sent, *executing}:
                if not job.ready() and job._job not in pool._cache:
                    _remember(pool, job)


def _remember(pool: Any, job: Any) -> None:
    """Older Celery forgets every job: nobody would acknowledge the tasks."""
    process = job._write_to or job._scheduled_for
    if process is not None and process._is_alive():
        pool._cache[job._job] = job
    elif job._accepted:
        pool.mark_as_worker_lost(job, getattr(process, "exitcode", None) or 0)
    else:
        request = getattr(job._callback, "__self__", None)
        if request is not None and not request.message.acknowledged:
            request.message.requeue()


def _nothing() -> None:
    pass


def _empty(reader: Any) -> None:
    with suppress(OSError):
        while reader.poll(0):
            os.read(reader.fileno(), 1 << 16)


def _job(request: Any) -> Any:
    """What the pool knows a request's task by, or None."""
    reference = getattr(request, "_apply_result", None)
    return reference() if reference is not None else None


def _was_sent(pool: Any, job: Any) -> bool:
    process = getattr(job, "_write_to", None)
    return process is not None and process._is_alive() and job not in pool.outbound_buffer
