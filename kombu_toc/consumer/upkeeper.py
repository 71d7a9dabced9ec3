"""One process of a fleet keeps all topics in order: see :mod:`kombu_toc.center.upkeep`.

Every consuming process tries now and then to become that one; it is, as long as it renews a short
lease in Redis. The work is done in a native thread with a connection of its own, which is there
in that one process only: it goes on also while a task blocks everything else, and nothing waits
for it.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any
from uuid import uuid4

from ..center.center import TimeoutCenter
from ..center.upkeep import Event, Upkeep, elect
from ..center.watch import Watch
from ..errors import NotPermittedError
from .native_threads import WakeEvent, unpatched_threading
from .pipe import BROKEN
from .snapshot import task_names

logger = logging.getLogger(__name__)

#: Seconds for which a process keeps all topics up unless it says so again, and between attempts of
#: the others to become the one that does.
LEASE = 3.0
ATTEMPT_INTERVAL = 2.0

#: Seconds between attempts where they fail.
FAILED_INTERVAL = 5.0

#: Seconds after which the same complaint is made again.
COMPLAIN_AGAIN = 300.0

#: Messages that one line of the log names at most.
MAX_NAMED = 10

_host = socket.gethostname()


class Upkeeper:
    """Takes part in the election, and does the work when elected.

    Its methods but :meth:`attempt` may be called by any thread; none but that waits for Redis.

    lock: makes locks of native threads
    in_time, beat: of the heartbeat that it belongs to
    say: logs from a native thread
    """

    def __init__(
        self,
        make_center: Callable[[], TimeoutCenter],
        lock: Callable[[], Any],
        *,
        in_time: Callable[..., bool],
        beat: Callable[[], None],
        say: Callable[..., None],
    ) -> None:
        self._make_center = make_center
        self._in_time = in_time
        self._beat = beat
        self._say = say
        self._bell = WakeEvent(lock)
        self.name = f"{_host}:{os.getpid()}:{uuid4().hex[:12]}"
        #: who wants it to be done -> seconds between two passes
        self._wanted: dict[Hashable, float] = {}
        #: monotonic seconds of the next attempt to be elected
        self.due = float("inf")
        self._may = False
        self._known_until = 0.0
        self._elected_until = 0.0
        self._working = False
        #: what was seen of the server, or of each node of a Cluster
        self._watches: dict[Hashable, Watch] = {}
        self._home = Watch()
        self._complaints: dict[str, float] = {}

    def want(self, who: Hashable, interval: float) -> None:
        """Somebody consumes here: see to it that the topics are kept up, here or elsewhere, with a
        pass every so many seconds."""
        self._wanted[who] = interval
        if self.due == float("inf"):
            self.due = 0.0

    def unwant(self, who: Hashable) -> None:
        self._wanted.pop(who, None)
        if not self._wanted:
            self.due = float("inf")
            self._bell.ring()

    @property
    def wanted(self) -> bool:
        return bool(self._wanted)

    @property
    def elected(self) -> bool:
        """Whether this process keeps the topics up."""
        return self._working and time.monotonic() < self._elected_until

    @property
    def known(self) -> bool:
        """Whether this process or another is known to keep the topics up."""
        return self.elected or time.monotonic() < self._known_until

    # -- in the heartbeat's thread

    def attempt(self, center: TimeoutCenter) -> None:
        """Try to be elected."""
        began = time.monotonic()
        if self._working:
            self.due = began + ATTEMPT_INTERVAL
            return
        self.due = began + FAILED_INTERVAL
        if not self._may:
            self.due = began + COMPLAIN_AGAIN
            try:
                # What it needs beside the scripts that every consumer may run.
                center.client.hgetall(center.keys.write_probe)
            except NotPermittedError as exc:
                self._complain(
                    "permission",
                    "cannot keep the queues up, and looks into its own instead: %s",
                    exc,
                )
                return
            self._may = True
        mine = self._elect(center, time.monotonic())
        self.due = time.monotonic() + ATTEMPT_INTERVAL
        if mine and self._wanted:
            self._working = True
            unpatched_threading().start(self._run)

    def _elect(self, center: TimeoutCenter, began: float) -> bool:
        mine, somebody, now_us = center.run(elect(center.context, self.name, LEASE))
        received = time.monotonic()
        step = self._home.sample(now_us, began, received)
        if step > 0:
            self._stepped(step)
        if mine:
            self._elected_until = began + LEASE
        elif somebody:
            self._known_until = received + LEASE + ATTEMPT_INTERVAL
        return mine

    def _stepped(self, seconds: float) -> None:
        self._say(
            logging.WARNING,
            "the server's clock was set forward by %.1f seconds: leases are renewed at once",
            seconds,
        )
        self._beat()

    # -- in the thread that does the work

    def _run(self) -> None:
        center: TimeoutCenter | None = None
        try:
            center = self._make_center()
            self._work(center)
        except BROKEN as exc:
            self._complain("broken", "cannot keep the queues up for now: %s", exc)
        except Exception as exc:
            self._say(logging.ERROR, "cannot keep the queues up: %s", exc, error=exc)
            self.due = time.monotonic() + COMPLAIN_AGAIN
        finally:
            if center is not None:
                center.client.close()
                center.client.connection_pool.disconnect()
                unpatched_threading().leave()
            self._working = False

    def _work(self, center: TimeoutCenter) -> None:
        watches = self._watches
        if not center.clustered:
            watches[None] = self._home  # watched since before it was elected
        upkeep = Upkeep(
            center.runner,
            center.registry,
            center.context,
            watches,
            in_time=self._in_time,
            tell=lambda event: self._tell(center, event),
            on_step=self._stepped,
        )

        def goes_on() -> bool:
            began = time.monotonic()
            if began < self._elected_until - LEASE * 2 / 3:
                return self.wanted
            return self.wanted and self._elect(center, began)

        try:
            while goes_on():
                began = time.monotonic()
                upkeep.run(goes_on)
                for topic, error in upkeep.refused.items():
                    self._complain(topic, "cannot keep queue %s up: %s", topic, error)
                interval = min(self._wanted.values(), default=0.0)
                self._bell.wait(max(began + interval - time.monotonic(), 0.001))
        finally:
            self._elected_until = 0.0
            with suppress(*BROKEN):
                center.run(elect(center.context, self.name, 0))

    def _tell(self, center: TimeoutCenter, event: Event) -> None:
        topic, rolled_back, died, dropped = event
        declared = center.known(topic)
        if declared is not None:
            center.metrics.counts(declared).kept(len(rolled_back), len(died), len(dropped))
        names = task_names(center, topic, rolled_back + died)
        for id in rolled_back:
            self._say(
                logging.WARNING,
                "message %s of %s%s: its lease ended, it is delivered again",
                *(id, topic, names[id]),
            )
        for id in died:
            self._say(
                logging.ERROR,
                "message %s of %s%s: no retries left, it is in DeadQueue",
                *(id, topic, names[id]),
            )
        if dropped:
            shown = ", ".join(dropped[:MAX_NAMED]) + (", ..." if len(dropped) > MAX_NAMED else "")
            self._say(
                logging.WARNING,
                "DeadQueue of %s: %d messages dropped, for they are too old or too many: %s",
                *(topic, len(dropped), shown),
            )

    def _complain(self, about: str, text: str, *args: Any) -> None:
        now = time.monotonic()
        if now >= self._complaints.get(about, 0.0):
            self._complaints[about] = now + COMPLAIN_AGAIN
            self._say(logging.WARNING, text, *args)
