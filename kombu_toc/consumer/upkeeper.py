"""One process of a fleet keeps all topics in order: see :mod:`kombu_toc.center.upkeep`."""

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
from ..center.clock import Watch
from ..center.exchanges import Bindings
from ..center.upkeep import Event, Upkeep, elect
from ..errors import NotPermittedError
from .connections import BROKEN
from .holdings import log_kept
from .threads import DeferredLog, WakeEvent, unpatched_threading

# -- which process of a fleet keeps all topics up
#
# Nothing here waits or asks the server; times are monotonic seconds.

#: Seconds for which a process is elected unless it is again. The others try when that has passed:
#: with the time between two passes it is no gap to who watches leases (``upkeep.lua``).
LEASE = 2.0

#: Seconds between attempts, at most.
ATTEMPT_INTERVAL = 2.0

NEVER = float("inf")


class Election:
    """One process's part in the election. Any thread may call this."""

    def __init__(self) -> None:
        #: who wants it to take part -> seconds between two passes
        self._wanted: dict[Hashable, float] = {}
        self._next = 0.0
        #: until when somebody else is known to be elected, and this process
        self._other_until = 0.0
        self._elected_until = 0.0

    def want(self, who: Hashable, interval: float) -> None:
        """Somebody consumes here: take part, with a pass every so many seconds if elected."""
        if not self._wanted:
            self._next = 0.0
        self._wanted[who] = interval

    def unwant(self, who: Hashable) -> bool:
        """They consume no more. Returns whether anybody else does."""
        self._wanted.pop(who, None)
        return self.wanted

    @property
    def wanted(self) -> bool:
        return bool(self._wanted)

    @property
    def interval(self) -> float:
        """Seconds between two passes."""
        return min(self._wanted.values(), default=0.0)

    @property
    def due(self) -> float:
        """Monotonic seconds of the next attempt to be elected. Never while nobody consumes, also
        if they left while an attempt was under way: it would be elected, and do nothing."""
        return self._next if self._wanted else NEVER

    def again(self, at: float) -> None:
        """Make the next attempt at that time."""
        self._next = at

    def result(self, mine: bool, somebody: bool, asked: float, answered: float) -> None:
        """An attempt was made.

        mine: whether this process is elected; somebody: whether any is
        asked, answered: when the server was asked, and when its answer came
        """
        if mine:
            self._elected_until = asked + LEASE
        elif somebody:
            self._other_until = answered + LEASE + ATTEMPT_INTERVAL

    def resign(self) -> None:
        """This process is elected no longer."""
        self._elected_until = 0.0

    def elected(self, now: float) -> bool:
        """Whether it is this process, as far as it knows."""
        return now < self._elected_until

    def known(self, now: float) -> bool:
        """Whether some process is known to be elected."""
        return self.elected(now) or now < self._other_until

    def renewal_due(self, now: float) -> bool:
        """Whether this process is to be elected again, to go on."""
        return now >= self._elected_until - LEASE / 2


# -- deletes what others have left behind

logger = logging.getLogger(__name__)

#: Stale topics and exchanges that one look deletes at most.
SWEEP_MOST = 100


def sweep(center: TimeoutCenter, log: Callable[..., None] = logger.log) -> list[str]:
    """Delete the transient queues and bindings that nobody has refreshed; return their names.

    log: logs, as :meth:`logging.Logger.log`
    """
    stale = center.expiring.stale(SWEEP_MOST)
    bindings = Bindings(center)
    for member in stale:
        kind, _, name = member.partition(":")
        if kind == "topic":
            log(logging.INFO, "deleting queue %s: it went stale", name)
            center.queues.delete(name, if_undeclared=True)
        else:
            bindings.remove(name)
    return stale


# -- one process of a fleet keeps all topics in order
#
# Every consuming process tries now and then to become that one; it is, as long as it renews a short
# lease in Redis. The work is done in a native thread with a connection of its own, which is there
# in that one process only: it goes on also while a task blocks everything else, and nothing waits
# for it.

#: Seconds between attempts where they fail.
FAILED_INTERVAL = 5.0

#: Seconds after which the same complaint is made again.
COMPLAIN_AGAIN = 300.0

_host = socket.gethostname()


#: Called with a center, what logs (as `DeferredLog.log`), and what tells whether to go on.
Look = Callable[[TimeoutCenter, Callable[..., None], Callable[[], bool]], None]


class Upkeeper:
    """Takes part in the election, and does the work when elected.

    Its methods but :meth:`attempt` may be called by any thread; none but that waits for Redis.

    keeper: the lease keeper, which knows whether the leases that this process holds still last
    log: logs from a native thread
    """

    def __init__(
        self, keeper: Any, make_center: Callable[[], TimeoutCenter], log: DeferredLog
    ) -> None:
        self._keeper, self._make_center, self._log = keeper, make_center, log
        self._bell = WakeEvent(unpatched_threading().lock)
        self.name = f"{_host}:{os.getpid()}:{uuid4().hex[:12]}"
        self.election = Election()
        #: its part in the election of who does what :attr:`looks` has: only some can
        self._also = Election()
        #: whether this user has the rights that it takes
        self._may = False
        self.working = False
        #: what was seen of the server, or of each node of a Cluster
        self._watches: dict[Hashable, Watch] = {}
        self._home = Watch()
        #: complaint -> monotonic seconds after which it is made again
        self._complaints: dict[str, float] = {}
        #: what one process looks after among those that have such a look: called in this thread
        self.looks: dict[Hashable, Look] = {}
        #: who is told that the server's clock was set forward: in this thread, with what it showed
        #: in microseconds, and the monotonic seconds by which it did
        self._on_step: dict[Hashable, Callable[[int, float], None]] = {}

    def want(
        self, who: Hashable, interval: float, on_step: Callable[[int, float], None] | None = None
    ) -> None:
        """Somebody consumes here: see to it that the topics are kept up, here or elsewhere, with a
        pass every so many seconds; and that they hear of a clock that was set forward."""
        self.election.want(who, interval)
        if on_step is not None:
            self._on_step[who] = on_step

    def unwant(self, who: Hashable) -> None:
        """They consume no more."""
        self._on_step.pop(who, None)
        if not self.election.unwant(who):
            self._bell.ring()

    # -- in the lease keeper's thread

    def attempt(self, center: TimeoutCenter) -> None:
        """Try to be elected."""
        began, election = time.monotonic(), self.election
        if self.working:
            election.again(began + ATTEMPT_INTERVAL)
            return
        election.again(began + FAILED_INTERVAL)
        if not self._may:
            election.again(began + COMPLAIN_AGAIN)
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
        mine, left = self._elect(center, time.monotonic())
        election.again(time.monotonic() + min(max(left, 0.0) + 0.01, ATTEMPT_INTERVAL))
        if mine:  # and resigns at once if nobody consumes any more
            self.working = True
            try:
                unpatched_threading().start(self._run)
            except BaseException:  # there may be too many threads just now
                self.working = False
                raise

    def _duties(self, center: TimeoutCenter) -> list[str]:
        """The keys of what this process can do for all topics."""
        return [center.keys.upkeep, *([center.keys.upkeep_also] if self.looks else ())]

    def _elect(self, center: TimeoutCenter, began: float) -> tuple[bool, float]:
        """Try to be elected, or to be so for longer. Returns whether this process is, for anything,
        and for how many seconds whoever is."""
        now_us, answers = center.runner.run(elect(self.name, LEASE, self._duties(center)))
        received = time.monotonic()
        step = self._home.sample(now_us, began, received)
        if step > 0:
            self._stepped(step)
            for tell in list(self._on_step.values()):
                tell(now_us, received)
        for election, (mine, left) in zip((self.election, self._also), answers, strict=False):
            election.result(mine, left > 0, began, received)
        return any(mine for mine, _ in answers), min(left for _, left in answers)

    def _stepped(self, seconds: float) -> None:
        self._log.log(
            logging.WARNING,
            "the server's clock was set forward by %.1f seconds: leases are renewed at once",
            seconds,
        )
        self._keeper.refresh()

    # -- in the thread that does the work

    def _run(self) -> None:
        center: TimeoutCenter | None = None
        try:
            center = self._make_center()
            self._work(center)
        except BROKEN as exc:
            self._complain("broken", "cannot keep the queues up for now: %s", exc)
        except Exception as exc:
            self._log.log(logging.ERROR, "cannot keep the queues up: %s", exc, error=exc)
            self.election.again(time.monotonic() + COMPLAIN_AGAIN)
        finally:
            self.working = False
            if center is not None:
                center.client.close()
                center.client.connection_pool.disconnect()
                unpatched_threading().leave()

    def _work(self, center: TimeoutCenter) -> None:
        watches, election, also = self._watches, self.election, self._also
        if not center.clustered:
            watches[None] = self._home  # watched since before it was elected
        upkeep = Upkeep(
            center.runner,
            center.registry,
            center.context,
            watches,
            in_time=self._keeper.in_time,
            tell=lambda event: self._tell(center, event),
            on_step=self._stepped,
        )

        def goes_on() -> bool:
            now = time.monotonic()
            if not election.wanted:
                return False
            known = election.elected(now) or also.elected(now)
            due = any(one.elected(now) and one.renewal_due(now) for one in (election, also))
            return self._elect(center, now)[0] if due or not known else True

        try:
            while goes_on():
                began = time.monotonic()
                if election.elected(began):
                    upkeep.run(goes_on)
                    for topic, error in upkeep.refused.items():
                        self._complain(topic, "cannot keep queue %s up: %s", topic, error)
                    if upkeep.expires:
                        sweep(center, self._log.log)
                for what, look in tuple(self.looks.items()):
                    if not also.elected(time.monotonic()):
                        break
                    try:
                        look(center, self._log.log, goes_on)
                    except BROKEN:
                        raise
                    except Exception as exc:  # the queues are kept up all the same
                        self._complain(str(what), "cannot look after what recurs: %r", exc)
                self._bell.wait(max(began + election.interval - time.monotonic(), 0.001))
        finally:
            election.resign()
            also.resign()
            with suppress(*BROKEN):
                center.runner.run(elect(self.name, 0, self._duties(center)))

    def _tell(self, center: TimeoutCenter, event: Event) -> None:
        declared = center.registry.known(event.topic)
        if declared is not None:
            counts = center.metrics.counts(declared)
            counts.kept(len(event.rolled_back), len(event.died), len(event.dropped))
            counts.expire(len(event.expired), event.to_dead)
        log_kept(center, event.topic, event, log=self._log.log)

    def _complain(self, about: str, text: str, *args: Any) -> None:
        now = time.monotonic()
        if now >= self._complaints.get(about, 0.0):
            self._complaints[about] = now + COMPLAIN_AGAIN
            self._log.log(logging.WARNING, text, *args)
