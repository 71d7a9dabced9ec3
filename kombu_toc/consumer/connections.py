"""A connection of its own, on which commands are sent without waiting for their replies."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import redis
from redis.exceptions import InvalidResponse, NoScriptError, ResponseError

from ..client.connect import SOCKET_TIMEOUT
from ..client.connection import (
    IDLE,
    MAX_MOVES,
    ClusterClient,
    Place,
    is_passing,
    key_of,
    with_short_timeouts,
)
from ..client.errors import BROKEN as BROKEN
from ..client.errors import explained, is_refused, is_temporary, refusal
from ..compat import socket_of
from ..errors import ServerError, TocError
from ..metrics import Metrics
from ..scripts.call import Announced, ScriptCall, pack_command, pieces, write_announcements

logger = logging.getLogger(__name__)


class Item(NamedTuple):
    """A call or a plain command, and what is called with its result, or if there will be none."""

    what: ScriptCall | tuple[Any, ...]
    on_reply: Callable[[Any], None] | None = None
    on_failure: Callable[[], None] | None = None
    moves: int = 0  #: how often it was sent elsewhere


class Waiting(NamedTuple):
    """An item whose reply is awaited."""

    item: Item
    owed: bool
    since: float = 0.0  #: monotonic seconds from which on it is due


def give_up(waiting: Iterable[Waiting], on_owed: Callable[[list[ScriptCall]], None]) -> None:
    """There will be no replies: each is owed, or whoever waits for it is told."""
    owed = []
    for item, is_owed, _ in waiting:
        if is_owed and isinstance(item.what, ScriptCall):
            owed.append(item.what)
        elif item.on_failure is not None:
            item.on_failure()
    if owed:
        on_owed(owed)


@dataclass(eq=False)
class PipelinedConnection:
    """Sends commands, and reads their replies when the socket has them.

    pool: gives a pool. The connection is made with the pool's arguments, and never belongs to it
    on_open, on_close: called with the socket's file descriptor
    on_owed: called with the calls that must run and whose replies never came
    metrics: counts the calls, and how long they took
    on_refused: called with what was refused and the error; returns whether it has handled that, and
        the connection goes on
    on_announcing: called with what a script has announced and could not write itself
    arguments: what to make of the pool's while the connection is opened

    A connection may be cut although neither end is told. It is taken for broken if a reply takes
    longer than the socket's timeout and the time for which its command may block: see
    :meth:`check`.

    It has seventeen fields: the eight arguments above, and what is on its way.
    """

    _pool: Callable[[], redis.ConnectionPool]
    _on_open: Callable[[int, Callable[[], None]], None]
    _on_close: Callable[[int], None]
    _on_owed: Callable[[list[ScriptCall]], None]
    _metrics: Metrics
    _: KW_ONLY
    on_refused: Callable[[Waiting, ResponseError], bool] | None = None
    on_announcing: Callable[[Announced], None] | None = None
    arguments: Callable[[dict[str, Any]], dict[str, Any]] = dict

    def __post_init__(self) -> None:
        self._connection: Any = None
        self._fd: int | None = None
        self._waiting: deque[Waiting] = deque()
        self._used = 0.0
        #: the SHA-1 of each script that was sent whole over this connection
        self._brought: set[str] = set()
        #: monotonic seconds when the latest reply had come
        self._heard = 0.0
        self._patience = SOCKET_TIMEOUT
        #: what the connection was found broken by, while nobody read from it
        self._broke: BaseException | None = None
        #: by which the server knows the connection
        self.client_id = 0

    @property
    def busy(self) -> bool:
        """Whether a reply is still to come."""
        return bool(self._waiting)

    @property
    def since(self) -> float:
        """Monotonic seconds since when the oldest reply is awaited; now if none is."""
        return self._waiting[0].since if self._waiting else time.monotonic()

    def send(self, items: Sequence[tuple[Any, ...]], *, owed: int = 0, block: float = 0.0) -> None:
        """Send calls or plain commands, each as an :class:`Item`, or what makes one.

        owed: so many, the first, must run; if the connection breaks first, `on_owed` gets them
        block: seconds for which the server may keep the reply back

        Raises redis-py's ConnectionError or TimeoutError.
        """
        now = time.monotonic()
        if not self._waiting and now > self._used + IDLE and self.readable():
            self.close()  # the server has, and nothing is lost by that
        self._used = now
        for number, item in enumerate(items):
            self._waiting.append(Waiting(Item(*item), number < owed, now + block))
        try:
            if self._connection is None:
                self._open()
            packed = b"".join([self._packed(item[0]) for item in items])
            self._connection.send_packed_command(pieces(packed), check_health=False)
        except BaseException:
            self.close()
            raise

    def _packed(self, call: ScriptCall | tuple[Any, ...]) -> bytes:
        """The first call of a script brings its text: one that the server does not know would be
        sent again, and run behind what was sent after it."""
        if not isinstance(call, ScriptCall):
            return pack_command(*call)
        sha = call.script.sha
        if sha in self._brought:
            return call.packed()
        self._brought.add(sha)
        return pack_command(*call.command(whole=True))

    def check(self) -> None:
        """Raise redis-py's TimeoutError, and close the connection, if a reply is overdue. One that
        has come meanwhile is taken: who looks has it in memory, and the socket tells no more of it.
        """
        now = time.monotonic()
        # A reply that is awaited behind a long one has not been overdue while that came.
        if self._waiting and now > max(self._waiting[0].since, self._heard) + self._patience:
            if not self.readable():
                self.close()
                raise redis.exceptions.TimeoutError("no reply: the connection is taken for broken")
            self.read()

    def readable(self) -> bool:
        """Whether a reply has come, or the end of the connection."""
        return self.wait(0)

    def wait(self, seconds: float) -> bool:
        """Wait for a reply, or the end of the connection; whether it has come."""
        try:
            return self._connection is not None and self._connection.can_read(timeout=seconds)
        except BROKEN as exc:
            self._broke = exc  # redis-py has closed it, and would read from nothing
            return True

    def read(self) -> None:
        """Take the replies that have come. Raises ServerError for one that is an error."""
        while self._waiting:
            connection = self._connection
            try:
                if self._broke is not None:
                    raise self._broke
                reply = connection.read_response()
            except NoScriptError:
                waiting = self._waiting.popleft()
                self._resend(waiting)
            except ResponseError as exc:
                waiting = self._waiting.popleft()
                if self.on_refused is None or not self.on_refused(waiting, exc):
                    give_up([waiting], self._on_owed)
                    self.close()
                    if is_refused(exc):
                        raise explained(exc, self._pool()) from exc
                    raise ServerError(refusal(exc, self._pool())) from exc
            except (ValueError, InvalidResponse) as exc:
                self.close()
                raise ServerError(f"no reply of a Redis or Valkey: {exc}; correct the URL") from exc
            except BaseException:
                self.close()
                raise
            else:
                self._heard = time.monotonic()
                (what, on_reply, *_), _, since = self._waiting[0]
                if isinstance(what, ScriptCall):
                    try:
                        result = what.result(reply)  # also if nobody is told: it counts
                    except ServerError:
                        self.close()  # what is owed is said again
                        raise
                    times = self._metrics.scripts[what.script.name]
                    times[0] += 1
                    times[1] += time.monotonic() - since
                    if self.on_announcing is not None and (told := what.announcing(reply)):
                        self.on_announcing(told)
                    reply = result
                self._waiting.popleft()
                if on_reply is not None:
                    on_reply(reply)
            if self._connection is None or not self._waiting:
                return
            try:
                if not self._connection.can_read(timeout=0):
                    return
            except BaseException:
                self.close()
                raise
        # Readable with nothing asked for: the server has closed the connection. What needs one
        # opens the next, or learns that there is none to be had.
        self.close()

    def close(self) -> None:
        """Close the connection; whatever is owed goes to `on_owed`."""
        connection, self._connection = self._connection, None
        self._broke = None
        waiting, self._waiting = self._waiting, deque()
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._on_close(fd)
        if connection is not None:
            connection.disconnect()
        give_up(waiting, self._on_owed)

    def _open(self) -> None:
        pool = self._pool()
        self._patience = pool.connection_kwargs.get("socket_timeout") or SOCKET_TIMEOUT
        arguments = self.arguments(pool.connection_kwargs)
        connection = pool.connection_class(**arguments)
        connection.connect()
        connection.send_command("CLIENT", "ID")
        try:
            self.client_id = connection.read_response()
        except ResponseError as exc:
            connection.disconnect()
            if is_refused(exc):
                raise explained(exc, pool) from exc
            raise
        if arguments.get("socket_timeout") != self._patience:
            connection.socket_timeout = self._patience
            socket_of(connection).settimeout(self._patience)
        self._connection = connection
        self._brought.clear()
        self._fd = socket_of(connection).fileno()
        self._on_open(self._fd, self.read)

    def _resend(self, waiting: Waiting) -> None:
        # The server has forgotten its scripts (a restart, SCRIPT FLUSH): the text goes along.
        call = waiting.item.what
        assert isinstance(call, ScriptCall)  # nothing else is refused for that
        self._waiting.append(waiting)
        connection = self._connection
        try:
            connection.send_packed_command(
                (pack_command(*call.command(whole=True)),), check_health=False
            )
        except BaseException:
            self.close()
            raise


@contextmanager
def _noted() -> Iterator[None]:
    try:
        yield
    except (TocError, redis.exceptions.AuthenticationError):  # it was refused
        raise
    except BROKEN as exc:
        logger.debug("nothing is waited for at the node that has the wake indexes: %s", exc)


class HomeConnection(PipelinedConnection):
    """A connection to the node of a Cluster that has the keys of no single slot. If it breaks, it
    is closed, and no more: the connections to the others, and to this node for what does not
    block, tell when to open it again."""

    send = _noted()(PipelinedConnection.send)
    check = _noted()(PipelinedConnection.check)
    read = _noted()(PipelinedConnection.read)


# -- nodes of a Cluster that could not be reached, and when each is tried again
#
# Nothing here asks a server; times are monotonic seconds.

#: Seconds after which a node is tried again that could not be reached: doubled with each time.
FIRST_REST = 0.5
LONGEST_REST = 10.0

Node = TypeVar("Node")


class RestingNodes(Generic[Node]):
    """Each node that rests, until when, and for how long."""

    def __init__(self) -> None:
        self._resting: dict[Node, tuple[float, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._resting)

    def rests(self, node: Node, now: float) -> bool:
        """Whether nothing is to be sent to it now."""
        return self._resting.get(node, (0.0, 0.0))[0] > now

    def lost(self, node: Node, now: float) -> bool:
        """Note that a node could not be reached, once more. Returns whether that is new."""
        known = self._resting.get(node)
        rest = min(2 * known[1], LONGEST_REST) if known else FIRST_REST
        self._resting[node] = (now + rest, rest)
        return known is None

    def reached(self, node: Node) -> bool:
        """Note that a node can be reached. Returns whether that is new."""
        return self._resting.pop(node, None) is not None

    def keep(self, nodes: Collection[Node]) -> list[Node]:
        """Only these are nodes still. Returns the others that rested: they are forgotten."""
        gone = [node for node in self._resting if node not in nodes]
        for node in gone:
            del self._resting[node]
        return gone


# -- A connection to each node of a Redis Cluster, used as if they were one

#: Seconds after which nothing more is sent to a node that does not answer, until it does.
SLOW = 1.0

#: Seconds between questions to the other nodes whether they have taken over from such a node.
LOOK_AGAIN = 0.5


@dataclass(eq=False)
class ClusterConnections:
    """Connections to the nodes, used as one :class:`PipelinedConnection`. Each call goes to
    the node of its keys.

    If a node cannot be reached, what was sent to it fails, what must run is owed, and the others go
    on. When the node that has the keys of no single slot was away and is back, this breaks once:
    Kombu connects again, and whatever was declared and bound is so again.

    client: knows the nodes
    on_open, on_close, on_owed, metrics: as those of each connection
    """

    _client: ClusterClient
    _on_open: Callable[[int, Callable[[], None]], None]
    _on_close: Callable[[int], None]
    _on_owed: Callable[[list[ScriptCall]], None]
    _metrics: Metrics
    _refuses: Callable[[Waiting, ResponseError], bool] | None = None

    def __post_init__(self) -> None:
        self._connections: dict[Place, PipelinedConnection] = {}
        #: what is to be written into wake indexes
        self._announced: list[Announced] = []
        #: nodes that cannot be reached
        self._resting: RestingNodes[Place] = RestingNodes()
        #: monotonic seconds before which nobody is asked again who has taken over
        self._look_at = 0.0
        #: whether the node that has the keys of no single slot was lost
        self._home_lost = False

    @property
    def busy(self) -> bool:
        """Whether a reply is still to come."""
        return any(connection.busy for connection in self._connections.values())

    @property
    def home_away(self) -> bool:
        """Whether the node that has the keys of no single slot is away, or does not answer."""
        if self._home_lost:
            return True
        connection = self._connections.get(self._client.place_of(None))
        return connection is not None and connection.since < time.monotonic() - SLOW

    def send(self, items: Sequence[tuple[Any, ...]], *, owed: int = 0) -> None:
        """As :meth:`PipelinedConnection.send`.

        Raises redis-py's ConnectionError if no node can be reached, or as said above.
        """
        by_place: dict[Place, tuple[list[Item], list[Item]]] = defaultdict(lambda: ([], []))
        for number, item in enumerate(items):
            made = Item(*item)
            by_place[self._client.place_of(_key(made))][number >= owed].append(made)
        broken: BaseException | None = None
        for place, (must, rest) in by_place.items():
            try:
                self._send_to(place, [*must, *rest], len(must))
            except BROKEN as exc:  # what is for the others is sent, or owed, first
                broken = exc
        if broken is not None:
            raise broken

    def _send_to(self, place: Place, items: list[Item], owed: int) -> None:
        now = time.monotonic()
        connection = self._connections.get(place)
        is_slow = connection is not None and connection.since < now - SLOW
        if is_slow or self._resting.rests(place, now):
            give_up((Waiting(item, n < owed) for n, item in enumerate(items)), self._on_owed)
            return
        if connection is None:
            connection = self._connections[place] = PipelinedConnection(
                lambda: self._client.client_at(place).connection_pool,
                lambda fd, _: self._on_open(fd, partial(self._read, place)),
                self._on_close,
                self._on_owed,
                self._metrics,
                on_refused=self._refused,
                on_announcing=self._announced.append,
                arguments=with_short_timeouts,
            )
        try:
            connection.send(items, owed=owed)
        except BROKEN as exc:
            self._lost(place, exc)
            return
        if self._resting.reached(place):
            logger.info("node %s:%d of the Cluster can be reached again", *place)
        if self._home_lost and place == self._client.place_of(None):
            self._home_lost = False
            raise redis.exceptions.ConnectionError(
                "the node of the Cluster that has the wake indexes is back"
            )

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
            give_up([waiting], self._on_owed)
            return True
        return self._refuses is not None and self._refuses(waiting, exc)

    def _lost(self, place: Place, exc: BaseException) -> None:
        connection = self._connections.pop(place, None)
        if connection is not None:
            connection.close()
        if self._resting.lost(place, time.monotonic()):
            logger.warning(
                "node %s:%d of the Cluster cannot be reached; what is in its slots waits: %s",
                *(*place, exc),
            )
        self._home_lost = self._home_lost or place == self._client.place_of(None)
        # Of nodes that only answer late, none is given up: to connect anew takes the home node.
        if not self._look_again() and not self._connections:
            raise exc

    def _look_again(self) -> bool:
        """Ask which node has which slots; whether any answers."""
        self._look_at = time.monotonic() + LOOK_AGAIN
        try:
            self._client.refresh()
        except BROKEN as exc:
            logger.debug("%s", exc)
            return False
        for place in self._resting.keep(self._client.places()):
            logger.info("others have taken over from node %s:%d of the Cluster", *place)
        return True

    def _read(self, place: Place) -> None:
        connection = self._connections.get(place)
        if connection is None:
            return
        try:
            connection.read()
        except BROKEN as exc:
            self._lost(place, exc)
        finally:
            self._announce()

    def _announce(self) -> None:
        """Write into wake indexes what the scripts have announced whose replies have been read:
        all at once, for the node that has them wakes all workers."""
        commands = write_announcements(self._announced, self._client.claimed)
        self._announced.clear()
        try:
            self.send([(command,) for command in commands])
        except BROKEN as exc:
            # Whoever looks into all slots finds what it is not told of.
            logger.debug("what is due is not announced: %s", exc)

    def check(self) -> None:
        """As :meth:`PipelinedConnection.check`, of each node.

        Also asks now and then whether other nodes have taken over from one that does not answer.
        """
        for place, connection in list(self._connections.items()):
            try:
                connection.check()
            except BROKEN as exc:
                self._lost(place, exc)
        if self._announced:
            self._announce()
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
