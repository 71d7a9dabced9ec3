"""Pools of threads, of greenlets, and of one thread: what they are given, and when it ends.

In these nothing wakes the event loop when a task ends, and a task whose result cannot be stored
would never end for Celery, or would end a worker of one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

from billiard.einfo import ExceptionInfo
from celery.concurrency.solo import TaskPool as SoloPool

from ..compat import pools
from .requests import SubmittedRequests


def is_solo(pool: Any) -> bool:
    """Whether tasks are executed within the event loop, which stands still meanwhile."""
    return isinstance(pool, SoloPool)


def in_threads(pool: Any) -> bool:
    """Whether the pool queues tasks for threads."""
    try:
        from celery.concurrency.thread import TaskPool
    except ImportError:  # no concurrent.futures
        return False
    return isinstance(pool, TaskPool)


def watch_solo(pool: Any, took: Callable[[float], None]) -> None:
    """Tell how many seconds each task of a worker of one thread takes; and keep the worker from
    ending with a task."""
    if not pools.SOLO_HOOKS.usable(pool):
        return

    def wrap(apply: Callable[..., Any]) -> Callable[..., Any]:
        def on_apply(
            target: Any, args: Any = None, kwargs: Any = None, callback: Any = None, **options: Any
        ) -> Any:
            request = pools.request_of(callback)
            if request is not None:
                target, callback = _failing(request, target, callback)
            began = time.monotonic()
            try:
                return apply(target, args or (), kwargs, callback, **options)
            finally:
                took(time.monotonic() - began)

        return on_apply

    pools.replace(pool, wrap)


def watch(pool: Any, submitted: SubmittedRequests) -> None:
    """Keep account of what a pool of threads or greenlets is given. Raises CompatError."""
    pools.HOOKS.usable(pool)

    def wrap(apply: Callable[..., Any]) -> Callable[..., Any]:
        def on_apply(
            target: Any,
            args: Any = None,
            kwargs: Any = None,
            callback: Any = None,
            accept_callback: Any = None,
            **options: Any,
        ) -> Any:
            # The pool has it from now on, and starts it when it can, whatever becomes of the
            # connection.
            request = pools.request_of(callback)
            if request is None:
                return apply(
                    target,
                    args,
                    kwargs,
                    callback=callback,
                    accept_callback=accept_callback,
                    **options,
                )

            def accepted(*when: Any) -> None:
                if not submitted.accept(request):
                    raise CancelledError
                accept_callback(*when)

            traced, tell = _failing(request, target, callback)

            def ended(result: Any) -> Any:
                try:
                    return tell(result)
                finally:
                    submitted.end(request)

            def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    return traced(*args, **kwargs)
                except BaseException:  # the pool does not call back then
                    submitted.end(request)
                    raise

            if request.message.given_back:  # it was waiting for its rate limit
                return None
            submitted.add(request, time.monotonic(), starts=pool.is_green)
            return apply(run, args, kwargs, callback=ended, accept_callback=accepted, **options)

        return on_apply

    pools.replace(pool, wrap)


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
