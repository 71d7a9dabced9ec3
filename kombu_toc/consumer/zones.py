"""Which slots of a topic a consumer takes first: those of its zone.

Nothing here asks a server or reads a clock. A consumer without the option ``toc_prefer_slots`` has
none of this.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..model.topic import Topic
    from .due_queue import Claim

logger = logging.getLogger(__name__)

#: Microseconds for which a message of another slot must have been due.
OVERDUE_US = 1_000_000

#: What the option says: slots of every topic, or of some.
Preference = Sequence[int] | Mapping[str, Sequence[int]]

#: A part of a topic's slots, and how much of it is asked for: at once, and overdue.
Part = tuple[set[int] | None, int, int]


class PreferredSlots:
    """The slots that a consumer takes first.

    preference: slots of every topic, or a topic -> slots. Those that a topic does not have count
        for nothing. If it has none of them, or no others, all its slots are alike.
    """

    def __init__(self, preference: Preference) -> None:
        self._preference = preference
        #: topic, number of its slots -> the preferred ones; none if all are alike
        self._own: dict[tuple[str, int], frozenset[int]] = {}

    @classmethod
    def of(cls, preference: Preference) -> PreferredSlots | None:
        """None if nothing is preferred."""
        return cls(preference) if preference else None

    def own(self, topic: Topic) -> frozenset[int]:
        """The slots of a topic that are taken first; none if all are alike. They are where what may
        start of one depends on the others."""
        if topic.declaration.lanes and topic.counts_together:
            return frozenset()
        place = topic.name, topic.slot_span
        known = self._own.get(place)
        if known is None:
            known = self._own[place] = self._find(*place)
        return known

    def _find(self, name: str, span: int) -> frozenset[int]:
        preference, beyond = self._preference, []
        if isinstance(preference, Mapping):
            preference = preference.get(name, ())
            beyond = [slot for slot in preference if slot >= span]
        own = frozenset(slot for slot in preference if slot < span)
        if beyond:
            logger.warning(
                "toc_prefer_slots names slots %s of queue %r, which has %d slots: without effect",
                *(beyond, name, span),
            )
        return own if len(own) < span else frozenset()

    def is_foreign(self, topic: Topic, slot: int) -> bool:
        """Whether a slot is left to others, unless they leave it for too long."""
        own = self.own(topic)
        return bool(own) and slot not in own


def divide(
    own: frozenset[int],
    span: int,
    slots: set[int] | None,
    limits: tuple[int, int],
    *,
    others_turn: bool,
    look: bool,
) -> tuple[list[Part], set[int]]:
    """What is popped of a topic on one server, and the slots whose turn is later.

    slots: those to be asked; None for all
    limits: how many messages at once, and how many overdue
    others_turn: whether the others' turn has come, if both have something
    look: whether the others are looked into, if nothing is known of them
    """
    mine, others = (set(own), set()) if slots is None else (slots & own, slots - own)
    if others and (others_turn or not mine):
        return [(others, 0, max(limits))], mine
    parts: list[Part] = [(mine, *limits)]
    if look and not others:
        parts.append((set(range(span)) - own, 0, 0))
    return parts, others


def earliest(claims: Sequence[Claim], most: int) -> list[Claim]:
    """Of the claims of a slot of others, those to be kept. (A later one is announced again if
    nobody serves it.)"""
    return sorted(set(claims))[:most]
