"""Puts the app's ``beat_schedule`` from a worker, if ``toc_beat`` is set.

A thread of the worker does it when the worker starts, and asks once a minute whether it is still
the one that is in force; see :mod:`celery_toc.beat.sync`.
"""

from __future__ import annotations

import threading
import time
import uuid
from typing import Any

from celery import signals
from celery.utils.log import get_logger

import celery_toc

from ..beat.sync import Outcome, Sync
from ..beat.warning import is_of_a_beat

logger = get_logger(__name__)

#: Seconds between two looks, and after one that failed or found another process putting.
INTERVAL, SOON = 60.0, 5.0

#: Entries that one line of the log names at most.
MAX_NAMED = 10


class BeatSchedule:
    """Does it for one worker.

    app: the worker's
    worker: the name of the worker
    """

    def __init__(self, app: Any, worker: str) -> None:
        self._app = app
        self._process = f"{worker} {uuid.uuid4().hex[:8]}"
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._began = time.monotonic()
        #: what was logged already, so that it is not logged every minute
        self._logged: set[tuple[str, ...]] = set()

    @property
    def is_wanted(self) -> bool:
        """Whether the app asks for it."""
        return bool(self._app.conf.get("toc_beat"))

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._thread is None and self.is_wanted:
            signals.task_received.connect(self._look_for_beat, dispatch_uid="celery_toc.beat")
            self._thread = threading.Thread(target=self._run, name="toc-beat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End soon. What has been begun, another worker ends."""
        self._stopping.set()
        signals.task_received.disconnect(dispatch_uid="celery_toc.beat")

    def _run(self) -> None:
        sync: Sync | None = None
        wait = 0.0
        while not self._stopping.wait(wait):
            try:
                if sync is None:
                    sync = Sync(self._app, celery_toc.timeout_center(self._app), self._process)
                outcome = sync.run(looked=time.monotonic() - self._began)
            except Exception as exc:
                if self._is_new(str(exc)):
                    logger.error("Cannot put the beat_schedule: %s", exc)
                wait = SOON
            else:
                self._report(outcome)
                wait = INTERVAL if outcome.told.verdict in ("in force", "former") else SOON

    def _report(self, outcome: Outcome) -> None:
        told = outcome.told
        if told.verdict == "former" and self._is_new(told.in_force):
            logger.warning(
                "The beat_schedule of this worker is not in force: that of %s is%s. "
                "'celery toc schedule sync' puts this one",
                told.process,
                f" (release {told.release})" if told.release else "",
            )
        if outcome.put or outcome.removed:
            logger.info(
                "Schedules of beat_schedule: %d put, %d removed, %d unchanged",
                *(len(outcome.put), len(outcome.removed), outcome.unchanged),
            )
        refused = [one for one in outcome.refused if self._is_new(*one)]
        for name, reason in refused[:MAX_NAMED]:
            logger.error("Entry %r of beat_schedule is not put: %s", name, reason)
        if len(refused) > MAX_NAMED:
            more = len(refused) - MAX_NAMED
            logger.error("%d more entries of beat_schedule are not put", more)

    def _is_new(self, *said: str) -> bool:
        """Whether that was not logged yet."""
        is_new = said not in self._logged
        self._logged.add(said)
        return is_new

    def _look_for_beat(self, request: Any = None, **_: Any) -> None:
        """Warn of a task that a beat has sent: it is sent twice."""
        if is_of_a_beat(getattr(request, "request_dict", None) or {}):
            signals.task_received.disconnect(dispatch_uid="celery_toc.beat")
            logger.warning(
                "A celery beat sends tasks beside toc_beat: task %s[%s] came from one. What is in "
                "beat_schedule runs twice: stop that beat",
                *(request.name, request.id),
            )
