"""The state of one consumer, a channel and the topics that it consumes; and the protocols of who
takes what it fetches."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ..client.options import ROUND_ROBIN, SORTED
from ..model.results import Delivery
from ..scripts.call import Names

if TYPE_CHECKING:
    from ..center.exchanges import Subscription

# -- whose turn it is
#
# Nothing here knows of Redis or reads a clock.


class QueueRotation(list[str]):
    """The topics of a consumer, in the order in which they are served.

    strategy: ``round_robin``, and topics with something due get equal shares; ``priority``, and
        the first that was consumed goes before all others; or ``sorted``, and the first by name
        does
    """

    def __init__(self, strategy: str = ROUND_ROBIN) -> None:
        super().__init__()
        self._strategy = strategy

    def append(self, topic: str) -> None:
        super().append(topic)
        if self._strategy == SORTED:
            self.sort()

    def deal(self, number: int, wanting: Collection[str]) -> dict[str, int]:
        """Split a number over those topics that want a part; return who gets how many.

        In turns, one at a time: over any number of calls, no two topics that want something all
        the time differ by more than one. Otherwise the first in order gets everything.
        """
        if number <= 0:
            return {}
        row = [topic for topic in self if topic in wanting]
        if not row:
            return {}
        if self._strategy != ROUND_ROBIN:
            return {row[0]: number}
        each, rest = divmod(number, len(row))
        first = row[:rest]
        if first:
            # They have had their turn: the next call begins with the others.
            self[:] = [topic for topic in self if topic not in first] + first
        dealt = dict.fromkeys(first, each + 1)
        if each:
            dealt.update((topic, each) for topic in row[rest:])
        return dealt


# -- what a consumer knows of its topics

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
        self.topics = QueueRotation(strategy)
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
        """Note which topics are paused, of all; look into those that are no more, and return
        them."""
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
            for some in (self.sure, self.late, self.backlog):
                some.discard(topic)

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
        """Split numbers over the topics: (how many at once, how many overdue). (0, 0) is a look.

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


# -- what is known of one consumer

#: Seconds after a batch of pops has left, until when the first replies wait for the last ones.
REST_OF_BATCH = 0.05


class ConsumerState:
    """The memory of a consumer: what it waits for, has in hand, and has asked for.

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
        self.early: dict[Number, Message] = {}
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
        #: gives a name that no other pop has
        self.name_pop = Names().next

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
        """How much there is room for: see :meth:`Sink.capacity`."""
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


# -- claims of announced times

#: Claims of one slot that a consumer holds, at most.
MAX_CLAIMS = 4


class WakeTopics:
    """The topics whose wake indexes a process blocks on."""

    def __init__(self) -> None:
        self._topics: dict[bytes, str] = {}
        self._turn = 0

    def __contains__(self, topic: object) -> bool:
        return topic in self._topics.values()

    def listen(
        self,
        topics: list[str],
        key_of: Callable[[str], str],
        passed_on: Callable[[str], list[str]] | None = None,
    ) -> list[str]:
        """The keys to block on. Another one comes first each time: what a server gives is of the
        first that has something.

        passed_on: of a topic, where others pass on what they leave to this process
        """
        self._turn = (self._turn + 1) % len(topics)
        topics = topics[self._turn :] + topics[: self._turn]
        keys = [key_of(topic) for topic in topics]
        if passed_on is not None:
            also = [(key, topic) for topic in topics for key in passed_on(topic)]
            keys = [*(key for key, _ in also), *keys]
            topics = [*(topic for _, topic in also), *topics]
        self._topics = {
            key.encode("utf-8", "surrogatepass"): topic
            for key, topic in zip(keys, topics, strict=True)
        }
        return keys

    def received(self, reply: Any) -> Claim | None:
        """The claim in a reply to BZPOPMIN; None if it ended without."""
        topics, self._topics = self._topics, {}
        if not reply:
            return None
        slot, _, us = reply[1].decode().partition(":")
        return topics[reply[0]], int(slot), int(us)


def idle_topics(states: Iterable[ConsumerState]) -> list[str]:
    """The topics of which times are to be claimed: of consumers that could start something and
    have nothing else to ask for."""
    topics: list[str] = []
    for state in states:
        if state.pops_in_flight or state.pending.slots:
            continue
        free, room, _ = state.capacity()
        if free > 0 and room > 0:
            paused = state.pending.paused
            topics += [topic for topic in state.pending.topics if topic not in paused]
    return topics


def claimant(states: Iterable[ConsumerState], topic: str) -> ConsumerState | None:
    """Whose a claim is to be: of those that consume the topic, who can start most."""
    having = [state for state in states if topic in state.pending.topics]
    return max(having, key=lambda state: min(state.capacity()[:2])) if having else None


# -- what a process waits for

if TYPE_CHECKING:
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
        """The entry that comes due first; it stays."""
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


# -- protocols: to whom the poller delivers, and what the owner of a consumer wants
#
# The poller delivers to a :class:`Sink`, in practice a channel of Kombu's. A worker sets one object
# on its channel, ``channel.policy = ...``, that says how much it can start, and what it keeps. The
# poller and the channel ask it; nothing else of a worker is known to them.


#: A `kombu_toc.Message`. The room of the messages lies above this one, so it cannot be named here.
Message: TypeAlias = Any


class WorkerPolicy:
    """The owner of a channel, as the transport sees it. A worker's has these methods, too.

    Every method is called in the event loop's thread unless it says otherwise, often several times
    for each message: none may block. The answers here are those of a plain consumer.
    """

    #: whether more may be fetched than could start at once
    prefetches = True
    #: whether :meth:`wants_early` is worth a question
    accepts_early = False
    #: whether the pool has a queue of its own, which :meth:`take_queued` can take from
    queues_in_pool = False

    def idle_slots(self) -> int | None:
        """How many tasks could start at once; negative if more are queued than can start.

        None: there is no bound but the prefetch count.
        """
        return None

    def idle_within(self, seconds: float) -> int:
        """How many more tasks could start within so many seconds, as far as one can tell."""
        return 0

    def start_limit(self) -> int | None:
        """How many messages may be delivered now; None for any number.

        That is the number of idle slots, unless the pool takes what comes next faster than it can
        be delivered.
        """
        return None

    def wants_early(self, message: Message) -> bool:
        """Whether a message may be delivered ahead of its time.

        Only if whoever gets it begins nothing before (`Message.call_when_due`) and needs the time
        until then to prepare.
        """
        return False

    def keeps(self, message: Message) -> bool:
        """Whether an unsettled message stays with this process when the channel closes."""
        return False

    def execution(self, message: Message) -> Hashable | None:
        """An identity of the task of a message while it is executed; None if it is not.

        Asked when a message is acknowledged that holds something until its task has ended; in any
        thread.
        """
        return None

    def ended(self, executions: Collection[Hashable]) -> Collection[Hashable]:
        """Of these executions, the ones that have ended, however; in any thread."""
        return executions

    def take_queued(self, seconds: float) -> list[Message]:
        """Take back what the pool was given so many seconds ago and has not begun."""
        return []

    def before_delivery(self) -> None:
        """Called before each delivery. A worker that is to end raises what ends its loop."""
        return

    def flush_pool(self) -> bool:
        """Have the pool send, in this turn of the event loop, what was delivered in it.

        False: this cannot be done, and the loop has to turn once more for it.
        """
        return False


class Sink(Protocol):
    """Takes messages and broadcasts."""

    @property
    def qos(self) -> Any:
        """The prefetch window, as Kombu has it; ``release(message)`` gives back one message."""

    @property
    def policy(self) -> WorkerPolicy:
        """The owner's policy: what can be started, and what is kept."""

    def capacity(self, held: int, early: int = 0) -> tuple[int, int, int]:
        """How many could start at once, how many are taken, and how many would be if nothing
        were queued.

        held: messages that are fetched and not yet delivered
        early: of these, how many were delivered before they are due
        """

    def receive(self, delivery: Delivery) -> None:
        """Deliver a message."""

    def take_early(self, delivery: Delivery) -> Message | None:
        """The message, if it may be delivered before it is due."""

    def deliver_early(self, message: Message) -> None:
        """Deliver what :meth:`take_early` gave."""

    def take_back(self, message: Message) -> bool:
        """Take it back unless it was settled; whether it was taken back."""

    def wants(self, subscription: Subscription, routing_key: str) -> bool:
        """Whether a queue gets a broadcast by this of its bindings."""

    def receive_broadcast(
        self, subscription: Subscription, routing_key: str, packed: bytes
    ) -> bool:
        """Deliver a broadcast; whether there is a consumer for it."""
