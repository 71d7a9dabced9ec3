"""Delivers messages that the caller chooses, by id or by a predicate, instead of the next ones."""

from __future__ import annotations

import contextlib
import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from ..errors import ConfigurationError
from ..model.keys import Slot
from ..model.results import WAITING, Delivery, Found, Popped, merge_popped
from ..model.topic import Topic
from ..scripts.call import ScriptCall, as_bytes, texts
from .calls import Context, lease_ms, own_of, read_deliveries, terms_of
from .core import CenterPart, Core
from .find import CALLS_TOGETHER, IDS_PER_CALL, Lookup, Scan
from .runner import BROKEN

#: Messages that a predicate is asked about, unless the caller says.
LOOK = 1000

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


class PickRequest(NamedTuple):
    """What one call of a pick asks for: of one slot.

    name: a name that no pop and no other pick has
    wanted: which messages
    limit: how many of them at most
    budget: bytes that their bodies may have together; the first may have any
    early: also those that are not due yet
    visibility: seconds that they may stay unacknowledged and unrenewed; as each message says, or
        its topic, unless given
    remember: seconds for which :meth:`.calls.Commands.recall` delivers them once more
    """

    name: str
    wanted: Sequence[Wanted]
    limit: int
    budget: int
    early: bool = False
    visibility: float | None = None
    remember: int = 0


class Picked(NamedTuple):
    """What one call of a pick did."""

    popped: Popped
    looked: int  #: how many of the wanted messages it has looked at


class Choice(NamedTuple):
    """What a caller chooses.

    limit: how many at most; None: all that are named
    ids: only messages of these ids, and the copies that share them
    where: only messages for which this is true
    early: also those that are not due yet
    look: how many messages `where` is asked about at most
    visibility, slots, recover: as of a pop
    """

    limit: int | None
    ids: Iterable[str] | None
    where: Callable[[Found], Any] | None
    early: bool
    look: int
    visibility: float | None
    slots: Collection[int] | None
    recover: int


def pick_call(context: Context, topic: Topic, slot: Slot, request: PickRequest) -> ScriptCall:
    """Deliver messages of a slot by id. Result: :class:`Picked`; the caller removes what is
    `stray`."""
    limits = topic.declaration.limits(context.limits)
    counts = context.counts(topic)
    name, wanted = request.name, request.wanted

    def parse(raw: list[Any]) -> Picked:
        now, looked, more, flat, gone, late, *_ = raw
        messages = read_deliveries(topic, (slot.number,), name, flat)
        bare, expired = texts(gone), texts(late)
        counts.delivered += len(messages)
        if expired:
            counts.expire(len(expired), limits.dead_expired)
        left = bare if limits.dead_expired else bare + expired
        stray = [(slot.copies(id.rpartition("#")[0]), id) for id in left if "#" in id]
        popped = Popped(now, bool(more), messages, bare, [], [], [], stray, expired)
        return Picked(popped, looked)

    lanes = topic.declaration.lanes
    call = context.announcing(
        topic,
        "pick",
        (
            *slot.script_keys,
            *(slot.copies(one.id) for one in wanted),
            slot.given(name.rpartition(".")[0]),
        ),
        (
            len(slot.stores),
            slot.number,
            request.limit,
            request.budget,
            int(request.early),
            lease_ms(request.visibility, limits),
            terms_of(limits, own_of(request.visibility, limits)),
            topic.declaration.retries,
            name,
            request.remember,
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


class Picking(CenterPart):
    """Picks messages.

    name: makes names that no other pop has
    """

    def __init__(self, core: Core, lookup: Lookup, scan: Scan, name: Callable[[], str]) -> None:
        super().__init__(core)
        self._lookup, self._scan, self._name = lookup, scan, name

    def pick(
        self,
        name: str,
        choice: Choice,
        pop: Callable[..., Popped],
        release: Callable[[list[Delivery]], Any],
    ) -> Popped:
        """Deliver what is chosen, in the order of a pop.

        pop: :meth:`.pop.Deliveries.pop`, which rolls back expired leases
        release: :meth:`.pop.Deliveries.release`
        """
        if choice.ids is not None:
            choice = choice._replace(ids=list(dict.fromkeys(choice.ids)))
        _check(choice)
        # As it is now: the topic may have been resharded a moment ago.
        topic = self._registry.declared(name) or self._registry.topic(name)
        topic = self._registry.agreed(topic)
        picks = _Picks(self._run, topic, choice, partial(pop, name, 0, recover=choice.recover))
        try:
            if choice.where is None:
                picks.take_ids()
            else:
                picks.take_matching(self._candidates(picks, topic, choice))
        except BaseException:
            # What was delivered so far would be with nobody. If it cannot be given back, it comes
            # back when its leases end.
            with contextlib.suppress(*BROKEN, ResponseError):
                release(picks.messages)
            raise
        popped = picks.popped()
        for key, member in popped.stray:
            self._runner.client.hdel(as_bytes(key), as_bytes(member))
        for message in popped.messages:
            if 0 < message.action_us <= popped.now_us:
                self._runner.metrics.late(name, popped.now_us - message.action_us)
        if popped.messages and picks.began:
            self._context.counts(topic).empty -= 1  # what has rolled back counted as a pop
        self._runner.send_counters()
        return popped

    def _run(self, topic: Topic, asked: Sequence[tuple[Slot, PickRequest]]) -> list[Any]:
        """Run the calls of a pick in one round trip; the result or the error of each."""
        budget = max(self._context.pop_bytes // max(len(asked), 1), 1)
        calls = [
            pick_call(
                self._context,
                topic,
                slot,
                request._replace(name=self._name(), budget=budget),
            )
            for slot, request in asked
        ]
        return self._runner.run_each(calls)

    def _candidates(self, picks: _Picks, topic: Topic, choice: Choice) -> Iterator[Found]:
        """The messages that a predicate is asked about, in the order of a pop."""
        until_us = None if choice.early else picks.begin(choice.slots) + 1
        if choice.early and choice.recover:
            picks.begin(choice.slots)
        if choice.ids is not None:
            found = [
                one
                for one in self._lookup.get(choice.ids, topic=topic.name)
                if one.state == WAITING
                and (until_us is None or one.time_us < until_us)
                and (choice.slots is None or one.slot in choice.slots)
            ]
            yield from sorted(found, key=lambda one: (one.step, one.score))
            return
        for index, step in enumerate(topic.steps):
            only = replace(topic, steps=(step,))
            for one, _ in self._scan.read_topics(
                [only], (WAITING,), until_us=until_us, slots=choice.slots, step=FIRST_PAGE
            ):
                yield one._replace(step=index)


@dataclass(eq=False)
class _Picks:
    """One pick: what was delivered so far.

    run: runs calls of a pick; the result or the error of each
    recover: rolls back expired leases, by a pop of nothing
    """

    _run: Callable[[Topic, Sequence[tuple[Slot, PickRequest]]], list[Any]]
    _topic: Topic
    _choice: Choice
    _recover: Callable[..., Popped]

    def __post_init__(self) -> None:
        self._parts: list[Popped] = []
        self._more = False
        self.messages: list[Delivery] = []
        self.began = False  #: whether there was a pop of nothing

    def begin(self, slots: Collection[int] | None) -> int:
        """Roll back what has ended in some slots; return Redis's clock."""
        self.began = True
        popped = self._recover(slots=slots)
        self._parts.append(popped)
        return popped.now_us

    # -- by id

    def take_ids(self) -> None:
        """Deliver the messages of some ids."""
        choice, topic = self._choice, self._topic
        places: list[tuple[Slot, Sequence[Wanted]]] = []
        for slot, ids in topic.places_of(list(choice.ids or ())):
            if choice.slots is None or slot.number in choice.slots:
                for start in range(0, len(ids), IDS_PER_CALL):
                    wanted = [Wanted(id) for id in ids[start : start + IDS_PER_CALL]]
                    places.append((slot, wanted))
        if places and choice.recover:
            self.begin({slot.number for slot, _ in places})
        # One after the other where they must not deliver more together, and where a message may
        # be moved from one to the next meanwhile.
        alone = choice.limit is not None or bool(topic.declaration.draining_counts)
        while places:
            together = places[: 1 if alone else CALLS_TOGETHER]
            places = self._take(together) + places[len(together) :]
            if self._more and len(self.messages) >= (choice.limit or 0):
                return
            self._more = False  # what it took instead has expired

    def _take(
        self, places: Sequence[tuple[Slot, Sequence[Wanted]]]
    ) -> list[tuple[Slot, Sequence[Wanted]]]:
        """Deliver what is wanted; return what was not looked at."""
        choice = self._choice
        request = PickRequest("", (), 0, 0, choice.early, choice.visibility)
        asked = []
        for slot, wanted in places:
            # Copies count too: as many as there are.
            limit = 10**9 if choice.limit is None else choice.limit - len(self.messages)
            asked.append((slot, request._replace(wanted=wanted, limit=limit)))
        rest, errors = [], []
        results = self._run(self._topic, asked)
        for (slot, wanted), picked in zip(places, results, strict=True):
            if isinstance(picked, Exception):
                errors.append(picked)
                continue
            self._parts.append(picked.popped)
            self.messages += picked.popped.messages
            self._more = self._more or picked.popped.more
            if picked.looked < len(wanted):
                rest.append((slot, wanted[picked.looked :]))
        if errors:
            raise errors[0]
        return rest

    # -- by a predicate

    def take_matching(self, candidates: Iterable[Found]) -> None:
        """Deliver messages that match."""
        choice = self._choice
        limit = 1 if choice.limit is None else choice.limit
        assert choice.where is not None
        matching: list[Found] = []
        for looked, found in enumerate(candidates):
            if looked == choice.look or len(self.messages) >= limit:
                self._more = True
                break
            if choice.where(found):
                matching.append(found._replace(body=_digest(found.body)))
            if len(matching) == limit - len(self.messages):
                self._take_found(matching)
                matching = []
        self._take_found(matching)

    def _take_found(self, found: Iterable[Found]) -> None:
        by_slot: dict[int, list[Wanted]] = defaultdict(list)
        for one in found:
            by_slot[one.slot].append(Wanted(one.id, one.score, one.body.decode()))
        places: list[tuple[Slot, Sequence[Wanted]]] = [
            (self._topic.slot(number), wanted[start : start + IDS_PER_CALL])
            for number, wanted in by_slot.items()
            for start in range(0, len(wanted), IDS_PER_CALL)
        ]
        while places:
            places = self._take(places[:CALLS_TOGETHER]) + places[CALLS_TOGETHER:]

    # -- the result

    def popped(self) -> Popped:
        """All of it as one result."""
        self.messages.sort(key=lambda message: (message.step, message.score))
        return merge_popped(self._parts, self._more, self.messages)


def _digest(body: bytes) -> bytes:
    return hashlib.sha1(body, usedforsecurity=False).hexdigest().encode()


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
