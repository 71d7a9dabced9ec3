"""What a pop that waits has claimed, and what it does next.

Nothing here asks a server or reads a clock: times are monotonic seconds, and are handed in. The
thin part around it is :mod:`.waiting`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import inf
from typing import Any, TypeAlias

from ..model.results import Delivery, Popped
from .commands import divide_evenly

#: A time that was announced, and that who waits has taken from the wake index: topic, slot,
#: microseconds since the epoch by the server's clock.
Claim: TypeAlias = tuple[str, int, int]

#: Seconds between two looks into all slots while nobody keeps the topics up, and while somebody
#: does.
LOOK = 1.0
LOOK_RARELY = 120.0

#: Looks a second, while nobody keeps the topics up, and the seconds between two into one topic
#: because there are many, at most.
LOOKS = 200
LOOK_OF_MANY = 10.0

#: Seconds for which it is taken for granted that somebody still keeps the topics up.
KEPT_UP = 5.0

#: Claims of one slot that are held, at most: a slot announces two times at most, so that most of
#: more are out of date.
MAX_CLAIMS = 4


def early_us(ahead_us: int) -> int:
    """How long before the time of a claim its slot is popped, if the pop looks so far ahead: so
    that it brings what may start then in time, and some of what may start after that."""
    return ahead_us // 2


class Wait:
    """The claims of one pop that waits, and its times.

    topics: what it waits for
    until: when it gives up; infinity for never
    """

    def __init__(self, topics: Sequence[str], until: float) -> None:
        self.topics = topics
        self.until = until
        #: claim -> when its slot is to be popped
        self._claims: dict[Claim, float] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def add(self, claim: Claim, at: float) -> list[Claim]:
        """Hold a claim whose slot is to be popped at that time.

        Returns the claims to be handed back because of it.
        """
        same = [other for other in self._claims if other[:2] == claim[:2]]
        if len(same) < MAX_CLAIMS:
            self._claims[claim] = at
            return []
        for other in same:
            del self._claims[other]
        return [*same, claim]

    def due(self, now: float) -> dict[str, set[int]]:
        """The slots to be popped now, by topic. Their claims stay until :meth:`popped`."""
        found: dict[str, set[int]] = {}
        for (topic, slot, _), at in self._claims.items():
            if at <= now:
                found.setdefault(topic, set()).add(slot)
        return found

    def popped(
        self,
        topic: str,
        slots: Collection[int] | None,
        now_us: int,
        now: float,
        ahead_us: int = 0,
    ) -> None:
        """Slots of a topic were popped (all if None) when the server's clock showed `now_us`, for
        what was due then, or is `ahead_us` later.

        That has settled what they had announced until then. What is still to come is popped when
        it is due by that clock: this is how a claim that was acted on too early waits on.
        """
        for claim in list(self._claims):
            if claim[0] == topic and (slots is None or claim[1] in slots):
                if claim[2] <= now_us + ahead_us:
                    del self._claims[claim]
                else:
                    left_us = claim[2] - now_us - early_us(ahead_us)
                    self._claims[claim] = now + left_us / 1_000_000

    def give_up(self) -> list[Claim]:
        """Hold no claims any more; returns those that others shall have."""
        claims = list(self._claims)
        self._claims.clear()
        return claims

    def next_time(self) -> float:
        """When the next claim is due, or the wait is over."""
        return min((self.until, *self._claims.values()))


class Looks:
    """When those who wait look into all slots of a topic, for what is announced to nobody: what
    came back because a lease has ended, and what a process had claimed that has died.

    All who wait in a process share it: one of them looks.
    """

    def __init__(self) -> None:
        #: topic -> when somebody here looked last
        self._looked: dict[str, float] = {}
        #: seconds between two looks into a topic
        self._pause = LOOK
        self._counted_at = -inf
        self._kept_until = self._asked = -inf

    def due(self, topics: Iterable[str], now: float) -> list[str]:
        """The topics that are to be looked into now."""
        return [topic for topic in topics if now >= self._due_at(topic)]

    def looked(self, topic: str, now: float) -> None:
        """Somebody looks into a topic."""
        self._looked[topic] = now
        if now >= self._counted_at + LOOK:
            self._count(now)

    def _count(self, now: float) -> None:
        """Learn how many topics are looked into; forget those that nobody waits for any more."""
        self._counted_at = now
        number = 0
        for topic, at in list(self._looked.items()):
            number += at > now - 2 * LOOK_OF_MANY
            if at < now - 2 * LOOK_RARELY:
                del self._looked[topic]
        self._pause = max(LOOK, min(number / LOOKS, LOOK_OF_MANY))

    def asks(self, now: float) -> bool:
        """Whether it is to be asked, before a look, if somebody keeps the topics up."""
        return now >= self._asked + KEPT_UP

    def asked(self, kept_up: bool, now: float) -> None:
        """It was asked."""
        self._asked = now
        self._kept_until = now + KEPT_UP if kept_up else -inf

    def next_time(self, topics: Iterable[str]) -> float:
        """When one of these topics is due."""
        return min(map(self._due_at, topics))

    def _due_at(self, topic: str) -> float:
        looked = self._looked.get(topic, -inf)
        return max(looked + self._pause, min(looked + LOOK_RARELY, self._kept_until))


class Gathered:
    """What several pops did, as one.

    limit: how many messages they may give together
    """

    def __init__(self, limit: int) -> None:
        self.left = limit
        self._messages: list[Delivery] = []
        #: what was found beside messages: the lists of :class:`Popped`, of several pops
        self._others: list[tuple[list[Any], ...]] = []
        #: topic -> whether it has more, by the latest pop
        self._more: dict[str, bool] = {}
        self._now_us = 0

    def __bool__(self) -> bool:
        """Whether there are messages."""
        return bool(self._messages)

    def add(self, topic: str, popped: Popped) -> None:
        """A pop of a topic has done this."""
        self.left -= len(popped.messages)
        self._messages += popped.messages
        self._more[topic] = popped.more
        self._now_us = max(self._now_us, popped.now_us)
        if any(others := popped[3:]) or not self._others:
            self._others.append(others)

    def result(self) -> Popped:
        """All of it."""
        lists = ([one for some in kind for one in some] for kind in zip(*self._others, strict=True))
        return Popped(self._now_us, any(self._more.values()), self._messages, *lists)


class Shares:
    """How many messages to ask each of several topics for, so that a topic with a backlog takes
    nothing from another.

    The first gets more where a number cannot be divided: so it is another one each time.
    """

    def __init__(self, topics: Sequence[str]) -> None:
        self._rest = list(topics)

    def next(self, left: int) -> list[tuple[str, int]]:
        """The topics to be asked, and for how many; none when all were asked. left: how many are
        wanted."""
        if left <= 0 or not self._rest:
            return []
        shares = divide_evenly(left, range(len(self._rest)))
        asked = [(self._rest[place], number) for place, number in shares]
        self._rest = self._rest[len(asked) :]
        return asked

    def more(self, topic: str) -> None:
        """A topic has more."""
        self._rest.append(topic)
