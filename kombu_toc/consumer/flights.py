"""Pops that are on their way, and those whose replies were lost: what they gave is not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from ..center.calls import REMEMBER
from ..center.center import TimeoutCenter
from ..errors import EnvelopeError
from ..metrics import COUNTERS
from ..model import message as envelope
from ..model.results import Delivery
from ..model.topic import Topic
from ..scripts.call import ScriptCall
from .connections import BROKEN

if TYPE_CHECKING:
    from ..center.upkeep import Event
    from ..model.results import Popped

# -- pops that are on their way, and those whose replies were lost
#
# The process keeps them, and not a connection: who connects again asks for them by name. What
# nobody asks
# for is given back.

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
    """Those of a process and a server.

    lock: makes a lock that is held for moments
    clock: monotonic seconds
    """

    def __init__(
        self, lock: Callable[[], Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lock = lock()
        self._clock = clock
        self._flying: dict[str, UnansweredPop] = {}
        self._lost: dict[str, UnansweredPop] = {}

    def __bool__(self) -> bool:
        return bool(self._flying or self._lost)

    def expect(self, flight: UnansweredPop) -> None:
        """It is on its way."""
        self._flying[flight.name] = flight

    def arrive(self, flight: UnansweredPop) -> None:
        """Its reply has come."""
        self._flying.pop(flight.name, None)

    def lose(self, flight: UnansweredPop) -> bool:
        """Its reply will not come. Whether what it gave can still be asked for."""
        now = self._clock()
        with self._lock:
            self._flying.pop(flight.name, None)
            if flight.lost == NOT_LOST:
                flight.lost = now
            else:
                flight.again = now + AGAIN
            if now > flight.lost + REMEMBER:
                return False
            self._lost[flight.name] = flight
            return True

    @property
    def any_lost(self) -> bool:
        return bool(self._lost)

    def take(self, topics: Collection[str]) -> list[UnansweredPop]:
        """Those that were lost of these topics: the caller asks for what they gave."""
        now = self._clock()
        return self._take(lambda one: one.topic.name in topics and now >= one.again)

    def take_kept(self) -> Iterator[UnansweredPop]:
        """Those that nobody has asked for, each when the caller comes to it: the caller gives back
        what it gave, and may end before it comes to all."""
        now = self._clock()
        for flight in list(self._lost.values()):
            if now >= flight.lost + KEPT:
                yield from self._take(partial(is_, flight))

    def _take(self, which: Callable[[UnansweredPop], bool]) -> list[UnansweredPop]:
        with self._lock:
            taken = [one for one in self._lost.values() if which(one)]
            for one in taken:
                del self._lost[one.name]
        return taken

    def flying(self) -> list[UnansweredPop]:
        """Those whose replies have been on their way for so long that their leases are to be
        renewed."""
        now = self._clock()
        return [one for one in list(self._flying.values()) if now >= one.left + one.visibility / 6]

    def kept_until(self) -> float:
        """Monotonic seconds when the first of those that nobody asks for is to be given back."""
        return min((one.lost + KEPT for one in list(self._lost.values())), default=float("inf"))

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

logger = logging.getLogger(__name__)

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


# -- a snapshot of what a consumer has in hand, for people

#: Messages that are named one by one, at most.
MAX_SHOWN = 100


def snapshot(channel: Any) -> dict[str, Any]:
    """A snapshot of what this process holds for a channel and has counted; times in seconds.

    topics: per topic that it consumes, its slots, whether it holds more than there was room
        for, what this process has counted since it started, and how late it has delivered
    capacity: how many messages could start at once, and how many it would take
    leases: how many delivered messages it keeps leased, and those messages
    held: messages fetched ahead of their time, or of a process that could start them
    claims: the next times that it serves, and whose
    clock_ahead: by how much Redis's clock is ahead of this machine's, at least
    """
    poller, lease_keeper = channel.poller, channel.lease_keeper
    now = time.monotonic()
    server_us = poller.clock.at(now)
    state = poller.states.get(channel)
    leases = lease_keeper.leases.held()
    held, claims = [], []
    queued = [entry for _, entry in list(state.ready)] if state else []
    for _, _, owner, item in [*queued, *poller.dispatcher.due]:
        if owner is not state:
            continue
        if isinstance(item, Delivery):
            held.append({**_message(item), "due_in": (item.action_us - server_us) / 1e6})
        else:
            topic, slot, us = item
            claims.append({"topic": topic, "slot": slot, "due_in": (us - server_us) / 1e6})
    free, room, _ = channel.capacity(*((state.buffered, len(state.early)) if state else (0, 0)))
    return {
        "prefix": channel.center.keys.prefix,
        "clock_ahead": server_us / 1e6 - time.time() if poller.clock.known else None,
        "topics": {name: _topic(channel, name) for name in (state.pending.topics if state else ())},
        "capacity": {"free": free, "room": room},
        "leases": {
            "count": len(leases),
            "renewed_in_time": lease_keeper.in_time(),
            "messages": [_message(one) for one, _ in leases[:MAX_SHOWN]],
        },
        "held": sorted(held, key=itemgetter("due_in"))[:MAX_SHOWN],
        "claims": sorted(claims, key=itemgetter("due_in"))[:MAX_SHOWN],
    }


def _message(delivery: Delivery) -> dict[str, Any]:
    return {
        "id": delivery.id,
        "task": task_of(delivery.body, delivery.id) or None,
        "topic": delivery.topic,
        "slot": delivery.slot,
        "failures": delivery.failures,
    }


def _topic(channel: Any, name: str) -> dict[str, Any]:
    topic = channel.center.registry.known(name)
    found: dict[str, Any] = {
        "slots": topic.slots if topic is not None else None,
        "backlog": name in channel.poller.states[channel].pending.backlog,
    }
    counts = channel.center.metrics.topics.get(name)
    if counts is not None:
        found["counts"] = {counter: getattr(counts, counter) for counter in COUNTERS}
        found["late_p50"] = counts.lateness.quantile(0.5)
        found["late_p99"] = counts.lateness.quantile(0.99)
    return found
