"""Blocks on the wake indexes of topics, hands on what it claims there, and reads broadcasts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from ..center import exchanges
from ..client.connection import is_passing
from ..scripts.call import text
from .connections import BROKEN, SLOW, Waiting
from .loop import TICK, Alarm, Loop, end_wait
from .state import WakeTopics

if TYPE_CHECKING:
    from ..center.center import TimeoutCenter
    from .dispatcher import Dispatcher
    from .loop import Connection, Wiring
    from .state import Sink

    #: Of a topic, where others pass on what they leave to this process.
    PassedOn = Callable[[str], list[str]]

logger = logging.getLogger(__name__)

#: Seconds a blocking command waits at the server before it is sent again. (What keeps track of
#: connections on the way, and a server's own timeout, may forget one after half a minute.)
WAKE_BLOCK = 20.0

#: Seconds after which a Cluster's node is asked again to wait on keys that are being moved.
BLOCK_AGAIN = 0.1

#: Attempts to end a wait, half a millisecond apart.
MAX_UNBLOCKS = 20


class BlockingReader:
    """A connection whose commands wait at the server, on keys that may be moved meanwhile."""

    def __init__(self, poller: Any, wiring: Wiring) -> None:
        self._poller = poller
        self._wiring = wiring
        self._center: TimeoutCenter = poller.center
        self._loop: Loop = poller.loop
        self.connection = wiring.blocking(self._loop, self._on_refused)
        #: monotonic seconds before which nothing blocks: what it would wait on is being moved
        self._blocks_at = 0.0

    @property
    def _may_block(self) -> bool:
        return self._blocks_at <= self._loop.now() and not self._wiring.home_away

    def _block(
        self, command: tuple[Any, ...], on_reply: Callable[[Any], None], block: float
    ) -> None:
        self.connection.send([(command, on_reply)], block=block)
        if not self.connection.busy:  # a Cluster's node was not reached
            self._blocks_at = self._loop.now() + SLOW

    def _on_refused(self, waiting: Waiting, exc: ResponseError) -> bool:
        # Nothing is lost by that: neither was a claim made, nor a position read.
        client = self._center.client
        if not self._wiring.refused(waiting, exc) and (
            not self._center.clustered
            or (client.apply_redirect(exc) is None and not is_passing(exc))
        ):
            return False
        self.connection.close()
        self._blocks_at = self._loop.now() + BLOCK_AGAIN
        return True


class WakeListener(BlockingReader):
    """A connection that waits for the next time that is to be claimed."""

    def __init__(self, poller: Any, wiring: Wiring, passed_on: PassedOn | None) -> None:
        super().__init__(poller, wiring)
        self.topics = WakeTopics()
        self._passed_on = passed_on
        #: while the wait is ended: whoever ends it goes on with what comes of it
        self.stopping = False

    @property
    def may_listen(self) -> bool:
        """Whether it waits for nothing, and may."""
        return not (self.connection.busy or self.stopping) and self._may_block

    def listen(self, topics: list[str], block: float) -> None:
        """Block on the wake indexes of these, for so many seconds at most."""
        topics = [topic for topic in topics if all(map(self._wiring.reads, self._keys_of(topic)))]
        if not topics:
            self._blocks_at = self._loop.now() + BLOCK_AGAIN
            return
        keys = self.topics.listen(topics, self._center.keys.wake, self._passed_on)
        self._block(("BZPOPMIN", *keys, f"{block:.3f}"), self._on_reply, block)

    def _keys_of(self, topic: str) -> list[str]:
        passed_on = [] if self._passed_on is None else self._passed_on(topic)
        return [self._center.keys.wake(topic), *passed_on]

    def stop(self) -> None:
        """End the wait: it is for other topics than it should be."""
        if not self.connection.busy:
            return
        if self._wiring.home_away:
            self.connection.close()
            return
        self.stopping = True
        try:
            for _ in range(MAX_UNBLOCKS):
                if self.unblock() or self.connection.readable():
                    self.connection.read()  # a claim, if one has come just now; else nothing
                    break
                self._loop.sleep(TICK / 2)  # what is to be ended has not even arrived
            else:
                self.connection.close()
        except BROKEN:
            self.connection.close()
        except ResponseError as exc:
            # Not permitted: a claim may be lost with the connection, and is made up for by
            # whoever looks into all slots next.
            logger.debug("CLIENT UNBLOCK: %s", exc)
            self.connection.close()
        finally:
            self.stopping = False

    def unblock(self) -> bool:
        """Have the server answer now; whether it was waiting."""
        return bool(
            self._center.client.execute_command("CLIENT", "UNBLOCK", self.connection.client_id)
        )

    def _on_reply(self, reply: Any) -> None:
        if reply and self._center.clustered:
            self._center.client.claimed[text(reply[0]), text(reply[1])] = True
        if (claim := self.topics.received(reply)) is not None:
            self._poller.take_claim(claim)


# -- broadcasts that are read

#: Seconds after which broadcasts that are not urgent are read again: the events of other workers.
#: (Gossip takes a worker for lost after 4 seconds without its heartbeat, which comes every two.)
STREAM_PAUSE = 1.5

#: Seconds after which it is looked whether streams that are quiet were made anew.
RESTART_PAUSE = 60.0


class Subscriptions:
    """The bindings by which queues are read for here, each with its positions in streams."""

    def __init__(self) -> None:
        self._bound: dict[tuple[str, str, str], tuple[Sink, exchanges.Subscription]] = {}
        #: exchanges of which broadcasts may be read late
        self.unhurried: set[str] = set()
        #: monotonic seconds when those are read next
        self.next_reading = 0.0
        #: monotonic seconds when it is looked next whether streams were made anew
        self._next_restart = 0.0
        #: whether there may be something that nobody waits for
        self.changed = True

    def add(self, sink: Sink, subscription: exchanges.Subscription) -> None:
        """Read for this binding; deliver to `sink`."""
        self._bound[subscription.bound] = (sink, subscription)
        self.changed = True

    def remove(self, subscription: exchanges.Subscription) -> exchanges.Subscription | None:
        """Read no more for this binding; return by what it was read."""
        found = self._bound.pop(subscription.bound, None)
        return found[1] if found else None

    def __iter__(self) -> Iterator[tuple[Sink, exchanges.Subscription]]:
        return iter(list(self._bound.values()))

    def has(self, sink: Sink, subscription: exchanges.Subscription) -> bool:
        """Whether it is read for: what was delivered before may have cancelled that."""
        return self._bound.get(subscription.bound) == (sink, subscription)

    def at_rest(self, now: float) -> bool:
        """Whether nothing is to be done but to wait on, as it has been since the last look."""
        is_due = self.changed or 0.0 < self.next_reading <= now
        return not (is_due or any(one.returned for _, one in self._bound.values()))

    def positions(self) -> tuple[dict[str, str], dict[str, str]]:
        """The streams to read, {stream: id of the last entry}, of urgent and of other exchanges.

        Of several bindings that read a stream, the one that is furthest behind counts.
        """
        urgent: dict[str, str] = {}
        rest: dict[str, str] = {}
        self.changed = False
        for sink, subscription in self._bound.values():
            if not sink.qos.can_consume():
                self.changed = True
                continue
            positions = rest if subscription.exchange in self.unhurried else urgent
            for key, last in subscription.last.items():
                known = positions.get(key)
                if known is None or exchanges.order(last) < exchanges.order(known):
                    positions[key] = last
        return urgent, rest

    def begin_reading(self, now: float) -> bool:
        """Whether it is time to read what is not urgent; if so, it is read again in a while."""
        if now < self.next_reading:
            return False
        self.next_reading = now + STREAM_PAUSE
        return True

    def may_have_more(self, reply: Any) -> bool:
        """Whether this reply to a read was cut short; then it is time to read again."""
        if any(len(entries) >= exchanges.PAGE for _, entries in reply or ()):
            self.next_reading, self.changed = 0.0, True
            return True
        return False

    def entries(self, reply: Any) -> Iterator[tuple[Sink, exchanges.Subscription, exchanges.Entry]]:
        """Whose the entries of a reply are, in the order in which they were broadcast.

        One at a time, and each is taken for read when it is given: what is done with one may end
        the subscriptions of those that follow.
        """
        followers: dict[str, list[tuple[Sink, exchanges.Subscription]]] = {}
        for sink, subscription in self._bound.values():
            for key in subscription.last:
                followers.setdefault(key, []).append((sink, subscription))
        pages: dict[str, list[list[exchanges.Entry]]] = {}
        for name, entries in reply:
            key = name.decode("utf-8", "surrogatepass")
            if key in followers:
                exchange = followers[key][0][1].exchange
                pages.setdefault(exchange, []).append(exchanges.read_page(key, entries))
        for some in pages.values():
            for entry in exchanges.in_order(some):
                for sink, subscription in followers[entry.key]:
                    last = subscription.last[entry.key]
                    is_new = exchanges.order(entry.id) > exchanges.order(last)
                    if is_new and self.has(sink, subscription):
                        subscription.last[entry.key] = entry.id
                        yield sink, subscription, entry

    def looks_for_restarts(self, now: float) -> list[tuple[exchanges.Subscription, str, str]]:
        """Streams that may be new: (subscription, stream, id of the last entry that was read).
        None if they were looked at lately.

        A stream that nothing is added to goes away, and its ids begin anew with the server's
        clock: where that has stepped back meanwhile, what comes would be taken for old.
        """
        if now < self._next_restart:
            return []
        self._next_restart = now + RESTART_PAUSE
        return [
            (subscription, key, last)
            for _, subscription in self._bound.values()
            for key, last in subscription.last.items()
            if last != exchanges.BEGINNING
        ]


def restart(subscription: exchanges.Subscription, key: str, last: str, newest: Any) -> None:
    """Read a stream from its beginning, if it was made anew.

    last: the position when it was looked at; if it was read meanwhile, nothing changes
    newest: what XREVRANGE with a count of 1 has answered
    """
    if subscription.last[key] == last and exchanges.restarted(last, exchanges.newest_of(newest)):
        subscription.last[key] = exchanges.BEGINNING


# -- reads broadcasts

#: Seconds a blocking command waits at the server before it is sent again.
STREAM_BLOCK = 10.0


class BroadcastReader(BlockingReader):
    """Delivers what is broadcast to those who have subscribed."""

    def __init__(self, poller: Any, wiring: Wiring) -> None:
        super().__init__(poller, wiring)
        self.subscriptions = Subscriptions()
        self._work: Connection = poller.work
        self._dispatcher: Dispatcher = poller.dispatcher
        # Not early: the turn that it brings about must find that it is time to read.
        self._alarm = Alarm(self._loop, end_wait, early=0.0)
        #: what the connection waits for: {stream: id of the last entry}
        self._listened: dict[str, str] = {}

    def read(self, block: float) -> None:
        """Deliver what was returned, and read on; block: seconds to wait for more, at most"""
        subscriptions = self.subscriptions
        if self.connection.busy and subscriptions.at_rest(self._loop.now()):
            return
        for sink, subscription in subscriptions:
            while subscription.returned and subscriptions.has(sink, subscription):
                if self._dispatcher.enough:
                    break
                if sink.receive_broadcast(subscription, *subscription.returned.pop(0)):
                    self._dispatcher.delivered += 1
        every = subscriptions.positions()
        urgent, rest = (
            {key: last for key, last in some.items() if self._wiring.reads(key)} for some in every
        )
        subscriptions.changed |= len(urgent) + len(rest) < sum(map(len, every))
        self._read_unhurried(rest)
        if self.connection.busy:
            if set(urgent) <= set(self._listened):
                return
            # It waits for too little: nothing is lost, for it is read by position.
            self.connection.close()
        if urgent and self._may_block:
            block = min(block, STREAM_BLOCK)
            self._listened = urgent
            command = exchanges.read_command(urgent, max(int(block * 1000), 1))
            self._block(command, self._deliver, block)

    def next_time(self, now: float) -> float:
        """Monotonic seconds when something is to be read that nobody is woken for."""
        subscriptions = self.subscriptions
        later = subscriptions.unhurried and subscriptions.next_reading > now
        return subscriptions.next_reading if later else float("inf")

    def unregister(self) -> None:
        """The loop has no hub any more."""
        self._alarm.cancel()

    def _read_unhurried(self, positions: dict[str, str]) -> None:
        """Read, every now and then, those broadcasts that nobody is to be woken for."""
        now = self._loop.now()
        if not positions or not self.subscriptions.begin_reading(now):
            return
        if self._loop.hub is not None:
            self._alarm.cancel()
            self._alarm.set(self.subscriptions.next_reading, now)
        self._work.send([(exchanges.read_command(positions), self._deliver_unhurried)])

    def _deliver_unhurried(self, reply: Any) -> None:
        self._deliver(reply)
        if self.subscriptions.may_have_more(reply):
            # In the next turn, for what is due comes first.
            self._loop.nudge()

    def _deliver(self, reply: Any) -> None:
        if not reply:
            for subscription, key, last in self.subscriptions.looks_for_restarts(self._loop.now()):
                look = ("XREVRANGE", key, "+", "-", "COUNT", 1)
                self._work.send([(look, partial(restart, subscription, key, last))])
            return
        for sink, subscription, entry in self.subscriptions.entries(reply):
            if not sink.wants(subscription, entry.routing_key):
                continue
            if self._dispatcher.enough:
                subscription.returned.append((entry.routing_key, entry.envelope))
            elif sink.receive_broadcast(subscription, entry.routing_key, entry.envelope):
                self._dispatcher.delivered += 1
