"""Transient queues that could not be deleted when they were left, and are to be as soon as the
server can be reached again.

Such a queue may be declared again at any time, under the same name, and what is owed must not hit
the new one. Whoever declares it withdraws the deletion first. Nothing is sent of a deletion that is
withdrawn; and what was sent before, and is not answered, the server refuses after a moment, for
which the one who declares waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..center.center import TimeoutCenter
from ..center.exchanges import Bindings
from ..model.topic import Topic
from ..scripts.call import ScriptCall, load

#: Seconds after which the server refuses a call of a deletion.
CALL_EXPIRES = 2.0

#: Seconds beyond that after which nobody waits for it any more: clocks differ in their pace.
MARGIN = 0.1


@dataclass
class Deletion:
    """A queue that is to be deleted."""

    queue: str
    #: exchange -> the queue's bindings to it that this process has made, as they are in Redis
    bindings: Mapping[str, Sequence[str]] = field(default_factory=dict)
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
            deletion = Deletion(queue, {**before.bindings, **bindings} if before else bindings)
            if before is not None:
                deletion.unanswered_until = before.unanswered_until
                deletion.topic = before.topic
            self._owed[queue] = deletion

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
        """Those that are to be tried."""
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
        """It is deleted, or cannot be."""
        with self._lock:
            if self._owed.get(deletion.queue) is deletion:
                del self._owed[deletion.queue]


def calls_of(center: TimeoutCenter, deletion: Deletion) -> Iterator[ScriptCall]:
    """The calls that delete the queue, in the order in which they are to run. Their first argument
    is to be set."""
    queue, keys = deletion.queue, center.keys
    deletion.topic = topic = center.declared(queue) or deletion.topic
    whole = [keys.wake(queue), keys.counted(queue), *keys.minutes(queue)]
    entries = [
        (key, "stale", member)
        for exchange, members in deletion.bindings.items()
        for member in members
        for key in (keys.bindings(exchange), keys.readers(exchange))
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
        expires = center.run(call) + int(CALL_EXPIRES * 1000)
        if not owed.may_send(deletion, clock()):
            return
        done_at = center.run(call._replace(args=(expires, *call.args[1:])))
        owed.answered(deletion)
        if done_at > expires:
            return  # too late: at the next attempt
    bindings = Bindings(center)
    for exchange in deletion.bindings:
        bindings.of(exchange)  # drops what is stale, and with the last binding the streams
    owed.done(deletion)
