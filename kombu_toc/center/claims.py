"""Claims of unique keys: where they are while a topic is resharded, and how they are swept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..model.keys import Slot
from ..model.message import FOR_A_TIME, Claim
from ..model.topic import Topic
from ..scripts.call import ScriptCall, load
from .runner import Runner

#: Claims that one call looks at.
LOOK = 100

#: Slots that one pass looks at, in turn.
SLOTS_PER_PASS = 64

#: Seconds between two passes.
INTERVAL = 10.0


def home_of(runner: Runner, topic: Topic, claim: Claim, basis: str) -> Topic:
    """The topic with the slot count by which a message is to be put: while it is resharded, a
    message that has the key may lie where a former count has put it."""
    here = topic.slot_for(basis).number
    for count in topic.declaration.draining_counts:
        former = replace(topic, declaration=replace(topic.declaration, slots=count))
        slot = former.slot_for(basis)
        if slot.number != here:
            call = ScriptCall(load("claimed"), _keys(slot), (claim.name,), bool)
            if runner.run(call):
                return former
    return topic


def sweep_call(slot: Slot) -> ScriptCall:
    """The call that removes claims of a slot that hold no longer. Result: how many it has looked
    at, and how many it has removed."""
    return ScriptCall(load("sweep_claims"), _keys(slot), (LOOK,), tuple)


def move_claims(client: Any, topic: Topic) -> None:
    """Move the claims whose messages are done, and that hold for a time, from the slots of former
    counts; remove the others there: no message lies there any more."""
    for number in range(topic.slot_span):
        source = topic.slot(number).claims
        cursor = 0
        while True:
            cursor, page = client.hscan(source, cursor, count=LOOK)
            for name, value in page.items():
                mode, _, _, checksum, _ = value.split(b",", 4)
                target = topic.slot(int(checksum) % topic.slots).claims
                if target == source:
                    continue
                if int(mode) == FOR_A_TIME:
                    client.hsetnx(target, name, value)
                client.hdel(source, name)
            if not cursor:
                break


def _keys(slot: Slot) -> tuple[str, ...]:
    return (slot.claims, slot.body, slot.dead, slot.tokens, *slot.stores)


class ClaimSweep:
    """Sweeps the claims of all topics that have any, some of them at a time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._next_at = 0.0
        self._turn = 0
        #: topic and number of slots where most of what was looked at was removed
        self._again: set[tuple[str, int]] = set()

    def run(self, topics: Iterable[Topic], now: float) -> None:
        """Sweep, if it is time or if there is much to sweep.

        now: monotonic seconds
        """
        if now < self._next_at and not self._again:
            return
        slots = [
            (topic, number)
            for topic in topics
            if topic.declaration.unique
            for number in range(topic.slot_span)
        ]
        if now >= self._next_at:
            at = self._turn % len(slots) if slots else 0
            chosen = (slots[at:] + slots[:at])[:SLOTS_PER_PASS]
            self._turn = at + len(chosen)
            self._next_at = now + INTERVAL
        else:
            chosen = [s for s in slots if (s[0].name, s[1]) in self._again][:SLOTS_PER_PASS]
        self._again = set()
        calls = [sweep_call(topic.slot(number)) for topic, number in chosen]
        for (topic, number), found in zip(chosen, self._runner.run_each(calls), strict=True):
            if isinstance(found, tuple) and found[1] > found[0] / 2 and found[0] == LOOK:
                self._again.add((topic.name, number))
