"""When a worker is told to end: what nobody has begun is given back at once, however long the tasks
take that the worker waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import bootsteps, signals
from celery.worker import state

from ..compat.worker import install_soft_shutdown
from . import pool
from .pool import PoolPolicy
from .requests import SubmittedRequests

#: Seconds that a signal handler waits for messages to be given back.
HELP_TIMEOUT = 1.0

#: Seconds between two looks, while the loop stands still, which tasks have ended.
LOOK_AT_ENDS = 0.02

#: Seconds that a worker waits at its end until Redis has been told which tasks have ended.
LAST_WORDS = 2.0


class Shutdown:
    """Gives back what a worker has fetched, from within the event loop or while it stands still.

    channel: gives the worker's channel; None while it has no connection
    """

    def __init__(
        self, consumer: Any, submitted: SubmittedRequests, channel: Callable[[], Any]
    ) -> None:
        self._consumer = consumer
        self._submitted = submitted
        self._channel = channel
        self._helper: threading.Thread | None = None
        #: tells Redis which tasks have ended, while the pool works on
        self._teller: threading.Thread | None = None

    def listen(self) -> None:
        """Be told when the worker is to end although its loop does not turn."""
        signals.worker_shutting_down.connect(self._on_signal)
        if not self._consumer.pool.is_green:
            install_soft_shutdown(self._consumer.controller, self._on_soft_shutdown)

    def finish(self, policy: PoolPolicy) -> None:
        """The loop turns no more, but the pool may work on for as long as its tasks take."""
        if self._helper is not None:
            self._helper.join()
        channel = self._channel()
        channel.poller.close()
        self._give_back(channel, policy)
        channel.center.metrics.send(channel.center)
        if channel.lease_keeper.early_acks:
            # The pool may work on for hours: the place of each task is free when that has ended.
            watch = partial(self._acknowledge_ended, channel)
            self._teller = threading.Thread(target=watch, name="toc-ends", daemon=True)
            self._teller.start()

    def wait_until_told(self) -> None:
        """The pool has stopped: all its tasks have ended. The process ends next, and with it what
        is still being said about them."""
        if self._teller is not None:
            self._teller.join(LAST_WORDS)

    @staticmethod
    def _acknowledge_ended(channel: Any) -> None:
        while channel.lease_keeper.early_acks:
            channel.poller.outbox.ack_ended()
            time.sleep(LOOK_AT_ENDS)

    def _on_signal(self, **_: Any) -> None:
        # A solo worker executes its tasks within its loop.
        channel = self._channel()
        if channel is not None and pool.is_solo(self._consumer.pool):
            self._help(channel.poller.release_all)

    def _on_soft_shutdown(self) -> None:
        # Within a signal handler, and before Celery waits for tasks and the pool.
        channel = self._channel()
        if channel is None:
            return

        def release_all() -> None:
            channel.poller.release_all()
            self._give_back(channel, channel.policy)

        self._help(release_all).join(HELP_TIMEOUT)

    def _help(self, function: Callable[[], None]) -> threading.Thread:
        """Run it in a thread: what this signal handler has interrupted may hold a lock."""
        self._helper = threading.Thread(target=function, name="toc-end", daemon=True)
        self._helper.start()
        return self._helper

    def _give_back(self, channel: Any, policy: PoolPolicy) -> None:
        """Everything that the pool has not begun."""
        policy.ending = True
        with self._submitted.deciding:
            channel.qos.restore_unacked()
        policy.ending = False


def is_stopping(consumer: Any) -> bool:
    """Whether a worker is about to end, and not only to connect again."""
    # Celery asks the same of its flags: an exit code, which may be 0, or None or False.
    told = any(
        f is not None and f is not False for f in (state.should_stop, state.should_terminate)
    )
    return told or consumer.controller.blueprint.state != bootsteps.RUN
