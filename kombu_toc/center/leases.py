"""Which leases that have ended may be rolled back.

A center that has watched a server for long enough may roll leases back there (:mod:`.watch` says
why). One that has not only notes in Redis that leases have ended; whoever asks a grace later rolls
them back, if they were not renewed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ..model import scores
from ..model.topic import Topic
from ..scripts.call import ScriptCall
from .commands import RECOVER
from .context import Context
from .registry import MAX_KNOWN
from .runner import Runner
from .upkeep import Kept, Part, keep
from .watch import Watch, grace_after_step

#: Seconds for which a center that may not roll leases back does not note again what has ended.
NOTE_AGAIN = 0.5


class Leases:
    """What a center knows of the servers' clocks, and what it may roll back.

    grace: seconds for which a server must have been watched; None for what suits a topic's leases;
        0: leases may be rolled back at once
    clock: monotonic seconds
    """

    def __init__(
        self,
        runner: Runner,
        context: Context,
        *,
        grace: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._place_of = runner.executor.place_of
        self._context = context
        self._clock = clock
        self.grace = grace
        #: server -> what has been seen of it
        self._watches: dict[Hashable, Watch] = {}
        #: topic -> monotonic seconds when it was last noted which of its leases have ended
        self._noted: dict[str, float] = {}

    def recover_until(self, topic: Topic, slot: int) -> int | None:
        """Until when, in microseconds since the epoch by the server's clock, leases that have ended
        may be rolled back in a slot; None if its server has not been watched for long enough."""
        if self.grace == 0:
            return scores.LAST_MS * 1000
        visibility = topic.declaration.limits(self._context.limits).visibility
        return self._watch(topic, slot).until(self._clock(), visibility, self.grace)

    def sample(self, topic: Topic, slot: int, now_us: int, sent: float) -> None:
        """Learn that the server of a slot showed this time at some moment since `sent`, in
        monotonic seconds."""
        self._watch(topic, slot).sample(now_us, sent, self._clock())

    def note_calls(
        self, topic: Topic, slots: Sequence[int], recover: int = RECOVER
    ) -> list[ScriptCall]:
        """The calls that note which leases have ended. Result of each: :class:`Kept`."""
        visibility = topic.declaration.limits(self._context.limits).visibility
        grace = grace_after_step(visibility) if self.grace is None else self.grace
        most = recover * max(len(slots), 1)
        counts = self._context.counts(topic)

        def counted(parse: Callable[[Any], Kept]) -> Callable[[Any], Kept]:
            def parsed(raw: Any) -> Kept:
                kept = parse(raw)
                for event in kept.events:
                    counts.kept(len(event.rolled_back), len(event.died), len(event.dropped))
                return kept

            return parsed

        calls = [
            keep(
                self._context,
                [(Part(topic, tuple(group)), 0)],
                grace=grace,
                most=most,
                each=recover,
            )
            for group in self._context.groups(slots)
        ]
        return [call._replace(parse=counted(call.parse)) for call in calls]

    def note(self, topic: Topic, slots: Sequence[int], recover: int) -> list[Kept]:
        """Note which leases have ended, unless that was done just now."""
        now = self._clock()
        if not slots or now < self._noted.get(topic.name, float("-inf")) + NOTE_AGAIN:
            return []
        if len(self._noted) > MAX_KNOWN:
            self._noted.clear()
        self._noted[topic.name] = now
        calls = self.note_calls(topic, slots, recover)
        if not self._runner.clustered:
            return self._runner.run_all(calls)
        # What one node cannot do keeps nobody from the others: a pop of its slots will tell.
        return [kept for kept in self._runner.run_each(calls) if isinstance(kept, Kept)]

    def _watch(self, topic: Topic, slot: int) -> Watch:
        place = self._place_of(topic.slot(slot).announced_times)
        found = self._watches.get(place)
        return found or self._watches.setdefault(place, Watch())
