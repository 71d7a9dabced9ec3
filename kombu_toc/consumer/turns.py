"""Whose turn it is: how a consumer's room is split over the topics that it consumes.

Nothing here knows of Redis or reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..client.options import ROUND_ROBIN, SORTED


class Turns:
    """The topics of a consumer, in the order in which they are served.

    strategy: ``round_robin``, and topics with something due get equal shares; ``priority``, and
        the first that was consumed goes before all others; or ``sorted``, and the first by name
        does
    """

    def __init__(self, strategy: str = ROUND_ROBIN) -> None:
        self._strategy = strategy
        self._topics: list[str] = []

    def __contains__(self, topic: object) -> bool:
        return topic in self._topics

    def __iter__(self) -> Iterator[str]:
        return iter(self._topics)

    def __len__(self) -> int:
        return len(self._topics)

    def append(self, topic: str) -> None:
        self._topics.append(topic)
        if self._strategy == SORTED:
            self._topics.sort()

    def remove(self, topic: str) -> None:
        self._topics.remove(topic)

    def deal(self, number: int, wanting: Collection[str]) -> dict[str, int]:
        """Split a number over those topics that want a part; return who gets how many.

        In turns, one at a time: over any number of calls, no two topics that want something all
        the time differ by more than one. Otherwise the first in order gets everything.
        """
        if number <= 0:
            return {}
        row = [topic for topic in self._topics if topic in wanting]
        if not row:
            return {}
        if self._strategy != ROUND_ROBIN:
            return {row[0]: number}
        each, rest = divmod(number, len(row))
        first = row[:rest]
        if first:
            # They have had their turn: the next call begins with the others.
            self._topics = [topic for topic in self._topics if topic not in first] + first
        dealt = dict.fromkeys(first, each + 1)
        if each:
            dealt.update((topic, each) for topic in row[rest:])
        return dealt
