"""What is known of one consumer: a channel and the topics that it consumes."""

from __future__ import annotations

from collections import deque
from itertools import count
from secrets import token_urlsafe
from typing import TYPE_CHECKING

from ..model.results import Delivery
from .pending import PendingTopics

if TYPE_CHECKING:
    from .due_queue import Claim, Entry, Number
    from .sink import EarlyMessage, Sink

#: Seconds after a batch of pops has left, until when the first replies wait for the last ones.
REST_OF_BATCH = 0.05


class ConsumerState:
    """What a consumer waits for, what it has in hand, and what it has asked for.

    It has more fields than most classes: it is the memory that the fetcher, the claims and the
    conductor share, and has hardly any behaviour.
    """

    def __init__(self, sink: Sink, strategy: str) -> None:
        self.sink = sink
        self.pending = PendingTopics(strategy)
        #: claims that have come due and that no pop has settled yet
        self.due_claims: dict[Claim, None] = {}
        #: messages fetched and not handed over to start
        self.buffered = 0
        #: those of them that are due and wait for a free process, and since when
        self.ready: deque[tuple[float, Entry]] = deque()
        #: how many of the processes that were free when last asked have got nothing since
        self.startable = 0
        #: of what is buffered, what the channel was handed already, by its number
        self.early: dict[Number, EarlyMessage] = {}
        #: pops that are on their way, and monotonic seconds when the latest left
        self.pops_in_flight: set[int] = set()
        self.left_at = 0.0
        #: the batch that they left in, if its topics take turns, and the server's time then, or 0
        self.batch = (0, 0)
        #: monotonic seconds of the next look into all slots, and of the latest
        self.next_look = 0.0
        self.looked = 0.0
        #: monotonic seconds when it was last asked about the topics of which nothing is known
        self.others_at = 0.0
        #: topic -> monotonic seconds when expired leases were last rolled back
        self.recovered: dict[str, float] = {}
        #: topic -> monotonic seconds when the slots that it does not prefer were last looked into
        self.looked_at_others: dict[str, float] = {}
        #: topics of which it is those slots' turn, if both have something
        self.others_turn: set[str] = set()
        #: free processes when last asked, negative if more is reserved than there are
        self.last_free = 0
        self._name, self._pops = token_urlsafe(9), count(1)

    def name_pop(self) -> str:
        """A name that no other pop has."""
        return f"{self._name}.{next(self._pops):x}"

    def may_start(self) -> bool:
        """Whether a message that is handed over now could start at once; it counts as one that
        is."""
        if self.startable <= 0:
            limit = self.sink.policy.start_limit()
            if limit is None:
                return True
            self.startable = limit
        self.startable -= 1
        return self.startable >= 0

    def over_queued(self) -> bool:
        """Whether the pool has queued what may have to be taken back."""
        policy = self.sink.policy
        return policy.queues_in_pool and (policy.idle_slots() or 0) < 0

    def capacity(self) -> tuple[int, int, int]:
        """How much there is room for: see :class:`.sink.Sink`."""
        return self.sink.capacity(self.buffered, len(self.early))

    def rest_comes_until(self, entry: Entry) -> float:
        """Monotonic seconds until which what is due waits at most for what was asked for together
        with it, lest one topic has the turns of all; 0.0 if it does not wait."""
        batch, asked_us = self.batch
        if not self.pops_in_flight or entry[1][0] != batch or entry[0] > asked_us:
            return 0.0
        return self.left_at + REST_OF_BATCH

    def take_claims_of(self, topic: str, slots: set[int] | None) -> list[Claim]:
        """The due claims of a topic, or of some of its slots: they are another's from now on."""
        taken = [
            claim
            for claim in self.due_claims
            if claim[0] == topic and (slots is None or claim[1] in slots)
        ]
        for claim in taken:
            del self.due_claims[claim]
        return taken

    def waits_for(self, topic: str, entry: Entry) -> bool:
        """Whether it waits for this because of that topic, and nobody else has it."""
        _, number, owner, item = entry
        if owner is not self or number in self.early:  # it was handed over already
            return False
        return bool((item.topic if isinstance(item, Delivery) else item[0]) == topic)
