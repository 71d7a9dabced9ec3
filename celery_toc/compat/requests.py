"""Requests of a worker: from a message that is delivered to the end of its task.

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
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from kombu_toc import CompatPart, Message

# -- acks-at-once

ACKS_AT_ONCE = CompatPart(
    "acks-at-once",
    touches="Celery's Consumer.call_soon, Consumer.call_soon_ack",
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
    touches="Celery's Consumer.timer, .on_task_request, .update_strategies, .strategies",
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
    touches="Celery's Request(maybe_iso8601=...) and Request.tzlocal",
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
    touches=f"Celery's Consumer.{', .'.join(_METHODS)}, .update_strategies",
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
