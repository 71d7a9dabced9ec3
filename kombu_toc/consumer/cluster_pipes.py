"""A connection to each node of a Redis Cluster, used as if they were one."""

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
from ..client.errors import is_temporary
from ..errors import ServerError
from ..metrics.counters import Metrics
from ..scripts.call import ScriptCall
from .pipe import BROKEN, Item, PipelinedConnection, Waiting
from .resting_nodes import RestingNodes

logger = logging.getLogger(__name__)

#: Seconds after which nothing more is sent to a node that does not answer, until it does.
SLOW = 1.0

#: Seconds between questions to the other nodes whether they have taken over from such a node.
LOOK_AGAIN = 0.5


class ClusterConnections:
    """Connections to the nodes, used as one :class:`.pipe.PipelinedConnection`. Each call goes to
    the node of its keys.

    If a node cannot be reached, what was sent to it fails, what must run is owed, and the others go
    on. The exception is the node that has the keys of no single slot. That is the connection as
    Kombu knows it: if it breaks, so does this.

    client: knows the nodes
    on_open, on_close, on_owed, metrics: as those of each connection
    """

    def __init__(
        self,
        client: ClusterClient,
        on_open: Callable[[int, Callable[[], None]], None],
        on_close: Callable[[int], None],
        on_owed: Callable[[list[ScriptCall]], None],
        metrics: Metrics,
        on_refused: Callable[[Waiting, ResponseError], bool] | None = None,
    ) -> None:
        self._client = client
        self._refuses = on_refused
        self._on_open = on_open
        self._on_close = on_close
        self._on_owed = on_owed
        self._metrics = metrics
        self._connections: dict[Place, PipelinedConnection] = {}
        #: nodes that cannot be reached
        self._resting: RestingNodes[Place] = RestingNodes()
        #: monotonic seconds before which nobody is asked again who has taken over
        self._look_at = 0.0

    @property
    def busy(self) -> bool:
        """Whether a reply is still to come."""
        return any(connection.busy for connection in self._connections.values())

    def send(self, items: Sequence[tuple[Any, ...]], *, owed: int = 0) -> None:
        """As :meth:`.pipe.PipelinedConnection.send`.

        Only the node that has the keys of no single slot may raise.
        """
        by_place: dict[Place, tuple[list[Item], list[Item]]] = defaultdict(lambda: ([], []))
        for number, item in enumerate(items):
            made = Item(*item)
            by_place[self._client.place_of(_key(made))][number >= owed].append(made)
        for place, (must, rest) in by_place.items():
            self._send_to(place, [*must, *rest], len(must))

    def _send_to(self, place: Place, items: list[Item], owed: int) -> None:
        now = time.monotonic()
        if self._resting.rests(place, now):
            self._fail(items, owed)
            return
        connection = self._connections.get(place)
        if connection is not None and connection.since < now - SLOW:
            self._fail(items, owed)
            return
        if connection is None:
            connection = self._connections[place] = PipelinedConnection(
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
            connection.send(items, owed=owed)
        except BROKEN as exc:
            self._lost(place, exc)
        else:
            if self._resting.reached(place):
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
        return self._refuses is not None and self._refuses(waiting, exc)

    def _lost(self, place: Place, exc: BaseException) -> None:
        connection = self._connections.pop(place, None)
        if connection is not None:
            connection.close()
        home = self._client.place_of(None)
        if self._resting.lost(place, time.monotonic()) and place != home:
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
        for place in self._resting.keep(self._client.places()):
            logger.info("others have taken over from node %s:%d of the Cluster", *place)

    def _read(self, place: Place) -> None:
        connection = self._connections.get(place)
        if connection is None:
            return
        try:
            connection.read()
        except BROKEN as exc:
            self._lost(place, exc)

    def check(self) -> None:
        """As :meth:`.pipe.PipelinedConnection.check`, of each node.

        Also asks now and then whether other nodes have taken over from one that does not answer.
        """
        for place, connection in list(self._connections.items()):
            try:
                connection.check()
            except BROKEN as exc:
                self._lost(place, exc)
        now = time.monotonic()
        slow = [
            place
            for place, connection in self._connections.items()
            if connection.since < now - SLOW
        ]
        if (self._resting or slow) and now >= self._look_at:
            self._look_again()
            for place in set(slow) - set(self._client.places()):
                self._lost(place, ServerError("it does not answer, and others have its slots"))

    def wait(self, seconds: float) -> bool:
        """Wait for a reply; whether one has come."""
        busy = [one for one in self._connections.values() if one.busy]
        each = seconds / len(busy) if busy else 0.0
        return any(connection.wait(each) for connection in busy)

    def read(self) -> None:
        """Take a reply of each node that owes one."""
        for place, connection in list(self._connections.items()):
            if connection.busy:
                self._read(place)

    def close(self) -> None:
        for connection in list(self._connections.values()):
            connection.close()
        self._connections.clear()


def _key(item: Item) -> str | bytes | None:
    return item.what.keys[0] if isinstance(item.what, ScriptCall) else key_of(*item.what)


_ASKING = Item(("ASKING",))
