"""A message keeps why it comes back or dies.

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

from collections.abc import Callable, Mapping
from typing import Any

from kombu_toc import CompatPart

_METHODS = ("on_unknown_message", "on_unknown_task", "on_invalid_task", "on_decode_error")

PART = CompatPart(
    "failure-reasons",
    touches=f"Celery's Consumer.{', .'.join(_METHODS)}, .update_strategies",
    lost="DeadQueue shows no reasons, and what cannot be decoded is gone, as Celery has it",
    check=lambda consumer: CompatPart.missing(consumer, *_METHODS, "update_strategies"),
)


def install(
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
    if not PART.usable(consumer):
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
