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

#: (topic, slot, id)
_Key: TypeAlias = tuple[str, int, str]

#: Renewals within one lease: two may fail before it ends.
BEATS_PER_LEASE = 3


class Leases:
    """Delivered messages, each with its visibility timeout. Any thread may call this.

    lock: held for moments, reentrant; see :class:`.holdings.Holdings`
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        self._held: dict[_Key, tuple[Delivery, float]] = {}
        #: of what may not be renewed for ever: monotonic seconds when it ends
        self._ends: dict[_Key, float] = {}
        #: what has ended, and was delivered here again before that was noticed
        self._overran: list[Delivery] = []
        #: visibility timeout -> seconds after a third of which a renewal is due, if they are fewer:
        #: others judge by the topic's visibility whether a holder had the time to renew
        self._rhythm: dict[float, float] = {}
        #: visibility timeout -> monotonic seconds until which every such lease is known to last
        self._safe: dict[float, float] = {}
        #: the first of these
        self._safe_until = float("inf")
        #: where leases could not be renewed -> monotonic seconds until which they are known to
        #: last; put in its place as a whole
        self._unrenewed: dict[Place, float] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(
        self,
        delivery: Delivery,
        visibility: float,
        now: float,
        ends: float | None = None,
        rhythm: float | None = None,
    ) -> None:
        """Renew this message's lease, of so many seconds, until it is dropped.

        ends: monotonic seconds when the delivery ends although it is renewed
        rhythm: visibility timeout of its topic, if it has its own
        """
        with self._lock:
            if rhythm is not None and rhythm < self._rhythm.get(visibility, visibility):
                self._rhythm[visibility] = rhythm
            key = (delivery.topic, delivery.slot, delivery.id)
            if ends is not None or self._ends:
                self._note_end(key, now, ends)
            self._held[key] = (delivery, visibility)
            until = now + visibility
            if until < self._safe.get(visibility, float("inf")):
                self._safe[visibility] = until
                self._safe_until = min(self._safe_until, until)

    def _note_end(self, key: _Key, now: float, ends: float | None) -> None:
        before = self._ends.pop(key, None)
        if before is not None and before <= now:
            self._overran.append(self._held[key][0])
        if ends is not None:
            self._ends[key] = ends

    def drop(self, delivery: Delivery) -> None:
        """Do not renew it any longer: it is settled."""
        key = (delivery.topic, delivery.slot, delivery.id)
        birth, token = delivery.birth, delivery.lease_token
        with self._lock:
            held = self._held.get(key)
            # Else the message was delivered again, or another one of this id was.
            if held is not None and (held[0].birth, held[0].lease_token) == (birth, token):
                del self._held[key]
                if self._ends:
                    self._ends.pop(key, None)

    def lose(self, delivery: Delivery) -> bool:
        """Its lease ended before it was renewed. Whether it was held still: it may be settled or
        delivered anew."""
        key = (delivery.topic, delivery.slot, delivery.id)
        with self._lock:
            held = self._held.get(key)
            if held is None or held[0] is not delivery:
                return False
            del self._held[key]
            self._ends.pop(key, None)
            return True

    def take_overran(self) -> list[Delivery]:
        """Deliveries that have ended although they were renewed, and were delivered here again
        before a renewal told that: each once."""
        with self._lock:
            taken, self._overran = self._overran, []
            return taken

    def held(self) -> list[tuple[Delivery, float]]:
        """The messages whose leases are renewed, each with its visibility timeout in seconds."""
        with self._lock:
            return list(self._held.values())

    def due(self, began: float, next_at: float) -> list[tuple[Delivery, float]]:
        """What a renewal that begins now is to renew: each lease before a third of it has passed
        (or of its topic's, if that is shorter), and what may have ended although it was renewed.

        began: now; next_at: when the next one may be; monotonic seconds
        """
        with self._lock:
            late = {
                visibility
                for visibility, until in self._safe.items()
                if self._unrenewed
                or until - visibility + self._rhythm.get(visibility, visibility) / BEATS_PER_LEASE
                <= next_at
            }
            found = [pair for pair in self._held.values() if pair[1] in late]
            for key, ends in self._ends.items():
                if ends <= began and self._held[key][1] not in late:
                    found.append(self._held[key])
            return found

    def first_end(self) -> float:
        """Monotonic seconds when the first delivery ends although it is renewed; infinite if none
        does."""
        return min(tuple(self._ends.values()), default=float("inf"))

    def shortest(self) -> float:
        """Seconds of the shortest lease, or of the shortest visibility of a topic; infinite if
        there is none."""
        with self._lock:
            held = {visibility for _, visibility in self._held.values()}
            return min((self._rhythm.get(one, one) for one in held), default=float("inf"))

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

    def renewed(
        self, began: float, failed: Iterable[Place], visibilities: Collection[float]
    ) -> None:
        """What was held was renewed, of these visibility timeouts.

        began: when the renewal began
        failed: where it could not be done
        """
        with self._lock:
            before = self._unrenewed
            self._unrenewed = {place: before.get(place, self._safe_until) for place in failed}
            # What was taken meanwhile has a lease that began later.
            held = {visibility for _, visibility in self._held.values()}
            self._safe = {
                visibility: began + visibility if visibility in visibilities else until
                for visibility, until in self._safe.items()
                if visibility in held
            }
            self._safe_until = min(self._safe.values(), default=float("inf"))
            if self._rhythm:
                self._rhythm = {v: one for v, one in self._rhythm.items() if v in held}

    def rest(self) -> None:
        """Nothing is held: what was known of the time does not count any more."""
        with self._lock:
            self._safe = {}
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
