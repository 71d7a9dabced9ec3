"""Where the messages of rows are in Redis."""

from __future__ import annotations

from collections.abc import Sequence

from ..center.center import TimeoutCenter
from ..model import results
from ..model.keys import Slot
from .records import Row, is_of
from .store import CHUNK
from .uniques import is_unique

#: What a row's message is found to be.
THERE, DEAD, MISSING = "there", "dead", "missing"


def states_in_redis(center: TimeoutCenter, rows: Sequence[Row]) -> list[str]:
    """Where the message of each row is."""
    found: list[str] = []
    for start in range(0, len(rows), CHUNK):
        found += _states(center, rows[start : start + CHUNK])
    return found


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
