"""Renews, from a thread, what this process holds on a server.

That is: the leases of delivered messages, transient queues and bindings, which queues it consumes,
and what could not be said because a connection broke: an acknowledgement counts however late it
comes. It also sends what the process has counted. One heartbeat per process and server, whatever
happens to Kombu's connections. Its thread is a native one in every pool: a task may block
everything else.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from redis import exceptions

from ..center.bindings import Bindings
from ..center.center import TimeoutCenter
from ..client.faults import is_temporary
from ..errors import TocError
from ..metrics.sender import INTERVAL, Metrics
from ..model.results import Delivery
from ..scripts.call import ScriptCall
from .deletions import Deletion, OwedDeletions, delete
from .flights import KEPT, Flight, Flights
from .native_threads import WakeEvent, unpatched_threading
from .pipe import BROKEN
from .snapshot import in_words
from .upkeeper import Upkeeper

logger = logging.getLogger(__name__)

#: Renewals within one lease: two may fail before it ends.
BEATS_PER_LEASE = 3

#: Seconds between attempts to say what is owed.
RETRY_INTERVAL = 1.0

#: Seconds that a process waits at its end until what is owed is said.
LAST_WORDS = 2.0

#: Seconds between looks for what others left behind.
SWEEP_INTERVAL = 15.0

#: Stale topics and exchanges that one look deletes at most.
SWEEP_MOST = 100

#: Milliseconds for which it is known what this process consumes, unless it says so again; seconds
#: after which it does; and within which it tells of a change.
PRESENCE_MS = 60_000
PRESENCE_INTERVAL = 15.0
PRESENCE_CHANGE = 0.5

#: Messages that one warning names at most.
MAX_NAMED = 10

_heartbeats: dict[Hashable, LeaseKeeper] = {}


def _after_fork() -> None:
    # The child holds nothing of what the parent was delivered, and the thread is not in it.
    for heartbeat in _heartbeats.values():
        heartbeat.reset()
    _heartbeats.clear()


def _at_exit() -> None:
    deadline = time.monotonic() + LAST_WORDS
    for heartbeat in list(_heartbeats.values()):
        heartbeat.finish(deadline)
        heartbeat.speak()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)


class LeaseKeeper:
    """See above. `make_center` gives it a center with a client of its own; `metrics` is what the
    process counts."""

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
        """The heartbeat of this process for a server."""
        found = _heartbeats.get(identity)
        return found or _heartbeats.setdefault(identity, cls(make_center, metrics))

    def reset(self) -> None:
        """Hold nothing, owe nothing, and have no thread."""
        self._held: dict[tuple[str, int, str], tuple[Delivery, float]] = {}
        #: queue -> who uses it -> milliseconds it lives without being refreshed
        self._topics: dict[str, dict[Hashable, int]] = {}
        self._bindings: dict[tuple[str, str], dict[Hashable, int]] = {}
        #: queue -> the channels that consume it
        self._consumed: dict[str, set[Hashable]] = {}
        #: what Redis was told of that, and monotonic seconds when it is told again
        self._present = ""
        self._present_due = 0.0
        self._owed: deque[ScriptCall] = deque()
        #: how much of what was owed is being said
        self._settling = 0
        self._native = here = unpatched_threading()
        # Held for moments, within which no greenlet yields. Reentrant, for garbage may be
        # collected within them, and a channel that is garbage leaves what it held.
        self._lock = here.rlock()
        self._bell = WakeEvent(here.lock)
        self._deletions = OwedDeletions(here.rlock)
        #: what is being delivered, and what was to be
        self.flights = Flights(here.rlock)
        self._running = False
        #: monotonic seconds of the next beat
        self._due = float("inf")
        #: monotonic seconds until which every lease held here is known to last
        self._safe_until = float("inf")
        #: (topic, slot) of leases that could not be renewed -> monotonic seconds until which they
        #: are known to last; put in its place as a whole
        self._unrenewed: dict[tuple[str, int], float] = {}
        #: queues that could not be refreshed
        self._unrefreshed: set[str] = set()
        self._swept = 0.0
        #: takes part in keeping all topics up
        self._upkeeper = Upkeeper(
            self._make_center,
            here.lock,
            in_time=self.in_time,
            beat=lambda: self._beat_within(0.0),
            say=self._say,
        )
        #: what the thread could not log by itself
        self._unsaid: deque[tuple[int, str, tuple[Any, ...], Any]] = deque()

    def hold(self, delivery: Delivery, visibility: float) -> None:
        """Renew this message's lease until it is dropped. visibility: seconds."""
        self.speak()
        with self._lock:
            self._held[delivery.topic, delivery.slot, delivery.id] = (delivery, visibility)
            self._safe_until = min(self._safe_until, time.monotonic() + visibility)
        self._beat_within(visibility / BEATS_PER_LEASE)

    def drop(self, delivery: Delivery) -> None:
        """Do not renew it any longer."""
        key = (delivery.topic, delivery.slot, delivery.id)
        birth, mark = delivery.birth, delivery.mark
        with self._lock:
            held = self._held.get(key)
            # Else the message was delivered again, or another one of this id was.
            if held is not None and (held[0].birth, held[0].mark) == (birth, mark):
                del self._held[key]

    def held(self) -> list[tuple[Delivery, float]]:
        """The messages whose leases are renewed, each with its visibility timeout."""
        with self._lock:
            return list(self._held.values())

    def in_time(self, topic: str | None = None, slots: Collection[int] | None = None) -> bool:
        """Whether every lease held here still lasts, as far as can be known without asking.

        Not so after the process was suspended, or the server away for long, until the thread
        has renewed what still can be: whoever rolls back expired leases meanwhile would
        deliver again what this very process executes.

        topic, slots: the place that is asked for. Leases elsewhere that cannot be renewed,
            because a node of a Cluster is away or refuses it, do not matter then.
        """
        if not self._held:
            return True
        now = time.monotonic()
        return now < self._safe_until and all(
            now < until
            for (name, slot), until in self._unrenewed.items()
            if topic is None or (name == topic and (slots is None or slot in slots))
        )

    def keep_topic(self, name: str, expires_ms: int, holder: Hashable) -> None:
        """Keep a transient topic from going stale until its last holder leaves it."""
        with self._lock:
            self._topics.setdefault(name, {})[holder] = expires_ms
        self._beat_within(expires_ms / 1000 / BEATS_PER_LEASE)

    def keep_binding(self, exchange: str, binding: str, ttl_ms: int, holder: Hashable) -> None:
        """Keep a transient queue's binding from going stale until its last holder leaves it."""
        with self._lock:
            self._bindings.setdefault((exchange, binding), {})[holder] = ttl_ms
        self._beat_within(ttl_ms / 1000 / BEATS_PER_LEASE)

    def consumes(self, queue: str, holder: Hashable) -> None:
        """A channel consumes a queue: others may know."""
        with self._lock:
            self._consumed.setdefault(queue, set()).add(holder)
            self._present_due = 0.0
        self._beat_within(PRESENCE_CHANGE)

    def consumes_no_more(self, queue: str, holder: Hashable) -> None:
        with self._lock:
            holders = self._consumed.get(queue, set())
            if holder not in holders:
                return
            holders.discard(holder)
            if not holders:
                del self._consumed[queue]
            self._present_due = 0.0
        self._beat_within(0.0)

    def leave_topic(self, name: str, holder: Hashable) -> None:
        with self._lock:
            _leave(self._topics, name, holder)

    def leave_binding(self, exchange: str, binding: str, holder: Hashable) -> None:
        with self._lock:
            _leave(self._bindings, (exchange, binding), holder)

    def forget_topic(self, name: str) -> None:
        """It is deleted: nobody holds it any more."""
        with self._lock:
            self._topics.pop(name, None)

    def forget_binding(self, exchange: str, binding: str) -> None:
        with self._lock:
            self._bindings.pop((exchange, binding), None)

    def forget_exchange(self, exchange: str) -> None:
        """Keep none of its bindings."""
        with self._lock:
            for name in [name for name in self._bindings if name[0] == exchange]:
                del self._bindings[name]

    def leave_all(self, holder: Hashable) -> None:
        """A channel is closed."""
        with self._lock:
            for held in (self._topics, self._bindings):
                for name in list(held):
                    _leave(held, name, holder)
            consumed = [queue for queue, holders in self._consumed.items() if holder in holders]
        for queue in consumed:
            self.consumes_no_more(queue, holder)

    def keep_up(self, who: Hashable, interval: float) -> None:
        """Somebody consumes here for long: take part in keeping all topics up, of which one
        process at a time makes a pass every so many seconds."""
        with self._lock:
            self._upkeeper.want(who, interval)
        self._beat_within(RETRY_INTERVAL)

    def leave_up(self, who: Hashable) -> None:
        """They consume no more."""
        with self._lock:
            self._upkeeper.unwant(who)

    @property
    def keeps_up(self) -> bool:
        """Whether it is this process that keeps all topics up."""
        return self._upkeeper.elected

    @property
    def kept_up(self) -> bool:
        """Whether this process or another is known to keep all topics up."""
        return self._upkeeper.known

    def owe(self, calls: list[ScriptCall]) -> None:
        """Run these as soon as the server can be reached."""
        self._owed.extend(calls)
        self._beat_within(RETRY_INTERVAL)

    def delete_later(self, queue: str, bindings: Mapping[str, Sequence[str]]) -> None:
        """Delete a transient queue as soon as the server can be reached.

        bindings: exchange -> the queue's bindings to it, as they are in Redis
        """
        self._deletions.owe(queue, bindings)
        self._beat_within(0.0)

    def withdraw_deletion(self, queue: str) -> None:
        """To be called before a transient queue is declared or bound: the one that is to be deleted
        is another."""
        while self._deletions.withdraw(queue, time.monotonic()):
            time.sleep(0.005)  # a call is on its way, and is answered or refused soon

    @property
    def owes_deletions(self) -> bool:
        """Whether queues are still to be deleted."""
        return bool(self._deletions)

    def expect(self, flight: Flight) -> None:
        """Renew what this pop gives as long as its reply is on its way."""
        self.flights.expect(flight)
        if not self._running or time.monotonic() + flight.visibility / BEATS_PER_LEASE < self._due:
            self._beat_within(flight.visibility / BEATS_PER_LEASE)

    def lose(self, flight: Flight) -> None:
        """Its reply will not come: give back what it gave, unless a consumer asks for it soon."""
        if self.flights.lose(flight):
            self._beat_within(KEPT)

    def speak(self) -> None:
        """Log what the thread had to say, where it may not log by itself.

        For any thread but that one, now and then.
        """
        while self._unsaid:
            try:
                level, text, args, error = self._unsaid.popleft()
            except IndexError:  # another was faster
                return
            logger.log(level, text, *args, exc_info=error)

    def finish(self, deadline: float) -> None:
        """The process ends: wait until what is owed is said.

        deadline: monotonic seconds; whatever is not said by then is given up
        """
        if not self._owed and not self._settling:
            return
        self._beat_within(0.0)
        pause = WakeEvent(self._native.lock)  # no greenlet is needed for it
        while self._owed or self._settling:
            if time.monotonic() >= deadline:
                logger.warning(
                    "%d calls that settle messages are not said, for the server cannot be reached; "
                    "the messages come back when their leases end",
                    len(self._owed) + self._settling,
                )
                return
            pause.wait(0.005)

    def _beat_within(self, seconds: float) -> None:
        due = time.monotonic() + seconds
        # The lock in any case: a thread that found nothing to do may be about to end.
        with self._lock:
            if self._running and due >= self._due:
                return
            self._due = min(self._due, due)
            if self._running:
                self._bell.ring()
            else:
                self._native = unpatched_threading()  # patched since, perhaps
                self._native.start(self._run)
                self._running = True

    # -- the thread

    def _run(self) -> None:
        made: list[TimeoutCenter] = []

        def reach() -> TimeoutCenter:
            if not made:
                made.append(self._make_center())
            return made[0]

        try:
            while self._wait(reach):
                try:
                    self._beat(reach())
                except BROKEN as exc:
                    self._say(logging.WARNING, "cannot renew leases for now: %s", exc)
                    self._beat_within(RETRY_INTERVAL)
                except Exception as exc:
                    self._say_error(exc)
        except BaseException:
            with self._lock:
                self._running = False
            raise
        finally:
            for center in made:
                center.client.close()
                center.client.connection_pool.disconnect()
                self._native.leave()

    def _busy(self) -> bool:
        holds = self._held or self._topics or self._bindings or self._owed or self._deletions
        consumes = self._consumed or self._present
        return bool(holds or self.flights or consumes or self._upkeeper.wanted)

    def _wait(self, reach: Callable[[], TimeoutCenter]) -> bool:
        """Until the next beat; False if there is nothing to beat for."""
        while (wait := self._due - time.monotonic()) > 0:
            until_attempt = max(self._upkeeper.due - time.monotonic(), 0.0)
            self._bell.wait(min(wait, until_attempt, INTERVAL))
            if time.monotonic() >= self._metrics.due:
                self._attempt(self._tell_metrics, reach)
            if time.monotonic() >= self._upkeeper.due:
                self._attempt(self._elect, reach)
        if not self._busy():
            self._attempt(self._tell_metrics, reach)
        with self._lock:
            if self._busy():
                self._due = time.monotonic() + RETRY_INTERVAL  # unless the beat says better
                return True
            self._running = False
            self._due = self._safe_until = float("inf")
            self._unrenewed = {}
            return False

    def _beat(self, center: TimeoutCenter) -> None:
        began = time.monotonic()
        with self._lock:
            held = self.held()
            topics = _each(min, self._topics)
            bindings = _each(max, self._bindings)
            shortest = min((visibility for _, visibility in held), default=float("inf"))
            shortest = min(shortest, self.flights.shortest())
            lives = [shortest, *(ms / 1000 for ms in (*topics.values(), *bindings.values()))]
            # Whoever holds something from now on counts from this.
            self._due = began + min(SWEEP_INTERVAL, min(lives) / BEATS_PER_LEASE)
            self._due = min(self._due, max(self.flights.kept_until(), began + RETRY_INTERVAL))
        broken: list[Exception] = []

        def attempt(what: Callable[..., Any], *args: Any) -> bool:
            # Neither what is refused in one place nor a node that is away may keep the rest from
            # being renewed. On one server, all the rest would fail as well, if after a while.
            try:
                self._attempt(what, *args)
            except BROKEN as exc:
                if not center.clustered:
                    raise
                broken.append(exc)
                return False
            return True

        attempt(self._settle, center)
        if attempt(self._renew, center, held, broken):
            with self._lock:
                # What was taken meanwhile has a lease that began later, but maybe a shorter one.
                taken = [visibility for _, visibility in self._held.values()]
                self._safe_until = began + min(taken, default=float("inf"))
        for deletion in self._deletions.pending():
            attempt(self._delete, center, deletion)
        for flight in self.flights.flying():
            attempt(center.run, flight.holding(center))
        for flight in self.flights.take_kept():
            attempt(self._give_back, center, flight)
        # Those that are missed last: a node that hangs takes its time with each, and the leases
        # are due again.
        for name in sorted(topics, key=self._unrefreshed.__contains__):
            if broken and time.monotonic() >= self._due:
                break
            if name not in self._topics:
                continue  # deleted since: it must not be declared again
            if attempt(center.refresh, name, topics[name]):
                self._unrefreshed.discard(name)
            else:
                self._unrefreshed.add(name)
        self._unrefreshed &= topics.keys()
        for (exchange, binding), ttl_ms in bindings.items():
            if (exchange, binding) not in self._bindings:
                continue
            attempt(Bindings(center).add, exchange, binding, ttl_ms)
        if time.monotonic() >= self._present_due:
            attempt(self._appear, center)
        if time.monotonic() - self._swept > SWEEP_INTERVAL:
            self._swept = time.monotonic()
            attempt(sweep, center, self._say)
        if broken:
            raise broken[0]

    def _give_back(self, center: TimeoutCenter, flight: Flight) -> None:
        """Release what a pop gave to nobody."""
        try:
            left = center.run(flight.returning(center)).messages
            center.run_all(center.releasing(left))
        except BaseException:
            self.flights.lose(flight)  # to be tried again
            raise

    def _delete(self, center: TimeoutCenter, deletion: Deletion) -> None:
        """Delete a queue that could not be deleted when it was left."""
        try:
            delete(center, self._deletions, deletion, time.monotonic)
        except BROKEN:
            raise
        except Exception as exc:
            if not is_temporary(exc):
                self._deletions.done(deletion)  # it goes stale
                raise
        if self._deletions:
            self._beat_within(RETRY_INTERVAL)

    def _appear(self, center: TimeoutCenter) -> None:
        """Say which queues this process consumes."""
        with self._lock:
            queues = sorted(self._consumed)
            self._present_due = time.monotonic() + PRESENCE_INTERVAL
        said = json.dumps([socket.gethostname(), os.getpid(), *queues]) if queues else ""
        before = [self._present] if self._present not in ("", said) else []
        if said or before:
            try:
                center.run(center.appearing(said, before, PRESENCE_MS))
            except BROKEN:
                self._present_due = 0.0
                raise
        self._present = said

    def _tell_metrics(self, reach: Callable[[], TimeoutCenter]) -> None:
        if self._metrics.active:
            with suppress(*BROKEN):
                self._metrics.send(reach())

    def _elect(self, reach: Callable[[], TimeoutCenter]) -> None:
        try:
            self._upkeeper.attempt(reach())
        except BROKEN as exc:
            self._say(logging.DEBUG, "no part in the election of who keeps the queues up: %s", exc)

    def _settle(self, center: TimeoutCenter) -> None:
        self._settling = number = len(self._owed)
        try:
            self._settle_owed(center, number)
        finally:
            self._settling = 0

    def _settle_owed(self, center: TimeoutCenter, number: int) -> None:
        owed = [self._owed.popleft() for _ in range(number)]
        try:
            results = center.run_each(owed)
        except BROKEN:
            self._owed.extendleft(reversed(owed))
            raise
        refused = []
        for call, result in zip(owed, results, strict=True):
            if not isinstance(result, Exception):
                continue
            if isinstance(result, BROKEN) or is_temporary(result):
                self.owe([call])
            else:
                refused.append(result)
        if refused:
            self._say(logging.ERROR, "cannot settle %d messages: %s", len(refused), refused[0])

    def _renew(
        self,
        center: TimeoutCenter,
        held: list[tuple[Delivery, float]],
        broken: list[Exception],
    ) -> None:
        """Renew leases; adds to `broken` if a node cannot be reached and the others can."""
        by_place: dict[tuple[str, int, float], list[Delivery]] = defaultdict(list)
        for delivery, visibility in held:
            by_place[delivery.topic, delivery.slot, visibility].append(delivery)
        calls = [
            ((topic, slot), call)
            for (topic, slot, visibility), deliveries in by_place.items()
            for call in center.extending(deliveries, visibility)
        ]
        lost: list[Delivery] = []
        errors: list[Exception] = []
        unrenewed: dict[tuple[str, int], float] = {}
        results = center.run_each([call for _, call in calls])
        for (place, _), result in zip(calls, results, strict=True):
            if isinstance(result, Exception):
                (broken if isinstance(result, BROKEN) else errors).append(result)
                unrenewed[place] = self._unrenewed.get(place, self._safe_until)
            else:
                lost += [delivery for delivery in result if self._lose(delivery)]
        self._unrenewed = unrenewed
        if lost:
            shown = ", ".join(in_words(one) for one in lost[:MAX_NAMED])
            more = f" and {len(lost) - MAX_NAMED} more" if len(lost) > MAX_NAMED else ""
            self._say(
                logging.WARNING,
                "leases ended before they were renewed, the messages may be delivered again: %s%s",
                shown,
                more,
            )
        if errors:
            raise errors[0]

    def _lose(self, delivery: Delivery) -> bool:
        """Hold it no longer; whether it still was: it may be settled or delivered anew."""
        key = (delivery.topic, delivery.slot, delivery.id)
        with self._lock:
            held = self._held.get(key)
            if held is None or held[0] is not delivery:
                return False
            del self._held[key]
            return True

    def _attempt(self, what: Callable[..., Any], *args: Any) -> None:
        try:
            what(*args)
        except BROKEN:
            raise
        except Exception as exc:
            self._say_error(exc)

    def _say_error(self, exc: Exception) -> None:
        known = isinstance(exc, (TocError, exceptions.ResponseError))
        self._say(logging.ERROR, "cannot renew leases: %s", exc, error=None if known else exc)

    def _say(self, level: int, text: str, *args: Any, error: Exception | None = None) -> None:
        if self._native.patched:
            # The locks of logging's handlers are the greenlets'.
            self._unsaid.append((level, text, args, error))
        else:
            logger.log(level, text, *args, exc_info=error)


def _leave(held: dict[Any, dict[Hashable, int]], name: Any, holder: Hashable) -> None:
    holders = held.get(name)
    if holders is not None:
        holders.pop(holder, None)
        if not holders:
            held.pop(name, None)


def _each(choose: Callable[[list[int]], int], held: dict[Any, dict[Hashable, int]]) -> Any:
    """The milliseconds of each that is held, of several holders those that `choose` picks.

    Of copies: the lock keeps other threads out, but not a channel that is collected as garbage
    while this runs, and leaves what it held.
    """
    chosen = {}
    for name, holders in held.copy().items():
        if lives := list(holders.values()):
            chosen[name] = choose(lives)
    return chosen


def sweep(center: TimeoutCenter, say: Callable[..., None] = logger.log) -> list[str]:
    """Delete the transient queues and bindings that nobody has refreshed; return their names.

    say: is told what a log should be told
    """
    stale = center.stale(SWEEP_MOST)
    bindings = Bindings(center)
    for member in stale:
        kind, _, name = member.partition(":")
        if kind == "topic":
            say(logging.INFO, "deleting queue %s: it went stale", name)
            center.delete(name)
        else:
            bindings.of(name)
    return stale
