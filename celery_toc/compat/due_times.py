"""A task that has waited in the center starts when the center says that it is due.

Touches: `Consumer.timer` and `Consumer.on_task_request`, which are replaced on the consumer; and,
since Celery 5.7, ``celery.worker.state.scheduled_requests``, with `Consumer.strategies`, which are
wrapped whenever Celery makes them.

Why: Celery's strategy hands a task with an ``eta`` to the consumer's timer, which goes by the
worker's clock. A strategy of our own would take the place of the app's (``Task.Strategy``).

Read in Celery 5.3.6 and 5.7.0, and the timer in Kombu 5.3.7 and 5.7.0.

Without: a task with an ``eta`` is delivered when it is due, and then waits for the worker's timer:
some milliseconds, and longer if the worker's clock is behind Redis's. Nothing is prepared ahead of
its time. Celery before 5.7 forgets the time limits of running tasks when its connection breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kombu_toc import CompatPart

PART = CompatPart(
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


def install(
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

    if not PART.usable(consumer):
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
