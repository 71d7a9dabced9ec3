"""The leases of delivered messages that a process holds: which are to be renewed, and whether all
still last.

Nothing here waits or asks the server; the time is handed in, in monotonic seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from ..model.results import Delivery

#: A slot of a topic: (topic, slot).
Place: TypeAlias = tuple[str, int]


class Leases:
    """Delivered messages, each with its visibility timeout. Any thread may call this.

    lock: held for moments, reentrant; see :class:`.holdings.Holdings`
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        self._held: dict[tuple[str, int, str], tuple[Delivery, float]] = {}
        #: monotonic seconds until which every lease held here is known to last
        self._safe_until = float("inf")
        #: where leases could not be renewed -> monotonic seconds until which they are known to
        #: last; put in its place as a whole
        self._unrenewed: dict[Place, float] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, delivery: Delivery, visibility: float, now: float) -> None:
        """Renew this message's lease, of so many seconds, until it is dropped."""
        with self._lock:
            self._held[delivery.topic, delivery.slot, delivery.id] = (delivery, visibility)
            self._safe_until = min(self._safe_until, now + visibility)

    def drop(self, delivery: Delivery) -> None:
        """Do not renew it any longer: it is settled."""
        key = (delivery.topic, delivery.slot, delivery.id)
        birth, token = delivery.birth, delivery.lease_token
        with self._lock:
            held = self._held.get(key)
            # Else the message was delivered again, or another one of this id was.
            if held is not None and (held[0].birth, held[0].lease_token) == (birth, token):
                del self._held[key]

    def lose(self, delivery: Delivery) -> bool:
        """Its lease ended before it was renewed. Whether it was held still: it may be settled or
        delivered anew."""
        key = (delivery.topic, delivery.slot, delivery.id)
        with self._lock:
            held = self._held.get(key)
            if held is None or held[0] is not delivery:
                return False
            del self._held[key]
            return True

    def held(self) -> list[tuple[Delivery, float]]:
        """The messages whose leases are renewed, each with its visibility timeout in seconds."""
        with self._lock:
            return list(self._held.values())

    def shortest(self) -> float:
        """Seconds of the shortest lease; infinite if there is none."""
        return min((visibility for _, visibility in self.held()), default=float("inf"))

    def in_time(
        self, now: float, topic: str | None = None, slots: Collection[int] | None = None
    ) -> bool:
        """Whether every lease held here still lasts, as far as can be known without asking.

        Not so after the process was suspended, or the server away for long, until what still can
        be was renewed: whoever rolls back expired leases meanwhile would deliver again what this
        very process executes.

        topic, slots: the place that is asked for. Leases elsewhere that cannot be renewed,
            because a node of a Cluster is away or refuses it, do not matter then.
        """
        if not self._held:
            return True
        return now < self._safe_until and all(
            now < until
            for (name, slot), until in self._unrenewed.items()
            if topic is None or (name == topic and (slots is None or slot in slots))
        )

    def renewed(self, began: float, failed: Iterable[Place]) -> None:
        """What was held was renewed.

        began: when the renewal began
        failed: where it could not be done
        """
        with self._lock:
            before = self._unrenewed
            self._unrenewed = {place: before.get(place, self._safe_until) for place in failed}
            # What was taken meanwhile has a lease that began later, but maybe a shorter one.
            self._safe_until = began + self.shortest()

    def rest(self) -> None:
        """Nothing is held: what was known of the time does not count any more."""
        with self._lock:
            self._safe_until = float("inf")
            self._unrenewed = {}


def by_place(
    held: Iterable[tuple[Delivery, float]],
) -> dict[tuple[str, int, float], list[Delivery]]:
    """(topic, slot, visibility) -> deliveries, whose leases one call can renew."""
    found: dict[tuple[str, int, float], list[Delivery]] = defaultdict(list)
    for delivery, visibility in held:
        found[delivery.topic, delivery.slot, visibility].append(delivery)
    return found
