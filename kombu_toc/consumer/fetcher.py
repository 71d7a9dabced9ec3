"""Decides what a consumer asks for, asks for it, and learns from the replies."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..center.calls import REMEMBER, PopRequest, divide_evenly
from ..center.clock import STEP, Steps
from ..client.options import ROUND_ROBIN
from ..model.results import Delivery, Popped
from .holdings import UnansweredPop, log_kept
from .state import MAX_CLAIMS

if TYPE_CHECKING:
    from typing import TypeAlias

    from ..center.center import TimeoutCenter
    from ..center.clock import ServerClock
    from ..center.upkeep import Kept
    from ..client.options import Settings
    from ..model.topic import Topic
    from .lease_keeper import LeaseKeeper
    from .loop import Loop
    from .state import Claim, ConsumerState, Entry

    #: What is known of those that have ended, by their places; None if nothing is.
    Ended: TypeAlias = Mapping[int, Any] | None
    Answer: TypeAlias = Callable[["Ended"], None]


# -- which slots of a topic a consumer takes first
#
# Nothing here asks a server or reads a clock. A consumer without the option ``toc_prefer_slots``
# has none of this.

logger = logging.getLogger(__name__)

#: Microseconds for which a message of another slot must have been due.
OVERDUE_US = 1_000_000

#: What the option says: slots of every topic, or of some.
Preference = Sequence[int] | Mapping[str, Sequence[int]]

#: Monotonic seconds, whether others keep all topics up, and how far ahead something is fetched.
How = tuple[float, bool, int]

#: A part of a topic's slots, and how much of it is asked for: at once, and overdue.
Part = tuple[set[int] | None, int, int]


class PreferredSlots:
    """The slots that a consumer takes first.

    preference: slots of every topic, or a topic -> slots. Those that a topic does not have count
        for nothing. If it has none of them, or no others, all its slots are alike.
    """

    def __init__(self, preference: Preference) -> None:
        self._preference = preference
        #: topic, number of its slots -> the preferred ones; none if all are alike
        self._own: dict[tuple[str, int], frozenset[int]] = {}

    def own(self, topic: Topic) -> frozenset[int]:
        """The slots of a topic that are taken first; none if all are alike. They are where what may
        start of one depends on the others."""
        if topic.declaration.lanes and topic.counts_together:
            return frozenset()
        place = topic.name, topic.slot_span
        known = self._own.get(place)
        if known is None:
            known = self._own[place] = self._find(*place)
        return known

    def _find(self, name: str, span: int) -> frozenset[int]:
        preference, beyond = self._preference, []
        if isinstance(preference, Mapping):
            preference = preference.get(name, ())
            beyond = [slot for slot in preference if slot >= span]
        own = frozenset(slot for slot in preference if slot < span)
        if beyond:
            logger.warning(
                "toc_prefer_slots names slots %s of queue %r, which has %d slots: without effect",
                *(beyond, name, span),
            )
        return own if len(own) < span else frozenset()

    def is_foreign(self, topic: Topic, slot: int) -> bool:
        """Whether a slot is left to others, unless they leave it for too long."""
        own = self.own(topic)
        return bool(own) and slot not in own


def divide(
    own: frozenset[int],
    span: int,
    slots: set[int] | None,
    limits: tuple[int, int],
    *,
    others_turn: bool,
    look: bool,
) -> tuple[list[Part], set[int]]:
    """Divide a pop of a topic on one server; return its parts, and the slots whose turn is later.

    slots: those to be asked; None for all
    limits: how many messages at once, and how many overdue
    others_turn: whether the others' turn has come, if both have something
    look: whether the others are looked into, if nothing is known of them
    """
    mine, others = (set(own), set()) if slots is None else (slots & own, slots - own)
    if others and (others_turn or not mine):
        return [(others, 0, max(limits))], mine
    parts: list[Part] = [(mine, *limits)]
    if look and not others:
        parts.append((set(range(span)) - own, 0, 0))
    return parts, others


def earliest(claims: Sequence[Claim], most: int) -> list[Claim]:
    """Of the claims of a slot of others, those to be kept. (A later one is announced again if
    nobody serves it.)"""
    return sorted(set(claims))[:most]


# -- what a consumer asks for, and what the replies mean
#
# Nothing here sends anything, or reads a clock: :meth:`Fetcher.plan` says what is to be sent, and
# :meth:`Fetcher.take` learns from what came of it.

#: So many times as rarely an idle consumer looks into all slots while somebody keeps them up.
RARELY = 180.0

#: Messages that are worth a pop of their own, while there is a backlog: a slot's in one go.
WORTH = 4

#: Seconds between two questions of a busy consumer whether something is due in the topics that it
#: knows nothing of.
ASK_OTHERS = 0.02

#: Seconds after which it asks for them before it pops, and not along with the pops.
OTHERS_STALE = 0.1

#: Microseconds by which a pop of a limited topic looks ahead at most. Of a rate that is used up for
#: longer than it says and a second, scripts take it that it was another one before (lanes.lua).
MOST_AHEAD_US = 900_000

#: Of its own: a program that seeds Python's has its own numbers.
_random = random.Random()


@dataclass(slots=True)
class Pop:
    """A pop to be sent."""

    topic: Topic
    slots: set[int] | None  #: None for all
    ready_limit: int  #: messages that are due within `lookahead_us`, at most
    overdue_limit: int  #: messages that have been due for `behind_us`, at most; those included
    lookahead_us: int
    behind_us: int
    #: claims that it settles, unless they lie beyond its horizon
    claims: list[Claim]
    #: whether expired leases are to be rolled back, if that is permitted
    recover: bool
    number: int = 0  #: by which it is known while its reply is on its way
    divided: bool = False  #: whether the other slots are asked by themselves

    @property
    def looks(self) -> bool:
        """Whether it only finds out if there is something."""
        return not self.ready_limit and not self.overdue_limit

    @property
    def horizon_us(self) -> int:
        """Microseconds from now until which what is due is delivered or announced again."""
        return self.lookahead_us if self.ready_limit else -self.behind_us


@dataclass(slots=True)
class Plan:
    """Claims, questions and pops to send, in this order."""

    #: claims to be announced again: somebody else shall have them
    claims: list[Claim] = field(default_factory=list)
    #: topics of which it is to be asked whether something is due in them
    unknown: list[str] = field(default_factory=list)
    #: whether that is to be known before anything is popped
    ask_first: bool = False
    pops: list[Pop] = field(default_factory=list)


@dataclass(eq=False)
class Fetcher:
    """Decides for the consumers of a process what is popped, how much of it, and when.

    clustered: whether each slot is asked by itself, for it may be on a node of its own
    topic_of: gives the declaration of a topic that has this slot number at least
    jitter: a number from 0 to 1, lest all processes look at the same time
    """

    _settings: Settings
    _clustered: bool
    _topic_of: Callable[[str, int], Topic]
    jitter: Callable[[], float] = _random.random

    def __post_init__(self) -> None:
        self._interval = self._settings.toc_poll_interval
        self._behind_us = int(self._settings.toc_queue_after * 1_000_000)
        #: seconds after which what is known of the other topics is so old that they are asked
        #: about first
        in_turns = self._settings.queue_order_strategy == ROUND_ROBIN
        self._stale_after = OTHERS_STALE if in_turns else ASK_OTHERS
        #: the slots that are taken first; None if all are alike
        prefer = self._settings.toc_prefer_slots
        self.preferred = PreferredSlots(prefer) if prefer else None
        #: which slots of a Cluster's topic come first, of those that nothing sets apart
        self._rotation = 0

    def plan(
        self, state: ConsumerState, now: float, *, kept_up: bool, lookahead_us: int
    ) -> Plan | None:
        """Plan what a consumer asks for now, if anything. Nothing of it is on its way.

        now: monotonic seconds
        kept_up: whether expired leases and lost announcements are somebody else's concern
        lookahead_us: how long before it is due a message is fetched that can start at once
        """
        pending = state.pending
        free, room, most = state.capacity()
        finished, state.last_free = free > state.last_free, free
        ready_limit = max(min(free, room), 0)
        if ready_limit and self._is_time_to_look(state, now, kept_up):
            pending.look_at_all()
        claims: list[Claim] = []
        if not ready_limit and state.due_claims:
            claims = self._yield_claims(state)
        pending.ask_missed(now)
        if pending.paused:
            pending.leave_paused()
            claims += [claim for claim in state.due_claims if claim[0] in pending.paused]
            for claim in claims:
                state.due_claims.pop(claim, None)
        if not pending.slots or not (
            ready_limit or is_worth_a_pop(finished=finished, room=room, most=most)
        ):
            return Plan(claims) if claims else None
        plan = Plan(claims)
        if now >= state.others_at + ASK_OTHERS and (unknown := pending.unknown()):
            plan.unknown = unknown
            # Their turn may have come: that is worth a round trip, now and then.
            plan.ask_first = bool(ready_limit) and now >= state.others_at + self._stale_after
            state.others_at = now
            if plan.ask_first:
                state.left_at = now
                return plan
        for topic, limits in pending.split(ready_limit, max(room, ready_limit)).items():
            self._add_pops(plan.pops, state, topic, limits, (now, kept_up, lookahead_us))
        if plan.pops:
            state.left_at = now
        return plan

    def acts_at(self, claim: Claim, lookahead_us: int) -> int:
        """When a claim is acted on, by the server's clock in microseconds."""
        topic, slot, us = claim
        if lookahead_us > MOST_AHEAD_US and self._topic_of(topic, slot).declaration.lanes:
            return us - MOST_AHEAD_US
        return us - lookahead_us

    def _is_time_to_look(self, state: ConsumerState, now: float, kept_up: bool) -> bool:
        """Whether an idle consumer looks into all slots; if so, it has now."""
        if now < state.next_look and (kept_up or now < state.looked + self._interval):
            return False
        state.looked = now
        # The wake index and who keeps it up see to it that there is nothing to find.
        # On a Cluster an index that moves to another node takes and gives nothing meanwhile.
        rarely = kept_up and not self._clustered
        some = RARELY * (1 + self.jitter()) / 2 if rarely else 1
        state.next_look = now + self._interval * some
        return True

    @staticmethod
    def _yield_claims(state: ConsumerState) -> list[Claim]:
        """Somebody idle shall have them; whatever is left then is asked for when a task ends."""
        claims = list(state.due_claims)
        state.due_claims.clear()
        for topic, _, _ in claims:
            state.pending.ask_for_backlog(topic)
        return claims

    def _add_pops(
        self, pops: list[Pop], state: ConsumerState, name: str, limits: tuple[int, int], how: How
    ) -> None:
        now, kept_up, lookahead_us = how
        slots = state.pending.slots[name]
        # A slot may be announced by somebody who knows of more: of an older declaration or a
        # newer one. It is served in any case.
        topic = self._topic_of(name, max(slots) if slots else 0)
        if topic.declaration.lanes:
            # Nothing is fetched ahead of a limit: what waits here would keep others from starting.
            if limits[1] and not limits[0]:
                return
            limits = (limits[0], limits[0])
            lookahead_us = min(lookahead_us, MOST_AHEAD_US)
            if topic.counts_together and not self._clustered:
                slots = None
        # Where slots are divided, between nodes or between workers, each is asked by itself.
        divided = self._clustered or self.preferred is not None
        if slots and name in state.pending.late and not divided and max(slots) < topic.slot_span:
            slots = None
        state.pending.take(name)
        again = state.recovered.get(name, 0.0) + self._interval
        recover = slots is None and now >= again and not kept_up
        if recover:
            state.recovered[name] = now
        own = self.preferred.own(topic) if self.preferred is not None else None
        parts: list[Part] = [(slots, *limits)]
        later: Collection[int] = ()
        if self._clustered:
            claimed = {slot for owner, slot, _ in state.due_claims if owner == name}
            self._rotation += 1
            parts, later = split_over_slots(
                topic.slot_span,
                slots,
                claimed,
                *limits,
                backlog=name in state.pending.backlog,
                rotation=self._rotation,
            )
        elif own:
            # Who is never idle claims nothing, and learns only by this of what others leave.
            look = slots is None or name in state.pending.backlog
            again = state.looked_at_others.get(name, 0.0) + OVERDUE_US / 1e6
            if look := recover or (look and now >= again):
                state.looked_at_others[name] = now
            turn = name in state.others_turn
            parts, later = divide(own, topic.slot_span, slots, limits, others_turn=turn, look=look)
            if later:
                (state.others_turn.discard if turn else state.others_turn.add)(name)
        for slot in later:
            state.pending.ask(name, slot)
        for some, ready_limit, overdue_limit in parts:
            if foreign := bool(own and some and not some & own):
                ready_limit, overdue_limit = 0, max(ready_limit, overdue_limit)
            looks = not ready_limit and not overdue_limit
            behind_us = 0 if looks else self._behind_us
            if foreign:
                behind_us = max(behind_us, OVERDUE_US)
            # What the pop announces anew may be claimed here before its reply is read: that is a
            # claim of its own, so those that the pop settles are set apart now.
            claims = state.take_claims_of(name, some)
            pops.append(
                Pop(
                    topic,
                    some,
                    ready_limit,
                    overdue_limit,
                    lookahead_us,
                    behind_us,
                    claims,
                    recover,
                    divided=self._clustered or bool(own),
                )
            )

    def take(self, state: ConsumerState, pop: Pop, result: Popped) -> None:
        """Learn from the reply to a pop."""
        pending, name = state.pending, pop.topic.name
        state.pops_in_flight.discard(pop.number)
        for claim in pop.claims:
            if claim[2] > result.now_us + pop.horizon_us:
                state.due_claims[claim] = None
        if result.more:
            if pop.divided:
                for slot in pop.slots or ():
                    pending.ask(name, slot)
            else:
                pending.ask(name)
        if result.more and not pop.looks:
            pending.backlog.add(name)
        elif not pop.divided or not (state.pops_in_flight or name in pending.slots):
            pending.backlog.discard(name)

    @staticmethod
    def miss(state: ConsumerState, pop: Pop, now: float) -> None:
        """Note that a topic could not be asked: its node is away, or the server has refused it."""
        state.pops_in_flight.discard(pop.number)
        if pop.topic.name in state.pending.topics:
            state.pending.miss(pop.topic.name, pop.slots, now)


def is_worth_a_pop(*, finished: bool, room: int, most: int) -> bool:
    """Whether a consumer that could start nothing at once fetches what it would queue: when a
    task has ended and half of the room is free, so that what it fetches is a batch.

    finished: more is free than there was
    room: how many fit
    most: how many fit when nothing is queued
    """
    return finished and room > 0 and 2 * room >= most


def split_over_slots(
    span: int,
    slots: set[int] | None,
    claimed: set[int],
    ready_limit: int,
    overdue_limit: int,
    *,
    backlog: bool,
    rotation: int,
) -> tuple[list[Part], list[int]]:
    """How many messages to pop from which slots of a Cluster, each of which is asked by itself:
    (slots, how many at once, how many overdue), and the slots whose turn is later.

    Not to be given more than there is room for, it is first found out whether there is something
    in slots that nothing is known of.

    span: the topic's slot count
    slots: those to be asked; None for all
    claimed: those that are known to have something
    backlog: whether there is more than there is room for: then few slots give many each
    rotation: another number each time, lest the same slots come first
    """
    looks: list[int] = []
    if slots is None:
        looks = [number for number in range(span) if number not in claimed]
        slots = claimed
    # Those that were claimed first, then in an order that is another one each time.
    numbers = sorted(slots, key=lambda n: (n not in claimed, (n + rotation) % span, n))
    most = max(ready_limit, overdue_limit)
    at_once = max(ready_limit, most // WORTH, 1) if backlog else most
    numbers, later = numbers[:at_once], numbers[at_once:]
    ready, overdue = (
        dict(divide_evenly(limit, numbers)) if numbers else {}
        for limit in (ready_limit, overdue_limit)
    )
    parts: list[Part] = [
        ({number}, ready.get(number, 0), overdue.get(number, 0)) for number in numbers
    ]
    return [*parts, *(({number}, 0, 0) for number in looks)], later


def due_entries(
    state: ConsumerState, result: Popped, sent_us: int, batch: int, number: int
) -> list[Entry]:
    """The entries of what a pop has delivered, in the order of their numbers.

    What was due when it was asked for keeps the order in which it came: by priority, and its
    topics take turns. What a rate lets start in a moment only is due then.

    sent_us: the server's time when it was asked for; 0 if that is not known
    batch, number: what the pops have that left together, and the number of this one
    """
    # Unless the server's clock was set back meanwhile: then that time is yet to come.
    sent_us = min(sent_us, result.now_us)
    entries = []
    for place, delivery in enumerate(result.messages):
        due = delivery.start_us or delivery.action_us
        if sent_us:
            due = max(due, sent_us)
        elif due <= result.now_us:
            due = 0
        entries.append((due, (batch, place, number), state, delivery))
    return entries


# -- sends what was planned, and hands on what comes of it

#: What this process knows of the clocks of servers, by identity and, of a Cluster, node.
_steps: dict[Hashable, Steps] = {}

#: What is sent: a call or a command, what is told the result, what is told that there is none.
Item = tuple[Any, ...]


class Popper:
    """Makes calls of plans, and learns from their replies.

    poller: told what they bring
    identity: tells one server from another
    """

    def __init__(self, poller: Any, identity: Hashable) -> None:
        self._poller = poller
        self._identity = identity
        self._center: TimeoutCenter = poller.center
        self._leases: LeaseKeeper = poller.leases
        self._loop: Loop = poller.loop
        self._clock: ServerClock = poller.clock
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
    _poller: Any

    def __post_init__(self) -> None:
        self._center: TimeoutCenter = self._poller.center
        self._loop: Loop = self._poller.loop
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
