"""Finds inconsistencies in a topic's keys, and mends them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ..model.keys import Slot
from ..model.results import Fault
from ..model.topic import Topic
from ..scripts.call import PageSize, literal_pattern, text
from .admin_commands import AdminCommands
from .context import Context
from .registry import Registry
from .runner import Runner

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
        stores, copies = self._other_keys(declared, step)
        for slot in declared.all_slots():
            found += self._check_slot(declared, slot, stores[slot.number], step, repair)
        if declared.declaration.lanes:
            for slots in self._context.groups(declared.all_slots()):
                found += self._runner.run(self._commands.recount(declared, slots, repair=repair))
        for slot, key in copies:
            call = self._commands.check_copies(declared, slot, key, repair=repair)
            found += self._runner.run(call)
        return list(dict.fromkeys(found))

    def _check_slot(
        self, topic: Topic, slot: Slot, in_use: set[int], step: int, repair: bool
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
                faults, cursor, size = self._runner.run(call)
                page_size.read(size)
                yield from faults
                if cursor == "0":
                    break

    def _other_keys(
        self, topic: Topic, step: int
    ) -> tuple[dict[int, set[int]], list[tuple[Slot, str]]]:
        """Keys that only a look at all keys finds.

        Per slot, the priority steps that the topic lacks and that messages wait under; and the
        copies sets, each with its slot.
        """
        slots = {slot.stem: slot for slot in topic.all_slots()}
        stores: dict[int, set[int]] = defaultdict(set)
        copies = []
        prefix = literal_pattern(topic.slot(0).stem.rpartition("0")[0])
        for raw in self._runner.client.scan_iter(prefix + "*", count=step):
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
