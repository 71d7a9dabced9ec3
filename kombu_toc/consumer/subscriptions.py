"""Broadcasts that are read: which streams, from where on, when, and whose an entry is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..center.exchanges import (
    BEGINNING,
    PAGE,
    Entry,
    Subscription,
    in_order,
    newest_of,
    order,
    read_page,
    restarted,
)

if TYPE_CHECKING:
    from .sink import Sink

#: Seconds after which broadcasts that are not urgent are read again: the events of other workers.
#: (Gossip takes a worker for lost after 4 seconds without its heartbeat, which comes every two.)
STREAM_PAUSE = 1.5

#: Seconds after which it is looked whether streams that are quiet were made anew.
RESTART_PAUSE = 60.0


class Subscriptions:
    """The bindings by which queues are read for here, each with its positions in streams."""

    def __init__(self) -> None:
        self._bound: dict[tuple[str, str, str], tuple[Sink, Subscription]] = {}
        #: exchanges of which broadcasts may be read late
        self.unhurried: set[str] = set()
        #: monotonic seconds when those are read next
        self.next_reading = 0.0
        #: monotonic seconds when it is looked next whether streams were made anew
        self._next_restart = 0.0

    def add(self, sink: Sink, subscription: Subscription) -> None:
        """Read for this binding; deliver to `sink`."""
        self._bound[subscription.bound] = (sink, subscription)

    def remove(self, subscription: Subscription) -> Subscription | None:
        """Read no more for this binding; return by what it was read."""
        found = self._bound.pop(subscription.bound, None)
        return found[1] if found else None

    def __iter__(self) -> Iterator[tuple[Sink, Subscription]]:
        return iter(list(self._bound.values()))

    def positions(self) -> tuple[dict[str, str], dict[str, str]]:
        """What is to be read: {stream: id of the last entry}, of urgent and of other exchanges.

        Of several bindings that read a stream, the one that is furthest behind counts.
        """
        urgent: dict[str, str] = {}
        rest: dict[str, str] = {}
        for sink, subscription in self._bound.values():
            if not sink.qos.can_consume():
                continue
            positions = rest if subscription.exchange in self.unhurried else urgent
            for key, last in subscription.last.items():
                known = positions.get(key)
                if known is None or order(last) < order(known):
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
        if any(len(entries) >= PAGE for _, entries in reply or ()):
            self.next_reading = 0.0
            return True
        return False

    def entries(self, reply: Any) -> Iterator[tuple[Sink, Subscription, Entry]]:
        """Whose the entries of a reply are, in the order in which they were broadcast.

        One at a time, and each is taken for read when it is given: what is done with one may end
        the subscriptions of those that follow.
        """
        followers: dict[str, list[tuple[Sink, Subscription]]] = {}
        for sink, subscription in self._bound.values():
            for key in subscription.last:
                followers.setdefault(key, []).append((sink, subscription))
        pages: dict[str, list[list[Entry]]] = {}
        for name, entries in reply:
            key = name.decode("utf-8", "surrogatepass")
            if key in followers:
                exchange = followers[key][0][1].exchange
                pages.setdefault(exchange, []).append(read_page(key, entries))
        for some in pages.values():
            for entry in in_order(some):
                for sink, subscription in followers[entry.key]:
                    if self._reads(sink, subscription, entry):
                        yield sink, subscription, entry

    def _reads(self, sink: Sink, subscription: Subscription, entry: Entry) -> bool:
        if order(entry.id) <= order(subscription.last[entry.key]):
            return False
        if self._bound.get(subscription.bound) != (sink, subscription):
            return False  # cancelled by what an entry before has brought about
        subscription.last[entry.key] = entry.id
        return not (entry.kept and subscription.kept)  # else it is in the topic

    def looks_for_restarts(self, now: float) -> list[tuple[Subscription, str, str]]:
        """What is to be looked at, for it may have been made anew: (subscription, stream, id of
        the last entry that was read). Nothing if that was done lately.

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
            if last != BEGINNING
        ]


def restart(subscription: Subscription, key: str, last: str, newest: Any) -> None:
    """Read a stream from its beginning, if it was made anew.

    last: the position when it was looked at; if it was read meanwhile, nothing changes
    newest: what XREVRANGE with a count of 1 has answered
    """
    if subscription.last[key] == last and restarted(last, newest_of(newest)):
        subscription.last[key] = BEGINNING
