"""Reads broadcasts: blocks for those that are urgent, and looks for the others now and then."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from ..center.exchanges import read_command
from ..client.cluster import is_passing
from .loop import Alarm, Loop, end_wait
from .pipe import Waiting
from .subscriptions import Subscriptions, restart
from .wake_listener import BLOCK_AGAIN

if TYPE_CHECKING:
    from ..center.center import TimeoutCenter
    from .dispatcher import Dispatcher
    from .wiring import Connection, Wiring

#: Seconds a blocking command waits at the server before it is sent again.
STREAM_BLOCK = 10.0


class BroadcastReader:
    """Delivers what is broadcast to those who have subscribed."""

    def __init__(
        self,
        center: TimeoutCenter,
        loop: Loop,
        wiring: Wiring,
        work: Connection,
        dispatcher: Dispatcher,
    ) -> None:
        self.subscriptions = Subscriptions()
        self.connection = wiring.blocking(loop, self._on_refused)
        self._center = center
        self._loop = loop
        self._work = work
        self._dispatcher = dispatcher
        # Not early: the turn that it brings about must find that it is time to read.
        self._alarm = Alarm(loop, end_wait, early=0.0)
        #: what the connection waits for: {stream: id of the last entry}
        self._listened: dict[str, str] = {}
        #: monotonic seconds before which nothing blocks: what it would wait on is being moved
        self._blocks_at = 0.0

    def read(self, block: float) -> None:
        """Deliver what was returned, and read on; block: seconds to wait for more, at most"""
        for sink, subscription in self.subscriptions:
            while subscription.returned and not self._dispatcher.enough:
                if sink.receive_broadcast(subscription, *subscription.returned.pop(0)):
                    self._dispatcher.delivered += 1
        urgent, rest = self.subscriptions.positions()
        self._read_unhurried(rest)
        if self.connection.busy:
            if set(urgent) <= set(self._listened):
                return
            # It waits for too little: nothing is lost, for it is read by position.
            self.connection.close()
        if urgent and self._blocks_at <= self._loop.now():
            block = min(block, STREAM_BLOCK)
            self._listened = urgent
            command = read_command(urgent, max(int(block * 1000), 1))
            self.connection.send([(command, self._deliver)], block=block)

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
        self._work.send([(read_command(positions), self._deliver_unhurried)])

    def _deliver_unhurried(self, reply: Any) -> None:
        self._deliver(reply)
        if self.subscriptions.may_have_more(reply):
            # In the next turn, for what is due comes first.
            self._loop.nudge()

    def _deliver(self, reply: Any) -> None:
        if not reply:
            self._look_for_restarts()
            return
        for sink, subscription, entry in self.subscriptions.entries(reply):
            if not sink.wants(subscription, entry.routing_key):
                continue
            if self._dispatcher.enough:
                subscription.returned.append((entry.routing_key, entry.envelope))
            elif sink.receive_broadcast(subscription, entry.routing_key, entry.envelope):
                self._dispatcher.delivered += 1

    def _look_for_restarts(self) -> None:
        for subscription, key, last in self.subscriptions.looks_for_restarts(self._loop.now()):
            look = ("XREVRANGE", key, "+", "-", "COUNT", 1)
            self._work.send([(look, partial(restart, subscription, key, last))])

    def _on_refused(self, waiting: Waiting, exc: ResponseError) -> bool:
        # Nothing is lost by that: a position that was not read.
        if self._center.client.apply_redirect(exc) is None and not is_passing(exc):
            return False
        self.connection.close()
        self._blocks_at = self._loop.now() + BLOCK_AGAIN
        return True
