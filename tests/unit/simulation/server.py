"""A model of the server in plain Python: what the scripts do to topics, slots, StoreQueue,
PrepareQueue and the wake index. It is written from what the scripts promise, not from their code.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kombu_toc.center.calls import PopRequest
from kombu_toc.model import scores
from kombu_toc.model.results import Delivery, Popped

RETRIES = 16

#: Microseconds after which what was announced and is not settled counts as lost.
STALE = 100_000

#: Microseconds between two looks at leases. More counts as a gap.
SILENCE_US = 2_750_000


@dataclass
class Lease:
    """An entry of PrepareQueue."""

    ends_us: int
    score: int
    birth: str


@dataclass
class Slot:
    """What one slot holds."""

    store: list[tuple[int, str]] = field(default_factory=list)
    prepare: dict[str, Lease] = field(default_factory=dict)
    armed: list[int] = field(default_factory=list)
    #: since when its leases are looked at without a gap, and when they were last
    watch: tuple[int, int] = (0, 0)


class ModelServer:
    """Times are microseconds of its clock, which is `ahead` of the virtual time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.ahead = 1_700_000_000_000_000
        self.slots: dict[str, dict[int, Slot]] = defaultdict(lambda: defaultdict(Slot))
        #: per topic: (us, slot), in order
        self.wake: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.bodies: dict[str, bytes] = {}
        #: topic, first slot, consumer -> the name of the latest pop that began there, and what it
        #: gave
        self.given: dict[tuple[str, int, str], tuple[str, list[tuple[str, int, str]]]] = {}
        #: those who wait for an announcement, in the order in which they came
        self.blocked: dict[object, tuple[list[str], Callable[[Any], None]]] = {}
        self.paused: set[str] = set()
        self.rolled_back = 0
        #: how often each call was run
        self.ran: Counter[str] = Counter()

    def clock_us(self) -> int:
        return int(self._now() * 1_000_000) + self.ahead

    def is_empty(self) -> bool:
        every = [slot for slots in self.slots.values() for slot in slots.values()]
        return not self.bodies and not any(slot.store or slot.prepare for slot in every)

    def waiting(self) -> int:
        """How many messages are in StoreQueues."""
        return sum(len(slot.store) for slots in self.slots.values() for slot in slots.values())

    # -- the wake index

    def _announce(self, topic: str, number: int, us: int) -> None:
        slot, wake = self.slots[topic][number], self.wake[topic]
        first = slot.armed[0] if slot.armed else None
        if us not in slot.armed:
            insort(slot.armed, us)
        self._add_to_wake(topic, number, us)
        if first is not None:
            later = [time for time in slot.armed if time > us]
            claimed = next((time for time in later if (time, number) not in wake), None)
            self._take_back(topic, number, [time for time in later if time != claimed])

    def _add_to_wake(self, topic: str, number: int, us: int) -> None:
        if (us, number) not in self.wake[topic]:
            insort(self.wake[topic], (us, number))
        self._serve_blocked(topic)

    def _take_back(self, topic: str, number: int, times: Iterable[int]) -> None:
        slot, wake = self.slots[topic][number], self.wake[topic]
        for us in list(times):
            slot.armed.remove(us)
            if (us, number) in wake:
                wake.remove((us, number))

    def _announce_if_first(self, topic: str, number: int, us: int) -> None:
        armed = self.slots[topic][number].armed
        if not armed or us < armed[0]:
            self._announce(topic, number, us)
        elif armed[0] < self.clock_us() - STALE:
            self._announce(topic, number, armed[0])

    def _serve_blocked(self, topic: str) -> None:
        for who, (topics, tell) in list(self.blocked.items()):
            if topic in topics and self.wake[topic]:
                del self.blocked[who]
                tell(self._claim(topic))

    def _claim(self, topic: str) -> list[bytes]:
        us, number = self.wake[topic].pop(0)
        return [topic.encode(), f"{number}:{us}".encode(), str(us).encode()]

    def block(self, who: object, topics: list[str], tell: Callable[[Any], None]) -> None:
        """BZPOPMIN: the first of these that has an announcement gives it; or whoever comes."""
        for topic in topics:
            if self.wake[topic]:
                tell(self._claim(topic))
                return
        self.blocked[who] = (topics, tell)

    def pass_on(self, key: str, number: int, us: int) -> None:
        """The announcements that were passed on have a wake index of their own."""
        if (us, number) not in self.wake[key]:
            insort(self.wake[key], (us, number))
        old = self.clock_us() - 2_000_000
        self.wake[key] = [entry for entry in self.wake[key] if entry[0] > old]
        self._serve_blocked(key)

    def find_due(self, topics: Sequence[str]) -> list[int]:
        now = self.clock_us()
        return [n for n, t in enumerate(topics) if self.wake[t] and self.wake[t][0][0] <= now]

    def reannounce(self, topic: str, claims: Iterable[tuple[int, int]]) -> int:
        count = 0
        for number, us in claims:
            armed = self.slots[topic][number].armed
            self._take_back(topic, number, armed[2:])
            if us in armed:
                self._add_to_wake(topic, number, us)
                count += 1
        return count

    # -- messages

    def put(self, topic: str, number: int, id: str, us: int, body: bytes) -> None:
        us = max(us, self.clock_us())
        score = scores.action(us)
        slot = self.slots[topic][number]
        taken = {entry[0] for entry in slot.store}
        while score in taken:
            score += 1
        self.bodies[id] = body
        insort(slot.store, (score, id))
        self._announce_if_first(topic, number, max(us, scores.action_time(score)))

    def pop(
        self, topic: str, numbers: Iterable[int], request: PopRequest, visibility: float
    ) -> Popped:
        now, numbers, name = self.clock_us(), sorted(numbers), request.name
        ready_limit, overdue_limit = request.ready_limit, request.overdue_limit
        passed = now + request.lookahead_us if ready_limit else now - request.behind_us
        overdue_score = scores.due(now - request.behind_us)
        ready = sorted(
            (score, id, number)
            for number in numbers
            for score, id in self.slots[topic][number].store
            if score <= scores.due(passed)
        )
        chosen, more = [], False
        for score, id, number in ready:
            full = len(chosen) >= max(ready_limit, overdue_limit)
            if full or (len(chosen) >= ready_limit and score > overdue_score):
                more = True
                break
            chosen.append((score, id, number))
        consumer = (topic, numbers[0], name.rpartition(".")[0])
        if request.remember and chosen:
            if self.given.get(consumer, ("", []))[0] == name:
                return Popped(now, True, [], [], [], [], [], [])
            self.given[consumer] = (name, [(id, number, name) for _, id, number in chosen])
        messages = []
        for score, id, number in chosen:
            slot = self.slots[topic][number]
            slot.store.remove((score, id))
            slot.prepare[id] = Lease(now + int(visibility * 1e6), score, name)
            messages.append(self._delivery(topic, number, id, score, name))
        for number in numbers:
            self._announce_next(topic, number, passed, now)
        return Popped(now, more, messages, [], [], [], [], [])

    def _delivery(self, topic: str, number: int, id: str, score: int, birth: str) -> Delivery:
        return Delivery(topic, number, 0, id, score, self.bodies[id], RETRIES, birth)

    def _announce_next(self, topic: str, number: int, passed: int, now: int) -> None:
        slot = self.slots[topic][number]
        if not slot.store:
            self._take_back(topic, number, slot.armed)
            return
        us = scores.action_time(slot.store[0][0]) or now
        if us <= passed and any(n == number and t <= passed for t, n in self.wake[topic]):
            return  # somebody is going to claim that it holds something
        announced = slot.armed[0] if slot.armed else None
        if announced is None or not passed < announced <= us:
            self._take_back(topic, number, [time for time in slot.armed if time <= passed])
            self._announce_if_first(topic, number, us)

    def look(self, topic: str, numbers: Iterable[int], visibility: float) -> None:
        """What upkeep.lua does with leases; here all last equally long."""
        now = self.clock_us()
        for number in numbers:
            slot = self.slots[topic][number]
            since, seen = slot.watch
            if not seen <= now <= seen + SILENCE_US:
                since = now
            slot.watch = (since, now) if slot.prepare else (0, 0)
            if now - since < max(visibility / 3, 2) * 1e6:
                continue
            for id, lease in list(slot.prepare.items()):
                if lease.ends_us <= now:
                    del slot.prepare[id]
                    left = scores.retries_left(lease.score)
                    insort(slot.store, ((RETRIES if left is None else left) - 1, id))
                    self.rolled_back += 1

    def recall(self, topic: str, first: int, name: str, visibility: float, remember: int) -> Popped:
        now, consumer = self.clock_us(), (topic, first, name.rpartition(".")[0])
        known, gave = self.given.get(consumer, ("", []))
        messages = []
        if known == name:
            for id, number, birth in gave:
                lease = self.slots[topic][number].prepare.get(id)
                if lease is not None and lease.birth == birth:
                    lease.ends_us = now + int(visibility * 1e6)
                    messages.append(self._delivery(topic, number, id, lease.score, birth))
        elif remember:
            self.given[consumer] = (name, [])
        return Popped(now, False, messages, [], [], [], [], [])

    def ack(self, deliveries: Iterable[Delivery]) -> int:
        count = 0
        for one in deliveries:
            slot = self.slots[one.topic][one.slot]
            slot.prepare.pop(one.id, None)
            slot.store[:] = [entry for entry in slot.store if entry[1] != one.id]
            count += self.bodies.pop(one.id, None) is not None
            if not slot.store:
                self._take_back(one.topic, one.slot, slot.armed)
        return count

    def release(self, deliveries: Iterable[Delivery]) -> int:
        count = 0
        for one in deliveries:
            slot = self.slots[one.topic][one.slot]
            lease = slot.prepare.get(one.id)
            if lease is None or lease.birth != one.birth:
                continue
            del slot.prepare[one.id]
            insort(slot.store, (one.score, one.id))
            us = scores.action_time(one.score) or self.clock_us()
            self._announce_if_first(one.topic, one.slot, us)
            count += 1
        return count

    def extend(self, deliveries: Iterable[Delivery], visibility: float) -> None:
        for one in deliveries:
            lease = self.slots[one.topic][one.slot].prepare.get(one.id)
            if lease is not None and lease.birth == one.birth:
                lease.ends_us = self.clock_us() + int(visibility * 1e6)
