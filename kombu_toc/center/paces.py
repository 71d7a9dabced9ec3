"""What rates of keys have been used up to, while a topic is given another number of slots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from ..model.message import decode_key, is_hashed
from ..model.topic import Topic, slot_of

#: Keys that one call reads.
LOOK = 500


def move_paces(client: Any, topic: Topic, *, ended: bool) -> None:
    """Have each key's rates, of starts and of puts, know in its new slot what they know in its
    former one. What waits moves with its own; this is for keys of which nothing waits.

    ended: whether nobody uses the former slots any more: then they forget it
    """
    for number in range(topic.slot_span):
        slot = topic.slot(number)
        for name in ("pace", "put_pace"):
            source = getattr(slot, name)
            for page in _pages(client, source):
                for target, used in _by_target(topic, number, page).items():
                    _note(client, source, getattr(topic.slot(target), name), used)
            if ended and number >= topic.slots:
                client.delete(source)


def _pages(client: Any, key: str) -> Iterator[list[tuple[bytes, float]]]:
    cursor = 0
    while True:
        cursor, page = client.zscan(key, cursor, count=LOOK)
        if page:
            yield page
        if not cursor:
            return


def _by_target(
    topic: Topic, number: int, page: list[tuple[bytes, float]]
) -> dict[int, dict[bytes, float]]:
    """What goes from a slot to which others."""
    found: dict[int, dict[bytes, float]] = defaultdict(dict)
    fewest = min(topic.slots, *topic.declaration.draining_counts or (topic.slots,))
    for member, used in page:
        if member in (b"", b":"):  # of the whole topic
            continue
        if is_hashed(name := member.decode()):
            # Any slot may be its own that this one is divided into.
            targets: Iterable[int] = range(number % fewest, topic.slots, fewest)
        else:
            targets = (slot_of(decode_key(name), topic.slots),)
        for target in targets:
            if target != number:
                found[target][member] = used
    return found


def _note(client: Any, source: str, target: str, used: dict[bytes, float]) -> None:
    client.zadd(target, used, gt=True)
    lasts = client.pttl(source)
    if lasts > 0 and client.pttl(target) < lasts:
        client.pexpire(target, lasts)
