"""Delivers messages, and ends their deliveries."""

from __future__ import annotations

import hashlib
import heapq
import logging
import re
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count as counter
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from ..errors import ConfigurationError, ReceiptError
from ..metrics import TopicCounts
from ..model import scores
from ..model.delivery import shown
from ..model.results import DEAD, IN_FLIGHT, WAITING, Delivery, Found, Popped, Settled
from ..model.topic import Slot, Topic, base_of, check_name
from ..scripts.call import Names, ScriptCall, as_bytes, load, parts_of, rows, text, texts
from .calls import (
    ERROR_LENGTH,
    LOOK,
    REASON_LENGTH,
    RECOVER,
    REMEMBER,
    Choice,
    Commands,
    Context,
    PopRequest,
    batches_by_slot,
    divide_evenly,
    encoded,
    lease_ms,
    own_of,
    read_deliveries,
    slot_numbers,
    terms_of,
)
from .core import CenterPart, Core
from .messages import CALLS_TOGETHER, IDS_PER_CALL, Messages, ids_of
from .upkeep import Leases
from .waiting import Flown, Gathered, Waiting, sleep_of

# -- pops of messages that the caller chooses, by id or by a predicate, instead of the next ones

#: Messages that are read at first for a predicate.
FIRST_PAGE = 16


class Wanted(NamedTuple):
    """A message that is to be picked.

    score, digest: those that it had when it was seen: then only it is, and no copy; an id alone
        stands for all messages that share it
    """

    id: str
    score: int | str = ""
    digest: str = ""


class Picked(NamedTuple):
    """What one call of a pick did."""

    popped: Popped
    looked: int  #: how many of the wanted messages it has looked at


def pick_call(
    context: Context,
    topic: Topic,
    slot: Slot,
    name: str,
    wanted: Sequence[Wanted],
    limit: int,
    budget: int,
    *,
    early: bool = False,
    visibility: float | None = None,
) -> ScriptCall:
    """Deliver messages of a slot by id. Result: :class:`Picked`; the caller removes what is
    `stray`.

    name: a name that no pop and no other pick has
    wanted: which messages
    limit: how many of them at most
    budget: bytes that their bodies may have together; the first may have any
    early: also those that are not due yet
    visibility: seconds that they may stay unacknowledged and unrenewed; as each message says, or
        its topic, unless given
    """
    limits = topic.declaration.limits(context.limits)
    counts = context.counts(topic)

    def parse(raw: list[Any]) -> Picked:
        now, looked, more, flat, gone, late, *_ = raw
        messages = read_deliveries(topic, (slot.number,), name, flat)
        bare, expired = texts(gone), texts(late)
        counts.delivered += len(messages)
        if expired:
            counts.expire(len(expired), limits.dead_expired)
        left = bare if limits.dead_expired else bare + expired
        stray = [(slot.copies(id.rpartition("#")[0]), id) for id in left if "#" in id]
        popped = Popped(int(now), bool(more), messages, bare, [], [], [], stray, expired)
        return Picked(popped, looked)

    lanes = topic.declaration.lanes
    call = context.announcing(
        topic,
        "pick",
        (*slot.script_keys, *(slot.copies(one.id) for one in wanted)),
        (
            len(slot.stores),
            slot.number,
            limit,
            budget,
            int(early),
            lease_ms(visibility, limits),
            terms_of(limits, own_of(visibility, limits)),
            topic.declaration.retries,
            name,
            *(value for one in wanted for value in one),
        ),
        parse,
        limited=slot if lanes else None,
    )
    if not lanes or not topic.declaration.draining_counts or context.clustered:
        return call
    # A key may have messages in other slots, too.
    others: list[str] = []
    for one in topic.all_slots():
        if one.number != slot.number:
            others += (one.prepare, one.busy, one.pace, one.holders, *one.stores)
    return call._replace(keys=(*call.keys, *others))


#: A slot, and what is to be picked there.
_Place: TypeAlias = tuple[Slot, Sequence[Wanted]]


def _check(choice: Choice) -> None:
    """Raise ConfigurationError for a choice that cannot be meant."""
    if choice.ids is None and choice.where is None:
        raise ConfigurationError(
            "pop: early=True needs ids=[...] or where=..., which say what is to be taken early"
        )
    if choice.where is not None and not callable(choice.where):
        raise ConfigurationError(
            f"pop: where must be a function of a message, not {choice.where!r}"
        )
    if choice.limit is not None and choice.limit < 0:
        raise ConfigurationError(
            f"pop: limit must be a whole number from 0 up, not {choice.limit!r}"
        )
    if type(choice.look) is not int or choice.look < 1:
        raise ConfigurationError(f"pop: look must be a whole number from 1 up, not {choice.look!r}")


# -- puts a delivered message into DeadQueue


def bury_call(
    context: Context, topic: Topic, delivery: Delivery, reason: str, error: str
) -> ScriptCall:
    """Put a delivered message into DeadQueue. Result: the id that it is kept under; None if every
    id that it could have is taken by another message.

    It may run twice without harm.
    """
    base = base_of(delivery.id)
    # A slot that the topic has no more, since it was resharded, is read by nobody.
    stays = delivery.slot < topic.slot_span
    slot = topic.slot(delivery.slot) if stays else topic.slot_for(base)
    copy = f"{base}#{zlib.crc32(delivery.body):08x}"
    birth = re.split("[;~@!]", delivery.birth, maxsplit=1)[0]
    return context.announcing(
        topic,
        "bury",
        (*slot.script_keys, slot.copies(base)),
        (
            len(topic.steps),
            slot.number,
            delivery.body,
            delivery.birth,
            scores.lease(0, delivery.step, delivery.retries_left),
            encoded(" ".join(reason.split())[:REASON_LENGTH] or "failed"),
            encoded(error[:ERROR_LENGTH]),
            topic.declaration.expires or 0,
            delivery.id,
            copy,
            f"{copy}-{birth}",
        ),
        partial(_read, context.counts(topic)),
        limited=slot if topic.declaration.lanes or delivery.has_place else None,
    )


def _read(counts: TopicCounts, raw: list[Any]) -> str | None:
    id, died, *_ = raw
    counts.dead += died == 1
    return None if died < 0 else text(id)


# -- marks deliveries that are acknowledged although their tasks still run


def mark_calls(
    topic_of: Callable[[Delivery], Topic], deliveries: Iterable[Delivery], *, buries: bool = False
) -> list[ScriptCall]:
    """Mark messages as acknowledged: they stay in flight until they are acknowledged once more,
    and are gone if their leases end before. Result of each call: a list of those that are held no
    longer by their deliveries, and so are not marked.

    topic_of: the topic of a delivery; asks nobody
    buries: they are dead if their leases end before, and not gone

    Each may run twice without harm.
    """
    calls = []
    for batch in batches_by_slot(deliveries):
        slot = topic_of(batch[0]).slot(batch[0].slot)
        args: list[Any] = [int(buries)]
        args += [x for one in batch for x in (one.id, one.lease_token, one.birth)]
        parse = partial(_refused, batch)
        calls.append(ScriptCall(load("mark"), (slot.prepare, slot.tokens), args, parse))
    return calls


def _refused(batch: list[Delivery], raw: list[int]) -> list[Delivery]:
    return [batch[number - 1] for number in raw]


# -- messages and receipts, as callers give them to what ends a delivery

#: Messages or receipts, mixed, or one of them.
Given = Delivery | str | Iterable[Delivery | str]

#: The slot of a delivery: how the calls of ack are ordered.
SLOT = attrgetter("slot")


def delivery_of(delivery: Delivery) -> Hashable:
    """What tells a delivery from all others."""
    return delivery.topic, delivery.slot, delivery.id, delivery.birth


def message_of(delivery: Delivery) -> Hashable:
    """What tells the message of a delivery from all others."""
    birth = re.split("[;~@!]", delivery.birth, maxsplit=1)[0]
    return delivery.topic, delivery.slot, delivery.id, birth


class Read:
    """What a caller has given.

    deliveries: one for each
    """

    __slots__ = ("_said", "deliveries")

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        #: the receipts that deliveries were given by, by the identity of the delivery
        self._said: dict[int, str] = {}

    def add(self, delivery: Delivery, receipt: str) -> None:
        self.deliveries.append(delivery)
        self._said[id(delivery)] = receipt

    def said(self, delivery: Delivery) -> Delivery | str:
        """What the caller has given for a delivery."""
        return self._said.get(id(delivery), delivery)

    def settled(
        self,
        results: Sequence[Settled],
        batches: Callable[[], Iterable[list[Delivery]]],
        identity: Callable[[Delivery], Hashable],
    ) -> Settled:
        """How many there still were; `stale`: what of that was not, as the caller has given it.

        results: the result of each call
        batches: the deliveries of each call, in its order
        identity: what was given twice is not stale because of that
        """
        number = sum(results)
        if number == len(self.deliveries):
            return Settled(number, [])
        stale, settled = set(), set()
        for batch, result in zip(batches(), results, strict=True):
            gone = set(result.stale)
            for at, delivery in enumerate(batch):
                if at in gone:
                    stale.add(id(delivery))
                else:
                    settled.add(identity(delivery))
        return Settled(
            number,
            [
                self.said(one)
                for one in self.deliveries
                if id(one) in stale and identity(one) not in settled
            ],
        )


# -- delivers messages, and ends their deliveries

#: Seconds by which a pop looks ahead at most. Of a rate that is used up for longer than it says and
#: a second, scripts take it that it was another one before (lanes.lua).
MOST_AHEAD = 0.9


def ahead_us_of(ahead: float) -> int:
    """Microseconds of the argument `ahead` of a pop. Raises ConfigurationError."""
    if (
        isinstance(ahead, bool)
        or not isinstance(ahead, (int, float))
        or not 0 <= ahead <= MOST_AHEAD
    ):
        raise ConfigurationError(f"ahead must be from 0 to {MOST_AHEAD} seconds, not {ahead!r:.60}")
    return int(ahead * 1_000_000)


logger = logging.getLogger(__name__)

#: What one slot is asked to tell of what it would give, at most.
MOST_HEADS = 1000


class SlotHeads(NamedTuple):
    """What a slot would give first.

    messages: step index and score of each; none if its order is not told beforehand
    most: of how many it was to tell: if these are as many, there may be more
    """

    messages: list[tuple[int, int]]
    most: int


class Deliveries(CenterPart):
    """Delivers messages, one round trip or a few each."""

    def __init__(self, core: Core, leases: Leases, messages: Messages) -> None:
        super().__init__(core)
        self._leases, self._messages = leases, messages
        self._waiting = Waiting(core)
        #: waits for so many seconds, where this center is used
        self.sleep = sleep_of(core.runner.client)
        #: told the messages that are acknowledged, rejected or released, before they are
        self.on_settled: list[Callable[[Sequence[Delivery]], None]] = []
        self.names = Names()
        self._turns = counter()
        #: (topic, slot) -> its last turn, where slots do not tell what they would give
        self._served: dict[tuple[str, int], int] = {}

    # -- pop

    def pop(
        self,
        topic: str | Iterable[str],
        limit: int | None = None,
        *,
        wait: float | None = 0.0,
        ids: str | Iterable[str] | None = None,
        where: Callable[[Found], Any] | None = None,
        early: bool = False,
        look: int = LOOK,
        visibility: float | None = None,
        slots: Iterable[int] | None = None,
        recover: int = RECOVER,
        ahead: float = 0.0,
    ) -> Popped:
        """Deliver up to `limit` messages that are due: the next ones, or those that are chosen.

        topic: one, or several, which take turns: none starves because another has a backlog
        limit: 1 unless given; with `ids` and without `where`, as many as there are
        wait: seconds to wait until something is due, without polling; None for any time. Several
            that wait share what comes: each message goes to one of them. While the server cannot
            be reached, it is tried again until the time is over
        ids: deliver messages of these ids, and the copies that share them; those that are not due,
            in flight, dead or not there are left out
        where: deliver messages for whose :class:`Found` this is true, in the order of a pop
        early: with `ids` or `where`, also messages that are not due yet. If such a message comes
            back because its lease has ended or it was rejected, it is due at once; if it is
            released, at its own time
        look: how many messages `where` is asked about at most; :attr:`Popped.more` tells whether
            there are others
        visibility: seconds they may stay unacknowledged and unrenewed; as each message says, or
            its topic, or the center, unless given
        slots: only these; all unless given
        recover: expired leases to roll back first, per slot, and messages that DeadQueue need
            not keep any longer
        ahead: of topics with a rate, deliver also what may start within so many seconds, 0.9 at
            most: who asks for that waits until :attr:`Delivery.start_us` or its action time.
            So the rate is used up although each pop takes a moment

        Of slots on several nodes of a Cluster, those that cannot be asked for now are left out:
        :attr:`Popped.errors` says why. If the others have nothing, that error is raised.

        Raises PriorityStepsError as :meth:`declare`, ConfigurationError for topics or times that
        make no sense.
        """
        only = None if slots is None else frozenset(slots)
        ahead_us = ahead_us_of(ahead)
        choice = Choice(limit, ids, where, early, look, visibility, only, recover, ahead_us)
        if not isinstance(topic, (str, Iterable)):
            check_name(topic)
        if not isinstance(limit, (int, type(None))) or type(limit) is bool:
            raise ConfigurationError(f"limit must be a whole number, not {limit!r:.100}")
        if only is not None and not (only and all(type(slot) is int for slot in only)):
            raise ConfigurationError(f"slots must be numbers of slots, not {slots!r:.100}")
        recorder = self._core.recorder
        if recorder is None:
            return self._pop(topic, wait, choice)
        if not isinstance(topic, str):
            topic = list(topic)
        began = time.monotonic()
        while True:
            popped = self._pop(topic, wait, choice)
            over = recorder.delivered(popped.messages) if popped.messages else ()
            if not over:
                return popped
            self._runner.run_all(self._commands.ack(over))
            ended = set(map(id, over))
            left = [one for one in popped.messages if id(one) not in ended]
            if left:
                return popped._replace(messages=left)
            if wait is not None:
                wait = max(wait - (time.monotonic() - began), 0.0)

    def _pop(self, topic: str | Iterable[str], wait: float | None, choice: Choice) -> Popped:
        if wait != 0 or not isinstance(topic, str):
            return self._waiting.pop(self._pop_now, topic, wait, choice)
        if choice.chooses:
            return self._pick(topic, choice)
        return self._pop_now(topic, choice)

    def _pop_now(self, topic: str, choice: Choice, flown: Flown | None = None) -> Popped:
        """Deliver messages of a topic at once; see :meth:`pop`.

        flown: remembers the names of the calls, so that their messages can be had although a reply
            is lost
        """
        declared = self._registry.agreed(self._registry.topic(topic))
        numbers = slot_numbers(declared, choice.slots)
        groups = self._context.groups(numbers)
        # A center that knows better rolls back by the pop itself.
        looks = choice.recover and self._leases.grace != 0
        noted = self._leases.look(declared, numbers, choice.recover) if looks else []
        # Of slots apart from each other, each call has a name of its own.
        together = flown if len(groups) == 1 else None
        lasts = flown is not None and not declared.declaration.expires
        request = PopRequest(
            "",
            slots=None if choice.slots is None else numbers,
            ready_limit=1 if choice.limit is None else choice.limit,
            lookahead_us=choice.ahead_us if declared.declaration.paced else 0,
            visibility=choice.visibility,
            # What goes away by itself leaves nothing behind.
            remember=REMEMBER if lasts else 0,
        )

        def ask(recover: int) -> Popped:
            name = self.names.next() if together is None else together.name(declared, numbers)
            asked = request._replace(name=name, recover=recover)
            if len(groups) > 1:
                return self._pop_apart(declared, numbers, asked, flown)
            sent = time.monotonic()
            popped: Popped = self._runner.run(self._commands.pop(declared, asked))
            self._leases.sample(declared, numbers[0], popped.now_us, sent)
            return popped

        popped = ask(0 if looks else choice.recover)
        if popped.expired and popped.more and not popped.messages:  # behind what has expired
            found = Gathered()
            found.add(topic, popped)
            while popped.expired and popped.more and not popped.messages:
                popped = ask(0)
                found.add(topic, popped)
            popped = found.result()
        for kept in noted:
            for event in kept.events:
                popped.rolled_back.extend(event.rolled_back)
                popped.died.extend(event.died)
                popped.dropped.extend(event.dropped)
                popped.expired.extend(event.expired)
            popped.stray.extend(kept.stray)
        for key, member in popped.stray:
            self._runner.client.hdel(as_bytes(key), as_bytes(member))
        for message in popped.messages:
            if message.action_us:
                self._runner.metrics.late(topic, max(popped.now_us - message.action_us, 0))
        self._runner.send_counters()
        return popped

    # -- pops of messages that are chosen, in the order of a pop

    def _pick(self, name: str, choice: Choice) -> Popped:
        """Deliver what is chosen, in the order of a pop."""
        if choice.ids is not None:
            choice = choice._replace(ids=list(dict.fromkeys(ids_of(choice.ids))))
        _check(choice)
        # As it is now: the topic may have been resharded a moment ago.
        topic = self._registry.declared(name) or self._registry.topic(name)
        topic = self._registry.agreed(topic)
        found = Gathered()
        with found.kept_or_released(self._runner, self._commands):
            if choice.where is None:
                self._take_ids(found, topic, choice)
            else:
                self._take_matching(found, topic, choice, choice.where)
        popped = found.result(found.more, merged=True)
        for key, member in popped.stray:
            self._runner.client.hdel(as_bytes(key), as_bytes(member))
        for message in popped.messages:
            if 0 < message.action_us <= popped.now_us:
                self._runner.metrics.late(name, popped.now_us - message.action_us)
        if popped.messages and found.began:
            self._context.counts(topic).empty -= 1  # what has rolled back counted as a pop
        self._runner.send_counters()
        return popped

    def _begin(
        self, found: Gathered, topic: Topic, choice: Choice, slots: Collection[int] | None
    ) -> int:
        """Roll back what has ended in some slots; return Redis's clock."""
        found.began = True
        popped = self._pop_now(topic.name, Choice(0, slots=slots, recover=choice.recover))
        found.add(topic.name, popped)
        return popped.now_us

    # -- by id

    def _take_ids(self, found: Gathered, topic: Topic, choice: Choice) -> None:
        """Deliver the messages of some ids."""
        places: list[_Place] = []
        for slot, ids in topic.places_of(list(choice.ids or ())):
            if choice.slots is None or slot.number in choice.slots:
                places += [(slot, some) for some in parts_of([*map(Wanted, ids)], IDS_PER_CALL)]
        if places and choice.recover:
            self._begin(found, topic, choice, {slot.number for slot, _ in places})
        # One after the other where they must not deliver more together, and where a message may
        # be moved from one to the next meanwhile.
        alone = choice.limit is not None or bool(topic.declaration.draining_counts)
        while places:
            together = places[: 1 if alone else CALLS_TOGETHER]
            places = self._take(found, topic, choice, together) + places[len(together) :]
            if found.more and len(found.messages) >= (choice.limit or 0):
                return
            found.more = False  # what it took instead has expired

    def _take(
        self, found: Gathered, topic: Topic, choice: Choice, places: Sequence[_Place]
    ) -> list[_Place]:
        """Deliver what is wanted; return what was not looked at."""
        # Copies count too: as many as there are.
        limit = 10**9 if choice.limit is None else choice.limit - len(found.messages)
        budget = max(self._context.pop_bytes // max(len(places), 1), 1)
        pick = partial(pick_call, early=choice.early, visibility=choice.visibility)
        calls = [
            pick(self._context, topic, slot, self.names.next(), wanted, limit, budget)
            for slot, wanted in places
        ]
        rest: list[_Place] = []
        errors = []
        for (slot, wanted), picked in zip(places, self._runner.run_each(calls), strict=True):
            if isinstance(picked, Exception):
                errors.append(picked)
                continue
            found.add(topic.name, picked.popped)
            found.more = found.more or picked.popped.more
            if picked.looked < len(wanted):
                rest.append((slot, wanted[picked.looked :]))
        if errors:
            raise errors[0]
        return rest

    # -- by a predicate

    def _take_matching(
        self, found: Gathered, topic: Topic, choice: Choice, where: Callable[[Found], Any]
    ) -> None:
        """Deliver messages that match."""
        if choice.limit is None:
            choice = choice._replace(limit=1)
        limit = choice.limit or 0
        matching: list[tuple[int, Wanted]] = []
        for looked, one in enumerate(self._candidates(found, topic, choice)):
            if looked == choice.look or len(found.messages) >= limit:
                found.more = True
                break
            if where(one):
                digest = hashlib.sha1(one.body, usedforsecurity=False).hexdigest()
                matching.append((one.slot, Wanted(one.id, one.score, digest)))
            if len(matching) == limit - len(found.messages):
                self._take_found(found, topic, choice, matching)
                matching = []
        self._take_found(found, topic, choice, matching)

    def _take_found(
        self,
        found: Gathered,
        topic: Topic,
        choice: Choice,
        matching: Iterable[tuple[int, Wanted]],
    ) -> None:
        by_slot: dict[int, list[Wanted]] = defaultdict(list)
        for number, one in matching:
            by_slot[number].append(one)
        places: list[_Place] = []
        for number, wanted in by_slot.items():
            slot = topic.slot(number)
            places += [(slot, some) for some in parts_of(wanted, IDS_PER_CALL)]
        while places:
            rest = self._take(found, topic, choice, places[:CALLS_TOGETHER])
            places = rest + places[CALLS_TOGETHER:]

    def _candidates(self, found: Gathered, topic: Topic, choice: Choice) -> Iterator[Found]:
        """The messages that a predicate is asked about, in the order of a pop."""
        until_us = until = None
        if choice.recover or not choice.early:
            now_us = self._begin(found, topic, choice, choice.slots)
            if not choice.early:
                until_us, until = now_us + 1, (now_us + 1) / 1e6
        if choice.ids is not None:
            there = [
                one
                for one in self._messages.get(choice.ids, topic=topic.name)
                if one.state == WAITING
                and (until_us is None or one.time_us < until_us)
                and (choice.slots is None or one.slot in choice.slots)
            ]
            yield from sorted(there, key=lambda one: (one.step, one.score))
            return
        for index, step in enumerate(topic.steps):
            only = replace(topic, steps=(step,))
            for one, _ in self._messages.read(
                [only], WAITING, until=until, slots=choice.slots, step=FIRST_PAGE, far=False
            ):
                yield one._replace(step=index)

    # -- pops of slots that are on several nodes of a Cluster, as if they were on one
    #
    # No script reaches all of them, so a pop has two steps: each slot rolls back what has ended and
    # tells what it would give first; from this follows how many each is asked for. Nobody else is
    # kept out meanwhile: what another consumer takes between the two is replaced by what comes next
    # in its slot.

    def _pop_apart(
        self, topic: Topic, numbers: Sequence[int], request: PopRequest, flown: Flown | None
    ) -> Popped:
        """Deliver messages of these slots.

        flown: remembers the names of the calls whose replies have not come

        Raises the error of a node if the others have nothing.
        """
        found = Gathered(request.ready_limit)
        with found.kept_or_released(self._runner, self._commands):
            heads = self._look(found, topic, request, numbers)
            request = request._replace(recover=0)
            while heads and found.left > 0:
                counts = self._divided(found, topic, request, heads)
                parts = self._take_shares(found, topic, request, counts, flown)
                heads = {n: some for n, some in heads.items() if n not in parts or parts[n].more}
                if len(parts) < len(counts):
                    break  # what did not answer may have given as many as it was asked for
                if len(heads) > 1 and found.left > 0:
                    heads = self._look(found, topic, request, list(heads))
            # The parts count as one pop.
            self._context.counts(topic).empty += (not found) - found.empty
            if found.errors:
                error = next(iter(found.errors.values()))
                if not found:
                    raise error
                logger.warning("cannot pop some slots of %r for now: %s", topic.name, error)
            return found.result(bool(heads), merged=True)

    def _divided(
        self, found: Gathered, topic: Topic, request: PopRequest, heads: dict[int, SlotHeads]
    ) -> dict[int, int]:
        """How many each slot is to be asked for: the first ones of all."""
        while True:
            if topic.declaration.lanes:  # its slots do not tell their order
                # The one first that had its turn longest ago: none waits for all of another's.
                turns = {number: self._served.get((topic.name, number), -1) for number in heads}
                heads = {number: heads[number] for number in sorted(heads, key=turns.__getitem__)}
            counts, short = divided(heads, found.left)
            if short is None or heads[short].most == MOST_HEADS:
                return counts
            # It has more than its share of what is next.
            again = self._look(found, topic, request, [short])
            if short in again:
                heads[short] = again[short]
            else:  # others have taken it, or the node fails
                del heads[short]

    def _look(
        self, found: Gathered, topic: Topic, request: PopRequest, numbers: Sequence[int]
    ) -> dict[int, SlotHeads]:
        """Find out which slots have something, and what they would give first."""
        # More than its share, so that it is seldom asked again.
        left = found.left
        most = max(min(left, 4 * left // len(numbers) + 4, MOST_HEADS), 1)
        calls = []
        for number in numbers:
            look = request._replace(name=self.names.next(), slots=(number,), heads=most)
            calls.append(look_call(self._commands, topic, look))
        heads = {}
        sent = time.monotonic()
        for number, result in zip(numbers, self._runner.run_each(calls), strict=True):
            if isinstance(result, Exception):
                found.errors[str(result)] = result
                continue
            part, told = result
            found.add(topic.name, part)
            self._leases.sample(topic, number, part.now_us, sent)
            if part.more:
                heads[number] = SlotHeads(told, most)
        return heads

    def _take_shares(
        self,
        found: Gathered,
        topic: Topic,
        request: PopRequest,
        counts: dict[int, int],
        flown: Flown | None,
    ) -> dict[int, Popped]:
        """Pop so many messages of slots; what those did that answered."""
        calls, names = [], []
        for number, count in counts.items():
            if topic.declaration.lanes:
                self._served[topic.name, number] = next(self._turns)
            # Of slots apart from each other, each call has a name of its own.
            name = self.names.next() if flown is None else flown.name(topic, (number,))
            names.append(name)
            one = request._replace(name=name, slots=(number,), ready_limit=count, claimed=False)
            calls.append(self._commands.pop(topic, one))
        parts = {}
        for number, name, part in zip(counts, names, self._runner.run_each(calls), strict=True):
            if isinstance(part, Exception):
                found.errors[str(part)] = part
                continue
            if flown is not None:
                del flown[name]  # the reply to it has come
            parts[number] = part
            found.add(topic.name, part)
        return parts

    # -- messages and receipts, as callers give them

    def _given(self, given: Given) -> Read:
        """What a caller has given. Raises ReceiptError for what is neither a message nor a receipt
        of a topic here."""
        read = Read()
        known: set[str] = set()
        for one in (given,) if isinstance(given, (str, bytes, Delivery)) else given:
            if isinstance(one, Delivery):
                if one.topic not in known:
                    known.add(one.topic)
                    # Another process may have delivered it; a topic that is gone has the defaults.
                    if self._registry.known(one.topic) is None:
                        self._registry.declared(one.topic)
                read.deliveries.append(one)
            elif isinstance(one, str):
                read.add(self._delivery(one), one)
            else:
                raise ReceiptError(
                    f"{one!r:.60} is neither a message that was popped nor a receipt"
                )
        return read

    def _delivery(self, receipt: str) -> Delivery:
        delivery = Delivery.of_receipt(receipt)
        topic = self._registry.recent(delivery.topic)
        if topic is None:
            raise ReceiptError(
                f"{shown(receipt)} is of the queue {delivery.topic!r}, which does not exist here: "
                "it was deleted, or the receipt is of another server or key prefix"
            )
        if delivery.step >= len(topic.steps):
            raise ReceiptError(
                f"{shown(receipt)} is of the queue {delivery.topic!r} when it had other priority "
                "steps; that queue was deleted since, and the message with it"
            )
        return delivery

    def _settling(self, given: Given) -> Read:
        """What is about to be settled; who wants to know is told."""
        read = self._given(given)
        for tell in tuple(self.on_settled):  # loops begin and end in other threads
            tell(read.deliveries)
        return read

    # -- what ends a delivery, or prolongs it

    def ack(self, messages: Given) -> Settled:
        """Acknowledge messages.

        messages: messages or receipts, mixed; or one of them

        Returns how many there still were, an int; its `stale` are those of `messages` that were
        no longer there: acknowledged, cancelled, or deleted before. A message whose lease has
        ended, or that was delivered again since, still counts: whoever has handled it may say so.
        A later message of the same id does not. Raises ReceiptError, and does nothing.
        """
        given = self._settling(messages)
        results = self._runner.run_all(self._commands.ack(given.deliveries))
        if self._core.recorder is not None:
            self._core.recorder.told(given.deliveries, None)

        def batches() -> Iterable[list[Delivery]]:
            return (sorted(b, key=SLOT) for b in self._commands.ack_batches(given.deliveries))

        return given.settled(results, batches, message_of)

    def reject(
        self,
        message: Delivery | str,
        *,
        requeue: bool,
        reason: str = "",
        error: str = "",
        backoff: float | None = None,
    ) -> str | None:
        """Give a message back after a failure.

        message: a message or its receipt
        requeue: roll it back with one retry less; without it, or with no retries left, it goes
            to DeadQueue with the reason
        error: what went wrong; kept with the message, the latest only
        backoff: seconds until it is due again; as the topic says unless given

        Returns the state it is in now, or None if the delivery is stale: the message is gone, or
        with `requeue` no longer in flight by this delivery. What is not to be tried again, and
        has been delivered again to somebody who has a place of a limit for it, is dead when that
        one is done with it, unless that one acknowledges it. Raises ReceiptError.
        """
        [delivery] = self._settling([message]).deliveries
        state: str | None = self._runner.run(
            self._commands.reject(
                delivery, requeue=requeue, reason=reason, error=error, backoff=backoff
            )
        )
        if self._core.recorder is not None and state is not None:
            self._core.recorder.told([delivery], state, error or reason)
        return state

    def bury(self, message: Delivery, *, reason: str, error: str = "") -> str | None:
        """Put a message that was delivered into DeadQueue, also if it was acknowledged since.

        message: as it was delivered; a receipt has no body
        reason, error: why, and what went wrong; kept with the message

        Returns the id that it is kept under, which is another one if a later message has its own;
        None if no id is free. To repeat it does no harm: while the same bytes are there under that
        id, dead or put again, nothing is done. What has been delivered again to somebody who has a
        place of a limit for it is dead when that one is done with it, as :meth:`reject` says.
        Raises ReceiptError for a receipt.
        """
        if not isinstance(message, Delivery):
            raise ReceiptError(
                f"{shown(str(message))} has no body; bury the message itself, as it was delivered"
            )
        topic = self._registry.topic_of(message)
        kept: str | None = self._runner.run(bury_call(self._context, topic, message, reason, error))
        if self._core.recorder is not None and kept is not None:
            self._core.recorder.told([message], DEAD, error or reason)
        return kept

    def release(self, messages: Given) -> Settled:
        """Take messages back unhandled, their time, order and retries unchanged.

        messages: messages or receipts, mixed; or one of them

        Returns how many were still in flight, an int; its `stale` are those of `messages` that
        were not. A message that was delivered again since stays with its new consumer. Raises
        ReceiptError, and does nothing.
        """
        given = self._settling(messages)
        results = self._runner.run_all(self._commands.release(given.deliveries))
        if self._core.recorder is not None:
            self._core.recorder.told(given.deliveries, WAITING)
        return given.settled(results, lambda: batches_by_slot(given.deliveries), delivery_of)

    def extend(self, messages: Given, visibility: float | None = None) -> list[Any]:
        """Renew leases: each ends `visibility` seconds from now; unless given, as many as the
        message says, or its topic, or the center.

        messages: messages or receipts, mixed; or one of them

        Returns those of `messages` whose leases had ended already, or whose max lease has passed.
        Raises ReceiptError, and does nothing.
        """
        given = self._given(messages)
        parts = self._runner.run_all(self._commands.extend(given.deliveries, visibility))
        for one in (one for part in parts for one in part.overran):
            self._context.counts(self._registry.resolved(one.topic)).overran += 1
        if self._core.recorder is not None:
            self._core.recorder.told(given.deliveries, IN_FLIGHT)
        return [given.said(lost) for part in parts for lost in part]


def look_call(commands: Commands, topic: Topic, request: PopRequest) -> ScriptCall:
    """Pop nothing: roll back what has ended, and find out what the next pop would deliver. Result:
    :class:`Popped`, and step index and score of each of these, up to `heads`."""
    call = commands.pop(topic, request._replace(ready_limit=0))

    def parse(raw: list[Any]) -> tuple[Popped, list[tuple[int, int]]]:
        flat = raw[1] if isinstance(raw[1], list) else ()
        return call.parse(raw), list(rows(flat, 2))

    return call._replace(parse=parse)


def divided(heads: Mapping[int, SlotHeads], left: int) -> tuple[dict[int, int], int | None]:
    """How many of each slot are the first ones of all; and the slot that has told too little to
    know more.

    heads: of slots; if their order is not told, those that come first give one more
    left: how many are wanted
    """
    if len(heads) == 1:
        return dict.fromkeys(heads, left), None
    if not all(told.messages for told in heads.values()):
        return dict(divide_evenly(left, list(heads))), None
    counts: dict[int, int] = {}
    streams = ([(head, number) for head in told.messages] for number, told in heads.items())
    for _, number in heapq.merge(*streams):
        counts[number] = counts.get(number, 0) + 1
        left -= 1
        if not left:
            break
        if counts[number] == heads[number].most:
            return counts, number
    return counts, None
