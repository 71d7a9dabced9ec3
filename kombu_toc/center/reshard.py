"""Changes the slot count of a topic that producers and consumers are using.

Messages are put into ``slots`` slots, and may still lie in others by the counts in ``was``; whoever
consumes, counts, or looks a message up by id looks into all of them. So nothing need be moved for
a message to be delivered in time, and the change goes in steps, each of which leaves everything
right. Whoever is killed after any of them, or within one, just runs it again.

1. The declaration gets the new count, and the old one goes to ``was``: one write, if nobody else
   has changed it. From now on,

   - who consumes learns of new slots by the first announcement from one, or, if never idle,
     within about a second, for it reads the declaration anew with every look into all slots;
   - who produces learns of it within half a minute (RELOAD), and puts into old slots until then.
     A publish that is repeated because its reply was lost goes where it went first, for that slot
     remembers it.

2. Half a minute later nothing is put by the old count any more, and nobody looks for anything by
   the old declaration. What waits or is dead is moved to where it belongs, some messages a call,
   by a script that is atomic and takes their scores along: there is no moment at which a message
   is in both slots, or in none. Who looks one up by id looks first where it may come from, then
   where it goes to. What is in flight stays, for its consumer will settle it there.

   - To fewer slots: slot n is emptied into slot n mod count, for every count is a power of two.
     It is done over and over until the slots that are to go are empty.
   - To more: where a message belongs is known from its slot basis, and that from the envelope.
     Bodies that are no envelopes are the center's own callers': they stay, and leave when they
     are delivered. Old slots are slots still, so it need not be done twice.

3. Nothing being left by other counts, ``was`` is emptied, if the declaration is what it was.

A put that comes later than that by the old count, from a process that was suspended or that has
kept a batch for minutes, is announced like any other. Who claims the announcement of a slot that
the topic has no more writes the count back into ``was`` (``TimeoutCenter.reach``) before it looks
there; and this module looks for messages in all slots there could be, whatever ``was`` says.

Two live messages may share an id, which each slot sees to for itself. In two slots they may both
have it, and where they meet the one that comes second becomes a copy, as if it had been put there.

Moving takes both slots on one server. On a Cluster, and with ``move=False``, messages are left to
be delivered from where they are; run again when the last is gone, it empties ``was``.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from ..errors import EnvelopeError, ReshardError
from ..model import envelope
from ..model.keys import Slot
from ..model.limits import MAX_SLOTS
from ..model.topic import Topic, base_of, check_slots, slot_of
from ..scripts.call import Paces, ScriptCall
from ..scripts.loader import load
from .center import TimeoutCenter
from .registry import RELOAD

#: Seconds after which nobody puts by a count that has been changed.
SETTLE = RELOAD + 5.0

#: Messages that one call moves.
BATCH = 100

#: Seconds between looks for what is still in flight.
PAUSE = 0.5


class Resharded(NamedTuple):
    """What a call of :func:`reshard_topic` has come to."""

    topic: str
    slots: int
    moved: int  #: messages moved by this call
    left: int  #: messages that lie where the topic's slot count would not put them
    done: bool  #: nothing is left; else run it again later: meanwhile they are delivered as ever


def reshard_topic(
    center: TimeoutCenter,
    topic: str,
    slots: int,
    *,
    settle: float = SETTLE,
    patience: float = 0.0,
    move: bool = True,
    report: Callable[[Resharded], None] | None = None,
) -> Resharded:
    """Give a topic another slot count, while it is in use; to repeat it is to go on with it.

    settle: seconds after which every producer has read the new declaration
    patience: seconds to wait beyond that for what is in flight in slots that are to go
    move: whether messages are moved, or left to be delivered from where they are, as always on a
        Cluster
    report: is told now and then how far it is

    Raises SlotCountError for a count that cannot be, ReshardError if there is no such topic, or if
    somebody else changes or deletes it meanwhile.
    """
    check_slots(topic, slots)
    found = _switch(center, topic, slots)
    began = time.monotonic()
    move = move and not center.clustered
    moved = 0
    while found.declaration.draining_counts:
        left = _beyond(center, found)
        state = Resharded(topic, slots, moved, left, False)
        rest = began + settle - time.monotonic()
        pause = PAUSE
        if rest <= 0:
            start = time.monotonic()
            for some, left in _move(center, found) if move else ():
                moved += some
                if report is not None:
                    report(state._replace(moved=moved, left=left))
            left = _beyond(center, found) or _misplaced(center, found)
            state = Resharded(topic, slots, moved, left, False)
            if not left and center.redeclare(found, replace(found.declaration, draining_counts=())):
                break
            pause = max(PAUSE, 5 * (time.monotonic() - start))  # all of it has been looked at
            rest += patience
            if left and rest <= 0:
                return state
        if report is not None:
            report(state)
        time.sleep(max(min(rest, pause), 0.01))  # for producers, or for who has messages
        found = _standing(center, topic, slots)
    return Resharded(topic, slots, moved, 0, True)


def _switch(center: TimeoutCenter, name: str, slots: int) -> Topic:
    """Write the new count into the declaration; return the topic as it then stands."""
    for _ in range(100):
        topic = center.declared(name)
        if topic is None:
            raise ReshardError(f"there is no queue {name!r}")
        old = topic.declaration
        if old.expires:
            raise ReshardError(
                f"queue {name!r} goes away by itself when nobody uses it; its slots stay"
            )
        was = {*old.draining_counts, *_counts_in_use(center, topic), old.slots} - {slots}
        wanted = replace(
            old,
            slots=slots,
            draining_counts=tuple(sorted(was)),
            previous_counts=tuple(sorted({*old.previous_counts, old.slots} - {slots})),
        )
        if center.redeclare(topic, wanted):
            return Topic(name, wanted, topic.prefix, topic.steps)
    raise ReshardError(f"queue {name!r} is being changed by somebody else all the time")


def _standing(center: TimeoutCenter, name: str, slots: int) -> Topic:
    topic = center.declared(name)
    if topic is None:
        raise ReshardError(f"queue {name!r} was deleted meanwhile")
    if topic.slots != slots:
        raise ReshardError(
            f"queue {name!r} was given {topic.slots} slots by somebody else meanwhile"
        )
    return topic


def _counts_in_use(center: TimeoutCenter, topic: Topic) -> set[int]:
    """The smallest count that includes every slot that holds something; empty if `span` does."""
    numbers = range(topic.slot_span, MAX_SLOTS)
    with center.client.pipeline(transaction=False) as pipe:
        for number in numbers:
            pipe.exists(topic.slot(number).body)
        there = [n for n, exists in zip(numbers, pipe.execute(), strict=True) if exists]
    return {1 << max(there).bit_length()} if there else set()


def _beyond(center: TimeoutCenter, topic: Topic) -> int:
    """How many messages lie in slots that the topic is to have no more."""
    slots = [topic.slot(number) for number in range(topic.slots, topic.slot_span)]
    with center.client.pipeline(transaction=False) as pipe:
        for slot in slots:
            pipe.hlen(slot.body)
            for key in (slot.prepare, slot.dead, *slot.stores):
                pipe.zcard(key)
        replies = pipe.execute() if slots else []
    width = 3 + len(topic.steps)
    # A body without an entry or an entry without a body counts too: 'repair' mends that.
    return sum(
        max(replies[i], sum(replies[i + 1 : i + width])) for i in range(0, len(replies), width)
    )


def _move(center: TimeoutCenter, topic: Topic) -> Iterator[tuple[int, int]]:
    """Move what can be moved; yield (moved, left to be moved as far as is known), call by call."""
    left = _beyond(center, topic)
    slots = [topic.slot(number) for number in range(topic.slots, topic.slot_span)]
    while slots:
        with center.client.pipeline(transaction=False) as pipe:
            for slot in slots:
                for key in (*slot.stores, slot.dead):
                    pipe.zrange(key, 0, BATCH - 1)
            pages = iter(pipe.execute())
        again = []
        for slot in slots:
            ids = _texts([id for _ in (*slot.stores, slot.dead) for id in next(pages)])
            target = topic.slot(slot.number % topic.slots)
            moved = 0
            for some in _move_all(center, topic, slot, target, ids):
                moved += some
                left -= some
                yield some, left
            if moved:  # else nothing is left but what cannot be moved
                again.append(slot)
        slots = again
    for source, by_target, _ in _look(center, topic):
        for number, ids in by_target.items():
            for some in _move_all(center, topic, source, topic.slot(number), ids):
                yield some, left


def _move_all(
    center: TimeoutCenter, topic: Topic, source: Slot, target: Slot, ids: list[str]
) -> Iterator[int]:
    """Move messages from one slot to another; how many each call has moved."""
    at = 0
    while at < len(ids):
        moved, done = center.run(_moving(center, topic, source, target, ids[at : at + BATCH]))
        at += done
        yield moved


def _misplaced(center: TimeoutCenter, topic: Topic) -> int:
    """How many messages a smaller count may have put where this one would not."""
    return sum(
        unknown + sum(map(len, by_target.values()))
        for _, by_target, unknown in _look(center, topic)
    )


def _look(center: TimeoutCenter, topic: Topic) -> Iterator[tuple[Slot, dict[int, list[str]], int]]:
    """Look through the slots that a smaller count has used, page by page: the slot, what belongs
    into others, and how many there are of which it is not known."""
    fewer = [count for count in topic.declaration.draining_counts if count < topic.slots]
    for number in range(max(fewer, default=0)):
        source = topic.slot(number)
        cursor = 0
        paces = Paces(BATCH, center.pop_bytes)
        while True:
            cursor, page = center.client.hscan(source.body, cursor, count=paces.next)
            paces.read(sum(map(len, page.values())))
            by_target: dict[int, list[str]] = defaultdict(list)
            unknown = 0
            for raw, body in page.items():
                id = raw.decode("utf-8", "surrogatepass")
                basis = _basis(id, body)
                counts = (topic.slots, *fewer)
                if basis is None or number not in {slot_of(basis, count) for count in counts}:
                    unknown += 1
                elif slot_of(basis, topic.slots) != number:
                    by_target[slot_of(basis, topic.slots)].append(id)
            yield source, by_target, unknown
            if not cursor:
                break


def _basis(id: str, body: bytes) -> str | None:
    """The slot basis of a message that Kombu has sent; None if it is not known."""
    try:
        headers = envelope.unpack(body, id)["headers"]
    except EnvelopeError:
        return None
    basis = headers.get("x-slot-basis")
    if basis is not None and str(basis):
        return str(basis)
    named = headers.get("id")
    return named if isinstance(named, str) and named else id


def _moving(
    center: TimeoutCenter, topic: Topic, source: Slot, target: Slot, ids: list[str]
) -> ScriptCall:
    """The call that moves messages. Result: how many were moved, and how many it has looked at: it
    ends early if they are large."""
    keys: list[str] = []
    for slot in (source, target):
        keys += (
            slot.announced_times,
            slot.prepare,
            slot.body,
            slot.dead,
            slot.reasons,
            slot.tokens,
            *slot.stores,
        )
    args: list[str | int] = [len(topic.steps), source.number, target.number, center.pop_bytes]
    for id in ids:
        base = base_of(id)
        keys += (source.copies(base), target.copies(base), target.copies(id))
        args += (id, base)
    return ScriptCall(load("move"), (*keys, center.keys.wake(topic.name)), args, tuple)


def _texts(raw: list[bytes]) -> list[str]:
    return [item.decode("utf-8", "surrogatepass") for item in raw]
