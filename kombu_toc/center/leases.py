"""Looks at leases, and rolls back those that have ended.

Scripts decide which (``scripts/upkeep.lua``): they keep on the server since when a slot has been
looked at, so it does not matter who looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from redis.exceptions import NoPermissionError

from ..errors import NotPermittedError
from ..model.topic import Topic
from ..scripts.call import ScriptCall
from .calls import RECOVER
from .clock import MAY, Watch
from .core import CenterPart, Core
from .pop_wait import sleep_of
from .registry import MAX_KNOWN
from .runner import BROKEN
from .upkeep import Kept, Part, keep

#: Seconds for which a center does not look again at the leases of a topic.
LOOK_AGAIN = 0.5

#: Seconds after which it is known whether a lease that had ended is renewed, unless the server was
#: restarted just now.
DECIDED = 2.75


class Leases(CenterPart):
    """Looks at leases for a center, and knows what it has seen of the servers' clocks.

    grace: seconds for which a slot must have been watched; None for what suits each lease; 0:
        leases are rolled back at once, by pops
    """

    def __init__(self, core: Core, *, grace: float | None) -> None:
        super().__init__(core)
        self._place_of = core.runner.executor.place_of
        self._sleep = sleep_of(core.runner.client)
        self.grace = grace
        #: server -> what has been seen of it
        self._watches: dict[Hashable, Watch] = {}
        #: topic, and slots if not all -> monotonic seconds when their leases were last looked at
        self._looked: dict[Hashable, float] = {}

    def sample(self, topic: Topic, slot: int, now_us: int, sent: float) -> None:
        """Learn that the server of a slot showed this time at some moment since `sent`, in
        monotonic seconds."""
        self._watch(topic, slot).sample(now_us, sent, time.monotonic())

    def look_calls(
        self, topic: Topic, slots: Sequence[int], recover: int = RECOVER
    ) -> list[ScriptCall]:
        """The calls that look at leases. Result of each: :class:`Kept`."""
        visibility = topic.declaration.limits(self._context.limits).visibility
        counts = self._context.counts(topic)

        def counted(parse: Callable[[Any], Kept], slot: int, sent: float) -> Callable[[Any], Kept]:
            def parsed(raw: Any) -> Kept:
                kept = parse(raw)
                self.sample(topic, slot, kept.now_us, sent)
                for event in kept.events:
                    counts.kept(len(event.rolled_back), len(event.died), len(event.dropped))
                    counts.expire(len(event.expired), event.to_dead)
                return kept

            return parsed

        now = time.monotonic()
        calls = []
        for group in self._context.groups(slots):
            may = MAY if self.grace == 0 else self._watch(topic, group[0]).may(now, visibility)
            call = keep(
                self._context,
                [(Part(topic, tuple(group)), may)],
                grace=self.grace,
                most=recover * len(group),
                each=recover,
            )
            calls.append(call._replace(parse=counted(call.parse, group[0], now)))
        return calls

    def look(
        self, topic: Topic, slots: Sequence[int], recover: int = RECOVER, what: Hashable = None
    ) -> list[Kept]:
        """Look at leases, unless that was done just now.

        what: names these slots, if they are not all that pops ask for
        """
        now, what = time.monotonic(), (topic.name, what)
        if not slots or now < self._looked.get(what, float("-inf")) + LOOK_AGAIN:
            return []
        if len(self._looked) > MAX_KNOWN:
            self._looked.clear()
        self._looked[what] = now
        calls = self.look_calls(topic, slots, recover)
        try:
            found = self._runner.run_each(calls)
        except BROKEN:
            self._watch(topic, slots[0]).missed()
            raise
        for group, kept in zip(self._context.groups(slots), found, strict=True):
            if isinstance(kept, Kept):
                continue
            if not self._runner.clustered:
                raise kept
            # What one node cannot do keeps nobody from the others: a pop of its slots will tell.
            self._watch(topic, group[0]).missed()
        return [kept for kept in found if isinstance(kept, Kept)]

    def free(self, topic: Topic, slot: int, id: str) -> bool:
        """Look at the leases of a slot, because a delivered message there keeps another one from
        being put. If its lease has ended, wait until it is known whether its holder lives.

        id: the one that it is kept under

        Returns whether to try again: a message was rolled back, or this one is settled. A user who
        may not leaves it to upkeep.
        """
        until = time.monotonic() + DECIDED
        try:
            while not any(kept.events for kept in self.look(topic, [slot], what=slot)):
                score = self._runner.client.zscore(topic.slot(slot).prepare, id)
                if score is None:
                    return True
                now = time.monotonic()
                if now >= until or score > self._watch(topic, slot).server_us(now):
                    return False
                self._sleep(LOOK_AGAIN / 2)
        except (NotPermittedError, NoPermissionError):
            return False
        return True

    def _watch(self, topic: Topic, slot: int) -> Watch:
        place = self._place_of(topic.slot(slot).announced_times)
        found = self._watches.get(place)
        return found or self._watches.setdefault(place, Watch())
