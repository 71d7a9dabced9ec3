"""What a process waits for: claimed times, and messages that are held until they are due."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..model.results import Delivery

if TYPE_CHECKING:
    from typing import TypeAlias

    #: A time that was announced and that this process claimed: topic, slot, microseconds.
    Claim: TypeAlias = tuple[str, int, int]

    #: The place among entries that are due at the same time.
    Number: TypeAlias = tuple[int, int, int]

    #: Microseconds when it is due by the server's clock, its number, the consumer whose it is, and
    #: a Claim or a Delivery.
    Entry: TypeAlias = tuple[int, Number, Any, Any]


class DueQueue:
    """Claims and messages in the order in which they come due: one heap.

    The loop's thread adds and takes. Another thread may take everything while the loop stands
    still (:meth:`take_all`), and must not make it fail if it goes on.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        #: (topic, slot) -> how many claims of it there are
        self._claims: Counter[tuple[str, int]] = Counter()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._heap))

    @property
    def first(self) -> Entry | None:
        """What comes due first; it stays."""
        try:
            return self._heap[0]
        except IndexError:
            return None

    def push(self, entry: Entry) -> None:
        """Add a message."""
        heapq.heappush(self._heap, entry)

    def push_claim(self, us: int, number: Number, consumer: Any, claim: Claim) -> None:
        """Add a claim; us: when it is acted on"""
        self._claims[claim[:2]] += 1
        heapq.heappush(self._heap, (us, number, consumer, claim))

    def pop(self) -> Entry | None:
        """Take the first, due or not; None if another thread has taken it."""
        try:
            entry = heapq.heappop(self._heap)
        except IndexError:
            return None
        if not isinstance(entry[3], Delivery):
            self._claims[entry[3][:2]] -= 1
        return entry

    def count_claims(self, topic: str, slot: int) -> int:
        """How many claims of a slot there are."""
        return self._claims[topic, slot]

    def take(self, which: Callable[[Entry], bool]) -> list[Entry]:
        """Take those that `which` says."""
        taken: list[Entry] = []
        rest: list[Entry] = []
        for entry in self._heap:
            (taken if which(entry) else rest).append(entry)
        if taken:
            self.replace(rest)
        return taken

    def take_claims(self, which: Callable[[Claim], bool] | None = None) -> list[Claim]:
        """Take claims: all, or those that `which` says."""
        taken = self.take(
            lambda entry: not isinstance(entry[3], Delivery) and (not which or which(entry[3]))
        )
        return [entry[3] for entry in taken]

    def take_all(self) -> Iterator[Entry]:
        """Take everything, one by one, from another thread."""
        while (entry := self.pop()) is not None:
            yield entry

    def replace(self, entries: list[Entry]) -> None:
        """Hold these instead."""
        heapq.heapify(entries)
        self._heap = entries
        claims = [entry[3] for entry in entries if not isinstance(entry[3], Delivery)]
        self._claims = Counter(claim[:2] for claim in claims)
