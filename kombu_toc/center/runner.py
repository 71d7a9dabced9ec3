"""Runs script calls, on one server or on a Cluster.

An executor sends calls and returns the replies; there is one for a standalone server and one for
a Cluster. The runner does the rest: it parses replies, raises errors, counts and times calls, and
waits for replicas.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import redis
from redis.exceptions import NoScriptError, ResponseError

from ..errors import ConfigurationError, ReplicationError, ServerError
from ..metrics.sender import Metrics
from ..scripts.call import ScriptCall, merge_announcements, pack_command

logger = logging.getLogger(__name__)

#: What a broken connection raises.
BROKEN = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError)


class Executor(Protocol):
    """Sends calls to whichever server has their keys."""

    clustered: bool  #: whether slots may lie on several servers

    def replies(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Send calls; return the raw reply to each, or the error that took its place."""

    def replies_and_replicas(
        self, calls: Sequence[ScriptCall], replicas: int, timeout_ms: int
    ) -> tuple[list[Any], list[Any]]:
        """As :meth:`replies`, and wait for replicas; also return how many replicas each server
        that was asked reports, or its error."""

    def place_of(self, key: str) -> Hashable:
        """The server that has a key; None if there is only one server."""


def executor_for(client: Any) -> Executor:
    """The executor for a redis-py client. Raises ConfigurationError for a client that cannot be
    used."""
    if client.get_encoder().decode_responses:
        raise ConfigurationError(
            "the center keeps bytes: give it a redis-py client without decode_responses=True"
        )
    if isinstance(client, redis.RedisCluster):
        raise ConfigurationError(
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

    def replies(self, calls: Sequence[ScriptCall]) -> list[Any]:
        if self._run_packed is not None:
            replies = self._run_packed([call.packed() for call in calls])
        else:
            replies = self._pipeline([call.command() for call in calls])
        while unknown := _unknown(replies):
            commands = _with_texts([calls[number] for number in unknown])
            if self._run_packed is not None:
                found = self._run_packed([pack_command(*command) for command in commands])
            else:
                found = self._pipeline(commands)
            for number, reply in zip(unknown, found, strict=True):
                replies[number] = reply
        return replies

    def replies_and_replicas(
        self, calls: Sequence[ScriptCall], replicas: int, timeout_ms: int
    ) -> tuple[list[Any], list[Any]]:
        # WAIT counts what its own connection has written, so it goes in the same pipeline.
        wait = ("WAIT", replicas, timeout_ms)
        *replies, reported = self._pipeline([*(call.command() for call in calls), wait])
        while unknown := _unknown(replies):
            commands = _with_texts([calls[number] for number in unknown])
            *found, reported = self._pipeline([*commands, wait])
            for number, reply in zip(unknown, found, strict=True):
                replies[number] = reply
        return replies, [reported]

    def place_of(self, key: str) -> Hashable:
        return None

    def _pipeline(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self._client.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            replies: list[Any] = pipe.execute(raise_on_error=False)
            return replies


class ClusterExecutor:
    """Sends calls to the nodes of a Cluster, to all of them side by side.

    A topic's wake index may lie on another node than the slot that a script writes. The script then
    replies what is to be written there, and the executor writes it.
    """

    clustered = True

    def __init__(self, client: Any) -> None:
        self._client = client

    def replies(self, calls: Sequence[ScriptCall]) -> list[Any]:
        return self._run(calls, ())[0]

    def replies_and_replicas(
        self, calls: Sequence[ScriptCall], replicas: int, timeout_ms: int
    ) -> tuple[list[Any], list[Any]]:
        return self._run(calls, ("WAIT", replicas, timeout_ms))

    def place_of(self, key: str) -> Hashable:
        place: Hashable = self._client.place_of(key)
        return place

    def _run(
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
        announcing = [
            found
            for call, reply in zip(calls, replies, strict=True)
            if not isinstance(reply, Exception) and (found := call.announcing(reply)) is not None
        ]
        if announcing:
            for error in self.replies(merge_announcements(announcing)):
                if isinstance(error, Exception):
                    # Consumers read all slots every second, and find what is not announced.
                    logger.debug("what is due is not announced: %s", error)
        return replies, waited


class Runner:
    """Runs script calls; parses, counts and times them.

    metrics: counts calls, and sends counters when it is time to
    counting: makes the call that adds to a topic's counters, for `metrics`
    wait_replicas: how many replicas must have a message before its put returns
    wait_timeout: seconds that a put waits for them
    """

    def __init__(
        self,
        client: Any,
        metrics: Metrics,
        counting: Callable[[str | None, dict[str, int]], ScriptCall],
        *,
        wait_replicas: int = 0,
        wait_timeout: float = 1.0,
    ) -> None:
        self.executor = executor_for(client)
        self.client = client
        self.clustered = self.executor.clustered
        self.metrics = metrics
        self.counting = counting
        self.wait_replicas = wait_replicas
        self.wait_timeout = wait_timeout

    def run(self, call: ScriptCall) -> Any:
        """Run one call; return its parsed result, or raise its error."""
        began = time.monotonic()
        [reply] = self.executor.replies([call])
        if isinstance(reply, Exception):
            raise reply
        times = self.metrics.scripts[call.script.name]
        times[0] += 1
        times[1] += time.monotonic() - began
        return call.parse(reply)

    def run_all(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Run calls in one round trip; return the result of each.

        Raises the first error, after all have run.
        """
        found = self.run_each(calls)
        for result in found:
            if isinstance(result, Exception):
                raise result
        return found

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
            found.append(reply if isinstance(reply, Exception) else call.parse(reply))
        return found

    def _run_or_error(self, call: ScriptCall) -> Any:
        try:
            return self.run(call)
        except (ResponseError, ServerError) as exc:
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
            found = self.run_all(calls)
            if time.monotonic() >= self.metrics.due:
                self.metrics.send(self)
            return found
        found, shortage = self.run_each_put(calls)
        for result in found:
            if isinstance(result, Exception):
                raise result
        if shortage is not None:
            raise shortage
        return found

    def run_each_put(self, calls: Sequence[ScriptCall]) -> tuple[list[Any], Exception | None]:
        """As :meth:`run_puts`, but a call that failed has the error in place of its result, and
        the error for too few replicas is returned."""
        if not self.wait_replicas:
            return self.run_each(calls), None
        timeout_ms = int(self.wait_timeout * 1000)
        replies, reported = self.executor.replies_and_replicas(
            calls, self.wait_replicas, timeout_ms
        )
        found = [
            reply if isinstance(reply, Exception) else call.parse(reply)
            for call, reply in zip(calls, replies, strict=True)
        ]
        for report in reported:
            if isinstance(report, Exception):
                return found, report
        self.send_counters()
        replicas = min(reported, default=self.wait_replicas)
        if replicas >= self.wait_replicas:
            return found, None
        return found, ReplicationError(
            f"the message is kept, but only {replicas} of {self.wait_replicas} replicas have "
            f"it after {self.wait_timeout:g} seconds; see to the replicas, or set "
            "toc_wait_replicas lower"
        )

    def send_counters(self) -> None:
        """Send this process's counters to the server, if it is time to."""
        self.metrics.pass_by(self)


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
