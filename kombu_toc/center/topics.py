"""Topics at run time: what one is declared with, and how that is changed while it is in use."""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import replace
from secrets import token_urlsafe
from typing import Any

from ..errors import ConfigurationError, PartialError, SlotCountError, UnknownTopicError
from ..model.keys import Keys
from ..model.library import check_horizon
from ..model.limits import (
    LIBRARY_TERMS,
    LIMITS,
    NEEDS,
    NOTIFIER_TERMS,
    PRIORITY_STEPS,
    TERMS,
    Limits,
    check_gates,
    check_steps,
)
from ..model.results import (
    DECLARED,
    DEFAULT,
    Consumer,
    Counts,
    Description,
    Limit,
    Summary,
    Unwritten,
    Usage,
    usage_of,
)
from ..model.topic import Declaration, Topic
from ..scripts.call import ScriptCall, load, microseconds, texts
from .admin_commands import AdminCommands
from .calls import FULL, logs_of
from .core import Context
from .operations import Operations
from .registry import Registry
from .runner import Away, Runner

# -- topics that go away when nobody uses them
#
# There are two kinds. A topic for replies or events is kept by whoever has declared it, and its
# keys
# live as long as its declaration says without being refreshed. A topic with ``kept``, which is a
# queue's ``x-expires``, goes to the second: that long after its last consumer has left, and after
# the
# last declaration or put. Its keys outlive that, lest a server that stands still for a moment takes
# messages from consumers that live: somebody sweeps the topic when its time has come.


class _User:
    """The name of this process among those that use a topic."""

    def __init__(self) -> None:
        self._pid = 0
        self._name = ""

    def __str__(self) -> str:
        if self._pid != os.getpid():  # a forked child is another process
            self._pid = os.getpid()
            self._name = f"{socket.gethostname()}:{self._pid}:{token_urlsafe(6)}"
        return self._name


_user = _User()


class Expiring:
    """Keeps topics that expire, and finds those that have expired."""

    def __init__(self, runner: Runner, registry: Registry, keys: Keys) -> None:
        self._runner = runner
        self._client = runner.client
        self._registry = registry
        self._keys = keys

    def refresh(self, name: str, expires_ms: int) -> None:
        """Keep a topic that expires, with its messages; declare it again if it has expired.

        One that this center has never seen, and that nobody has declared, was deleted just now:
        nothing is done.
        """
        registry = self._registry
        found = registry.recent(name) or registry.known(name)
        if found is None:
            return
        if found.declaration.kept:
            self.hold(found)
            return
        wanted = replace(found.declaration, expires=expires_ms)
        topic: Topic = self._runner.run(registry.declare_call(name, wanted))
        if topic.declaration.expires:  # else it is another's by now, and stays
            self._keep_keys(topic, expires_ms)

    def hold(self, topic: Topic) -> None:
        """Keep a topic with ``kept`` for that long, because it is consumed here."""
        self._keep_keys(topic, topic.declaration.kept or 0)
        self._runner.run(self._using(topic, topic.declaration.kept or 0))

    def leave(self, topic: Topic) -> None:
        """It is consumed here no more: it expires, unless others use it."""
        self._runner.run(self._using(topic, 0))

    def touch(self, topic: Topic, margin_ms: int = 0) -> None:
        """A topic with ``kept`` was declared, or something is put: it begins to expire anew.

        margin_ms: milliseconds that it lasts longer
        """
        declaration = topic.declaration
        call = self._registry.declare_call(topic.name, declaration)
        name, wanted, expires = call.args
        self._keep_keys(topic, declaration.kept or 0)
        self._runner.run(call._replace(args=(name, wanted, expires + margin_ms)))

    def _using(self, topic: Topic, hold_ms: int) -> ScriptCall:
        name, declaration = topic.name, topic.declaration
        return ScriptCall(
            load("use"),
            (self._keys.topics, self._keys.expiring, self._keys.users(name), self._keys.names),
            (name, declaration.to_json(), declaration.expires or 0, str(_user), hold_ms),
            lambda raw: self._registry.learn(name, raw),
        )

    def _keep_keys(self, topic: Topic, lifetime_ms: int) -> None:
        with self._client.pipeline(transaction=False) as pipe:
            for slot in topic.all_slots():
                for key in slot.all():
                    pipe.pexpire(key, lifetime_ms)
            pipe.pexpire(self._keys.wake(topic.name), lifetime_ms)
            pipe.execute()

    def stale(self, most: int = 100) -> list[str]:
        """Take the names of what has expired: ``topic:NAME`` and ``exchange:NAME``."""
        names: list[str] = self._runner.run(
            ScriptCall(
                load("sweep"),
                (self._keys.expiring, self._keys.topics, self._keys.names),
                (most,),
                texts,
            )
        )
        return names


# -- how many messages topics hold, and who consumes them


class Statistics:
    """Counts messages and consumers."""

    def __init__(
        self, runner: Runner, registry: Registry, context: Context, commands: AdminCommands
    ) -> None:
        self._runner = runner
        self._registry = registry
        self._context = context
        self._keys: Keys = context.keys
        self._commands = commands

    def counts_by_slot(self, topic: str, *, reachable: bool = False) -> list[Counts]:
        """How many messages each slot holds, by slot number.

        reachable: without the slots on nodes of a Cluster that cannot be reached; otherwise these
            raise PartialError, whose results have no number for them
        """
        declared = self._registry.standing(topic)
        calls = [
            self._commands.counts(declared, slots)
            for slots in self._context.groups(declared.all_slots())
        ]
        away = Away()
        parts = self._runner.run_there(calls, away)
        found = [counts for part in parts for counts in part or ()]
        return found if reachable else away.checked(found)

    def counts(self, topic: str) -> Counts:
        """How many messages a topic holds. Raises PartialError, with what the others hold, while
        nodes of a Cluster are away."""
        try:
            return _sum(self.counts_by_slot(topic))
        except PartialError as exc:
            raise PartialError(_sum(exc.results), exc.missing) from exc.__cause__

    def coming(self, topic: str, seconds: Sequence[float]) -> list[int]:
        """How many waiting messages are due by each of some times.

        seconds: the times, from now by Redis's clock; 0 counts what is due already

        Raises PartialError as :meth:`counts`.
        """
        times = [microseconds(time) or 0 for time in seconds]
        slots = self._registry.standing(topic).all_slots()
        away = Away()
        calls = [self._commands.coming(slot, times) for slot in slots]
        by_slot = [part for part in self._runner.run_there(calls, away) if part is not None]
        none = [0] * len(times)
        return away.checked([sum(column) for column in zip(none, *by_slot, strict=True)])

    def summary(self, topic: str | Iterable[str] | None = None) -> list[Summary]:
        """How many messages topics hold, and how long their oldest due message has been due.

        topic: one, or several; all declared topics unless given

        Raises PartialError as :meth:`counts`, also for slots with a key that another program has
        written; a topic of which no slot answers is left out.
        """
        if topic is None or isinstance(topic, str):
            topics = self._registry.select(topic)
        else:
            named = set(topic)
            topics = [one for one in self._registry.select(None) if one.name in named]
        calls = [self._commands.summary(slot) for one in topics for slot in one.all_slots()]
        away = Away()
        found = iter(self._runner.run_there(calls, away, misused=True))
        made = []
        for one in topics:
            by_slot = [part for part in itertools.islice(found, one.slot_span) if part is not None]
            if not by_slot:
                continue
            made.append(
                Summary(
                    one.name,
                    one.slots,
                    _sum(counts for counts, _ in by_slot),
                    max(oldest for _, oldest in by_slot),
                )
            )
        return away.checked(made)

    def usage(self, topic: str) -> Usage:
        """What is used of a topic's limits of starts, keys and puts, and what waits because of
        them. O(log n), however many keys there are.

        Raises UnknownTopicError if nobody has declared the topic, PartialError as :meth:`counts`.
        """
        found = self._registry.declared(topic)
        if found is None:
            raise UnknownTopicError(f"there is no queue {topic!r}")
        calls = [self._commands.usage(slot) for slot in found.all_slots()]
        away = Away()
        slots = [one for one in self._runner.run_there(calls, away) if one is not None]
        if not slots:
            raise PartialError(None, away.missing)
        return away.checked(usage_of(topic, found.declaration, slots))

    def unwritten(self, topic: str | None = None) -> list[Unwritten]:
        """What the task library has no rows of yet, of topics that are declared with ``library``
        as ``behind``.

        topic: all of these unless given
        """
        client = self._runner.client
        seconds, us = client.time()
        now = seconds * 1_000_000 + us
        found = []
        for one in self._registry.select(topic):
            bound = one.declaration.logs
            if not bound:
                continue
            with client.pipeline(transaction=False) as pipe:
                for slot in logs_of(one):
                    pipe.xlen(slot.log)
                    pipe.xrange(slot.log, count=1)
                replies = pipe.execute()
            first = [entry for some in replies[1::2] for entry in some]
            oldest = min((int(name.split(b"-")[0]) * 1000 for name, _ in first), default=now)
            full = any(FULL.encode() in said for _, said in first)
            full = full or any(length >= bound for length in replies[::2])
            found.append(Unwritten(one.name, sum(replies[::2]), max(now - oldest, 0), full))
        return found

    def consumers(self) -> dict[str, list[Consumer]]:
        """The processes that consume each topic through the transport.

        They report within a second what they consume, and are forgotten a minute after they died.
        """
        client = self._runner.client
        seconds, us = client.time()
        now = seconds * 1000 + us // 1000
        found: dict[str, list[Consumer]] = {}
        for raw in client.zrangebyscore(self._keys.consumers, f"({now}", "+inf"):
            host, pid, *topics = json.loads(raw)
            for topic in topics:
                found.setdefault(topic, []).append(Consumer(host, pid))
        return found


def _sum(counts: Iterable[Counts]) -> Counts:
    return Counts(*(sum(column) for column in zip(Counts(0, 0, 0, 0), *counts, strict=True)))


# -- topics at run time

#: Priority steps that consumers read, at most: a lease has room for the number of one.
MAX_STEPS = 30

#: The limits that can be changed while a topic is in use, by name.
ALTERABLE = (*(name for name in LIMITS if name not in ("slots", "expires")), "steps")


class Topics:
    """Describes topics, and alters their declarations."""

    def __init__(
        self, registry: Registry, context: Context, operations: Operations, statistics: Statistics
    ) -> None:
        self._registry = registry
        self._context = context
        self._operations = operations
        self._statistics = statistics

    def alter(self, /, topic: str, **limits: Any) -> Topic:
        """Change limits of a declared topic while it is in use; return it as it is declared then.

        limits: those of :meth:`declare`, but for ``slots`` and ``expires``; None takes one back to
            the default of whoever uses the topic (``retries`` and ``steps``: of this center); of
            those for starts, keys and puts, None takes one away

        Consumers and producers know within five seconds. Several may alter a topic at the same
        time: what each has named holds, and nothing else changes. What a message has already, it
        keeps: the lease of one that is in flight, the retries that one has left that was tried.

        Messages under a step that is removed are delivered like the others: consumers go on
        reading it, and nothing is put there any more. While steps are added, a message that is in
        flight or dead may come back under a neighbouring one.

        Raises UnknownTopicError if nobody has declared the topic, ConfigurationError for a limit
        that makes no sense or cannot be altered, or does not go with the others; with a task
        library, LibraryError if that cannot be told: it is altered all the same.
        """
        wanted = self._checked(topic, limits)
        self._registry.check_horizon(topic, limits)
        while True:
            found = self.require(topic)
            changed = self._changed(found, wanted)
            # If not, somebody else has changed it meanwhile, and this begins anew.
            if self._registry.redeclare(found, changed):
                altered = self._registry.declared(topic) or replace(found, declaration=changed)
                if self._operations.recorder is not None:
                    self._operations.recorder.altered(found, altered)
                return altered

    def describe(self, topic: str) -> Description:
        """What a topic is declared with, where each limit comes from, and what is in it.

        Raises UnknownTopicError if nobody has declared it, PartialError as :meth:`counts`.
        """
        found = self.require(topic)
        standing = found.declaration
        in_force = standing.limits(self._context.limits)
        said = {name: getattr(standing, name) for name in ("retries", *Limits._fields)}
        limits = {
            name: Limit(getattr(in_force, name), DEFAULT)
            if value is None
            else Limit(value, DECLARED)
            for name, value in said.items()
        }
        for name in (*TERMS, *LIBRARY_TERMS, *NOTIFIER_TERMS):
            value = getattr(standing, name)
            limits[name] = Limit(value, DEFAULT if value is None else DECLARED)
        if standing.key_weights:
            limits["key_weights"] = Limit(dict(standing.key_weights), DECLARED)
        steps = Limit(found.open_steps, DEFAULT if standing.steps is None else DECLARED)
        away: Sequence[Any] = ()
        try:
            counts = self._statistics.counts(topic)
        except PartialError as exc:
            counts, away = exc.results, exc.missing
        described = Description(
            topic,
            found.slots,
            {**limits, "steps": steps},
            standing.closed_steps,
            standing.expires,
            standing.draining_counts,
            self._operations.is_paused(topic),
            counts,
            self._statistics.consumers().get(topic, []),
            standing.target_stopped,
        )
        if away:
            raise PartialError(described, away)
        return described

    def require(self, topic: str) -> Topic:
        """The topic as it is declared now. Raises UnknownTopicError if nobody has declared it."""
        found = self._registry.declared(topic)
        if found is None:
            raise UnknownTopicError(f"there is no queue {topic!r}")
        return found

    @staticmethod
    def _checked(topic: str, limits: dict[str, Any]) -> dict[str, Any]:
        """The limits as they are stored; None stays None."""
        if "slots" in limits:
            raise SlotCountError(
                f"queue {topic!r}: the slot count is changed by another command: "
                f"'celery toc reshard {topic} --slots {limits['slots']}'"
            )
        if "expires" in limits:
            raise ConfigurationError(
                f"queue {topic!r}: whether it expires, and when, is settled when it is declared; "
                f"delete it, and declare it anew"
            )
        unknown = set(limits) - set(ALTERABLE)
        if unknown:
            raise ConfigurationError(
                f"queue {topic!r}: unknown limit {min(unknown)!r}; there are {', '.join(ALTERABLE)}"
            )
        checked = Declaration.of(topic, **limits)
        return {
            name: None if value is None else getattr(checked, name)
            for name, value in limits.items()
        }

    def _changed(self, topic: Topic, wanted: dict[str, Any]) -> Declaration:
        fields = dict(wanted)
        if "retries" in fields and fields["retries"] is None:
            fields["retries"] = self._registry.retries
        if "steps" in fields:
            fields.update(self._steps(topic, fields["steps"] or self._registry.steps))
        for name, needed in NEEDS.items():  # what says nothing any more goes with the other
            if needed in fields and not fields[needed]:
                fields.setdefault(name, None)
        if "target" in fields:  # whoever names one wants something sent there
            fields["target_stopped"] = None
        changed = replace(topic.declaration, **fields).with_lanes()
        if not fields.keys().isdisjoint(LIBRARY_TERMS):
            check_horizon(topic.name, changed)
        if not fields.keys().isdisjoint(TERMS):
            check_gates(topic.name, changed, clustered=self._context.clustered)
        return changed

    @staticmethod
    def _steps(topic: Topic, wanted: tuple[int, ...] | None) -> dict[str, Any]:
        """The fields of a declaration with these steps. Those that it has had stay among those
        that consumers read: messages may be there, and a producer that does not know yet may put
        one there."""
        steps = check_steps(wanted or PRIORITY_STEPS)
        before = topic.declaration.steps or {*topic.steps, *PRIORITY_STEPS}
        every = tuple(sorted({*before, *steps}))
        if len(every) > MAX_STEPS:
            raise ConfigurationError(
                f"queue {topic.name!r} has had {len(before)} priority steps, and with these there "
                f"would be more than {MAX_STEPS}: use some that it has had, or let it run empty "
                "and delete it"
            )
        closed = tuple(step for step in every if step not in steps)
        return {"steps": every, "closed_steps": closed, "altered": True}
