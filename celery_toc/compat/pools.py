"""What a pool of threads, greenlets or one thread is given, and when that ends.

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
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kombu_toc import CompatPart, Message


def _check(pool: Any) -> list[str]:
    from celery.worker.request import Request

    return [
        *CompatPart.missing(pool, "on_apply"),
        *CompatPart.missing(Request, "on_accepted", "on_success", "on_failure"),
    ]


HOOKS = CompatPart(
    "pool-hooks",
    touches="Celery's BasePool.on_apply",
    lost="messages would be given back while threads execute them",
    check=_check,
    way_out="Install Celery 5.3.6 to 5.7, or start the worker with --pool prefork",
)

SOLO_HOOKS = CompatPart(
    "solo-hooks",
    touches="Celery's BasePool.on_apply, of the solo pool",
    lost="a solo worker fetches nothing ahead, and ends if a result cannot be stored",
    check=_check,
)


def replace(pool: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace what a pool does with a task, once: not again after a reconnect."""
    if not getattr(pool.on_apply, "is_ours", False):
        on_apply: Any = wrap(pool.on_apply)
        on_apply.is_ours = True
        pool.on_apply = on_apply


def request_of(callback: Any) -> Any:
    """Celery's request whose method a callback is; None if its message is none of ours."""
    request = getattr(callback, "__self__", None)
    return request if isinstance(getattr(request, "message", None), Message) else None
