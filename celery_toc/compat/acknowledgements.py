"""An acknowledgement leaves when a task says so.

Touches: `Consumer.call_soon` and, since Celery 5.7, `Consumer.call_soon_ack`, which are replaced
on the consumer.

Why: Celery's strategies hand acknowledgements to these two, which run them in the event loop's
next turn. There may be none: a worker that ends waits for its tasks outside the loop. No setting
changes that.

Read in Celery 5.3.6 and 5.7.0.

Without: an acknowledgement leaves a turn of the loop later, and those of tasks that end while the
worker stops leave when it closes its event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kombu_toc import CompatPart, Message

PART = CompatPart(
    "acks-at-once",
    touches="Celery's Consumer.call_soon, Consumer.call_soon_ack",
    lost="acknowledgements leave a turn of the event loop later",
    check=lambda consumer: CompatPart.missing(consumer, "call_soon"),
)


def install(consumer: Any) -> None:
    """Have a worker's consumer run what is a message's own at once."""
    if not PART.usable(consumer):
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
