"""What a consumer knows of its topics: which are to be asked for messages, and in what order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..client.options import ROUND_ROBIN
from .turns import Turns

#: Topics that one call asks about, at most, of those that nothing is known of.
MAX_OTHERS = 256

#: Topics that are looked into, at most, along with the pops of those that are known to hold
#: something.
MAX_LOOKS = 16

#: Seconds after which a node of a Cluster is asked again that could not be.
ASK_AGAIN = 0.5

#: Slots of a topic; None for all of them.
Slots = set[int] | None


class PendingTopics:
    """The topics that one consumer takes messages of."""

    def __init__(self, strategy: str = ROUND_ROBIN) -> None:
        self.topics = Turns(strategy)
        #: topics to be asked, and which of their slots
        self.slots: dict[str, Slots] = {}
        #: those of them that are known to hold something; the others are looked into
        self.sure: set[str] = set()
        #: topics of which a slot is asked late: another one may hold what was due before
        self.late: set[str] = set()
        #: topics that have held more than there was room for: what has been due for a while may
        #: be queued here, for no idle consumer has wanted it
        self.backlog: set[str] = set()
        #: topics from which nothing is taken for now
        self.paused: set[str] = set()
        #: topics that could not be asked, and monotonic seconds when they are asked again
        self._missed: dict[str, Slots] = {}
        self._missed_at = 0.0
        #: how many of the topics that nothing is known of were asked about
        self._asked_about = 0

    def ask(self, topic: str, slot: int | None = None) -> None:
        """Pop a topic when there is room, for it holds something: a slot, or all."""
        _add(self.slots, topic, None if slot is None else {slot})
        self.sure.add(topic)

    def ask_for_backlog(self, topic: str, slot: int | None = None) -> None:
        """The same, for it holds more than an idle consumer has taken."""
        self.ask(topic, slot)
        self.backlog.add(topic)

    def look(self, topic: str) -> None:
        """Look into a topic when there is room."""
        self.slots[topic] = None

    def look_at_all(self) -> None:
        """Look into every topic when there is room."""
        for topic in self.topics:
            self.look(topic)

    def take(self, topic: str) -> Slots:
        """The slots of a topic that are asked now: they are pending no longer."""
        self.sure.discard(topic)
        self.late.discard(topic)
        return self.slots.pop(topic)

    def miss(self, topic: str, slots: Slots, now: float) -> None:
        """Ask for it again in a while: it could not be asked."""
        if not self._missed:
            self._missed_at = now + ASK_AGAIN
        _add(self._missed, topic, slots)

    def ask_missed(self, now: float) -> None:
        """Ask for what could not be asked, if that is a while ago."""
        if self._missed and now >= self._missed_at:
            for topic, slots in self._missed.items():
                if topic in self.topics:
                    _add(self.slots, topic, slots)
            self._missed.clear()

    def forget(self, topic: str) -> None:
        """Take nothing of it any more."""
        self.topics.remove(topic)
        for known in (self.slots, self._missed):
            known.pop(topic, None)
        for some in (self.sure, self.late, self.backlog, self.paused):
            some.discard(topic)

    def pause(self, paused: Collection[str]) -> set[str]:
        """These are the topics that are paused, of all; look into those that are no more, and
        return them."""
        before = self.paused
        self.paused = {topic for topic in self.topics if topic in paused}
        resumed = before - self.paused
        for topic in resumed:
            self.look(topic)
        return resumed

    def leave_paused(self) -> None:
        """Ask nothing of paused topics."""
        for topic in self.paused:
            self.slots.pop(topic, None)
            self.sure.discard(topic)
            self.late.discard(topic)
            self.backlog.discard(topic)

    def unknown(self) -> list[str]:
        """Topics of which it is not known whether they hold something while others have more than
        there was room for; not too many at a time, but all of them in turns."""
        known = self.sure & self.slots.keys()
        if not known & self.backlog:
            return []
        unknown = [t for t in self.topics if t not in known and t not in self.paused]
        if len(unknown) > MAX_OTHERS:
            unknown.sort()
            first = self._asked_about % len(unknown)
            unknown = (unknown[first:] + unknown[:first])[:MAX_OTHERS]
            self._asked_about += MAX_OTHERS
        return unknown

    def found_due(self, topics: Sequence[str], indexes: Iterable[int]) -> None:
        """Of the topics that were asked about, these hold something that is due."""
        for topic in (topics[index] for index in indexes):
            if topic in self.topics:
                self.ask_for_backlog(topic)

    def split(self, ready_limit: int, overdue_limit: int) -> dict[str, tuple[int, int]]:
        """What is asked of which topics: (how many at once, how many overdue). (0, 0) is a look.

        ready_limit: how many could start at once
        overdue_limit: how many fit, those included; the rest is only for topics that are known
            to hold more than somebody idle has taken
        """
        sure = self.sure & self.slots.keys()
        if not sure:
            return {
                topic: (number, number)
                for topic, number in self.topics.deal(ready_limit, self.slots.keys()).items()
            }
        order = list(self.topics)
        now = self.topics.deal(ready_limit, sure)
        full = sure & self.backlog if ready_limit else sure
        queued = self.topics.deal(overdue_limit - ready_limit, full)
        dealt = {
            topic: (number := now.get(topic, 0), number + queued.get(topic, 0))
            for topic in order
            if topic in now or topic in queued
        }
        looks = [topic for topic in self.slots if topic not in sure]
        return {**dealt, **dict.fromkeys(looks[:MAX_LOOKS], (0, 0))}


def _add(known: dict[str, Slots], topic: str, slots: Slots) -> None:
    """Note that these slots of a topic are to be asked, or all."""
    if slots is None:
        known[topic] = None
    else:
        before = known.setdefault(topic, set())
        if before is not None:
            before |= slots
