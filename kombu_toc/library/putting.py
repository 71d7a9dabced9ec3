"""Puts the messages of rows into Redis, many at once: none that is there already is added again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..center.center import TimeoutCenter
from ..center.put_many import BYTES_PER_CALL, MESSAGES_PER_CALL, put_many_call
from ..model.results import PutTogether
from ..model.topic import Declaration, Topic
from ..scripts.call import ScriptCall
from .records import Row, as_of, now_us, request_of
from .uniques import is_anothers, is_unique, putting


class Putter:
    """Puts rows back.

    declarations: gives what queues were declared with, for those that Redis has forgotten
    on_kept: told the rows whose messages are not put, because others have their unique keys
    """

    def __init__(
        self,
        center: TimeoutCenter,
        declarations: Callable[[], Mapping[str, Declaration]],
        on_kept: Callable[[list[Row]], None] = lambda rows: None,
    ) -> None:
        self._center = center
        self._on_kept = on_kept
        self.declarations = declarations
        #: rows that were not put, because they have expired: whoever has them put records that
        self.expired: list[Row] = []

    def topic(self, name: str) -> Topic:
        """The topic of that name; if Redis has none, it is declared as it was."""
        registry = self._center.registry
        found = registry.recent(name)
        if found is not None:
            return found
        declaration = self.declarations().get(name)
        if declaration is None:
            return registry.topic(name)
        declared: Topic = self._center.run(registry.declare_call(name, declaration))
        return declared

    def put(self, rows: Iterable[Row]) -> int:
        """Put the messages of these rows, those that are due first in the order of the list;
        return how many were not there. Those that have expired are left out."""
        now = now_us()
        by_place: dict[tuple[str, int, int], list[Row]] = defaultdict(list)
        topics: dict[str, Topic] = {}
        unique: list[Row] = []
        for row in rows:
            topic = topics.get(row.topic)
            if topic is None:
                topic = topics[row.topic] = self.topic(row.topic)
            ttl_ms = topic.declaration.limits(self._center.limits).message_ttl
            timely = as_of(row, ttl_ms, now)
            if timely is None:
                self.expired.append(row)
                continue
            row = timely
            if is_unique(row):
                unique.append(row)
                continue
            self._center.registry.admit(topic, row.id, row.basis)
            slot = topic.slot_for(row.basis or row.id).number
            by_place[row.topic, slot, topic.step_index(row.priority)].append(row)
        calls: list[ScriptCall] = []
        of_call: list[tuple[Topic, Sequence[Row]]] = []
        apart: list[ScriptCall] = []
        for (name, slot, step), some in by_place.items():
            topic = topics[name]
            if topic.declaration.put_gates:
                # What is put back does not count among what may be put.
                apart += [self._center.commands.put(topic, request_of(row)) for row in some]
                continue
            for batch in _batches(some):
                flat: list[Any] = []
                for row in batch:
                    flat += (row.id, row.body, row.action_us, row.traits, row.token)
                context = self._center.context
                calls.append(put_many_call(context, topic, topic.slot(slot), step, flat, 5))
                of_call.append((topic, batch))
        added = 0
        for (topic, batch), result in zip(of_call, self._center.run_puts(calls), strict=True):
            assert isinstance(result, PutTogether)
            added += len(batch) - len(result.there) - len(result.taken)
            for number in result.taken:
                apart.append(self._center.commands.put(topic, request_of(batch[number])))
        if apart:
            added += sum(one.added for one in self._center.run_puts(apart))
        return added + (self._put_unique(unique, topics) if unique else 0)

    def _put_unique(self, rows: Sequence[Row], topics: Mapping[str, Topic]) -> int:
        """Put what has a unique key, if no other message has it by now."""
        calls = [putting(self._center, topics[row.topic], row) for row in rows]
        results = self._center.run_puts(calls)
        pairs = list(zip(rows, results, strict=True))
        kept = [row for row, result in pairs if is_anothers(row, result)]
        if kept:
            self._on_kept(kept)
        return sum(bool(result.added) for _, result in pairs)


def _batches(rows: Sequence[Row]) -> Iterable[Sequence[Row]]:
    """Rows, as many as one call may have: bounded in number and in bytes, and each id once."""
    batch: list[Row] = []
    ids: set[str] = set()
    size = 0
    for row in rows:
        full = len(batch) >= MESSAGES_PER_CALL or size + len(row.body) > BYTES_PER_CALL
        if batch and (full or row.id in ids):
            yield batch
            batch, ids, size = [], set(), 0
        batch.append(row)
        ids.add(row.id)
        size += len(row.body)
    if batch:
        yield batch
