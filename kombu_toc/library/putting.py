"""Puts the messages of rows into Redis, many at once: none that is there already is added
again."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..center.center import TimeoutCenter
from ..center.put import Conflict, unique_call
from ..center.put_many import BYTES_PER_CALL, MESSAGES_PER_CALL, put_many_call
from ..center.upkeep import home_of
from ..model import results
from ..model.keys import Slot
from ..model.message import FOR_A_TIME, KEEP_EARLIER, UNIQUE, Claim, Unique, claim_of, decode_key
from ..model.results import PutTogether
from ..model.topic import Declaration, Topic
from ..scripts.call import ScriptCall
from .records import Row, as_of, identity_of, is_of, now_us, request_of
from .store import CHUNK

# -- unique keys of rows

#: The mode of a claim that holds until its message is done.
UNTIL_DONE = "1"

#: The header that says for how long a message has its key.
UNTIL = "x-unique-until"


def is_unique(row: Row) -> bool:
    """Whether a row's message has a unique key."""
    return ";u" in row.traits or ",u" in row.traits


def _claim_of(row: Row, until: Any) -> tuple[Claim, str]:
    """The claim of a row's message, and its other traits.

    until: what its header says of that
    """
    said = row.traits.lstrip(";").split(",")
    own = next(one for one in said if one.startswith("u"))
    others = ",".join(one for one in said if one is not own)
    mode, _, name = own[1:].partition(".")
    shown = decode_key(name).rpartition("\x1f")[2]
    lasts_us = 0
    if int(mode) == FOR_A_TIME:
        # It holds anew. What does not say for how long has it until it is done.
        try:
            lasts_us = claim_of("", Unique(shown, float(until)), row.basis).lasts_us
        except (TypeError, ValueError):
            mode = UNTIL_DONE
    basis = row.basis or shown
    checksum = zlib.crc32(basis.encode("utf-8", "surrogatepass"))
    claim = Claim(shown, name, int(mode), lasts_us, checksum, KEEP_EARLIER, None)
    return claim, f";{others}" if others else ""


def putting(center: TimeoutCenter, topic: Topic, row: Row, *, counted: bool) -> ScriptCall:
    """The call that puts the message of a row with a unique key back. Result: a Put, or a
    Conflict if another message has its key by now."""
    headers = identity_of(row.topic, row.id, row.body, row.traits)[1]
    claim, traits = _claim_of(row, headers.get(UNTIL) if UNIQUE in headers else None)
    goes_on = bool(headers.get("retries")) or bool(headers.get("replaced_task_nesting"))
    basis = row.basis or claim.shown
    request = request_of(row, counted=counted)._replace(traits=traits, basis=basis)
    topic = home_of(center.runner, center.context, topic, claim, basis)
    center.registry.admit(topic, row.id, basis, unique=True)
    return unique_call(
        center.commands, topic, request, claim, goes_on=goes_on, adds=bool(headers.get("retries"))
    ).call


def is_anothers(row: Row, result: Any) -> bool:
    """Whether another message has the key of one that was to be put."""
    return isinstance(result, Conflict) and result.base != row.id


# -- puts the messages of rows into Redis, many at once


@dataclass(eq=False)
class Putter:
    """Puts rows back.

    declarations: gives what queues were declared with, for those that Redis has forgotten
    on_kept: told the rows whose messages are not put, because others have their unique keys
    """

    _center: TimeoutCenter
    declarations: Callable[[], Mapping[str, Declaration]]
    _on_kept: Callable[[list[Row]], None] = lambda rows: None

    def __post_init__(self) -> None:
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
        declared: Topic = self._center.runner.run(registry.declare_call(name, declaration))
        return declared

    def put(self, rows: Iterable[Row], *, counted: bool = False) -> int:
        """Put the messages of these rows, those that are due first in the order of the list;
        return how many were not there. Those that have expired are left out.

        counted: whether they are put for the first time, and count among what may be put
        """
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
                puts = self._center.commands.put
                apart += [puts(topic, request_of(row, counted=counted)) for row in some]
                continue
            for batch in _batches(some):
                flat: list[Any] = []
                for row in batch:
                    flat += (row.id, row.body, row.action_us, row.traits, row.token)
                context = self._center.context
                calls.append(put_many_call(context, topic, topic.slot(slot), step, flat, 5))
                of_call.append((topic, batch))
        added = 0
        for (topic, batch), result in zip(
            of_call, self._center.runner.run_puts(calls), strict=True
        ):
            assert isinstance(result, PutTogether)
            added += len(batch) - len(result.there) - len(result.taken)
            for number in result.taken:
                apart.append(self._center.commands.put(topic, request_of(batch[number])))
        if apart:
            added += sum(one.added for one in self._center.runner.run_puts(apart))
        return added + (self._put_unique(unique, topics, counted) if unique else 0)

    def _put_unique(self, rows: Sequence[Row], topics: Mapping[str, Topic], counted: bool) -> int:
        """Put what has a unique key, if no other message has it by now."""
        calls = [putting(self._center, topics[row.topic], row, counted=counted) for row in rows]
        results = self._center.runner.run_puts(calls)
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


# -- where the messages of rows are in Redis

#: What a row's message is found to be.
THERE, DEAD, MISSING = "there", "dead", "missing"


def states_in_redis(center: TimeoutCenter, rows: Sequence[Row]) -> list[str]:
    """Where the message of each row is."""
    found: list[str] = []
    for start in range(0, len(rows), CHUNK):
        found += _states(center, rows[start : start + CHUNK])
    return found


def missing_of(center: TimeoutCenter, rows: Sequence[Row]) -> list[Row]:
    """The rows whose messages are not in Redis."""
    states = zip(rows, states_in_redis(center, rows), strict=True)
    return [row for row, state in states if state == MISSING]


def _states(center: TimeoutCenter, rows: Sequence[Row]) -> list[str]:
    found = [MISSING] * len(rows)
    # Each slot is asked once for all: there may be many that merely wait for a worker.
    of_slot: dict[str, tuple[Slot, list[int]]] = {}
    for place, row in enumerate(rows):
        topic = center.registry.resolved(row.topic)
        for slot in topic.slots_for(row.basis or row.id):
            of_slot.setdefault(slot.body, (slot, []))[1].append(place)
    with center.client.pipeline(transaction=False) as pipe:
        for slot, places in of_slot.values():
            names = [name for place in places for name in _names(rows[place])]
            pipe.hmget(slot.body, names)
            pipe.zmscore(slot.dead, names)
            pipe.hmget(slot.tokens, names)
        answers = iter(pipe.execute())
    for _, places in of_slot.values():
        bodies, dead, tokens = next(answers), next(answers), next(answers)
        for at, place in enumerate(places):
            # Under the id there may be another message; then it is known by a name of its own.
            at += at if is_of(rows[place], bodies[2 * at], tokens[2 * at]) else at + 1
            if bodies[at] is not None:
                found[place] = THERE if dead[at] is None else DEAD
    for place, row in enumerate(rows):
        if found[place] == MISSING and is_unique(row):
            found[place] = _elsewhere(center, row)
    return found


def _elsewhere(center: TimeoutCenter, row: Row) -> str:
    """Where the message of a row is that may have the name of the one whose place it has taken."""
    for one in center.get(row.id, topic=row.topic, basis=row.basis):
        if is_of(row, one.body, one.token.encode()):
            return DEAD if one.state == results.DEAD else THERE
    return MISSING


def _names(row: Row) -> tuple[str, str]:
    """What a row's message is known by in its slot."""
    return row.id, f"{row.id}#{row.token}"
