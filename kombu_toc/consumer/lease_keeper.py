"""Renews, from a thread, what this process holds on a server.

That is: the leases of delivered messages, transient queues and bindings, which queues it
consumes, and what could not be done because a connection broke: an acknowledgement counts however
late it comes. It also sends what the process has counted. One lease keeper per process and
server, whatever happens to Kombu's connections. Its thread is a native one in every pool: a task
may block everything else.

What is held and owed is in passive parts (:mod:`.holdings`), which ask no server;
:class:`.threads.BeatThread` says when it is seen to.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from redis import exceptions

from ..center.calls import announce_presence
from ..center.center import TimeoutCenter
from ..center.exchanges import Bindings
from ..client.errors import is_temporary
from ..errors import TocError
from ..metrics import INTERVAL, Metrics
from ..model.results import Delivery
from ..scripts.call import ScriptCall
from . import holdings
from .connections import BROKEN
from .holdings import KEPT, UnansweredPop, UnansweredPops, describe
from .threads import BeatThread, DeferredLog, unpatched_threading
from .upkeeper import Look, Upkeeper, sweep

logger = logging.getLogger(__name__)

#: Messages that one warning names at most.
MAX_NAMED = 10

#: Seconds that a process waits at its end until what is owed is done.
LAST_WORDS = 2.0

#: Seconds between two attempts meanwhile.
LAST_TRIES = 0.1

#: Seconds after a topic's time is over that it is looked whether it has expired: clocks differ in
#: their pace, and the server's was read before.
EXPIRED = 0.1

_keepers: dict[Hashable, LeaseKeeper] = {}


def _after_fork() -> None:
    # The child holds nothing of what the parent was delivered, and the thread is not in it.
    for keeper in _keepers.values():
        keeper.reset()
    _keepers.clear()


def _at_exit() -> None:
    deadline = time.monotonic() + LAST_WORDS
    for keeper in list(_keepers.values()):
        keeper.finish(deadline)
        keeper.flush_deferred_logs()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)


class LeaseKeeper:
    """The lease keeper of a process and a server. Any thread may call it; nothing waits for the
    server, but where it says so.

    make_center: gives it a center with a client of its own
    metrics: what the process counts
    """

    def __init__(
        self, make_center: Callable[[], TimeoutCenter], metrics: Metrics | None = None
    ) -> None:
        self._make_center = make_center
        self._metrics = metrics or Metrics(active=False)
        self.reset()

    @classmethod
    def of(
        cls,
        identity: Hashable,
        make_center: Callable[[], TimeoutCenter],
        metrics: Metrics | None = None,
    ) -> LeaseKeeper:
        """The one of this process for a server."""
        found = _keepers.get(identity)
        return found or _keepers.setdefault(identity, cls(make_center, metrics))

    def reset(self) -> None:
        """Hold nothing, owe nothing, and have no thread."""
        native = unpatched_threading()
        #: held for moments, within which no greenlet yields. It is reentrant: garbage may be
        #: collected meanwhile, and a channel that is garbage leaves what it held
        self.lock = lock = native.rlock()
        self.leases = holdings.Leases(lock)
        #: what was acknowledged while its task runs on
        self.early_acks = holdings.EarlyAcks(lock)
        #: transient queues, and their bindings (exchange, binding), that are kept from going stale
        self.topics: holdings.KeptFresh[str] = holdings.KeptFresh(lock, min)
        self.bindings: holdings.KeptFresh[tuple[str, str]] = holdings.KeptFresh(lock, max)
        self.expiries = holdings.Expiries(lock)
        self.presence = holdings.Presence(lock, socket.gethostname(), os.getpid())
        #: calls that must run and could not, in order; each may run twice without harm
        self.calls: list[ScriptCall] = []
        self.deletions = holdings.OwedDeletions(native.rlock)
        #: what is being delivered, and what was to be
        self.flights = UnansweredPops(native.rlock)
        # Straight to the part that does it: it is called for every message.
        self.drop = self.leases.drop
        self._thread = thread = BeatThread(self._run, lock)
        self._log = DeferredLog(logger, lambda: thread.patched)
        self.flush_deferred_logs = self._log.flush
        #: queues that could not be refreshed
        self._unrefreshed: set[str] = set()
        self._swept = 0.0
        #: what a node of a Cluster did not do, in this beat, for it could not be reached
        self._broken: list[Exception] = []
        #: takes part in keeping all topics up
        self.upkeeper = Upkeeper(self, self._make_center, self._log)

    # -- leases

    def hold(self, delivery: Delivery, visibility: float, now_us: int | None = None) -> None:
        """Renew this message's lease until it is dropped: see :meth:`hold_all`."""
        self.hold_all([delivery], visibility, now_us)

    def hold_all(self, some: Iterable[Delivery], visibility: float, now_us: int | None) -> None:
        """Renew the leases of these until they are dropped.

        visibility: seconds, of their topic
        now_us: what the server's clock shows; given, they may have traits of their own
        """
        self._log.flush()
        now, first = time.monotonic(), visibility / holdings.BEATS_PER_LEASE
        for delivery in some:
            if now_us is None or not (";" in delivery.birth or "!" in delivery.birth):
                self.leases.hold(delivery, visibility, now)
                continue
            own, ends = delivery.visibility or visibility, None
            first = min(first, own / holdings.BEATS_PER_LEASE)
            if delivery.ends_us is not None:
                lasts = (delivery.ends_us - now_us) / 1_000_000
                ends, first = now + lasts, min(first, max(lasts, 0.0) + holdings.AFTER_END)
            self.leases.hold(delivery, own, now, ends, visibility)
        self._thread.beat_within(first)

    def refresh(self) -> None:
        """Renew leases at once, and say anew what this process keeps: queues, bindings, that it
        consumes. The server may have lost its memory."""
        self._thread.beat_within(0.0)

    def in_time(self, topic: str | None = None, slots: Collection[int] | None = None) -> bool:
        """Whether every lease held here still lasts: see :meth:`.holdings.Leases.in_time`."""
        return self.leases.in_time(time.monotonic(), topic, slots)

    # -- transient queues, and who consumes what

    def keep_topic(self, name: str, expires_ms: int, holder: Hashable) -> None:
        """Keep a transient topic from going stale until its last holder leaves it."""
        self.topics.keep(name, expires_ms, holder)
        self._thread.beat_within(expires_ms / 1000 / holdings.BEATS_PER_LEASE)

    def keep_binding(self, exchange: str, binding: str, ttl_ms: int, holder: Hashable) -> None:
        """Keep a transient queue's binding from going stale until its last holder leaves it."""
        self.bindings.keep((exchange, binding), ttl_ms, holder)
        self._thread.beat_within(ttl_ms / 1000 / holdings.BEATS_PER_LEASE)

    def look_after(self, name: str, expires_ms: int) -> None:
        """A topic was used just now: look when that time is over whether it has expired."""
        seconds = expires_ms / 1000 + EXPIRED
        self.expiries.note(name, time.monotonic() + seconds)
        self._thread.beat_within(seconds)

    def consumes(self, queue: str, holder: Hashable) -> None:
        """A channel consumes a queue: others may know."""
        self.presence.add(queue, holder)
        self._thread.beat_within(holdings.PRESENCE_CHANGE)

    def consumes_no_more(self, queue: str, holder: Hashable) -> None:
        if self.presence.remove(queue, holder):
            self._thread.beat_within(0.0)

    def leave_all(self, holder: Hashable) -> None:
        """A channel is closed."""
        self.topics.leave_all(holder)
        self.bindings.leave_all(holder)
        if self.presence.remove_all(holder):
            self._thread.beat_within(0.0)

    def delete_later(self, queue: str, bindings: Mapping[str, Sequence[str]]) -> None:
        """Delete a transient queue as soon as the server can be reached.

        bindings: exchange -> the queue's bindings to it, as they are in Redis
        """
        self.deletions.owe(queue, bindings)
        self._thread.beat_within(0.0)

    def withdraw_deletion(self, queue: str, sleep: Callable[[float], None] = time.sleep) -> None:
        """To be called before a transient queue is declared or bound: the one that is to be deleted
        is another. Waits for moments if a call that deletes it is on its way.

        sleep: how the caller waits
        """
        while self.deletions.withdraw(queue, time.monotonic()):
            sleep(0.005)  # it is answered, or refused, soon

    # -- keeping all topics up

    def keep_up(
        self, who: Hashable, interval: float, on_step: Callable[[int, float], None] | None = None
    ) -> None:
        """Somebody consumes here for long: take part in keeping all topics up, of which one
        process at a time makes a pass every so many seconds.

        on_step: called in the keeper's thread when the server's clock was set forward, with what it
            showed in microseconds by which monotonic seconds
        """
        with self.lock:
            self.upkeeper.want(who, interval, on_step)
        self._thread.beat_within(holdings.RETRY_INTERVAL)

    def keep_up_also(self, what: Hashable, look: Look) -> None:
        """Look after this, too, whenever this process is the one that does among those that can."""
        self.upkeeper.looks[what] = look

    def leave_up(self, who: Hashable) -> None:
        """Somebody who called :meth:`keep_up` consumes no more."""
        with self.lock:  # else one that wants it just now might be forgotten
            self.upkeeper.unwant(who)

    @property
    def kept_up(self) -> bool:
        """Whether this process or another is known to keep all topics up."""
        return self.upkeeper.election.known(time.monotonic())

    # -- what could not be done

    def expect(self, flight: UnansweredPop) -> None:
        """Renew what this pop gives as long as its reply is on its way."""
        self.flights.expect(flight)
        thread, seconds = self._thread, flight.visibility / holdings.BEATS_PER_LEASE
        if not thread.running or time.monotonic() + seconds < thread.due:
            thread.beat_within(seconds)

    def lose(self, flight: UnansweredPop) -> None:
        """Its reply will not come: give back what it gave, unless a consumer asks for it soon."""
        if self.flights.lose(flight):
            self._thread.beat_within(KEPT)

    def retry_later(self, calls: list[ScriptCall]) -> None:
        """Run these as soon as the server can be reached."""
        self.calls += calls
        self._thread.beat_within(holdings.RETRY_INTERVAL)

    def finish(self, deadline: float) -> None:
        """The process ends: wait until the calls that are owed have run, and nobody reads any more
        that it consumes.

        deadline: monotonic seconds; whatever has not run by then is given up
        """
        if not self.presence.end() and not self.calls and not self.early_acks:
            return
        self.early_acks.process_ends = True
        self._thread.beat_within(0.0)
        # What a process has announced ends by itself, within a minute.
        patience = min(deadline, time.monotonic() + holdings.PRESENCE_CHANGE)
        while self.presence and time.monotonic() < patience:
            self._thread.pause(0.005)
        while self.calls or self.early_acks:
            if time.monotonic() >= deadline:
                logger.warning(
                    "%d calls that settle messages are not said, for the server cannot be reached; "
                    "the messages come back when their leases end",
                    len(self.calls) + bool(self.early_acks),
                )
                return
            # The server may be back within what is left of the time.
            self._thread.beat_within(LAST_TRIES)
            self._thread.pause(0.005)

    # -- the thread

    def _run(self) -> None:
        made: list[TimeoutCenter] = []
        #: monotonic seconds since when not all is renewed; None: all is
        failing: float | None = None

        def reach() -> TimeoutCenter:
            if not made:
                made.append(self._make_center())
            return made[0]

        try:
            while self._wait(reach):
                try:
                    center = reach()
                    began = time.monotonic()
                    self._thread.schedule(self._next_beat, began)
                    self.beat(center, began)
                except BROKEN as exc:
                    if failing is None:
                        failing = time.monotonic()
                        self._log.log(
                            logging.WARNING, "cannot renew leases for now, will retry: %s", exc
                        )
                    self._thread.beat_within(holdings.RETRY_INTERVAL)
                except Exception as exc:
                    self._log_error(exc)
                else:
                    if failing is not None:
                        lasted, failing = time.monotonic() - failing, None
                        self._log.log(
                            logging.WARNING, "leases are renewed again, after %.0f seconds", lasted
                        )
        except BaseException:
            self._thread.has_ended()
            raise
        finally:
            for center in made:
                center.client.close()
                center.client.connection_pool.disconnect()
                self._thread.leave()

    def _wait(self, reach: Callable[[], TimeoutCenter]) -> bool:
        """Until the next beat; False if there is nothing to beat for."""
        while (wait := self._thread.due - time.monotonic()) > 0:
            until_attempt = max(self.upkeeper.election.due - time.monotonic(), 0.0)
            self._thread.sleep(min(wait, until_attempt, INTERVAL))
            if time.monotonic() >= self._metrics.due:
                self._send_metrics(reach)
            if time.monotonic() >= self.upkeeper.election.due:
                self._elect(reach)
        if self._is_idle():
            self._send_metrics(reach)
        return not self._thread.ends_if(
            self._is_idle, time.monotonic() + holdings.RETRY_INTERVAL, self.leases.rest
        )

    def _is_idle(self) -> bool:
        held = self.leases, self.topics, self.bindings, self.expiries, self.presence
        owed = self.calls, self.deletions, self.flights, self.upkeeper.election.wanted
        return not any((*held, *owed))

    def _next_beat(self, now: float) -> float:
        """When what is held now is to be seen to after now."""
        kept = (*self.topics.lifetimes().values(), *self.bindings.lifetimes().values())
        lifetimes = [self.leases.shortest(), self.flights.shortest(), *(ms / 1000 for ms in kept)]
        ends_at = min(self.flights.kept_until(), self.leases.first_end() + holdings.AFTER_END)
        due = holdings.next_beat(now, lifetimes, ends_at)
        return min(due, self.expiries.next(now, holdings.RETRY_INTERVAL))

    def _send_metrics(self, reach: Callable[[], TimeoutCenter]) -> None:
        if self._metrics.active:
            with suppress(*BROKEN):
                self._log_else(lambda: self._metrics.send(reach().runner))

    def _elect(self, reach: Callable[[], TimeoutCenter]) -> None:
        try:
            self._log_else(lambda: self.upkeeper.attempt(reach()))
        except BROKEN as exc:
            self._log.log(
                logging.DEBUG, "no part in the election of who keeps the queues up: %s", exc
            )

    def _log_else(self, what: Callable[..., Any], *args: Any) -> None:
        """Do it; log what is not a broken connection, and go on."""
        try:
            what(*args)
        except BROKEN:
            raise
        except Exception as exc:
            self._log_error(exc)

    # -- one beat

    def beat(self, center: TimeoutCenter, began: float) -> None:
        """See to what is held: one beat, which began at that time, in monotonic seconds. For one
        thread, which waits for the server.

        Raises what a broken connection raises, on a Cluster after all the rest was done.
        """
        self._broken = []
        if self.early_acks.process_ends:
            self._acknowledge_ended(center)
        self._attempt(center, self._run_owed_calls, center)
        self._attempt(center, self._renew_leases, center, began)
        for deletion in self.deletions.pending():
            self._attempt(center, self._delete, center, deletion)
        for flight in self.flights.flying():
            self._attempt(
                center, center.runner.run, flight.recalling(center, bodies=False, remember=0)
            )
        for flight in self.flights.take_kept():
            self._attempt(center, self._release_flight, center, flight)
        self._refresh(center)
        if self.presence.is_due(time.monotonic()):
            self._attempt_home(center, self._announce_presence, center)
        expired = self.expiries.take(time.monotonic())
        if expired or time.monotonic() - self._swept > holdings.SWEEP_INTERVAL:
            self._swept = time.monotonic()
            self._attempt_home(center, sweep, center, self._log.log)
        if self._broken:
            raise self._broken[0]

    def _attempt(self, center: TimeoutCenter, what: Callable[..., Any], *args: Any) -> bool:
        """Do it; whether the server could be reached."""
        # Neither what is refused in one place nor a node that is away may keep the rest from
        # being renewed. On one server, all the rest would fail as well, if after a while.
        try:
            self._log_else(what, *args)
        except BROKEN as exc:
            if not center.clustered:
                raise
            self._broken.append(exc)
            return False
        return True

    def _attempt_home(self, center: TimeoutCenter, what: Callable[..., Any], *args: Any) -> bool:
        """The same for what concerns keys of no single slot: while their node is away, that does
        not hold up the renewal of leases on the others."""

        home = center.runner.at_home, center.keys.topics
        return self._attempt(center, *home, partial(what, *args), _raise)

    def _log_error(self, exc: Exception) -> None:
        """Log what does not pass by itself."""
        known = isinstance(exc, (TocError, exceptions.ResponseError))
        self._log.log(logging.ERROR, "cannot renew leases: %s", exc, error=None if known else exc)

    # -- what is owed

    def _acknowledge_ended(self, center: TimeoutCenter) -> None:
        """The process ends, and what it executes."""
        ended = self.early_acks.take_all()
        for delivery in ended:
            self.leases.drop(delivery)
        self.calls += center.commands.ack(ended)

    def _run_owed_calls(self, center: TimeoutCenter) -> None:
        taken = list(self.calls)  # others may add to them
        again: list[ScriptCall] = []
        refused: list[Exception] = []
        try:
            for call, result in zip(taken, center.runner.run_each(taken), strict=True):
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
            self.calls[: len(taken)] = again
        if again:
            self._thread.beat_within(holdings.RETRY_INTERVAL)
        if refused:
            self._log.log(logging.ERROR, "cannot settle %d messages: %s", len(refused), refused[0])

    def _delete(self, center: TimeoutCenter, deletion: holdings.Deletion) -> None:
        """Delete a queue that could not be deleted when it was left."""
        try:
            holdings.delete(center, self.deletions, deletion, time.monotonic)
        except BROKEN:
            raise
        except Exception as exc:
            if not is_temporary(exc):
                self.deletions.done(deletion)  # it goes stale
                raise
        if self.deletions:
            self._thread.beat_within(holdings.RETRY_INTERVAL)

    def _release_flight(self, center: TimeoutCenter, flight: UnansweredPop) -> None:
        """Release what a pop gave to nobody."""
        try:
            left = center.runner.run(flight.recalling(center, bodies=False)).messages
            center.runner.run_all(center.commands.release(left))
        except BaseException:
            self.flights.lose(flight)  # to be tried again
            raise

    # -- what is held

    def _renew_leases(self, center: TimeoutCenter, began: float) -> None:
        leases = self.leases
        held = leases.due(began, self._thread.due)
        calls = [
            ((topic, slot), call)
            for (topic, slot, visibility), deliveries in holdings.by_place(held).items()
            for call in center.commands.extend(deliveries, visibility)
        ]
        lost: list[Delivery] = []
        failed: dict[holdings.Place, Exception] = {}
        results = center.runner.run_each([call for _, call in calls])
        overran = leases.take_overran()  # not before: this is told once, when the server is back
        for (place, _), result in zip(calls, results, strict=True):
            if isinstance(result, Exception):
                failed.setdefault(place, result)
            else:
                for delivery in filter(leases.lose, result):
                    (overran if delivery in result.overran else lost).append(delivery)
        leases.renewed(began, failed, {visibility for _, visibility in held})
        if acknowledged := [one for one in lost if self.early_acks.drop(one)]:
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
            center.context.counts(center.registry.topic_of(delivery)).overran += 1
            self._log.log(
                logging.WARNING,
                "message %s: its max lease has passed although its consumer lives (max_lease, "
                "x-max-lease or toc_max_lease); it is delivered again, with one retry less",
                describe(delivery),
            )
        self._broken += [exc for exc in failed.values() if isinstance(exc, BROKEN)]
        refused = [exc for exc in failed.values() if not isinstance(exc, BROKEN)]
        if refused:
            raise refused[0]

    def _refresh(self, center: TimeoutCenter) -> None:
        """Keep transient queues and their bindings from going stale."""
        lifetimes = self.topics.lifetimes()
        # Those that are missed last: a node that hangs takes its time with each, and the leases
        # are due again.
        for name in sorted(lifetimes, key=self._unrefreshed.__contains__):
            if self._broken and time.monotonic() >= self._thread.due:
                break
            if name not in self.topics:
                continue  # deleted since: it must not be declared again
            if self._attempt_home(center, center.expiring.refresh, name, lifetimes[name]):
                self._unrefreshed.discard(name)
            else:
                self._unrefreshed.add(name)
        self._unrefreshed &= lifetimes.keys()
        for bound, lifetime_ms in self.bindings.lifetimes().items():
            if bound in self.bindings:
                self._attempt(center, Bindings(center).add, *bound, lifetime_ms)
            if bound not in self.bindings:  # undone meanwhile, and perhaps added again here
                self._attempt(center, Bindings(center).remove, *bound)

    def _announce_presence(self, center: TimeoutCenter) -> None:
        """Tell which queues this process consumes."""
        statement, before = self.presence.next(time.monotonic())
        if statement or before:
            try:
                center.runner.run(
                    announce_presence(center.keys, statement, before, holdings.PRESENCE_MS)
                )
            except BaseException:
                self.presence.failed()
                raise
        self.presence.announced(statement)


def _raise(error: Exception) -> Any:
    raise error


def named(lost: list[Delivery]) -> str:
    """Messages, for a warning."""
    shown = ", ".join(describe(one) for one in lost[:MAX_NAMED])
    return shown + (f" and {len(lost) - MAX_NAMED} more" if len(lost) > MAX_NAMED else "")
