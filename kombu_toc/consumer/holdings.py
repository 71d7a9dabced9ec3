"""Resources that a process holds on a server and calls that it owes, and when these are due."""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from redis.exceptions import ResponseError

from ..center.calls import REMEMBER
from ..center.center import TimeoutCenter
from ..center.exchanges import Bindings
from ..errors import EnvelopeError
from ..model import message as envelope
from ..model.results import Delivery
from ..model.topic import Topic
from ..scripts.call import ScriptCall, load
from .connections import BROKEN
from .state import WorkerPolicy

if TYPE_CHECKING:
    from ..center.upkeep import Event
    from ..model.results import Popped

logger = logging.getLogger(__name__)

# -- the leases of delivered messages that a process holds
#
# Nothing here waits or asks the server; the time is handed in, in monotonic seconds.

#: A slot of a topic: (topic, slot).
Place: TypeAlias = tuple[str, int]

#: (topic, slot, id)
_Key: TypeAlias = tuple[str, int, str]

#: Renewals within one lease: two may fail before it ends.
BEATS_PER_LEASE = 3


class Leases:
    """Delivered messages, each with its visibility timeout. Any thread may call this.

    lock: held for moments, reentrant; see :meth:`.lease_keeper.LeaseKeeper.reset`
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        self._held: dict[_Key, tuple[Delivery, float]] = {}
        #: of what may not be renewed for ever: monotonic seconds when it ends
        self._ends: dict[_Key, float] = {}
        #: what has ended, and was delivered here again before that was noticed
        self._overran: list[Delivery] = []
        #: visibility timeout -> seconds after a third of which a renewal is due, if they are fewer:
        #: others judge by the topic's visibility whether a holder had the time to renew
        self._rhythm: dict[float, float] = {}
        #: visibility timeout -> monotonic seconds until which every such lease is known to last
        self._safe: dict[float, float] = {}
        #: the first of these
        self._safe_until = float("inf")
        #: where leases could not be renewed -> monotonic seconds until which they are known to
        #: last; put in its place as a whole
        self._unrenewed: dict[Place, float] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(
        self,
        delivery: Delivery,
        visibility: float,
        now: float,
        ends: float | None = None,
        rhythm: float | None = None,
    ) -> None:
        """Renew this message's lease, of so many seconds, until it is dropped.

        ends: monotonic seconds when the delivery ends although it is renewed
        rhythm: visibility timeout of its topic, if it has its own
        """
        with self._lock:
            if rhythm is not None and rhythm < self._rhythm.get(visibility, visibility):
                self._rhythm[visibility] = rhythm
            key = (delivery.topic, delivery.slot, delivery.id)
            if ends is not None or self._ends:
                self._note_end(key, now, ends)
            self._held[key] = (delivery, visibility)
            until = now + visibility
            if until < self._safe.get(visibility, float("inf")):
                self._safe[visibility] = until
                self._safe_until = min(self._safe_until, until)

    def _note_end(self, key: _Key, now: float, ends: float | None) -> None:
        before = self._ends.pop(key, None)
        if before is not None and before <= now:
            self._overran.append(self._held[key][0])
        if ends is not None:
            self._ends[key] = ends

    def drop(self, delivery: Delivery) -> None:
        """Do not renew it any longer: it is settled."""
        key = (delivery.topic, delivery.slot, delivery.id)
        with self._lock:
            held = self._held.get(key)
            # Else the message was delivered again, or another one of this id was.
            if held is not None and (
                held[0] is delivery
                or (held[0].birth, held[0].lease_token) == (delivery.birth, delivery.lease_token)
            ):
                del self._held[key]
                if self._ends:
                    self._ends.pop(key, None)

    def lose(self, delivery: Delivery) -> bool:
        """Its lease ended before it was renewed. Whether it was held still: it may be settled or
        delivered anew."""
        key = (delivery.topic, delivery.slot, delivery.id)
        with self._lock:
            held = self._held.get(key)
            if held is None or held[0] is not delivery:
                return False
            del self._held[key]
            self._ends.pop(key, None)
            return True

    def take_overran(self) -> list[Delivery]:
        """Deliveries that have ended although they were renewed, and were delivered here again
        before a renewal told that: each once."""
        with self._lock:
            taken, self._overran = self._overran, []
            return taken

    def held(self) -> list[tuple[Delivery, float]]:
        """The messages whose leases are renewed, each with its visibility timeout in seconds."""
        with self._lock:
            return list(self._held.values())

    def due(self, began: float, next_at: float) -> list[tuple[Delivery, float]]:
        """Leases that a renewal which begins now is to renew: each before a third of it has passed
        (or of its topic's, if that is shorter), and those that may have
        ended although they were renewed.

        began: now; next_at: when the next one may be; monotonic seconds
        """
        with self._lock:
            late = {
                visibility
                for visibility, until in self._safe.items()
                if self._unrenewed
                or until - visibility + self._rhythm.get(visibility, visibility) / BEATS_PER_LEASE
                <= next_at
            }
            found = [pair for pair in self._held.values() if pair[1] in late]
            for key, ends in self._ends.items():
                if ends <= began and self._held[key][1] not in late:
                    found.append(self._held[key])
            return found

    def first_end(self) -> float:
        """Monotonic seconds when the first delivery ends although it is renewed; infinite if none
        does."""
        return min(tuple(self._ends.values()), default=float("inf"))

    def shortest(self) -> float:
        """Seconds of the shortest lease, or of the shortest visibility of a topic; infinite if
        there is none."""
        with self._lock:
            held = {visibility for _, visibility in self._held.values()}
            return min((self._rhythm.get(one, one) for one in held), default=float("inf"))

    def in_time(
        self, now: float, topic: str | None = None, slots: Collection[int] | None = None
    ) -> bool:
        """Whether every lease held here still lasts, as far as can be known without asking.

        Not so after the process was suspended, or the server away for long, until what still can
        be was renewed: whoever rolls back expired leases meanwhile would deliver again what this
        very process executes.

        topic, slots: the place that is asked for. Leases elsewhere that cannot be renewed,
            because a node of a Cluster is away or refuses it, do not matter then.
        """
        if not self._held:
            return True
        return now < self._safe_until and all(
            now < until
            for (name, slot), until in self._unrenewed.items()
            if topic is None or (name == topic and (slots is None or slot in slots))
        )

    def renewed(
        self, began: float, failed: Iterable[Place], visibilities: Collection[float]
    ) -> None:
        """Note that leases of these visibility timeouts were renewed.

        began: when the renewal began
        failed: where it could not be done
        """
        with self._lock:
            before = self._unrenewed
            self._unrenewed = {place: before.get(place, self._safe_until) for place in failed}
            # What was taken meanwhile has a lease that began later.
            held = {visibility for _, visibility in self._held.values()}
            self._safe = {
                visibility: began + visibility if visibility in visibilities else until
                for visibility, until in self._safe.items()
                if visibility in held
            }
            self._safe_until = min(self._safe.values(), default=float("inf"))
            if self._rhythm:
                self._rhythm = {v: one for v, one in self._rhythm.items() if v in held}

    def rest(self) -> None:
        """Nothing is held: what was known of the time does not count any more."""
        with self._lock:
            self._safe, self._safe_until, self._unrenewed = {}, float("inf"), {}


def by_place(
    held: Iterable[tuple[Delivery, float]],
) -> dict[tuple[str, int, float], list[Delivery]]:
    """(topic, slot, visibility) -> deliveries, whose leases one call can renew."""
    found: dict[tuple[str, int, float], list[Delivery]] = defaultdict(list)
    for delivery, visibility in held:
        found[delivery.topic, delivery.slot, visibility].append(delivery)
    return found


# -- which queues a process consumes

#: Milliseconds for which it is known what this process consumes, unless it announces it again;
#: seconds after which it does; and within which it announces a change.
PRESENCE_MS = 60_000
PRESENCE_INTERVAL = 15.0
PRESENCE_CHANGE = 0.5

Name = TypeVar("Name", bound=Hashable)


class Presence:
    """The queues that a process consumes. Any thread may call this.

    lock: as :class:`Leases`; host, pid: of the process
    """

    def __init__(self, lock: AbstractContextManager[Any], host: str, pid: int) -> None:
        self._process = [host, pid]
        #: the queues, and the channels that consume them
        self._consumed: KeptFresh[str] = KeptFresh(lock, min)
        #: what is in Redis, or may be: an announcement is on its way, or its reply was lost. Empty
        #: text is for one that is about to be made
        self._announced: set[str] = set()
        #: monotonic seconds when it is to be announced again
        self._due = 0.0

    def __bool__(self) -> bool:
        """Whether there is something to announce, now or later."""
        return bool(self._consumed or self._announced)

    def add(self, queue: str, holder: Hashable) -> None:
        """A channel consumes a queue."""
        self._consumed.keep(queue, 0, holder)
        self._due = 0.0

    def remove(self, queue: str, holder: Hashable) -> bool:
        """Note that a channel consumes a queue no more. Returns whether no other does."""
        return self._left(self._consumed.leave(queue, holder))

    def remove_all(self, holder: Hashable) -> bool:
        """A channel is closed. Returns whether it has consumed anything."""
        return self._left(self._consumed.leave_all(holder))

    def _left(self, is_change: bool) -> bool:
        if is_change:
            self._due = 0.0
        return is_change

    def end(self) -> bool:
        """The process ends, and consumes nothing any more. Returns whether Redis says otherwise,
        or is about to."""
        self._consumed.forget_where(lambda _: True)
        self._due = 0.0
        return bool(self)

    def is_due(self, now: float) -> bool:
        """Whether it is to be announced."""
        return now >= self._due

    def next(self, now: float) -> tuple[str, list[str]]:
        """(what is to be announced, what it replaces); empty if the process consumes nothing.

        :meth:`announced` or :meth:`failed` is next.
        """
        # In this order: what changes from now on is announced anew.
        self._due, self._announced = now + PRESENCE_INTERVAL, {"", *self._announced}
        queues = sorted(self._consumed.lifetimes())
        statement = json.dumps([*self._process, *queues]) if queues else ""
        before = self._announced - {"", statement}
        self._announced = {statement, *before}
        return statement, sorted(before)

    def announced(self, statement: str) -> None:
        """Note that a statement is in Redis."""
        self._announced = {statement} - {""}

    def failed(self) -> None:
        """Note that an announcement has failed: it is due again soon."""
        self._due = 0.0


class KeptFresh(Generic[Name]):
    """Names that are kept from going stale until their last holder leaves them. Any thread may call
    this.

    lock: as :class:`Leases`
    choose: picks one of several holders' lifetimes
    """

    def __init__(
        self, lock: AbstractContextManager[Any], choose: Callable[[Iterable[int]], int]
    ) -> None:
        self._lock = lock
        self._choose = choose
        #: name -> who holds it -> milliseconds it lives without being refreshed
        self._held: dict[Name, dict[Hashable, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def __contains__(self, name: Name) -> bool:
        return name in self._held

    def keep(self, name: Name, lifetime_ms: int, holder: Hashable) -> None:
        """Keep it until this holder leaves it, and every other."""
        with self._lock:
            self._held.setdefault(name, {})[holder] = lifetime_ms

    def leave(self, name: Name, holder: Hashable) -> bool:
        """Returns whether it was this holder that has kept it, and nobody else does."""
        with self._lock:
            holders = self._held.get(name)
            if holders is None or holder not in holders:
                return False
            del holders[holder]
            if not holders:
                self._held.pop(name, None)
            return not holders

    def leave_all(self, holder: Hashable) -> bool:
        """A channel is closed. Returns whether it has held anything."""
        with self._lock:
            names = [name for name, holders in self._held.items() if holder in holders]
            for name in names:
                self.leave(name, holder)
            return bool(names)

    def forget(self, name: Name) -> None:
        """Forget a name that is deleted: nobody holds it any more."""
        with self._lock:
            self._held.pop(name, None)

    def forget_where(self, of: Callable[[Name], bool]) -> None:
        """Forget the names of which `of` is true: they are deleted."""
        with self._lock:
            for name in [name for name in self._held if of(name)]:
                del self._held[name]

    def lifetimes(self) -> dict[Name, int]:
        """The milliseconds of each that is held.

        Of copies: the lock keeps other threads out, but not a channel that is collected as garbage
        while this runs, and leaves what it held.
        """
        with self._lock:
            chosen = {}
            for name, holders in self._held.copy().items():
                if lifetimes := list(holders.values()):
                    chosen[name] = self._choose(lifetimes)
            return chosen


# -- when queues that this process has used may expire
#
# Nothing here asks a server: the time is an argument.


class Expiries:
    """When each queue may expire, as far as this process knows. Any thread may call this.

    lock: as :class:`Leases`
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        #: queue -> monotonic seconds
        self._at: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._at)

    def note(self, queue: str, at: float) -> None:
        """Note that a queue was used just now, and expires at that time, in monotonic seconds,
        unless it is used until then."""
        with self._lock:
            self._at[queue] = at

    def next(self, now: float, retry: float) -> float:
        """Monotonic seconds when to look next, after a look that begins now.

        retry: seconds after which to look again for those whose time has come, if the look fails
        """
        with self._lock:
            return min(
                (at if at > now else now + retry for at in self._at.values()), default=float("inf")
            )

    def take(self, now: float) -> bool:
        """Whether it is time to look; if so, it has been for those of which it was."""
        with self._lock:
            passed = [queue for queue, at in self._at.items() if at <= now]
            for queue in passed:
                del self._at[queue]
            return bool(passed)


# -- transient queues that could not be deleted when they were left
#
# Such a queue may be declared again at any time, under the same name, and what is owed must not hit
# the new one. Whoever declares it withdraws the deletion first. Nothing is sent of a deletion that
# is withdrawn; and what was sent before, and is not answered, the server refuses after a moment,
# for which the one who declares waits.

#: Seconds after which the server refuses a call of a deletion.
CALL_EXPIRES = 2.0

#: Seconds beyond that after which nobody waits for it any more: clocks differ in their pace.
MARGIN = 0.1


@dataclass
class Deletion:
    """A queue that is to be deleted."""

    queue: str
    #: exchange -> the queue's bindings to it that this process has made, as they are in Redis
    bindings: Mapping[str, Sequence[str]]
    #: monotonic seconds after which the server refuses the call that was sent last; 0 if that is
    #: answered
    unanswered_until: float = 0.0
    #: what was declared of it: it is gone when only a part of the calls has run
    topic: Topic | None = None


class OwedDeletions:
    """The deletions that a process owes. Any thread may call its methods; none waits for Redis.

    lock: makes a lock that is held for moments
    now: monotonic seconds
    """

    def __init__(self, lock: Callable[[], Any]) -> None:
        self._lock = lock()
        self._owed: dict[str, Deletion] = {}
        #: those that are withdrawn, and of which a call may still arrive at the server
        self._withdrawn: dict[str, Deletion] = {}

    def __bool__(self) -> bool:
        return bool(self._owed)

    def owe(self, queue: str, bindings: Mapping[str, Sequence[str]]) -> None:
        """Have it deleted; bindings: as :attr:`Deletion.bindings`."""
        with self._lock:
            before = self._owed.get(queue)
            deletion = Deletion(queue, {}) if before is None else before
            both = {**deletion.bindings, **bindings}
            self._owed[queue] = replace(deletion, bindings=both)

    def withdraw(self, queue: str, now: float) -> float:
        """The queue is about to be declared: do not delete it.

        Returns the seconds for which a call that was sent may still delete it, unless it is
        answered before; 0 if there is none.
        """
        if not self._owed and not self._withdrawn:
            return 0.0
        with self._lock:
            deletion = self._owed.pop(queue, None)
            if deletion is not None:
                self._withdrawn[queue] = deletion
            deletion = self._withdrawn.get(queue)
            if deletion is None:
                return 0.0
            if now >= deletion.unanswered_until:
                del self._withdrawn[queue]
                return 0.0
            return deletion.unanswered_until - now

    def pending(self) -> list[Deletion]:
        """The deletions to try."""
        with self._lock:
            return list(self._owed.values())

    def may_send(self, deletion: Deletion, now: float) -> bool:
        """Whether a call of it may be sent, which the server refuses after CALL_EXPIRES."""
        with self._lock:
            if self._owed.get(deletion.queue) is not deletion:
                return False
            deletion.unanswered_until = now + CALL_EXPIRES + MARGIN
            return True

    def answered(self, deletion: Deletion) -> None:
        """The call that was sent last cannot do anything any more."""
        with self._lock:
            deletion.unanswered_until = 0.0

    def done(self, deletion: Deletion) -> None:
        """Forget a deletion that is done, or cannot be."""
        with self._lock:
            if self._owed.get(deletion.queue) is deletion:
                del self._owed[deletion.queue]


def calls_of(center: TimeoutCenter, deletion: Deletion) -> Iterator[ScriptCall]:
    """The calls that delete the queue, in the order in which they are to run. Their first argument
    is to be set."""
    queue, keys = deletion.queue, center.keys
    deletion.topic = topic = center.registry.declared(queue) or deletion.topic
    if topic is not None and not topic.declaration.expires:
        return  # somebody else has deleted it, and declared it to stay
    whole = [keys.wake(queue), keys.counted(queue), keys.minutes(queue)]
    entries = [
        (keys.bindings(exchange), "stale", member)
        for exchange, members in deletion.bindings.items()
        for member in members
    ]
    entries += [
        (keys.topics, "hash", queue),
        (keys.names, "zset", queue),
        (keys.paused, "set", queue),
        (keys.expiring, "zset", f"topic:{queue}"),
    ]
    yield _discarding(whole, entries)
    if topic is not None:
        for slot in topic.all_slots():
            yield _discarding([*slot.all(), *map(slot.store, topic.other_steps())])


def _discarding(whole: Sequence[str], entries: Sequence[tuple[str, str, str]] = ()) -> ScriptCall:
    named = [part for _, *entry in entries for part in entry]
    return ScriptCall(
        load("discard"), [*whole, *(key for key, *_ in entries)], (0, len(whole), *named), int
    )


def delete(
    center: TimeoutCenter, owed: OwedDeletions, deletion: Deletion, clock: Callable[[], float]
) -> None:
    """Delete the queue with its bindings and all that is in it, unless that is withdrawn.

    clock: tells monotonic seconds. Raises what a call raises; then it is still owed.
    """
    for call in calls_of(center, deletion):
        expires = center.runner.run(call) + int(CALL_EXPIRES * 1000)
        if not owed.may_send(deletion, clock()):
            return
        done_at = center.runner.run(call._replace(args=(expires, *call.args[1:])))
        owed.answered(deletion)
        if done_at > expires:
            return  # too late: at the next attempt
    bindings = Bindings(center)
    for exchange in deletion.bindings:
        bindings.remove(exchange)  # drops what is stale, and with the last binding the streams
    owed.done(deletion)


# -- messages that were acknowledged while their tasks run on
#
# What such a message holds, a place of a limited queue, is held until its task has ended: only then
# is it acknowledged for good. Its owner says what is executed (:class:`.state.WorkerPolicy`), and
# is asked, instead of telling each end: a task ends in many ways. So nothing is held for a task
# that nobody executes.


#: A message, and what is to be called when its task has ended.
_Running: TypeAlias = tuple[Delivery, Callable[[bool], Any] | None]


class EarlyAcks:
    """The early acknowledgements of a process. Any thread may call this.

    lock: held for moments, reentrant; see :meth:`.lease_keeper.LeaseKeeper.reset`
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        #: by who executes them, and by what tells one execution from others
        self._running: dict[WorkerPolicy, dict[Hashable, _Running]] = {}
        #: whether the process ends, and whatever it executes with it
        self.process_ends = False

    def __bool__(self) -> bool:
        return bool(self._running)

    def add(
        self,
        policy: WorkerPolicy,
        execution: Hashable,
        delivery: Delivery,
        on_end: Callable[[bool], Any] | None = None,
    ) -> None:
        """A message is acknowledged whose task runs on.

        on_end: is called once: with True when that has ended, or the process with it, and the
            message is acknowledged for good; with False when its lease has ended before
        """
        with self._lock:
            self._running.setdefault(policy, {})[execution] = delivery, on_end

    def take_ended(self) -> list[Delivery]:
        """The messages whose tasks have ended: the caller acknowledges them for good."""
        taken = []
        with self._lock:
            for policy, running in list(self._running.items()):
                for execution in list(policy.ended(running.keys())):
                    taken.append(running.pop(execution))
                if not running:
                    del self._running[policy]
        return self._tell(taken)

    @staticmethod
    def _tell(taken: list[_Running], is_over: bool = True) -> list[Delivery]:
        for _, on_end in taken:
            if on_end is not None:
                on_end(is_over)
        return [delivery for delivery, _ in taken]

    def take_all(self) -> list[Delivery]:
        """All of them, when the process ends."""
        with self._lock:
            taken = [one for running in self._running.values() for one in running.values()]
            self._running.clear()
        return self._tell(taken)

    def drop(self, delivery: Delivery, *, is_over: bool = False) -> bool:
        """A message is not to be acknowledged once more. Whether it was.

        is_over: whether it is acknowledged for good, by somebody else
        """
        with self._lock:
            taken = self._take(delivery)
        return bool(self._tell(taken, is_over))

    def _take(self, delivery: Delivery) -> list[_Running]:
        for policy, running in self._running.items():
            for execution, one in running.items():
                if one[0] is delivery:
                    del running[execution]
                    if not running:
                        del self._running[policy]
                    return [one]
        return []


# -- what a process holds on a server and owes it, and when that is to be seen to next

#: Seconds between attempts to run what is owed.
RETRY_INTERVAL = 1.0

#: Seconds after a delivery has ended, as far as is known here, when the server is asked.
AFTER_END = 0.02

#: Seconds between looks for what others left behind.
SWEEP_INTERVAL = 15.0


def next_beat(now: float, lifetimes: Iterable[float], ends_at: float) -> float:
    """Monotonic seconds of the beat after the one that begins now.

    lifetimes: seconds that what is held lives without being renewed
    ends_at: when the first of what nobody asks for is to be given back, or a delivery ends although
        it is renewed
    """
    shortest = min(lifetimes, default=float("inf"))
    due = now + min(SWEEP_INTERVAL, shortest / BEATS_PER_LEASE)
    return min(due, max(ends_at, now + RETRY_INTERVAL))


# -- pops that are on their way, and those whose replies were lost
#
# The process keeps them, and not a connection: who connects again asks for them by name. What
# nobody asks for is given back.

#: Seconds after which messages are given back whose consumer has not asked for them: it finds them
#: where they were, then, or another one does.
KEPT = 0.5

#: Seconds after which a node of a Cluster is asked again.
AGAIN = 0.1

#: When the reply of a pop was lost that is still on its way.
NOT_LOST = float("inf")


@dataclass
class UnansweredPop:
    """A pop that was sent."""

    topic: Topic
    slots: tuple[int, ...] | None
    name: str
    visibility: float
    #: monotonic seconds when it left
    left: float = field(default_factory=time.monotonic)
    #: monotonic seconds when its reply was lost first; when it may be asked for again
    lost: float = NOT_LOST
    again: float = 0.0

    def recalling(self, center: TimeoutCenter, **how: Any) -> ScriptCall:
        """The call that delivers once more what it gave, and renews its leases; see
        :meth:`.calls.Commands.recall`."""
        return center.commands.recall(self.topic, self.slots, self.name, **how)


class UnansweredPops:
    """The pops of a process on a server that have no reply yet, or have lost it.

    lock: makes a lock that is held for moments
    clock: monotonic seconds
    """

    def __init__(
        self, lock: Callable[[], Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lock = lock()
        self._clock = clock
        self._flying: dict[str, UnansweredPop] = {}
        #: those whose replies were lost
        self.lost: dict[str, UnansweredPop] = {}

    def __bool__(self) -> bool:
        return bool(self._flying or self.lost)

    def expect(self, flight: UnansweredPop) -> None:
        """A pop is on its way."""
        self._flying[flight.name] = flight

    def arrive(self, flight: UnansweredPop) -> None:
        """The reply of a pop has come."""
        self._flying.pop(flight.name, None)

    def lose(self, flight: UnansweredPop) -> bool:
        """The reply of a pop will not come. Whether what it gave can still be asked for."""
        now = self._clock()
        with self._lock:
            self._flying.pop(flight.name, None)
            if flight.lost == NOT_LOST:
                flight.lost = now
            else:
                flight.again = now + AGAIN
            if now > flight.lost + REMEMBER:
                return False
            self.lost[flight.name] = flight
            return True

    def take(self, topics: Collection[str]) -> list[UnansweredPop]:
        """The lost pops of these topics: the caller asks for what they gave."""
        now = self._clock()
        return self._take(lambda one: one.topic.name in topics and now >= one.again)

    def take_kept(self) -> Iterator[UnansweredPop]:
        """The lost pops that nobody has asked for, each when the caller comes to it: the caller
        gives back what it gave, and may end before it comes to all."""
        now = self._clock()
        for flight in list(self.lost.values()):
            if now >= flight.lost + KEPT:
                yield from self._take(partial(is_, flight))

    def _take(self, which: Callable[[UnansweredPop], bool]) -> list[UnansweredPop]:
        with self._lock:
            taken = [one for one in self.lost.values() if which(one)]
            for one in taken:
                del self.lost[one.name]
        return taken

    def flying(self) -> list[UnansweredPop]:
        """Those whose replies have been on their way for so long that their leases are to be
        renewed."""
        now = self._clock()
        return [one for one in list(self._flying.values()) if now >= one.left + one.visibility / 6]

    def kept_until(self) -> float:
        """Monotonic seconds when the first of those that nobody asks for is to be given back."""
        return min((one.lost + KEPT for one in list(self.lost.values())), default=float("inf"))

    def shortest(self) -> float:
        """Seconds of the shortest lease of any."""
        return min((one.visibility for one in list(self._flying.values())), default=float("inf"))


# -- how a log names messages and their tasks

#: Messages whose task names are looked up for a log, at once.
MAX_NAMED = 10


def task_of(body: bytes, id: str) -> str:
    """The name of the task that a message kept under that id carries; empty if it is none, or
    cannot be read."""
    try:
        name = envelope.unpack(body, id)["headers"].get("task")
    except EnvelopeError:
        return ""
    return name if isinstance(name, str) else ""


def describe(delivery: Delivery) -> str:
    """Which message it is: id, topic, and the task's name if it has one."""
    task = task_of(delivery.body, delivery.id)
    return f"{delivery.id} of {delivery.topic}{f' (task {task})' if task else ''}"


def task_names(
    center: TimeoutCenter, topic: str, ids: list[str], messages: Iterable[Delivery] = ()
) -> dict[str, str]:
    """What a log says of the tasks of these messages: `` (task NAME)``, or nothing. What is not
    among `messages` is looked up, for it is rare."""
    names = dict.fromkeys(ids, "")
    bodies = {message.id: message.body for message in messages if message.id in names}
    unknown = [id for id in ids if id not in bodies][:MAX_NAMED]
    if unknown:
        with suppress(*BROKEN, ResponseError):
            bodies.update((found.id, found.body) for found in center.get(unknown, topic=topic))
    for id, body in bodies.items():
        task = task_of(body, id)
        if id in names and task:
            names[id] = f" (task {task})"
    return names


# -- what a log is told of a pop

#: Ids of dropped messages that one line names, at most.
MAX_DROPPED = 10


def log_pop(center: TimeoutCenter, topic: str, result: Popped) -> None:
    """Log what a pop has done beside what it gave."""
    for id in result.bare:
        logger.error("message %s of %s had no body: removed", id, topic)
    log_kept(center, topic, result, result.messages)


def log_kept(
    center: TimeoutCenter,
    topic: str,
    event: Popped | Event,
    messages: Iterable[Delivery] = (),
    log: Callable[..., None] = logger.log,
) -> None:
    """Log which messages were not delivered, and what became of them.

    messages: those among them that need not be looked up
    log: as :meth:`logging.Logger.log`
    """
    names = task_names(center, topic, event.rolled_back + event.died, messages)
    for id in event.rolled_back:
        log(
            logging.WARNING,
            "message %s of %s%s: its lease ended, it is delivered again",
            *(id, topic, names[id]),
        )
    for id in event.died:
        log(
            logging.ERROR,
            "message %s of %s%s: lost for good, it is in DeadQueue",
            *(id, topic, names[id]),
        )
    if event.dropped:
        log(
            logging.WARNING,
            "DeadQueue of %s: %d messages dropped, for they are too old or too many: %s",
            *(topic, *_first(event.dropped)),
        )
    if event.expired:
        log(
            logging.WARNING,
            "%s: %d messages have expired, they are not delivered: %s",
            *(topic, *_first(event.expired)),
        )


def _first(ids: list[str]) -> tuple[int, str]:
    more = ", ..." if len(ids) > MAX_DROPPED else ""
    return len(ids), ", ".join(ids[:MAX_DROPPED]) + more
