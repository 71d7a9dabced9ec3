"""Runs script calls, on one server or on a Cluster.

An executor sends calls and returns the replies; there is one for a standalone server and one for
a Cluster. The runner does the rest: it parses replies, raises errors, counts and times calls, and
waits for replicas.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import redis
from redis.exceptions import AuthenticationError, AuthorizationError, NoScriptError, ResponseError

from .. import errors
from ..client.connection import pipelined
from ..metrics import Metrics
from ..model.results import Missing
from ..model.topic import reading, slot_of_key
from ..scripts.call import Announced, ScriptCall, as_bytes, pack_command, write_announcements

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: What a broken connection raises.
BROKEN = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError)


#: Seconds for which a node that was not reached is left out where others can be asked; and the one
#: that has the keys of no single slot, where it can be done without.
NOT_ASKED = 2.0
HOME_REST = 5.0


class Away:
    """What one operation could not ask for, for its nodes of a Cluster were away."""

    def __init__(self) -> None:
        self._slots: dict[tuple[str, str, str], set[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._slots)

    def note(self, key: str | bytes, place: Any, error: Exception) -> None:
        """A key could not be asked for. Raises the error if it belongs to no slot: then nothing
        can be told of the others either."""
        of = slot_of_key(key)
        if of is None:
            raise error
        misused = isinstance(error, ResponseError)  # such a key may be on the only server there is
        server = f"{place[0]}:{place[1]}" if place else "the server" if misused else "no node"
        self._slots.setdefault((of[0], server, str(error)), set()).add(of[1])

    def add(self, missing: Iterable[Missing]) -> None:
        """Another operation could not ask for these."""
        for one in missing:
            self._slots.setdefault((one.topic, one.server, one.error), set()).update(one.slots)

    def checked(self, results: T) -> T:
        """The results. Raises PartialError, which has them, if something is missing."""
        if not self._slots:
            return results
        raise errors.PartialError(results, self.missing)

    @property
    def missing(self) -> list[Missing]:
        return [
            Missing(topic, tuple(sorted(slots)), server, error)
            for (topic, server, error), slots in self._slots.items()
        ]


def executor_for(client: Any) -> Executor:
    """The executor for a redis-py client. Raises ConfigurationError for a client that cannot be
    used."""
    if client.get_encoder().decode_responses:
        raise errors.ConfigurationError(
            "the center keeps bytes: give it a redis-py client without decode_responses=True"
        )
    if isinstance(client, redis.RedisCluster):
        raise errors.ConfigurationError(
            "the center has a client of its own for a Redis Cluster, which knows what has run: "
            "use kombu_toc.center_for('toc+cluster://h1:7000,h2:7000')"
        )
    return ClusterExecutor(client) if hasattr(client, "run_keyed") else StandaloneExecutor(client)


class StandaloneExecutor:
    """Sends calls to one server. A plain redis-py client will do; one that takes packed commands
    (``run_packed``) spares redis-py's own packing."""

    clustered = False

    def __init__(self, client: Any) -> None:
        self._client = client
        self._run_packed: Callable[[list[bytes]], list[Any]] | None = getattr(
            client, "run_packed", None
        )

    def replies(self, calls: Sequence[ScriptCall], *wait: tuple[Any, ...]) -> list[Any]:
        """Send calls; return the raw reply to each, or the error that took its place; behind them
        that to `wait`, a command that goes in the same pipeline."""
        if self._run_packed is None or wait:
            replies = self._pipeline([call.command() for call in calls] + [*wait])
        else:
            replies = self._run_packed([call.packed() for call in calls])
        while unknown := _unknown(replies):
            commands = [*_with_texts([calls[number] for number in unknown]), *wait]
            if self._run_packed is None or wait:
                again = self._pipeline(commands)
            else:
                again = self._run_packed([pack_command(*command) for command in commands])
            for number, reply in zip((*unknown, *[-1] * len(wait)), again, strict=True):
                replies[number] = reply
        return replies

    def replies_and_replicas(
        self, calls: Sequence[ScriptCall], wait: tuple[Any, ...]
    ) -> tuple[list[Any], list[Any]]:
        """As :meth:`replies`, and wait for replicas: WAIT counts what its own connection has
        written. Also returns how many replicas each server that was asked reports, or its error."""
        *replies, reported = self.replies(calls, wait)
        return replies, [reported]

    def place_of(self, key: str) -> Hashable:
        """The server that has a key; None: there is only one."""
        return None

    def _pipeline(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        return pipelined(self._client, commands, raises=False)


class ClusterExecutor:
    """Sends calls to the nodes of a Cluster, to all of them side by side.

    A topic's wake index may lie on another node than the slot that a script writes. The script then
    replies what is to be written there, and the executor writes it.
    """

    clustered = True

    def __init__(self, client: Any) -> None:
        self._client = client
        #: called with what scripts have announced and could not write themselves
        self.on_announced: Callable[[list[Announced]], Any] = self.announce

    def replies(self, calls: Sequence[ScriptCall]) -> list[Any]:
        return self.replies_and_replicas(calls, ())[0]

    def place_of(self, key: str) -> Hashable:
        place: Hashable = self._client.place_of(key)
        return place

    def replies_and_replicas(
        self, calls: Sequence[ScriptCall], wait: tuple[Any, ...]
    ) -> tuple[list[Any], list[Any]]:
        client = self._client
        packed = [(call.keys[0], call.packed()) for call in calls]
        replies, waited = client.run_keyed(packed, wait)
        if unknown := _unknown(replies):
            whole = [
                (calls[i].keys[0], pack_command(*calls[i].command(whole=True))) for i in unknown
            ]
            for i, reply, waits in zip(unknown, *client.run_keyed(whole, wait), strict=True):
                replies[i], waited[i] = reply, waits
        announced = [
            told
            for call, reply in zip(calls, replies, strict=True)
            if not isinstance(reply, Exception) and (told := call.announcing(reply)) is not None
        ]
        if announced:
            self.on_announced(announced)
        return replies, waited

    def announce(self, announced: Iterable[Announced]) -> None:
        """Write into wake indexes what scripts have announced."""
        commands = write_announcements(announced, self._client.claimed)
        wakes = [command[3 if command[0] == "EVAL" else 1] for command in commands]
        packed = [pack_command(*command) for command in commands]
        _without_errors(self._client.run_keyed(list(zip(wakes, packed, strict=True)))[0])


#: Sends calls to whichever server has their keys.
Executor: TypeAlias = StandaloneExecutor | ClusterExecutor


def misused(client: Any, keys: Sequence[str]) -> dict[str, str]:
    """The keys that are of another type than they should be: key -> that type."""
    kinds = {}
    for key in dict.fromkeys(keys):
        command, kind = reading(key)
        try:
            client.execute_command(command[0], as_bytes(key), *command[2:])
        except ResponseError as exc:
            if "WRONGTYPE" in str(exc):
                kinds[key] = kind
    return kinds


def named(exc: Exception, client: Any, keys: Sequence[str]) -> Exception:
    """An error of a script; of a key that has the wrong type, one that names the key."""
    if "WRONGTYPE" not in str(exc):
        return exc
    wrong = misused(client, keys)
    if not wrong:
        return exc
    said = ", ".join(f"the key {key!r} is no {kind}" for key, kind in wrong.items())
    return ResponseError(
        f"WRONGTYPE {said}: another program has written it; "
        "'celery toc repair' sets it aside, under another name"
    )


@dataclass(eq=False)
class Runner:
    """Runs script calls; parses, counts and times them.

    metrics: counts calls, and sends counters when it is time to
    counting: makes the call that adds to a topic's counters, for `metrics`
    wait_replicas: how many replicas must have a message before its put returns
    wait_timeout: seconds that a put waits for them
    """

    client: Any
    metrics: Metrics
    counting: Callable[[str | None, dict[str, int]], ScriptCall]
    _: KW_ONLY
    wait_replicas: int = 0
    wait_timeout: float = 1.0

    def __post_init__(self) -> None:
        self.executor = executor_for(self.client)
        self.clustered = self.executor.clustered
        if isinstance(self.executor, ClusterExecutor):
            self.executor.on_announced = partial(self._announce, self.executor)
        #: node of a Cluster -> when it was last not reached, in monotonic seconds, and why
        self.unreached: dict[Hashable, tuple[float, Exception | None]] = {}

    def run(self, call: ScriptCall) -> Any:
        """Run one call; return its parsed result, or raise its error."""
        began = time.monotonic()
        [reply] = self.executor.replies([call])
        if isinstance(reply, Exception):
            raise named(reply, self.client, call.keys)
        times = self.metrics.scripts[call.script.name]
        times[0] += 1
        times[1] += time.monotonic() - began
        return call.result(reply)

    def run_all(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Run calls in one round trip; return the result of each.

        Raises the first error, after all have run.
        """
        return _without_errors(self.run_each(calls))

    def run_each(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """As :meth:`run_all`, but a call that Redis refused has the error in place of its result.

        On a Cluster, so does a call whose node cannot be reached.
        """
        if not calls:
            return []
        if len(calls) == 1:
            return [self._run_or_error(calls[0])]
        found: list[Any] = []
        for call, reply in zip(calls, self.executor.replies(calls), strict=True):
            self.metrics.scripts[call.script.name][2] += 1
            if isinstance(reply, Exception):
                found.append(named(reply, self.client, call.keys))
            else:
                found.append(call.result(reply))
        return found

    def run_there(
        self, calls: Sequence[ScriptCall], away: Away, *, misused: bool = False
    ) -> list[Any]:
        """As :meth:`run_all`, but on a Cluster a call has None in place of its result if its node
        cannot be reached, and `away` notes its slot.

        A node that was not reached a moment ago is not asked: each time would take seconds.

        misused: the same holds for a slot with a key that another program has written, on any
            server
        """
        if not self.clustered and not misused:
            return self.run_all(calls)
        replies: list[Any] = [None] * len(calls)
        asked = []
        for number, call in enumerate(calls):
            place = self._place_of(call)
            error = self.not_reached(place)
            if error is None:
                asked.append(number)
            else:
                away.note(call.keys[0], place, error)
        results = self.run_each([calls[number] for number in asked])
        for number, result in zip(asked, results, strict=True):
            is_away = isinstance(result, BROKEN) and not isinstance(
                result, errors.NotPermittedError
            )
            if is_away and self.clustered:
                place = self._place_of(calls[number])
                self.lost(place, result)
                away.note(calls[number].keys[0], place, result)
            elif misused and isinstance(result, ResponseError) and "WRONGTYPE" in str(result):
                away.note(calls[number].keys[0], self._place_of(calls[number]), result)
            elif isinstance(result, Exception):
                raise result
            else:
                replies[number] = result
        return replies

    def lost(self, place: Hashable, error: Exception) -> None:
        """A node of a Cluster was not reached."""
        self.unreached[place] = time.monotonic(), error

    def not_reached(self, place: Hashable, rest: float = NOT_ASKED) -> Exception | None:
        """Why a node was not reached, if that was a moment ago."""
        at, error = self.unreached.get(place, (-math.inf, None))
        return error if time.monotonic() - at < rest else None

    def _announce(self, executor: ClusterExecutor, announced: list[Announced]) -> None:
        """Write into wake indexes. Consumers look into all slots every second, and find what is not
        announced because that node is away."""

        def leave(error: Exception) -> None:
            logger.debug("what is due is not announced: %s", error)

        try:
            self.at_home(announced[0].wake, partial(executor.announce, announced), leave)
        except ResponseError as exc:
            leave(exc)

    def at_home(self, key: str, ask: Callable[[], T], otherwise: Callable[[Exception], T]) -> T:
        """What `ask` returns, which asks for a key of no single slot; on a Cluster, while the node
        that has it is away, what `otherwise` returns, which is given the reason.

        A node that was not reached must answer a short question before it is asked again.
        """
        if not self.clustered:
            return ask()
        place = self.executor.place_of(key)
        try:
            if place in self.unreached:
                if error := self.not_reached(place, HOME_REST):
                    return otherwise(error)
                if not self.client.answers(place):
                    raise errors.ServerError("a node cannot be reached")
                self.unreached.pop(place, None)
            return ask()
        except (errors.NotPermittedError, AuthenticationError, AuthorizationError):
            raise
        except BROKEN as exc:
            self.lost(place, exc)
            return otherwise(exc)

    def _place_of(self, call: ScriptCall) -> Hashable:
        try:
            return self.executor.place_of(call.keys[0])
        except BROKEN:  # no node has its hash slot
            return None

    def _run_or_error(self, call: ScriptCall) -> Any:
        try:
            return self.run(call)
        except (ResponseError, errors.ServerError) as exc:
            return exc
        except BROKEN as exc:
            if self.clustered:  # the other nodes may still answer
                return exc
            raise

    def run_puts(self, calls: Sequence[ScriptCall], *, wait: bool = True) -> list[Any]:
        """Run calls that add messages; return the result of each.

        wait: for the replicas, if `wait_replicas` is set; messages that are useful for moments
            only need not wait

        Raises ReplicationError if `wait_replicas` is set and fewer replicas have the messages in
        time.
        """
        if not (wait and self.wait_replicas):
            results = self.run_all(calls)
            if time.monotonic() >= self.metrics.due:
                self.metrics.send(self)
            return results
        results, shortage = self.run_each_put(calls)
        if shortage is not None:
            raise next((one for one in results if isinstance(one, Exception)), shortage)
        return _without_errors(results)

    def run_each_put(self, calls: Sequence[ScriptCall]) -> tuple[list[Any], Exception | None]:
        """As :meth:`run_puts`, but a call that failed has the error in place of its result, and
        the error for too few replicas is returned."""
        if not self.wait_replicas:
            return self.run_each(calls), None
        wait = ("WAIT", self.wait_replicas, int(self.wait_timeout * 1000))
        replies, reported = self.executor.replies_and_replicas(calls, wait)
        results = [
            reply if isinstance(reply, Exception) else call.result(reply)
            for call, reply in zip(calls, replies, strict=True)
        ]
        for report in reported:
            if isinstance(report, Exception):
                return results, report
        self.send_counters()
        replicas = min(reported, default=self.wait_replicas)
        if replicas >= self.wait_replicas:
            return results, None
        return results, errors.ReplicationError(
            f"only {replicas} of {self.wait_replicas} replicas have the message after "
            f"{self.wait_timeout:g} seconds. It is on the primary and may run; it is lost if a "
            "replica takes over from that primary before it has the message, or has done so. See "
            "to the replicas, or set toc_wait_replicas lower"
        )

    def send_counters(self) -> None:
        """Send this process's counters to the server, if it is time to."""
        self.metrics.pass_by(self)


def _without_errors(results: list[Any]) -> list[Any]:
    """Return these results. Raises the first of them that is an error."""
    for one in results:
        if isinstance(one, Exception):
            raise one
    return results


def _unknown(replies: Sequence[Any]) -> list[int]:
    """The indexes of calls whose scripts the server did not know."""
    return [n for n, reply in enumerate(replies) if isinstance(reply, NoScriptError)]


def _with_texts(calls: Sequence[ScriptCall]) -> list[tuple[Any, ...]]:
    """The commands of calls whose scripts the server does not know, to be sent in this order over
    one connection: the first call of a script brings its text."""
    texts: set[str] = set()
    commands = []
    for call in calls:
        commands.append(call.command(whole=call.script.sha not in texts))
        texts.add(call.script.sha)
    return commands
