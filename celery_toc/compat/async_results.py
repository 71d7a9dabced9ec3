"""A result backend does not wait for its server when a task is sent from an event loop.

Touches: ``RedisBackend.on_task_call``, which is replaced on the app's backend.

Why: when a task is sent, Celery's Redis backend subscribes to its result, and waits for the server.
That blocks the event loop. It is not needed: ``AsyncResult.get`` subscribes, too, and then looks
whether the result is there.

Read in Celery 5.3.6, 5.5.3 and 5.7.0.

Without: with results in Redis, the first task that is sent, and one a second, blocks the event loop
for a round trip to the server that keeps the results.
"""

from __future__ import annotations

from typing import Any

import kombu_toc
from kombu_toc import CompatPart

PART = CompatPart(
    "async-results",
    touches="Celery's RedisBackend.on_task_call",
    lost="sending from an event loop waits for the server that keeps the results",
    check=lambda backend: CompatPart.missing(backend, "on_task_call"),
)


def install(backend: Any) -> None:
    """Keep a result backend from blocking the loop that sends; if it has been done, do nothing."""
    if "on_task_call" in vars(backend) or not hasattr(backend, "result_consumer"):
        return
    if not PART.usable(backend) or not any(
        cls.__module__ == "celery.backends.redis" for cls in type(backend).__mro__
    ):
        return
    subscribe = backend.on_task_call

    def on_task_call(producer: Any, task_id: str) -> Any:
        if isinstance(getattr(producer, "channel", None), kombu_toc.AsyncChannel):
            return None
        return subscribe(producer, task_id)

    backend.on_task_call = on_task_call
