"""The bootstep of a worker whose broker is a timeout center.

Active without any set-up: a worker whose broker is ours gets it (`celery_toc.plugin` sees to
that). It

- tells the channel how many tasks could start at once, and how soon more could, so that no task
  is fetched by a busy worker while an idle one could start it (`policy`);
- hands a task that arrives when it is due straight on, instead of to a timer: a message with an
  ``eta`` has waited in Redis, by Redis's clock, and ``request.eta`` stays as sent (`timer`);
- keeps the messages of executing tasks when the connection breaks, and of those that a process
  has been sent and is about to start (`policy`, `requests`);
- gives back, as soon as the worker is told to end, what no process has begun, however long the
  tasks take that it waits for (`Shutdown`).
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import bootsteps, signals
from celery.utils.log import get_logger
from celery.worker import state
from celery.worker.consumer.tasks import Tasks

import kombu_toc

from .. import compat
from ..app.task import visibility_warnings
from . import failures, pool, schedules
from .pool import Pace, PoolPolicy, SubmittedRequests, is_stopping
from .schedules import BeatSchedule

logger = get_logger(__name__)

__all__ = ("TimeoutCenterStep",)


class TimeoutCenterStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """What a worker does beside Celery's own steps if its broker is a timeout center."""

    label = "Timeout center"
    requires = (Tasks,)

    def __init__(self, c: Any, **kwargs: Any) -> None:
        super().__init__(c, **kwargs)
        transport = c.conninfo.get_transport_cls()
        self.enabled = isinstance(transport, type) and issubclass(transport, kombu_toc.Transport)
        #: the channel of the worker's latest connection, and whether it consumes with it
        self._channel: Any = None
        self._consumes = False
        self._policy: PoolPolicy | None = None
        self._paused = False
        self._has_described = False
        self._pace = Pace()
        self._submitted = SubmittedRequests(self._nudge)
        self._shutdown = Shutdown(c, self._submitted, self._consuming)
        self._accepts_early = False
        self._followers = schedules.Followers()
        self._beat_schedule = BeatSchedule(c.app, c.hostname)
        if self.enabled:
            with compat.refusing():
                self._install(c)

    def _install(self, c: Any) -> None:
        # Strategies bind the timer's method when the Tasks step starts, before this one.
        kombu_toc.CompatPart.check_names()
        compat.worker.check_worker_state()
        self._accepts_early = compat.worker.install_due_times(
            c,
            timer_of=lambda timers: pool.PastTimers(
                timers, lambda: compat.worker.time_limits(c.pool), lambda: c.qos
            ),
            handle_of=pool.begin_when_due,
            after_strategy=pool.forget_what_has_ended,
        )
        failures.explain(c)
        compat.worker.install_acks_at_once(c)
        compat.worker.install_quick_times(c)
        compat.worker.install_connect_pause(c, state.maybe_shutdown)

    def include_if(self, c: Any) -> bool:
        return self.enabled

    def create(self, c: Any) -> None:
        """All steps are made, and none has started."""
        compat.control.install_remote_control(c)

    def start(self, c: Any) -> None:
        c.timeout_center_step = self
        channel = c.task_consumer.channel
        channel.poller.long_running = True
        # What gossip hears of the others: with many of them, each would be woken all the time.
        channel.poller.unhurried.add(c.app.conf.event_exchange)
        channel.losable.add(c.app.conf.event_exchange)
        if self._policy is None:
            _keep_what_is_loaded()
            with compat.refusing():
                self._policy = PoolPolicy(
                    c, self._submitted, self._pace, accepts_early=self._accepts_early
                )
                self._watch(c)
            self._policy.paused = self._paused
            self._shutdown.listen()
        channel.policy = self._policy
        channel.receiver.on_firing = firings = schedules.Firings(c.app, channel)
        channel.poller.on_popped = firings.take_together
        channel.lease_keeper.keep_up_also(schedules.Followers, self._followers)
        self._beat_schedule.start()
        self._channel, self._consumes = channel, True
        if not self._has_described:  # once, not at every reconnect
            self._has_described = True
            _describe(c, channel)

    def _watch(self, c: Any) -> None:
        if pool.is_solo(c.pool):
            pool.watch_solo(c.pool, self._pace.took)
        elif not c.hub or pool.in_threads(c.pool):
            pool.watch(c.pool, self._submitted)

    def stop(self, c: Any) -> None:
        if is_stopping(c):
            self._beat_schedule.stop()
        if self._consumes and self._policy is not None and is_stopping(c):
            self._shutdown.finish(self._policy)
        self._consumes = False

    def shutdown(self, c: Any) -> None:
        """The pool has stopped."""
        if self._channel is not None:
            self._channel.poller.outbox.ack_ended()
            self._shutdown.wait_until_told()

    def info(self, c: Any) -> dict[str, Any]:
        """What `inspect stats` tells of the broker. Celery's own step leaves the passwords of
        options, of a URL's query and of other URLs in it."""
        return {"broker": c.connection.transport.info()} if c.connection else {}

    def _consuming(self) -> Any:
        """The channel that the worker consumes with, or None."""
        return self._channel if self._consumes else None

    @property
    def center(self) -> kombu_toc.TimeoutCenter:
        """The center of the consumer's connection."""
        center: kombu_toc.TimeoutCenter = self._channel.center
        return center

    def report(self) -> dict[str, Any]:
        """The answer to ``celery inspect toc``."""
        return {"paused": self._paused, **self._channel.snapshot()}

    def set_paused(self, paused: bool) -> bool:
        """Take no more tasks, also after a reconnect, or take them again; whether that is new."""
        if self._paused == paused:
            return False
        self._paused = paused
        if self._policy is not None:
            self._policy.paused = paused
        self._nudge()
        logger.info("No more tasks are taken: paused" if paused else "Tasks are taken again")
        return True

    def _nudge(self) -> None:
        channel = self._consuming()
        if channel is not None:
            channel.poller.nudge()


def _describe(c: Any, channel: kombu_toc.Channel) -> None:
    """Log what is served, and what of the configuration has no effect."""
    topics = [channel.center.registry.known(queue.name) for queue in c.task_consumer.queues]
    logger.info(
        "Timeout center at %s: %s",
        c.conninfo.as_uri(),
        ", ".join(_described(topic, channel.settings.limits) for topic in topics if topic),
    )
    ignored = [f"the broker's options {', '.join(channel.settings.ignored)}"]
    ignored = ignored if channel.settings.ignored else []
    for queue, what in channel.ignored.items():
        if what:
            ignored.append(f"for queue {queue!r}: {', '.join(what)}")
    if ignored:
        logger.warning("Without effect: %s", "; ".join(ignored))
    for warning in visibility_warnings(channel.settings.limits):
        logger.warning("The option %s", warning)
    if channel.transport.address.kind == "embedded":
        return
    for warning in kombu_toc.durability_warnings(channel.center.client):
        logger.warning("The broker %s may lose tasks: %s.", c.conninfo.as_uri(), warning)
    for warning in kombu_toc.outage_warnings(channel.center.client):
        logger.warning("The broker %s may stop as a whole: %s.", c.conninfo.as_uri(), warning)


def _described(topic: kombu_toc.Topic, otherwise: kombu_toc.Limits) -> str:
    """A topic and what holds for it."""
    slots, retries = topic.slots, topic.declaration.retries
    return (
        f"{topic.name} ({slots} {'slot' if slots == 1 else 'slots'}, "
        f"visibility timeout {topic.declaration.limits(otherwise).visibility:g} s, "
        f"{retries} {'retry' if retries == 1 else 'retries'})"
    )


# -- when a worker is told to end: what nobody has begun is given back at once, however long the
# tasks take that the worker waits for

#: Seconds that a signal handler waits for messages to be given back.
HELP_TIMEOUT = 1.0

#: Seconds between two looks, while the loop stands still, which tasks have ended.
LOOK_AT_ENDS = 0.02

#: Seconds that a worker waits at its end until Redis has been told which tasks have ended.
LAST_WORDS = 2.0


def _keep_what_is_loaded() -> None:
    """What a worker has loaded stays. To look through it for garbage, as Python does now and then,
    takes tens of milliseconds, for which due tasks would wait. In a thread, as tests have workers,
    it is not the worker's own."""
    if threading.current_thread() is threading.main_thread():
        gc.collect()
        gc.freeze()


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
            compat.worker.install_soft_shutdown(self._consumer.controller, self._on_soft_shutdown)

    def finish(self, policy: PoolPolicy) -> None:
        """The loop turns no more, but the pool may work on for as long as its tasks take."""
        if self._helper is not None:
            self._helper.join()
        channel = self._channel()
        channel.poller.close()
        self._give_back(channel, policy)
        channel.center.metrics.send(channel.center.runner)
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
