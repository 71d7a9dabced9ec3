"""How many messages topics hold, and who consumes them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence

from ..errors import PartialError, UnknownTopicError
from ..model.keys import Keys
from ..model.results import Consumer, Counts, Summary, Unwritten, Usage, usage_of
from ..scripts.call import microseconds
from .admin_commands import AdminCommands
from .context import Context
from .logs import FULL, logs_of
from .registry import Registry
from .runner import Away, Runner


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
