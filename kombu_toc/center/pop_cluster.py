"""Pops slots that are on several nodes of a Cluster, as if they were on one.

No script reaches all of them, so a pop has two steps: each slot rolls back what has ended and tells
what it would give first; from this follows how many each is asked for. Nobody else is kept out
meanwhile: what another consumer takes between the two is replaced by what comes next in its slot.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Mapping, Sequence
from itertools import count as counter
from typing import Any, NamedTuple

from ..model.results import Popped
from ..model.topic import Topic
from ..scripts.call import ScriptCall, rows
from .calls import Commands, PopRequest, divide_evenly
from .core import CenterPart, Core
from .leases import Leases
from .pop_wait import Gathered
from .waiting import Flown, PopNames

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


class Apart(CenterPart):
    """Pops slots of a topic that are on several nodes."""

    def __init__(self, core: Core, leases: Leases, names: PopNames) -> None:
        super().__init__(core)
        self._leases, self._names = leases, names
        self._turns = counter()
        #: (topic, slot) -> its last turn, where slots do not tell what they would give
        self._served: dict[tuple[str, int], int] = {}

    def pop(
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
                parts = self._take(found, topic, request, counts, flown)
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
            look = request._replace(name=self._names.next(), slots=(number,), heads=most)
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

    def _take(
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
            name = self._names.next() if flown is None else flown.name(topic, (number,))
            names.append(name)
            one = request._replace(name=name, slots=(number,), ready_limit=count, claimed=False)
            calls.append(self._commands.pop(topic, one))
        parts = {}
        for number, name, part in zip(counts, names, self._runner.run_each(calls), strict=True):
            if isinstance(part, Exception):
                found.errors[str(part)] = part
                continue
            if flown is not None:
                flown.landed(name)
            parts[number] = part
            found.add(topic.name, part)
        return parts


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
