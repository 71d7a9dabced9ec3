"""Looks messages up by id.

A message is looked for in every slot that could have it, of one topic or of all, in pipelined
round trips: each slot costs O(log n), whatever waits in it. That is the slot that the id picks; of
a topic that was given a slot basis, or that an older release has declared, it is every slot.

Several messages may have an id: a retry has the id of the task that is still running, and a sender
that gives another slot basis puts its message into another slot. All of them are found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from ..errors import ConfigurationError
from ..model.delivery import name_in
from ..model.results import Cancelled, Found, Rescheduled
from ..model.topic import base_of
from ..scripts.call import ScriptCall
from .admin_commands import AdminCommands, Place
from .recording import Far
from .registry import Registry
from .runner import Away, Runner

T = TypeVar("T", Found, Cancelled, Rescheduled)

#: Ids that one call looks for, in one slot.
IDS_PER_CALL = 100

#: Calls that leave together.
CALLS_TOGETHER = 500


def ids_of(id: str | Iterable[str]) -> list[str]:
    """Ids that a caller names. Raises ConfigurationError for what is none."""
    if isinstance(id, str):
        return [id]
    try:
        ids = list(id)
    except TypeError:
        raise ConfigurationError(f"id must be a str, or several of them, not {id!r:.100}") from None
    for one in ids:
        if not isinstance(one, str):
            raise ConfigurationError(f"id must be a str, or several of them, not {one!r:.100}")
    return ids


class Lookup:
    """Finds messages by id. In all of it, `topic` is the name of the topic to look at; without it,
    all declared topics are."""

    def __init__(self, runner: Runner, registry: Registry, commands: AdminCommands) -> None:
        self._runner = runner
        self._registry = registry
        self._commands = commands
        #: what is too far ahead to be in Redis, if there is a task library
        self.far: Far | None = None

    def get(
        self, id: str | Iterable[str], *, topic: str | None = None, basis: str | None = None
    ) -> list[Found]:
        """Look messages up by id, and the copies that share it; an empty list if there is none.

        id: one, or several
        basis: slot basis, if the sender gave one: then only the slots are asked that it picks

        Raises PartialError while a node of a Cluster is away that may have one of the ids, and no
        other node has a message of that id.
        """
        ids = ids_of(id)
        ahead: list[Found] = []
        if self.far is not None and self._registry.far(topic):
            # Before Redis is asked: what is put there meanwhile is found there.
            ahead = self.far.get(ids, topic)
        once: dict[Any, Found] = {}
        away = Away()
        for one in self._get(self.places(ids, topic, basis), away):
            known = self._registry.known(one.topic)
            # A reshard may move the message meanwhile: then it is seen in its old slot and again
            # in its new one.
            moves = known is not None and bool(known.declaration.draining_counts)
            once.setdefault(one._replace(slot=-1) if moves else one, one)
        found = list(once.values())
        if ahead:
            there = {(one.topic, one.body, name_in(one.token)) for one in found}
            found += [
                one for one in ahead if (one.topic, one.body, name_in(one.token)) not in there
            ]
        return self.checked(ids, found, away)

    @staticmethod
    def checked(ids: str | Iterable[str], found: list[T], away: Away) -> list[T]:
        """What was found of some ids. Raises PartialError if one was not, and may be on a node that
        is away."""
        names = {base_of(one.id) for one in found} | {one.id for one in found}
        if away and not names.issuperset([ids] if isinstance(ids, str) else ids):
            return away.checked(found)
        return found

    def places(
        self, id: str | Iterable[str], topic: str | None, basis: str | None
    ) -> Iterator[Place]:
        """Where messages of these ids may be. Without `topic`, replies and the like are not looked
        through: nobody knows their ids."""
        ids = list(dict.fromkeys(ids_of(id)))
        for one in self._registry.select(topic):
            if topic is None and one.declaration.expires and one.declaration.named is False:
                continue
            for slot, some in one.places_of(ids, basis):
                for start in range(0, len(some), IDS_PER_CALL):
                    yield Place(one, slot, some[start : start + IDS_PER_CALL])

    def run_at(
        self, places: Iterator[Place], command: Callable[[Place], ScriptCall], away: Away
    ) -> Iterator[tuple[Place, Any]]:
        """Run a command at each place; the place and the result, where there is one. A bounded
        number of calls leave together."""
        while together := list(itertools.islice(places, CALLS_TOGETHER)):
            results = self._runner.run_there([command(place) for place in together], away)
            for place, result in zip(together, results, strict=True):
                if result is not None:
                    yield place, result
        self._runner.send_counters()

    def _get(self, places: Iterator[Place], away: Away) -> list[Found]:
        # What lies on one server is asked for by one call: most places have nothing, and a call
        # costs more than to look into some.
        ids_per_call = 1 if self._runner.clustered else IDS_PER_CALL

        def calls() -> Iterator[ScriptCall]:
            some: list[Place] = []
            number = 0
            for place in places:
                number += len(place.ids)
                if some and number > ids_per_call:
                    yield self._commands.get(some)
                    some, number = [], len(place.ids)
                some.append(place)
            if some:
                yield self._commands.get(some)

        found: list[Found] = []
        waiting = calls()
        while together := list(itertools.islice(waiting, CALLS_TOGETHER)):
            for part in self._runner.run_there(together, away):
                found += part or ()
        self._runner.send_counters()
        return found
