"""Finds inconsistencies in a topic's keys, and mends them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator

from ..model.keys import Slot
from ..model.results import OTHER_TYPE, Fault
from ..model.topic import Topic
from ..scripts.call import PageSize, as_bytes, literal_pattern, text
from .admin_commands import AdminCommands
from .context import Context
from .registry import Registry
from .runner import BROKEN, Away, Runner, misused

#: Ids that one call of check looks at, about.
CHECK_STEP = 200


class Repair:
    """Checks and repairs topics, which may be in use meanwhile."""

    def __init__(
        self, runner: Runner, registry: Registry, context: Context, commands: AdminCommands
    ) -> None:
        self._runner = runner
        self._registry = registry
        self._commands = commands
        self._context = context

    def check(self, topic: str, *, step: int = CHECK_STEP) -> list[Fault]:
        """Look for inconsistencies; return what was found.

        That is: an id that is not in exactly one of store, prepare and dead with its body, a
        body or a reason without an id, a message under a priority step that the topic lacks,
        and a slot whose next time is not announced. (What a consumer that died had claimed is no
        fault: the others read all slots every second.)

        step: about how many ids one call to the server looks at; the topic may be live

        Raises PartialError, with what was found on the others, while nodes of a Cluster are away.
        """
        return self._check(topic, step, repair=False)

    def repair(self, topic: str, *, step: int = CHECK_STEP) -> list[Fault]:
        """Check, and mend each fault at the moment it is found; return what was mended.

        How: see NO_BODY and the others. A body without an id goes to DeadQueue.
        """
        return self._check(topic, step, repair=True)

    def _check(self, topic: str, step: int, *, repair: bool) -> list[Fault]:
        declared = self._registry.standing(topic)
        found: list[Fault] = []
        away = Away()
        stores, copies = self._other_keys(declared, step, away)
        for slot in declared.all_slots():
            wrong = self._wrong_types(declared, slot, stores[slot.number], repair, away)
            if wrong is None:
                continue
            found += wrong
            if repair or not wrong:  # scripts can do nothing with it as it is
                found += self._check_slot(declared, slot, stores[slot.number], step, repair, away)
        if any(fault.kind == OTHER_TYPE for fault in found) and not repair:
            return away.checked(list(dict.fromkeys(found)))
        rest = []
        if declared.declaration.lanes:
            for slots in self._context.groups(declared.all_slots()):
                rest.append(self._commands.recount(declared, slots, repair=repair))
        for slot, key in copies:
            rest.append(self._commands.check_copies(declared, slot, key, repair=repair))
        for call in rest:
            [faults] = self._runner.run_there([call], away)
            found += faults or ()
        return away.checked(list(dict.fromkeys(found)))

    def _wrong_types(
        self, topic: Topic, slot: Slot, in_use: set[int], repair: bool, away: Away
    ) -> list[Fault] | None:
        """What :meth:`_check_types` finds; None if the slot's node of a Cluster is away."""
        place = self._runner.executor.place_of(slot.body)
        error = self._runner.not_reached(place)
        if error is None:
            try:
                return list(self._check_types(topic, slot, in_use, repair))
            except BROKEN as exc:
                if not self._runner.clustered:
                    raise
                self._runner.lost(place, exc)
                error = exc
        away.note(slot.body, place, error)
        return None

    def _check_types(
        self, topic: Topic, slot: Slot, in_use: set[int], repair: bool
    ) -> Iterator[Fault]:
        """Keys that another program has written. Each is renamed, and stays on its node."""
        client = self._runner.client
        for key in misused(client, [*slot.all(), *map(slot.store, sorted(in_use))]):
            stem, _, rest = key.rpartition("}:")
            aside = f"{stem}}}:aside:{time.time_ns()}:{rest}"
            if repair:
                client.renamenx(as_bytes(key), as_bytes(aside))
            yield Fault(topic.name, slot.number, OTHER_TYPE, key, (aside,))

    def _check_slot(
        self, topic: Topic, slot: Slot, in_use: set[int], step: int, repair: bool, away: Away
    ) -> Iterator[Fault]:
        """in_use: priority steps that the topic lacks and that messages wait under."""
        others = sorted({*topic.other_steps(), *in_use} - {*topic.steps})
        own = len(slot.script_keys)
        parts = [
            *range(1, own + 1),
            *(own + at for at, other in enumerate(others, 1) if other in in_use),
        ]
        for part in parts:
            cursor = "0"
            # Redis reads the bodies with their ids.
            page_size = PageSize(step, self._context.pop_bytes)
            while True:
                call = self._commands.check(
                    topic, slot, others, part, cursor, step=page_size.next, repair=repair
                )
                [checked] = self._runner.run_there([call], away)
                if checked is None:
                    return
                faults, cursor, size = checked
                page_size.read(size)
                yield from faults
                if cursor == "0":
                    break

    def _other_keys(
        self, topic: Topic, step: int, away: Away
    ) -> tuple[dict[int, set[int]], list[tuple[Slot, str]]]:
        """Keys that only a look at all keys finds.

        Per slot, the priority steps that the topic lacks and that messages wait under; and the
        copies sets, each with its slot.
        """
        slots = {slot.stem: slot for slot in topic.all_slots()}
        stores: dict[int, set[int]] = defaultdict(set)
        copies = []
        prefix = literal_pattern(topic.slot(0).stem.rpartition("0")[0])
        for raw in self._keys(topic, prefix + "*", step, away):
            key = text(raw)
            stem, brace, rest = key.partition("}:")
            slot = slots.get(stem + brace)
            if slot is None:  # of a topic with a longer name
                continue
            if rest.startswith("copies:"):
                copies.append((slot, key))
            elif rest.startswith("store:"):
                stores[slot.number].add(int(rest.removeprefix("store:")))
        return stores, copies

    def _keys(self, topic: Topic, pattern: str, step: int, away: Away) -> Iterator[bytes]:
        """The keys of all nodes that can be reached."""
        client = self._runner.client
        if not self._runner.clustered:
            yield from client.scan_iter(pattern, count=step)
            return
        for place in client.places():
            error = self._runner.not_reached(place)
            if error is None:
                try:
                    yield from client.client_at(place).scan_iter(pattern, count=step)
                except BROKEN as exc:
                    self._runner.lost(place, exc)
                    error = exc
            if error is not None:
                for slot in topic.all_slots():
                    if client.place_of(slot.body) == place:
                        away.note(slot.body, place, error)
