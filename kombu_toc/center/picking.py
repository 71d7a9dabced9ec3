"""Delivers messages that the caller chooses, by id or by a predicate, instead of the next ones."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from ..errors import ConfigurationError
from ..model.keys import Slot
from ..model.results import WAITING, Found, Popped
from ..model.topic import Topic
from ..scripts.call import ScriptCall, as_bytes, parts_of, texts
from .calls import RECOVER, Context, lease_ms, own_of, read_deliveries, terms_of
from .core import CenterPart, Core
from .find import CALLS_TOGETHER, IDS_PER_CALL, Lookup, Scan, ids_of
from .pop_wait import Gathered

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
    """What a pop asks for: the arguments of :meth:`.pop.Deliveries.pop`.

    ahead_us: its `ahead`, in microseconds
    """

    limit: int | None = None
    ids: str | Iterable[str] | None = None
    where: Callable[[Found], Any] | None = None
    early: bool = False
    look: int = LOOK
    visibility: float | None = None
    slots: Collection[int] | None = None
    recover: int = RECOVER
    ahead_us: int = 0

    @property
    def chooses(self) -> bool:
        """Whether it asks for certain messages, and not for the next ones."""
        return self.ids is not None or self.where is not None or self.early


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
        popped = Popped(int(now), bool(more), messages, bare, [], [], [], stray, expired)
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


class Pick(CenterPart):
    """One pop of messages that are chosen: what was delivered so far.

    name: makes names that no other pop has
    pop: :meth:`.pop.Deliveries.pop` without waiting, which rolls back expired leases
    """

    def __init__(
        self,
        core: Core,
        lookup: Lookup,
        scan: Scan,
        name: Callable[[], str],
        pop: Callable[[str, Choice], Popped],
    ) -> None:
        super().__init__(core)
        self._lookup, self._scan, self._name, self._pop = lookup, scan, name, pop
        self._found = Gathered()
        self._more = False
        self._began = False  #: whether there was a pop of nothing

    def run(self, name: str, choice: Choice) -> Popped:
        """Deliver what is chosen, in the order of a pop."""
        if choice.ids is not None:
            choice = choice._replace(ids=list(dict.fromkeys(ids_of(choice.ids))))
        _check(choice)
        # As it is now: the topic may have been resharded a moment ago.
        topic = self._registry.declared(name) or self._registry.topic(name)
        topic = self._registry.agreed(topic)
        with self._found.kept_or_released(self._runner, self._commands):
            if choice.where is None:
                self._take_ids(topic, choice)
            else:
                self._take_matching(topic, choice, choice.where)
        popped = self._found.result(self._more, merged=True)
        for key, member in popped.stray:
            self._runner.client.hdel(as_bytes(key), as_bytes(member))
        for message in popped.messages:
            if 0 < message.action_us <= popped.now_us:
                self._runner.metrics.late(name, popped.now_us - message.action_us)
        if popped.messages and self._began:
            self._context.counts(topic).empty -= 1  # what has rolled back counted as a pop
        self._runner.send_counters()
        return popped

    def _begin(self, topic: Topic, choice: Choice, slots: Collection[int] | None) -> int:
        """Roll back what has ended in some slots; return Redis's clock."""
        self._began = True
        popped = self._pop(topic.name, Choice(0, slots=slots, recover=choice.recover))
        self._found.add(topic.name, popped)
        return popped.now_us

    # -- by id

    def _take_ids(self, topic: Topic, choice: Choice) -> None:
        """Deliver the messages of some ids."""
        places: list[_Place] = []
        for slot, ids in topic.places_of(list(choice.ids or ())):
            if choice.slots is None or slot.number in choice.slots:
                places += [(slot, some) for some in parts_of([*map(Wanted, ids)], IDS_PER_CALL)]
        if places and choice.recover:
            self._begin(topic, choice, {slot.number for slot, _ in places})
        # One after the other where they must not deliver more together, and where a message may
        # be moved from one to the next meanwhile.
        alone = choice.limit is not None or bool(topic.declaration.draining_counts)
        while places:
            together = places[: 1 if alone else CALLS_TOGETHER]
            places = self._take(topic, choice, together) + places[len(together) :]
            if self._more and len(self._found.messages) >= (choice.limit or 0):
                return
            self._more = False  # what it took instead has expired

    def _take(self, topic: Topic, choice: Choice, places: Sequence[_Place]) -> list[_Place]:
        """Deliver what is wanted; return what was not looked at."""
        # Copies count too: as many as there are.
        limit = 10**9 if choice.limit is None else choice.limit - len(self._found.messages)
        budget = max(self._context.pop_bytes // max(len(places), 1), 1)
        calls = []
        for slot, wanted in places:
            how = (limit, budget, choice.early, choice.visibility)
            request = PickRequest(self._name(), wanted, *how)
            calls.append(pick_call(self._context, topic, slot, request))
        rest: list[_Place] = []
        errors = []
        for (slot, wanted), picked in zip(places, self._runner.run_each(calls), strict=True):
            if isinstance(picked, Exception):
                errors.append(picked)
                continue
            self._found.add(topic.name, picked.popped)
            self._more = self._more or picked.popped.more
            if picked.looked < len(wanted):
                rest.append((slot, wanted[picked.looked :]))
        if errors:
            raise errors[0]
        return rest

    # -- by a predicate

    def _take_matching(self, topic: Topic, choice: Choice, where: Callable[[Found], Any]) -> None:
        """Deliver messages that match."""
        if choice.limit is None:
            choice = choice._replace(limit=1)
        limit, found = choice.limit or 0, self._found
        matching: list[tuple[int, Wanted]] = []
        for looked, one in enumerate(self._candidates(topic, choice)):
            if looked == choice.look or len(found.messages) >= limit:
                self._more = True
                break
            if where(one):
                digest = hashlib.sha1(one.body, usedforsecurity=False).hexdigest()
                matching.append((one.slot, Wanted(one.id, one.score, digest)))
            if len(matching) == limit - len(found.messages):
                self._take_found(topic, choice, matching)
                matching = []
        self._take_found(topic, choice, matching)

    def _take_found(
        self, topic: Topic, choice: Choice, matching: Iterable[tuple[int, Wanted]]
    ) -> None:
        by_slot: dict[int, list[Wanted]] = defaultdict(list)
        for number, one in matching:
            by_slot[number].append(one)
        places: list[_Place] = []
        for number, wanted in by_slot.items():
            slot = topic.slot(number)
            places += [(slot, some) for some in parts_of(wanted, IDS_PER_CALL)]
        while places:
            rest = self._take(topic, choice, places[:CALLS_TOGETHER])
            places = rest + places[CALLS_TOGETHER:]

    def _candidates(self, topic: Topic, choice: Choice) -> Iterator[Found]:
        """The messages that a predicate is asked about, in the order of a pop."""
        until_us = until = None
        if choice.recover or not choice.early:
            now_us = self._begin(topic, choice, choice.slots)
            if not choice.early:
                until_us, until = now_us + 1, (now_us + 1) / 1e6
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
            for one, _ in self._scan.read(
                [only], WAITING, until=until, slots=choice.slots, step=FIRST_PAGE, far=False
            ):
                yield one._replace(step=index)


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
