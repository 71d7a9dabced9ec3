"""A link to each node of a Redis Cluster, used as if they were one."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from redis.exceptions import ResponseError

from ..client.cluster import (
    MAX_MOVES,
    ClusterClient,
    Place,
    is_passing,
    key_of,
    with_short_timeouts,
)
from ..client.faults import is_temporary
from ..errors import ServerError
from ..metrics.sender import Metrics
from ..scripts.call import ScriptCall
from .pipe import BROKEN, Item, PipelinedConnection, Waiting

logger = logging.getLogger(__name__)

#: Seconds after which a node is tried again that could not be reached: doubled with each time.
FIRST_REST = 0.5
LONGEST_REST = 10.0

#: Seconds after which a node that does not answer is asked for nothing more until it does.
SLOW = 1.0

#: Seconds after which the nodes are asked again where the hash slots of such a one are.
LOOK_AGAIN = 0.5


class ClusterConnections:
    """Has what :class:`Link` has; each call goes to the node of its keys.

    A node that cannot be reached is not missed: what was asked of it fails, what must run is owed,
    and the others go on. But for the one that has the keys of no single slot, which is the
    connection as Kombu knows it: if that breaks, so does this.
    """

    def __init__(
        self,
        client: ClusterClient,
        on_open: Callable[[int, Callable[[], None]], None],
        on_close: Callable[[int], None],
        on_owed: Callable[[list[ScriptCall]], None],
        metrics: Metrics,
    ) -> None:
        self._client = client
        self._on_open = on_open
        self._on_close = on_close
        self._on_owed = on_owed
        self._metrics = metrics
        self._links: dict[Place, PipelinedConnection] = {}
        #: node that cannot be reached -> monotonic seconds of the next attempt, and the rest before
        self._resting: dict[Place, tuple[float, float]] = {}
        self._look_at = 0.0

    @property
    def busy(self) -> bool:
        """Whether a reply is still to come."""
        return any(link.busy for link in self._links.values())

    def send(self, items: Sequence[tuple[Any, ...]], *, owed: int = 0) -> None:
        """As :meth:`Link.send`; only the node that has the keys of no single slot may raise."""
        by_place: dict[Place, tuple[list[Item], list[Item]]] = defaultdict(lambda: ([], []))
        for number, item in enumerate(items):
            item = Item(*item)
            by_place[self._client.place_of(_key(item))][number >= owed].append(item)
        for place, (must, rest) in by_place.items():
            self._send_to(place, [*must, *rest], len(must))

    def _send_to(self, place: Place, items: list[Item], owed: int) -> None:
        now = time.monotonic()
        if self._resting.get(place, (0.0, 0.0))[0] > now:
            self._fail(items, owed)
            return
        link = self._links.get(place)
        if link is not None and link.since < now - SLOW:
            self._fail(items, owed)
            return
        if link is None:
            link = self._links[place] = PipelinedConnection(
                lambda: self._client.client_at(place).connection_pool,
                lambda fd, _: self._on_open(fd, partial(self._read, place)),
                self._on_close,
                self._on_owed,
                self._metrics,
                on_refused=self._refused,
                on_announcing=self.announce,
                arguments=with_short_timeouts,
            )
        try:
            link.send(items, owed=owed)
        except BROKEN as exc:
            self._lost(place, exc)
        else:
            if self._resting.pop(place, None) is not None:
                logger.info("node %s:%d of the Cluster can be reached again", *place)

    def _fail(self, items: list[Item], owed: int) -> None:
        must = [item.what for item in items[:owed] if isinstance(item.what, ScriptCall)]
        if must:
            self._on_owed(must)
        for item in items[owed:]:
            if item.on_failure is not None:
                item.on_failure()

    def announce(self, call: ScriptCall) -> None:
        """Write into a wake index what a script has announced."""
        try:
            self.send([(call,)])
        except BROKEN as exc:
            # Whoever looks into all slots finds what it is not told of.
            logger.debug("what is due is not announced: %s", exc)

    def _refused(self, waiting: Waiting, exc: ResponseError) -> bool:
        item, owed, _ = waiting
        heard = self._client.apply_redirect(exc)
        if heard is not None and item.moves < MAX_MOVES:
            place, asking = heard
            item = item._replace(moves=item.moves + 1)
            if asking:
                self._send_to(place, [_ASKING, item], 2 * owed)
            else:
                self._send_to(place, [item], int(owed))
            return True
        if is_passing(exc) or is_temporary(exc) or heard is not None:
            self._fail([item], int(owed))
            return True
        return False

    def _lost(self, place: Place, exc: BaseException) -> None:
        link = self._links.pop(place, None)
        if link is not None:
            link.close()
        home = self._client.place_of(None)
        known = self._resting.get(place)
        rest = min(2 * known[1], LONGEST_REST) if known else FIRST_REST
        self._resting[place] = (time.monotonic() + rest, rest)
        if place != home and not known:
            logger.warning(
                "node %s:%d of the Cluster cannot be reached; what is in its slots waits: %s",
                *(*place, exc),
            )
        self._look_again()
        if place == home:
            raise exc

    def _look_again(self) -> None:
        self._look_at = time.monotonic() + LOOK_AGAIN
        try:
            self._client.refresh()
        except BROKEN as exc:
            logger.debug("%s", exc)
        for place in set(self._resting) - set(self._client.places()):
            del self._resting[place]
            logger.info("others have taken over from node %s:%d of the Cluster", *place)

    def _read(self, place: Place) -> None:
        link = self._links.get(place)
        if link is None:
            return
        try:
            link.read()
        except BROKEN as exc:
            self._lost(place, exc)

    def check(self) -> None:
        """As :meth:`Link.check`, of each; and whether other nodes have taken over by now."""
        for place, link in list(self._links.items()):
            try:
                link.check()
            except BROKEN as exc:
                self._lost(place, exc)
        now = time.monotonic()
        slow = [place for place, link in self._links.items() if link.since < now - SLOW]
        if (self._resting or slow) and now >= self._look_at:
            self._look_again()
            for place in set(slow) - set(self._client.places()):
                self._lost(place, ServerError("it does not answer, and others have its slots"))

    def wait(self, seconds: float) -> bool:
        """Wait for a reply; whether one has come."""
        links = [link for link in self._links.values() if link.busy]
        each = seconds / len(links) if links else 0.0
        return any(link.wait(each) for link in links)

    def read(self) -> None:
        """Take a reply of each node that owes one."""
        for place, link in list(self._links.items()):
            if link.busy:
                self._read(place)

    def close(self) -> None:
        for link in list(self._links.values()):
            link.close()
        self._links.clear()


def _key(item: Item) -> str | bytes | None:
    return item.what.keys[0] if isinstance(item.what, ScriptCall) else key_of(*item.what)


_ASKING = Item(("ASKING",))
