"""The client of one server, redis-py's with connections of its own, and that of a Cluster."""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from weakref import WeakValueDictionary

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, MovedError, ResponseError

from ..compat import is_open, open_of
from ..errors import ConfigurationError, ServerError
from ..scripts.call import pack_command, pack_named, patience_for, pieces
from .errors import BROKEN, caused, translated

#: Seconds without use after which a connection may have been closed by the server.
IDLE = 0.05


#: The clients of this process. The child of a fork has them, too.
_clients: WeakValueDictionary[int, Client] = WeakValueDictionary()


class PackingClient(redis.Redis):
    """redis-py's methods, with commands that are packed here.

    A subclass says how packed commands are sent; its replies have errors among them.
    """

    #: how it waits, and who uses it, between two attempts
    sleep: Callable[[float], None] = staticmethod(time.sleep)

    def _replies(self, packed: list[bytes], commands: Sequence[tuple[Any, Any]]) -> list[Any]:
        raise NotImplementedError

    def execute_command(self, *args: Any, **options: Any) -> Any:
        return self.execute_all([(args, options)], True)[0]

    def execute_all(self, commands: Sequence[tuple[Any, Any]], raises: bool) -> list[Any]:
        """Execute commands as redis-py does.

        commands: arguments and redis-py's options of each
        raises: whether the first error is raised; otherwise it takes the place of a reply
        """
        replies = self._replies([pack_named(*args) for args, _ in commands], commands)
        for number, (reply, (args, options)) in enumerate(zip(replies, commands, strict=True)):
            if not isinstance(reply, Exception):
                replies[number] = self.parse_response(_Reply(reply), args[0], **options)
            elif raises:
                raise reply
        return replies

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Pipeline:
        """A pipeline without a transaction: what lies on several nodes has none."""
        if transaction:
            raise ConfigurationError("the center's clients have no transactions: transaction=False")
        made = Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)
        made.run = self.execute_all
        return made


class Client(PackingClient):
    """redis-py's client. A reply that a server cannot run a command for now is raised as a
    ServerError, which is a ConnectionError: callers retry as after a lost connection."""

    def __init__(self, connection_pool: redis.ConnectionPool) -> None:
        super().__init__(connection_pool=connection_pool)
        self.thread = threading.get_native_id()
        #: its own idle connections, and the monotonic seconds when each was last used
        self._idle: deque[tuple[Any, float]] = deque()
        # A pool with a bound counts its connections, and new credentials reach only the pool's.
        pooled = isinstance(connection_pool, redis.BlockingConnectionPool)
        provider = connection_pool.connection_kwargs.get("credential_provider")
        self._keeps_connections = not pooled and provider is None
        if self._keeps_connections:
            _clients[id(self)] = self

    @property
    def run_packed(self) -> Callable[[Sequence[bytes]], list[Any]] | None:
        """Sends packed commands and returns their replies; for a command that is refused, the
        error. None if every connection must come from the pool.

        For frequent commands: it saves the work of redis-py's pool and of its execute_command. A
        loop of center.put takes 31 us of processor time for a message; over redis-py's own, 65
        (25 and 50 with hiredis). A loop of Celery's apply_async, with all that Celery does, takes
        311 and 359 (302 and 368). Measured with Python 3.11 and redis-py 8.1, alternating.
        """
        return self._replies if self._keeps_connections else None

    @contextmanager
    def sending(self, commands: Sequence[bytes]) -> Iterator[Callable[[int], list[Any]]]:
        """As :attr:`run_packed`, in two steps: yields a function that reads that many replies."""
        connection = self._connection()
        packed = b"".join(commands)

        def read(number: int) -> list[Any]:
            if more := patience_for(len(packed)):
                connection.can_read(timeout=more)
            replies: list[Any] = []
            for _ in range(number):
                try:
                    replies.append(connection.read_response())
                except ResponseError as exc:
                    replies.append(translated(exc, self.connection_pool))
            return replies

        try:
            connection.send_packed_command(pieces(packed))
            yield read
        except BaseException as exc:
            connection.disconnect()  # replies may still arrive
            if isinstance(exc, ValueError):  # redis-py cannot read it
                raise ServerError(f"no reply of a Redis or Valkey: {exc}; correct the URL") from exc
            if isinstance(exc, ResponseError):  # the server refused the login
                raise translated(exc, self.connection_pool)  # noqa: B904 - as below
            raise
        finally:
            self._idle.append((connection, time.monotonic()))

    def _connection(self) -> Any:
        """A connection that only this thread uses until it is put back."""
        while self._idle:
            try:
                connection, used = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if connection.pid != os.getpid():  # it is the parent process's
                continue
            if time.monotonic() > used + IDLE:
                _disconnect_if_broken(connection)
            return connection
        pool = self.connection_pool
        return pool.connection_class(**pool.connection_kwargs)

    def take_open(self) -> Any:
        """An open idle connection, or None; the server is not asked."""
        while self._idle:
            try:
                connection, _ = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if connection.pid == os.getpid() and is_open(connection):
                return connection
        return open_of(self.connection_pool)

    def drop_idle(self, seconds: float = 0.0) -> None:
        """Close the connections that have been idle for this long. A fault that broke another one
        may have broken them, or they are no longer needed."""
        latest = time.monotonic() - seconds
        with suppress(IndexError):  # another thread was faster
            while self._idle[0][1] <= latest:
                self._idle.popleft()[0].disconnect()

    def close(self) -> None:
        """Close its connections; they open again when they are needed."""
        self.drop_idle()
        super().close()

    def _replies(self, packed: Sequence[bytes], commands: Any = ()) -> list[Any]:
        with self.sending(packed) as read:
            return read(len(packed))

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if self._keeps_connections:
            return super().execute_command(*args, **options)
        try:
            return redis.Redis.execute_command(self, *args, **options)
        except ResponseError as exc:
            raise translated(exc, self.connection_pool)  # noqa: B904 - it has its cause already, if it is another

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Pipeline:
        made = super().pipeline(transaction, shard_hint)
        if not self._keeps_connections:
            made.run = None
        return made


def pipelined(
    client: Any, commands: Iterable[tuple[Any, ...]], *, raises: bool = True
) -> list[Any]:
    """The replies to commands that are sent together, to each node of a Cluster its own.

    raises: the first error; else errors are among the replies
    """
    with client.pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        replies: list[Any] = pipe.execute(raise_on_error=raises)
    return replies


def close_idle(seconds: float, thread: int | None = None) -> None:
    """Close the connections of this process that have been idle for this long.

    thread: native id; only connections of clients that were made in this thread. Where sockets
        belong to an event loop, no other thread may close them.
    """
    # A copy of the references is made at once, whatever other threads add meanwhile.
    for client in [found() for found in _clients.valuerefs()]:
        if client is not None and thread in (None, client.thread):
            client.drop_idle(seconds)


def _disconnect_if_broken(connection: Any) -> None:
    """Close a connection that the server has closed; it reconnects when something is sent."""
    try:
        broken = connection.can_read(timeout=0)
    except (redis.ConnectionError, redis.TimeoutError, OSError):
        broken = True
    if broken:
        connection.disconnect()


class _Reply:
    """A reply that was read, for redis-py's parsers, which read from a connection."""

    def __init__(self, reply: Any) -> None:
        self._reply = reply

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        return self._reply


class Pipeline(redis.client.Pipeline):
    """redis-py's pipeline, with the errors of :class:`Client`."""

    #: executes the commands instead of redis-py
    run: Callable[[Sequence[tuple[Any, Any]], bool], list[Any]] | None = None

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        if self.run is not None:
            stack, self.command_stack = self.command_stack, []
            return self.run(stack, raise_on_error) if stack else []
        try:
            return [translated(r, self.connection_pool) for r in super().execute(raise_on_error)]
        except ResponseError as exc:
            raise translated(exc, self.connection_pool)  # noqa: B904 - as above


# -- the clients of all nodes of a Cluster

logger = logging.getLogger(__name__)

#: Of its own: a program that seeds Python's has its own numbers.
_random = random.Random()

#: Where a server is: host and port.
Place = tuple[str, int]

#: The hash slot of ``{toc}``.
HOME = key_slot(b"toc")

#: Seconds for which a command is repeated while its hash slot moves or changes its node, unless its
#: client has less patience, and the seconds between two attempts.
PATIENCE = 5.0
PAUSE = 0.02

#: Seconds that a node may take to accept a connection, and to list the hash slots.
SHORT_TIMEOUT = 1.0

#: Redirections of a command before they count as an error.
MAX_MOVES = 8

#: Seconds from which on a node may have stood still before it answered, and been replaced.
STOOD_STILL = 1.0

#: Seconds for which a list of hash slots is not asked for again.
FRESH = 0.1

#: Seconds for which a node that did not list the hash slots is asked last.
ASK_LAST = 10.0

# redis-py 6 and later strip the first word of these errors: then the class has that information.
_MOVED = re.compile(r"(?:\b(MOVED|ASK) |^)(\d+) (\S*):(\d+)")
_PASSING = re.compile(
    r"\bTRYAGAIN\b|rehashing of slot|\bCLUSTERDOWN\b|cluster is down|slot not served", re.I
)

#: Commands whose first key is not their first argument: the index of the one that is, or the
#: name of the argument that comes before it.
_KEY_AT: dict[str, int | str] = {"EVAL": 3, "EVALSHA": 3, "XREAD": "STREAMS", "OBJECT": 2}

#: Commands without a key.
_KEYLESS = {
    *("PING", "TIME", "INFO", "CONFIG GET", "CONFIG", "CLIENT", "CLIENT LIST", "CLIENT ID"),
    *("CLIENT UNBLOCK", "CLIENT INFO", "ACL", "ACL WHOAMI", "SCRIPT FLUSH", "SCRIPT", "WAIT"),
    *("COMMAND", "SLOWLOG", "MEMORY STATS", "DBSIZE", "CLUSTER SLOTS", "CLUSTER INFO"),
}


def key_of(*command: Any) -> str | bytes | None:
    """The first key that a command names; None if it names none."""
    name = str(command[0]).upper()
    if name in _KEYLESS:
        return None
    at = _KEY_AT.get(name, 1)
    if isinstance(at, str):
        at = [str(part).upper() for part in command].index(at) + 1
    if name in ("EVAL", "EVALSHA") and int(command[2]) == 0:
        return None
    key: str | bytes = command[at]
    return key


def hash_slot(key: str | bytes) -> int:
    return key_slot(key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key)


def with_short_timeouts(arguments: dict[str, Any]) -> dict[str, Any]:
    """A connection's arguments, with timeouts that detect a hanging node soon: there are others."""
    return {
        **arguments,
        **dict.fromkeys(("socket_timeout", "socket_connect_timeout"), SHORT_TIMEOUT),
    }


def _redirection(exc: BaseException) -> re.Match[str] | None:
    match = _MOVED.search(str(exc))
    return match if match and (match[1] or isinstance(exc, AskError)) else None


def is_redirection(exc: BaseException) -> bool:
    """Whether an error reply says that another node has the key."""
    return _redirection(exc) is not None


def is_passing(exc: BaseException) -> bool:
    """Whether an error will be over in moments: a node has only some of a command's keys while a
    hash slot moves, or a replica is about to take over from its primary."""
    return _PASSING.search(str(exc)) is not None


def _unsettled(exc: Exception) -> Exception:
    """An error that is given up on; where a slot is still not where it is going, a ServerError:
    then it counts as a lost connection, and whoever sent the command tries again."""
    if isinstance(exc, BROKEN) or not (is_redirection(exc) or is_passing(exc)):
        return exc
    text = f"a hash slot of the Cluster is being moved, and has not arrived: {exc}"
    return caused(ServerError(text), exc)


class NotSentError(redis.exceptions.ConnectionError):
    """No connection could be opened: nothing was sent."""


class ClusterClient(PackingClient):
    """As :class:`kombu_toc.client.connection.Client`, for the nodes of a Cluster.

    places: one or more nodes; the rest are discovered
    make_client: makes the client of one node; sends nothing yet

    Raises the errors of the nodes' clients, and ServerError if no node lists the hash slots.
    """

    #: seconds for which a command is repeated while its hash slot moves or changes its node
    patience = PATIENCE

    def __init__(self, places: Sequence[Place], make_client: Callable[[Place], Client]) -> None:
        self._make_client = make_client
        self._seeds = list(places)
        self._clients: dict[Place, Client] = {}
        self._lock = threading.RLock()
        #: hash slot -> its node; None before a node was asked
        self._owners: list[Place | None] | None = None
        self._nodes: list[Place] = []
        #: node that did not answer -> monotonic seconds until which the others are asked first
        self._unreachable: dict[Place, float] = {}
        self._asked = 0.0
        #: wake index and announcement of those that were claimed here, and are not there any more
        self.claimed: dict[tuple[str, str], bool] = {}
        # The pool is not used for connections; redis-py reads the encoding of replies from it.
        super().__init__(connection_pool=self.client_at(self._seeds[0]).connection_pool)

    # -- nodes

    def client_at(self, place: Place) -> Client:
        """The client of one node."""
        found = self._clients.get(place)
        return found or self._clients.setdefault(place, self._make_client(place))

    def place_of(self, key: str | bytes | None) -> Place:
        """The node that has a key; without a key, the node that has the tag ``{toc}``."""
        slot = HOME if key is None else hash_slot(key)
        place = (self._owners or self._slots())[slot]
        if place is None:
            raise ServerError(f"no node of the Cluster has hash slot {slot}")
        return place

    def client_for(self, key: str | bytes | None = None) -> Client:
        return self.client_at(self.place_of(key))

    def places(self) -> list[Place]:
        """The nodes that have hash slots."""
        return [place for place in dict.fromkeys(self._owners or self._slots()) if place]

    def _slots(self) -> list[Place | None]:
        while self._owners is None:
            self.refresh()
        return self._owners

    def primaries(self) -> list[Client]:
        """The clients of the nodes that have hash slots."""
        return [self.client_at(place) for place in self.places()]

    def refresh(self) -> None:
        """Ask the nodes which of them has which hash slot.

        Raises ServerError if no node answers.
        """
        asked = time.monotonic()
        with self._lock:
            if self._owners is not None and self._asked > asked - FRESH:
                return
            places = list(dict.fromkeys((*self._nodes, *self._seeds)))
            _random.shuffle(places)
            places.sort(key=lambda place: self._unreachable.get(place, 0.0) > asked)
            errors = []
            for place in places:
                try:
                    found = self._slots_by(place)
                except BROKEN as exc:
                    self._unreachable[place] = time.monotonic() + ASK_LAST
                    errors.append(f"{_text(place)}: {exc}")
                    continue
                except ResponseError as exc:
                    if "cluster support disabled" in str(exc):
                        raise ServerError(
                            f"{_text(place)} does not run in cluster mode; use toc+redis:// for "
                            "a server of its own"
                        ) from exc
                    raise
                if not found:
                    errors.append(f"{_text(place)}: knows of no hash slots")
                    continue
                self._learn(found, place)
                self._asked = time.monotonic()
                return
        raise ServerError(f"no node of the Cluster can be reached: {'; '.join(errors)}")

    def answers(self, place: Place) -> bool:
        """Whether a node answers within a short timeout."""
        try:
            self._slots_by(place)
        except BROKEN as exc:
            self._unreachable[place] = time.monotonic() + ASK_LAST
            self._refresh_after(exc)  # perhaps another node has taken over
            return False
        return True

    def _slots_by(self, place: Place) -> list[Any]:
        """The hash slots as one node lists them, within a short timeout."""
        pool = self.client_at(place).connection_pool
        connection = pool.connection_class(**with_short_timeouts(pool.connection_kwargs))
        try:
            connection.connect()
            connection.send_command("CLUSTER", "SLOTS")
            found: list[Any] = connection.read_response()
            return found
        finally:
            connection.disconnect()

    def _learn(self, found: list[Any], asked: Place) -> None:
        where: list[Place | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        nodes: dict[Place, None] = {}
        for first, last, *owners in found:
            # A node that does not know its own address leaves it out.
            places = [(_host(host) or asked[0], port) for host, port, *_ in owners]
            where[first : last + 1] = [places[0]] * (last + 1 - first)
            nodes.update(dict.fromkeys(places))
        self._nodes = list(nodes)
        self._owners = where
        for place in set(self._clients) - set(nodes) - set(self._seeds):
            self._clients.pop(place).close()

    def apply_redirect(self, exc: BaseException) -> tuple[Place, bool] | None:
        """The node that a redirection names, and whether it holds for one command only (ASK); None
        if the error is no redirection."""
        match = _redirection(exc)
        if match is None:
            return None
        place = (match[3].strip("[]") or self.place_of(None)[0], int(match[4]))
        if match[1] == "ASK" or not (match[1] or isinstance(exc, MovedError)):
            return place, True
        with self._lock:
            if self._owners is not None:
                self._owners[int(match[2])] = place
        return place, False

    # -- commands

    def _replies(self, packed: list[bytes], commands: Sequence[tuple[Any, Any]]) -> list[Any]:
        # Idempotent ones: each is repeated if its node cannot be reached and another has taken over
        # the key.
        keyed = [(key_of(*args), one) for one, (args, _) in zip(packed, commands, strict=True)]
        return self.run_keyed(keyed, again=True)[0]

    def _refresh_after(self, exc: BaseException) -> None:
        try:
            self.refresh()
        except BROKEN as other:
            logger.debug("%s, after: %s", other, exc)

    def run_keyed(
        self,
        commands: Sequence[tuple[str | bytes | None, bytes]],
        wait: tuple[Any, ...] = (),
        *,
        again: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """Send packed commands to the nodes that have their keys; the nodes work in parallel.

        commands: a key and the packed command of each
        wait: a command that each node gets after the others, on the same connection
        again: what may have run is sent again, if another node has taken over its key

        Returns the reply to each command, and its node's reply to `wait`. The reply to a command
        that was refused, or whose node cannot be reached, is the error; it may have run.
        """
        replies: list[Any] = [None] * len(commands)
        waited: list[Any] = [None] * len(commands)
        last = pack_command(*wait) if wait else b""
        deadline = time.monotonic() + self.patience
        left: dict[int, tuple[Place, bool] | None] = dict.fromkeys(range(len(commands)))
        moves = 0
        while left:
            by_place: dict[Place, list[tuple[int, bool]]] = defaultdict(list)
            for number, heard in left.items():
                try:
                    place, asking = heard or (self.place_of(commands[number][0]), False)
                except BROKEN as exc:  # the others may have run, or will
                    replies[number] = waited[number] = exc
                else:
                    by_place[place].append((number, asking))
            left = {}
            unsent: dict[int, Place] = {}
            slow = broken = False
            for place, some, found, sent in self._exchange(commands, by_place, last):
                for number, reply in zip(some, found, strict=False):
                    replies[number] = reply
                    if wait:
                        waited[number] = found[-1]
                    if not isinstance(reply, (ResponseError, *BROKEN)):
                        continue
                    broken = broken or isinstance(reply, BROKEN)
                    heard = self.apply_redirect(reply)
                    if heard is not None and moves < MAX_MOVES:
                        left[number] = heard
                    elif is_passing(reply) and time.monotonic() < deadline:
                        left[number] = None
                        slow = True
                    elif isinstance(reply, BROKEN) and (again or not sent) and moves < MAX_MOVES:
                        unsent[number] = place
                    else:
                        replies[number] = _unsettled(reply)
            if broken:
                self._refresh_after(ServerError("a node cannot be reached"))
                # Perhaps another node has taken over.
                with suppress(*BROKEN):
                    left.update(
                        (number, None)
                        for number, place in unsent.items()
                        if self.place_of(commands[number][0]) != place
                    )
            if slow:
                self.sleep(PAUSE)  # the Cluster is about to settle it
            # After a pause, redirections are counted from the start.
            moves = 0 if slow else moves + 1
        return replies, waited

    def _exchange(
        self,
        commands: Sequence[tuple[str | bytes | None, bytes]],
        by_place: dict[Place, list[tuple[int, bool]]],
        last: bytes,
    ) -> Iterator[tuple[Place, list[int], list[Any], bool]]:
        """Send to all nodes, then read from all. Yields the node, the numbers of its commands,
        their replies, and whether they were sent at all."""
        sent = []
        began = time.monotonic()
        with ExitStack() as stack:
            for place, some in by_place.items():
                numbers = [number for number, _ in some]
                parts: list[bytes] = []
                for number, asking in some:
                    if asking:
                        parts.append(_ASKING)
                    parts.append(commands[number][1])
                if last:
                    parts.append(last)
                client = self.client_at(place)
                try:
                    read = stack.enter_context(client.sending(parts))
                except BROKEN as exc:
                    yield place, numbers, [exc] * (len(numbers) + bool(last)), False
                else:
                    sent.append((place, some, numbers, len(parts), read))
            for place, some, numbers, count, read in sent:
                try:
                    raw = iter(read(count))
                except BROKEN as exc:
                    failed = [exc] * (len(numbers) + bool(last))
                    yield place, numbers, failed, not isinstance(exc, NotSentError)
                    continue
                found = []
                for _, asking in some:
                    if asking:
                        next(raw)
                    found.append(next(raw))
                if not last and time.monotonic() - began > STOOD_STILL:
                    # While its hash slot moves, a key is with a node that has not the slot yet.
                    keys = [None if asking else commands[number][0] for number, asking in some]
                    found = self._without_lost(place, keys, found)
                yield place, numbers, [*found, *raw], True

    def _without_lost(
        self, place: Place, keys: Sequence[str | bytes | None], replies: list[Any]
    ) -> list[Any]:
        """The replies of a node that took long, with an error for each key that another node has
        by now: a primary that stood still executes what has come before it learns that it was
        replaced, and discards that then."""
        self._unreachable[place] = time.monotonic() + ASK_LAST  # what it says itself does not count
        gone = ServerError(
            f"{_text(place)} took long to answer, and another node has its hash slots by now"
        )
        self._refresh_after(gone)
        owners = self._slots()
        return [
            reply
            if key is None or isinstance(reply, Exception) or owners[hash_slot(key)] == place
            else gone
            for key, reply in zip(keys, replies, strict=True)
        ]

    def scan_iter(self, *args: Any, **options: Any) -> Iterator[Any]:
        """The keys of all nodes."""
        for client in self.primaries():
            yield from client.scan_iter(*args, **options)

    def drop_idle(self) -> None:
        """As :meth:`Client.drop_idle`, for all nodes."""
        for client in list(self._clients.values()):
            client.drop_idle()

    def close(self) -> None:
        """Close the connections to all nodes; they open again when they are needed."""
        for client in list(self._clients.values()):
            client.close()
            client.connection_pool.disconnect()


_ASKING = pack_command("ASKING")


def _host(host: Any) -> str:
    host = host.decode() if isinstance(host, bytes) else str(host or "")
    return "" if host == "?" else host


def _text(place: Place) -> str:
    return f"{place[0]}:{place[1]}"
