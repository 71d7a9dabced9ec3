"""Pops slots that are on several nodes of a Cluster, as if they were on one.

No script reaches all of them, so a pop has two steps: each slot rolls back what has ended and tells
what it would give first; from this follows how many each is asked for. Nobody else is kept out
meanwhile: what another consumer takes between the two is replaced by what comes next in its slot.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count as counter
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from ..model.results import Delivery, Popped, merge_popped
from ..model.topic import Topic
from ..scripts.call import ScriptCall
from .calls import Commands, PopRequest, divide_evenly
from .core import CenterPart, Core
from .leases import Leases
from .runner import BROKEN
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
        self.leases, self.names = leases, names
        self.turns = counter()
        #: (topic, slot) -> its last turn, where slots do not tell what they would give
        self.served: dict[tuple[str, int], int] = {}

    def pop(
        self,
        topic: Topic,
        numbers: Sequence[int],
        request: PopRequest,
        flown: Flown | None,
    ) -> Popped:
        """Deliver messages of these slots.

        flown: remembers the names of the calls whose replies have not come

        Raises the error of a node if the others have nothing.
        """
        one = _Pop(self, topic, numbers, request, flown)
        try:
            return one.run()
        except BaseException:
            # What was delivered so far would be with nobody. If it cannot be given back, it comes
            # back when its leases end.
            if messages := one.messages():
                with suppress(RedisError, *BROKEN):
                    self._runner.run_all(self._commands.release(messages))
            raise


class _Pop(CenterPart):
    """One pop: what was delivered so far."""

    def __init__(
        self,
        shared: Apart,
        topic: Topic,
        numbers: Sequence[int],
        request: PopRequest,
        flown: Flown | None,
    ) -> None:
        super().__init__(shared._core)
        self._shared = shared
        self._topic = topic
        self._numbers = numbers
        self._request = request
        self._flown = flown
        self._parts: list[Popped] = []
        #: text -> the error that says so
        self._errors: dict[str, Exception] = {}

    def messages(self) -> list[Delivery]:
        """What was delivered, in the order of one pop."""
        found = [message for part in self._parts for message in part.messages]
        found.sort(key=lambda message: (message.step, message.score))
        return found

    def run(self) -> Popped:
        left = self._request.ready_limit
        heads = self._look(self._numbers, left, self._request.recover)
        while heads and left > 0:
            counts = self._divided(heads, left)
            parts = self._take(counts)
            left -= sum(len(part.messages) for part in parts.values())
            heads = {n: some for n, some in heads.items() if n not in parts or parts[n].more}
            if len(parts) < len(counts):
                break  # what did not answer may have given as many as it was asked for
            if len(heads) > 1 and left > 0:
                heads = self._look(list(heads), left, 0)
        messages = self.messages()
        # The parts count as one pop.
        counted = self._context.counts(self._topic)
        counted.empty += (not messages) - sum(not part.messages for part in self._parts)
        if self._errors:
            error = next(iter(self._errors.values()))
            if not messages:
                raise error
            logger.warning("cannot pop some slots of %r for now: %s", self._topic.name, error)
        popped = merge_popped(self._parts, bool(heads), messages)
        return popped._replace(errors=list(self._errors.values()))

    def _divided(self, heads: dict[int, SlotHeads], left: int) -> dict[int, int]:
        """How many each slot is to be asked for: the first ones of all."""
        while True:
            if self._topic.declaration.lanes:  # its slots do not tell their order
                heads = {number: heads[number] for number in self._in_turn(heads)}
            counts, short = divided(heads, left)
            if short is None or heads[short].most == MOST_HEADS:
                return counts
            # It has more than its share of what is next.
            again = self._look([short], left, 0)
            if short in again:
                heads[short] = again[short]
            else:  # others have taken it, or the node fails
                del heads[short]

    def _in_turn(self, heads: Iterable[int]) -> list[int]:
        """Slots, the one first that had its turn longest ago: none waits for all of another's."""
        served, name = self._shared.served, self._topic.name
        return sorted(heads, key=lambda number: served.get((name, number), -1))

    def _look(self, numbers: Sequence[int], left: int, recover: int) -> dict[int, SlotHeads]:
        """Find out which slots have something, and what they would give first.

        left: how many are wanted of all of them
        recover: how many leases each rolls back before
        """
        # More than its share, so that it is seldom asked again.
        most = max(min(left, 4 * left // len(numbers) + 4, MOST_HEADS), 1)
        calls = [
            look_call(
                self._commands,
                self._topic,
                self._request._replace(
                    name=self._shared.names.next(),
                    slots=(number,),
                    recover=recover,
                    heads=most,
                ),
            )
            for number in numbers
        ]
        found = {}
        sent = time.monotonic()
        for number, result in zip(numbers, self._runner.run_each(calls), strict=True):
            if isinstance(result, Exception):
                self._errors[str(result)] = result
                continue
            part, heads = result
            self._parts.append(part)
            self._shared.leases.sample(self._topic, number, part.now_us, sent)
            if part.more:
                found[number] = SlotHeads(heads, most)
        return found

    def _take(self, counts: dict[int, int]) -> dict[int, Popped]:
        """Pop so many messages of slots; what those did that answered."""
        calls, names = [], []
        for number, count in counts.items():
            if self._topic.declaration.lanes:
                self._shared.served[self._topic.name, number] = next(self._shared.turns)
            # Of slots apart from each other, each call has a name of its own.
            flown = self._flown
            name = (
                self._shared.names.next() if flown is None else flown.name(self._topic, (number,))
            )
            names.append(name)
            one = self._request._replace(
                name=name,
                slots=(number,),
                ready_limit=count,
                recover=0,
                claimed=False,
            )
            calls.append(self._commands.pop(self._topic, one))
        found = {}
        for number, name, part in zip(counts, names, self._runner.run_each(calls), strict=True):
            if isinstance(part, Exception):
                self._errors[str(part)] = part
                continue
            if self._flown is not None:
                self._flown.landed(name)
            found[number] = part
            self._parts.append(part)
        return found


def look_call(commands: Commands, topic: Topic, request: PopRequest) -> ScriptCall:
    """Pop nothing: roll back what has ended, and find out what the next pop would deliver. Result:
    :class:`Popped`, and step index and score of each of these, up to `heads`."""
    call = commands.pop(topic, request._replace(ready_limit=0))

    def parse(raw: list[Any]) -> tuple[Popped, list[tuple[int, int]]]:
        flat = raw[1] if isinstance(raw[1], list) else ()
        return call.parse(raw), list(zip(flat[::2], flat[1::2], strict=True))

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
