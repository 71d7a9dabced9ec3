"""What all commands of one center share: keys, limits, and where to count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..metrics.counters import TopicCounts
from ..model.keys import Keys, Slot
from ..model.limits import Limits
from ..model.topic import Topic
from ..scripts.call import ScriptCall, load, text
from .runner import Runner

# -- what all commands of one center share

T = TypeVar("T")

#: Bytes that the bodies of one pop may have together. A longer body is delivered alone.
POP_BYTES = 8_000_000


@dataclass(slots=True)
class Context:
    """What all commands of one center share.

    keys: the keys that belong to no single slot
    clustered: whether slots may lie on several servers: then a call may name one slot only
    limits: hold for topics whose declarations do not say
    pop_bytes: bytes that the bodies of one reply may have together; the first may have any
    counts: where to count what happens in a topic
    """

    keys: Keys
    clustered: bool
    limits: Limits
    pop_bytes: int
    counts: Callable[[Topic], TopicCounts]

    def groups(self, items: Iterable[T]) -> list[list[T]]:
        """Slots, or what belongs to one slot each, grouped by what one call may name."""
        return [[item] for item in items] if self.clustered else [list(items)]

    def gate_of(self, topic: Topic, slot: Slot) -> Slot:
        """Where the limits of the whole topic are kept, for who has to do with this slot. On a
        Cluster a script can name no other."""
        return slot if self.clustered else topic.slot(0)

    def announcing(
        self,
        topic: Topic,
        script: str,
        keys: Sequence[str],
        args: Sequence[Any],
        parse: Callable[[Any], Any],
        *,
        keys_recur: bool = False,
        limited: Slot | None = None,
    ) -> ScriptCall:
        """A call of a script that writes into the topic's wake index.

        limited: the slot that it is about, if the topic is limited; then the script is the one
            that knows lanes

        On a Cluster the index is not on the node of its keys: the script replies what is to be
        written there.
        """
        if limited is not None:
            gate = self.gate_of(topic, limited)
            args = (*args, topic.gates, gate.number, len(keys))
            keys = (*keys, *limited.lane_keys, gate.announced_times, gate.pace, gate.busy)
            script = f"{script}_limited"
        wake = self.keys.wake(topic.name)
        if self.clustered:
            elsewhere = (wake, topic.declaration.keys_ms)
            return ScriptCall(load(script), keys, args, parse, keys_recur, elsewhere)
        return ScriptCall(load(script), (*keys, wake), args, parse, keys_recur)


# -- what the processes of one server and prefix tell each other

#: Ids that one call remembers as cancelled.
REMEMBERED_PER_CALL = 500

#: Ids that one call reads.
READ_PER_CALL = 5000


class SharedNotes:
    """Notes in Redis that every process may read."""

    def __init__(self, runner: Runner, keys: Keys) -> None:
        self._runner = runner
        self._keys = keys

    def remember_cancelled(self, ids: Iterable[str], *, most: int, seconds: float) -> None:
        """Note ids for :meth:`cancelled_lately`; messages that have them do not change.

        most: how many ids are kept, the latest, whoever has noted them
        seconds: for how long
        """
        every = list(dict.fromkeys(ids))
        calls = [
            ScriptCall(
                load("cancelled"),
                (self._keys.cancelled,),
                (most, int(seconds * 1000), *every[start : start + REMEMBERED_PER_CALL]),
                int,
            )
            for start in range(0, len(every), REMEMBERED_PER_CALL)
        ]
        self._runner.run_all(calls)

    def cancelled_lately(self, seconds: float) -> list[str]:
        """The ids that were noted as cancelled within so many seconds, the oldest first."""
        client = self._runner.client
        now, us = client.time()
        since = now * 1000 + us // 1000 - int(seconds * 1000)
        found: dict[str, None] = {}
        while True:
            page = client.zrangebyscore(
                self._keys.cancelled, f"({since}", "+inf", start=len(found), num=READ_PER_CALL
            )
            found.update(dict.fromkeys(map(text, page)))
            if len(page) < READ_PER_CALL:
                return list(found)

    def cancelled_at(self, id: str) -> float | None:
        """When an id was noted as cancelled, in seconds since the epoch; None if it was not."""
        ms = self._runner.client.zscore(self._keys.cancelled, id)
        return None if ms is None else ms / 1000

    def speaks_for(self, topics: Iterable[str], name: str, seconds: float) -> list[str]:
        """The topics for which this process is to answer where one of many does.

        name: the process's. Who asks first has a topic for so many seconds, and again with each
            call
        """
        names = list(topics)
        if not names:
            return []
        keys = [self._keys.speaker(one) for one in names]
        call = ScriptCall(load("speak"), keys, (name, int(seconds * 1000)), list)
        answers = self._runner.run(call)
        return [one for one, mine in zip(names, answers, strict=True) if mine]
