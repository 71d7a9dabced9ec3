"""Passes on claims of slots that other workers prefer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .claims import MAX_CLAIMS
from .zones import OVERDUE_US, PreferredSlots, earliest

if TYPE_CHECKING:
    from ..center.clock import ServerClock
    from ..model.topic import Topic
    from .consumer_state import ConsumerState
    from .due_queue import Claim, DueQueue
    from .loop import Loop
    from .outbox import Outbox


class Passing:
    """What becomes of a claim of a slot that is left to others: it is announced where they listen,
    and kept, to see a second after its time whether they have served it.

    topic_of: the topic of that name, with this slot number at least
    next_number: a number that is higher than all before
    """

    def __init__(
        self,
        preferred: PreferredSlots,
        due: DueQueue,
        outbox: Outbox,
        clock: ServerClock,
        loop: Loop,
        topic_of: Callable[[str, int], Topic],
        next_number: Callable[[], int],
    ) -> None:
        self._preferred = preferred
        self._due = due
        self._outbox = outbox
        self._clock = clock
        self._loop = loop
        self._topic_of = topic_of
        self._next_number = next_number

    def take(self, claim: Claim, state: ConsumerState) -> bool:
        """Take a claim if others prefer its slot; whether they do."""
        topic, slot, us = claim
        if not self._preferred.is_foreign(self._topic_of(topic, slot), slot):
            return False
        if us + OVERDUE_US > self._clock.at(self._loop.now()):
            self._outbox.pass_on(claim)
        claims = [claim]
        if self._due.count_claims(topic, slot) >= MAX_CLAIMS:
            claims += self._due.take_claims(lambda other: other[:2] == claim[:2])
        for one in earliest(claims, MAX_CLAIMS):
            number = (self._next_number(), 0, 0)
            self._due.push_claim(one[2] + OVERDUE_US, number, state, one)
        return True
