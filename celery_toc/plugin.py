"""Connects Celery to the timeout center: countdowns, revokes and workers. Imports nothing heavy.

The transport calls :func:`install` (entry point ``kombu_toc.extensions``) in every process that
uses Celery and has a broker URL of ours. A web process that only sends tasks imports nothing of
a worker.
"""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Any, cast

from celery import signals

import kombu_toc

from . import compat
from .beat import configured


def install() -> None:
    """Install everything in this process.

    Workers that start from now on have the bootstep; an ``eta`` without a time zone is read as
    Celery reads it; messages with a countdown are marked; a revoke removes messages.
    """
    kombu_toc.CompatPart.check_names()
    kombu_toc.use_timezone(_in_the_apps_timezone, _read_as_a_worker)
    signals.worker_init.connect(_on_worker_init, weak=False, dispatch_uid="celery_toc")
    if "celery.worker.consumer" in sys.modules:
        # With gevent and eventlet, a worker asks for its transport after that signal.
        _add_step()
    compat.sending.install_countdowns()
    compat.control.install_hidden_settings()
    configured.watch()
    from .app import revoke  # it loads parts of Celery

    revoke.install()


def _on_worker_init(**_: Any) -> None:
    # Celery logs what its signal handlers raise, and would start the worker without the step.
    with compat.refusing():
        _add_step()


def _add_step() -> None:
    from .worker import remote_control  # noqa: F401 - registers its commands
    from .worker.step import TimeoutCenterStep

    # The step itself finds out whether a worker's broker is ours.
    compat.worker.add_bootstep(TimeoutCenterStep)


def _in_the_apps_timezone(moment: datetime) -> datetime:
    # celery.worker.request.Request does the same with an eta that has no time zone.
    from celery import current_app
    from celery.utils.time import maybe_make_aware

    return cast(datetime, maybe_make_aware(moment, current_app.timezone))


def _read_as_a_worker(text: str) -> datetime | None:
    from celery.utils.time import maybe_iso8601

    return cast("datetime | None", maybe_iso8601(text))
