"""Tells the transport which times are countdowns, makes a revoke remove what it revokes, and
workers use what `celery_toc.worker` offers. Imports nothing heavy.

The transport calls :func:`install` (entry point ``kombu_toc.extensions``) in every process that
uses Celery and has a broker URL of ours: in a web process that only sends tasks, nothing of a
worker is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

from celery import signals

import kombu_toc


def install() -> None:
    """Give every worker that starts from now on the bootstep, an ``eta`` its time zone, the
    messages that are made of a countdown a mark, and a revoke its effect on the broker."""
    kombu_toc.use_timezone(_in_the_apps_timezone, _read_as_a_worker)
    signals.worker_init.connect(_add_step, weak=False, dispatch_uid="celery_toc")
    if "celery.worker.consumer" in sys.modules:
        # With gevent and eventlet, a worker asks for its transport when that signal is past.
        _add_step()
    _mark_countdowns()
    _make_revoke_remove()


def _add_step(**_: Any) -> None:
    from celery.worker.consumer import Consumer

    from .worker.step import TimeoutCenterStep

    # The step finds out by itself whether a worker's broker is ours.
    if TimeoutCenterStep not in Consumer.Blueprint.default_steps:
        Consumer.Blueprint.default_steps.append(TimeoutCenterStep)


def _in_the_apps_timezone(moment: datetime) -> datetime:
    # As celery.worker.request.Request does with an eta that has no time zone.
    from celery import current_app
    from celery.utils.time import maybe_make_aware

    return maybe_make_aware(moment, current_app.timezone)


def _read_as_a_worker(text: str) -> datetime | None:
    from celery.utils.time import maybe_iso8601

    return maybe_iso8601(text)


def _mark_countdowns() -> None:
    from celery.app.amqp import AMQP

    # On the class, and uncached: the app that is just sending its first message has its AMQP,
    # and looks this up when it has asked for its transport (from Celery 5.5 on).
    cached = AMQP.create_task_message
    AMQP.create_task_message = property(
        lambda amqp: partial(_create_task_message, cached.__get__(amqp)),
        cached.__set__,
        cached.__delete__,
    )


def _create_task_message(
    create: Callable[..., Any],
    /,
    task_id: str,
    name: str,
    args: Any = None,
    kwargs: Any = None,
    countdown: float | None = None,
    *rest: Any,
    **options: Any,
) -> Any:
    """What Celery makes of a task, in the words of the transport.

    Celery turns a countdown into an ``eta`` by the clock of this machine. The mark is a property
    and not a header, because a retry inherits headers and may have another kind of time.
    """
    message = create(task_id, name, args, kwargs, countdown, *rest, **options)
    headers, properties, body, _ = message
    if countdown:
        properties[kombu_toc.COUNTDOWN] = True
    if isinstance(body, dict):  # protocol 1 has them only there
        headers.setdefault("id", task_id)
        if body.get("eta"):
            headers.setdefault("eta", body["eta"])
    return message


def _make_revoke_remove() -> None:
    from .app.revoke import install

    install()
