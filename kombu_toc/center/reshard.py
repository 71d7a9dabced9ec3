"""Changes the slot count of a topic while producers and consumers use it."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from ..client.connection import pipelined
from ..errors import EnvelopeError, ReshardError
from ..model import message
from ..model.delivery import encoded_key_in, trait
from ..model.limits import MAX_SLOTS
from ..model.message import decode_key, encode_key, is_hashed, key_of
from ..model.results import OnProgress, tell_nobody
from ..model.topic import Slot, Topic, base_of, check_slots, slot_of
from ..scripts.call import PageSize, ScriptCall, as_bytes, load, texts
from .center import TimeoutCenter
from .registry import RELOAD
from .upkeep import arrive, carry_on, depart_call, move_claims
from .waiting import sleep_of

# -- what rates of keys have been used up to, while a topic is given another number of slots

#: Keys that one call reads.
LOOK = 500


def move_paces(client: Any, topic: Topic, *, ended: bool) -> None:
    """Have each key's rates, of starts and of puts, know in its new slot what they know in its
    former one. What waits moves with its own; this is for keys of which nothing waits.

    ended: whether nobody uses the former slots any more: then they forget it
    """
    for number in range(topic.slot_span):
        slot = topic.slot(number)
        for name in ("pace", "put_pace"):
            source = getattr(slot, name)
            every = client.zscan_iter(source, count=LOOK)
            while page := list(islice(every, LOOK)):
                for target, used in _by_target(topic, number, page).items():
                    _note(client, source, getattr(topic.slot(target), name), used)
            if ended and number >= topic.slots:
                client.delete(source)


def _by_target(
    topic: Topic, number: int, page: list[tuple[bytes, float]]
) -> dict[int, dict[bytes, float]]:
    """What goes from a slot to which others."""
    by_target: dict[int, dict[bytes, float]] = defaultdict(dict)
    fewest = min(topic.slots, *topic.declaration.draining_counts or (topic.slots,))
    for member, used in page:
        if member in (b"", b":"):  # of the whole topic
            continue
        if is_hashed(name := member.decode()):
            # Any slot may be its own that this one is divided into.
            targets: Iterable[int] = range(number % fewest, topic.slots, fewest)
        else:
            targets = (slot_of(decode_key(name), topic.slots),)
        for target in targets:
            if target != number:
                by_target[target][member] = used
    return by_target


def _note(client: Any, source: str, target: str, used: dict[bytes, float]) -> None:
    client.zadd(target, used, gt=True)
    lasts = client.pttl(source)
    if lasts > 0 and client.pttl(target) < lasts:
        client.pexpire(target, lasts)


# -- changes the slot count of a topic while producers and consumers use it
#
# The declaration has the current count (``slots``) and other counts by which messages may still lie
# in the topic (``draining_counts``). Messages are put into slots of the current count. Consumers,
# counts and look-ups by id read the slots of all these counts. So a message is delivered in time
# wherever it lies, and no message has to be moved for that. The change consists of steps. After
# each step, and within it, the topic is consistent: if the process is killed, run it again.
#
# 0. Only on one server, of a topic that is limited: the new count is added to ``draining_counts``.
#    Nothing is put by it yet. Six seconds later all consumers read the slots of both counts, and
#    count what runs of a key in all of them together.
#
# 1. The declaration gets the new count, and the old count is added to ``draining_counts``, by one
#    write, unless somebody else has changed the declaration. From now on:
#
#    - A consumer learns of new slots from the first announcement of one, or within about a second:
#      it reads the declaration with every look into all slots.
#    - A producer reads the declaration within five seconds (one of an older release, within half a
#      minute), and puts messages into old slots until then. A publish that is repeated because its
#      reply was lost goes into the same slot again, which recognises it.
#
# 2. Half a minute later, no producer uses the old count, and nobody looks anything up by the old
#    declaration. Waiting and dead messages are moved to their new slots, some messages a call, by a
#    script that is atomic and keeps their scores: at no moment is a message in both slots or in
#    none. A look-up by id reads the slot that a message may come from before the slot that it may
# go
#    to. Messages in flight stay, for their consumers will settle them there.
#
#    - To fewer slots: slot n is emptied into slot n mod count; every count is a power of two. This
#      is repeated until the slots beyond the new count are empty.
#    - To more slots: the slot of a message follows from its slot basis, which is in its envelope,
#      or else from the key that it was put with, which is among its traits. (What its headers say
#      of the key may be another one: the topic's key header may have been changed since.) A body
#      that is no envelope was put by a program that uses the center directly. If it has no key, or
#      another slot basis than its key, or a key of which only the hash is known, it stays where it
#      is until it is delivered. Old slots remain slots of the topic, so one look is enough.
#
# 3. When no message lies by another count, ``draining_counts`` is emptied, unless somebody else has
#    changed the declaration.
#
# A producer that was suspended, or that has kept a batch for minutes, may put by an old count even
# later. Such a message is announced like any other. The consumer that claims an announcement of a
# slot that the topic no longer has first writes the count back into ``draining_counts``
# (:meth:`.registry.Registry.reach`). This module looks for messages in all possible slots, whatever
# ``draining_counts`` says.
#
# Two live messages may share an id; each slot keeps them apart. Two slots may each have a message
# of this id. Where they meet, the second becomes a copy, as if it had been put there.
#
# A message can only be moved between two slots on one server. On a Cluster, and with
# ``move=False``, messages stay where they are until they are delivered. Run again after the last
# one is gone, this module empties ``draining_counts``.

#: Seconds after which no producer uses a count that was changed: one of an older release reads a
#: declaration again after 30.
SETTLE = 35.0

#: Seconds after which all consumers have read a declaration that was changed, and what they had
#: sent by the former one has run.
KNOWN = RELOAD + 1.0

#: Messages that one call moves.
BATCH = 100

#: Seconds between looks for what is still in flight.
PAUSE = 0.5


class Resharded(NamedTuple):
    """How far a call of :func:`reshard_topic` has come."""

    topic: str
    slots: int
    moved: int  #: messages moved by this call
    left: int  #: messages that lie in another slot than the topic's slot count picks
    done: bool  #: nothing is left. If not, run it again later; the messages are delivered anyway


def reshard_topic(
    center: TimeoutCenter,
    topic: str,
    slots: int,
    *,
    settle: float = SETTLE,
    patience: float = 0.0,
    move: bool = True,
    on_progress: OnProgress = tell_nobody,
) -> Resharded:
    """Give a topic another slot count while it is in use. A repeated call goes on where the last
    one ended.

    settle: seconds after which every producer has read the new declaration
    patience: seconds to wait after that for messages in flight in slots that go away
    move: move messages; without it they stay until they are delivered
    on_progress: told how many messages it has moved

    Raises SlotCountError for an impossible count, ConfigurationError for more slots than one on a
    Cluster if a limit counts the whole queue, ReshardError if there is no such topic, or if
    somebody else changes or deletes it meanwhile.
    """
    check_slots(topic, slots)
    _make_known(center, topic, slots, min(settle, KNOWN))
    declared = _switch(center, topic, slots)
    declaration = declared.declaration
    counts = bool(declaration.lanes or declaration.put_gates)
    if counts and declaration.draining_counts:
        move_paces(center.client, declared, ended=False)
    began = time.monotonic()
    moved = 0
    while declared.declaration.draining_counts:
        left = _beyond(center, declared)
        state = Resharded(topic, slots, moved, left, False)
        rest = began + settle - time.monotonic()
        pause = PAUSE
        if rest <= 0:
            start = time.monotonic()
            # Before anything is looked at: it may go to a slot that is.
            moved += carry_on(center.runner, center.context, declared)
            for number, left in _move(center, declared) if move else ():
                moved += number
                on_progress(moved, moved + left)
            left = _beyond(center, declared) or sum(
                unknown + sum(map(len, by_target.values()))
                for _, by_target, unknown in _look(center, declared)  # because of a smaller count
            )
            state = Resharded(topic, slots, moved, left, False)
            if not left and declared.declaration.unique:
                move_claims(center.client, declared)
            if not left and counts:
                move_paces(center.client, declared, ended=True)
            if not left and center.registry.redeclare(
                declared, replace(declared.declaration, draining_counts=())
            ):
                break
            pause = max(PAUSE, 5 * (time.monotonic() - start))  # all of it has been looked at
            rest += patience
            if left and rest <= 0:
                return state
        on_progress(moved, moved + left)
        # For producers, or for who has messages.
        sleep_of(center.client)(max(min(rest, pause), 0.01))
        declared = _standing(center, topic, slots)
    return Resharded(topic, slots, moved, 0, True)


def _make_known(center: TimeoutCenter, name: str, slots: int, seconds: float) -> None:
    """Have the consumers of a limited topic read the slots of the new count before anything is put
    there: a key is counted over all the slots that they know of."""
    for _ in range(100):
        topic = center.registry.declared(name)
        if topic is None or center.clustered:
            return
        old = topic.declaration
        if not old.lanes or old.expires or old.slots == slots:
            return
        wanted = replace(old, draining_counts=tuple(sorted({*old.draining_counts, slots})))
        if wanted == old or center.registry.redeclare(topic, wanted):
            sleep_of(center.client)(seconds)
            return


def _switch(center: TimeoutCenter, name: str, slots: int) -> Topic:
    """Write the new count into the declaration; return the topic as it then stands."""
    for _ in range(100):
        topic = center.registry.declared(name)
        if topic is None:
            raise ReshardError(f"there is no queue {name!r}")
        old = topic.declaration
        if old.expires:
            raise ReshardError(
                f"queue {name!r} goes away by itself when nobody uses it; its slots stay"
            )
        if center.clustered and slots != 1:
            old.check_one_slot(name, slots)
        was = {*old.draining_counts, *_counts_in_use(center, topic), old.slots} - {slots}
        wanted = replace(
            old,
            slots=slots,
            draining_counts=tuple(sorted(was)),
            previous_counts=tuple(sorted({*old.previous_counts, old.slots} - {slots})),
        )
        if center.registry.redeclare(topic, wanted):
            return Topic(name, wanted, topic.prefix, topic.steps)
    raise ReshardError(f"queue {name!r} is being changed by somebody else all the time")


def _standing(center: TimeoutCenter, name: str, slots: int) -> Topic:
    topic = center.registry.declared(name)
    if topic is None:
        raise ReshardError(f"queue {name!r} was deleted meanwhile")
    if topic.slots != slots:
        raise ReshardError(
            f"queue {name!r} was given {topic.slots} slots by somebody else meanwhile"
        )
    return topic


def _counts_in_use(center: TimeoutCenter, topic: Topic) -> set[int]:
    """The smallest count that includes every slot that holds messages; empty if `slot_span`
    does."""
    numbers = range(topic.slot_span, MAX_SLOTS)
    asked = (("EXISTS", slot.body, slot.leaving) for slot in map(topic.slot, numbers))
    replies = pipelined(center.client, asked)
    there = [n for n, exists in zip(numbers, replies, strict=True) if exists]
    return {1 << max(there).bit_length()} if there else set()


def _beyond(center: TimeoutCenter, topic: Topic) -> int:
    """How many messages lie in slots beyond the topic's new count."""
    slots = [topic.slot(number) for number in range(topic.slots, topic.slot_span)]
    asked: list[tuple[str, str]] = []
    for slot in slots:
        sets = (slot.prepare, slot.dead, *slot.stores)
        asked += ("HLEN", slot.body), *(("ZCARD", key) for key in sets)
    replies = pipelined(center.client, asked)
    width = 3 + len(topic.steps)
    # A body without an entry or an entry without a body counts too: 'repair' mends that.
    return sum(
        max(replies[i], sum(replies[i + 1 : i + width])) for i in range(0, len(replies), width)
    )


def _move(center: TimeoutCenter, topic: Topic) -> Iterator[tuple[int, int]]:
    """Move messages; yield for each call how many it moved, and how many are left as far as is
    known."""
    left = _beyond(center, topic)
    slots = [topic.slot(number) for number in range(topic.slots, topic.slot_span)]
    stay: dict[int, int] = defaultdict(int)  # messages of a slot that wait for others there
    while slots:
        asked = (
            ("ZRANGE", key, stay[slot.number], stay[slot.number] + BATCH - 1)
            for slot in slots
            for key in (*slot.stores, slot.dead)
        )
        pages = iter(pipelined(center.client, asked))
        again = []
        for slot in slots:
            ids = texts([id for _ in (*slot.stores, slot.dead) for id in next(pages)])
            target = topic.slot(slot.number % topic.slots)
            moved = 0
            for some in _move_all(center, topic, slot, target, ids):
                moved += some
                left -= some
                yield some, left
            if center.clustered:
                stay[slot.number] += len(ids) - moved
            if moved or (ids and stay[slot.number]):  # if not, only messages in flight are left
                again.append(slot)
        slots = again
    for source, by_target, _ in _look(center, topic):
        for number, ids in by_target.items():
            for some in _move_all(center, topic, source, topic.slot(number), ids):
                yield some, left


def _move_all(
    center: TimeoutCenter, topic: Topic, source: Slot, target: Slot, ids: list[str]
) -> Iterator[int]:
    """Move messages from one slot to another; yield how many each call moved."""
    at = 0
    while at < len(ids):
        some = ids[at : at + BATCH]
        if center.clustered:
            # Refused, on a full server, before anything is taken.
            center.client.set(as_bytes(target.sent("=full")), b"", px=1)
            call = depart_call(center.context, topic, source, target, some)
            moved, done, *batch = center.runner.run(call)
            if moved:
                arrive(center.runner, center.context, topic, source, *batch)
        else:
            moved, done = center.runner.run(_moving(center, topic, source, target, some))
        at += done
        yield moved


def _look(center: TimeoutCenter, topic: Topic) -> Iterator[tuple[Slot, dict[int, list[str]], int]]:
    """Look through the slots of smaller counts, page by page.

    Yields the slot, {slot it belongs to: ids}, and how many messages belong to an unknown slot.
    """
    fewer = [count for count in topic.declaration.draining_counts if count < topic.slots]
    for number in range(max(fewer, default=0)):
        source = topic.slot(number)
        cursor = 0
        page_size = PageSize(BATCH, center.context.pop_bytes)
        while True:
            cursor, page = center.client.hscan(source.body, cursor, count=page_size.next)
            page_size.read(sum(map(len, page.values())))
            tokens = center.client.hmget(source.tokens, list(page)) if page else []
            by_target: dict[int, list[str]] = defaultdict(list)
            unknown = 0
            for (raw, body), token in zip(page.items(), tokens, strict=True):
                id = raw.decode("utf-8", "surrogatepass")
                token = "" if token is None else token.decode()
                basis = _basis(id, body, token, topic.declaration.key_header)
                counts = (topic.slots, *fewer)
                if basis is None or number not in {slot_of(basis, count) for count in counts}:
                    unknown += 1
                elif slot_of(basis, topic.slots) != number:
                    by_target[slot_of(basis, topic.slots)].append(id)
            yield source, by_target, unknown
            if not cursor:
                break


def _basis(id: str, body: bytes, token: str, key_header: str | None) -> str | None:
    """The slot basis of a message; None if nothing says it.

    token: what is known of the message itself
    key_header: the header that names the keys of the topic's messages
    """
    headers: dict[Any, Any] | None = None
    with contextlib.suppress(EnvelopeError):
        headers = message.unpack(body, id)["headers"]
    if headers and (basis := headers.get("x-slot-basis")) is not None and str(basis):
        return str(basis)
    if (encoded := encoded_key_in(token)) is not None:
        return None if trait(token, "o") else _key(id, encoded, headers or {}, key_header)
    if headers is None:
        return None
    for name in ("x-key", key_header, message.UNIQUE):
        if key := key_of(id, headers.get(name)):
            return key
    named = headers.get("id")
    return named if isinstance(named, str) and named else id


def _key(id: str, encoded: str, headers: dict[Any, Any], key_header: str | None) -> str | None:
    """The key that scripts know as `encoded`; None if it cannot be told."""
    if not is_hashed(encoded) and encode_key(key := decode_key(encoded)) == encoded:
        return key
    keys = (key_of(id, headers.get(name)) for name in ("x-key", key_header))
    return next((key for key in keys if key and encode_key(key) == encoded), None)


def _moving(
    center: TimeoutCenter, topic: Topic, source: Slot, target: Slot, ids: list[str]
) -> ScriptCall:
    """The call that moves messages. Result: how many it moved, and how many it looked at: it ends
    early if they are large."""
    keys = [*source.script_keys, *target.script_keys]
    logs, most = topic.declaration.logs, center.context.pop_bytes
    args: list[str | int] = [len(topic.steps), source.number, target.number, most, logs]
    for id in ids:
        base = base_of(id)
        keys += (source.copies(base), target.copies(base), target.copies(id))
        args += (id, base)
    keys += (source.log, target.log, source.claims, target.claims, *source.lane_keys)
    keys += (target.pace, target.holders)
    keys.append(center.keys.wake(topic.name))
    return ScriptCall(load("move"), keys, args, tuple)
