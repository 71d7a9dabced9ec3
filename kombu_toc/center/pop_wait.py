"""What a pop that waits has claimed, and what it does next."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from secrets import token_urlsafe
from typing import Any, TypeAlias

import redis
from redis.exceptions import RedisError, ResponseError

from ..client.cluster import is_passing
from ..client.errors import translated
from ..errors import ServerError
from ..model.results import Delivery, Popped
from ..scripts.call import as_bytes, pack_command, text
from .calls import Commands
from .runner import BROKEN, Runner

# -- what a pop that waits has claimed, and what it does next
#
# Nothing here asks a server or reads a clock: times are monotonic seconds, and are handed in. The
# thin part around it is :mod:`.waiting`.

#: A time that was announced, and that who waits has taken from the wake index: topic, slot,
#: microseconds since the epoch by the server's clock.
Claim: TypeAlias = tuple[str, int, int]

#: Seconds between two looks into all slots while nobody keeps the topics up, and while somebody
#: does.
LOOK = 1.0
LOOK_RARELY = 120.0

#: Looks a second, while nobody keeps the topics up, and the seconds between two into one topic
#: because there are many, at most.
LOOKS = 200
LOOK_OF_MANY = 10.0

#: Seconds for which it is taken for granted that somebody still keeps the topics up.
KEPT_UP = 5.0

#: While nobody does, one process looks into a topic for all that wait for it, and two stand next;
#: how many these are. Seconds beyond the next look for which one keeps its place, so that the next
#: one follows before a slot counts as not watched; seconds between two questions of all others.
PLACES = 3
PLACE_KEPT = 0.5
ASK = 5.0

#: Claims of one slot that are held, at most: a slot announces two times at most, so that most of
#: more are out of date.
MAX_CLAIMS = 4


def early_us(ahead_us: int) -> int:
    """How long before the time of a claim its slot is popped, if the pop looks so far ahead: so
    that it brings what may start then in time, and some of what may start after that."""
    return ahead_us // 2


def by_topic(claims: Iterable[Claim]) -> dict[str, list[tuple[int, int]]]:
    """Claims by topic, each as a slot and a time."""
    found: dict[str, list[tuple[int, int]]] = {}
    for topic, slot, us in claims:
        found.setdefault(topic, []).append((slot, us))
    return found


class Wait:
    """The claims of one pop that waits, and its times.

    topics: what it waits for
    until: when it gives up; infinity for never
    """

    def __init__(self, topics: Sequence[str], until: float) -> None:
        self.topics = topics
        self.until = until
        #: claim -> when its slot is to be popped
        self._claims: dict[Claim, float] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def add(self, claim: Claim, at: float) -> list[Claim]:
        """Hold a claim whose slot is to be popped at that time.

        Returns the claims to be handed back because of it.
        """
        same = [other for other in self._claims if other[:2] == claim[:2]]
        if len(same) < MAX_CLAIMS:
            self._claims[claim] = at
            return []
        for other in same:
            del self._claims[other]
        return [*same, claim]

    def due(self, now: float) -> dict[str, set[int]]:
        """The slots to be popped now, by topic. Their claims stay until :meth:`popped`."""
        found: dict[str, set[int]] = {}
        for (topic, slot, _), at in self._claims.items():
            if at <= now:
                found.setdefault(topic, set()).add(slot)
        return found

    def popped(
        self, topic: str, slots: Collection[int] | None, now_us: int, now: float, ahead_us: int = 0
    ) -> None:
        """Slots of a topic were popped (all if None) when the server's clock showed `now_us`, for
        what was due then, or is `ahead_us` later.

        That has settled what they had announced until then. What is still to come is popped when
        it is due by that clock: this is how a claim that was acted on too early waits on.
        """
        for claim in list(self._claims):
            if claim[0] == topic and (slots is None or claim[1] in slots):
                if claim[2] <= now_us + ahead_us:
                    del self._claims[claim]
                else:
                    left_us = claim[2] - now_us - early_us(ahead_us)
                    self._claims[claim] = now + left_us / 1_000_000

    def give_up(self) -> list[Claim]:
        """Hold no claims any more; returns those that others shall have."""
        claims = list(self._claims)
        self._claims.clear()
        return claims

    def next_time(self) -> float:
        """When the next claim is due, or the wait is over."""
        return min((self.until, *self._claims.values()))


class Looks:
    """When those who wait look into all slots of a topic, for what is announced to nobody: what
    came back because a lease has ended, and what a process had claimed that has died.

    All who wait in a process share it: one of them looks. So do the processes, by their places.
    """

    def __init__(self) -> None:
        self.name = token_urlsafe(9)
        #: topic -> its place, from 0, which looks, to PLACES, which is none; until when; when it is
        #: to be asked for again
        self._places: dict[str, tuple[int, float, float]] = {}
        #: topic -> when somebody here looked last
        self._looked: dict[str, float] = {}
        #: seconds between two looks into a topic
        self._pause = LOOK
        self._counted_at = -inf
        self._kept_until = self._asked = -inf

    def due(self, topics: Iterable[str], now: float) -> list[str]:
        """The topics that are to be looked into now."""
        return [topic for topic in topics if now >= self._due_at(topic)]

    def looked(self, topic: str, now: float) -> None:
        """Somebody looks into a topic."""
        self._looked[topic] = now
        if now >= self._counted_at + LOOK:
            self._count(now)

    def _count(self, now: float) -> None:
        """Learn how many topics are looked into; forget those that nobody waits for any more."""
        self._counted_at = now
        number = 0
        for topic, at in list(self._looked.items()):
            number += at > now - 2 * LOOK_OF_MANY
            if at < now - 2 * LOOK_RARELY:
                del self._looked[topic]
                self._places.pop(topic, None)
        self._pause = max(LOOK, min(number / LOOKS, LOOK_OF_MANY))

    def asks(self, now: float) -> bool:
        """Whether it is to be asked, before a look, if somebody keeps the topics up."""
        return now >= self._asked + KEPT_UP

    def asked(self, kept_up: bool, now: float) -> None:
        """It was asked."""
        self._asked = now
        self._kept_until = now + KEPT_UP if kept_up else -inf

    def place(self, topic: str, now: float) -> int:
        """This process's place at a topic; PLACES if it has none."""
        place, until, _ = self._places.get(topic, (PLACES, -inf, -inf))
        return place if now < until else PLACES

    @property
    def place_kept(self) -> float:
        """Seconds for which a place is kept unless it is asked for again."""
        return self._pause + PLACE_KEPT

    def placed(self, topic: str, place: int, now: float) -> None:
        """It was asked for, and is this one."""
        again = (-inf, *[now + self._pause] * (PLACES - 1), now + ASK)[place]
        self._places[topic] = place, now + self.place_kept, again

    def next_time(self, topics: Iterable[str]) -> float:
        """When one of these topics is due."""
        return min(map(self._due_at, topics))

    def _due_at(self, topic: str) -> float:
        looked = self._looked.get(topic, -inf)
        ask = self._places[topic][2] if topic in self._places else -inf
        return max(looked + self._pause, min(looked + LOOK_RARELY, self._kept_until), ask)


class Gathered:
    """What several pops did, as one.

    limit: how many messages they may give together
    """

    def __init__(self, limit: int = 0) -> None:
        self.left = limit
        self.messages: list[Delivery] = []
        self.empty = 0  #: how many of the pops had none
        #: why there are fewer messages than there might be: text -> the error that says so
        self.errors: dict[str, Exception] = {}
        #: the pops that found anything beside messages, and the first
        self._parts: list[Popped] = []
        #: topic -> whether it has more, by the latest pop
        self._more: dict[str, bool] = {}
        self._now_us = 0

    def __bool__(self) -> bool:
        """Whether there are messages."""
        return bool(self.messages)

    def add(self, topic: str, popped: Popped) -> None:
        """A pop of a topic has done this."""
        self.left -= len(popped.messages)
        self.empty += not popped.messages
        self.messages += popped.messages
        self._more[topic] = popped.more
        self._now_us = max(self._now_us, popped.now_us)
        if any(popped[3:]) or not self._parts:
            self._parts.append(popped)

    def result(self, more: bool | None = None, *, merged: bool = False) -> Popped:
        """All of it.

        more: whether more is due, if that does not follow from the latest pops
        merged: whether the messages are of one topic, and in the order of one pop
        """
        if merged:
            self.messages.sort(key=lambda message: (message.step, message.score))
        more = any(self._more.values()) if more is None else more
        kinds = zip(*(part[3:] for part in self._parts), strict=True)
        rest = [[one for some in kind for one in some] for kind in kinds]
        made = Popped(
            self._now_us, more, self.messages, *(rest or [[] for _ in Popped._fields[3:]])
        )
        return made._replace(errors=[*made.errors, *self.errors.values()])

    @contextmanager
    def kept_or_released(
        self, runner: Runner, commands: Commands, recall: Callable[[], Any] | None = None
    ) -> Iterator[None]:
        """If the block raises, give back what was delivered so far: it would be with nobody. What
        cannot be given back comes back when its leases end.

        recall: gets what pops have given whose replies were lost
        """
        try:
            yield
        except BaseException:
            with suppress(RedisError, *BROKEN):
                if recall is not None:
                    recall()
            with suppress(RedisError, *BROKEN):
                runner.run_all(commands.release(self.messages))
            raise


# -- A connection of its own that blocks on wake indexes

logger = logging.getLogger(__name__)

#: Seconds that a reply may take longer than the command blocks, where the client does not say.
PATIENCE = 10.0

#: Attempts to end a wait, and the seconds between two.
MAX_UNBLOCKS = 20
UNBLOCK_AGAIN = 0.0005


class WakeConnection:
    """Takes announcements from wake indexes, one at a time. It never belongs to the client's pool:
    a bounded one may have no other connection.

    client: the center's. Where it has an attribute `wake_connection`, that class takes the place of
        this one
    clustered: whether that is a Cluster's
    """

    def __init__(self, client: Any, clustered: bool) -> None:
        self._center_client = client
        self._clustered = clustered
        #: of the server that has the wake indexes
        self._client: Any = None
        self._connection: Any = None
        self._id: int | None = None
        #: wake index -> topic, of those that are blocked on
        self._topics: dict[bytes, str] = {}
        #: monotonic seconds when the reply is overdue
        self._latest = 0.0
        self._sleep = sleep_of(client)
        self.pid = os.getpid()

    @property
    def busy(self) -> bool:
        """Whether it blocks."""
        return bool(self._topics)

    @property
    def usable(self) -> bool:
        """Whether it is open, and blocks on nothing."""
        return self._connection is not None and not self._topics

    def listen(self, wakes: Mapping[str, str], seconds: float) -> None:
        """Block on these wake indexes, each with its topic, for so many seconds at most. What the
        server gives is of the first that has something."""
        if self._connection is None:
            self._open()
        # Before it is sent: from then on there may be a claim.
        self._topics = {as_bytes(key): topic for key, topic in wakes.items()}
        command = pack_command("BZPOPMIN", *self._topics, f"{seconds:.3f}")
        patience = self._client.connection_pool.connection_kwargs.get("socket_timeout") or PATIENCE
        self._latest = time.monotonic() + seconds + patience
        self._send(command, seconds)

    def readable(self) -> bool:
        """Whether a reply has come, or the end of the connection."""
        try:
            return self._connection is None or self._can_read(0.0)
        except BROKEN:
            self.close()
            return True

    def wait(self, seconds: float) -> bool:
        """Wait for a reply; whether it has come. Raises redis-py's TimeoutError if it is
        overdue."""
        left = self._latest - time.monotonic()
        if self._can_read(max(min(seconds, left), 0.0)):
            return True
        if left <= seconds:
            raise redis.exceptions.TimeoutError("no reply: the connection is taken for broken")
        return False

    def read(self) -> Claim | None:
        """The reply: what was claimed; None if the time has passed without."""
        try:
            reply = self._reply()
        except ResponseError as exc:
            self.close()
            self._moved(exc)
            raise translated(exc, self._client.connection_pool) from exc
        topics, self._topics = self._topics, {}
        if not reply:
            return None
        if self._clustered:
            self._center_client.claimed[text(reply[0]), text(reply[1])] = True
        slot, _, us = reply[1].decode().partition(":")
        return topics[reply[0]], int(slot), int(us)

    def stop(self) -> Claim | None:
        """Block no longer; returns what was claimed just now."""
        if not self._topics:
            return None
        if self._id is None:
            self.close()
            return None
        for _ in range(MAX_UNBLOCKS):
            if self.readable() or self._unblock():
                # It may have broken: then there is nothing to read.
                return None if self._connection is None else self.read()
            self._sleep(UNBLOCK_AGAIN)  # the command that is to be ended has not even arrived
        self.close()
        return None

    def _unblock(self) -> bool:
        """Have the server answer now; whether it was blocking."""
        return bool(self._client.execute_command("CLIENT", "UNBLOCK", self._id))

    def _open(self) -> None:
        client = self._center_client
        self._client = client.client_for() if self._clustered else client
        self._connection = self._connect(self._client.connection_pool)
        self.pid = os.getpid()
        try:
            self._send(pack_command("CLIENT", "ID"), 0.0)
            self._id = self._reply()
        except ResponseError as exc:
            # Not permitted: then it ends a wait by closing the connection. What is claimed in that
            # moment is made up for by whoever looks into all slots next.
            logger.debug("CLIENT ID: %s", exc)
            self._id = None

    def _moved(self, exc: ResponseError) -> None:
        """Raise a ServerError if a node of a Cluster no longer has the indexes, or not all."""
        if self._clustered and (
            self._center_client.apply_redirect(exc) is not None or is_passing(exc)
        ):
            raise ServerError(f"the wake indexes are being moved: {exc}") from exc

    def close(self) -> None:
        """Close it; it opens again when it is used."""
        connection, self._connection = self._connection, None
        self._topics = {}
        if connection is not None:
            self._disconnect(connection)

    # -- the connection itself

    def _connect(self, pool: Any) -> Any:
        connection = pool.connection_class(**pool.connection_kwargs)
        connection.connect()
        return connection

    def _send(self, command: bytes, seconds: float) -> None:
        """Send a command, which may block for so many seconds."""
        self._connection.send_packed_command((command,), check_health=False)

    def _can_read(self, seconds: float) -> bool:
        return bool(self._connection.can_read(timeout=seconds))

    def _reply(self) -> Any:
        return self._connection.read_response()

    def _disconnect(self, connection: Any) -> None:
        connection.disconnect()


def sleep_of(client: Any) -> Callable[[float], None]:
    """What waits for so many seconds, where this client is used."""
    found: Callable[[float], None] = getattr(client, "sleep", time.sleep)
    return found
