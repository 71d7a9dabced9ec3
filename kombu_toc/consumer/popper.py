"""Sends what the fetcher has planned, and hands on what comes of it, or holds it back."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..center.calls import REMEMBER, PopRequest
from ..center.clock import STEP, Steps
from ..model.results import Delivery, Popped
from .fetcher import OVERDUE_US, Fetcher, Plan, Pop, earliest
from .flights import UnansweredPop, log_kept
from .state import MAX_CLAIMS

if TYPE_CHECKING:
    from typing import TypeAlias

    from ..center.upkeep import Kept
    from ..model.topic import Topic
    from .poller import Poller
    from .state import Claim, ConsumerState, Entry

    #: What is known of those that have ended, by their places; None if nothing is.
    Ended: TypeAlias = Mapping[int, Any] | None
    Answer: TypeAlias = Callable[["Ended"], None]

logger = logging.getLogger(__name__)

#: What this process knows of the clocks of servers, by identity and, of a Cluster, node.
_steps: dict[Hashable, Steps] = {}

#: What is sent: a call or a command, what is told the result, what is told that there is none.
Item = tuple[Any, ...]


class Popper:
    """Makes calls of plans, and learns from their replies.

    poller: told what they bring
    identity: tells one server from another
    """

    def __init__(self, poller: Poller, identity: Hashable) -> None:
        self._poller = poller
        self._identity = identity
        self._center, self._leases = poller.center, poller.leases
        self._loop, self._clock = poller.loop, poller.clock
        self.fetcher = Fetcher(poller.settings, self._center.clustered, self.topic_of)
        #: gives a number that is higher than all before: what came first goes first
        self.next_number = count().__next__

    def topic_of(self, name: str, slot: int) -> Topic:
        """The topic of that name, with this slot number at least if it has had it."""
        registry = self._center.registry  # what is consumed is read again along with pops
        topic = registry.known(name) or registry.topic(name)
        if slot >= topic.slot_span:
            topic = self._center.registry.reach(name, slot) or topic
        return topic

    def items(self, state: ConsumerState, plan: Plan, now: float) -> list[Item]:
        """What is to be sent for a plan, but for the claims that it gives up."""
        items: list[Item] = []
        if plan.unknown:
            items.append(self._find_due(state, plan))
        if plan.pops:
            batch = (self.next_number(), self._clock.at(now) if self._clock.known else 0)
            # The nodes of a Cluster answer each in its time: none waits for another.
            state.batch = (0, 0) if self._center.clustered else batch
            for pop in plan.pops:
                self._add_pop(items, state, pop, batch)
        return items

    # -- where else something is due

    def _find_due(self, state: ConsumerState, plan: Plan) -> Item:
        """Who is busy claims nothing: only by this does it hear of a topic whose turn it is."""
        unknown, also = plan.unknown, []
        if self.fetcher.preferred is not None:
            also = [(key, topic) for topic in unknown for key in self.passed_on(topic)]
            unknown = [*unknown, *(topic for _, topic in also)]
        call = self._center.commands.find_due(plan.unknown, [key for key, _ in also])
        if not plan.ask_first:
            return call, partial(state.pending.found_due, unknown)
        number = self.next_number()
        state.pops_in_flight.add(number)

        def known(indexes: list[int]) -> None:
            state.pops_in_flight.discard(number)
            state.pending.found_due(unknown, indexes)
            self._poller.fetch(state)

        if not self._center.clustered:
            return call, known
        return call, known, partial(state.pops_in_flight.discard, number)

    # -- zones

    def pass_on(self, claim: Claim, state: ConsumerState) -> bool:
        """Pass on a claim of a slot that is left to others: announce it where these listen, and
        keep it, to see a second after its time whether it was served. False if none are."""
        preferred, (topic, slot, us) = self.fetcher.preferred, claim
        if preferred is None or not preferred.is_foreign(self.topic_of(topic, slot), slot):
            return False
        if us + OVERDUE_US > self._clock.at(self._loop.now()):
            self._poller.outbox.pass_on(claim)
        claims, due = [claim], self._poller.dispatcher.due
        if due.count_claims(topic, slot) >= MAX_CLAIMS:
            claims += due.take_claims(lambda other: other[:2] == claim[:2])
        for one in earliest(claims, MAX_CLAIMS):
            due.push_claim(one[2] + OVERDUE_US, (self.next_number(), 0, 0), state, one)
        return True

    def passed_on(self, name: str) -> list[str]:
        """Where others pass on what they leave to this process, of a topic."""
        preferred = self.fetcher.preferred
        own = preferred.own(self.topic_of(name, 0)) if preferred is not None else ()
        return [self._center.keys.passed_on(name, slot) for slot in sorted(own)]

    # -- pops

    def _add_pop(
        self, items: list[Item], state: ConsumerState, pop: Pop, batch: tuple[int, int]
    ) -> None:
        center, topic = self._center, pop.topic
        if pop.recover:
            self._look_at_leases(items, topic, pop.slots or range(topic.slot_span))
        visibility = topic.declaration.limits(center.limits).visibility
        name = state.name_pop()
        request = PopRequest(
            name,
            pop.slots,
            ready_limit=pop.ready_limit,
            lookahead_us=pop.lookahead_us,
            overdue_limit=pop.overdue_limit,
            behind_us=pop.behind_us,
            claimed=bool(pop.claims) or pop.looks,
            # What goes away by itself leaves nothing behind.
            remember=0 if pop.looks or topic.declaration.expires else REMEMBER,
        )
        call = center.commands.pop(topic, request)
        pop.number = self.next_number()
        state.pops_in_flight.add(pop.number)
        flight = UnansweredPop(
            topic, tuple(pop.slots) if pop.slots else None, name, visibility, self._loop.now()
        )
        if not pop.looks:
            self._leases.expect(flight)
        items.append(
            (
                call,
                partial(self._popped, state, pop, flight, (*batch, pop.number), call.keys[0]),
                partial(self._failed, state, pop, flight),
            )
        )

    def _popped(
        self,
        state: ConsumerState,
        pop: Pop,
        flight: UnansweredPop,
        turn: tuple[int, int, int],
        key: str | bytes,
        result: Popped,
    ) -> None:
        self._leases.flights.arrive(flight)
        first = next(iter(pop.slots)) if pop.slots else 0
        self._center.leases.sample(pop.topic, first, result.now_us, flight.left)
        # Its node as it is known now: the slot may have been moved while the pop was on its way.
        where = self._center.client.place_of(key) if self._center.clustered else None
        self._hear_clock(result.now_us, flight.left, where)
        self.fetcher.take(state, pop, result)
        self._poller.take_popped(state, pop.topic.name, result, flight.visibility, turn)

    def _failed(self, state: ConsumerState, pop: Pop, flight: UnansweredPop) -> None:
        if not pop.looks:
            self._leases.lose(flight)
        # A node that cannot be reached, or a key that another program has written.
        self.fetcher.miss(state, pop, self._loop.now())

    def _hear_clock(self, now_us: int, left: float, where: Any = None) -> None:
        """Learn what a server's clock has shown in a reply to what left at that moment."""
        now = self._loop.now()
        clock = self._clock
        before = clock.at(now) if clock.known else 0
        steps = _steps.setdefault((self._identity, where), Steps())
        if back := steps.back(now_us, left, now):
            clock.forget(where)
            logger.warning(
                "the clock of Redis%s went back by %.1f seconds: it was set, or a server with a "
                "clock behind has taken over; what was to start later starts when the clock shows "
                "that time, so up to %.1f seconds later, and as much later come the tasks of "
                "workers that died",
                f" at {where[0]}:{where[1]}" if where else "",
                back,
                back,
            )
        clock.sample(now_us, now, where)
        if clock.at(now) < before - STEP * 1_000_000:
            self._poller.release_far()

    def _look_at_leases(self, items: list[Item], topic: Topic, slots: Collection[int]) -> None:
        """Have those that have ended rolled back, but not while our own may be among them."""
        if self._leases.in_time(topic.name, slots):
            calls = self._center.leases.look_calls(topic, sorted(slots))
            items.extend((call, self._looked) for call in calls)

    def _looked(self, kept: Kept) -> None:
        for event in kept.events:
            log_kept(self._center, event.topic, event)

    # -- pops whose replies were lost

    def recalls(self, state: ConsumerState) -> list[Item]:
        """What is to be sent to get what pops have given whose replies were lost."""
        items: list[Item] = []
        for flight in self._leases.flights.take(state.pending.topics):
            number = self.next_number()
            state.pops_in_flight.add(number)
            call = flight.recalling(self._center)
            given = partial(self._recalled, state, flight, number, call.keys[0])
            lost = partial(self._recall_failed, state, flight, number)
            items.append((call, given, lost))
        return items

    def _recalled(
        self, state: ConsumerState, flight: UnansweredPop, number: int, key: str, result: Popped
    ) -> None:
        state.pops_in_flight.discard(number)
        where = self._center.client.place_of(key) if self._center.clustered else None
        self._hear_clock(result.now_us, flight.left, where)
        if result.messages:
            logger.info(
                "%d messages of %s had been delivered when the connection was cut",
                *(len(result.messages), flight.topic.name),
            )
        turn = (number, 0, number)
        self._poller.take_popped(state, flight.topic.name, result, flight.visibility, turn)
        self._poller.release_far()  # since they were given, the clock may have been set

    def _recall_failed(self, state: ConsumerState, flight: UnansweredPop, number: int) -> None:
        if self._center.clustered:
            state.pops_in_flight.discard(number)
        self._leases.lose(flight)


# -- what was fetched is held back until somebody has said whether it has ended already
#
# Only of topics that are declared with ``guard``. Who is asked answers from a thread of its own, in
# bounded time: what it does not say in time is delivered, for a message is delivered at least once.


class Guard(Protocol):
    """Knows what has ended.

    patience: seconds for which an answer is waited for
    """

    patience: float

    def apart(self, deliveries: Sequence[Delivery]) -> Sequence[Sequence[int]]:
        """The places of those that are asked about together: nobody waits for others."""

    def ask(self, deliveries: Sequence[Delivery], answer: Answer) -> bool:
        """Ask which of these, which belong together, are not to be run again. Returns whether
        there will be an answer, by a call from any thread; if not, nobody can be asked for now."""

    def held_back(self, topic: str, known: Sequence[Any]) -> None:
        """These were not delivered: of each, what was answered."""


class _Asked(NamedTuple):
    state: ConsumerState
    topic: str
    entries: list[Entry]
    until: float  #: monotonic seconds


@dataclass(eq=False)
class Guarding:
    """What a poller has asked about. Used by its loop, but for what says otherwise."""

    _guard: Guard
    _poller: Poller

    def __post_init__(self) -> None:
        self._center, self._loop = self._poller.center, self._poller.loop
        self._numbers = count()
        #: in the order in which they are waited for
        self._asked: dict[int, _Asked] = {}
        self._answers: deque[tuple[int, Ended]] = deque()

    def hold(self, state: ConsumerState, topic: str, entries: list[Entry]) -> list[Entry]:
        """Hold back what was fetched, if it is to be asked about; return the others."""
        known = self._center.registry.known(topic)
        if known is None or not known.declaration.guard or not entries:
            return entries
        others: list[Entry] = []
        until = self._loop.now() + self._guard.patience
        for places in self._guard.apart([entry[3] for entry in entries]):
            some = [entries[place] for place in places]
            number = next(self._numbers)
            self._asked[number] = _Asked(state, topic, some, until)
            if not self._guard.ask([entry[3] for entry in some], partial(self._answer, number)):
                del self._asked[number]
                others += some
        self._center.context.counts(known).unguarded += len(others)
        return others

    def _answer(self, number: int, ended: Ended) -> None:
        """Somebody has answered; any thread may call it."""
        self._answers.append((number, ended))
        self._loop.nudge()

    def settle(self) -> None:
        """Hand on what was answered, and what has waited for too long."""
        while self._answers:
            number, ended = self._answers.popleft()
            asked = self._asked.pop(number, None)
            if asked is not None:
                self._judge(asked, ended)
        while self._asked:
            number, asked = next(iter(self._asked.items()))
            if self._loop.now() < asked.until:
                return
            if self._asked.pop(number, None) is not None:
                self._judge(asked, None)

    def _judge(self, asked: _Asked, ended: Ended) -> None:
        counts = self._center.context.counts(self._center.registry.resolved(asked.topic))
        if ended is None:
            counts.unguarded += len(asked.entries)
        elif ended:
            counts.guarded += len(ended)
            self._guard.held_back(asked.topic, list(ended.values()))
        ended = ended or {}
        passed = [one for place, one in enumerate(asked.entries) if place not in ended]
        held_back = [asked.entries[place][3] for place in sorted(ended)]
        self._poller.on_judged(asked.state, passed, held_back)

    # -- what is not waited for any more

    def take(self, state: ConsumerState, topic: str) -> list[Delivery]:
        """Take back what is held for a consumer that takes no more of a topic."""
        taken: list[Delivery] = []
        for number, asked in list(self._asked.items()):
            if asked.state is state and asked.topic == topic:
                del self._asked[number]
                taken += [entry[3] for entry in asked.entries]
        return taken

    def take_all(self) -> list[Delivery]:
        """Take everything, from another thread, while the loop stands still."""
        taken: list[Delivery] = []
        for number in list(self._asked):
            asked = self._asked.pop(number, None)
            if asked is not None:
                taken += [entry[3] for entry in asked.entries]
        return taken
