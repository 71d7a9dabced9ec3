"""Pops that wait: they block on the wake indexes of their topics until something is due.

:class:`Wait` decides; what stands below it asks the server. A pop that waits does as an idle worker
does. It takes an announcement from a wake index, which nobody else has then, and pops the slot when
the announced time has come. What it has taken and does not need, it announces again.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import InitVar, dataclass
from functools import partial
from itertools import count
from math import inf
from secrets import token_urlsafe
from typing import Any, TypeAlias

import redis
from redis.exceptions import AuthenticationError, AuthorizationError, RedisError, ResponseError

from ..client.connection import is_passing
from ..client.errors import is_temporary, translated
from ..errors import ConfigurationError, NotPermittedError, ServerError
from ..model.results import Delivery, Popped
from ..model.topic import Topic
from ..scripts.call import FreeNames, Names, as_bytes, pack_command, text
from .calls import Choice, Commands, divide_evenly
from .clock import ServerClock
from .core import Core
from .runner import BROKEN, Runner

# -- what a pop that waits has claimed, and what it does next
#
# Nothing here asks a server or reads a clock: times are monotonic seconds, and are handed in. The
# thin part around it is below.

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
    claims_of: dict[str, list[tuple[int, int]]] = {}
    for topic, slot, us in claims:
        claims_of.setdefault(topic, []).append((slot, us))
    return claims_of


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
        slots: dict[str, set[int]] = {}
        for (topic, slot, _), at in self._claims.items():
            if at <= now:
                slots.setdefault(topic, set()).add(slot)
        return slots

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
        """It was asked whether somebody keeps the topics up."""
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
        """A place was asked for, and is this one."""
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
        #: of messages that are chosen: whether more is due, and whether there was a pop of nothing
        self.more = self.began = False
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


logger = logging.getLogger(__name__)

#: Seconds between two attempts to reach the server: at first, and at most.
FIRST_PAUSE = 0.05
MOST_PAUSE = 1.0

#: Seconds for which a blocking command waits at the server before it is sent again. (What keeps
#: track of connections on the way, and a server's own timeout, may forget one after half a minute.)
BLOCK = 20.0

#: Seconds of a tick: what waits for a socket wakes at the next one.
TICK = 0.001

#: Connections that wait for nothing just now and are kept, at most; seconds for which they are.
KEEP = 8
KEEP_FOR = 30.0

#: Milliseconds for which a place at a topic is kept, at most.
LONGEST = round(1000 * (LOOK_OF_MANY + PLACE_KEPT))

#: Pops a topic at once; remembers the names of its calls.
Pop = Callable[[str, "Choice", "Flown"], Popped]


class Flown(dict[str, tuple[Topic, Sequence[int]]]):
    """The pops of one that waits whose replies have not come, by their names: so the messages can
    be had although a reply is lost. names: makes them"""

    names: Names

    def name(self, topic: Topic, numbers: Sequence[int]) -> str:
        """The name of a call that pops these slots."""
        name = self.names.next()
        self[name] = topic, numbers
        return name


class Waiting:
    """What the waiting pops of one center share."""

    def __init__(self, core: Core) -> None:
        self.runner, self.registry = core.runner, core.registry
        self.commands, self.keys = core.commands, core.context.keys
        self.looks = Looks()
        #: turns: another topic comes first each time
        self.pops, self.listens = count(), count()
        #: connections that wait for nothing, and the monotonic seconds when each was last used
        self._idle: deque[tuple[WakeConnection, float]] = deque()
        #: names for the pops of those who will wait: a server remembers the latest pop of each
        self._names = FreeNames()

    def pop(self, pop: Pop, topics: Any, wait: float | None, choice: Choice) -> Popped:
        """Pop messages of several topics, or wait for them.

        pop: pops a topic at once
        topics, wait: see :meth:`.pop.Deliveries.pop`
        """
        names = names_of(topics)
        seconds = seconds_of(wait, "wait")
        if choice.slots is not None:
            raise ConfigurationError(
                "a pop of some slots neither waits nor is for several topics: what is announced is "
                "announced for all slots of a topic; leave out slots"
            )
        if choice.chooses:
            raise ConfigurationError(
                "a pop that chooses messages (ids, where, early) neither waits nor is for several "
                "topics; name one topic, and leave out wait"
            )
        limit = 1 if choice.limit is None else choice.limit
        if limit < 1:
            raise ConfigurationError(f"a pop that waits needs a limit of at least 1, not {limit}")
        flown = Flown()
        flown.names = self._names.take()
        try:
            return _Pop(self, pop, names, limit, seconds, choice, flown).run()
        finally:
            self._names.give(flown.names)

    # -- connections

    def take_connection(self) -> WakeConnection:
        """A connection that waits for nothing; it connects when it is used."""
        now, pid = time.monotonic(), os.getpid()
        while self._idle:
            try:
                connection, used = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if connection.pid == pid and used > now - KEEP_FOR and not connection.readable():
                return connection
            connection.close()
        make: type[WakeConnection]
        make = getattr(self.runner.client, "wake_connection", WakeConnection)
        return make(self.runner.client, self.runner.clustered)

    def give_back(self, connection: WakeConnection) -> None:
        """The connection is needed no more."""
        if connection.usable and len(self._idle) < KEEP:
            self._idle.append((connection, time.monotonic()))
        else:
            connection.close()


@dataclass(eq=False)
class _Pop:
    """One pop that waits, or is for several topics."""

    _shared: Waiting
    _pop: Pop
    _topics: list[str]
    limit: InitVar[int]
    seconds: InitVar[float]
    _choice: Choice
    _flown: Flown

    def __post_init__(self, limit: int, seconds: float) -> None:
        self._wait = Wait(self._topics, time.monotonic() + seconds)
        self._waits = seconds > 0
        self._found = Gathered(limit)
        self._clock = ServerClock()
        self._sleep = sleep_of(self._shared.runner.client)
        self._connection: WakeConnection | None = None
        #: whether all topics are to be looked into, whoever has done so before
        self._anew = True
        #: seconds until the next attempt, while the server cannot be reached
        self._pause = 0.0

    def run(self) -> Popped:
        runner, commands = self._shared.runner, self._shared.commands
        with self._found.kept_or_released(runner, commands, self._recall):
            try:
                return self._gather()
            finally:
                self._leave()

    def _gather(self) -> Popped:
        while True:
            try:
                if self._turn():
                    return self._found.result()
                self._pause = 0.0
            except (RedisError, *BROKEN) as exc:
                if self._found:
                    # Nobody else has it; whoever pops next meets the error, if it lasts.
                    self._warn_of(exc)
                    with suppress(RedisError, *BROKEN):
                        self._recall()
                    return self._found.result()
                self._survive(exc)

    def _turn(self) -> bool:
        """Pop what is due, or wait until something may be; whether this is the end."""
        now, wait = time.monotonic(), self._wait
        if self._flown and self._recall():
            return True
        if looks := self._looks(now):
            self._anew = False
            self._pop_several(dict.fromkeys(looks))
        elif due := wait.due(now):
            self._pop_several({topic: due[topic] for topic in self._topics if topic in due})
        if self._found or not self._waits or now >= wait.until:
            return True
        self._listen()
        return False

    def _looks(self, now: float) -> list[str]:
        """The topics to look into."""
        looks = self._shared.looks
        if self._anew:
            return self._topics
        topics = looks.due(self._topics, now)
        if topics and looks.asks(now):
            runner, key = self._shared.runner, self._shared.keys.upkeep
            exists = partial(runner.client.exists, key)
            looks.asked(bool(runner.at_home(key, exists, lambda _: False)), now)
            topics = looks.due(self._topics, now)
        for topic in topics:  # before the server is asked: threads share the looks
            looks.looked(topic, now)
        return [topic for topic in topics if self._looks_for_all(topic, now)]

    def _looks_for_all(self, topic: str, now: float) -> bool:
        """Whether this process looks into a topic for all that wait there. Without a place it asks
        for the last one, and with one for those before it."""
        looks = self._shared.looks
        place = looks.place(topic, now)
        if place == PLACES and self._takes(topic, PLACES - 1):
            place = PLACES - 1
        if place < PLACES:
            better = (other for other in range(place) if self._takes(topic, other))
            place = next(better, place)
            if place == looks.place(topic, now):
                self._takes(topic, place, again=True)
        looks.placed(topic, place, now)
        return place == 0

    def _takes(self, topic: str, place: int, again: bool = False) -> bool:
        """Take a place at a topic unless another process has it; whether it is this one's now."""
        key, looks = self._shared.keys.look(topic, place), self._shared.looks
        kept, runner = round(1000 * looks.place_kept), self._shared.runner
        take = partial(runner.client.set, key, looks.name, px=kept)

        def ask() -> Any:
            # The server's clock was set back if a place lasts longer than one can: who had it may
            # be dead.
            return take(nx=not again) or (runner.client.pttl(key) > LONGEST and take())

        try:
            return bool(runner.at_home(key, ask, lambda _: True))
        except ResponseError as exc:  # not permitted, or the memory is full: it looks by itself
            logger.debug("SET %s: %s", key, exc)
            return True

    def _pop_several(self, slots: dict[str, set[int] | None]) -> None:
        """Pop these slots of these topics (all if None), for as many messages as are wanted.

        A topic with a backlog takes nothing from another. The first gets more where a number cannot
        be divided: so it is another one each time.
        """
        found, rest = self._found, _rotated(list(slots), next(self._shared.pops))
        while rest and found.left > 0:
            shares = divide_evenly(found.left, range(len(rest)))
            asked, rest = [(rest[at], limit) for at, limit in shares], rest[len(shares) :]
            rest += [topic for topic, limit in asked if self._pop_topic(topic, slots[topic], limit)]

    def _pop_topic(self, topic: str, slots: set[int] | None, limit: int) -> bool:
        """Pop slots of a topic; whether it has more."""
        choice = self._choice._replace(limit=limit)
        if slots is None:
            self._shared.looks.looked(topic, time.monotonic())
        else:
            declared = self._shared.registry.topic(topic)
            if max(slots) >= declared.slot_span:
                # Announced by somebody who knows of a newer declaration, or of an older one.
                declared = self._shared.registry.reach(topic, max(slots)) or declared
            choice = choice._replace(slots=slots, recover=0)
        popped = self._pop(topic, choice, self._flown)
        if popped.errors:  # only the calls of these have not landed
            with suppress(RedisError, *BROKEN):
                self._recall()
        self._flown.clear()
        now = time.monotonic()
        self._found.add(topic, popped)
        if slots is not None or not self._shared.runner.clustered:
            self._clock.sample(popped.now_us, now)
            self._wait.popped(topic, slots, popped.now_us, now, self._ahead_us(topic))
        return popped.more and bool(popped.messages)

    def _recall(self) -> bool:
        """Get what pops have given whose replies were lost; whether that is anything."""
        shared, visibility = self._shared, self._choice.visibility
        for name, (topic, numbers) in reversed(list(self._flown.items())):
            call = shared.commands.recall(topic, numbers, name, visibility=visibility)
            self._found.add(topic.name, shared.runner.run(call))
            del self._flown[name]
        return bool(self._found)

    # -- claims

    def _listen(self) -> None:
        """Wait until something is announced, or is to be done."""
        connection = self._connection
        if connection is None:
            connection = self._connection = self._shared.take_connection()
        if not connection.busy:
            topics = _rotated(self._topics, next(self._shared.listens))
            wakes = {self._shared.keys.wake(name): name for name in topics}
            listen = partial(connection.listen, wakes, BLOCK)
            self._shared.runner.at_home(self._shared.keys.upkeep, listen, self._do_without)
        until = min(self._wait.next_time(), self._shared.looks.next_time(self._topics))
        left = until - time.monotonic()
        if not connection.busy:
            self._anew = True
            self._sleep(max(min(left, MOST_PAUSE), TICK))
        elif left < TICK:
            self._sleep(max(left, 0.0))
        elif connection.wait(left - TICK):
            claim = connection.read()
            if claim is not None:
                self._claim(claim)

    def _do_without(self, error: Exception) -> None:
        """The node of a Cluster that has the wake indexes is away: what is due on the others is
        found by looking there."""
        if self._connection is not None:
            self._connection.close()
        if not passes(error):
            raise error

    def _claim(self, claim: Claim) -> None:
        now = time.monotonic()
        # Of a clock that is not known, the pop will tell.
        if self._clock.known:
            us = claim[2] - early_us(self._ahead_us(claim[0]))
            at = now + self._clock.until(us, now)
        else:
            at = now
        self._hand_back(self._wait.add(claim, at))

    def _ahead_us(self, topic: str) -> int:
        """Microseconds by which a pop of a topic looks ahead."""
        ahead_us = self._choice.ahead_us
        if ahead_us and self._shared.registry.topic(topic).declaration.paced:
            return ahead_us
        return 0

    def _hand_back(self, claims: Iterable[Claim]) -> None:
        """Announce these again: somebody else shall have them."""
        registry, commands = self._shared.registry, self._shared.commands
        calls = [
            call
            for topic, pairs in by_topic(claims).items()
            for call in commands.reannounce(registry.topic(topic), pairs)
        ]
        if calls:
            self._shared.runner.run_all(calls)

    def _leave(self) -> None:
        """Keep no claim."""
        claims = self._wait.give_up()
        connection, self._connection = self._connection, None
        try:
            if connection is not None:
                claims += self._stop(connection)
            self._hand_back(claims)
        except (RedisError, *BROKEN) as exc:
            # Whoever looks into all slots next makes up for it.
            logger.debug("what was claimed is not handed back: %s", exc)

    def _stop(self, connection: WakeConnection) -> list[Claim]:
        """Listen no more; returns what was claimed just now."""
        claim = None
        try:
            runner, key = self._shared.runner, self._shared.keys.upkeep
            claim = runner.at_home(key, connection.stop, lambda _: connection.close())
        except (RedisError, *BROKEN) as exc:
            connection.close()
            logger.debug("a wait is ended with its connection: %s", exc)
        except BaseException:
            connection.close()
            raise
        self._shared.give_back(connection)
        return [] if claim is None else [claim]

    # -- faults

    def _survive(self, exc: Exception) -> None:
        """Go on after an error that passes, a moment later. Raises it if it does not, or if there
        is no time left."""
        if self._connection is not None:
            self._connection.close()
        now = time.monotonic()
        if not self._waits or now >= self._wait.until or not passes(exc):
            raise exc
        if not self._pause:
            self._warn_of(exc)
        self._pause = min(max(2 * self._pause, FIRST_PAUSE), MOST_PAUSE)
        if self._shared.runner.clustered:
            with suppress(*BROKEN):  # another node may have the wake indexes
                self._shared.runner.client.refresh()
        # What was claimed may have been lost with the connection.
        self._anew = True
        self._sleep(min(self._pause, self._wait.until - now))

    def _warn_of(self, exc: Exception) -> None:
        logger.warning("cannot wait for messages of %s for now: %s", ", ".join(self._topics), exc)


def passes(exc: BaseException) -> bool:
    """Whether an error may be over in a while, without anybody changing a setting."""
    if isinstance(exc, (AuthenticationError, AuthorizationError, NotPermittedError)):
        return False
    return isinstance(exc, BROKEN) or (isinstance(exc, ResponseError) and is_temporary(exc))


def _rotated(topics: list[str], turn: int) -> list[str]:
    first = turn % len(topics)
    return topics[first:] + topics[:first]


def names_of(topics: Any) -> list[str]:
    """The names of topics that a caller has given, each once. Raises ConfigurationError."""
    names: list[Any] = [topics] if isinstance(topics, (str, bytes)) else list(topics)
    for name in names:
        if not isinstance(name, str):
            raise ConfigurationError(f"a topic is named by a str, not by {name!r:.60}")
    if not names:
        raise ConfigurationError("no topic is named: nothing would ever come")
    return list(dict.fromkeys(names))


def seconds_of(value: float | None, name: str) -> float:
    """Seconds that a caller has given; infinity for None. Raises ConfigurationError."""
    if value is None or value == inf:
        return inf
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ConfigurationError(
            f"{name} must be a number of seconds, or None for any time, not {value!r:.60}"
        )
    return value
