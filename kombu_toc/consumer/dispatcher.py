"""Delivers what is due to those who can start it, and takes back what they cannot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..center.clock import STEP
from ..model.results import Delivery
from .loop import TICK, Alarm, Loop
from .state import DueQueue

if TYPE_CHECKING:
    from ..center.clock import ServerClock
    from ..metrics import Metrics
    from .state import ConsumerState, Entry, Number


# -- whether the pool goes first

#: Seconds for which everything else waits until the pool has sent what is delivered, at most.
POOL_FIRST = 0.02


class YieldToPool:
    """Which turns of the loop are for the pool.

    The server would take the processor from the processes that are to start a task. So after a
    delivery one turn passes in which nothing is sent; but not while there is a backlog, which is
    worked off with fewer turns.
    """

    def __init__(self) -> None:
        #: turns of the loop, and that of the latest delivery
        self.turn = 0
        self.delivered_in = -1
        #: monotonic seconds since when each turn has been for the pool; None if the latest was not
        self._since: float | None = None

    @property
    def delivered_now(self) -> bool:
        """Whether something was delivered in this turn: the pool's own part of the turn may have
        been over by then."""
        return self.turn == self.delivered_in

    @property
    def may_have_tasks(self) -> bool:
        """Whether the pool may still have to send something that was delivered."""
        return self.turn <= self.delivered_in + 1

    def pass_by(self) -> None:
        """This turn is not the pool's."""
        self._since = None

    def takes_turn(self, now: float, backlog: bool) -> bool:
        """Whether this turn is the pool's.

        now: monotonic seconds
        backlog: whether more is due than there is room for
        """
        if not self.may_have_tasks:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        if backlog or now >= self._since + POOL_FIRST:
            self._since = None
            return False
        return True


# -- delivers what is due to those who can start it, and takes back what they cannot

#: Seconds for which a message waits for a free process of the worker that has it: then another
#: shall have it. (What is fetched ahead is what should have started by then.)
MAX_QUEUED = 0.05

#: Microseconds after its time beyond which a claim is acted on late: other slots may have come due
#: meanwhile, and what is due is delivered in the order of its times.
LATE_US = 5_000


@dataclass(eq=False)
class Dispatcher:
    """Takes from the due queue; states: the consumers, by whom they deliver to."""

    _loop: Loop
    _clock: ServerClock
    _states: dict[Any, ConsumerState]
    _metrics: Metrics

    def __post_init__(self) -> None:
        self.due = DueQueue()
        self.pool_first = YieldToPool()
        #: how much was delivered since somebody set this to 0
        self.delivered = 0
        #: whether no more than one message is to be delivered for now
        self.one = False
        self._alarm = Alarm(self._loop, self._on_alarm)
        self._queued_alarm = Alarm(self._loop, self._watch_queued, early=0.0)

    @property
    def enough(self) -> bool:
        """Whether nothing more is to be delivered for now."""
        return self.one and self.delivered > 0

    def run(self) -> None:
        """Deliver what has waited for a free process and then what has come due."""
        for state in list(self._states.values()):
            if state.ready:
                self._run_ready(state)
        self.run_due()

    def run_due(self) -> None:
        """Deliver held messages whose time has come and that can start, and act on claims."""
        for state in self._states.values():
            state.startable = 0
        due, now_of, clock = self.due, self._loop.now, self._clock
        while (first := due.first) is not None:
            if first[0] > (now := clock.at(now_of())) or (self.one and self.delivered):
                return
            state = first[2]
            if state.pops_in_flight and state.rest_comes_until(first) > now_of():
                return
            state.sink.policy.before_delivery()
            entry = due.pop()
            if entry is None:  # given back by another thread just now
                return
            _, number, state, item = entry
            if not isinstance(item, Delivery):
                state.due_claims[item] = None
                state.pending.ask(item[0], item[1])
                if now > item[2] + LATE_US:
                    state.pending.late.add(item[0])
            elif state.sink not in self._states:  # it was handed over, and cancelled since
                self._deliver(state, number, item, now)
            elif state.ready or not state.may_start():
                state.ready.append((now_of(), entry))
                self._watch_queued()
            else:
                self._deliver(state, number, item, now)

    def _run_ready(self, state: ConsumerState) -> None:
        """Deliver what has waited for a free process, as far as there are any."""
        state.startable = 0
        while state.ready and not self.enough and state.may_start():
            state.sink.policy.before_delivery()
            try:
                _, (_, number, _, item) = state.ready.popleft()
            except IndexError:  # given back by another thread just now
                return
            self._deliver(state, number, item, self._clock.at(self._loop.now()))

    def _deliver(self, state: ConsumerState, number: Number, delivery: Delivery, now: int) -> None:
        state.buffered -= 1
        self.delivered += 1
        self.pool_first.delivered_in = self.pool_first.turn
        self._loop.held_up = True
        if due := delivery.action_us:
            self._metrics.late(delivery.topic, now - due)
        message = state.early.pop(number, None) if state.early else None
        try:
            if message is None:
                state.sink.receive(delivery)
            else:
                message.is_early = False
                on_due, message.on_due, message.on_given_back = message.on_due, None, None
                if on_due is not None and not message.given_back:
                    on_due()
        finally:
            self._loop.held_up = False
        if state.sink.policy.queues_in_pool:
            self._watch_queued()

    def deliver_early(self, state: ConsumerState, entries: Iterable[Entry]) -> None:
        """Deliver what has come and is not due, where it may be delivered early."""
        if not state.sink.policy.accepts_early:
            return
        for due, number, _, delivery in entries:
            if due <= self._clock.at(self._loop.now()):  # delivered, or about to be
                continue
            message = state.sink.take_early(delivery)
            if message is not None:
                state.early[number] = message
                state.sink.deliver_early(message)

    # -- what waits too long

    def take_overdue(self, state: ConsumerState, now: float) -> list[Delivery]:
        """Take back what has waited too long for a free process: a task takes longer than was to
        be expected. Others shall have it."""
        sink = state.sink
        taken: list[Delivery] = []
        if sink.policy.queues_in_pool:
            queued = sink.policy.take_queued(MAX_QUEUED)
            taken += [message.delivery for message in queued if sink.take_back(message)]
        if state.ready and (taken or now >= state.ready[0][0] + MAX_QUEUED):
            while state.ready:
                try:
                    _, (_, number, _, delivery) = state.ready.popleft()
                except IndexError:  # given back by another thread just now
                    break
                if self._is_back(state, number):
                    taken.append(delivery)
        return taken

    @staticmethod
    def _is_back(state: ConsumerState, number: Number) -> bool:
        """Take back what is buffered; whether it is there to be given back."""
        state.buffered -= 1
        message = state.early.pop(number, None)
        return message is None or state.sink.take_back(message)

    def take_far(self, lookahead_us: int) -> list[Delivery]:
        """Take back what is held and far from due, as it can be only after Redis's clock went back.

        lookahead_us: how long before it is due a message is fetched
        """
        horizon = self._clock.at(self._loop.now()) + lookahead_us + int(STEP * 1_000_000)
        far = self.due.take(
            lambda entry: (
                entry[0] > horizon
                and isinstance(entry[3], Delivery)
                and entry[2].sink in self._states
            )
        )
        return [item for _, number, state, item in far if self._is_back(state, number)]

    def _watch_queued(self) -> None:
        """See to it that the loop wakes when what waits for a process is to be given back."""
        if self._loop.hub is None or self._queued_alarm.is_set:
            return
        now = self._loop.now()
        if times := self._give_back_at(now):
            self._queued_alarm.set(min(times), now)

    def _give_back_at(self, now: float) -> list[float]:
        """When to look whether something has waited too long, in monotonic seconds."""
        return [
            # Not while pops are on their way: nothing is given back then.
            (state.ready[0][0] if state.ready and not state.pops_in_flight else now) + MAX_QUEUED
            for state in self._states.values()
            if state.ready or state.over_queued()
        ]

    # -- when it comes due

    def next_times(self, now: float) -> list[float]:
        """Monotonic seconds when something is to be done, whatever comes in."""
        times = self._give_back_at(now)
        if (first := self.due.first) is not None:
            times.append(self._time_of(first, now))
        return times

    def set_alarm(self) -> None:
        """See to it that the loop wakes for whatever comes first."""
        first = self.due.first
        if self._loop.hub is not None and first is not None:
            now = self._loop.now()
            self._alarm.set(self._time_of(first, now), now)

    def _time_of(self, first: Entry, now: float) -> float:
        due = now + self._clock.until(first[0], now)
        return max(due, first[2].rest_comes_until(first)) if first[2].pops_in_flight else due

    def _on_alarm(self) -> None:
        # The pool sends what was delivered since the last turn after this: no time to rest.
        if not self.pool_first.delivered_now:
            self._rest()
        self.run_due()

    def on_nudged(self) -> None:
        """Another thread has ended the loop's wait, or this one has."""
        # The pool sends what was delivered in the turn before, or in this one, after this.
        if not self.pool_first.may_have_tasks:
            self._rest()
        self.run_due()

    def _rest(self) -> None:
        """Wait the part of a millisecond for which the loop's poller is too coarse."""
        if (first := self.due.first) is not None:
            rest = self._clock.until(first[0], self._loop.now())
            if 0 < rest <= 2 * TICK:
                self._loop.sleep(rest)

    def unregister(self) -> None:
        """The loop has no hub any more."""
        self._alarm.cancel()
        self._queued_alarm.cancel()
