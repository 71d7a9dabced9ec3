"""Waits for messages without polling: claims, due times, and what is sent when.

One poller serves all channels of a connection, in Kombu's event loop or without one. It has a
link that blocks on the wake indexes, a link for everything that is answered at once, and, if
broadcasts are consumed, a link that blocks on the streams. What is claimed and what is held
until its action time share one heap, for which one timer is armed.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable
from contextlib import suppress
from functools import partial
from itertools import count
from queue import Empty
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from ..center.broadcasts import Subscription, listening
from ..center.commands import RECOVER, REMEMBER, divide_evenly
from ..client.cluster import is_passing
from ..client.connection import close_idle
from ..client.options import ROUND_ROBIN
from ..model.results import Delivery, Popped
from ..scripts.call import ScriptCall, texts
from .clock import ServerClock, ServerClocks, Steps
from .cluster_pipes import SLOW, ClusterConnections
from .due_queue import DueQueue
from .flights import Flight
from .loop import TICK, Alarm, Loop, end_wait
from .native_threads import unpatched_threading
from .pipe import BROKEN, PipelinedConnection, Waiting
from .pool_first import PoolFirst
from .settlements import Settlements
from .snapshot import in_words, task_names
from .subscriptions import Subscriptions, restart
from .turns import Turns

if TYPE_CHECKING:
    import redis

    from ..center.upkeep import Kept
    from ..model.topic import Topic
    from ..transport.channel import Capacity, Channel, Message
    from ..transport.transport import Transport
    from .due_queue import Claim, Entry

logger = logging.getLogger(__name__)

#: What this process knows of the clocks of servers, by identity and, of a Cluster, node.
_steps: dict[Hashable, Steps] = {}

#: Seconds a blocking command waits at the server before it is sent again. (What keeps track of
#: connections on the way, and a server's own timeout, may forget one after half a minute.)
WAKE_BLOCK = 20.0
STREAM_BLOCK = 10.0

#: How long a pass over all topics comes after the one before, of toc_poll_interval: what it finds
#: still has to be claimed and delivered within that.
LOOKS = 0.7

#: So many times as rarely an idle consumer looks into all slots while somebody keeps them up.
RARELY = 180.0

#: Seconds for which a worker keeps a connection that nobody uses, and between looks for such.
CONNECTION_IDLE = 10.0
CLOSE_IDLE = 5.0

#: Claims of one slot that a consumer holds, at most.
MAX_CLAIMS = 4

#: Seconds that drain_events waits beyond its timeout for a reply that is on its way.
LAST_REPLY = 1.0

#: Seconds that an idle worker waits for the reply to a pop without leaving it to the event loop:
#: most come sooner than the loop takes for a turn.
AT_ONCE = 0.001

#: Seconds after which a consumer reads again which topics are paused; it looks every second whether
#: it is time to, so that a pause is known within five.
READ_PAUSES = 4.0

#: Seconds after which a consumer reads its topics' declarations again.
REREAD = 5.0

#: Seconds after which a Cluster's node is asked again to wait on keys that are being moved.
BLOCK_AGAIN = 0.1

#: Messages that are worth a pop of their own, while there is a backlog: a slot's in one go.
WORTH = 4

#: Seconds between two questions of a busy consumer whether something is due in the topics that it
#: knows nothing of; how many it asks for at once, at most.
ASK_OTHERS = 0.02
MAX_OTHERS = 256

#: Seconds after which it asks for them before it pops, and not along with the pops.
OTHERS_STALE = 0.1

#: Topics that are looked into, at most, along with the pops of those that are known to hold
#: something.
MAX_LOOKS = 16

#: Seconds for which a message waits for a free process of the worker that has it: then another
#: shall have it. (What is fetched ahead is what should have started by then.)
MAX_QUEUED = 0.05

#: Seconds after which that is asked for again which a node of a Cluster could not be asked for.
ASK_AGAIN = 0.5


class ConsumerState:
    """What one channel takes from its topics."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.topics = Turns(channel.settings.queue_order_strategy)
        #: topics to be asked, and which of their slots; None for all
        self.asked: dict[str, set[int] | None] = {}
        #: those of them that are known to hold something; the others are looked into
        self.sure: set[str] = set()
        #: those that could not be asked, and monotonic seconds when they are asked again
        self.missed: dict[str, set[int] | None] = {}
        self.missed_at = 0.0
        #: topics that have held more than there was room for: what has been due for a while may
        #: be queued here, for no idle consumer has wanted it
        self.backlog: set[str] = set()
        #: topics from which nothing is taken for now
        self.paused: set[str] = set()
        #: claims that have come due and are not settled: (topic, slot, us)
        self.owed: dict[Claim, None] = {}
        #: messages fetched and not handed over to start
        self.held = 0
        #: those of them that are due and wait for a free process, and since when
        self.ready: deque[tuple[float, Entry]] = deque()
        #: how many of the processes that were free when last asked have got nothing since
        self.startable = 0
        #: of these, those that the channel was handed already: their numbers in the heap
        self.early: dict[tuple[int, int, int], Message] = {}
        #: pops that are on their way, and monotonic seconds when they left
        self.flying: set[int] = set()
        self.left_at = 0.0
        #: monotonic seconds of the next look into all slots, and of the latest
        self.next_look = 0.0
        self.looked = 0.0
        #: monotonic seconds when the topics of which nothing is known were last asked for, and
        #: how many of them were
        self.others_at = 0.0
        self.others_asked = 0
        #: seconds after which that is so long ago that they are asked for first
        in_turns = channel.settings.queue_order_strategy == ROUND_ROBIN
        self.stale_after = OTHERS_STALE if in_turns else ASK_OTHERS
        #: topic -> monotonic seconds when expired leases were last rolled back
        self.recovered: dict[str, float] = {}
        #: monotonic seconds when the topics' declarations were last asked for
        self.reread = 0.0
        #: free processes when last asked, negative if more is reserved than there are
        self.last_free = 0
        self._consumer, self._pops = token_urlsafe(9), count(1)

    def name_pop(self) -> str:
        """A name that no other pop has."""
        return f"{self._consumer}.{next(self._pops):x}"

    def ask(self, topic: str, slot: int | None = None) -> None:
        """Pop a topic when there is room, for it holds something: a slot, or all."""
        _add(self.asked, topic, None if slot is None else {slot})
        self.sure.add(topic)

    def look(self, topic: str) -> None:
        """Look into a topic when there is room."""
        self.asked[topic] = None

    def ask_all(self) -> None:
        for topic in self.topics:
            self.look(topic)

    def miss(self, topic: str, slots: set[int] | None, now: float) -> None:
        """Ask for it again in a while: it could not be asked."""
        if not self.missed:
            self.missed_at = now + ASK_AGAIN
        _add(self.missed, topic, slots)

    def ask_missed(self, now: float) -> None:
        if self.missed and now >= self.missed_at:
            for topic, slots in self.missed.items():
                if topic in self.topics:
                    _add(self.asked, topic, slots)
            self.missed.clear()

    def forget(self, topic: str) -> None:
        self.topics.remove(topic)
        for known in (self.asked, self.missed):
            known.pop(topic, None)
        for some in (self.sure, self.backlog, self.paused):
            some.discard(topic)

    def pause(self, paused: Collection[str]) -> None:
        """These are the topics that are paused, of all; look into those that are no more."""
        before = self.paused
        self.paused = {topic for topic in self.topics if topic in paused}
        for topic in before - self.paused:
            self.look(topic)

    def may_start(self) -> bool:
        """Whether a message that is handed over now could start at once; it counts as one that
        is."""
        if self.startable <= 0:
            limit = self.channel.policy.start_limit()
            if limit is None:
                return True
            self.startable = limit
        self.startable -= 1
        return self.startable >= 0

    def over_queued(self) -> bool:
        """Whether the pool has queued what may have to be taken back."""
        policy = self.channel.policy
        return policy.queues_in_pool and (policy.idle_slots() or 0) < 0

    def capacity(self) -> Capacity:
        """How much there is room for."""
        return self.channel.capacity(self.held, len(self.early))

    def unknown(self) -> list[str]:
        """Topics of which it is not known whether they hold something while others have more than
        there was room for; not too many at a time, but all of them in turns."""
        known = self.sure & self.asked.keys()
        if not known & self.backlog:
            return []
        unknown = [t for t in self.topics if t not in known and t not in self.paused]
        if len(unknown) > MAX_OTHERS:
            unknown.sort()
            first = self.others_asked % len(unknown)
            unknown = (unknown[first:] + unknown[:first])[:MAX_OTHERS]
            self.others_asked += MAX_OTHERS
        return unknown

    def divide_evenly(self, soon: int, late: int) -> dict[str, tuple[int, int]]:
        """What is asked of which topics: (how many at once, how many late). (0, 0) is a look.

        soon: how many could start at once
        late: how many fit, those included; the rest is only for topics that are known to hold
            more than somebody idle has taken
        """
        sure = self.sure & self.asked.keys()
        if not sure:
            return {
                topic: (number, number)
                for topic, number in self.topics.deal(soon, self.asked.keys()).items()
            }
        order = list(self.topics)
        now = self.topics.deal(soon, sure)
        full = sure & self.backlog if soon else sure
        queued = self.topics.deal(late - soon, full)
        dealt = {
            topic: (number := now.get(topic, 0), number + queued.get(topic, 0))
            for topic in order
            if topic in now or topic in queued
        }
        looks = [topic for topic in self.asked if topic not in sure]
        return {**dealt, **dict.fromkeys(looks[:MAX_LOOKS], (0, 0))}


class Poller:
    """See the module. It stands where Kombu's transports have their ``cycle``."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.settings = transport.settings
        self.center = transport.center
        self.heartbeat = transport.heartbeat
        clustered = self.center.clustered
        self.clock = ServerClocks() if clustered else ServerClock()
        self.intakes: dict[Any, ConsumerState] = {}
        self.subscriptions = Subscriptions()
        #: what went wrong, counted: "bare" (ids without a body), "rolled back", "died"
        self.tally: Counter[str] = Counter()
        self._steady = False
        #: exchanges of which broadcasts may be read late
        self.unhurried = self.subscriptions.unhurried
        self._pid = os.getpid()
        self.loop = Loop(self._on_nudged)
        self.due = DueQueue()
        self._alarm = Alarm(self.loop, self._on_alarm)
        self._acks_alarm = Alarm(self.loop, self._on_acks_alarm)
        self._reading_alarm = Alarm(self.loop, end_wait)
        self._queued_alarm = Alarm(self.loop, self._watch_queued, early=0.0)
        self._number = count()
        self._stopping = False
        self._delivered = 0
        self.settlements = Settlements()
        self._delivering = False
        self._pool_first = PoolFirst()
        self._wake_topics: dict[bytes, str] = {}
        self._turn = 0
        #: topics that are paused, and monotonic seconds when that is read again
        self._paused: set[str] = set()
        self._pauses_at = 0.0
        self._deal = 0
        self._listened: dict[str, str] = {}
        told = (self.loop.opened, self.loop.closed, self.heartbeat.owe, self.center.metrics)
        self._wake, self._stream = (
            PipelinedConnection(
                self._pool, *told, on_refused=self._on_refused if clustered else None
            )
            for _ in range(2)
        )
        self._work: PipelinedConnection | ClusterConnections = (
            ClusterConnections(self.center.client, *told)
            if clustered
            else PipelinedConnection(self._pool, *told)
        )
        #: monotonic seconds before which nothing blocks: what it would wait on is being moved
        self._blocks_at = 0.0
        #: monotonic seconds of the next look for connections that nobody uses
        self._close_at = 0.0

    def _pool(self) -> redis.ConnectionPool:
        """Of the server that has the keys of no single slot."""
        client = self.center.client
        return (client.client_for() if self.center.clustered else client).connection_pool

    def _on_refused(self, waiting: Waiting, exc: ResponseError) -> bool:
        # Nothing is lost by that: a claim that was not made, a position that was not read.
        if self.center.client.apply_redirect(exc) is None and not is_passing(exc):
            return False
        link = self._wake if waiting.item.on_reply == self._claimed else self._stream
        link.close()
        self._blocks_at = self.loop.now() + BLOCK_AGAIN
        return True

    @property
    def steady(self) -> bool:
        """A worker's event loop or a loop that never leaves drain_events for long."""
        return self._steady

    @steady.setter
    def steady(self, steady: bool) -> None:
        self._steady = steady
        self._keep_up()

    def _keep_up(self) -> None:
        """Who consumes for long takes part in keeping all topics up."""
        if self._steady and self.intakes:
            interval = self.settings.toc_poll_interval * LOOKS
            self.heartbeat.keep_up(self, interval)
        else:
            self.heartbeat.leave_up(self)

    # -- what channels say

    def consume(self, channel: Channel, topic: str) -> None:
        """Take messages of a topic for a channel."""
        intake = self.intakes.get(channel)
        if intake is None:
            intake = self.intakes[channel] = ConsumerState(channel)
            self._keep_up()
        if topic not in intake.topics:
            intake.topics.append(topic)
        intake.look(topic)
        if (now := self.loop.now()) >= self._pauses_at:
            self._pauses_at = now + READ_PAUSES
            self._paused = self.center.paused()
        intake.pause(self._paused)
        self._stop_listening()
        self.nudge()

    def cancel(self, channel: Channel, topic: str) -> None:
        """Take no more of it: hand back what was claimed, release what is held."""
        intake = self.intakes.get(channel)
        if intake is None or topic not in intake.topics:
            return
        if topic in self._wake_topics.values():
            self._stop_listening()
        intake.forget(topic)
        claims = {claim: None for claim in intake.owed if claim[0] == topic}
        held: list[Delivery] = []
        for entry in [entry for _, entry in intake.ready]:
            self.due.push(entry)
        intake.ready.clear()
        for _, _, _, item in self.due.take(partial(_is_of, intake, topic)):
            if isinstance(item, Delivery):
                held.append(item)
            else:
                claims[item] = None
        intake.held -= len(held)
        for claim in claims:
            intake.owed.pop(claim, None)
        if not intake.topics:
            del self.intakes[channel]
            self._keep_up()
        self._announce_now(claims)
        self.release(held)

    def follow(self, channel: Channel, subscription: Subscription) -> None:
        """Deliver a fanout exchange's broadcasts to a channel."""
        self.subscriptions.add(channel, subscription)
        self.nudge()

    def unfollow(self, subscription: Subscription) -> Subscription | None:
        """Deliver them no more; return by what they were delivered."""
        return self.subscriptions.remove(subscription)

    def settle(self, delivery: Delivery) -> None:
        """Acknowledge: within this turn of the loop, or at once without one."""
        self.heartbeat.drop(delivery)
        if self.loop.hub is not None:
            self.settlements.acks.append(delivery)
            self._leaves_with_next_turn()
        else:
            self._run_or_owe(self.center.acking([delivery]))
            self.nudge()

    def give_back(
        self, delivery: Delivery, requeue: bool, reason: str = "", error: str = ""
    ) -> None:
        """Reject, as soon as :meth:`settle` acknowledges."""
        self.heartbeat.drop(delivery)
        if not requeue:
            logger.warning("message %s goes to DeadQueue: %s", in_words(delivery), reason)
        elif not delivery.retries_left:
            logger.error("message %s: no retries left, it goes to DeadQueue", in_words(delivery))
        call = self.center.rejecting(delivery, requeue=requeue, reason=reason, error=error)
        if self.loop.hub is not None:
            self.settlements.calls.append(call)
            self._leaves_with_next_turn()
        else:
            self._run_or_owe([call])
            self.nudge()

    def release(self, deliveries: list[Delivery]) -> None:
        """Give messages back unhandled, now."""
        if not deliveries:
            return
        for delivery in deliveries:
            self.heartbeat.drop(delivery)
        # There is one attempt, and it often comes after a connection was cut, seldom alone.
        self.center.client.drop_idle()
        try:
            self.center.run_all(self.center.releasing(deliveries))
        except (*BROKEN, ResponseError) as exc:
            # Not to be repeated later, when another may hold them: their leases end.
            logger.info("%d messages come back when their leases end: %s", len(deliveries), exc)

    def flush(self) -> None:
        """Send, and wait until it has happened, what was to leave with the next turn."""
        self._run_or_owe(self._take_settled())

    def _take_settled(self) -> list[ScriptCall]:
        acks, calls = self.settlements.take()
        return self.center.acking(acks) + calls

    def _run_or_owe(self, calls: list[ScriptCall]) -> None:
        if not calls:
            return
        try:
            self.center.run_all(calls)
        except (*BROKEN, ResponseError) as exc:
            # Each may run twice without harm, and none may be forgotten.
            self.heartbeat.owe(calls)
            logger.info("said later, when the server can be reached: %s", exc)

    def tell(self, topic: str, result: Popped) -> None:
        """Log and count what a pop did beside delivering."""
        self.tally["bare"] += len(result.bare)
        self.tally["rolled back"] += len(result.rolled_back)
        self.tally["died"] += len(result.died)
        for id in result.bare:
            logger.error("message %s of %s had no body: removed", id, topic)
        names = task_names(self.center, topic, result.rolled_back + result.died, result.messages)
        for id in result.rolled_back:
            logger.warning(
                "message %s of %s%s: its lease ended, it is delivered again", id, topic, names[id]
            )
        for id in result.died:
            logger.error(
                "message %s of %s%s: no retries left, it is in DeadQueue", id, topic, names[id]
            )
        self.tally["dropped"] += len(result.dropped)
        if result.dropped:
            logger.warning(
                "DeadQueue of %s: %d messages dropped, for they are too old or too many: %s",
                topic,
                len(result.dropped),
                ", ".join(result.dropped[:10]) + (", ..." if len(result.dropped) > 10 else ""),
            )

    # -- the event loop

    def attach(self, hub: Any) -> None:
        """Work within Kombu's event loop."""
        self.steady = True
        self.loop.attach(hub, self.tick, self.settings.toc_poll_interval)

    def detach(self) -> None:
        self.loop.detach()
        for alarm in (self._alarm, self._acks_alarm, self._reading_alarm, self._queued_alarm):
            alarm.cancel()

    def nudge(self) -> None:
        """End the wait, from any thread: something has changed."""
        self.loop.nudge()

    def _leaves_with_next_turn(self) -> None:
        if self.loop.elsewhere:
            self.loop.nudge()
            if self.loop.hub is None:  # the loop has ended since
                self.flush()
        elif self._delivering:
            # A solo pool runs the task inside the delivery, for as long as it takes.
            self._send_settled()

    def _on_nudged(self) -> None:
        # The pool sends what was delivered in the turn before, or in this one, after this.
        if not self._pool_first.may_have_tasks:
            self._rest()
        self._run_due()

    def tick(self) -> None:
        """Before each wait: send what is to be sent, deliver what is due."""
        self.loop.ticking = True
        self._pool_first.turn += 1
        try:
            for intake in list(self.intakes.values()):
                if intake.ready:
                    self._run_ready(intake)
            self._run_due()
            if self._leave_turn_to_pool():
                return
            self.heartbeat.speak()
            for link in (self._wake, self._work, self._stream):
                link.check()
            self._send_settled_or_wait()
            now = self.loop.now()
            self._read_pauses(now)
            for intake in list(self.intakes.values()):
                self._give_back_queued(intake, now)
                self._consider(intake, now)
            self._listen()
            self._listen_streams()
            self._set_alarm()
            if self.steady and now >= self._close_at:
                self._close_at = now + CLOSE_IDLE
                close_idle(
                    CONNECTION_IDLE,
                    threading.get_native_id() if unpatched_threading().patched else None,
                )
        finally:
            self.loop.ticking = False

    def _leave_turn_to_pool(self) -> bool:
        """Whether the rest of this turn waits until the pool has sent what was delivered."""
        pool = self._pool_first
        if self.loop.hub is None or not pool.may_have_tasks:
            pool.pass_by()
            return False
        first = pool.takes_turn(self.loop.now(), self._has_backlog())
        # The pool's own tick may have come before this one, and would let the tasks lie.
        if pool.delivered_now and self._flush_pool():
            if first:
                self.loop.nudge()
        elif first or pool.delivered_now:
            self.loop.nudge()
        return first

    def _flush_pool(self) -> bool:
        return any(intake.channel.policy.flush_pool() for intake in self.intakes.values())

    def _has_backlog(self) -> bool:
        return any(intake.backlog for intake in self.intakes.values())

    def close(self) -> None:
        """Leave nothing behind: no claim, no held message, no acknowledgement unsent."""
        self.detach()
        if os.getpid() != self._pid:
            return
        self.heartbeat.speak()
        self.flush()
        for channel, intake in list(self.intakes.items()):
            for topic in list(intake.topics):
                self.cancel(channel, topic)
        with suppress(*BROKEN):
            while self._work.busy:  # what a pop on its way delivers is given back
                self._work.read()
        for link in (self._wake, self._work, self._stream):
            link.close()
        self.loop.close()

    def give_up(self) -> None:
        """From another thread, while the loop stands still and will end: let others have at
        once what is held and claimed here. :meth:`close` does the rest."""
        held: list[Delivery] = []
        claims: dict[Claim, None] = {}
        for intake in list(self.intakes.values()):
            claims.update(dict.fromkeys(list(intake.owed)))
            while intake.ready:
                with suppress(IndexError):  # the loop has gone on
                    self.due.push(intake.ready.popleft()[1])
        for _, number, owner, item in self.due.take_all():
            if isinstance(item, Delivery):
                message = owner.early.pop(number, None)
                if message is None:
                    held.append(item)
                else:
                    owner.channel.qos.give_back(message)
            else:
                claims[item] = None
        if self._wake.busy:
            with suppress(*BROKEN, ResponseError):
                self.center.client.execute_command("CLIENT", "UNBLOCK", self._wake.client_id)
        self._announce_now(claims)
        self.release(held)

    # -- without an event loop

    def get(self, callback: Any, timeout: float | None = None) -> None:
        """Wait until something was delivered; raises Empty after `timeout` seconds."""
        self.loop.wait_alone()
        deadline = None if timeout is None else self.loop.now() + timeout
        self._delivered = 0
        # One event a call, for callers count calls; a green worker's loop does not.
        self._one = self.loop.hub is not None or not self.steady
        try:
            self._wait_and_deliver(deadline)
        finally:
            self._one = False
            self._most = WAKE_BLOCK

    def _wait_and_deliver(self, deadline: float | None) -> None:
        while True:
            if deadline is not None and not self.steady:
                self._most = max(deadline - self.loop.now(), 0.001)
            self.tick()
            if self._delivered:
                return
            now = self.loop.now()
            # What has been asked for may be a message: its reply is waited for, but not forever.
            last = LAST_REPLY if self._work.busy else 0.0
            if deadline is not None and now >= deadline + last:
                self._leave()
                raise Empty
            for fd in self.loop.wait(self._wait(now, deadline)):
                self.loop.readable(fd)
            if self._delivered:
                return

    #: seconds for which a command may block at the server, whoever waits for it
    _most = WAKE_BLOCK

    #: whether no more than one message is to be delivered for now
    _one = False

    @property
    def _enough(self) -> bool:
        return self._one and self._delivered > 0

    def _wait(self, now: float, deadline: float | None) -> float:
        """Seconds until something is to be done, whatever comes in."""
        times = [now + self.settings.toc_poll_interval]
        times += [i.next_look for i in self.intakes.values() if not i.flying and i.next_look > now]
        if self.unhurried and self.subscriptions.next_reading > now:
            times.append(self.subscriptions.next_reading)
        if (first := self.due.first) is not None:
            times.append(now + self.clock.until(first[0], now))
        times += [i.ready[0][0] + MAX_QUEUED for i in self.intakes.values() if i.ready]
        if any(i.over_queued() for i in self.intakes.values()):
            times.append(now + MAX_QUEUED)
        if deadline is not None:
            times.append(deadline + LAST_REPLY if self._work.busy else deadline)
        return max(min(times) - now, 0.0)

    def _leave(self) -> None:
        # Nobody may come back to what is claimed: others shall have it.
        if self.steady:
            return
        self._stop_listening()
        claims = self.due.take_claims()
        if claims:
            self._announce_now(dict.fromkeys(claims))

    # -- settling

    def _send_settled(self) -> None:
        if self.settlements:
            self._send([])

    def _send(self, items: list[tuple[Any, ...]]) -> None:
        """Send calls, and what is settled along with them."""
        settled = [(call, None) for call in self._take_settled()]
        self._work.send(settled + items, owed=len(settled))

    def _send_settled_or_wait(self) -> None:
        """What is settled goes along with the next pop, if there is one within moments."""
        waiting = self.settlements
        if not waiting:
            return
        if self.loop.hub is not None and not self._one:
            now = self.loop.now()
            if waiting.may_wait(now):
                assert waiting.leave_at is not None
                self._acks_alarm.set(waiting.leave_at, now)
                return
        self._send_settled()

    def _on_acks_alarm(self) -> None:
        # Nearly always a pop has taken them along.
        leave_at, now = self.settlements.leave_at, self.loop.now()
        if leave_at is None:
            return
        if leave_at - now > TICK:
            self._acks_alarm.set(leave_at, now)
        else:
            self.settlements.leave_now()
            self.loop.nudge()

    # -- taking

    def _consider(self, intake: ConsumerState, now: float) -> None:
        """Send a pop if something may be there and there is room for it."""
        if not intake.topics:
            return
        if intake.flying:
            if self._work.busy and not (self.center.clustered and now > intake.left_at + SLOW):
                return
            intake.flying.clear()
            if not self.center.clustered:
                # The link broke, and whoever drains this connection goes on with it.
                intake.ask_all()
        if self.heartbeat.flights.any_lost and self._recall(intake, now):
            return
        free, room, most = intake.capacity()
        finished, intake.last_free = free > intake.last_free, free
        soon = max(min(free, room), 0)
        pause = self.settings.toc_poll_interval
        if soon and (
            now >= intake.next_look or (now >= intake.looked + pause and not self._kept_up)
        ):
            intake.looked = now
            # The wake index and who keeps it up see to it that there is nothing to find.
            # On a Cluster an index that moves to another node takes and gives nothing meanwhile.
            rarely = self._kept_up and not self.center.clustered
            some = RARELY * (1 + random.random()) / 2 if rarely else 1
            intake.next_look = now + pause * some
            intake.ask_all()
        if not soon and intake.owed:
            # Somebody idle shall have it; whatever is left then is asked for when a task ends.
            for topic, _, _ in intake.owed:
                intake.ask(topic)
                intake.backlog.add(topic)
            self._hand_back(intake)
        intake.ask_missed(now)
        if intake.paused:
            self._leave_paused(intake)
        if not intake.asked:
            return
        if not soon and not (finished and room > 0 and 2 * room >= most):
            return
        others = self._asking_others(intake, now)
        if others and soon and now >= intake.others_at + intake.stale_after:
            # Their turn may have come: that is worth a round trip.
            self._ask_first(intake, now, others)
            return
        if others:
            intake.others_at = now
        shares = intake.divide_evenly(soon, max(room, soon))
        batch = (next(self._number), self.clock.at(now) if self.clock.known else 0)
        for topic, (few, many) in shares.items():
            others += self._pops(intake, topic, few, many, now, batch)
        if others:
            self._send(others)

    def _asking_others(self, intake: ConsumerState, now: float) -> list[tuple[Any, ...]]:
        """What is to be sent to learn where else something is due. Who is busy claims nothing:
        only by this does it hear of a topic whose turn it would be."""
        if now < intake.others_at + ASK_OTHERS or not (topics := intake.unknown()):
            return []

        def told(indexes: list[int]) -> None:
            for topic in (topics[index] for index in indexes):
                if topic in intake.topics:
                    intake.ask(topic)
                    intake.backlog.add(topic)

        return [(self.center.finding_due(topics), told)]

    def _ask_first(self, intake: ConsumerState, now: float, others: list[tuple[Any, ...]]) -> None:
        """Ask where else something is due, and pop when that is known."""
        [(call, told)] = others
        number = next(self._number)
        intake.flying.add(number)
        intake.others_at = intake.left_at = now

        def then(indexes: list[int]) -> None:
            intake.flying.discard(number)
            told(indexes)
            if intake.channel in self.intakes:
                self._consider(intake, self.loop.now())

        def failed() -> None:
            intake.flying.discard(number)

        self._send([(call, then, failed) if self.center.clustered else (call, then)])

    def _pops(
        self,
        intake: ConsumerState,
        topic: str,
        soon: int,
        late: int,
        now: float,
        batch: tuple[int, int],
    ) -> list[tuple[Any, ...]]:
        """What is to be sent to pop a topic that is asked."""
        slots = intake.asked.pop(topic)
        intake.sure.discard(topic)
        again = intake.recovered.get(topic, 0.0) + self.settings.toc_poll_interval
        recover = slots is None and now >= again and not self._kept_up
        if recover:
            intake.recovered[topic] = now
        settings = self.settings
        lookahead = int(settings.toc_lookahead * 1_000_000) if self.loop.hub is not None else 0
        declared = self.center.topic(topic)
        if slots is not None and max(slots) >= declared.slot_span:
            # Announced by somebody who knows of more slots: of an older declaration or a newer
            # one. It is served in any case.
            declared = self.center.reach(topic, max(slots)) or declared
        visibility = declared.declaration.limits(self.center.limits).visibility
        items: list[tuple[Any, ...]] = []
        for some, few, many in self._dealt(intake, declared, slots, soon, late):
            back, until, beside = 0, None, []
            if recover:
                back, until, beside = self._recovering(declared, some or range(declared.slot_span))
            items += beside
            items.append(
                self._pop(
                    *(intake, declared, some, few, many, lookahead, back, until),
                    *(visibility, batch),
                )
            )
        intake.left_at = now
        if now >= intake.reread + REREAD:
            # Who is never idle claims nothing, and learns only by this of slots that are new.
            intake.reread = now
            names = list(intake.topics)

            def read(raws: list[bytes | None]) -> None:
                for name, raw in zip(names, raws, strict=True):
                    if raw is not None:
                        self.center.learn(name, raw)

            items.append((("HMGET", self.center.keys.topics, *names), read))
        return items

    def _dealt(
        self, intake: ConsumerState, topic: Topic, slots: set[int] | None, soon: int, late: int
    ) -> Iterable[tuple[set[int] | None, int, int]]:
        """How many messages to pop from which slots: (slots, how many at once, how many late).

        One server gives them from all slots in one call. A Cluster is asked slot by slot; not to
        be given more than there is room for, first whether there is something.
        """
        if not self.center.clustered:
            return [(slots, soon, late)]
        looks: list[int] = []
        claimed = {claim[1] for claim in intake.owed if claim[0] == topic.name}
        if slots is None:
            looks = [number for number in range(topic.slot_span) if number not in claimed]
            slots = claimed
        # Those that were claimed first, then in an order that is another one each time.
        turn = self._deal = self._deal + 1
        numbers = sorted(slots, key=lambda n: (n not in claimed, (n + turn) % topic.slot_span, n))
        most = max(soon, late)
        at_once = max(soon, most // WORTH, 1) if topic.name in intake.backlog else most
        for number in numbers[at_once:]:
            intake.ask(topic.name, number)
        numbers = numbers[:at_once]
        dealt = [dict(divide_evenly(count, numbers)) if numbers else {} for count in (soon, late)]
        pops = [({n}, dealt[0].get(n, 0), dealt[1].get(n, 0)) for n in numbers]
        return [*pops, *(({n}, 0, 0) for n in looks)]

    def _pop(
        self,
        intake: ConsumerState,
        topic: Topic,
        slots: set[int] | None,
        soon: int,
        late: int,
        lookahead_us: int,
        recover: int,
        until_us: int | None,
        visibility: float,
        batch: tuple[int, int],
    ) -> tuple[Any, ...]:
        """What is to be sent to pop messages.

        batch: what all pops have that leave together: a number, and what the server's clock shows
        """
        looks = not soon and not late  # only whether there are any
        behind_us = 0 if looks else int(self.settings.toc_queue_after * 1_000_000)
        horizon = lookahead_us if soon else -behind_us
        # What the pop announces anew may be claimed here before its reply is read: that is a
        # claim of its own, so those that the pop settles are set apart now.
        settling = [
            claim
            for claim in intake.owed
            if claim[0] == topic.name and (slots is None or claim[1] in slots)
        ]
        for claim in settling:
            del intake.owed[claim]
        call = self.center.popping(
            topic,
            slots,
            soon=soon,
            lookahead_us=lookahead_us,
            late=late,
            behind_us=behind_us,
            recover=recover,
            until_us=until_us,
            claimed=bool(settling) or looks,
            name=(name := intake.name_pop()),
            # What goes away by itself leaves nothing behind.
            remember=0 if looks or topic.declaration.expires else REMEMBER,
        )
        sent = self.loop.now()

        number = next(self._number)
        intake.flying.add(number)
        left = self.loop.now()
        flight = Flight(topic, slots and tuple(slots), name, visibility, left)
        if not looks:
            self.heartbeat.expect(flight)

        def popped(result: Popped) -> None:
            intake.flying.discard(number)
            self.heartbeat.flights.arrive(flight)
            first = next(iter(slots)) if slots else 0
            self.center.watched(topic, first, result.now_us, sent)
            for claim in settling:
                if claim[2] > result.now_us + horizon:
                    intake.owed[claim] = None
            if self.center.clustered:
                where = self.center.client.place_of(call.keys[0])
                self._hear_clock(result.now_us, left, where)
                for slot in slots if result.more else ():
                    intake.ask(topic.name, slot)
            else:
                self._hear_clock(result.now_us, left)
                if result.more:
                    intake.ask(topic.name)
            if result.more and not looks:
                intake.backlog.add(topic.name)
            elif not self.center.clustered or not (intake.flying or topic.name in intake.asked):
                intake.backlog.discard(topic.name)
            self._popped(intake, topic.name, result, visibility, (*batch, number))

        def failed() -> None:
            if not looks:
                self.heartbeat.lose(flight)
            if not self.center.clustered:
                return
            intake.flying.discard(number)  # a node that cannot be reached
            if topic.name in intake.topics:
                intake.miss(topic.name, slots, self.loop.now())

        return call, popped, failed

    def _recall(self, intake: ConsumerState, now: float) -> bool:
        """Ask for what pops have given whose replies were lost; whether there were any."""
        items = []
        for flight in self.heartbeat.flights.take(intake.topics):
            number = next(self._number)
            intake.flying.add(number)
            given = partial(self._recalled, intake, flight, number)
            lost = partial(self._recall_failed, intake, flight, number)
            items.append((flight.recalling(self.center), given, lost))
        if items:
            intake.left_at = now
            self._send(items)
        return bool(items)

    def _recalled(self, intake: ConsumerState, flight: Flight, number: int, result: Popped) -> None:
        intake.flying.discard(number)
        if result.messages:
            logger.info(
                "%d messages of %s had been delivered when the connection was cut",
                *(len(result.messages), flight.topic.name),
            )
        turn = (number, 0, number)
        self._popped(intake, flight.topic.name, result, flight.visibility, turn)

    def _recall_failed(self, intake: ConsumerState, flight: Flight, number: int) -> None:
        if self.center.clustered:
            intake.flying.discard(number)
        self.heartbeat.lose(flight)

    def _hear_clock(self, now_us: int, left: float, where: Hashable = None) -> None:
        """Learn what a server's clock has shown in a reply to what left at that moment."""
        now = self.loop.now()
        steps = _steps.setdefault((self.transport.identity, where), Steps())
        if back := steps.back(now_us, left, now):
            self.clock.forget(where)
            logger.warning(
                "the clock of Redis%s went back by %.1f seconds: it was set, or a server with a "
                "clock behind has taken over; what was to start later starts when the clock shows "
                "that time, so up to %.1f seconds later, and as much later come the tasks of "
                "workers that died",
                f" at {where[0]}:{where[1]}" if where else "",
                back,
                back,
            )
        self.clock.sample(now_us, now, where)

    @property
    def _kept_up(self) -> bool:
        """Whether leases that have ended and lost announcements are somebody else's concern."""
        return self.steady and self.heartbeat.kept_up

    def _recovering(
        self, topic: Topic, slots: Collection[int]
    ) -> tuple[int, int | None, list[tuple[Any, ...]]]:
        """How many leases of a slot a pop may roll back, those that ended until when, and what is
        to be sent beside it.

        None as long as our own may be among them. Who has not watched the server may not: it may
        have been away for longer than a lease, and the others, who live and execute what they
        hold, are about to renew theirs.
        """
        if not self.heartbeat.in_time(topic.name, slots):
            return 0, None, []
        until = self.center.watched_until(topic, next(iter(slots)))
        if until is not None:
            return RECOVER, until, []

        def noted(kept: Kept) -> None:
            for event in kept.events:
                self.tell(topic.name, Popped(kept.now_us, False, [], [], *event[1:], []))

        calls = self.center.noting(topic, sorted(slots))
        return RECOVER, 0, [(call, noted) for call in calls]

    def _popped(
        self,
        intake: ConsumerState,
        topic: str,
        result: Popped,
        visibility: float,
        turn: tuple[int, int, int],
    ) -> None:
        self.tell(topic, result)
        if result.stray:
            self._work.send([(("SREM", key, member), None) for key, member in result.stray])
        alive = intake.channel in self.intakes and topic in intake.topics
        if not alive:
            self.release(result.messages)
            return
        entries = []
        batch, sent_us, number = turn
        for place, delivery in enumerate(result.messages):
            self.heartbeat.hold(delivery, visibility)
            intake.held += 1
            # What was due when it was asked for keeps the order in which it came: by priority, and
            # its topics take turns.
            due = delivery.action_us
            if sent_us:
                due = max(due, sent_us)
            elif due <= result.now_us:
                due = 0
            entries.append((due, (batch, place, number), intake, delivery))
            self.due.push(entries[-1])
        if intake.flying and not self.center.clustered:
            # The rest of the batch comes at once, and its topics take turns.
            self._hand_ahead(intake, entries)
            return
        self._run_due()
        self._hand_ahead(intake, entries)
        self._consider(intake, self.loop.now())
        self._set_alarm()

    def _hand_ahead(self, intake: ConsumerState, entries: list[Entry]) -> None:
        """Hand over what has come and is not due, where it may be handed over ahead."""
        if not intake.channel.policy.accepts_early:
            return
        for due, number, _, delivery in entries:
            if due <= self.clock.at(self.loop.now()):  # delivered, or about to be
                continue
            message = intake.channel.take_ahead(delivery)
            if message is not None:
                intake.early[number] = message
                intake.channel.hand_over(message)

    def _run_due(self) -> None:
        """Deliver held messages whose time has come and that can start, and act on claims."""
        for intake in self.intakes.values():
            intake.startable = 0
        while (first := self.due.first) is not None:
            if first[0] > (now := self.clock.at(self.loop.now())):
                return
            if self._enough:
                return
            first[2].channel.policy.before_delivery()
            entry = self.due.pop()
            if entry is None:  # given back by another thread just now
                return
            _, number, intake, item = entry
            if not isinstance(item, Delivery):
                intake.owed[item] = None
                intake.ask(item[0], item[1])
            elif intake.channel not in self.intakes:  # it was handed over, and cancelled since
                self._deliver(intake, number, item, now)
            elif intake.ready or not intake.may_start():
                intake.ready.append((self.loop.now(), entry))
                self._watch_queued()
            else:
                self._deliver(intake, number, item, now)

    def _run_ready(self, intake: ConsumerState) -> None:
        """Deliver what has waited for a free process, as far as there are any."""
        intake.startable = 0
        while intake.ready and not self._enough and intake.may_start():
            intake.channel.policy.before_delivery()
            try:
                _, (_, number, _, item) = intake.ready.popleft()
            except IndexError:  # given back by another thread just now
                return
            self._deliver(intake, number, item, self.clock.at(self.loop.now()))

    def _deliver(
        self, intake: ConsumerState, number: tuple[int, int, int], delivery: Delivery, now: int
    ) -> None:
        intake.held -= 1
        self._delivered += 1
        self._pool_first.delivered_in = self._pool_first.turn
        self._delivering = True
        if due := delivery.action_us:
            self.center.metrics.late(delivery.topic, now - due)
        message = intake.early.pop(number, None) if intake.early else None
        try:
            if message is None:
                intake.channel.receive(delivery)
            else:
                message.early = False
                begin, message.begin, message.otherwise = message.begin, None, None
                if begin is not None and not message.given_back:
                    begin()
        finally:
            self._delivering = False
        if intake.channel.policy.queues_in_pool:
            self._watch_queued()

    def _give_back_queued(self, intake: ConsumerState, now: float) -> None:
        """Let others have what has waited here too long for a free process: a task takes longer
        than was to be expected. It is asked for again when a process is free."""
        channel = intake.channel
        taken: list[Delivery] = []
        if channel.policy.queues_in_pool:
            queued = channel.policy.take_queued(MAX_QUEUED)
            taken += [message.delivery for message in queued if channel.take_back(message)]
        if intake.ready and now >= intake.ready[0][0] + MAX_QUEUED:
            while intake.ready:
                try:
                    _, (_, number, _, delivery) = intake.ready.popleft()
                except IndexError:  # given back by another thread just now
                    break
                intake.held -= 1
                message = intake.early.pop(number, None)
                if message is None or channel.take_back(message):
                    taken.append(delivery)
        if not taken:
            return
        for delivery in taken:
            self.heartbeat.drop(delivery)
            if delivery.topic in intake.topics:
                intake.ask(delivery.topic, delivery.slot if self.center.clustered else None)
                intake.backlog.add(delivery.topic)
        # Not to be repeated if it fails, when another may hold them: their leases end.
        self._work.send([(call, None) for call in self.center.releasing(taken)])

    def _watch_queued(self) -> None:
        """See to it that the loop wakes when what waits for a process is to be given back."""
        if self.loop.hub is None or self._queued_alarm.is_set:
            return
        now = self.loop.now()
        since = [
            intake.ready[0][0] if intake.ready else now
            for intake in self.intakes.values()
            if intake.ready or intake.over_queued()
        ]
        if since:
            self._queued_alarm.set(min(since) + MAX_QUEUED, now)

    def _set_alarm(self) -> None:
        """See to it that the loop wakes for whatever comes first."""
        first = self.due.first
        if self.loop.hub is not None and first is not None:
            now = self.loop.now()
            self._alarm.set(now + self.clock.until(first[0], now), now)

    def _on_alarm(self) -> None:
        # The pool sends what was delivered since the last turn after this: no time to rest.
        if not self._pool_first.delivered_now:
            self._rest()
        self._run_due()

    def _rest(self) -> None:
        """Wait the part of a millisecond for which the loop's poller is too coarse."""
        if (first := self.due.first) is not None:
            rest = self.clock.until(first[0], self.loop.now())
            if 0 < rest <= 2 * TICK:
                self.loop.sleep(rest)

    # -- claims

    def _listen(self) -> None:
        """Block on the wake indexes of whoever is idle."""
        if self._wake.busy or self._enough or self._stopping:
            return
        if self._blocks_at > self.loop.now():
            return
        topics: list[str] = []
        for intake in self.intakes.values():
            if intake.flying or intake.asked:
                continue
            free, room, _ = intake.capacity()
            if free > 0 and room > 0:
                topics += [topic for topic in intake.topics if topic not in intake.paused]
        if not topics:
            return
        self._turn = (self._turn + 1) % len(topics)
        topics = topics[self._turn :] + topics[: self._turn]
        keys = [self.center.keys.wake(topic) for topic in topics]
        self._wake_topics = {
            key.encode("utf-8", "surrogatepass"): topic
            for key, topic in zip(keys, topics, strict=True)
        }
        block = min(WAKE_BLOCK, self._most)
        self._wake.send([(("BZPOPMIN", *keys, f"{block:.3f}"), self._claimed)], block=block)

    def _stop_listening(self) -> None:
        """End the wait on the wake indexes: it is for other topics than it should be."""
        if not self._wake.busy:
            return
        self._stopping = True
        try:
            for _ in range(20):
                unblock = ("CLIENT", "UNBLOCK", self._wake.client_id)
                if self.center.client.execute_command(*unblock) or self._wake.readable():
                    self._wake.read()  # a claim, if one has come just now; else nothing
                    break
                self.loop.sleep(TICK / 2)  # what is to be ended has not even arrived
            else:
                self._wake.close()
        except BROKEN:
            self._wake.close()
        except ResponseError as exc:
            # Not permitted: a claim may be lost with the connection, and is made up for by
            # whoever looks into all slots next.
            logger.debug("CLIENT UNBLOCK: %s", exc)
            self._wake.close()
        finally:
            self._stopping = False

    def _claimed(self, reply: Any) -> None:
        topics, self._wake_topics = self._wake_topics, {}
        if not reply:
            return
        topic = topics[reply[0]]
        slot, _, us = reply[1].decode().partition(":")
        claim = (topic, int(slot), int(us))
        intakes = [intake for intake in self.intakes.values() if topic in intake.topics]
        if not intakes:
            self._announce_now({claim: None})
            return
        if self.due.count_claims(*claim[:2]) >= MAX_CLAIMS:
            self._unclaim(claim)
            return
        intake = max(intakes, key=lambda i: min(i.capacity()[:2]))
        lookahead = int(self.settings.toc_lookahead * 1_000_000) if self.loop.hub is not None else 0
        self.due.push_claim(claim[2] - lookahead, (next(self._number), 0, 0), intake, claim)
        if self._stopping:  # whoever ends the wait goes on with it
            return
        self._run_due()
        self._consider(intake, self.loop.now())
        if self.loop.hub is not None and intake.flying and self._work.wait(AT_ONCE):
            self._work.read()
        self._set_alarm()
        self._listen()

    def _unclaim(self, claim: tuple[str, int, int]) -> None:
        """Hand back all claims of a slot: a slot announces two times at most, so most of them are
        no more announced, and only what is can be claimed once more."""
        claims = {claim, *self.due.take_claims(lambda other: other[:2] == claim[:2])}
        pairs = [(slot, us) for _, slot, us in sorted(claims)]
        self._work.send([(call, None) for call in self.center.handing_back(claim[0], pairs)])
        if not self._stopping:
            self._listen()

    def _hand_back(self, intake: ConsumerState) -> None:
        self._announce_later(intake.owed)
        intake.owed.clear()

    def _announce_later(self, claims: dict[Claim, None]) -> None:
        for topic, pairs in _by_topic(claims).items():
            self._work.send([(call, None) for call in self.center.handing_back(topic, pairs)])

    # -- pauses

    def _read_pauses(self, now: float) -> None:
        """Read which topics are paused, if it is time to."""
        if now < self._pauses_at or not self.intakes:
            return
        self._pauses_at = now + READ_PAUSES

        def read(names: list[bytes]) -> None:
            self._paused = set(texts(names))
            for intake in self.intakes.values():
                intake.pause(self._paused)

        self._work.send([(("SMEMBERS", self.center.keys.paused), read)])

    def _leave_paused(self, intake: ConsumerState) -> None:
        """Ask nothing of paused topics, and keep no claims of theirs: they are for whoever is
        first when they go on."""
        for topic in intake.paused:
            intake.asked.pop(topic, None)
            intake.sure.discard(topic)
            intake.backlog.discard(topic)
        claims = {claim: None for claim in intake.owed if claim[0] in intake.paused}
        if claims:
            for claim in claims:
                del intake.owed[claim]
            self._announce_later(claims)

    def _announce_now(self, claims: dict[Claim, None]) -> None:
        for topic, pairs in _by_topic(claims).items():
            try:
                self.center.run_all(self.center.handing_back(topic, pairs))
            except (*BROKEN, ResponseError) as exc:
                # The others look into all slots within a second.
                logger.debug("claims of %s were not handed back: %s", topic, exc)

    # -- broadcasts

    def _listen_streams(self) -> None:
        for channel, subscription in self.subscriptions:
            while subscription.returned and not self._enough:
                if channel.receive_broadcast(subscription, *subscription.returned.pop(0)):
                    self._delivered += 1
        urgent, rest = self.subscriptions.positions()
        self._read_unhurried(rest)
        if self._stream.busy:
            if set(urgent) <= set(self._listened):
                return
            # It waits for too little: nothing is lost, for it is read by position.
            self._stream.close()
        if urgent and self._blocks_at <= self.loop.now():
            block = STREAM_BLOCK if self.steady else min(self._most, STREAM_BLOCK)
            self._listened = urgent
            command = listening(urgent, max(int(block * 1000), 1))
            self._stream.send([(command, self._broadcast)], block=block)

    def _read_unhurried(self, positions: dict[str, str]) -> None:
        """Read, every now and then, those broadcasts that nobody is to be woken for."""
        now = self.loop.now()
        if not positions or not self.subscriptions.begin_reading(now):
            return
        if self.loop.hub is not None:
            self._reading_alarm.cancel()
            self._reading_alarm.set(self.subscriptions.next_reading, now)

        def read(reply: Any) -> None:
            self._broadcast(reply)
            if self.subscriptions.may_have_more(reply):
                # In the next turn, for what is due comes first.
                self.loop.nudge()

        self._work.send([(listening(positions), read)])

    def _broadcast(self, reply: Any) -> None:
        if not reply:
            self._look_for_restarts()
            return
        for channel, subscription, entry in self.subscriptions.entries(reply):
            if not channel.wants(subscription, entry.routing_key):
                continue
            if self._enough:
                subscription.returned.append((entry.routing_key, entry.envelope))
            elif channel.receive_broadcast(subscription, entry.routing_key, entry.envelope):
                self._delivered += 1

    def _look_for_restarts(self) -> None:
        for subscription, key, last in self.subscriptions.looks_for_restarts(self.loop.now()):
            look = ("XREVRANGE", key, "+", "-", "COUNT", 1)
            self._work.send([(look, partial(restart, subscription, key, last))])


def _is_of(intake: ConsumerState, topic: str, entry: Entry) -> bool:
    """Whether a consumer waits for this because of that topic, and nobody else has it."""
    _, number, owner, item = entry
    if owner is not intake or number in intake.early:  # it was handed over already
        return False
    return (item.topic if isinstance(item, Delivery) else item[0]) == topic


def _add(asked: dict[str, set[int] | None], topic: str, slots: set[int] | None) -> None:
    """Note that these slots of a topic are to be asked, or all."""
    if slots is None:
        asked[topic] = None
    else:
        known = asked.setdefault(topic, set())
        if known is not None:
            known |= slots


def _by_topic(claims: dict[Claim, None]) -> dict[str, list[tuple[int, int]]]:
    by_topic: dict[str, list[tuple[int, int]]] = {}
    for topic, slot, us in claims:
        by_topic.setdefault(topic, []).append((slot, us))
    return by_topic
