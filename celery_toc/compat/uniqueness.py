"""A task that is not sent has the result of the one that is there.

Touches: ``Celery.send_task``, which is replaced on the class when uniqueness is first asked for in
a process; ``Celery._tasks``, which is read.

Why: with ``conflict="keep"`` and ``"replace"``, ``apply_async`` returns the result of a task that
was sent before. Celery makes the result of the id that it has chosen itself, and calls nothing in
between that could tell it another one. A signal could compute the key from the arguments, but is
not told the app.

Read in Celery 5.3.6, 5.5.3 and 5.7.0.

Without: a task that should be unique is not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from celery import Celery
from celery.utils import uuid

import kombu_toc
from kombu_toc import CompatPart

PART = CompatPart(
    "uniqueness",
    touches="Celery's Celery.send_task and Celery._tasks",
    lost="a task that should be unique is not",
    check=lambda app: CompatPart.missing(app, "send_task"),
    way_out="Take uniqueness away from the tasks, or install a release of Celery that has it.",
)


def install() -> None:
    """Let tasks be unique that are sent from now on; if it has been done, do nothing."""
    if hasattr(Celery.send_task, "toc_original") or not PART.usable(Celery):
        return
    original = Celery.send_task
    names = tuple(inspect.signature(original).parameters)[4:]

    @wraps(original)
    def send(
        app: Celery, name: str, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any
    ) -> Any:
        task = options.get("task_type") or app._tasks.get(name)
        unique = getattr(task, "toc_unique", None)
        headers = options.get("headers")
        if unique is None and "x-unique" not in options and not (headers and "x-unique" in headers):
            return original(app, name, args, kwargs, *rest, **options)
        options.update(zip(names, rest, strict=False))
        # A retry has the headers of what it repeats.
        if unique is not None and "x-unique" not in options and not options.get("retries"):
            options.update(unique.options_for(task, args, kwargs))
        return _send_unique(app, original, name, args, kwargs, options)

    send.toc_original = original  # type: ignore[attr-defined]
    Celery.send_task = send


def original(app_class: Any) -> Any:
    """What Celery would send with, or somebody else has put in its place."""
    return getattr(app_class.send_task, "toc_original", app_class.send_task)


def _send_unique(
    app: Celery,
    send: Callable[..., Any],
    name: str,
    args: Any,
    kwargs: Any,
    options: dict[str, Any],
) -> Any:
    """Send a task, or find the one that is there; return its result."""
    id = options["task_id"] = options.get("task_id") or uuid()
    try:
        with kombu_toc.unique_answer(id) as answer:
            result = send(app, name, args, kwargs, **options)
    except kombu_toc.KeptError as exc:
        made = options.get("result_cls") or app.AsyncResult
        ignored = options.get("ignore_result")
        if not ignored:
            made(id)  # Celery has begun to wait for it; it ends that when this is collected
        result = made(exc.id)
        result.ignored = ignored
        parent = app.current_worker_task
        if parent and options.get("add_to_parent", True):
            parent.add_trail(result)
        return result
    if answer.id != id:
        result.id = answer.id
    return result
