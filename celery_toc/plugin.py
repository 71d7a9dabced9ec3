"""Makes workers use what `celery_toc.worker` offers. Imports nothing heavy.

The transport calls :func:`install` (entry point ``kombu_toc.extensions``) in every process that
uses Celery and has a broker URL of ours: in a web process that only sends tasks, nothing of a
worker is imported.
"""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Any

from celery import signals

import kombu_toc


def install() -> None:
    """Give every worker that starts from now on the bootstep, and an ``eta`` its time zone."""
    kombu_toc.use_timezone(_in_the_apps_timezone)
    signals.worker_init.connect(_add_step, weak=False, dispatch_uid="celery_toc")
    if "celery.worker.consumer" in sys.modules:
        # With gevent and eventlet, a worker asks for its transport when that signal is past.
        _add_step()


def _add_step(**_: Any) -> None:
    from celery.worker.consumer import Consumer

    from .worker import TimeoutCenterStep

    # The step finds out by itself whether a worker's broker is ours.
    if TimeoutCenterStep not in Consumer.Blueprint.default_steps:
        Consumer.Blueprint.default_steps.append(TimeoutCenterStep)


def _in_the_apps_timezone(moment: datetime) -> datetime:
    # As celery.worker.request.Request does with an eta that has no time zone.
    from celery import current_app
    from celery.utils.time import maybe_make_aware

    return maybe_make_aware(moment, current_app.timezone)
