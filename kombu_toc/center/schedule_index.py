"""Where schedules are: which topics have some, and in which topic one of a name is.

The schedules of a topic are on the node of its slot 0, and what is known of all topics is on
another one: no script changes both. So who creates a schedule notes its place before and after, and
who removes the last one looks again afterwards. A place of which nothing came is told from others
by reading the schedule.

An older release notes topics only, and never takes one away. What it has put is noted by whoever
finds a topic of which it is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from ..model.keys import Keys, Slot, schedule_place
from ..scripts.call import ScriptCall, load, texts
from .registry import AT_ONCE, SET, SORTED_SET, Names, Registry
from .runner import Runner


class ScheduleIndex:
    """Notes where schedules are, and tells it."""

    def __init__(self, runner: Runner, registry: Registry, keys: Keys) -> None:
        self._runner = runner
        self._client = runner.client
        self._registry = registry
        self._noted = (keys.scheduled, keys.scheduled_names, keys.schedule_places)

    # -- read

    def topics(self, prefix: str, after: str, limit: int) -> list[str]:
        """Some topics that have schedules and names that begin with a text, behind a name; sorted.

        It costs as much as it returns, however many topics there are.
        """
        return self._topics().page(prefix, after, limit)

    def all_topics(self) -> list[str]:
        """All topics that have schedules; sorted."""
        return sorted(texts(self._client.smembers(self._noted[0])))

    def of(self, names: Sequence[str]) -> dict[str, list[str]]:
        """By name, the topics in which a schedule of that name is, or was about to be."""
        heads = {name: schedule_place(name) for name in names}
        topics = self._topics()
        calls = [topics.call(head, "", -1, self._noted[2]) for head in heads.values()]
        found: dict[str, list[str]] = {}
        for (name, head), call, places in zip(
            heads.items(), calls, self._runner.run_all(calls), strict=True
        ):
            read = topics.read(call) if places is None else places
            found[name] = [place[len(head) :] for place in read]
        return found

    def _topics(self) -> Names:
        there, names, _ = self._noted
        return Names(self._runner, there, SET, names, self._found)

    def names(self, topic: str) -> Names:
        """The names of a topic's schedules."""
        slot = self._slot(topic)

        def missing(some: list[str]) -> list[str]:
            self._note(topic, some)
            return some

        def gone(some: list[str]) -> None:
            self.gone(topic, some)

        return Names(self._runner, slot.coming, SORTED_SET, slot.schedule_names, missing, gone)

    # -- write

    def note(self, topic: str, names: Sequence[str]) -> None:
        """Schedules are about to be created, or have just been."""
        self._note(topic, names)

    def gone(self, topic: str, names: Iterable[str] = ()) -> None:
        """Schedules of a topic are gone, or were never there. What somebody has put again
        meanwhile is noted again."""
        slot = self._slot(topic)
        left = iter(names)
        some = list(islice(left, AT_ONCE))
        while True:
            is_empty = not self._client.exists(slot.coming)
            self._runner.run(
                ScriptCall(
                    load("unscheduled"),
                    self._noted,
                    (topic, int(is_empty), *(schedule_place(name, topic) for name in some)),
                    bool,
                )
            )
            self._note_again(topic, slot, some, is_empty)
            some = list(islice(left, AT_ONCE))
            if not some:
                return

    def _note_again(self, topic: str, slot: Slot, names: Sequence[str], was_empty: bool) -> None:
        if not names and not was_empty:
            return
        with self._client.pipeline(transaction=False) as pipe:
            pipe.exists(slot.coming)
            for name in names:
                pipe.zscore(slot.coming, name)
            is_there, *times = pipe.execute()
        again = [name for name, at in zip(names, times, strict=True) if at is not None]
        if again or (was_empty and is_there):
            self._note(topic, again)

    def _note(self, topic: str, names: Iterable[str]) -> None:
        self._runner.run(self._noting(topic, names))

    def _noting(self, topic: str, names: Iterable[str]) -> ScriptCall:
        places = [schedule_place(name, topic) for name in names]
        return ScriptCall(load("scheduled"), self._noted, (topic, *places), bool)

    def _slot(self, topic: str) -> Slot:
        return self._registry.resolved(topic).slot(0)

    # -- what an older release has put

    def _found(self, topics: list[str]) -> list[str]:
        """Topics that an older release has noted: the places of their schedules are noted. Those
        that have none any more are taken away; the others are returned."""
        self._registry.learn_unknown(topics)
        slots = [self._slot(topic) for topic in topics]
        with self._client.pipeline(transaction=False) as pipe:
            for slot in slots:
                pipe.zrange(slot.coming, 0, AT_ONCE - 1)
            replies = pipe.execute()
        found, calls = [], []
        with self._client.pipeline(transaction=False) as pipe:
            for topic, slot, some in zip(topics, slots, replies, strict=True):
                if not some:
                    self.gone(topic)
                    continue
                found.append(topic)
                calls.append(self._noting(topic, texts(some)))
                pipe.zadd(slot.schedule_names, dict.fromkeys(some, 0))
            self._runner.run_all(calls)
            pipe.execute()
        for topic, some in zip(topics, replies, strict=True):
            if len(some) == AT_ONCE:  # there are more
                self.names(topic).mend()
        return found
