"""Pops that wait: they block on the wake indexes of their topics until something is due.

:class:`.pop_wait.Wait` decides; what is here asks the server. A pop that waits does as an idle
worker
does. It takes an announcement from a wake index, which nobody else has then, and pops the slot when
the announced time has come. What it has taken and does not need, it announces again.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from math import inf
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Any

from redis.exceptions import AuthenticationError, AuthorizationError, RedisError, ResponseError

from ..client.errors import is_temporary
from ..errors import ConfigurationError, NotPermittedError
from ..model.results import Popped
from ..model.topic import Topic
from . import pop_wait
from .calls import divide_evenly
from .clock import ServerClock
from .core import Core
from .runner import BROKEN

if TYPE_CHECKING:
    from .picking import Choice

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
LONGEST = round(1000 * (pop_wait.LOOK_OF_MANY + pop_wait.PLACE_KEPT))

#: Pops a topic at once; remembers the names of its calls.
Pop = Callable[[str, "Choice", "Flown"], Popped]


class PopNames:
    """Names that no other pop has: a consumer, a dot and a number."""

    def __init__(self) -> None:
        #: process, consumer, numbers
        self._consumer: tuple[int, str, Iterator[int]] | None = None

    def next(self) -> str:
        consumer = self._consumer
        if consumer is None or consumer[0] != os.getpid():  # a forked child is another consumer
            consumer = self._consumer = (os.getpid(), token_urlsafe(9), count(1))
        return f"{consumer[1]}.{next(consumer[2]):x}"


class Flown:
    """The pops of one that waits whose replies have not come: by their names the messages can be
    had although a reply is lost."""

    def __init__(self, names: PopNames) -> None:
        self.names = names
        #: topic, slots, name
        self.away: list[tuple[Topic, Sequence[int], str]] = []

    def name(self, topic: Topic, numbers: Sequence[int]) -> str:
        """The name of a call that pops these slots."""
        name = self.names.next()
        self.away.append((topic, numbers, name))
        return name

    def landed(self, name: str) -> None:
        """The reply to a call has come, or was an error that says that it has not run."""
        self.away = [one for one in self.away if one[2] != name]


class Waiting:
    """What the waiting pops of one center share."""

    def __init__(self, core: Core) -> None:
        self.runner, self.registry = core.runner, core.registry
        self.commands, self.keys = core.commands, core.context.keys
        self.looks = pop_wait.Looks()
        #: turns: another topic comes first each time
        self.pops, self.listens = count(), count()
        #: connections that wait for nothing, and the monotonic seconds when each was last used
        self._idle: deque[tuple[pop_wait.WakeConnection, float]] = deque()
        #: names for the pops of those who will wait: a server remembers the latest pop of each
        self._names: deque[PopNames] = deque()

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
        flown = Flown(self._names.pop() if self._names else PopNames())
        try:
            return _Pop(self, pop, names, limit, seconds, choice, flown).run()
        finally:
            self._names.append(flown.names)

    # -- connections

    def take_connection(self) -> pop_wait.WakeConnection:
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
        make: type[pop_wait.WakeConnection]
        make = getattr(self.runner.client, "wake_connection", pop_wait.WakeConnection)
        return make(self.runner.client, self.runner.clustered)

    def give_back(self, connection: pop_wait.WakeConnection) -> None:
        """The connection is needed no more."""
        if connection.usable and len(self._idle) < KEEP:
            self._idle.append((connection, time.monotonic()))
        else:
            connection.close()


class _Pop:
    """One pop that waits, or is for several topics."""

    def __init__(
        self,
        shared: Waiting,
        pop: Pop,
        topics: list[str],
        limit: int,
        seconds: float,
        choice: Choice,
        flown: Flown,
    ) -> None:
        self._shared, self._pop, self._topics = shared, pop, topics
        self._choice, self._flown = choice, flown
        self._wait = pop_wait.Wait(topics, time.monotonic() + seconds)
        self._waits = seconds > 0
        self._found = pop_wait.Gathered(limit)
        self._clock = ServerClock()
        self._sleep = pop_wait.sleep_of(shared.runner.client)
        self._connection: pop_wait.WakeConnection | None = None
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
        if self._flown.away and self._recall():
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
        found = looks.due(self._topics, now)
        if found and looks.asks(now):
            runner, key = self._shared.runner, self._shared.keys.upkeep
            exists = partial(runner.client.exists, key)
            looks.asked(bool(runner.at_home(key, exists, lambda _: False)), now)
            found = looks.due(self._topics, now)
        for topic in found:  # before the server is asked: threads share the looks
            looks.looked(topic, now)
        return [topic for topic in found if self._looks_for_all(topic, now)]

    def _looks_for_all(self, topic: str, now: float) -> bool:
        """Whether this process looks into a topic for all that wait there. Without a place it asks
        for the last one, and with one for those before it."""
        looks = self._shared.looks
        place = looks.place(topic, now)
        if place == pop_wait.PLACES and self._takes(topic, pop_wait.PLACES - 1):
            place = pop_wait.PLACES - 1
        if place < pop_wait.PLACES:
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
        self._flown.away.clear()
        now = time.monotonic()
        self._found.add(topic, popped)
        if slots is not None or not self._shared.runner.clustered:
            self._clock.sample(popped.now_us, now)
            self._wait.popped(topic, slots, popped.now_us, now, self._ahead_us(topic))
        return popped.more and bool(popped.messages)

    def _recall(self) -> bool:
        """Get what pops have given whose replies were lost; whether that is anything."""
        away, shared = self._flown.away, self._shared
        while away:
            topic, numbers, name = away[-1]
            call = shared.commands.recall(topic, numbers, name, visibility=self._choice.visibility)
            self._found.add(topic.name, shared.runner.run(call))
            away.pop()
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

    def _claim(self, claim: pop_wait.Claim) -> None:
        now = time.monotonic()
        # Of a clock that is not known, the pop will tell.
        if self._clock.known:
            us = claim[2] - pop_wait.early_us(self._ahead_us(claim[0]))
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

    def _hand_back(self, claims: Iterable[pop_wait.Claim]) -> None:
        """Announce these again: somebody else shall have them."""
        registry, commands = self._shared.registry, self._shared.commands
        calls = [
            call
            for topic, pairs in pop_wait.by_topic(claims).items()
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

    def _stop(self, connection: pop_wait.WakeConnection) -> list[pop_wait.Claim]:
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
