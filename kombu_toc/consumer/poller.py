"""Waits for messages without polling: claims, due times, and what is sent when."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from queue import Empty
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from ..center.clock import ServerClock
from ..model.results import Delivery, Popped
from ..scripts.call import texts
from .blocking import STREAM_BLOCK, WAKE_BLOCK, BroadcastReader, WakeListener
from .connections import BROKEN, SLOW
from .dispatcher import Dispatcher
from .fetcher import Popper, due_entries
from .holdings import log_pop
from .loop import Wiring
from .outbox import Outbox
from .state import MAX_CLAIMS, ConsumerState, claimant, idle_topics

if TYPE_CHECKING:
    from ..center.center import TimeoutCenter
    from ..center.exchanges import Subscription
    from ..client.options import Settings
    from .fetcher import Guarding
    from .lease_keeper import LeaseKeeper
    from .loop import Connection
    from .state import Claim, Entry, Sink


# -- what a consumer reads again now and then
#
# So a pause, and whatever is changed of a topic, is known within five seconds.

#: Seconds after which it is read again; an idle consumer looks every second whether it is time to.
REREAD = 4.0


class Rereading:
    """Reads it along with what is sent anyway. The poller is told of topics that are paused no
    more, and the lease keeper when one is gone that is consumed here."""

    def __init__(self, poller: Any) -> None:
        self._poller = poller
        self._center: TimeoutCenter = poller.center
        self._work: Connection = poller.work
        self._states: Mapping[Any, ConsumerState] = poller.states
        self._paused: set[str] = set()
        self._at = 0.0
        #: the limits of topics as they were last read
        self._gates: dict[str, str] = {}

    def begin(self, state: ConsumerState, now: float) -> None:
        """A topic is consumed from now on. Waits for the server, if it was not asked lately."""
        if now >= self._at:
            self._at = now + REREAD
            try:
                self._paused = self._center.queues.paused()
            except ResponseError as exc:
                if "WRONGTYPE" not in str(exc):
                    raise
                self._at = now  # it is read at once, and named
        state.pending.pause(self._paused)

    def read(self, now: float) -> None:
        """Read it, if it is time to; now: monotonic seconds."""
        if now < self._at or not self._states:
            return
        self._at = now + REREAD
        keys = self._center.keys
        names = list({name: None for s in self._states.values() for name in s.pending.topics})
        declarations = (("HMGET", keys.topics, *names), partial(self._learn, names))
        self._work.send([(("SMEMBERS", keys.paused), self._pause), declarations])

    def _pause(self, names: Iterable[bytes]) -> None:
        self._paused = set(texts(names))
        resumed: set[str] = set()
        for state in self._states.values():
            resumed |= state.pending.pause(self._paused)
        if resumed:
            self._poller.on_resumed(resumed)

    def _learn(self, names: list[str], raws: Iterable[bytes | None]) -> None:
        registry = self._center.registry
        for name, raw in zip(names, raws, strict=True):
            if raw is not None:
                topic = registry.learn(name, raw)
                if topic is not None:
                    self._compare(name, topic.declaration.gates)
            elif any(name in state.pending.topics for state in self._states.values()):
                # Deleted, or lost with the server's memory. What is put by who still remembers it
                # is found by id only if it is declared.
                known = registry.known(name)
                call = None if known is None else registry.declare_again_call(known)
                if call is not None:
                    self._work.send([(call, None)])
                    self._poller.leases.refresh()

    def _compare(self, name: str, gates: str) -> None:
        """Look into a topic whose limits are others now: they may let something start."""
        before, self._gates[name] = self._gates.get(name, gates), gates
        if before != gates:
            for state in self._states.values():
                if name in state.pending.topics:
                    state.pending.look(name)


# -- waits for messages without polling
#
# One poller serves all channels of a connection, in Kombu's event loop or without one. It has a
# connection that blocks on the wake indexes, one for everything that is answered at once, and, if
# broadcasts are consumed, one that blocks on the streams. What is claimed and what is held until
# its
# action time share one heap, for which one timer is set.

#: How long a pass over all topics comes after the one before, of toc_poll_interval: what it finds
#: still has to be claimed and delivered within that.
LOOKS = 0.7

#: Seconds that drain_events waits beyond its timeout for a reply that is on its way.
LAST_REPLY = 1.0

#: Seconds that an idle worker waits for the reply to a pop without leaving it to the event loop:
#: most come sooner than the loop takes for a turn.
AT_ONCE = 0.001


class Poller:
    """Conducts the parts of a consumer; it stands where Kombu's transports have their ``cycle``.

    :meth:`tick` is what happens in a turn of the loop, in its order. The parts know nothing of
    each other: what one gives, this hands to the next. (That is why it has more fields and lines
    than other classes: it has one field for each part.)

    identity: tells one server from another
    """

    def __init__(
        self,
        center: TimeoutCenter,
        settings: Settings,
        leases: LeaseKeeper,
        identity: Any,
        wiring: Wiring | None = None,
    ) -> None:
        self._wiring = wiring = wiring or Wiring(center, leases)
        self.center = center
        self.settings = settings
        self.leases = leases
        self.clock = ServerClock()
        #: what the server's clock showed, and when, after it was set forward: not heard of yet
        self._stepped: tuple[int, float] | None = None
        #: the consumers, by the channels that they deliver to
        self.states: dict[Any, ConsumerState] = {}
        self.loop = wiring.loop(self._on_nudged)
        self.work = wiring.work(self.loop)
        self.dispatcher = Dispatcher(self.loop, self.clock, self.states, center.metrics)
        self.outbox = Outbox(self)
        self._reader = BroadcastReader(self, wiring)
        self._rereading = Rereading(self)
        self._popper = popper = Popper(self, identity)
        passed_on = None if popper.fetcher.preferred is None else popper.passed_on
        self._listener = WakeListener(self, wiring, passed_on)
        self._connections = (self._listener.connection, self.work, self._reader.connection)
        #: exchanges of which broadcasts may be read late
        self.unhurried = self._reader.subscriptions.unhurried
        # Straight to the part that does it: each is called for every message.
        self.ack = self.outbox.ack
        self.ack_early, self.ack_at_end = self.outbox.ack_early, self.outbox.ack_at_end
        self.reject = self.outbox.reject
        self.bury = self.outbox.bury
        self.release = self.outbox.release
        self.flush = self.outbox.flush
        #: asks of some messages whether they have ended, if there is somebody to ask
        self.guarding: Guarding | None = None
        #: told of what a pop has brought, before it is delivered
        self.on_popped: Callable[[list[Delivery]], None] | None = None
        self._long_running = False
        self._pid = os.getpid()
        #: seconds for which a command may block at the server, whoever waits for it
        self._most = WAKE_BLOCK

    @property
    def long_running(self) -> bool:
        """A worker's event loop or a loop that never leaves drain_events for long."""
        return self._long_running

    @long_running.setter
    def long_running(self, long_running: bool) -> None:
        self._long_running = long_running
        self._keep_up()

    def _keep_up(self) -> None:
        """Take part in keeping all topics up, if this process consumes for long."""
        if self._long_running and self.states:
            interval = self.settings.toc_poll_interval * LOOKS
            self.leases.keep_up(self, interval, self._on_step)
        else:
            self.leases.leave_up(self)

    # -- what channels say

    def consume(self, channel: Sink, topic: str) -> None:
        """Take messages of a topic for a channel."""
        state = self.states.get(channel)
        if state is None:
            state = ConsumerState(channel, self.settings.queue_order_strategy)
            self.states[channel] = state
            self._keep_up()
        pending = state.pending
        if topic not in pending.topics:
            pending.topics.append(topic)
        pending.look(topic)
        self._rereading.begin(state, self.loop.now())
        self._listener.stop()
        self.nudge()

    def cancel(self, channel: Sink, topic: str) -> None:
        """Take no more of it: hand back what was claimed, release what is held."""
        state = self.states.get(channel)
        if state is None or topic not in state.pending.topics:
            return
        if topic in self._listener.topics:
            self._listener.stop()
        state.pending.forget(topic)
        claims = state.take_claims_of(topic, None)
        for _, entry in state.ready:
            self.dispatcher.due.push(entry)
        state.ready.clear()
        held: list[Delivery] = []
        for _, _, _, item in self.dispatcher.due.take(partial(state.waits_for, topic)):
            if isinstance(item, Delivery):
                held.append(item)
            else:
                claims.append(item)
        if self.guarding is not None:
            held += self.guarding.take(state, topic)
        state.buffered -= len(held)
        if not state.pending.topics:
            del self.states[channel]
            self._keep_up()
            # Who looks at the server's connections would take it for a consumer's.
            if not self.states and not self._listener.connection.busy:
                self._listener.connection.close()
        self.outbox.announce_now(dict.fromkeys(claims))
        self.release(held)

    def follow(self, channel: Sink, subscription: Subscription) -> None:
        """Deliver a fanout exchange's broadcasts to a channel."""
        self._reader.subscriptions.add(channel, subscription)
        self.nudge()

    def unfollow(self, subscription: Subscription) -> Subscription | None:
        """Deliver them no more; return by what they were delivered."""
        return self._reader.subscriptions.remove(subscription)

    # -- the event loop

    def register(self, hub: Any) -> None:
        """Work within Kombu's event loop."""
        self.long_running = True
        self.loop.register(hub, self.tick, self.settings.toc_poll_interval)

    def unregister(self) -> None:
        """Leave it."""
        self.loop.unregister()
        self.dispatcher.unregister()
        self.outbox.unregister()
        self._reader.unregister()

    def nudge(self) -> None:
        """End the wait, from any thread: something has changed."""
        self.loop.nudge()

    def _on_step(self, server_us: int, by: float) -> None:
        # In another thread. Who is idle asks nothing, and would wait for a time that has passed.
        self._stepped = server_us, by
        self.nudge()

    def _hear_of_step(self) -> None:
        stepped, self._stepped = self._stepped, None
        if stepped is not None:
            client = self.center.client
            where = client.place_of(self.center.keys.upkeep) if self.center.clustered else None
            self.clock.forget(where)
            self.clock.sample(*stepped, where)

    def _on_nudged(self) -> None:
        self._hear_of_step()
        self.dispatcher.on_nudged()

    def tick(self) -> None:
        """Before each wait: deliver what is due, send what is to be sent."""
        loop = self.loop
        loop.ticking = True
        self.dispatcher.pool_first.turn += 1
        try:
            self._hear_of_step()
            if self.guarding is not None:
                self.guarding.settle()
            self.dispatcher.run()
            if self._leave_turn_to_pool():
                return
            self.leases.flush_deferred_logs()
            for connection in self._connections:
                connection.check()
            if self.leases.early_acks:
                self.outbox.ack_ended()
            self.outbox.send_settled(may_wait=loop.hub is not None and not self.dispatcher.one)
            if self.outbox.settlements.freed:
                self._ask_where_freed()
            now = loop.now()
            self._rereading.read(now)
            for state in list(self.states.values()):
                self._release_overdue(state, now)
                self._maybe_fetch(state, now)
            self._listen()
            self._reader.read(STREAM_BLOCK if self.long_running else self._most)
            self.dispatcher.set_alarm()
            if self.long_running:
                self._wiring.close_idle(now)
        finally:
            loop.ticking = False

    def _leave_turn_to_pool(self) -> bool:
        """Whether the rest of this turn waits until the pool has sent what was delivered."""
        pool = self.dispatcher.pool_first
        if self.loop.hub is None or not pool.may_have_tasks:
            pool.pass_by()
            return False
        backlog = any(state.pending.backlog for state in self.states.values())
        first = pool.takes_turn(self.loop.now(), backlog)
        # The pool's own tick may have come before this one, and would let the tasks lie.
        if pool.delivered_now and any(s.sink.policy.flush_pool() for s in self.states.values()):
            if first:
                self.loop.nudge()
        elif first or pool.delivered_now:
            self.loop.nudge()
        return first

    def close(self) -> None:
        """Leave nothing behind: no claim, no held message, no acknowledgement unsent."""
        self.unregister()
        if os.getpid() != self._pid:
            return
        self.leases.flush_deferred_logs()
        self.flush()
        for channel, state in list(self.states.items()):
            for topic in list(state.pending.topics):
                self.cancel(channel, topic)
        with suppress(*BROKEN):
            while self.work.busy:  # what a pop on its way delivers is given back
                self.work.read()
        for connection in self._connections:
            connection.close()
        self.loop.close()

    def release_all(self) -> None:
        """From another thread, while the loop stands still and will end: let others have at
        once what is held and claimed here. :meth:`close` does the rest."""
        held: list[Delivery] = []
        claims: dict[Claim, None] = {}
        due = self.dispatcher.due
        for state in list(self.states.values()):
            claims.update(dict.fromkeys(list(state.due_claims)))
            while state.ready:
                with suppress(IndexError):  # the loop has gone on
                    due.push(state.ready.popleft()[1])
        for _, number, owner, item in due.take_all():
            if isinstance(item, Delivery):
                message = owner.early.pop(number, None)
                if message is None:
                    held.append(item)
                else:
                    owner.sink.qos.release(message)
            else:
                claims[item] = None
        if self.guarding is not None:
            held += self.guarding.take_all()
        if self._listener.connection.busy:
            with suppress(*BROKEN, ResponseError):
                self._listener.unblock()
        self.outbox.announce_now(claims)
        self.release(held)

    # -- without an event loop

    def get(self, callback: Any, timeout: float | None = None) -> None:
        """Wait until something was delivered; raises Empty after `timeout` seconds."""
        self.loop.wait_alone()
        deadline = None if timeout is None else self.loop.now() + timeout
        self.dispatcher.delivered = 0
        # One event a call, for callers count calls; a green worker's loop does not.
        self.dispatcher.one = self.loop.hub is not None or not self.long_running
        try:
            self._wait_and_deliver(deadline)
        finally:
            self.dispatcher.one = False
            self._most = WAKE_BLOCK

    def _wait_and_deliver(self, deadline: float | None) -> None:
        loop, dispatcher = self.loop, self.dispatcher
        while True:
            if deadline is not None and not self.long_running:
                self._most = max(deadline - loop.now(), 0.001)
            self.tick()
            if dispatcher.delivered:
                return
            now = loop.now()
            # What has been asked for may be a message: its reply is waited for, but not forever.
            last = LAST_REPLY if self.work.busy else 0.0
            if deadline is not None and now >= deadline + last:
                # Nobody may come back to what is claimed: others shall have it.
                if not self.long_running:
                    self._listener.stop()
                    self.outbox.announce_now(dispatcher.due.take_claims())
                raise Empty
            for fd in loop.wait(self._seconds_to_wait(now, deadline)):
                loop.readable(fd)
            if dispatcher.delivered:
                return

    def _seconds_to_wait(self, now: float, deadline: float | None) -> float:
        """Seconds until something is to be done, whatever comes in."""
        times = [now + self.settings.toc_poll_interval, self._reader.next_time(now)]
        states = self.states.values()
        times += [s.next_look for s in states if not s.pops_in_flight and s.next_look > now]
        times += self.dispatcher.next_times(now)
        if deadline is not None:
            times.append(deadline + LAST_REPLY if self.work.busy else deadline)
        return max(min(times) - now, 0.0)

    # -- fetching

    def _maybe_fetch(self, state: ConsumerState, now: float) -> None:
        """Send a pop if something may be there and there is room for it."""
        if not state.pending.topics:
            return
        clustered = self.center.clustered
        if state.pops_in_flight:
            if self.work.busy and not (clustered and now > state.left_at + SLOW):
                return
            state.pops_in_flight.clear()
            if not clustered:
                # The connection broke, and whoever drains this one goes on with it.
                state.pending.look_at_all()
        if self.leases.flights.lost and (items := self._popper.recalls(state)):
            state.left_at = now
            self.outbox.send(items)
            return
        # Whether leases that have ended and lost announcements are somebody else's concern.
        kept_up = self._long_running and self.leases.kept_up
        plan = self._popper.fetcher.plan(
            state, now, kept_up=kept_up, lookahead_us=self._lookahead_us
        )
        if plan is not None:
            if plan.claims:
                self.outbox.announce_later(plan.claims)
            if items := self._popper.items(state, plan, now):
                self.outbox.send(items)

    @property
    def _lookahead_us(self) -> int:
        return int(self.settings.toc_lookahead * 1_000_000) if self.loop.hub is not None else 0

    def take_popped(
        self,
        state: ConsumerState,
        topic: str,
        result: Popped,
        visibility: float,
        turn: tuple[int, int, int],
    ) -> None:
        """Take what a pop did.

        visibility: seconds
        turn: the order of what it delivered: the batch, the server's time when that was asked for,
            and the pop's number
        """
        if any(result[3:]):
            log_pop(self.center, topic, result)
        if result.stray:
            self.work.send([(("HDEL", key, member), None) for key, member in result.stray])
        if state.sink not in self.states or topic not in state.pending.topics:
            self.release(result.messages)
            return
        batch, sent_us, number = turn
        entries = due_entries(state, result, sent_us, batch, number)
        state.buffered += len(entries)
        dispatcher = self.dispatcher
        if entries:
            self.leases.hold_all(result.messages, visibility, result.now_us)
        if self.guarding is not None:
            entries = self.guarding.hold(state, topic, entries)
        if self.on_popped is not None and entries:
            self.on_popped([entry[3] for entry in entries])
        for entry in entries:
            dispatcher.due.push(entry)
        if state.pops_in_flight and not self.center.clustered:
            # The rest of the batch comes at once, and its topics take turns.
            dispatcher.deliver_early(state, entries)
            return
        dispatcher.run_due()
        dispatcher.deliver_early(state, entries)
        self._maybe_fetch(state, self.loop.now())
        dispatcher.set_alarm()

    def on_judged(self, state: ConsumerState, passed: list[Entry], ended: list[Delivery]) -> None:
        """Of what :attr:`guarding` has held back, what may be delivered, and what may not."""
        state.buffered -= len(ended)
        for delivery in ended:
            self.ack(delivery)
        for entry in passed:
            self.dispatcher.due.push(entry)
        self.dispatcher.deliver_early(state, passed)

    def fetch(self, state: ConsumerState) -> None:
        """It is known now in which other topics something is due."""
        if state.sink in self.states:
            self._maybe_fetch(state, self.loop.now())

    def _ask_where_freed(self) -> None:
        """Ask for messages where a task that has ended left a place: nobody is nearer to it."""
        for delivery in self.outbox.settlements.take_freed():
            slot = delivery.slot if self.center.clustered else None
            for state in self.states.values():
                if delivery.topic in state.pending.topics:
                    state.pending.ask(delivery.topic, slot)

    def _release_overdue(self, state: ConsumerState, now: float) -> None:
        """Let others have what has waited here too long for a free process. It is asked for again
        when a process is free."""
        if state.pops_in_flight:
            return  # what they bring was behind it, and would start before it
        taken = self.dispatcher.take_overdue(state, now)
        if not taken:
            return
        for delivery in taken:
            if delivery.topic in state.pending.topics:
                slot = delivery.slot if self.center.clustered else None
                state.pending.ask_for_backlog(delivery.topic, slot)
        self.outbox.release_later(taken)

    def release_far(self) -> None:
        """Release what a step of the clock has moved: it would keep processes from what is due."""
        self.outbox.release_later(self.dispatcher.take_far(self._lookahead_us))

    # -- claims

    def _listen(self) -> None:
        """Block on the wake indexes of whoever is idle."""
        if not self._listener.may_listen or self.dispatcher.enough:
            return
        topics = idle_topics(self.states.values())
        if topics:
            self._listener.listen(topics, min(WAKE_BLOCK, self._most))

    def take_claim(self, claim: Claim) -> None:
        """Take what was claimed."""
        state = claimant(self.states.values(), claim[0])
        if state is None:
            self.outbox.announce_now([claim])
            return
        if not self._popper.pass_on(claim, state):
            if self.dispatcher.due.count_claims(*claim[:2]) >= MAX_CLAIMS:
                self._unclaim(claim)
                return
            at = self._popper.fetcher.acts_at(claim, self._lookahead_us)
            self.dispatcher.due.push_claim(at, (self._popper.next_number(), 0, 0), state, claim)
        if self._listener.stopping:  # whoever ends the wait goes on with it
            return
        self.dispatcher.run_due()
        self._maybe_fetch(state, self.loop.now())
        if self.loop.hub is not None and state.pops_in_flight and self.work.wait(AT_ONCE):
            self.work.read()
        self.dispatcher.set_alarm()
        # What was delivered starts first: the turn that follows sends it to the pool, and listens.
        if self.loop.hub is None or not self.dispatcher.pool_first.delivered_now:
            self._listen()

    def _unclaim(self, claim: Claim) -> None:
        """Hand back all claims of a slot: a slot announces two times at most, so most of them are
        no more announced, and only what is can be claimed once more."""
        others = self.dispatcher.due.take_claims(lambda other: other[:2] == claim[:2])
        self.outbox.announce_later(sorted({claim, *others}))
        if not self._listener.stopping:
            self._listen()

    def on_resumed(self, topics: set[str]) -> None:
        """These topics are paused no more."""
        if any(topic not in self._listener.topics for topic in topics):
            self._listener.stop()
