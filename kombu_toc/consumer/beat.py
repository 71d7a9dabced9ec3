"""One beat: what a process holds is renewed, and what it owes is done."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from redis import exceptions

from ..center.calls import announce_presence
from ..center.center import TimeoutCenter
from ..center.exchanges import Bindings
from ..client.errors import is_temporary
from ..errors import TocError
from ..model.results import Delivery
from ..scripts.call import ScriptCall
from .deferred_log import DeferredLog
from .deletions import Deletion, delete
from .flights import Flight
from .holdings import RETRY_INTERVAL, SWEEP_INTERVAL, Holdings
from .leases import Place, by_place
from .pipe import BROKEN
from .presence import PRESENCE_MS
from .sweeping import sweep
from .wording import in_words

logger = logging.getLogger(__name__)

#: Messages that one warning names at most.
MAX_NAMED = 10


class Beat:
    """Sees to what a process holds. For one thread, which waits for the server.

    log: logs from that thread
    beat_within: has the next beat begin within so many seconds
    due: tells monotonic seconds of the next beat
    """

    def __init__(
        self,
        holdings: Holdings,
        log: DeferredLog,
        beat_within: Callable[[float], None],
        due: Callable[[], float],
    ) -> None:
        self._holdings = holdings
        self._log = log
        self._beat_within = beat_within
        self._due = due
        #: queues that could not be refreshed
        self._unrefreshed: set[str] = set()
        self._swept = 0.0
        #: what a node of a Cluster did not do, in this beat, for it could not be reached
        self._broken: list[Exception] = []

    def run(self, center: TimeoutCenter, began: float) -> None:
        """Do one beat, which began at that time, in monotonic seconds.

        Raises what a broken connection raises, on a Cluster after all the rest was done.
        """
        holdings = self._holdings
        self._broken = []
        if holdings.early_acks.process_ends:
            self._acknowledge_ended(center)
        self._attempt(center, self._run_owed_calls, center)
        self._attempt(center, self._renew_leases, center, began)
        for deletion in holdings.deletions.pending():
            self._attempt(center, self._delete, center, deletion)
        for flight in holdings.flights.flying():
            self._attempt(center, center.run, flight.holding(center))
        for flight in holdings.flights.take_kept():
            self._attempt(center, self._release_flight, center, flight)
        self._refresh(center)
        if holdings.presence.is_due(time.monotonic()):
            self._attempt(center, self._announce_presence, center)
        expired = holdings.expiries.take(time.monotonic())
        if expired or time.monotonic() - self._swept > SWEEP_INTERVAL:
            self._swept = time.monotonic()
            self._attempt(center, sweep, center, self._log.log)
        if self._broken:
            raise self._broken[0]

    def _attempt(self, center: TimeoutCenter, what: Callable[..., Any], *args: Any) -> bool:
        """Do it; whether the server could be reached."""
        # Neither what is refused in one place nor a node that is away may keep the rest from
        # being renewed. On one server, all the rest would fail as well, if after a while.
        try:
            what(*args)
        except BROKEN as exc:
            if not center.clustered:
                raise
            self._broken.append(exc)
            return False
        except Exception as exc:
            self.log_error(exc)
        return True

    def log_error(self, exc: Exception) -> None:
        """Log what does not pass by itself."""
        known = isinstance(exc, (TocError, exceptions.ResponseError))
        self._log.log(logging.ERROR, "cannot renew leases: %s", exc, error=None if known else exc)

    # -- what is owed

    def _acknowledge_ended(self, center: TimeoutCenter) -> None:
        """The process ends, and what it executes."""
        ended = self._holdings.early_acks.take_all()
        for delivery in ended:
            self._holdings.leases.drop(delivery)
        self._holdings.calls.add(center.commands.ack(ended))

    def _run_owed_calls(self, center: TimeoutCenter) -> None:
        calls = self._holdings.calls
        taken = calls.take()
        again: list[ScriptCall] = []
        refused: list[Exception] = []
        try:
            for call, result in zip(taken, center.run_each(taken), strict=True):
                if isinstance(result, BROKEN) or (
                    isinstance(result, Exception) and is_temporary(result)
                ):
                    again.append(call)
                elif isinstance(result, Exception):
                    refused.append(result)
        except BROKEN:
            again = taken
            raise
        finally:
            calls.tried(again)
        if again:
            self._beat_within(RETRY_INTERVAL)
        if refused:
            self._log.log(logging.ERROR, "cannot settle %d messages: %s", len(refused), refused[0])

    def _delete(self, center: TimeoutCenter, deletion: Deletion) -> None:
        """Delete a queue that could not be deleted when it was left."""
        deletions = self._holdings.deletions
        try:
            delete(center, deletions, deletion, time.monotonic)
        except BROKEN:
            raise
        except Exception as exc:
            if not is_temporary(exc):
                deletions.done(deletion)  # it goes stale
                raise
        if deletions:
            self._beat_within(RETRY_INTERVAL)

    def _release_flight(self, center: TimeoutCenter, flight: Flight) -> None:
        """Release what a pop gave to nobody."""
        try:
            left = center.run(flight.returning(center)).messages
            center.run_all(center.commands.release(left))
        except BaseException:
            self._holdings.flights.lose(flight)  # to be tried again
            raise

    # -- what is held

    def _renew_leases(self, center: TimeoutCenter, began: float) -> None:
        leases = self._holdings.leases
        held = leases.due(began, self._due())
        calls = [
            ((topic, slot), call)
            for (topic, slot, visibility), deliveries in by_place(held).items()
            for call in center.commands.extend(deliveries, visibility)
        ]
        lost: list[Delivery] = []
        overran = leases.take_overran()
        failed: dict[Place, Exception] = {}
        results = center.run_each([call for _, call in calls])
        for (place, _), result in zip(calls, results, strict=True):
            if isinstance(result, Exception):
                failed.setdefault(place, result)
            else:
                for delivery in filter(leases.lose, result):
                    (overran if delivery in result.overran else lost).append(delivery)
        leases.renewed(began, failed, {visibility for _, visibility in held})
        acknowledged = [one for one in lost if self._holdings.early_acks.drop(one)]
        if acknowledged:
            lost = [one for one in lost if one not in acknowledged]
            self._log.log(
                logging.WARNING,
                "leases ended before they were renewed, so others start while these tasks run: %s",
                named(acknowledged),
            )
        if lost:
            self._log.log(
                logging.WARNING,
                "leases ended before they were renewed, the messages may be delivered again: %s",
                named(lost),
            )
        for delivery in overran:
            center.context.counts(center.topic(delivery.topic)).overran += 1
            self._log.log(
                logging.WARNING,
                "message %s: its max lease has passed although its consumer lives (max_lease, "
                "x-max-lease or toc_max_lease); it is delivered again, with one retry less",
                in_words(delivery),
            )
        self._broken += [exc for exc in failed.values() if isinstance(exc, BROKEN)]
        refused = [exc for exc in failed.values() if not isinstance(exc, BROKEN)]
        if refused:
            raise refused[0]

    def _refresh(self, center: TimeoutCenter) -> None:
        """Keep transient queues and their bindings from going stale."""
        topics = self._holdings.topics
        lifetimes = topics.lifetimes()
        # Those that are missed last: a node that hangs takes its time with each, and the leases
        # are due again.
        for name in sorted(lifetimes, key=self._unrefreshed.__contains__):
            if self._broken and time.monotonic() >= self._due():
                break
            if name not in topics:
                continue  # deleted since: it must not be declared again
            if self._attempt(center, center.refresh, name, lifetimes[name]):
                self._unrefreshed.discard(name)
            else:
                self._unrefreshed.add(name)
        self._unrefreshed &= lifetimes.keys()
        bindings = self._holdings.bindings
        for (exchange, binding), lifetime_ms in bindings.lifetimes().items():
            if (exchange, binding) in bindings:
                self._attempt(center, Bindings(center).add, exchange, binding, lifetime_ms)

    def _announce_presence(self, center: TimeoutCenter) -> None:
        """Tell which queues this process consumes."""
        presence = self._holdings.presence
        statement, before = presence.next(time.monotonic())
        if statement or before:
            try:
                center.run(announce_presence(center.keys, statement, before, PRESENCE_MS))
            except BaseException:
                presence.failed()
                raise
        presence.announced(statement)


def named(lost: list[Delivery]) -> str:
    """These, for a warning."""
    shown = ", ".join(in_words(one) for one in lost[:MAX_NAMED])
    return shown + (f" and {len(lost) - MAX_NAMED} more" if len(lost) > MAX_NAMED else "")
